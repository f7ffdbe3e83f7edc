//! Dynamic sampling: rollouts go on until enough groups are worth training on (DAPO, Yu et al. 2025, section 3.2).
//!
//! A state machine without a clock or a random number: it is told what came out, and says whether to roll out more.

use serde::{Deserialize, Serialize};

use super::settings::{Problems, SettingErrors};

/// How long to look for groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DynamicSamplingSettings {
    /// Tasks of one batch of rollouts; 0 takes as many as a step trains on. verl's example has three times as many.
    pub tasks_per_batch: usize,
    /// Batches of rollouts for one step at most; 0 sets no bound. verl's example has 10.
    pub most_batches: u64,
    /// What to do when the bound is reached and groups are still missing.
    pub when_exhausted: WhenExhausted,
}

/// What to do when too few groups were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenExhausted {
    /// Stop the run: the tasks are too easy or too hard for it.
    #[default]
    Fail,
    /// Train on the groups that were found.
    TrainOnFewer,
}

impl Default for DynamicSamplingSettings {
    fn default() -> DynamicSamplingSettings {
        DynamicSamplingSettings { tasks_per_batch: 0, most_batches: 10, when_exhausted: WhenExhausted::Fail }
    }
}

impl DynamicSamplingSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let endless = self.most_batches == 0 && self.when_exhausted == WhenExhausted::TrainOnFewer;
        problems.unless(
            !endless,
            "when_exhausted",
            "train_on_fewer",
            "set most_batches above 0: without a bound it is never reached",
        );
        problems.finish()
    }
}

/// The groups of one step, as they are found.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicSampling<G> {
    settings: DynamicSamplingSettings,
    wanted: usize,
    kept: Vec<G>,
    seen: usize,
    batches: u64,
}

/// What to do after a batch of rollouts.
#[derive(Clone, Debug, PartialEq)]
pub enum Next<G> {
    /// Roll out another batch: this many groups are missing.
    RollOut { missing: usize },
    /// Train on `groups`, in the order in which they were found.
    Train {
        groups: Vec<G>,
        /// Groups worth training on that were found beyond those wanted; they are not used.
        surplus: usize,
    },
}

/// The bound was reached.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "{found} of {wanted} groups found after {batches} batches of rollouts ({seen} groups): choose tasks that the policy \
     sometimes solves, raise most_batches, or, where some were found, set when_exhausted = \"train_on_fewer\""
)]
pub struct Exhausted {
    pub found: usize,
    pub wanted: usize,
    pub batches: u64,
    pub seen: usize,
}

impl<G> DynamicSampling<G> {
    /// Looks for `wanted` groups.
    pub fn new(wanted: usize, settings: &DynamicSamplingSettings) -> DynamicSampling<G> {
        DynamicSampling { settings: settings.clone(), wanted, kept: Vec::new(), seen: 0, batches: 0 }
    }

    /// Takes in a batch of rollouts. `batch`: each group with whether it is worth training on.
    ///
    /// # Errors
    /// Too few groups within the bound, and the settings say to stop then, or none at all.
    pub fn take(&mut self, batch: impl IntoIterator<Item = (G, bool)>) -> Result<Next<G>, Exhausted> {
        self.batches += 1;
        for (group, worth_training) in batch {
            self.seen += 1;
            if worth_training {
                self.kept.push(group);
            }
        }
        let found = self.kept.len();
        if found >= self.wanted {
            let mut groups = std::mem::take(&mut self.kept);
            groups.truncate(self.wanted);
            return Ok(Next::Train { groups, surplus: found - self.wanted });
        }
        if self.settings.most_batches == 0 || self.batches < self.settings.most_batches {
            return Ok(Next::RollOut { missing: self.wanted - found });
        }
        if self.settings.when_exhausted == WhenExhausted::TrainOnFewer && found > 0 {
            return Ok(Next::Train { groups: std::mem::take(&mut self.kept), surplus: 0 });
        }
        Err(Exhausted { found, wanted: self.wanted, batches: self.batches, seen: self.seen })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounded(most_batches: u64, when_exhausted: WhenExhausted) -> DynamicSamplingSettings {
        DynamicSamplingSettings { most_batches, when_exhausted, ..DynamicSamplingSettings::default() }
    }

    #[test]
    fn refills_until_full_and_truncates_the_surplus() {
        let mut sampling = DynamicSampling::new(3, &DynamicSamplingSettings::default());
        assert_eq!(sampling.take([("a", true), ("b", false)]), Ok(Next::RollOut { missing: 2 }));
        assert_eq!(sampling.take([("c", false), ("d", false)]), Ok(Next::RollOut { missing: 2 }));
        let full = sampling.take([("e", true), ("f", true), ("g", false), ("h", true)]);
        assert_eq!(full, Ok(Next::Train { groups: vec!["a", "e", "f"], surplus: 1 }));
    }

    #[test]
    fn the_bound_holds() {
        let mut sampling = DynamicSampling::new(2, &bounded(2, WhenExhausted::Fail));
        assert_eq!(sampling.take([(1, true)]), Ok(Next::RollOut { missing: 1 }));
        let error = sampling.take([(2, false), (3, false)]).unwrap_err();
        assert_eq!(error, Exhausted { found: 1, wanted: 2, batches: 2, seen: 3 });
        let line = "1 of 2 groups found after 2 batches of rollouts (3 groups): choose tasks that the policy sometimes solves, raise \
                    most_batches, or, where some were found, set when_exhausted = \"train_on_fewer\"";
        assert_eq!(error.to_string(), line);

        let mut sampling = DynamicSampling::new(2, &bounded(2, WhenExhausted::TrainOnFewer));
        assert_eq!(sampling.take([(1, true)]), Ok(Next::RollOut { missing: 1 }));
        assert_eq!(sampling.take([(2, false)]), Ok(Next::Train { groups: vec![1], surplus: 0 }));

        let mut sampling = DynamicSampling::new(2, &bounded(1, WhenExhausted::TrainOnFewer));
        assert!(sampling.take([(1, false)]).is_err(), "nothing at all is no batch");

        let mut sampling = DynamicSampling::new(1, &bounded(0, WhenExhausted::Fail));
        for _ in 0..1_000 {
            assert_eq!(sampling.take([(1, false)]), Ok(Next::RollOut { missing: 1 }));
        }
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(DynamicSamplingSettings::default().check(), Ok(()));
        assert!(bounded(0, WhenExhausted::TrainOnFewer).check().unwrap_err().to_string().contains("most_batches"));
    }

    proptest! {
        #[test]
        fn the_first_wanted_groups_whatever_the_batches(
            worth in prop::collection::vec(any::<bool>(), 1..60), size in 1..20usize, wanted in 1..10usize,
        ) {
            let all: Vec<usize> = (0..worth.len()).filter(|&group| worth[group]).collect();
            let mut sampling = DynamicSampling::new(wanted, &bounded(0, WhenExhausted::Fail));
            let mut trained = None;
            let groups: Vec<(usize, bool)> = worth.iter().copied().enumerate().collect();
            for batch in groups.chunks(size) {
                if let Ok(Next::Train { groups, .. }) = sampling.take(batch.iter().copied()) {
                    trained = Some(groups);
                    break;
                }
            }
            prop_assert_eq!(trained, all.get(..wanted).map(<[usize]>::to_vec));
        }
    }
}
