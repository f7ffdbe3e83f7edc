//! What all ranks must have in common before a run begins, compared right after they have met. Each rank tells the others; all
//! come to the same line.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::CliError;
use super::directory::{RUN_FILE, RunDirectory, first_difference};
use super::launch::Node;
use super::train::Training;
use crate::collectives::CollectiveError;
use crate::config::{Layers, RunFile};
use crate::engine::servers::own_program;
use crate::parallel::Ranks;
use crate::stage::CHECKPOINTS;
use crate::train::Checkpoints;

/// What one rank is about to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// Why this rank's node cannot take part: then the others need not wait for it.
    problem: Option<String>,
    version: String,
    /// SHA-256 of the program.
    program: String,
    settings: Value,
    /// SHA-256 of the tasks.
    tasks: String,
    context: usize,
    /// The run is there already, with this newest checkpoint.
    resumes: bool,
    checkpoint: Option<String>,
    /// Since the beginning of 1970, of this host's clock.
    milliseconds: u64,
}

/// Clocks that are further apart are worth a word.
const CLOCKS_APART: Duration = Duration::from_secs(2);

impl Facts {
    pub fn of(run_file: &RunFile, node: &Node, directory: &RunDirectory) -> Facts {
        let settings = serde_json::to_value(run_file).unwrap_or(Value::Null);
        Facts { resumes: directory.resumes, ..Facts::without_run(settings, node.mesh.context()) }
    }

    /// Of work that leaves nothing in a run directory, and needs no tasks.
    pub fn without_run(settings: Value, context: usize) -> Facts {
        Facts {
            problem: None,
            version: env!("CARGO_PKG_VERSION").into(),
            program: program_sha256(),
            settings,
            tasks: String::new(),
            context,
            resumes: false,
            checkpoint: None,
            milliseconds: 0,
        }
    }

    /// With what this node prepared for the run, or why it cannot take part.
    pub fn with(mut self, training: Result<&Training<'_>, &CliError>) -> Facts {
        match training {
            Ok(training) => {
                self.tasks = training.tasks.sha256();
                self.checkpoint = training.checkpoint.as_deref().map(name_of);
            }
            Err(problem) => self.problem = Some(problem.to_string()),
        }
        self
    }
}

/// Compares this rank's facts with those of all others; a warning if clocks are apart.
///
/// # Errors
/// The first rank that differs from rank 0, and in what: on all ranks the same line.
pub fn compare(ranks: &Ranks, facts: &Facts) -> Result<Result<Option<String>, String>, CollectiveError> {
    // All read their clocks at the same moment, but for what a barrier takes.
    ranks.barrier()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let all = ranks.gather(&Facts { milliseconds: now, ..facts.clone() })?;
    let hosts = ranks.hosts();
    Ok(match disagreement(&all, &hosts) {
        Some(line) => Err(line),
        None => Ok(clocks_apart(&all, &hosts)),
    })
}

