//! Which attempts of a group train, and with which advantage.
//!
//! In this order: infrastructure faults leave; compact filtering masks attempts by how they ended, and they leave the
//! baseline or stay in it; groups that do not tell good from bad are dropped; advantages are estimated; samples whose
//! advantage is 0 are dropped, if asked.

use serde::{Deserialize, Serialize};

use super::advantages::{AdvantageSettings, EQUAL_WITHIN, advantages, has_signal};
use super::rewards::{Reward, RewardSettings};
use super::settings::{Problems, SettingErrors};
use crate::types::{Ending, Episode};

/// Whether a masked attempt still counts for its siblings. Two published programs differ here, and these are two
/// different algorithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskedAttempts {
    /// Its reward is part of the group's baseline, and it counts as a sequence of the batch (rllm v0.1: DeepSWE).
    #[default]
    InBaseline,
    /// As if it had never been made (rllm main).
    OutsideBaseline,
}

/// Which groups are worth training on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupFilter {
    /// Those of which some attempts pass and some do not (DAPO: `0 < #correct < G`).
    #[default]
    Outcome,
    /// Those whose rewards differ. With a penalty on length this keeps groups in which every attempt fails, and the
    /// policy then learns from length alone; one run collapsed within 40 steps (verl-recipe #125).
    Reward,
    /// All. Groups without signal then train with advantages of 0: they move nothing but count in denominators.
    Off,
}

/// What is left out of training.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FilterSettings {
    /// Compact filtering: attempts that ended so are masked whatever their reward. DeepSWE: `token_limit`, `turn_limit`
    /// and `timeout`; DAPO's overlong filtering: `token_limit` alone; Nebius: none.
    pub masked_endings: Vec<Ending>,
    /// Whether masked attempts count for the others.
    pub masked_attempts: MaskedAttempts,
    /// Which groups train.
    pub groups: GroupFilter,
    /// Leave out attempts whose advantage is 0, so that they count in no denominator (Nebius).
    pub drop_zero_advantage: bool,
}

impl FilterSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let endings = &self.masked_endings;
        let names = || endings.iter().map(|ending| ending.name()).collect::<Vec<_>>().join(", ");
        let faults = endings.contains(&Ending::Infrastructure);
        problems.unless(!faults, "masked_endings", names(), "leave infrastructure out: such attempts never train");
        let repeated = (1..endings.len()).any(|index| endings[..index].contains(&endings[index]));
        problems.unless(!repeated, "masked_endings", names(), "name each ending once");
        let all = Ending::ALL.iter().all(|ending| *ending == Ending::Infrastructure || endings.contains(ending));
        problems.unless(!all, "masked_endings", names(), "leave one out, or nothing trains");
        problems.finish()
    }
}

/// What a filter needs to know of an attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attempt {
    pub ending: Ending,
    /// `None` for an infrastructure fault.
    pub passed: Option<bool>,
    /// Penalties included. Not looked at for an infrastructure fault.
    pub reward: f64,
}

impl Attempt {
    /// An episode with its reward.
    pub fn of(episode: &Episode, rewards: &RewardSettings) -> Attempt {
        let passed = (!episode.verdict.infrastructure()).then(|| episode.verdict.passed());
        Attempt { ending: episode.ending, passed, reward: Reward::of(episode, rewards).total() }
    }

    fn lost(&self) -> bool {
        self.ending == Ending::Infrastructure || self.passed.is_none()
    }
}

/// What becomes of an attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Standing {
    /// An infrastructure fault: nothing was learned of the policy.
    Lost,
    /// Compact filtering took it out; `in_batch` says whether it still counts as one of the batch's sequences.
    Masked { in_batch: bool },
    /// Its group does not tell good from bad.
    Uninformative,
    /// Its own advantage is 0, and such attempts are dropped.
    ZeroAdvantage,
    /// It trains with this advantage.
    Trained(f64),
}

impl Standing {
    /// The advantage of an attempt that trains.
    pub fn advantage(self) -> Option<f64> {
        if let Standing::Trained(advantage) = self { Some(advantage) } else { None }
    }

