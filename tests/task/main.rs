//! Task files, the built-in family, the text they become.

mod attacks;
mod check;
mod command;
mod family;
mod format;
mod grader;
mod separate;
mod shipped;
mod text;
