//! Runs that list their stages: each goes on by itself, wherever it was killed, on one rank and on two.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use learner::config::{Layers, RunFile};
use learner::model::ModelConfig;
use learner::stage::{RunError, Summary};
use learner::task::builtin_tokenizer;
use learner::train::Checkpoints;
use learner::types::Episode;
use serde_json::Value;

use crate::run::{metrics, run_on, timeless};
use crate::support::on_ranks;

/// Of the built-in training tasks.
const TASKS: usize = 30;

/// Every kind of stage, the policy's own attempts and growing context among them.
const PIPELINE: &str = r#"
[agent]
bad_call_ends = false
system_prompt = "mend it"
[rft]
candidates = 150
batch_sequences = 4
[rl]
steps = 2
tasks_per_step = 5
group_size = 4
[evaluate]
tasks = 4
samples = 2
structure_tasks = 1
every = 0
k = [2]
[checkpoint]
every_rft_steps = 7

[[stages]]
name = "base"
kind = "evaluate"
[[stages]]
name = "warm"
kind = "rft"
rft.steps = 90
[[stages]]
name = "own"
kind = "rft"
agent.system_prompt = ""
rft = { collect = "policy", tasks = 10, attempts_per_task = 6, keep_per_task = 2, passes = 2, batch_sequences = 2, demonstration = "mend it" }
[[stages]]
name = "stage1"
kind = "rl"
[[stages]]
name = "harder"
kind = "curriculum"
from = "stage1"
drop_unsolved = false
[[stages]]
name = "stage2"
kind = "rl"
agent.max_tokens = 1500
model.rope = { rope_type = "yarn", factor = 2.0 }
[[stages]]
name = "end"
kind = "evaluate"
"#;

fn run_file(text: &str) -> RunFile {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).expect("a file");
    let mut layers = Layers::from_recipe("smoke");
    layers.add_file(&path);
    layers.finish().unwrap_or_else(|error| panic!("{error}"))
}

/// Copies what a kill at this moment would leave: checkpoints first, of each its mark last, and the metrics after them.
fn copy_as_killed(from: &Path, to: &Path) {
    let mut entries: Vec<PathBuf> = from.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort_by_key(|path| (path.is_file(), path.file_name() == Some("DONE".as_ref()), path.clone()));
    std::fs::create_dir_all(to).expect("a folder");
    for path in entries {
        let place = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_as_killed(&path, &place);
        } else {
            // What is gone by now is gone after the kill too.
            let _ = std::fs::copy(&path, &place);
        }
    }
}

fn lines(folder: &Path, stage: &str, kind: &str) -> Vec<Value> {
    let of_stage = |line: &Value| line["stage"] == stage && line["kind"] == kind;
    metrics(folder).into_iter().filter(of_stage).collect()
}

/// (a name, what the metrics must hold, how often the run then asks whether to stop before it is killed). The first two, after which
/// almost all is done again, are for one rank alone.
const KILLS: [(&str, &str, usize); 8] = [
    ("evaluate", "", 2),
    ("rft", "\"stage\":\"warm\",\"step\":10,", 0),
    ("collection", "\"stage\":\"warm\",\"step\":90,", 6),
    ("own attempts", "\"stage\":\"own\",\"step\":2,", 0),
    ("rl", "\"stage\":\"stage1\",\"step\":1,", 5),
    ("after the curriculum", "\"kind\":\"curriculum\"", 3),
    ("longer context", "\"stage\":\"stage2\",\"step\":1,", 4),
    ("the last evaluation", "\"stage\":\"stage2\",\"step\":2,", 4),
];

#[test]
fn a_kill_in_any_kind_of_stage_changes_nothing_on_one_rank_and_on_two() {
    let run_file = run_file(PIPELINE);
    for (ranks, kills) in [(1, &KILLS[..]), (2, &KILLS[2..])] {
        let folder = tempfile::tempdir().expect("a folder");
        let whole = folder.path().join("whole");
        std::fs::create_dir(&whole).expect("a folder");
        // How often it was asked since what each kill waits for was noted.
        let asked = Mutex::new([0; KILLS.len()]);
        let watch = || {
            let text = std::fs::read_to_string(whole.join("metrics.jsonl")).unwrap_or_default();
            let mut asked = asked.lock().expect("no test panics here");
            for (index, (name, noted, more)) in KILLS.iter().enumerate() {
                if text.contains(noted) {
                    asked[index] += 1;
                    if asked[index] == more + 1 {
                        copy_as_killed(&whole, &folder.path().join(name));
                    }
                }
            }
        };
        let straight = on_ranks(ranks, 1, |world| {
            let first = world.ranks.first();
            let stop = || {
                if first {
                    watch();
                }
                false
            };
            run_on(world, &whole, &run_file, TASKS, &stop).expect("a whole run")
        })
        .remove(0);
        check_pipeline(&whole, &straight);
        for (name, _, _) in kills {
            let killed = folder.path().join(name);
            assert!(killed.is_dir(), "{ranks} ranks: never killed in {name}");
            let resumed =
                on_ranks(ranks, 1, |world| run_on(world, &killed, &run_file, TASKS, &|| false).expect("the rest")).remove(0);
            assert_eq!(resumed.weights_sha256, straight.weights_sha256, "{ranks} ranks, {name}");
            assert_eq!(resumed.evaluation, straight.evaluation, "{ranks} ranks, {name}");
            assert_eq!(timeless(&killed), timeless(&whole), "{ranks} ranks, {name}");
        }
    }
}

