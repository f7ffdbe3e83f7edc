//! The line of `metrics.jsonl` that a step writes: whether training is well.

use std::collections::BTreeMap;

use serde::Serialize;

use super::groups::{Group, lag};
use super::{Collected, RlSettings};
use crate::algorithm::{GroupOutcome, Reward, Standing};
use crate::evaluate::count_endings;
use crate::train::StepMetrics;
use crate::types::{Ending, Episode};

/// Shares and means are over what is named; a figure that is not defined, or not finite, is `null`. Only `seconds` and `speed` differ
/// between equal runs.
#[derive(Serialize)]
pub struct Line {
    kind: &'static str,
    step: usize,
    #[serde(flatten)]
    pub rewards: Rewards,
    #[serde(flatten)]
    pub groups: Groups,
    #[serde(flatten)]
    attempts: Attempts,
    #[serde(flatten)]
    pub update: Update,
    #[serde(flatten)]
    pub sampler: Sampler,
    pub seconds: BTreeMap<&'static str, f64>,
    pub speed: Speed,
}

/// Means over the attempts that were not lost.
#[derive(Serialize)]
pub struct Rewards {
    pub reward_mean: f64,
    reward_deviation: f64,
    /// The parts that `reward_mean` is the sum of.
    reward_outcome: f64,
    reward_step_penalty: f64,
    reward_overlong_penalty: f64,
    pub pass_rate: f64,
    /// Share of groups in which some attempt passed.
    pub pass_any: f64,
}

/// Groups by how they came out, faults aside; all that were rolled out.
#[derive(Serialize)]
pub struct Groups {
    groups: usize,
    groups_all_passed: usize,
    groups_none_passed: usize,
    groups_mixed: usize,
    groups_lost: usize,
    /// Of which some attempt was trained on.
    pub groups_used: usize,
    /// Found by dynamic sampling beyond those wanted.
    groups_surplus: usize,
    batches: usize,
}

#[derive(Serialize)]
struct Attempts {
    /// Lost to infrastructure faults.
    dropped: usize,
    /// Left out by compact filtering, by ending.
    masked: BTreeMap<&'static str, usize>,
    zero_advantage: usize,
    too_old: usize,
    endings: BTreeMap<String, usize>,
    tokens_sampled: usize,
    #[serde(flatten)]
    lengths: BTreeMap<String, f64>,
    ran_tests: f64,
    edited_after_failure: f64,
    verdicts_executed: u64,
    verdicts_remembered: u64,
}

/// What the optimizer steps of the rollout did; all per trained token but for the norm.
#[derive(Serialize)]
pub struct Update {
    loss: f64,
    learning_rate: f64,
    /// Before clipping, mean over updates.
    pub gradient_norm: f64,
    pub entropy: f64,
    pub updates: usize,
    pub updates_skipped: usize,
    /// No update changed the weights.
    skipped: bool,
    pub tokens_trained: usize,
    clip_fraction: f64,
    clip_fraction_low: f64,
    clip_fraction_high: f64,
    dual_clip_fraction: f64,
    /// Of probabilities, new over old.
    ratio_min: f64,
    ratio_max: f64,
    /// Estimates of KL(old || new), Schulman's k1 and k3.
    kl_k1: f64,
    kl_k3: f64,
    /// KL(policy || reference); absent without a KL term.
    #[serde(skip_serializing_if = "Option::is_none")]
    reference_kl: Option<f64>,
    not_finite: u64,
}

/// The sampler's probabilities against the trainer's.
#[derive(Serialize)]
pub struct Sampler {
    /// Steps between the weights that sampled the oldest token and those that learn from it.
    pub lag: usize,
    /// Largest difference between sampled and recomputed log-probabilities. With a lag it also says how far the weights have moved.
    pub mismatch: f64,
    mismatch_share: f64,
    mismatch_k3: f64,
    mismatch_correlation: Option<f64>,
    perplexity_sampled: f64,
    perplexity_recomputed: f64,
    /// Importance weights; raw ratios where none are applied.
    weight_mean: f64,
    weight_max: f64,
    /// Mean of raw ratios, of tokens or of sequences as the weight's level says.
    weight_ratio_mean: f64,
    /// Share of raw ratios beyond the weight's upper and lower bound.
    weight_above: f64,
    weight_below: f64,
    effective_sample_size: f64,
    rejected_share: f64,
}

