//! From a skeleton to a task: what to choose, what it reads like, what its tests expect.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use super::python::{Fault, Program, Value};
use super::skeleton::{Kind, Skeleton, SlotTemplate, fill};
use super::{Level, Split};
use crate::types::{Key, Slot, Task, TaskOrigin, TestRunner, Workspace};

const VISIBLE_TESTS: usize = 4;
const HIDDEN_TESTS: usize = 8;
const VAGUE_SHARE: f64 = 0.15;
/// Sets of inputs that are tried before a bug counts as one that no test sees.
const INPUT_ATTEMPTS: usize = 12;

pub const VISIBLE_FILE: &str = "visible.py";
pub const HIDDEN_FILE: &str = "hidden.py";

/// Everything that decides what a task is about, before its tests.
#[derive(Clone, Debug)]
pub struct Recipe {
    skeleton: &'static Skeleton,
    /// Chosen name of each placeholder.
    names: BTreeMap<&'static str, &'static str>,
    /// `[slots]` index of the right value.
    right: Vec<usize>,
    /// The slot with the bug, and the index of its wrong value.
    buggy: usize,
    wrong: usize,
}

impl Recipe {
    /// Skeleton, names, right values, buggy slot and wrong value, each uniform.
    pub fn draw(skeletons: &'static [Skeleton], key: &mut Key) -> Recipe {
        let skeleton = key.choose(skeletons);
        let mut names = BTreeMap::new();
        for (placeholder, pool) in skeleton.names {
            let free: Vec<&'static str> =
                pool.iter().filter(|name| !names.values().any(|taken| taken == *name)).copied().collect();
            names.insert(*placeholder, *key.choose(&free));
        }
        let right: Vec<usize> = skeleton.slots.iter().map(|slot| key.below(slot.rights)).collect();
        let buggy = key.below(skeleton.slots.len());
        let others = skeleton.slots[buggy].values.len() - 1;
        // One of the other values: those behind the right one move up by one.
        let wrong = key.below(others);
        let wrong = wrong + usize::from(wrong >= right[buggy]);
        Recipe { skeleton, names, right, buggy, wrong }
    }

    pub fn split(&self) -> Split {
        let slot = self.slot();
        let change = [self.skeleton.name, slot.name, slot.values[self.right[self.buggy]].0, slot.values[self.wrong].0];
        let mut names = vec![self.names["$f"]];
        names.extend(self.skeleton.arguments.iter().map(|(argument, _)| self.names[argument]));
        split_of(slot, &change, &names)
    }

    /// Skeleton, slot and wrong value of the bug.
    pub fn wrong_value(&self) -> (String, String, String) {
        let slot = self.slot();
        (self.skeleton.name.to_string(), slot.name.to_string(), slot.values[self.wrong].0.to_string())
    }

