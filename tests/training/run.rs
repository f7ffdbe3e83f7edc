//! A whole run, cut to seconds: several ranks find what one finds.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use learner::config::{Layers, RunFile};
use learner::device::CpuDevice;
use learner::grader::Grader;
use learner::model::ModelConfig;
use learner::parallel::{Ranks, World};
use learner::sandbox::{RunResult, RunVerdict, TestRequest, TestRun, Tier};
use learner::stage::{Context, Learner, RunError, RunState, Stage, Summary, run};
use learner::task::{builtin, builtin_tokenizer, builtin_tokenizer_json};
use learner::text::ChatFormat;
use learner::train::{Checkpoints, MetricsLog, Trainer};
use learner::types::Silent;
use serde_json::Value;

use crate::support::{load, on_ranks, policy, tiny};

const SHORT: [&str; 10] = [
    "rft.candidates=30",
    "rft.steps=12",
    "rl.steps=2",
    "rl.tasks_per_step=5",
    "rl.group_size=2",
    "evaluate.tasks=5",
    "evaluate.samples=2",
    "evaluate.structure_tasks=1",
    "evaluate.every=1",
    "engine.max_sequences=4",
];

/// In place of running tests, for which a sandbox needs the program beside this one: whether all pass is drawn from the files.
fn stand_in(request: &TestRequest) -> TestRun {
    let bytes = request.files.values().flat_map(|text| text.bytes());
    let passes = bytes.fold(7u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte as u64)) % 3 > 0;
    TestRun {
        result: RunResult { exit_code: Some(if passes { 0 } else { 1 }), ..RunResult::empty(Tier::B, RunVerdict::Exited) },
        outcomes: request.tests.iter().map(|test| (test.clone(), passes)).collect(),
        started_warm: false,
    }
}

/// Everything at once that a checkpoint must remember of a stage: where the order of tasks is, a rollout sampled with weights that are
/// gone, weights to stay near to. Rewards differ by length, for the policy has learned no more than to end its turns.
const AHEAD: [&str; 11] = [
    "rft.steps=40",
    "rl.steps=4",
    "rl.tasks_per_step=2",
    "rl.steps_ahead=1",
    "rl.sequences_per_update=3",
    "rl.passes=2",
    "rl.filter.groups='reward'",
    "rl.reward.overlong_penalty={ token_limit = 100, buffer_tokens = 100 }",
    "rl.dynamic_sampling={ tasks_per_batch = 2, most_batches = 0 }",
    "rl.loss.kl.coefficient=0.1",
    "rl.loss.entropy_coefficient=0.001",
];

/// The smoke recipe cut shorter, with `more` settings.
fn run_rank(
    world: World<CpuDevice>,
    folder: &Path,
    more: &[&str],
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Summary, RunError> {
    let mut layers = Layers::from_recipe("smoke");
    SHORT.iter().chain(more).for_each(|setting| layers.set(setting));
    run_on(world, folder, &layers.finish().expect("a run file"), usize::MAX, stop)
}

/// One rank's run on so many of the training tasks, from its newest checkpoint if there is one. `stop` is asked as the run asks it.
pub fn run_on(
    world: World<CpuDevice>,
    folder: &Path,
    run_file: &RunFile,
    tasks: usize,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Summary, RunError> {
    let (settings, stages) = (run_file.stage_settings(), run_file.stages().expect("stages"));
    let (pools, tokenizer) = (builtin().expect("pools"), builtin_tokenizer().expect("a tokenizer"));
    let config = ModelConfig { vocabulary: tokenizer.vocabulary_size(), max_positions: 1024, ..tiny() };
    let ranks: Ranks = world.ranks.clone();
    let checkpoint = Checkpoints::new(folder.join("checkpoints"), 2).latest().expect("a folder").map(|(path, _)| path);
    let (state, policy) = match &checkpoint {
        None => (RunState::start("these".into()), policy(&world, config, 3)),
        Some(path) => (Checkpoints::load_state(path).expect("a state"), load(&world, path)),
    };
    let optimizer = stages.get(state.stage).map_or(settings.rl.optimizer, Stage::optimizer);
    let mut trainer = Trainer::new(policy, world, optimizer, &settings.step);
    if let Some(path) = &checkpoint {
        trainer.restore_optimizer(path).expect("moments");
    }
    let lines = state.metrics_lines;
    let mut learner = Learner { trainer, state };
    let log = ranks.first().then(|| MetricsLog::open(&folder.join("metrics.jsonl"), lines).expect("a log"));
    let grader = Grader::with_runner(stand_in, run_file.grader.clone());
    let context = Context {
        ranks: &ranks,
        directory: folder,
        seed: settings.seed,
        stages: &stages,
        settings: &settings,
        tokenizer: &tokenizer,
        format: ChatFormat::new(&tokenizer).expect("a chat format"),
        tokenizer_json: builtin_tokenizer_json(),
        grader: &grader,
        workers: 2,
        sandbox_tier: Tier::B,
        train_tasks: &pools.train[..tasks.min(pools.train.len())],
        held_out: &pools.held_out,
        progress: &Silent,
        stop,
    };
    run(context, &mut learner, log)
}

/// The metrics of a run, and how far two of them are apart: numbers by their difference over their size, all else must be equal.
pub fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("a line")).collect()
}

