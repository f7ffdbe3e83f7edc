//! Groups of attempts: what each attempt is worth, what becomes of it, and what of a rollout is trained on.

use super::{Collected, RlSettings};
use crate::algorithm::{Attempt, GroupOutcome, Reward, Standing, group_outcome, standings};
use crate::types::{Episode, Sample};

/// The attempts at one task with what the settings make of them.
pub struct Group<'a> {
    pub episodes: &'a [Episode],
    /// `[episodes]`; those of infrastructure faults mean nothing.
    pub rewards: Vec<Reward>,
    pub outcome: GroupOutcome,
    /// `[episodes]`
    pub standings: Vec<Standing>,
}

impl<'a> Group<'a> {
    pub fn judge(episodes: &'a [Episode], settings: &RlSettings) -> Group<'a> {
        let attempts: Vec<Attempt> = episodes.iter().map(|episode| Attempt::of(episode, &settings.reward)).collect();
        Group {
            episodes,
            rewards: episodes.iter().map(|episode| Reward::of(episode, &settings.reward)).collect(),
            outcome: group_outcome(&attempts),
            standings: standings(&attempts, &settings.filter, &settings.advantage),
        }
    }

    /// Whether some attempt moves the weights.
    pub fn worth_training(&self) -> bool {
        self.standings.iter().any(|standing| standing.advantage().is_some_and(|advantage| advantage != 0.0))
    }
}

/// Every group of a rollout, in order.
pub fn judge<'a>(collected: &'a Collected, settings: &RlSettings) -> Vec<Group<'a>> {
    collected.episodes.chunks(settings.group_size).map(|episodes| Group::judge(episodes, settings)).collect()
}

/// Steps between the weights that sampled the oldest token of an episode and weights number `version`, which are about to learn from
/// it; 0 without sampled tokens.
pub fn lag(episode: &Episode, version: u32) -> usize {
    let transcript = &episode.transcript;
    let sampled = transcript.versions.iter().zip(&transcript.sampled).filter(|(_, sampled)| **sampled);
    sampled.map(|(&sampler, _)| version.saturating_sub(sampler)).max().unwrap_or(0) as usize
}

/// The sequences to train on, in order, of the groups that were chosen. An attempt that compact filtering masks, but that counts as one of
/// the batch, has no trained token. Those older than `settings.most_lag` are left out; returns also how many.
pub fn samples(groups: &[Group], chosen: &[usize], version: u32, settings: &RlSettings) -> (Vec<Sample>, usize) {
    let (mut samples, mut too_old) = (Vec::new(), 0);
    for group in chosen.iter().map(|&group| &groups[group]) {
        for (episode, standing) in group.episodes.iter().zip(&group.standings) {
            if !standing.counts_as_sequence() {
                continue;
            }
            if lag(episode, version) > settings.most_lag {
                too_old += 1;
                continue;
            }
            let mut sample = Sample::of(&episode.transcript, standing.advantage().unwrap_or(0.0) as f32);
            if standing.advantage().is_none() {
                sample.trained.fill(false);
            }
            samples.push(sample);
        }
    }
    (samples, too_old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{FilterSettings, MaskedAttempts};
    use crate::types::{Ending, EpisodeCounts, Transcript, Verdict};

    fn episode(verdict: Verdict, ending: Ending, version: u32) -> Episode {
        let mut transcript = Transcript::default();
        transcript.push_environment(&[1, 2]);
        transcript.push_sampled(&[3], &[-0.5], version);
        transcript.push_sampled(&[4], &[-0.25], 7);
        let counts = EpisodeCounts::default();
        Episode { task_id: "task".into(), task_index: 0, sample_index: 0, transcript, ending, verdict, counts }
    }

    fn attempt(verdict: Verdict) -> Episode {
        let ending = if verdict.infrastructure() { Ending::Infrastructure } else { Ending::Submitted };
        episode(verdict, ending, 7)
    }

    fn pass() -> Verdict {
        Verdict::Passed
    }

    fn fail() -> Verdict {
        Verdict::Failed("1 of 8 tests failed".into())
    }

    fn fault() -> Verdict {
        Verdict::Infrastructure("the sandbox broke".into())
    }

    fn collected(episodes: Vec<Episode>) -> Collected {
        Collected { episodes, ..Collected::default() }
    }

    #[test]
    fn faults_leave_their_group_and_groups_without_signal_are_not_trained() {
        let verdicts = [[pass(), fail(), fault()], [pass(), pass(), fault()], [fault(), fault(), fault()]];
        let collected = collected(verdicts.concat().into_iter().map(attempt).collect());
        let settings = RlSettings { group_size: 3, ..RlSettings::default() };
        let groups = judge(&collected, &settings);
        let outcomes: Vec<GroupOutcome> = groups.iter().map(|group| group.outcome).collect();
        assert_eq!(outcomes, [GroupOutcome::Mixed, GroupOutcome::AllPassed, GroupOutcome::Lost]);
        assert_eq!(groups.iter().map(Group::worth_training).collect::<Vec<_>>(), [true, false, false]);
        let (found, too_old) = samples(&groups, &[0, 1, 2], 7, &settings);
        assert_eq!((found.iter().map(|sample| sample.advantage).collect::<Vec<_>>(), too_old), (vec![1.0, -1.0], 0));
        assert_eq!(found[0].trained, [false, false, true, true]);
        assert_eq!(found[0].sampled_log_probs, [0.0, 0.0, -0.5, -0.25]);
    }

    #[test]
    fn a_masked_attempt_is_a_sequence_without_tokens_or_none_at_all() {
        let collected = collected(vec![attempt(pass()), attempt(fail()), episode(fail(), Ending::TokenLimit, 7)]);
        for (masked_attempts, advantages) in
            [(MaskedAttempts::InBaseline, vec![1.0, -0.5, 0.0]), (MaskedAttempts::OutsideBaseline, vec![1.0, -1.0])]
        {
            let filter =
                FilterSettings { masked_endings: vec![Ending::TokenLimit], masked_attempts, ..FilterSettings::default() };
            let settings = RlSettings { group_size: 3, filter, ..RlSettings::default() };
            let (found, _) = samples(&judge(&collected, &settings), &[0], 7, &settings);
            assert_eq!(found.iter().map(|sample| sample.advantage).collect::<Vec<_>>(), advantages);
            assert!(found.iter().all(|sample| (sample.trained_count() > 0) == (sample.advantage != 0.0)));
        }
    }

    #[test]
    fn the_lag_is_that_of_the_oldest_token_and_bounded() {
        let collected = collected(vec![episode(pass(), Ending::Submitted, 5), episode(fail(), Ending::Submitted, 7)]);
        let settings = |most_lag| RlSettings { group_size: 2, most_lag, ..RlSettings::default() };
        assert_eq!(collected.episodes.iter().map(|episode| lag(episode, 8)).collect::<Vec<_>>(), [3, 1]);
        for (most_lag, expected) in [(3, (2, 0)), (2, (1, 1)), (0, (0, 2))] {
            let settings = settings(most_lag);
            let (found, too_old) = samples(&judge(&collected, &settings), &[0], 8, &settings);
            assert_eq!((found.len(), too_old), expected);
        }
    }
}