fn disagreement(all: &[Facts], hosts: &[String]) -> Option<String> {
    let name = |rank: usize| format!("rank {rank} (host {})", hosts[rank]);
    let with_problem = all.iter().enumerate().find_map(|(rank, facts)| Some((rank, facts.problem.as_ref()?)));
    if let Some((rank, problem)) = with_problem {
        return Some(format!("{} cannot take part: {problem}", name(rank)));
    }
    let (first, others) = all.split_first()?;
    others.iter().zip(1..).find_map(|(facts, rank)| {
        let differs = |what: &str, own: &dyn std::fmt::Display, of_first: &dyn std::fmt::Display, remedy: &str| {
            Some(format!("{} has {what} {own}, {} has {of_first}: {remedy}", name(rank), name(0)))
        };
        if facts.version != first.version {
            return differs("version", &facts.version, &first.version, "start the same build on all nodes");
        }
        if facts.program != first.program {
            let remedy = "start the same build on all nodes";
            return differs("a program with SHA-256", &short(&facts.program), &short(&first.program), remedy);
        }
        if let Some((key, own, of_first)) = first_difference(&facts.settings, &first.settings) {
            return differs(&format!("{key} ="), &own, &of_first, "start all nodes with the same settings");
        }
        if facts.tasks != first.tasks {
            let remedy = "give all nodes the same task files";
            return differs("tasks with SHA-256", &short(&facts.tasks), &short(&first.tasks), remedy);
        }
        if facts.context != first.context {
            let remedy = "set parallel.context, which was chosen for different GPUs";
            return differs("a context-parallel degree of", &facts.context, &first.context, remedy);
        }
        let found = |facts: &Facts| match (&facts.checkpoint, facts.resumes) {
            (Some(checkpoint), _) => checkpoint.clone(),
            (None, true) => "no checkpoint".into(),
            (None, false) => "no run".into(),
        };
        if (facts.resumes, &facts.checkpoint) != (first.resumes, &first.checkpoint) {
            return Some(format!(
                "{} finds {} in the run directory, {} finds {}: --out must be on a file system that all nodes share",
                name(rank),
                found(facts),
                name(0),
                found(first)
            ));
        }
        None
    })
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

/// A line about the clock that is furthest from rank 0's.
fn clocks_apart(all: &[Facts], hosts: &[String]) -> Option<String> {
    let first = all.first()?.milliseconds;
    let apart = |rank: usize| all[rank].milliseconds.abs_diff(first);
    let rank = (0..all.len()).max_by_key(|&rank| apart(rank))?;
    (apart(rank) > CLOCKS_APART.as_millis() as u64).then(|| {
        let way = if all[rank].milliseconds > first { "ahead of" } else { "behind" };
        format!(
            "the clock of rank {rank} (host {}) is {:.1} s {way} that of rank 0 (host {}): nothing here depends on it, but times in logs and of files will not fit together",
            hosts[rank],
            apart(rank) as f64 / 1e3,
            hosts[0]
        )
    })
}

/// Of this program's file, or a note that it cannot be read: equal version numbers do not make equal programs.
fn program_sha256() -> String {
    let hash = || -> std::io::Result<String> {
        let mut hash = Sha256::new();
        std::io::copy(&mut std::fs::File::open(own_program()?)?, &mut hash)?;
        Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    };
    hash().unwrap_or_else(|_| "unreadable".into())
}

/// How long a shared file system may take to show what another node has written: the longest that NFS keeps attributes.
const SHOWN_WITHIN: Duration = Duration::from_secs(60);

/// The checkpoint that all go on from. Rank 0 has chosen it, for a moment after a commit not all nodes list the same ones; the others
/// wait until they see it. None where this rank does not come to see it, or there is none: comparing the facts tells all.
///
/// # Errors
/// Why rank 0 cannot choose: on all ranks the same line.
pub fn on_checkpoint(
    ranks: &Ranks,
    run_file: &RunFile,
    directory: &RunDirectory,
    chosen: Option<Result<Option<&Path>, &CliError>>,
) -> Result<Result<Option<PathBuf>, String>, CollectiveError> {
    let told = chosen.map(|chosen| chosen.map(|path| path.map(name_of)).map_err(CliError::to_string));
    let name = match ranks.broadcast::<Result<Option<String>, String>>(told.as_ref())? {
        Ok(name) => name,
        Err(problem) => return Ok(Err(format!("rank 0 (host {}) cannot take part: {problem}", ranks.hosts()[0]))),
    };
    let path = name.map(|name| directory.path.join(CHECKPOINTS).join(name));
    // Where there is no run it makes no sense to wait for its checkpoint.
    let seen = |path: &PathBuf| directory.resumes && is_shown(run_file, || Checkpoints::load_state::<Value>(path).is_ok());
    Ok(Ok(path.filter(seen)))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Waits for what another node has written, as long as that may take.
fn is_shown(run_file: &RunFile, look: impl Fn() -> bool) -> bool {
    let patience = SHOWN_WITHIN.min(Duration::from_secs_f64(run_file.parallel.rendezvous_seconds));
    let deadline = Instant::now() + patience;
    loop {
        match look() {
            true => return true,
            false if Instant::now() >= deadline => return false,
            false => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Rank 0 has written the run file; looks whether this rank sees the same, and asks the others.
///
/// # Errors
/// The first rank that does not see it: on all ranks the same line.
pub fn check_shared(ranks: &Ranks, directory: &Path, run_file: &RunFile) -> Result<Result<(), String>, CollectiveError> {
    ranks.barrier()?;
    let path = directory.join(RUN_FILE);
    let seen = is_shown(run_file, || Layers::from_file(&path).finish().is_ok_and(|seen| seen == *run_file));
    let hosts = ranks.hosts();
    let blind = ranks.gather(&seen)?.iter().position(|seen| !seen);
    Ok(match blind {
        None => Ok(()),
        Some(rank) => Err(format!(
            "rank {rank} (host {}) does not see {}, which rank 0 (host {}) has written: --out must be on a file system that all nodes share",
            hosts[rank],
            path.display(),
            hosts[0]
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            problem: None,
            version: "1.2.3".into(),
            program: "0123456789abcdef".into(),
            settings: serde_json::json!({"rl": {"steps": 3, "group_size": 8}}),
            tasks: "fedcba9876543210".into(),
            context: 2,
            resumes: false,
            checkpoint: None,
            milliseconds: 1_000_000,
        }
    }

    /// What is said if rank 2 of three differs so.
    fn said(change: impl Fn(&mut Facts)) -> Option<String> {
        let mut all = vec![facts(), facts(), facts()];
        change(&mut all[2]);
        disagreement(&all, &["a".into(), "b".into(), "c".into()])
    }

    #[test]
    fn the_rank_that_differs_is_named_with_what() {
        assert_eq!(said(|_| {}), None);
        let expected = "rank 2 (host c) has version 1.2.4, rank 0 (host a) has 1.2.3: start the same build on all nodes";
        assert_eq!(said(|facts| facts.version = "1.2.4".into()).as_deref(), Some(expected));
        for (change, words) in [
            (&(|facts: &mut Facts| facts.program = "ffff".into()) as &dyn Fn(&mut Facts), ["SHA-256 ffff", "0123456789ab:"]),
            (&|facts| facts.settings["rl"]["steps"] = 4.into(), ["rank 2 (host c) has rl.steps = 4", "has 3:"]),
            (&|facts| facts.tasks = "0".into(), ["rank 2 (host c) has tasks with SHA-256 0", "fedcba987654"]),
            (&|facts| facts.context = 1, ["degree of 1", "has 2"]),
            (&|facts| facts.resumes = true, ["rank 2 (host c) finds no checkpoint", "rank 0 (host a) finds no run"]),
            (&|facts| facts.problem = Some("no python3".into()), ["rank 2 (host c) cannot take part", "no python3"]),
        ] {
            let line = said(change).expect("a difference");
            assert!(words.iter().all(|word| line.contains(word)) && !line.contains('\n'), "{line}");
        }
    }

    /// What three ranks go on from: rank 0 has chosen, rank 1 shares its disk, rank 2 has a disk of its own.
    #[test]
    fn all_go_on_from_what_rank_0_has_chosen() {
        let shared = tempfile::tempdir().expect("a folder");
        let apart = tempfile::tempdir().expect("a folder");
        let step = |folder: &Path, step: &str| folder.join(CHECKPOINTS).join(step);
        for (folder, names) in [(&shared, ["step-00000003", "step-00000005"].as_slice()), (&apart, &["step-00000003"])] {
            for name in names {
                std::fs::create_dir_all(step(folder.path(), name)).expect("a folder");
                std::fs::write(step(folder.path(), name).join("state.json"), r#"{"ranks":1,"run":{}}"#).expect("a state");
            }
        }
        let mut run_file = Layers::from_recipe("smoke").finish().expect("a run file");
        run_file.parallel.rendezvous_seconds = 0.2;
        let [first, second, third] = <[Ranks; 3]>::try_from(Ranks::local(3, 60.0)).unwrap_or_else(|_| unreachable!("three"));
        let on = |ranks: &Ranks, folder: &Path, chosen| {
            let directory = RunDirectory { path: folder.to_owned(), resumes: true };
            on_checkpoint(ranks, &run_file, &directory, chosen).expect("ranks that stay")
        };
        let newest = step(shared.path(), "step-00000005");
        let locked = CliError::Refused("another learner is at work".into());
        for (chosen, expected) in [
            (Ok(Some(newest.as_path())), [Some(newest.clone()), Some(newest.clone()), None].map(Ok)),
            (Ok(None), [None, None, None].map(Ok)),
            (Err(&locked), [(); 3].map(|()| Err(format!("rank 0 (host {}) cannot take part: {locked}", first.hosts()[0])))),
        ] {
            let found = std::thread::scope(|scope| {
                let first = scope.spawn(|| on(&first, shared.path(), Some(chosen)));
                let second = scope.spawn(|| on(&second, shared.path(), None));
                let third = scope.spawn(|| on(&third, apart.path(), None));
                [first, second, third].map(|thread| thread.join().expect("a rank"))
            });
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn clocks_apart_are_told_with_the_number() {
        let mut all = vec![facts(), facts(), facts()];
        let hosts = ["a".to_owned(), "b".into(), "c".into()];
        all[1].milliseconds += 1_900;
        assert_eq!(clocks_apart(&all, &hosts), None);
        all[2].milliseconds -= 12_340;
        let line = clocks_apart(&all, &hosts).expect("a warning");
        assert!(line.starts_with("the clock of rank 2 (host c) is 12.3 s behind that of rank 0 (host a)"), "{line}");
    }
}
