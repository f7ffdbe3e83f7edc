//! The built-in bugfix family: what is drawn is sound, complete and kept apart.

use std::collections::BTreeSet;

use learner::task::bugfix::{Level, Split, generate};
use learner::task::{apply_gold, check_task};
use learner::types::{Task, TaskOrigin};

fn origin(task: &Task) -> &TaskOrigin {
    task.origin.as_ref().expect("a generated task says where it comes from")
}

/// The right line of the bug and the line as found, both as edits.
fn change(task: &Task) -> (String, String) {
    let slot = origin(task).slots.iter().find(|slot| slot.buggy).expect("one slot holds the bug");
    let found: BTreeSet<String> = task
        .files
        .iter()
        .flat_map(|(path, text)| {
            let prefix = if task.files.len() > 1 { format!("{path}:") } else { String::new() };
            text.lines().enumerate().map(move |(index, line)| format!("{prefix}{}|{line}", index + 1)).collect::<Vec<_>>()
        })
        .collect();
    let wrong = slot.wrong.iter().find(|line| found.contains(*line)).expect("the line as found is one of the wrong ones");
    (slot.right.clone(), wrong.clone())
}

fn all_splits(level: Level, count: usize) -> Vec<Task> {
    [Split::Train, Split::Names, Split::Structure]
        .into_iter()
        .flat_map(|split| generate(level, split, count, 11).expect("the family has that many"))
        .collect()
}

#[test]
fn every_task_is_well_formed_and_its_gold_patch_sets_the_right_line() {
    for task in all_splits(Level::Small, 150).iter().chain(&all_splits(Level::Large, 150)) {
        check_task(task).unwrap_or_else(|reason| panic!("{}: {reason}", task.id));
        let mended = apply_gold(task).expect("the gold patch applies");
        let (right, wrong) = change(task);
        let lines: BTreeSet<String> = mended
            .iter()
            .flat_map(|(path, text)| {
                let prefix = if mended.len() > 1 { format!("{path}:") } else { String::new() };
                text.lines().enumerate().map(move |(index, line)| format!("{prefix}{}|{line}", index + 1)).collect::<Vec<_>>()
            })
            .collect();
        assert!(lines.contains(&right) && right != wrong, "{}", task.id);
        for text in task.files.values().chain([&task.issue]) {
            assert!(!text.contains(['$', '@']), "{}: a placeholder stayed: {text}", task.id);
        }
        assert_eq!(task.fail_to_pass.len() + task.pass_to_pass.len(), 8);
        assert!(task.deterministic && !task.issue.trim().is_empty());
    }
}

#[test]
fn every_value_of_every_slot_makes_a_task() {
    for level in [Level::Small, Level::Large] {
        let mut missing: BTreeSet<(String, String, String)> = BTreeSet::new();
        for skeleton in level.skeletons() {
            for slot in skeleton.slots {
                for (index, (value, _)) in slot.values.iter().enumerate() {
                    // The only right value of a slot is never wrong.
                    if index > 0 || slot.rights > 1 {
                        missing.insert((skeleton.name.into(), slot.name.into(), value.to_string()));
                    }
                }
            }
        }
        let drawn = learner::task::bugfix::wrong_values(level, 12_000, 3);
        missing.retain(|entry| !drawn.contains(entry));
        assert!(missing.is_empty(), "{}: no input tells these from right: {missing:?}", level.name());
    }
}

#[test]
fn pools_share_no_bug_with_the_same_names_and_no_structural_change() {
    for level in [Level::Small, Level::Large] {
        let [train, names, structure] =
            [Split::Train, Split::Names, Split::Structure].map(|split| generate(level, split, 200, 5).expect("enough tasks"));
        // Skeleton, changed lines and signature: the change with its names, and the change alone.
        let named = |task: &Task| (origin(task).skeleton.clone(), change(task), first_line(task));
        let seen: BTreeSet<_> = train.iter().map(named).collect();
        assert!(names.iter().chain(&structure).all(|task| !seen.contains(&named(task))));
        for task in &structure {
            assert!(["comparison", "operator"].contains(&origin(task).kind.as_str()), "{}", task.id);
        }
        for (pool, split) in [(&train, "train"), (&names, "names"), (&structure, "structure")] {
            assert!(pool.iter().all(|task| origin(task).split == split));
            let contents: BTreeSet<_> = pool.iter().map(|task| (&task.issue, &task.files)).collect();
            assert_eq!(contents.len(), pool.len(), "tasks of a pool differ");
        }
        // No kind of bug is swallowed by a split.
        assert_eq!(kinds(&train), kinds(&generate(level, Split::Names, 400, 6).expect("enough tasks")));
    }
    assert!(kinds(&generate(Level::Large, Split::Train, 400, 5).expect("enough tasks")).len() >= 12);
    assert!(Level::Large.skeletons().len() >= 16);
}

fn first_line(task: &Task) -> String {
    task.files.values().flat_map(|text| text.lines()).filter(|line| line.starts_with("def ")).collect()
}

fn kinds(tasks: &[Task]) -> BTreeSet<String> {
    tasks.iter().map(|task| origin(task).kind.clone()).collect()
}

#[test]
fn the_same_draw_gives_the_same_tasks_and_too_many_are_refused() {
    let draw = |seed| generate(Level::Small, Split::Train, 40, seed).expect("enough tasks");
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1)[0].files, draw(2)[0].files);
    let error = generate(Level::Small, Split::Structure, 100_000, 1).expect_err("the family is finite").to_string();
    assert!(error.contains("structure") && !error.contains('\n'), "{error}");
}

#[test]
fn about_one_issue_in_seven_is_vague() {
    let tasks = generate(Level::Small, Split::Train, 1000, 9).expect("enough tasks");
    let vague = tasks.iter().filter(|task| origin(task).vague).count();
    assert!((110..=200).contains(&vague), "{vague}");
    assert!(tasks.iter().all(|task| origin(task).vague == task.issue.ends_with(": wrong result")));
}
