//! No server outlives the learner, however either of them ends.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::support::{PATIENCE, Scene, lives, ready, signal, wait_until};

/// All processes that a scene's servers have written down.
fn processes(scene: &Scene) -> Vec<u64> {
    let mut pids = Vec::new();
    for server in 0..scene.gpus as u16 {
        pids.extend(scene.starts(server).iter().map(|start| start["pid"].as_u64().expect("a process")));
        let workers = std::fs::read_to_string(scene.path(&format!("workers-{}", scene.port(server)))).unwrap_or_default();
        pids.extend(workers.lines().map(|line| line.parse::<u64>().expect("a process")));
    }
    pids
}

#[test]
fn stopping_ends_obedient_and_deaf_ones_and_their_workers() {
    let mut scene = Scene::new(2, &["leaves-a-worker", "ignores-sigterm"]);
    scene.settings.stop_seconds = 0.5;
    let servers = scene.start();
    ready(&servers).expect("ready");
    let pids = processes(&scene);
    assert!(pids.len() == 4 && pids.iter().all(|&pid| lives(pid)));
    servers.stop();
    assert!(!pids.iter().any(|&pid| lives(pid)), "stop has waited for the end");
}

#[test]
fn a_worker_ends_with_a_server_that_has_died() {
    let scene = Scene::new(1, &["leaves-a-worker@1"]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    let pids = processes(&scene);
    scene.tell(0, 1, "die");
    wait_until("the end of server and worker", || !pids.iter().any(|&pid| lives(pid)));
    wait_until("the next start", || scene.starts(0).len() == 2);
    ready(&servers).expect("ready again");
}

#[test]
fn a_flood_of_output_is_bounded_and_holds_nothing_up() {
    let mut scene = Scene::new(1, &["floods"]);
    scene.settings.log_bytes = 1 << 20;
    let servers = scene.start();
    ready(&servers).expect("ready");
    let older = scene.log(0).with_extension("log.1");
    wait_until("a full log", || older.exists());
    servers.load_weights(scene.weights("step-1"), &crate::support::patience()).expect("loaded");
    servers.stop();
    let size = |path: &std::path::Path| std::fs::metadata(path).expect("a log").len();
    assert!(size(&scene.log(0)) + size(&older) <= 1 << 20);
}

/// `learner servers` with a scene's settings, ready.
fn command(scene: &Scene, more: &[&str]) -> Child {
    let run_file = scene.path("run.toml");
    let rollout = toml_of(scene);
    std::fs::write(&run_file, format!("[model]\ndirectory = {:?}\n\n[rollout]\n{rollout}", scene.path("start"))).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_learner"));
    command.arg("servers").arg("--config").arg(&run_file).arg("--out").arg(scene.path("run"));
    command.args(["--gpus-per-node", &scene.gpus.to_string()]).args(more).env("RANK", "5");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// The scene's settings that a run file needs.
fn toml_of(scene: &Scene) -> String {
    let settings = &scene.settings;
    format!(
        "command = {:?}\nport = {}\nstop_seconds = {:?}\nhealth_seconds = {:?}\nunhealthy_seconds = {:?}\n",
        settings.command, settings.port, settings.stop_seconds, settings.health_seconds, settings.unhealthy_seconds
    )
}

/// Reads what it prints until it serves.
fn until_serving(child: &mut Child) -> Vec<String> {
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let mut read = Vec::new();
    while !read.last().is_some_and(|line: &String| line.contains("serving at")) {
        read.push(lines.next().unwrap_or_else(|| panic!("ended after {read:?}")).expect("a line"));
    }
    // Whatever it prints from now on is read by nobody, and must not stop it.
    std::thread::spawn(move || lines.count());
    read
}

#[test]
fn a_learner_that_is_killed_takes_its_servers_with_it() {
    let mut scene = Scene::new(2, &["leaves-a-worker", "ignores-sigterm"]);
    scene.settings.stop_seconds = 0.5;
    let mut learner = command(&scene, &[]);
    until_serving(&mut learner);
    let pids = processes(&scene);
    assert_eq!(pids.len(), 4);
    learner.kill().expect("killed");
    learner.wait().expect("waited for");
    let since = Instant::now();
    wait_until("the end of all servers", || !pids.iter().any(|&pid| lives(pid)));
    println!("gone after {:?}", since.elapsed());
}

#[test]
fn a_server_goes_with_its_keeper() {
    let scene = Scene::new(1, &[]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    let first = scene.pid(0, 1);
    let stat = std::fs::read_to_string(format!("/proc/{first}/stat")).expect("a process");
    let keeper = stat.rsplit_once(") ").expect("fields").1.split(' ').nth(1).expect("its parent").parse().expect("a number");
    let name = std::fs::read_to_string(format!("/proc/{keeper}/comm")).expect("a process");
    assert_eq!(name.trim(), "server-keeper");
    signal("KILL", keeper);
    wait_until("the end of the server", || !lives(first));
    wait_until("the next start", || scene.starts(0).len() == 2);
    ready(&servers).expect("ready again");
    assert!(scene.troubles()[0].contains("its keeper was ended by signal 9"), "{:?}", scene.troubles());
}

#[test]
fn the_command_serves_feeds_and_stops_at_a_signal() {
    let scene = Scene::new(2, &[]);
    let mut learner = command(&scene, &["--load", scene.path("step-1").to_str().expect("a path")]);
    let lines = until_serving(&mut learner);
    let address = |server| format!("127.0.0.1:{}", scene.port(server));
    let last = lines.last().expect("a line");
    assert!(last.contains(&address(0)) && last.contains(&address(1)), "{last}");
    assert!(lines.iter().any(|line| line.contains("step-1 on 2 servers after") && line.contains("1 kB each")), "{lines:?}");
    assert_eq!(scene.starts(0)[0]["rank"], serde_json::Value::Null, "what launchers say is not for servers");
    signal("INT", u64::from(learner.id()));
    let since = Instant::now();
    assert_eq!(learner.wait().expect("waited for").code(), Some(0));
    assert!(since.elapsed() < PATIENCE && !processes(&scene).iter().any(|&pid| lives(pid)));
}

#[test]
fn json_is_one_object_and_check_starts_nothing() {
    let scene = Scene::new(1, &[]);
    let run = |more: &[&str]| {
        let output = command(&scene, more).wait_with_output().expect("an end");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_default(), said)
    };
    let (code, report, _) = run(&["--check", "--json"]);
    let line = report["commands"][0].as_str().expect("a line");
    assert!(code == Some(0) && line.contains("CUDA_VISIBLE_DEVICES=0 ") && line.contains("fake_server.py"), "{report}");
    assert!(scene.starts(0).is_empty());
    let (code, report, said) = run(&["--once", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(report["addresses"], serde_json::json!([format!("127.0.0.1:{}", scene.port(0))]));
    assert_eq!((&report["weights"][0]["version"], &report["weights"][0]["bytes"]), (&"start".into(), &1000.into()));
    assert_eq!(report["weights"][0]["servers"][0]["verified"], true);
    let (code, _, said) = run(&["--check", "--set", "rollout.tensor_parallel=2"]);
    assert!(code == Some(2) && said.trim_end().lines().count() == 1 && said.contains("rollout.tensor_parallel = 2"), "{said}");
    let (code, _, said) = run(&["--set", "rollout.command=['false','{model}','{port}']"]);
    assert!(code == Some(1) && said.contains("died: exit status 1") && said.contains("false"), "{said}");
}

/// Training does not sample on servers yet, and says so instead of starting.
#[test]
fn training_refuses_rollout_nodes() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_learner"));
    command.args(["--set", "rollout.nodes=1", "--out"]).arg(folder.path().join("run"));
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.trim_end().lines().count() == 1 && said.contains("rollout.nodes"), "{said}");
    assert!(!folder.path().join("run").exists());
}