/// What the straight run must have done for the kills to say anything.
fn check_pipeline(folder: &Path, summary: &Summary) {
    let names: Vec<&str> = summary.stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["base", "warm", "own", "stage1", "harder", "stage2", "end"]);
    let steps: Vec<usize> = summary.stages.iter().map(|stage| stage.steps).collect();
    assert_eq!((steps[1], steps[3], steps[5]), (90, 2, 2));
    assert_eq!(summary.rft_steps, 90 + steps[2]);
    assert_eq!(summary.stages[6].evaluations, ["end"]);
    assert_eq!(summary.mismatch_max, 0.0, "sampled and recomputed alike, with longer contexts too");
    assert!(summary.evaluation["end"].pass_at_k.contains_key(&2));

    let [collection] = &lines(folder, "own", "collection")[..] else { panic!("one collection") };
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{key}: {line}"));
    assert_eq!(number(collection, "candidates"), 60);
    assert!(number(collection, "passed") >= number(collection, "kept") && number(collection, "kept") > 0, "{collection}");
    let kept = std::fs::read_to_string(folder.join("episodes/own-kept.jsonl")).expect("episodes");
    let kept: Vec<Episode> = kept.lines().skip(1).map(|line| serde_json::from_str(line).expect("an episode")).collect();
    assert_eq!(kept.len() as u64, number(collection, "kept"));
    let tokenizer = builtin_tokenizer().expect("a tokenizer");
    for episode in &kept {
        assert!(episode.verdict.passed());
        assert!(!tokenizer.decode(&episode.transcript.ids).contains("mend it"), "what is learned from has no demonstration");
        let of_its_task = kept.iter().filter(|other| other.task_id == episode.task_id).count();
        assert!(of_its_task <= 2, "keep_per_task");
    }
    let refused: u64 = kept.iter().map(|episode| episode.transcript.refused.len() as u64).sum();
    assert_eq!(refused, number(collection, "turns_masked"));

    let [curriculum] = &lines(folder, "harder", "curriculum")[..] else { panic!("one curriculum") };
    let left = number(curriculum, "tasks_left");
    assert_eq!(left + number(curriculum, "solved"), number(curriculum, "tasks_before"));
    assert_eq!((summary.stages[5].tasks as u64, summary.stages[3].tasks as u64), (left, number(curriculum, "tasks_before")));
    let attempted = number(curriculum, "tasks_before") - number(curriculum, "never_attempted");
    assert_eq!(attempted, 10, "two steps of five tasks");

    let checkpoint = Checkpoints::new(folder.join("checkpoints"), 2).latest().expect("a folder").expect("a checkpoint").0;
    let config = ModelConfig::load(&checkpoint).expect("a config");
    assert_eq!((config.yarn.map(|yarn| yarn.factor), config.max_positions), (Some(2.0), 2048));
}

/// Tasks are drawn again for the second stage of a kind, not those of the first.
#[test]
fn stages_of_a_kind_draw_their_own_tasks() {
    let stages = run_file(PIPELINE).stages().expect("stages");
    let seeds: Vec<u64> = stages.iter().map(|stage| stage.settings.seed).collect();
    let [base, warm, own, stage1, _, stage2, end] = seeds[..] else { panic!("{seeds:?}") };
    assert_eq!((base, end, warm, stage1), (0, 0, 0, 0), "the first of a kind and evaluations have the run's");
    assert!(own != 0 && stage2 != 0);
}

fn failure(text: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let run_file = run_file(text);
    let error = on_ranks(1, 1, |world| run_on(world, folder.path(), &run_file, 6, &|| false).expect_err("nothing to go on with"));
    assert!(matches!(error[0], RunError::Failed(_)), "{error:?}");
    error[0].to_string()
}

#[test]
fn a_curriculum_that_would_leave_no_task_and_a_policy_that_solves_nothing_end_the_run_in_one_line() {
    // A policy drawn at random solves nothing.
    let attempts =
        "[[stages]]\nname = \"own\"\nkind = \"rft\"\nrft = { collect = \"policy\", tasks = 2, attempts_per_task = 2 }\n";
    let error = failure(attempts);
    assert!(error.contains("none of the policy's 4 attempts") && error.contains("rft.demonstration"), "{error}");
    assert!(!error.contains('\n'));

    let all = "[rl]\nsteps = 1\ntasks_per_step = 6\ngroup_size = 2\n[agent]\nmax_turns = 1\nmax_turn_tokens = 1\n\
               [evaluate]\nevery = 0\n[[stages]]\nname = \"first\"\nkind = \"rl\"\n\
               [[stages]]\nname = \"none\"\nkind = \"curriculum\"\nfrom = \"first\"\n\
               [[stages]]\nname = \"second\"\nkind = \"rl\"\n";
    let error = failure(all);
    assert!(error.contains("curriculum none: no task would be left of 6") && error.contains("drop_unsolved"), "{error}");
    assert!(!error.contains('\n'));
}
