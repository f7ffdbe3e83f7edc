//! Every program of the catalogue, by itself and in a crowd, in both tiers, as root and as an ordinary user. After each the
//! machine is as it was.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use learner::sandbox::{RunResult, Sandbox, Tier};

use crate::alone::{As, process};
use crate::catalogue::{Program, Runs, controls, hostile};
use crate::host::{Bait, Watch};
use crate::sandbox_for;

/// Runs at the same time in a crowd.
const CROWD: usize = 100;

#[test]
fn by_itself_in_tier_a() {
    process("every_program::by_itself_in_tier_a", As::Caller, || by_itself(Tier::A));
}

#[test]
fn by_itself_in_tier_b() {
    process("every_program::by_itself_in_tier_b", As::Caller, || by_itself(Tier::B));
}

#[test]
fn by_itself_in_tier_a_as_an_ordinary_user() {
    process("every_program::by_itself_in_tier_a_as_an_ordinary_user", As::OrdinaryUser, || by_itself(Tier::A));
}

#[test]
fn by_itself_in_tier_b_as_an_ordinary_user() {
    process("every_program::by_itself_in_tier_b_as_an_ordinary_user", As::OrdinaryUser, || by_itself(Tier::B));
}

#[test]
fn a_hundred_at_once_in_tier_a() {
    process("every_program::a_hundred_at_once_in_tier_a", As::Caller, || a_hundred_at_once(Tier::A));
}

#[test]
fn a_hundred_at_once_in_tier_b() {
    process("every_program::a_hundred_at_once_in_tier_b", As::Caller, || a_hundred_at_once(Tier::B));
}

#[test]
fn a_hundred_at_once_as_an_ordinary_user() {
    process("every_program::a_hundred_at_once_as_an_ordinary_user", As::OrdinaryUser, || a_hundred_at_once(Tier::A));
}

fn here(programs: Vec<Program>) -> Vec<Program> {
    // `LEARNER_TEST_ONLY=013` runs the programs of one item.
    let only = std::env::var("LEARNER_TEST_ONLY").unwrap_or_default();
    programs.into_iter().filter(|program| program.file.starts_with(&only) && program.can_run_here()).collect()
}

/// In turn: what a program may use it has to itself, and what it leaves behind is its own.
fn by_itself(tier: Tier) {
    let Some(sandbox) = sandbox_for(tier, 4) else { return };
    let mut bait = Bait::lay();
    let watch = Watch::begin(&sandbox);
    let mut offences = Vec::new();
    for program in here(hostile()).iter().chain(&here(controls())) {
        let start = Instant::now();
        let results = runs_of(program, &sandbox, &bait.environment);
        let mut found: Vec<String> = results.iter().flat_map(|result| program.offences(result)).collect();
        found.extend(watch.changes());
        found.extend(bait.taken());
        offences.extend(found.into_iter().map(|offence| format!("{} in tier {tier}: {offence}", program.file)));
        if std::env::var_os("LEARNER_TEST_TIMES").is_some() {
            println!("{:6.2} s {} {:?}", start.elapsed().as_secs_f64(), program.file, results[0].verdict);
        }
    }
    assert!(offences.is_empty(), "{}", offences.join("\n"));
}

fn runs_of(program: &Program, sandbox: &Sandbox, environment: &BTreeMap<String, String>) -> Vec<RunResult> {
    match program.runs {
        Runs::InTurn(count) => (0..count).map(|_| program.run(sandbox, environment)).collect(),
        Runs::AtOnce(count) => std::thread::scope(|scope| {
            let runs: Vec<_> = (0..count).map(|_| scope.spawn(|| program.run(sandbox, environment))).collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        }),
    }
}

/// The whole list, and from its start again until a hundred runs are there at once, beside a neighbour who must not notice.
fn a_hundred_at_once(tier: Tier) {
    let Some(sandbox) = sandbox_for(tier, CROWD + 1) else { return };
    let mut bait = Bait::lay();
    let programs = here(hostile());
    let neighbour = controls().into_iter().find(|program| program.file == "busy-for-a-while.py").unwrap();
    let watch = Watch::begin(&sandbox);
    let alone = neighbour.run(&sandbox, &bait.environment);
    let (next, done, offences) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(Vec::new()));
    let together = std::thread::scope(|scope| {
        let (sandbox, environment) = (&sandbox, &bait.environment);
        let beside = scope.spawn(|| {
            let mut results = vec![neighbour.run(sandbox, environment)];
            while !done.load(Ordering::Relaxed) {
                results.push(neighbour.run(sandbox, environment));
            }
            results
        });
        let run_some = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= programs.len().max(CROWD) {
                    break;
                }
                let program = &programs[number % programs.len()];
                let found = program.offences(&program.run(sandbox, environment));
                offences
                    .lock()
                    .unwrap()
                    .extend(found.into_iter().map(|offence| format!("{} in tier {tier}: {offence}", program.file)));
            }
        };
        let crowd: Vec<_> = (0..CROWD).map(|_| scope.spawn(run_some)).collect();
        for run in crowd {
            run.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        beside.join().unwrap()
    });
    let mut offences = offences.into_inner().unwrap();
    for result in &together {
        offences.extend(neighbour.offences(result).into_iter().map(|offence| format!("the neighbour in tier {tier}: {offence}")));
        if (&result.stdout, &result.stderr) != (&alone.stdout, &alone.stderr) {
            offences.push(format!("the neighbour in tier {tier} wrote something else"));
        }
    }
    let seconds = together.iter().map(|result| result.cpu_seconds);
    println!(
        "a neighbour of {CROWD}, tier {tier}: {} runs of {:.3} to {:.3} CPU seconds; by itself {:.3}",
        together.len(),
        seconds.clone().fold(f64::INFINITY, f64::min),
        seconds.fold(0.0, f64::max),
        alone.cpu_seconds
    );
    offences.extend(watch.changes());
    offences.extend(bait.taken());
    assert!(offences.is_empty(), "{}", offences.join("\n"));
}
