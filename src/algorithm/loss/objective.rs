//! The term of one token that carries its advantage, each formula once.

use super::super::ratio::{ratio, ratio_moves};
use super::settings::{ClipSettings, Objective};

/// GSPO's ratio is held above at the exponential of this only: it is a mean and does not vanish (verl).
const SEQUENCE_LOG_RATIO_LIMIT: f64 = 10.0;

/// Which bound a token ran into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    None,
    /// `1 - epsilon_low`.
    Low,
    /// `1 + epsilon_high`.
    High,
    Dual,
}

/// A token's loss and its derivative by the token's log-probability, for a mean over the sequence in the case of GSPO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Term {
    pub loss: f64,
    pub slope: f64,
    pub ratio: f64,
    pub bound: Bound,
}

/// `log_ratio`: log-probability now minus before the update; of GSPO, its mean over the sequence. Everything is finite.
pub(super) fn term(objective: Objective, clip: &ClipSettings, advantage: f64, log_prob: f64, log_ratio: f64) -> Term {
    match objective {
        Objective::Clip => clipped(clip, clip.dual_clip, advantage, ratio(log_ratio), ratio_moves(log_ratio)),
        Objective::Gspo => {
            let held = log_ratio.min(SEQUENCE_LOG_RATIO_LIMIT);
            clipped(clip, None, advantage, held.exp(), held == log_ratio)
        }
        Objective::Cispo => {
            let ratio = ratio(log_ratio);
            let weight = clip.hold(ratio);
            let bound = if weight > ratio {
                Bound::Low
            } else if weight < ratio {
                Bound::High
            } else {
                Bound::None
            };
            Term { loss: -weight * advantage * log_prob, slope: -weight * advantage, ratio, bound }
        }
        Objective::Reinforce => {
            Term { loss: -advantage * log_prob, slope: -advantage, ratio: ratio(log_ratio), bound: Bound::None }
        }
    }
}

/// `max(-A r, -A clip(r))`, for `A < 0` at most `-A dual_clip` (dual clip: Ye et al. 2020). `moves`: whether `ratio`
/// follows the log-probability.
fn clipped(clip: &ClipSettings, dual_clip: Option<f64>, advantage: f64, ratio: f64, moves: bool) -> Term {
    let free = -advantage * ratio;
    let held = -advantage * clip.hold(ratio);
    let ceiling = dual_clip.filter(|_| advantage < 0.0).map_or(f64::INFINITY, |dual_clip| -advantage * dual_clip);
    let bound = if free.max(held) > ceiling {
        Bound::Dual
    } else if held > free {
        if advantage > 0.0 { Bound::High } else { Bound::Low }
    } else {
        Bound::None
    };
    let slope = if bound == Bound::None && moves { free } else { 0.0 };
    Term { loss: free.max(held).min(ceiling), slope, ratio, bound }
}
