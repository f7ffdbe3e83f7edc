//! Directories on disk.
