//! Task files, the built-in family, the text they become.

mod command;
mod family;
mod format;
mod grader;
mod shipped;
mod text;