/// Wall-clock figures besides the seconds by phase.
#[derive(Serialize)]
pub struct Speed {
    /// Of the rollout: in the engine, mean over ranks.
    engine_seconds: f64,
    /// Of tests, over all sandboxes.
    sandbox_seconds: f64,
    pub sampled_tokens_per_second: f64,
    trained_tokens_per_second: f64,
    /// Model FLOPs of training (attention counted over the causal half) over what all devices could do in its seconds; `null` where the
    /// device's peak is not known.
    mfu: Option<f64>,
}

/// What training on a rollout took.
pub struct Training {
    pub metrics: StepMetrics,
    pub learning_rate: f64,
    pub seconds: f64,
    /// Share of the devices' peak, where that is known.
    pub mfu: Option<f64>,
    pub too_old: usize,
}

impl Line {
    /// Share of attempts that ran the visible tests.
    pub fn ran_tests(&self) -> f64 {
        self.attempts.ran_tests
    }

    /// Of step `step`, counted from 0, that trained weights number `version`.
    pub fn of(
        step: usize,
        version: u32,
        collected: &Collected,
        groups: &[Group],
        training: &Training,
        settings: &RlSettings,
    ) -> Line {
        let Training { metrics, learning_rate, seconds, mfu, too_old } = training;
        let valid: Vec<&Episode> = collected.episodes.iter().filter(|episode| !episode.verdict.infrastructure()).collect();
        let attempts = Attempts::of(collected, groups, &valid, *too_old);
        let (statistics, mismatch) = (&metrics.statistics, &metrics.mismatch);
        let speed = Speed {
            engine_seconds: collected.engine_seconds,
            sandbox_seconds: collected.sandbox_seconds,
            sampled_tokens_per_second: attempts.tokens_sampled as f64 / collected.seconds.max(1e-9),
            trained_tokens_per_second: metrics.tokens_trained as f64 / seconds.max(1e-9),
            mfu: *mfu,
        };
        Line {
            kind: "rl",
            step: step + 1,
            rewards: Rewards::of(groups, &valid),
            groups: Groups::of(collected, groups),
            attempts,
            update: Update {
                loss: metrics.loss,
                learning_rate: *learning_rate,
                gradient_norm: metrics.gradient_norm,
                entropy: metrics.entropy,
                updates: metrics.updates,
                updates_skipped: metrics.updates_skipped,
                skipped: metrics.skipped,
                tokens_trained: metrics.tokens_trained,
                clip_fraction: statistics.clip_fraction(),
                clip_fraction_low: statistics.clip_fraction_low(),
                clip_fraction_high: statistics.clip_fraction_high(),
                dual_clip_fraction: statistics.dual_clip_fraction(),
                ratio_min: statistics.ratio_min,
                ratio_max: statistics.ratio_max,
                kl_k1: statistics.approximate_kl(),
                kl_k3: statistics.k3(),
                reference_kl: (settings.loss.kl.coefficient != 0.0).then(|| statistics.reference_kl()),
                not_finite: statistics.not_finite,
            },
            sampler: Sampler {
                lag: valid.iter().map(|episode| lag(episode, version)).max().unwrap_or(0),
                mismatch: mismatch.max_absolute,
                mismatch_share: mismatch.differing_share(),
                mismatch_k3: mismatch.k3(),
                mismatch_correlation: mismatch.correlation(),
                perplexity_sampled: mismatch.sampled_perplexity(),
                perplexity_recomputed: mismatch.recomputed_perplexity(),
                weight_mean: metrics.weights.mean(),
                weight_max: metrics.weights.max,
                weight_ratio_mean: metrics.weights.ratio_mean(),
                weight_above: metrics.weights.fraction_above(),
                weight_below: metrics.weights.fraction_below(),
                effective_sample_size: metrics.weights.effective_sample_size(),
                rejected_share: metrics.rejected as f64 / (metrics.tokens_trained + metrics.rejected).max(1) as f64,
            },
            seconds: BTreeMap::from([("rollout", collected.seconds), ("train", *seconds)]),
            speed,
        }
    }
}