    /// Whether the attempt is one of the sequences that a mean over sequences divides by.
    pub fn counts_as_sequence(self) -> bool {
        matches!(self, Standing::Trained(_) | Standing::Masked { in_batch: true })
    }
}

/// How the attempts of a group came out, faults aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOutcome {
    /// Every attempt was lost.
    Lost,
    NonePassed,
    Mixed,
    AllPassed,
}

/// How a group came out.
pub fn group_outcome(attempts: &[Attempt]) -> GroupOutcome {
    let valid = || attempts.iter().filter(|attempt| !attempt.lost());
    let passed = valid().filter(|attempt| attempt.passed == Some(true)).count();
    match (passed, valid().count()) {
        (_, 0) => GroupOutcome::Lost,
        (0, _) => GroupOutcome::NonePassed,
        (passed, all) if passed == all => GroupOutcome::AllPassed,
        _ => GroupOutcome::Mixed,
    }
}

/// What becomes of each attempt of one group.
///
/// `attempts`: `[attempts]`, faults included. Returns `[attempts]`. Only attempts that the baseline contains count for
/// the group filter. A group all of whose attempts are masked is `Masked`, not `Uninformative`.
pub fn standings(attempts: &[Attempt], filters: &FilterSettings, estimator: &AdvantageSettings) -> Vec<Standing> {
    let masked = |attempt: &Attempt| filters.masked_endings.contains(&attempt.ending);
    let inside = filters.masked_attempts == MaskedAttempts::InBaseline;
    let compared: Vec<usize> =
        (0..attempts.len()).filter(|&index| !attempts[index].lost() && (inside || !masked(&attempts[index]))).collect();
    let rewards: Vec<f64> = compared.iter().map(|&index| attempts[index].reward).collect();
    let informative = match filters.groups {
        GroupFilter::Off => true,
        GroupFilter::Reward => has_signal(&rewards),
        GroupFilter::Outcome => {
            let passed = compared.iter().filter(|&&index| attempts[index].passed == Some(true)).count();
            0 < passed && passed < compared.len()
        }
    };
    let mut standings: Vec<Standing> = attempts
        .iter()
        .map(|attempt| match attempt.lost() {
            true => Standing::Lost,
            false if masked(attempt) => Standing::Masked { in_batch: inside && informative },
            false => Standing::Uninformative,
        })
        .collect();
    if informative {
        for (&index, advantage) in compared.iter().zip(advantages(&rewards, estimator)) {
            if standings[index] == Standing::Uninformative {
                let dropped = filters.drop_zero_advantage && advantage.abs() <= EQUAL_WITHIN;
                standings[index] = if dropped { Standing::ZeroAdvantage } else { Standing::Trained(advantage) };
            }
        }
    }
    standings
}

#[cfg(test)]
mod tests {
    use super::super::rewards::{OverlongPenaltySettings, StepPenaltySettings};
    use super::Standing::*;
    use super::*;
    use crate::types::{EpisodeCounts, Transcript, Verdict};
    use proptest::prelude::*;

    fn attempt(ending: Ending, passed: bool) -> Attempt {
        Attempt { ending, passed: Some(passed), reward: f64::from(u8::from(passed)) }
    }

    fn compact(masked_attempts: MaskedAttempts) -> FilterSettings {
        let masked_endings = vec![Ending::TokenLimit, Ending::TurnLimit, Ending::Timeout];
        FilterSettings { masked_endings, masked_attempts, ..FilterSettings::default() }
    }

    fn of(attempts: &[Attempt], filters: &FilterSettings) -> Vec<Standing> {
        standings(attempts, filters, &AdvantageSettings::default())
    }

