//! Task files, the built-in family, the text they become.

mod family;
mod format;
mod shipped;
mod text;
