//! The stages of a run: which there are, in which order, and with which settings.

use serde::{Deserialize, Serialize};

use super::Settings;
use super::rft::Collect;
use crate::algorithm::{Problems, SettingErrors};
use crate::train::optimizer::AdamWSettings;
use crate::types::{Key, Purpose};

/// What a stage does.
#[derive(Clone, Debug, PartialEq)]
pub enum StageKind {
    /// Measures the policy on held-out tasks.
    Evaluate,
    /// Rejection fine-tuning.
    Rft,
    /// Reinforcement learning.
    Rl,
    /// Leaves tasks out of the stages after it.
    Curriculum(CurriculumSettings),
}

impl StageKind {
    pub fn name(&self) -> &'static str {
        match self {
            StageKind::Evaluate => "evaluate",
            StageKind::Rft => "rft",
            StageKind::Rl => "rl",
            StageKind::Curriculum(_) => "curriculum",
        }
    }
}

/// Which tasks a curriculum leaves out, by the attempts that an earlier stage made at them. A task that it never attempted stays: nothing
/// is known of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CurriculumSettings {
    /// Name of the stage whose attempts count: one of reinforcement learning, or of fine-tuning on the policy's own attempts.
    pub from: String,
    /// Tasks of which at least this share of the attempts passed are left out; above 1 none is.
    pub drop_solved_at: f64,
    /// Leave out tasks of which no attempt passed.
    pub drop_unsolved: bool,
}

impl Default for CurriculumSettings {
    fn default() -> Self {
        CurriculumSettings { from: String::new(), drop_solved_at: 2.0 / 3.0, drop_unsolved: true }
    }
}

/// One stage with every setting that it runs under.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Unique in its run: names its lines of the metrics, its evaluations and the files of its episodes.
    pub name: String,
    pub kind: StageKind,
    pub settings: Settings,
}

impl Stage {
    /// What a run does that lists no stages: evaluation, rejection fine-tuning, evaluation, reinforcement learning, evaluation.
    pub fn default_list(settings: &Settings) -> Vec<Stage> {
        let stage = |name: &str, kind| Stage { name: name.into(), kind, settings: settings.clone() };
        vec![
            stage("before_rft", StageKind::Evaluate),
            stage("rft", StageKind::Rft),
            stage("after_rft", StageKind::Evaluate),
            stage("rl", StageKind::Rl),
            stage("after_rl", StageKind::Evaluate),
        ]
    }

    /// Stages in the order they run in, whose `settings.seed` is that of the run: the later ones of a kind that trains get a seed of their
    /// own, or they would draw the tasks and the random numbers of the first again.
    ///
    /// # Errors
    /// All that is wrong with the list: names that are empty, taken or no part of a file's name, or a curriculum after no stage whose
    /// attempts it could count.
    pub fn in_order(mut stages: Vec<Stage>) -> Result<Vec<Stage>, SettingErrors> {
        let mut problems = Problems::default();
        for index in 0..stages.len() {
            let (earlier, rest) = stages.split_at_mut(index);
            let stage = &mut rest[0];
            problems.within(&format!("stages[{index}]"), stage.check(earlier));
            let of_its_kind = earlier.iter().filter(|other| other.kind.name() == stage.kind.name()).count() as u64;
            if of_its_kind > 0 && matches!(stage.kind, StageKind::Rft | StageKind::Rl) {
                stage.settings.seed = Key::new(Purpose::Stage, &[stage.settings.seed, of_its_kind]).next_u64();
            }
        }
        problems.finish().map(|()| stages)
    }

    fn check(&self, earlier: &[Stage]) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let Stage { name, .. } = self;
        let plain = |character: char| character.is_ascii_alphanumeric() || character == '_' || character == '-';
        let usable = !name.is_empty() && name.chars().all(plain);
        problems.unless(usable, "name", format!("{name:?}"), "give letters, digits, - and _");
        // Evaluations between the steps of a stage are named so.
        problems.unless(!name.contains("_step_"), "name", format!("{name:?}"), "leave out \"_step_\"");
        let taken = earlier.iter().any(|other| other.name == *name);
        problems.unless(!taken, "name", format!("{name:?}"), "give another: an earlier stage has this one");
        if let StageKind::Curriculum(CurriculumSettings { from, drop_solved_at, .. }) = &self.kind {
            let possible = *drop_solved_at > 0.0 && drop_solved_at.is_finite();
            problems.unless(possible, "drop_solved_at", drop_solved_at, "give a share above 0, or more than 1 to leave out none");
            let found = format!("{from:?}");
            match earlier.iter().find(|other| other.name == *from) {
                Some(other) => problems.unless(
                    other.counts_attempts(),
                    "from",
                    found,
                    "name a stage of kind \"rl\", or \"rft\" with rft.collect = \"policy\": others make no attempts at training tasks",
                ),
                None => problems.unless(false, "from", found, "name an earlier stage: no earlier stage has this name"),
            }
        }
        problems.finish()
    }

    /// The policy attempts training tasks in it.
    fn counts_attempts(&self) -> bool {
        match self.kind {
            StageKind::Rl => true,
            StageKind::Rft => self.settings.rft.collect == Collect::Policy,
            StageKind::Evaluate | StageKind::Curriculum(_) => false,
        }
    }

    /// Of the optimizer that it starts with.
    pub fn optimizer(&self) -> AdamWSettings {
        match self.kind {
            StageKind::Rft => self.settings.rft.optimizer,
            _ => self.settings.rl.optimizer,
        }
    }

    /// The stage in a word or two: its kind, and its name where that says more.
    pub fn title(&self) -> String {
        if self.name == self.kind.name() { self.name.clone() } else { format!("{} ({})", self.kind.name(), self.name) }
    }

    /// What it will do, for people.
    pub fn describe(&self) -> String {
        let Settings { rft, rl, evaluate, .. } = &self.settings;
        let what = match &self.kind {
            StageKind::Evaluate => format!("{} x {} attempts", evaluate.tasks, evaluate.samples),
            StageKind::Rft => match rft.collect {
                Collect::Script => format!("{} demonstrations", rft.candidates),
                Collect::Policy => format!("{} attempts at a task", rft.attempts_per_task),
            },
            StageKind::Rl => format!("{} steps of {} x {}", rl.steps, rl.tasks_per_step, rl.group_size),
            StageKind::Curriculum(curriculum) => format!("after {}", curriculum.from),
        };
        format!("{} {what}", self.title())
    }
}
