//! What a sandbox costs: set-up, runs per second, many alive at once, and a repository below it.
//!
//! `cargo bench --bench sandbox`. Each figure stands beside its peers', measured in turns in the same minutes: a bare spawn, the
//! `unshare` tool with six namespaces, and bubblewrap where it is installed. All of them run `/bin/true`.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use learner::sandbox::{Limits, Request, RunResult, Sandbox, Settings, Snapshot, Tier, helper_if_asked};

/// Runs of each kind, one at a time.
const SERIAL: usize = 200;
/// Runs of each kind, so many at a time.
const CROWD: usize = 480;
const AT_A_TIME: usize = 16;
/// Sandboxes that are alive at once.
const ALIVE: usize = 512;
const FILES: usize = 20_000;

const UNSHARE: &[&str] = &[
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--net",
    "--ipc",
    "--uts",
    "--fork",
    "--mount-proc",
    "/bin/true",
];
const BUBBLEWRAP: &[&str] = &[
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--ro-bind",
    "/",
    "/",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--tmpfs",
    "/tmp",
    "/bin/true",
];

fn main() -> ExitCode {
    // This program is its own helper.
    if let Some(code) = helper_if_asked() {
        return code;
    }
    println!("{} cores, load {}", cores(), load());
    let mut failed = false;
    for tier in [Tier::A, Tier::B] {
        let limits = Limits { memory_bytes: 64 << 20, ..Limits::default() };
        let memory_bytes = 1 << 40; // limits, not memory: these programs use next to none
        let settings = Settings { tier: Some(tier), parallel: ALIVE, memory_bytes, limits, ..Settings::default() };
        match Sandbox::start(&settings) {
            Ok(sandbox) => measure(&sandbox),
            Err(error) => {
                println!("tier {tier}: n/a, {error}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn measure(sandbox: &Sandbox) {
    println!("\ntier {}", sandbox.tier());
    let request = Request { argv: vec!["/bin/true".to_string()], ..Request::default() };
    let run = || expect_success(sandbox.run(&request));
    let [mut ours, mut set_up, mut bare, mut unshare, mut bubblewrap] = [const { Vec::new() }; 5];
    for _ in 0..SERIAL {
        let start = Instant::now();
        set_up.push(run().set_up_seconds);
        ours.push(start.elapsed().as_secs_f64());
        bare.extend(spawn(&["/bin/true"]));
        unshare.extend(spawn(UNSHARE));
        bubblewrap.extend(spawn(BUBBLEWRAP));
    }
    println!("one at a time, median ms: set-up {}, whole run {}", median(&mut set_up), median(&mut ours));
    println!("  bare spawn {}, unshare {}, bubblewrap {}", median(&mut bare), median(&mut unshare), median(&mut bubblewrap));

    let (ours, peer) = (rate(|| drop(run())), spawn(BUBBLEWRAP).map(|_| rate(|| _ = spawn(BUBBLEWRAP))));
    let compared = peer.map_or("bubblewrap n/a".to_string(), |peer| format!("bubblewrap {peer:.0}, ratio {:.2}", ours / peer));
    println!(
        "{AT_A_TIME} at a time, runs per second: {ours:.0}, bare spawn {:.0}, {compared}",
        rate(|| _ = spawn(&["/bin/true"]))
    );

    let (most, seconds) = alive_at_once(sandbox);
    println!("alive at once: {most} of {ALIVE}, all of them started after {seconds:.1} s");

    let place = std::env::temp_dir().join(format!("learner-bench-{}", std::process::id()));
    let (empty, full) = (place.join("empty"), place.join("full"));
    make_tree(&empty, 0);
    make_tree(&full, FILES);
    let runs = if sandbox.tier() == Tier::A { SERIAL } else { 10 };
    let [mut none, mut many] = [const { Vec::new() }; 2];
    for _ in 0..runs {
        for (tree, times) in [(&empty, &mut none), (&full, &mut many)] {
            let tree = Snapshot::of_directory(tree).expect("a directory just made");
            let result = expect_success(sandbox.run(&Request { tree: Some(tree), ..request.clone() }));
            times.push(result.set_up_seconds);
        }
    }
    println!("set-up over a tree, median ms: empty {}, {FILES} files {}", median(&mut none), median(&mut many));
    std::fs::remove_dir_all(&place).expect("a tree just made");
}

fn expect_success(result: RunResult) -> RunResult {
    assert!(result.succeeded(), "a run of /bin/true ended with {:?}", result.verdict);
    result
}

/// Seconds that a command takes; `None` where it cannot be run.
fn spawn(argv: &[&str]) -> Option<f64> {
    let start = Instant::now();
    let status = Command::new(argv[0]).args(&argv[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success()).then(|| start.elapsed().as_secs_f64())
}

/// Runs per second with `AT_A_TIME` threads.
fn rate(run: impl Fn() + Sync) -> f64 {
    let (left, start) = (AtomicUsize::new(CROWD), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                    run();
                }
            });
        }
    });
    CROWD as f64 / start.elapsed().as_secs_f64()
}

/// How many sandboxes lived at the same time, and seconds until the last had started.
fn alive_at_once(sandbox: &Sandbox) -> (usize, f64) {
    let request = Request { argv: ["sleep", "20"].map(str::to_string).to_vec(), ..Request::default() };
    let begin = Instant::now();
    let lives: Vec<(Duration, Duration)> = std::thread::scope(|scope| {
        let run = || {
            let result = expect_success(sandbox.run(&request));
            let end = begin.elapsed();
            (end.saturating_sub(Duration::from_secs_f64(result.wall_seconds)), end)
        };
        let threads: Vec<_> = (0..ALIVE).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread of the benchmark")).collect()
    });
    let alive = |moment: Duration| lives.iter().filter(|(start, end)| *start <= moment && moment < *end).count();
    let most = lives.iter().map(|(start, _)| alive(*start)).max().unwrap_or(0);
    let last = lives.iter().map(|(start, _)| *start).max().unwrap_or_default();
    (most, last.as_secs_f64())
}

/// A repository of so many small files, a hundred in a directory.
fn make_tree(place: &Path, files: usize) {
    std::fs::create_dir_all(place).expect("a temporary directory");
    for number in 0..files {
        let directory = place.join(format!("{}", number / 100));
        if number % 100 == 0 {
            std::fs::create_dir(&directory).expect("a temporary directory");
        }
        std::fs::write(directory.join(format!("{number}.py")), "x = 1\n").expect("a temporary file");
    }
}

/// In milliseconds, or `n/a` if there is none.
fn median(seconds: &mut [f64]) -> String {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).map_or("n/a".to_string(), |seconds| format!("{:.2}", seconds * 1e3))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").map_or("n/a".to_string(), |text| text.split(' ').next().unwrap_or("n/a").to_string())
}
