//! Starting, dying, sickening, restarting.

use learner::engine::servers::{Servers, ServersError, Weights};

use crate::support::{PATIENCE, Scene, patience, ready, signal, wait_until};

#[test]
fn every_server_gets_its_gpus_port_and_session() {
    let mut scene = Scene::new(4, &["slow-start"]);
    scene.settings.tensor_parallel = 2;
    let servers = scene.start();
    assert!(servers.addresses().is_empty(), "nothing is ready at once");
    ready(&servers).expect("ready");
    assert_eq!(servers.addresses(), [0, 1].map(|server| format!("127.0.0.1:{}", scene.port(server))));
    for (server, gpus) in [(0, "0,1"), (1, "2,3")] {
        let start = &scene.starts(server)[0];
        assert_eq!((&start["gpus"], &start["visible"], &start["dev_mode"]), (&gpus.into(), &gpus.into(), &"1".into()));
        assert_eq!((&start["session"], &start["group"]), (&start["pid"], &start["pid"]), "of its own");
        let log = std::fs::read_to_string(scene.log(server)).expect("a log");
        assert!(log.starts_with("--- process ") && log.contains(&format!("start 1 on GPUs {gpus}\n")), "{log}");
    }
    assert_eq!(scene.troubles(), Vec::<String>::new());
}

#[test]
fn one_that_dies_at_its_start_is_one_line() {
    let scene = Scene::new(2, &["dies-at-start"]);
    let error = ready(&scene.start()).expect_err("given up").to_string();
    let parts =
        ["server 127.0.0.1:", "died: exit status 3", "ValueError: no such thing", "fake_server.py", "the command was: python3"];
    assert!(parts.iter().all(|part| error.contains(part)) && !error.contains('\n'), "{error}");
    assert_eq!(scene.starts(0).len(), 1, "it would die again of the same");
}

#[test]
fn a_command_that_does_not_exist_is_one_line() {
    let mut scene = Scene::new(1, &[]);
    ready(&scene.start()).expect("ready");
    scene.settings.command[0] = "/no/such/server".to_string();
    let error = ready(&scene.start()).expect_err("given up").to_string();
    assert!(error.contains("exit status 127") && error.contains("/no/such/server: No such file"), "{error}");
    assert!(!error.contains("listening"), "the words of another process in the same log: {error}");
}

#[test]
fn one_that_is_never_healthy_is_given_up_in_time() {
    for (habit, words) in [("never-listens", "cannot be reached"), ("garbage", "not HTTP: what?")] {
        let mut scene = Scene::new(1, &[habit]);
        scene.settings.start_seconds = 3.0;
        let error = ready(&scene.start()).expect_err("given up").to_string();
        assert!(error.contains("rollout.start_seconds") && error.contains(words), "{error}");
    }
}

#[test]
fn a_port_in_use_is_named_and_one_that_becomes_free_is_taken() {
    let mut scene = Scene::new(1, &[]);
    scene.settings.stop_seconds = 0.1;
    let occupant = std::net::TcpListener::bind(("127.0.0.1", scene.port(0))).expect("a port");
    let error = ready(&scene.start()).expect_err("given up").to_string();
    assert!(error.contains(&format!("port {} is in use", scene.port(0))) && error.contains("rollout.port"), "{error}");
    assert!(scene.starts(0).is_empty());
    let servers = scene.start();
    drop(occupant);
    ready(&servers).expect("ready");
}

#[test]
fn one_that_dies_later_comes_back_with_the_newest_weights() {
    let scene = Scene::new(2, &[]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    servers.load_weights(scene.weights("step-1"), &patience()).expect("loaded");
    scene.tell(0, 1, "die");
    wait_until("the restart", || servers.addresses().len() == 1 || scene.starts(0).len() == 2);
    ready(&servers).expect("ready again");
    assert_eq!((servers.addresses().len(), scene.starts(1).len()), (2, 1), "the other one goes on");
    assert_eq!(scene.starts(0)[1]["model"], scene.weights("step-1").directory.to_str().unwrap());
    let last = scene.requests(0).pop().expect("a request");
    assert_eq!(last, serde_json::json!(["/update_weight_version", {"new_version": "step-1"}]));
    let troubles = scene.troubles();
    assert_eq!(troubles.len(), 1, "{troubles:?}");
    assert!(
        troubles[0].contains("exit status 1: ")
            && troubles[0].contains("CUDA error")
            && troubles[0].contains("restart 1 of 1 in 1 s")
    );

    // It may do that once.
    scene.tell(0, 2, "die");
    wait_until("the end", || servers.given_up().is_some());
    let error = servers.load_weights(scene.weights("step-2"), &patience()).expect_err("given up").to_string();
    assert!(error.contains("after 1 restarts, rollout.max_restarts") && error.contains("CUDA error"), "{error}");
}

#[test]
fn killed_frozen_and_sick_ones_are_noticed() {
    let mut scene = Scene::new(3, &[]);
    scene.settings.unhealthy_seconds = 2.0;
    let servers = scene.start();
    ready(&servers).expect("ready");
    signal("KILL", scene.pid(0, 1));
    signal("STOP", scene.pid(1, 1));
    scene.tell(2, 1, "sicken");
    wait_until("restarts", || (0..3).all(|server| scene.starts(server).len() == 2));
    ready(&servers).expect("ready again");
    let troubles = scene.troubles().join("\n");
    for words in ["died: signal 9", "not healthy for 2", "no answer within", "status 503", "engine is dead"] {
        assert!(troubles.contains(words), "{words:?} is not in {troubles}");
    }
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let scene = Scene::new(3, &[]);
    let start = |tensor_parallel, weights: Weights| {
        let settings = learner::engine::servers::Settings { tensor_parallel, ..scene.settings.clone() };
        Servers::start(&settings, &scene.place(), weights, std::sync::Arc::new(|_: &_| {})).err()
    };
    let error = start(2, scene.weights("start")).expect("refused");
    assert!(matches!(&error, ServersError::Settings(problem) if problem.contains("rollout.tensor_parallel = 2")), "{error}");
    assert!(Weights::of(&scene.path("nowhere"), "x").unwrap_err().to_string().contains("nowhere: No such file"));
    std::fs::remove_file(scene.path("start/model.safetensors")).expect("removed");
    assert!(Weights::of(&scene.path("start"), "x").unwrap_err().to_string().contains("no .safetensors file"));
    assert!(scene.starts(0).is_empty() && !scene.path("servers").exists());
}

#[test]
fn waiting_ends_when_it_should() {
    let scene = Scene::new(1, &["never-listens"]);
    let servers = scene.start();
    assert_eq!(servers.ensure_started(&|| true), Err(ServersError::Stopped));
    let since = std::time::Instant::now();
    servers.stop();
    assert!(since.elapsed() < PATIENCE);
}
