//! What of the machine runs may have together: memory, and files that are open in this process.

use rustix::process::{Resource, Rlimit};

use crate::sandbox::{SandboxError, Settings};

/// Of the memory that is available when the sandbox starts.
const SHARE: f64 = 0.75;

/// The memory limits of all runs at the same time together. One run always fits.
///
/// # Errors
/// [`SandboxError::Settings`] if the run file's total is below its limit for one run.
pub fn memory_for_runs(settings: &Settings) -> Result<u64, SandboxError> {
    let one = settings.limits.memory_bytes;
    match settings.memory_bytes {
        0 => {
            let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
            // Without /proc/meminfo only the number of runs bounds them.
            Ok(available(&text).map_or(u64::MAX, |bytes| ((bytes as f64 * SHARE) as u64).max(one)))
        }
        total if total < one => Err(SandboxError::Settings {
            field: "memory_bytes".to_string(),
            found: format!("{total} for all runs together, while one may use {one}"),
            remedy: "raise it or lower sandbox.limits.memory_bytes".to_string(),
        }),
        total => Ok(total),
    }
}

/// MemAvailable of proc_meminfo(5), in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Open files of ours for a run: sockets, pipes, handles of its processes and groups. A session keeps fewer.
const FILES_OF_A_RUN: u64 = 12;
/// Open files besides: those of the rest of the program.
const OTHER_FILES: u64 = 512;

/// Raises this process's limit of open files if so many runs at once need it.
///
/// # Errors
/// [`SandboxError::Settings`] with what the system allows and what is needed.
pub fn for_open_files(parallel: usize) -> Result<(), SandboxError> {
    let needed = parallel as u64 * FILES_OF_A_RUN + OTHER_FILES;
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    // None is without limit.
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    let refused = |found: String| SandboxError::Settings {
        field: "parallel".to_string(),
        found,
        remedy: "lower it or raise the hard limit (ulimit -Hn)".to_string(),
    };
    if let Some(maximum) = maximum.filter(|maximum| *maximum < needed) {
        return Err(refused(format!("{parallel} runs at once need {needed} open files, this system allows a process {maximum}")));
    }
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|error| refused(format!("{parallel} runs at once need {needed} open files, which cannot be had ({error})")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Limits;

    #[test]
    fn totals_below_one_run_are_refused() {
        let limits = Limits { memory_bytes: 1000, ..Limits::default() };
        let total = |memory_bytes| memory_for_runs(&Settings { memory_bytes, limits: limits.clone(), ..Settings::default() });
        assert_eq!(total(1000).unwrap(), 1000);
        assert_eq!(
            total(999).unwrap_err().to_string(),
            "sandbox.memory_bytes: 999 for all runs together, while one may use 1000; raise it or lower sandbox.limits.memory_bytes"
        );
        assert!(total(0).unwrap() >= 1000);
        assert_eq!(available("MemTotal: 5 kB\nMemAvailable:   12 kB\n"), Some(12 * 1024));
        assert_eq!(available("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn files_that_no_system_allows_are_refused_in_a_line() {
        assert!(for_open_files(1).is_ok());
        let unlimited = rustix::process::getrlimit(Resource::Nofile).maximum.is_none();
        let refused = for_open_files(1 << 40).map_err(|error| error.to_string());
        assert!(unlimited || refused.is_err_and(|line| line.starts_with("sandbox.parallel: ") && line.contains("open files")));
    }
}
