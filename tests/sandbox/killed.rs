//! The end of the learner is the end of its sandboxes.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use learner::sandbox::{Limits, Request, Tier};

use crate::alone::{As, process};
use crate::catalogue::limits;
use crate::host::Watch;
use crate::{TIERS, sandbox_for};

const SANDBOXES: usize = 100;
/// In a process with this variable the test plays the learner that will be killed.
const VICTIM: &str = "LEARNER_TEST_VICTIM";
/// What is promised on an idle machine, and how long a busy one may take.
const PROMISED: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn everything_ends_with_the_learner() {
    process("killed::everything_ends_with_the_learner", As::Caller, || {
        if let Ok(told) = std::env::var(VICTIM) {
            let (tier, seconds) = told.split_once(' ').unwrap();
            return be_the_victim(if tier == "A" { Tier::A } else { Tier::B }, seconds);
        }
        TIERS.into_iter().for_each(kill);
    });
}

/// Runs a hundred programs that stay, and says so once all of them are there.
fn be_the_victim(tier: Tier, seconds: &str) {
    let Some(sandbox) = sandbox_for(tier, SANDBOXES) else { return };
    // A daemon, a child that is deaf, a child in a session of its own: whatever a program may leave.
    let script = "trap '' TERM HUP; (setsid sleep SECONDS &); sleep SECONDS & sleep SECONDS; true".replace("SECONDS", seconds);
    std::thread::scope(|scope| {
        for number in 0..SANDBOXES {
            let sandbox = &sandbox;
            let argv = ["sh", "-c", &script].map(str::to_string).to_vec();
            scope.spawn(move || {
                let limits = Limits { wall_seconds: 1000.0, ..limits() };
                let result = sandbox.run(&Request { argv, limits: Some(limits), ..Request::default() });
                panic!("run {number} has ended: {:?}", result.verdict);
            });
        }
        while sleepers(seconds) < 3 * SANDBOXES {
            std::thread::sleep(Duration::from_millis(50));
        }
        println!("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
}

/// Processes on the machine that sleep for as long as those of the runs do, and nobody else.
fn sleepers(seconds: &str) -> usize {
    let line = format!("sleep\0{seconds}\0");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|entry| std::fs::read(entry.path().join("cmdline")).is_ok_and(|found| found == line.as_bytes())).count()
}

fn kill(tier: Tier) {
    let Some(sandbox) = sandbox_for(tier, 1) else { return };
    let watch = Watch::begin_without(sandbox);
    let seconds = format!("{}", 1_000_000 + std::process::id());
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::everything_ends_with_the_learner", "--nocapture"])
        .env(VICTIM, format!("{tier} {seconds}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("ready")), "tier {tier}: the runs did not start");
    let killed = Instant::now();
    victim.kill().unwrap();
    victim.wait().unwrap();
    while sleepers(&seconds) > 0 {
        assert!(killed.elapsed() < PATIENCE, "tier {tier}: {} processes outlive the learner", sleepers(&seconds));
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = killed.elapsed();
    println!(
        "tier {tier}: all of {SANDBOXES} sandboxes ended {:.3} s after the learner (promised: {} s)",
        took.as_secs_f64(),
        PROMISED.as_secs()
    );
    drop(lines);
    reap_orphans();
    // The next start sweeps what no process was left to remove.
    drop(sandbox_for(tier, 1));
    reap_orphans();
    let left = watch.changes();
    assert!(left.is_empty(), "tier {tier}: {}", left.join("\n"));
}

/// What kept the runs became children of this process. They end right after what they kept.
fn reap_orphans() {
    while rustix::process::wait(rustix::process::WaitOptions::empty()).is_ok() {}
}
