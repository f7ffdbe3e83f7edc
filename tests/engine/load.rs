//! New weights by directory.

use learner::engine::servers::ServerKind;
use serde_json::json;

use crate::support::{Scene, patience, ready};

#[test]
fn vllm_is_paused_loaded_cleared_named_and_resumed() {
    let scene = Scene::new(2, &[]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    let loaded = servers.load_weights(scene.weights("step-1"), &patience()).expect("loaded");
    assert_eq!(loaded.len(), 2);
    for (server, loaded) in loaded.iter().enumerate() {
        assert_eq!((loaded.bytes, loaded.restarted, loaded.verified), (1000, false, true));
        assert_eq!(loaded.address, format!("127.0.0.1:{}", scene.port(server as u16)));
        let directory = scene.weights("step-1").directory;
        let expected = [
            json!(["/update_weight_version", {"new_version": "start"}]),
            json!(["/pause?mode=wait", null]),
            json!(["/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}}]),
            json!(["/reset_prefix_cache", null]),
            json!(["/update_weight_version", {"new_version": "step-1"}]),
            json!(["/resume", null]),
        ];
        assert_eq!(scene.requests(server as u16), expected);
    }
    assert_eq!(servers.addresses().len(), 2);
}

#[test]
fn sglang_loads_in_one_request() {
    let mut scene = Scene::new(1, &[]);
    scene.settings.server = ServerKind::Sglang;
    let servers = scene.start();
    ready(&servers).expect("ready");
    let loaded = servers.load_weights(scene.weights("step-1"), &patience()).expect("loaded");
    assert!(loaded[0].verified && !loaded[0].restarted);
    let directory = scene.weights("step-1").directory;
    let expected = [
        json!(["/update_weight_version", {"new_version": "start", "abort_all_requests": false}]),
        json!(["/update_weights_from_disk", {"model_path": directory, "weight_version": "step-1", "flush_cache": true}]),
    ];
    assert_eq!(scene.requests(0), expected);
}

/// It hangs, refuses, or says that it has loaded and has not: the next start has them.
#[test]
fn one_that_cannot_load_is_started_again_with_the_weights() {
    for (server, habit, words) in [
        (ServerKind::Vllm, "hangs-on-load@1", "no answer within"),
        (ServerKind::Vllm, "refuses-load@1", "status 500: {\"error\": \"no\\nroom\"}"),
        (ServerKind::Sglang, "refuses-load@1", "said so"),
    ] {
        let mut scene = Scene::new(2, &[habit]);
        (scene.settings.server, scene.settings.load_seconds) = (server, 2.0);
        let servers = scene.start();
        ready(&servers).expect("ready");
        let loaded = servers.load_weights(scene.weights("step-1"), &patience()).expect("loaded");
        assert!(loaded.iter().all(|loaded| loaded.restarted && loaded.verified), "{habit}: {loaded:?}");
        let directory = scene.weights("step-1").directory;
        assert_eq!(scene.starts(0)[1]["model"], directory.to_str().unwrap());
        let troubles = scene.troubles();
        assert!(
            troubles.iter().all(|line| line.contains("could not load step-1") && line.contains(words)),
            "{habit}: {troubles:?}"
        );
    }
}

#[test]
fn one_that_names_other_weights_is_not_believed() {
    let scene = Scene::new(1, &["forgets-load"]);
    let error = ready(&scene.start()).expect_err("given up").to_string();
    assert!(error.contains("/weight_info: says that it has \"default\", not \"start\""), "{error}");
}

#[test]
fn one_that_knows_no_versions_is_fed_and_said_to_be_unverified() {
    let scene = Scene::new(1, &["old"]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    let loaded = servers.load_weights(scene.weights("step-1"), &patience()).expect("loaded");
    assert!(!loaded[0].verified && !loaded[0].restarted);
}

#[test]
fn a_directory_that_has_gone_ends_a_restart_with_its_name() {
    let scene = Scene::new(1, &[]);
    let servers = scene.start();
    ready(&servers).expect("ready");
    std::fs::remove_dir_all(scene.path("start")).expect("removed");
    scene.tell(0, 1, "die");
    crate::support::wait_until("the end", || servers.given_up().is_some());
    let error = servers.given_up().expect("an error").to_string();
    assert!(error.contains("/start: No such file"), "{error}");
    assert_eq!(scene.starts(0).len(), 1);
}
