//! Run after run: nothing grows.

use learner::sandbox::{Request, RunVerdict, Sandbox, Tier};

use crate::alone::{As, process};
use crate::catalogue::limits;
use crate::host::Watch;
use crate::sandbox_for;

/// Runs before the first look at memory: by then every buffer has had its size.
const WARM_UP: usize = 50;
/// What the memory of this process may grow by: less than one page a run.
const GROWTH: u64 = 1 << 20;

#[test]
fn five_hundred_runs_leave_nothing() {
    process("soak::five_hundred_runs_leave_nothing", As::Caller, || {
        soak(Tier::A, 300);
        soak(Tier::B, 200);
    });
}

/// `tests/acceptance.sh sandbox:soak`.
#[test]
#[ignore = "takes minutes"]
fn ten_thousand_runs_leave_nothing() {
    process("soak::ten_thousand_runs_leave_nothing", As::Caller, || {
        soak(Tier::A, 10_000);
        soak(Tier::B, 10_000);
    });
}

fn soak(tier: Tier, count: usize) {
    let Some(sandbox) = sandbox_for(tier, 2) else { return };
    (0..WARM_UP).for_each(|number| run(&sandbox, number));
    let (watch, before) = (Watch::begin(&sandbox), resident_bytes());
    (0..count).for_each(|number| run(&sandbox, number));
    let (changes, after) = (watch.changes(), resident_bytes());
    println!("{count} runs in tier {tier}: {} changes, {} KiB before, {} KiB after", changes.len(), before / 1024, after / 1024);
    assert!(changes.is_empty(), "{}", changes.join("\n"));
    assert!(after < before + GROWTH, "memory of the learner grew from {before} to {after} bytes");
}

/// One of the ways in which a run can end, in turn.
fn run(sandbox: &Sandbox, number: usize) {
    let (script, verdict) = match number % 25 {
        0 => ("sleep 1000 & (setsid sleep 1000 &) ; mkdir -p a/b && echo hi > a/b/c", RunVerdict::Exited),
        1 => ("kill -KILL $$", RunVerdict::Signaled),
        2 => ("exec head -c 2000000 /dev/zero", RunVerdict::OutputLimit),
        3 => ("exec head -c 20000000 /dev/zero > large", RunVerdict::DiskLimit),
        _ => ("echo hi", RunVerdict::Exited),
    };
    let argv = ["sh", "-c", script].map(str::to_string).to_vec();
    let result = sandbox.run(&Request { argv, limits: Some(limits()), ..Request::default() });
    assert_eq!(result.verdict, verdict, "run {number}: {}", String::from_utf8_lossy(&result.stderr));
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