    #[test]
    fn masked_attempts_lower_the_baseline_or_are_never_there() {
        let attempts = [
            attempt(Ending::Submitted, true),
            attempt(Ending::Submitted, false),
            attempt(Ending::TokenLimit, false),
            attempt(Ending::Timeout, false),
        ];
        let inside = of(&attempts, &compact(MaskedAttempts::InBaseline));
        assert_eq!(inside, [Trained(1.0), Trained(-1.0 / 3.0), Masked { in_batch: true }, Masked { in_batch: true }]);
        let outside = of(&attempts, &compact(MaskedAttempts::OutsideBaseline));
        assert_eq!(outside, [Trained(1.0), Trained(-1.0), Masked { in_batch: false }, Masked { in_batch: false }]);
        let overlong = FilterSettings { masked_endings: vec![Ending::TokenLimit], ..FilterSettings::default() };
        assert_eq!(of(&attempts, &overlong)[2..], [Masked { in_batch: true }, Trained(-1.0 / 3.0)]);
        assert_eq!(of(&attempts, &FilterSettings::default())[2..], [Trained(-1.0 / 3.0); 2]);
        assert!(inside[2].counts_as_sequence() && !outside[2].counts_as_sequence());
        assert_eq!((inside[1].advantage(), inside[2].advantage()), (Some(-1.0 / 3.0), None));
    }

    #[test]
    fn an_episode_is_an_attempt() {
        let mut transcript = Transcript::default();
        transcript.push_environment(&[1; 50]);
        transcript.push_sampled(&[2; 60], &[-1.0; 60], 0);
        transcript.push_environment(&[3; 20]);
        transcript.push_sampled(&[4; 10], &[-1.0; 10], 0);
        transcript.push_environment(&[5; 5]);
        let mut episode = Episode {
            task_id: "task".into(),
            task_index: 0,
            sample_index: 0,
            transcript,
            ending: Ending::Submitted,
            verdict: Verdict::Passed,
            counts: EpisodeCounts { turns: 25, ..EpisodeCounts::default() },
        };
        let rewards = RewardSettings {
            step_penalty: Some(StepPenaltySettings { free_turns: 10, turn_limit: 40, weight: 1.0 }),
            overlong_penalty: Some(OverlongPenaltySettings { token_limit: 100, buffer_tokens: 20, weight: 1.0 }),
            ..RewardSettings::default()
        };
        let attempt = |episode: &Episode| Attempt::of(episode, &rewards);
        let expected = Attempt { ending: Ending::Submitted, passed: Some(true), reward: 1.0 - 0.5 - 0.5 };
        assert_eq!(attempt(&episode), expected, "90 tokens of response");
        episode.verdict = Verdict::Infrastructure("the sandbox broke".into());
        assert_eq!(attempt(&episode).passed, None);
        episode.transcript = Transcript::default();
        episode.verdict = Verdict::Failed("not submitted".into());
        assert_eq!(attempt(&episode), Attempt { passed: Some(false), reward: -0.5, ..expected });
    }

    #[test]
    fn a_masked_attempt_is_masked_even_if_it_passes() {
        let attempts = [attempt(Ending::TurnLimit, true), attempt(Ending::Submitted, false), attempt(Ending::BadCall, false)];
        let inside = of(&attempts, &compact(MaskedAttempts::InBaseline));
        assert_eq!(inside, [Masked { in_batch: true }, Trained(-0.5), Trained(-0.5)]);
        let outside = of(&attempts, &compact(MaskedAttempts::OutsideBaseline));
        assert_eq!(outside, [Masked { in_batch: false }, Uninformative, Uninformative], "what is left never passes");
    }

    #[test]
    fn faults_are_always_out() {
        let attempts = [
            attempt(Ending::Submitted, true),
            Attempt { ending: Ending::Infrastructure, passed: None, reward: f64::NAN },
            attempt(Ending::Submitted, false),
            Attempt { ending: Ending::Submitted, passed: None, reward: 1e9 }, // lost while it was graded
            Attempt { ending: Ending::Infrastructure, passed: Some(true), reward: 1.0 },
        ];
        for groups in [GroupFilter::Outcome, GroupFilter::Reward, GroupFilter::Off] {
            let filters = FilterSettings { groups, ..compact(MaskedAttempts::InBaseline) };
            assert_eq!(of(&attempts, &filters), [Trained(1.0), Lost, Trained(-1.0), Lost, Lost]);
        }
        assert_eq!(group_outcome(&attempts), GroupOutcome::Mixed);
        assert_eq!(of(&attempts[1..2], &FilterSettings::default()), [Lost]);
        assert_eq!(of(&[], &FilterSettings::default()), []);
    }

