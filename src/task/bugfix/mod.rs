//! The built-in task family: small Python functions with one bug.
//!
//! A task is a skeleton, a choice of names, the right value of every slot, and one slot set to a wrong value. The `small` level
//! has six skeletons of three to six lines, the `large` level longer functions in one or several files. Held-out tasks are told
//! from training tasks by a hash of what they are made of ([`Split`]), so that pools drawn at different times cannot overlap.

mod draw;
mod inputs;
mod large;
pub mod python;
mod skeleton;
mod small;

use std::collections::BTreeSet;

use super::TaskError;
use crate::types::{Key, Purpose, Task};

pub use draw::{HIDDEN_FILE, Recipe, VISIBLE_FILE};
pub use skeleton::{Kind, Skeleton};

/// How big the functions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Small,
    Large,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Level::Small => "small",
            Level::Large => "large",
        }
    }

    pub fn skeletons(self) -> &'static [Skeleton] {
        match self {
            Level::Small => small::SKELETONS,
            Level::Large => large::SKELETONS,
        }
    }
}

/// Who may see a task. Every possible task belongs to exactly one split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    Train,
    /// The bug is known from training, but never in this function with these names.
    Names,
    /// This change is never seen in this skeleton, under any names.
    Structure,
}

impl Split {
    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Names => "names",
            Split::Structure => "structure",
        }
    }
}

/// Draws that may bring nothing new, one after another, before a pool counts as exhausted.
const PATIENCE: u32 = 50_000;

/// `count` different tasks of one level and split. The same arguments give the same tasks, byte for byte; nothing is run in a
/// sandbox here.
pub fn generate(level: Level, split: Split, count: usize, seed: u64) -> Result<Vec<Task>, TaskError> {
    let mut tasks = Vec::with_capacity(count);
    let mut contents = BTreeSet::new();
    let mut vain = 0;
    for attempt in 0.. {
        if tasks.len() == count {
            break;
        }
        if vain == PATIENCE {
            return Err(TaskError::Exhausted { level: level.name(), split: split.name(), found: tasks.len(), asked: count });
        }
        vain += 1;
        let mut key = Key::new(Purpose::GenerateTask, &[seed, level as u64, split as u64, attempt]);
        let recipe = Recipe::draw(level.skeletons(), &mut key);
        if recipe.split() != split {
            continue;
        }
        let Some(mut task) = recipe.cook(level, &mut key) else { continue };
        if contents.insert((task.issue.clone(), task.files.clone())) {
            task.id = format!("{}-{}-{seed}-{:05}", level.name(), split.name(), tasks.len());
            tasks.push(task);
            vain = 0;
        }
    }
    Ok(tasks)
}

/// The text of everything that demonstrations on `tasks` consist of, markup left out: issue, file as the `view` tool shows
/// it, every edit, every answer of the tools. What the quick start's tokenizer is trained on.
pub fn demonstration_texts(tasks: &[Task]) -> Vec<String> {
    let mut texts = Vec::new();
    for task in tasks {
        texts.push(task.issue.clone());
        for text in task.files.values() {
            let lines: Vec<String> = text.lines().enumerate().map(|(index, line)| format!("{}|{line}", index + 1)).collect();
            texts.push(lines.join("\n"));
        }
        let slots = task.origin.iter().flat_map(|origin| &origin.slots);
        texts.extend(slots.flat_map(|slot| std::iter::once(&slot.right).chain(&slot.wrong)).cloned());
        texts.push("user\ndone\n".into());
        texts.push("assistant\npassed\n".into());
        let visible = task.visible_tests.values().map(|text| text.matches("\ndef test_").count()).sum::<usize>();
        texts.extend((1..=visible).map(|failed| format!("{failed} failed")));
    }
    texts
}

/// Skeleton, slot and wrong value (as code, names unfilled) of each task that `attempts` draws make, for checking that no
/// value of the family is dead.
pub fn wrong_values(level: Level, attempts: u64, seed: u64) -> BTreeSet<(String, String, String)> {
    let mut values = BTreeSet::new();
    for attempt in 0..attempts {
        let mut key = Key::new(Purpose::GenerateTask, &[seed, level as u64, u64::MAX, attempt]);
        let recipe = Recipe::draw(level.skeletons(), &mut key);
        let value = recipe.wrong_value();
        if !values.contains(&value) && recipe.cook(level, &mut key).is_some() {
            values.insert(value);
        }
    }
    values
}
