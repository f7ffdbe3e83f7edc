//! The curriculum between stages: what the policy solves anyway, or never, teaches nothing and is left out from here on.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::list::CurriculumSettings;
use super::state::Attempts;
use super::{Run, RunError};
use crate::device::Device;

/// A line of `metrics.jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    kind: &'static str,
    from: &'a str,
    tasks_before: usize,
    tasks_left: usize,
    solved: usize,
    unsolved: usize,
    /// Stay, for nothing is known of them.
    never_attempted: usize,
}

/// Tasks of a pool by what a stage's attempts at them say.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sorted<'a> {
    solved: Vec<&'a str>,
    unsolved: Vec<&'a str>,
    never_attempted: Vec<&'a str>,
    between: Vec<&'a str>,
}

fn sort<'a>(pool: impl Iterator<Item = &'a str>, attempts: &BTreeMap<String, Attempts>, solved_at: f64) -> Sorted<'a> {
    let mut sorted = Sorted::default();
    for task in pool {
        let place = match attempts.get(task) {
            None => &mut sorted.never_attempted,
            Some(Attempts { passed: 0, .. }) => &mut sorted.unsolved,
            Some(Attempts { made, passed }) if *passed as f64 / *made as f64 >= solved_at => &mut sorted.solved,
            Some(_) => &mut sorted.between,
        };
        place.push(task);
    }
    sorted
}

impl<D: Device> Run<'_, D> {
    /// The whole stage. It takes no time, so that a run that was stopped in it does it again.
    pub(super) fn choose_tasks(&mut self, settings: &CurriculumSettings) -> Result<(), RunError> {
        let CurriculumSettings { from, drop_solved_at, drop_unsolved } = settings;
        let attempts = std::mem::take(&mut self.learner.state.of_stage(from).attempts);
        let sorted = sort(self.pool.iter().map(|task| task.id.as_str()), &attempts, *drop_solved_at);
        self.learner.state.of_stage(from).attempts = attempts;
        let Sorted { solved, unsolved, never_attempted, between } = &sorted;
        let line = Line {
            kind: "curriculum",
            from,
            tasks_before: self.pool.len(),
            tasks_left: between.len() + never_attempted.len() + if *drop_unsolved { 0 } else { unsolved.len() },
            solved: solved.len(),
            unsolved: unsolved.len(),
            never_attempted: never_attempted.len(),
        };
        if line.tasks_left == 0 {
            let why_not = if *drop_unsolved { ", keep those never solved with drop_unsolved = false" } else { "" };
            return Err(RunError::Failed(format!(
                "curriculum {}: no task would be left of {}: {} solved in at least {drop_solved_at:.3} of the attempts of {from}, {} \
                 never; raise drop_solved_at{why_not}, or give {from} more steps",
                self.stage()?.name,
                line.tasks_before,
                line.solved,
                line.unsolved,
            )));
        }
        self.context.progress.line(&format!(
            "curriculum after {from}: {} of {} tasks remain; solved in at least {drop_solved_at:.3} of attempts {}, never solved {} ({}), \
             never attempted {} (kept)",
            line.tasks_left,
            line.tasks_before,
            line.solved,
            line.unsolved,
            if *drop_unsolved { "left out" } else { "kept" },
            line.never_attempted,
        ));
        let dropped = solved.iter().chain(unsolved.iter().filter(|_| *drop_unsolved));
        let dropped: BTreeSet<String> = dropped.map(|&task| task.to_owned()).collect();
        self.write_metrics(&line)?;
        self.learner.state.left_out.extend(dropped);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solved_means_at_least_and_what_was_never_attempted_is_neither() {
        let of = |made, passed| Attempts { made, passed };
        let attempts = BTreeMap::from([
            ("two-of-three".to_owned(), of(3, 2)),
            ("six-of-nine".to_owned(), of(9, 6)),
            ("almost".to_owned(), of(10, 6)),
            ("never".to_owned(), of(10, 0)),
            ("always".to_owned(), of(1, 1)),
            ("left-the-pool".to_owned(), of(2, 1)),
        ]);
        let pool = ["always", "almost", "never", "two-of-three", "unseen", "six-of-nine"];
        let expected = Sorted {
            solved: vec!["always", "two-of-three", "six-of-nine"],
            unsolved: vec!["never"],
            never_attempted: vec!["unseen"],
            between: vec!["almost"],
        };
        assert_eq!(sort(pool.into_iter(), &attempts, 2.0 / 3.0), expected);
        assert_eq!(sort(pool.into_iter(), &attempts, 1.1).solved, Vec::<&str>::new());
    }
}
