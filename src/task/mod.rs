//! Task files and the built-in task families.
