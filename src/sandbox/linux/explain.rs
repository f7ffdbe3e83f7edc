//! Words for what the kernel refuses: which mechanism, what it answered, and how to allow it.

use std::io;

/// A step of a set-up that failed, in one line.
pub fn failed_step(step: &str, errno: i32) -> String {
    format!("{step}: {}", io::Error::from_raw_os_error(errno))
}
