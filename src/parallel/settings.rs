//! The `[parallel]` section of a run file.

use serde::{Deserialize, Serialize};

use super::mesh::{Mesh, MeshError};
use crate::algorithm::{Problems, SettingErrors};
use crate::collectives::Liveness;
use crate::collectives::launch::DEFAULT_PORT;

/// How the ranks of a run share the work, find each other and notice that one is lost. On how many nodes a run is trained is no
/// setting: it may differ from one start to the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Ranks that share each sequence (context parallel); 0: the degree that `learner plan` finds best, or 1 where the plan does not
    /// know the device.
    pub context: usize,
    /// Rank 0 listens here, where `--coordinator` names no port; rank r, on its own host, at the coordinator's port + r.
    pub port: u16,
    /// How long ranks wait for each other at the start.
    pub rendezvous_seconds: f64,
    /// A rank gives a sign of life this often.
    pub heartbeat_seconds: f64,
    /// A rank that has been silent for so long is lost, and the others stop.
    pub dead_after_seconds: f64,
    /// A rank that lives, but that others have waited for so long without a byte, is taken for hung, and all stop.
    pub stall_seconds: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        let Liveness { heartbeat_seconds, dead_after_seconds, stall_seconds } = Liveness::default();
        Settings {
            context: 0,
            port: DEFAULT_PORT,
            rendezvous_seconds: 600.0,
            heartbeat_seconds,
            dead_after_seconds,
            stall_seconds,
        }
    }
}

impl Settings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.port > 0, "port", self.port, "give a port from 1 to 65535, the same on all nodes");
        let seconds = self.rendezvous_seconds;
        problems.unless((1.0..=1e6).contains(&seconds), "rendezvous_seconds", seconds, "give seconds from 1 to 1000000");
        problems.join(self.liveness().check());
        problems.finish()
    }

    pub fn liveness(&self) -> Liveness {
        Liveness {
            heartbeat_seconds: self.heartbeat_seconds,
            dead_after_seconds: self.dead_after_seconds,
            stall_seconds: self.stall_seconds,
        }
    }

    /// The grid of ranks for a context-parallel degree of `context`, which stands for 0 here.
    ///
    /// # Errors
    /// Names the key and the rule that the ranks break.
    pub fn mesh(&self, nodes: usize, ranks_per_node: usize, context: usize) -> Result<Mesh, String> {
        let degree = if self.context == 0 { context } else { self.context };
        Mesh::new(nodes, ranks_per_node, degree).map_err(|error| match error {
            MeshError::Size(..) => format!("--nodes {nodes} --gpus-per-node {ranks_per_node}: {error}"),
            MeshError::ContextDegree { .. } | MeshError::Uneven { .. } => {
                format!("parallel.context = {degree}, on {nodes} nodes of {ranks_per_node}: {error}")
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named_with_its_key() {
        assert_eq!(Settings::default().check(), Ok(()));
        for (key, settings) in [
            ("parallel.port", Settings { port: 0, ..Settings::default() }),
            ("parallel.rendezvous_seconds", Settings { rendezvous_seconds: 0.0, ..Settings::default() }),
            ("parallel.rendezvous_seconds", Settings { rendezvous_seconds: f64::NAN, ..Settings::default() }),
            ("parallel.heartbeat_seconds", Settings { heartbeat_seconds: -1.0, ..Settings::default() }),
            ("parallel.dead_after_seconds", Settings { dead_after_seconds: 2.0, ..Settings::default() }),
            ("parallel.stall_seconds", Settings { stall_seconds: f64::INFINITY, ..Settings::default() }),
        ] {
            assert!(settings.check().is_err_and(|errors| errors.within("parallel").to_string().starts_with(key)), "{settings:?}");
        }
    }

    #[test]
    fn a_degree_that_is_given_holds_and_another_must_fit() {
        let settings = |context| Settings { context, ..Settings::default() };
        assert_eq!(settings(0).mesh(2, 4, 2).map(|mesh| mesh.context()), Ok(2));
        assert_eq!(settings(4).mesh(2, 4, 2).map(|mesh| mesh.context()), Ok(4));
        for (mesh, words) in [
            (settings(3).mesh(4, 4, 1), ["parallel.context = 3", "divide the 16 ranks"]),
            (settings(12).mesh(3, 8, 1), ["parallel.context = 12", "unevenly"]),
            (settings(0).mesh(1 << 15, 8, 1), ["--nodes 32768 --gpus-per-node 8", "65536"]),
        ] {
            let line = mesh.expect_err("refused");
            assert!(words.iter().all(|word| line.contains(word)), "{line}");
        }
    }
}
