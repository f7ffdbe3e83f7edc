//! Room for a node's connections among the files that a process may have open.

use super::CliError;
use crate::parallel::Mesh;

/// Files that are open besides: those of sandboxes, devices, checkpoints and strangers at the door.
const OTHERS: u64 = 1024;

/// Most files that a node with so many devices has open. Each rank is connected to all others three times, for what stages say, for
/// links and for checkpoints, to those of its context group once, to rank 0 for signs of life, and listens.
fn needed(mesh: &Mesh, devices: usize) -> u64 {
    let others = mesh.world() - 1;
    let of_each = 3 * others + (mesh.context() - 1) + 2;
    (devices * of_each + others) as u64 + OTHERS
}

/// Raises this process's limit as far as it may, if what is set is too little for the job.
///
/// # Errors
/// One line with what the system allows and what is needed.
#[cfg(unix)]
pub fn make_room(mesh: &Mesh, devices: usize) -> Result<(), CliError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let needed = needed(mesh, devices);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // None is without limit.
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if let Some(maximum) = maximum.filter(|maximum| *maximum < needed) {
        let ranks = mesh.world();
        return Err(CliError::Refused(format!(
            "{ranks} ranks, {devices} of them here, need up to {needed} open files, this system allows a process {maximum}: raise the hard limit (ulimit -Hn)"
        )));
    }
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).map_err(|error| {
        CliError::Refused(format!("{needed} open files are needed and cannot be had ({error}): raise ulimit -n"))
    })
}

#[cfg(not(unix))]
pub fn make_room(_mesh: &Mesh, _devices: usize) -> Result<(), CliError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_connection_of_a_large_job_is_counted() {
        // 8 ranks with 127 others in three groups and 7 in one, a connection to rank 0 and a port each; rank 0 with 127 more.
        let mesh = Mesh::new(16, 8, 8).expect("a mesh");
        assert_eq!(needed(&mesh, 8), 8 * (3 * 127 + 7 + 2) + 127 + OTHERS);
    }

    #[test]
    fn what_no_system_allows_is_refused_in_a_line() {
        let mesh = Mesh::new(2, 1, 1).expect("a mesh");
        assert!(make_room(&mesh, 1).is_ok());
        let unlimited = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.is_none();
        let refused = make_room(&Mesh::new(256, 128, 1).expect("a mesh"), 1 << 20);
        assert!(unlimited || refused.is_err_and(|error| error.exit_code() == 2 && error.to_string().contains("open files")));
    }
}