impl Rewards {
    fn of(groups: &[Group], valid: &[&Episode]) -> Rewards {
        let rewards: Vec<Reward> = groups
            .iter()
            .flat_map(|group| group.rewards.iter().zip(group.episodes))
            .filter(|(_, episode)| !episode.verdict.infrastructure())
            .map(|(reward, _)| *reward)
            .collect();
        let of = |part: fn(&Reward) -> f64| mean(rewards.iter().map(part));
        let reward_mean = of(Reward::total);
        let heard = || groups.iter().filter(|group| group.outcome != GroupOutcome::Lost);
        let solved = heard().filter(|group| group.outcome != GroupOutcome::NonePassed).count();
        Rewards {
            reward_mean,
            reward_deviation: mean(rewards.iter().map(|reward| (reward.total() - reward_mean).powi(2))).sqrt(),
            reward_outcome: of(|reward| reward.outcome),
            reward_step_penalty: of(|reward| reward.step_penalty),
            reward_overlong_penalty: of(|reward| reward.overlong_penalty),
            pass_rate: mean(valid.iter().map(|episode| f64::from(u8::from(episode.verdict.passed())))),
            pass_any: solved as f64 / heard().count() as f64,
        }
    }
}

impl Groups {
    fn of(collected: &Collected, groups: &[Group]) -> Groups {
        let came_out = |outcome| groups.iter().filter(|group| group.outcome == outcome).count();
        Groups {
            groups: groups.len(),
            groups_all_passed: came_out(GroupOutcome::AllPassed),
            groups_none_passed: came_out(GroupOutcome::NonePassed),
            groups_mixed: came_out(GroupOutcome::Mixed),
            groups_lost: came_out(GroupOutcome::Lost),
            groups_used: collected.chosen.iter().filter(|&&group| groups[group].worth_training()).count(),
            groups_surplus: collected.surplus,
            batches: collected.batches,
        }
    }
}

impl Attempts {
    fn of(collected: &Collected, groups: &[Group], valid: &[&Episode], too_old: usize) -> Attempts {
        let Collected { episodes, verdicts_executed, verdicts_remembered, .. } = collected;
        let standings = || groups.iter().flat_map(|group| group.standings.iter().zip(group.episodes));
        let mut masked: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, episode) in standings().filter(|(standing, _)| matches!(standing, Standing::Masked { .. })) {
            *masked.entry(Ending::name(episode.ending)).or_default() += 1;
        }
        let mut lengths = spread("turns", valid.iter().map(|episode| episode.counts.turns as f64).collect());
        lengths.extend(spread("episode_tokens", valid.iter().map(|episode| episode.transcript.ids.len() as f64).collect()));
        Attempts {
            dropped: episodes.len() - valid.len(),
            masked,
            zero_advantage: standings().filter(|(standing, _)| **standing == Standing::ZeroAdvantage).count(),
            too_old,
            endings: count_endings(episodes),
            tokens_sampled: episodes.iter().map(|episode| episode.transcript.sampled_count()).sum(),
            lengths,
            ran_tests: mean(valid.iter().map(|episode| f64::from(u8::from(episode.counts.runs > 0)))),
            edited_after_failure: mean(valid.iter().map(|episode| f64::from(u8::from(episode.counts.edited_after_failure)))),
            verdicts_executed: *verdicts_executed,
            verdicts_remembered: *verdicts_remembered,
        }
    }
}

/// NaN, which JSON writes as `null`, without values.
fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

/// Mean, maximum, median and 95th percentile (nearest rank) of `name`.
fn spread(name: &str, mut values: Vec<f64>) -> BTreeMap<String, f64> {
    values.sort_by(f64::total_cmp);
    let percentile = |percent: usize| match (values.len() * percent).div_ceil(100) {
        0 => f64::NAN,
        rank => values[rank - 1],
    };
    let figures =
        [("mean", mean(values.iter().copied())), ("max", percentile(100)), ("p50", percentile(50)), ("p95", percentile(95))];
    figures.map(|(figure, value)| (format!("{name}_{figure}"), value)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_by_nearest_rank() {
        let spread = |count: u32| spread("turns", (1..=count).rev().map(f64::from).collect());
        let of = |count| ["mean", "max", "p50", "p95"].map(|figure| spread(count)[&format!("turns_{figure}")]);
        assert_eq!(of(1), [1.0; 4]);
        assert_eq!(of(4), [2.5, 4.0, 2.0, 4.0]);
        assert_eq!(of(100), [50.5, 100.0, 50.0, 95.0]);
        assert!(of(0).iter().all(|figure| figure.is_nan()));
    }
}