fn distance(left: &Value, right: &Value) -> f64 {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            let (left, right) = (left.as_f64().expect("a float"), right.as_f64().expect("a float"));
            (left - right).abs() / right.abs().max(1.0)
        }
        (Value::Object(left), Value::Object(right)) => {
            assert!(left.keys().eq(right.keys()), "{left:?} {right:?}");
            let timeless = left.iter().filter(|(key, _)| *key != "seconds" && *key != "speed");
            timeless.map(|(key, left)| distance(left, &right[key])).fold(0.0, f64::max)
        }
        (left, right) => {
            assert_eq!(left, right);
            0.0
        }
    }
}

#[test]
fn several_ranks_find_what_one_finds() {
    let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let (one, many) = (folders[0].path(), folders[1].path());
    let alone = on_ranks(1, 1, |world| run_rank(world, one, &[], &|| false).expect("a whole run")).remove(0);
    let together = on_ranks(3, 1, |world| run_rank(world, many, &[], &|| false).expect("a whole run"));
    // The weights sample before anything is trained: equal bits, whoever sampled.
    let first = |folder: &Path| std::fs::read_to_string(folder.join("episodes/before_rft.jsonl")).expect("episodes");
    assert_eq!(first(one), first(many));
    let demonstrations = |folder: &Path| {
        let text = std::fs::read_to_string(folder.join("episodes/rft-kept.jsonl")).expect("demonstrations");
        text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(demonstrations(one), demonstrations(many));
    let (left, right) = (metrics(many), metrics(one));
    assert_eq!(left.len(), right.len());
    for (left, right) in left.iter().zip(&right) {
        assert!(distance(left, right) <= 1e-4, "{left}\n{right}");
    }
    for summary in &together {
        assert_eq!(summary.mismatch_max, 0.0, "sampled and recomputed log-probabilities are equal bit for bit");
        assert_eq!(summary.weights_sha256, together[0].weights_sha256);
        assert_eq!(summary.evaluation, together[0].evaluation);
        assert_eq!(
            (summary.verdicts_executed, summary.verdicts_remembered),
            (alone.verdicts_executed, alone.verdicts_remembered)
        );
    }
}

/// The metrics without what differs between equal runs.
pub fn timeless(folder: &Path) -> Vec<Value> {
    let mut lines = metrics(folder);
    for fields in lines.iter_mut().filter_map(Value::as_object_mut) {
        fields.remove("seconds");
        fields.remove("speed");
    }
    lines
}

/// Asked in the middle of fine-tuning and in the middle of a rollout, whose episodes are then drawn again, on one rank alone.
#[test]
fn a_rank_that_is_asked_to_stop_ends_all_with_a_checkpoint_and_they_go_on_to_the_same_end() {
    let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let (whole, stopped) = (folders[0].path(), folders[1].path());
    let straight = on_ranks(2, 1, |world| run_rank(world, whole, &[], &|| false).expect("a whole run")).remove(0);
    // (what must have been noted, how often it is then asked for nothing, the steps that are saved). Between two steps it is asked
    // once; so the second time after the evaluation behind the first step of RL is within the rollout of the second.
    for (after, more, saved) in [("\"kind\":\"rft\"", 3, None), ("\"rl_step_1\"", 1, Some(13))] {
        let results = on_ranks(2, 1, |world| {
            let (rank, asked) = (world.ranks.rank(), AtomicUsize::new(0));
            let stop = || rank == 1 && noted(stopped, after) && asked.fetch_add(1, Ordering::Relaxed) >= more;
            run_rank(world, stopped, &[], &stop)
        });
        let latest = Checkpoints::new(stopped.join("checkpoints"), 2).latest().unwrap().expect("a checkpoint").1;
        for result in results {
            assert!(
                matches!(result, Err(RunError::Stopped { steps: 1.. }) if saved.is_none_or(|saved| saved == latest)),
                "{result:?}"
            );
            assert!(matches!(result, Err(RunError::Stopped { steps }) if steps == latest), "{result:?} with checkpoint {latest}");
        }
    }
    let resumed = on_ranks(2, 1, |world| run_rank(world, stopped, &[], &|| false).expect("a whole run")).remove(0);
    assert_eq!(resumed.weights_sha256, straight.weights_sha256);
    assert_eq!(resumed.evaluation, straight.evaluation);
    assert_eq!(timeless(stopped), timeless(whole));
}

/// Whether a line of the metrics has this text.
fn noted(folder: &Path, what: &str) -> bool {
    std::fs::read_to_string(folder.join("metrics.jsonl")).is_ok_and(|text| text.contains(what))
}

#[test]
fn one_step_ahead_with_refills_and_a_reference_a_stopped_run_goes_on_to_the_same_end() {
    for ranks in [1, 2] {
        let folders: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
        let (whole, stopped) = (folders[0].path(), folders[1].path());
        let straight = on_ranks(ranks, 1, |world| run_rank(world, whole, &AHEAD, &|| false).expect("a whole run")).remove(0);
        let lines: Vec<Value> = metrics(whole).into_iter().filter(|line| line["kind"] == "rl").collect();
        let all = |field: &str| lines.iter().map(|line| line[field].as_f64().expect("a number")).collect::<Vec<_>>();
        assert_eq!(all("lag"), [0.0, 1.0, 1.0, 1.0], "the first rollout has none to be behind");
        assert_eq!(all("groups_used"), [2.0; 4]);
        assert!(all("batches").iter().sum::<f64>() > 4.0, "some step had to look further: {:?}", all("batches"));
        assert!(all("updates").iter().all(|&updates| updates == 4.0), "{:?}", all("updates"));
        assert!(all("reference_kl").iter().skip(1).all(|&divergence| divergence > 0.0));
        assert_eq!(straight.mismatch_max, 0.0, "weights are compared with those that sampled");
        // Before the second step, in the middle of the rollout for the third, and between later steps.
        for (after, more) in [("\"lag\":0", 0), ("\"lag\":0", 3), ("\"lag\":1", 1)] {
            let results = on_ranks(ranks, 1, |world| {
                let asked = AtomicUsize::new(0);
                let stop = || noted(stopped, after) && asked.fetch_add(1, Ordering::Relaxed) >= more;
                run_rank(world, stopped, &AHEAD, &stop)
            });
            assert!(results.iter().all(|result| matches!(result, Err(RunError::Stopped { .. }))), "{results:?}");
        }
        let resumed = on_ranks(ranks, 1, |world| run_rank(world, stopped, &AHEAD, &|| false).expect("a whole run")).remove(0);
        assert_eq!(resumed.weights_sha256, straight.weights_sha256, "{ranks} ranks");
        assert_eq!(timeless(stopped), timeless(whole), "{ranks} ranks");
    }
}