    fn slot(&self) -> &'static SlotTemplate {
        &self.skeleton.slots[self.buggy]
    }

    /// The code of a slot's value, its names filled in.
    fn code(&self, slot: usize, value: usize) -> String {
        self.fill_names(self.skeleton.slots[slot].values[value].0)
    }

    fn fill_names(&self, text: &str) -> String {
        fill(text, |placeholder| self.names.get(placeholder).map(|name| name.to_string()))
    }

    /// `template` with names and, for each slot, the value of that index.
    fn render(&self, template: &str, values: &[usize]) -> String {
        fill(template, |placeholder| match self.skeleton.slots.iter().position(|slot| slot.name == placeholder) {
            Some(slot) => Some(self.code(slot, values[slot])),
            None => self.names.get(placeholder).map(|name| name.to_string()),
        })
    }

    fn workspace(&self, values: &[usize]) -> Workspace {
        self.skeleton.files.iter().map(|(path, text)| (path.to_string(), self.render(text, values))).collect()
    }

    /// The finished task but for its id; `None` if no set of inputs tells the bug apart.
    pub fn cook(&self, level: Level, key: &mut Key) -> Option<Task> {
        let mut found = self.right.clone();
        found[self.buggy] = self.wrong;
        let (files, mended) = (self.workspace(&found), self.workspace(&self.right));
        let vague = key.chance(VAGUE_SHARE);
        let cases = self.draw_cases(&files, &mended, key)?;
        let (visible, hidden) = cases.split_at(VISIBLE_TESTS);
        let named = |wanted: bool| {
            let tests = hidden.iter().enumerate().filter(|(_, case)| case.fails() == wanted);
            tests.map(|(index, _)| format!("{HIDDEN_FILE}::test_{index}")).collect::<Vec<_>>()
        };
        Some(Task {
            id: String::new(),
            issue: self.issue(level, vague, visible),
            visible_tests: BTreeMap::from([(VISIBLE_FILE.to_string(), self.test_file(level, visible))]),
            hidden_tests: BTreeMap::from([(HIDDEN_FILE.to_string(), self.test_file(level, hidden))]),
            fail_to_pass: named(true),
            pass_to_pass: named(false),
            gold_patch: diff(&files, &mended),
            deterministic: true,
            repository: None,
            runner: TestRunner::default(),
            allow_infrastructure: Vec::new(),
            origin: Some(TaskOrigin {
                family: format!("bugfix-{}", level.name()),
                skeleton: self.skeleton.name.to_string(),
                kind: self.slot().kind.name().to_string(),
                split: self.split().name().to_string(),
                vague,
                slots: self.slot_edits(&found),
            }),
            files,
        })
    }

    /// Different inputs with what the right version returns and what the buggy one does; both the visible and the hidden
    /// ones see the bug.
    fn draw_cases(&self, files: &Workspace, mended: &Workspace, key: &mut Key) -> Option<Vec<Case>> {
        let parse = |files: &Workspace| Program::parse(files.values().map(String::as_str)).ok();
        let (right, buggy) = (parse(mended)?, parse(files)?);
        for _ in 0..INPUT_ATTEMPTS {
            let cases = self.draw_case_set(&right, &buggy, key)?;
            let (visible, hidden) = cases.split_at(VISIBLE_TESTS);
            if visible.iter().any(Case::fails) && hidden.iter().any(Case::fails) {
                return Some(cases);
            }
        }
        None
    }

    fn draw_case_set(&self, right: &Program, buggy: &Program, key: &mut Key) -> Option<Vec<Case>> {
        let mut cases = Vec::new();
        let mut seen = BTreeSet::new();
        for _ in 0..20 * (VISIBLE_TESTS + HIDDEN_TESTS) {
            if cases.len() == VISIBLE_TESTS + HIDDEN_TESTS {
                return Some(cases);
            }
            let state = key.clone();
            let arguments = self.arguments(key);
            let shown = arguments.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
            if !seen.insert(shown.clone()) {
                continue;
            }
            let function = self.names["$f"];
            // Only what the right version answers is a test. A version may change its arguments: the other gets its own.
            let Ok(expected) = right.call(function, arguments) else { continue };
            let got = match buggy.call(function, self.arguments(&mut state.clone())) {
                Ok(value) => Some(value),
                Err(Fault::Raised) => None,
                Err(Fault::Beyond) => return None,
            };
            cases.push(Case { arguments: shown, expected, got });
        }
        None
    }

    fn arguments(&self, key: &mut Key) -> Vec<Value> {
        self.skeleton.arguments.iter().map(|(_, input)| input.draw(key)).collect()
    }

    fn signature(&self) -> String {
        let arguments: Vec<&str> = self.skeleton.arguments.iter().map(|(argument, _)| self.names[argument]).collect();
        format!("{}({})", self.names["$f"], arguments.join(", "))
    }

    /// The small level says what the function is for in one line, or only that it is wrong. The large level adds a failing call.
    fn issue(&self, level: Level, vague: bool, visible: &[Case]) -> String {
        let words = fill(self.skeleton.issue, |placeholder| {
            let slot = self.skeleton.slots.iter().position(|slot| slot.name == placeholder)?;
            Some(self.skeleton.slots[slot].values[self.right[slot]].1.to_string())
        });
        let described = self.fill_names(&words);
        match (level, vague) {
            (Level::Small, false) => described,
            (Level::Small, true) => format!("{}: wrong result", self.signature()),
            (Level::Large, _) => {
                let complaint = match visible.iter().find(|case| case.fails()) {
                    Some(Case { arguments, expected, got: Some(got) }) => {
                        format!("`{}({arguments})` returns `{got}`, but should return `{expected}`.", self.names["$f"])
                    }
                    Some(Case { arguments, expected, got: None }) => {
                        format!("`{}({arguments})` raises an exception, but should return `{expected}`.", self.names["$f"])
                    }
                    None => String::new(),
                };
                if vague {
                    format!("`{}` gives wrong results.\n\n{complaint}", self.signature())
                } else {
                    format!("{described}\n\n{complaint}")
                }
            }
        }
    }

    fn test_file(&self, level: Level, cases: &[Case]) -> String {
        // Thousands of small tasks ship with the program: no blank lines there.
        let gap = if level == Level::Small { "" } else { "\n\n" };
        let function = self.names["$f"];
        let mut text = format!("from {} import {function}\n{gap}", self.module());
        text.push_str("def same(got, want):\n    return type(got) is type(want) and got == want\n");
        for (index, Case { arguments, expected, .. }) in cases.iter().enumerate() {
            text.push_str(&format!("{gap}def test_{index}():\n    assert same({function}({arguments}), {expected})\n"));
        }
        text
    }

    /// The module that defines `$f`.
    fn module(&self) -> &'static str {
        let file = self.skeleton.files.iter().find(|(_, text)| text.contains("def $f("));
        file.map_or("solution", |(path, _)| path.trim_end_matches(".py"))
    }

    /// Every slot's values as edits of the file as found: `N|text`, with `path:` before it where there are several files.
    fn slot_edits(&self, found: &[usize]) -> Vec<Slot> {
        let mut slots = Vec::new();
        for (index, slot) in self.skeleton.slots.iter().enumerate() {
            let Some((path, number, line)) = self.place(slot.name) else { continue };
            let edit = |value: usize| {
                let mut values = found.to_vec();
                values[index] = value;
                let prefix = if self.skeleton.files.len() > 1 { format!("{path}:") } else { String::new() };
                format!("{prefix}{number}|{}", self.render(line, &values))
            };
            let wrong = (0..slot.values.len()).filter(|&value| value != self.right[index]);
            slots.push(Slot { buggy: index == self.buggy, right: edit(self.right[index]), wrong: wrong.map(edit).collect() });
        }
        slots
    }

    /// Path, line number from 1 and template line of a slot.
    fn place(&self, slot: &str) -> Option<(&'static str, usize, &'static str)> {
        self.skeleton.files.iter().find_map(|(path, text)| {
            let line = text.lines().enumerate().find(|(_, line)| mentions(line, slot));
            line.map(|(index, line)| (*path, index + 1, line))
        })
    }
}

