//! Ranks in processes of their own, which are killed and frozen.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use learner::collectives::{Collectives, Failure, Liveness, Reduction, join};

use crate::support::{PATIENCE, free_ports, rendezvous, wait_until};

/// A machine under load may let a process wait for a second or two.
const LIVENESS: Liveness = Liveness { heartbeat_seconds: 0.5, dead_after_seconds: 6.0, stall_seconds: 90.0 };

const RANKS: usize = 4;

/// Not a test: what a process of this binary runs as one rank. It reduces until the world stops, and prints the line.
#[test]
#[ignore = "a rank of the tests below"]
fn rank_process() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<usize>().ok());
    let (Some(port), Some(rank)) = (number("TEST_PORT"), number("TEST_RANK")) else { return };
    let place = join(&rendezvous(port as u16, rank, RANKS, LIVENESS).0).expect("a world");
    let group = place.split(rank % 2).expect("a group");
    println!("ready");
    let mut values = vec![1.0f32; 10_000];
    let error = loop {
        let reduced = place.all_reduce(&mut values, Reduction::Max).and_then(|()| group.barrier());
        if let Err(error) = reduced {
            break error;
        }
    };
    println!("{:?}|{}|{error}", error.failure, error.rank);
}

struct Rank {
    child: Child,
    output: std::path::PathBuf,
}

impl Rank {
    fn printed(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Also when a test has failed, and when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(folder: &std::path::Path) -> Vec<Rank> {
    let port = free_ports(RANKS as u16);
    let start = |rank: usize| {
        let output = folder.join(format!("rank-{rank}"));
        let file = std::fs::File::create(&output).expect("a file");
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "process::rank_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env("TEST_PORT", port.to_string())
            .env("TEST_RANK", rank.to_string())
            .stdout(file)
            .stderr(Stdio::inherit())
            .spawn();
        Rank { child: child.expect("a process"), output }
    };
    let ranks: Vec<Rank> = (0..RANKS).map(start).collect();
    wait_until("the world", || ranks.iter().all(|rank| rank.printed().contains("ready")));
    ranks
}

/// All ranks but `lost` end by themselves, with one line that names it; how long it took.
fn all_name(mut ranks: Vec<Rank>, lost: usize, since: Instant) -> Duration {
    let mut last = String::new();
    for (index, rank) in ranks.iter_mut().enumerate().filter(|(index, _)| *index != lost) {
        wait_until("the end of a rank", || rank.child.try_wait().is_ok_and(|status| status.is_some()));
        let printed = rank.printed();
        last = printed.lines().find(|line| line.contains('|')).unwrap_or_default().to_owned();
        let expected = format!("{:?}|{lost}|rank {lost} (host host-{lost}) is gone: ", Failure::Gone);
        assert!(last.starts_with(&expected), "rank {index}: {printed}");
    }
    println!("{:?}: {last}", since.elapsed());
    since.elapsed()
}

#[test]
fn a_killed_process_is_named_by_all_others() {
    for lost in [2, 0] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = start(folder.path());
        let since = Instant::now();
        ranks[lost].child.kill().expect("a kill");
        let took = all_name(ranks, lost, since);
        assert!(took < PATIENCE);
    }
}

/// As with a link that is down, its connections stay open and nothing comes.
#[test]
#[cfg(unix)]
fn a_process_that_falls_silent_is_named_by_all_others() {
    for lost in [1, 0] {
        let folder = tempfile::tempdir().expect("a folder");
        let ranks = start(folder.path());
        let since = Instant::now();
        ranks[lost].signal("STOP");
        let took = all_name(ranks, lost, since);
        assert!(took.as_secs_f64() > LIVENESS.dead_after_seconds - 2.0 * LIVENESS.heartbeat_seconds, "{took:?}");
    }
}