    #[test]
    fn groups_are_filtered_by_outcome_unless_asked() {
        // All fail, at different lengths: a penalty makes their rewards differ.
        let failed: Vec<Attempt> =
            [0.0, -0.5, -1.0].map(|reward| Attempt { ending: Ending::Submitted, passed: Some(false), reward }).to_vec();
        let by = |groups| of(&failed, &FilterSettings { groups, ..FilterSettings::default() });
        assert_eq!(by(GroupFilter::Outcome), [Uninformative; 3]);
        assert_eq!(by(GroupFilter::Reward), [Trained(0.75), Trained(0.0), Trained(-0.75)]);
        assert_eq!(by(GroupFilter::Off), by(GroupFilter::Reward));
        let solved = [attempt(Ending::Submitted, true); 3];
        assert_eq!(of(&solved, &FilterSettings::default()), [Uninformative; 3]);
        assert_eq!(of(&solved, &FilterSettings { groups: GroupFilter::Off, ..FilterSettings::default() }), [Trained(0.0); 3]);
        let outcomes = [group_outcome(&failed), group_outcome(&solved), group_outcome(&[])];
        assert_eq!(outcomes, [GroupOutcome::NonePassed, GroupOutcome::AllPassed, GroupOutcome::Lost]);
    }

    #[test]
    fn zero_advantages_are_dropped_if_asked() {
        // 0.1 + 0.2 is not 0.3 in binary: its advantage is some 1e-17.
        let rewards = [0.0, 0.6, 0.1 + 0.2];
        let attempts = rewards.map(|reward| Attempt { ending: Ending::Submitted, passed: Some(reward == 0.6), reward });
        let filters = FilterSettings { drop_zero_advantage: true, ..FilterSettings::default() };
        let found = of(&attempts, &filters);
        assert_eq!(found[2], ZeroAdvantage);
        assert!(!found[2].counts_as_sequence() && found[0].counts_as_sequence());
        let solved = [attempt(Ending::Submitted, true); 2];
        let all = FilterSettings { groups: GroupFilter::Off, ..filters };
        assert_eq!(of(&solved, &all), [ZeroAdvantage; 2]);
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(compact(MaskedAttempts::InBaseline).check(), Ok(()));
        let wrong = FilterSettings {
            masked_endings: vec![Ending::Infrastructure, Ending::Timeout, Ending::Timeout],
            ..FilterSettings::default()
        };
        assert_eq!(
            wrong.check().unwrap_err().to_string(),
            "masked_endings is infrastructure, timeout, timeout: leave infrastructure out: such attempts never train\n\
             masked_endings is infrastructure, timeout, timeout: name each ending once"
        );
        let all = FilterSettings { masked_endings: Ending::ALL[..5].to_vec(), ..FilterSettings::default() };
        assert!(all.check().unwrap_err().to_string().contains("nothing trains"));
    }

    proptest! {
        #[test]
        fn order_of_attempts_does_not_matter(
            group in prop::collection::vec((0..6usize, prop::option::of(any::<bool>()), -1.0..1.0f64), 1..12),
            rotation in 0..12usize,
            outside in any::<bool>(),
        ) {
            let mut attempts: Vec<Attempt> = group
                .into_iter()
                .map(|(ending, passed, reward)| Attempt { ending: Ending::ALL[ending], passed, reward })
                .collect();
            let masked_attempts = if outside { MaskedAttempts::OutsideBaseline } else { MaskedAttempts::InBaseline };
            let filters = FilterSettings { drop_zero_advantage: true, ..compact(masked_attempts) };
            let rotation = rotation % attempts.len();
            let mut expected = of(&attempts, &filters);
            expected.rotate_left(rotation);
            attempts.rotate_left(rotation);
            for (found, expected) in of(&attempts, &filters).into_iter().zip(expected) {
                match (found, expected) {
                    (Trained(found), Trained(expected)) => prop_assert!((found - expected).abs() < 1e-12),
                    _ => prop_assert_eq!(found, expected),
                }
            }
        }
    }
}