fn mentions(line: &str, placeholder: &str) -> bool {
    let found = std::cell::Cell::new(false);
    fill(line, |name| {
        found.set(found.get() || name == placeholder);
        None
    });
    found.get()
}

/// One call with what it should return and what the buggy version returns (`None`: it raises).
struct Case {
    arguments: String,
    expected: Value,
    got: Option<Value>,
}

impl Case {
    fn fails(&self) -> bool {
        !self.got.as_ref().is_some_and(|got| got.same(&self.expected))
    }
}

/// Which split a bug with these names belongs to. `change`: skeleton, slot, right and wrong value; `names`: function and
/// arguments.
///
/// Structure is held out only where a slot has three values or more: of a slot with two, one hash would swallow the whole.
fn split_of(slot: &SlotTemplate, change: &[&str], names: &[&str]) -> Split {
    let structural = matches!(slot.kind, Kind::Comparison | Kind::Operator) && slot.values.len() >= 3;
    if structural && hash(change).is_multiple_of(6) {
        Split::Structure
    } else if hash(&[change, names].concat()).is_multiple_of(4) {
        Split::Names
    } else {
        Split::Train
    }
}

/// The first 64 bits of SHA-256 over the parts, each ended by a zero byte.
fn hash(parts: &[&str]) -> u64 {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part.as_bytes());
        hasher.update([0]);
    }
    let digest = hasher.finalize();
    digest.iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Unified diff with one line of context: enough to read, and the shipped pools stay small.
fn diff(before: &Workspace, after: &Workspace) -> String {
    let mut text = String::new();
    for (path, old) in before {
        let new = after.get(path).map_or("", String::as_str);
        if old != new {
            let patch = diffy::DiffOptions::new()
                .set_context_len(1)
                .set_original_filename(format!("a/{path}"))
                .set_modified_filename(format!("b/{path}"))
                .create_patch(old, new)
                .to_string();
            text.push_str(&patch);
        }
    }
    text
}
