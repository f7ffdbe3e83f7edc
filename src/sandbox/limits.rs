//! What a run may use.

use serde::{Deserialize, Serialize};

use crate::algorithm::{Problems, SettingErrors};

const MEBIBYTE: u64 = 1 << 20;

/// The limits of one run, over all of its processes together where not said otherwise.
///
/// CPU time decides; wall time is the backstop for programs that wait. Reaching a limit ends the run with the limit's own
/// verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// From the program's start to its end, by the monotonic clock.
    pub wall_seconds: f64,
    /// User and system time, of ended processes too.
    pub cpu_seconds: f64,
    /// Resident private memory. A single process may reserve four times as much address space without touching it.
    pub memory_bytes: u64,
    /// Processes and threads at the same time.
    pub processes: u64,
    /// The largest single file.
    pub file_bytes: u64,
    /// All files of the run: workspace, temporary files and shared memory.
    pub workspace_bytes: u64,
    /// Kept of each of standard output and error: the first and the last half. A program that writes [`OUTPUT_FACTOR`]
    /// times as much to one of them is stopped.
    pub output_bytes: u64,
}

/// Output beyond `output_bytes` is dropped (and said to be), beyond this many times it ends the run.
pub const OUTPUT_FACTOR: u64 = 16;

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            wall_seconds: 60.0,
            cpu_seconds: 20.0,
            memory_bytes: 1024 * MEBIBYTE,
            processes: 128,
            file_bytes: 64 * MEBIBYTE,
            workspace_bytes: 256 * MEBIBYTE,
            output_bytes: MEBIBYTE,
        }
    }
}

impl Limits {
    /// # Errors
    /// All limits that no program could run under.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let positive = [
            ("wall_seconds", self.wall_seconds),
            ("cpu_seconds", self.cpu_seconds),
            ("memory_bytes", self.memory_bytes as f64),
            ("processes", self.processes as f64),
            ("file_bytes", self.file_bytes as f64),
            ("workspace_bytes", self.workspace_bytes as f64),
            ("output_bytes", self.output_bytes as f64),
        ];
        for (field, value) in positive {
            problems.unless(value > 0.0 && value < 1e15, field, value, "give a number above 0 and below 1e15");
        }
        problems.finish()
    }

    /// Entries (files, directories) of the writable tree: one per 4 KiB, at least 1,024.
    pub fn workspace_entries(&self) -> u64 {
        (self.workspace_bytes / 4096).max(1024)
    }

    /// The wall against single huge allocations, per process; the resident limit is enforced by watching.
    pub fn data_bytes(&self) -> u64 {
        self.memory_bytes.saturating_mul(4).max(self.memory_bytes.saturating_add(256 * MEBIBYTE))
    }
}
