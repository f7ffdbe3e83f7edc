//! How token losses become one number. Every denominator is a count over the whole update, over all micro-batches and
//! ranks, so that shares simply add up; a mean taken per micro-batch would not.

use serde::{Deserialize, Serialize};

/// What a token's loss is divided by. `T_i` are the trained tokens of its sequence, `N` those of the whole update, `B` the
/// sequences of the whole update, `C` a constant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// `N`: every token counts the same, a trajectory as much as it is long (DAPO, over the whole update as in verl).
    #[default]
    TokenMean,
    /// `B T_i`: every trajectory counts the same (GRPO, GSPO).
    SeqMeanTokenMean,
    /// `B`.
    SeqMeanTokenSum,
    /// `B C`: no token's weight depends on a length (Dr. GRPO; DeepSWE with its longest response as `C`, whose fork calls
    /// it `seq-mean-token-sum`).
    SeqMeanTokenSumNorm,
    /// `C` alone.
    Constant,
}

impl Aggregation {
    pub fn name(self) -> &'static str {
        match self {
            Aggregation::TokenMean => "token_mean",
            Aggregation::SeqMeanTokenMean => "seq_mean_token_mean",
            Aggregation::SeqMeanTokenSum => "seq_mean_token_sum",
            Aggregation::SeqMeanTokenSumNorm => "seq_mean_token_sum_norm",
            Aggregation::Constant => "constant",
        }
    }

    pub fn needs_constant(self) -> bool {
        matches!(self, Aggregation::SeqMeanTokenSumNorm | Aggregation::Constant)
    }

    /// What the losses of a sequence with `trained` trained tokens are divided by. Counts below 1 count as 1, so that an
    /// empty update gives 0 rather than NaN.
    pub(super) fn denominator(self, trained: usize, constant: Option<f64>, of: &Denominators) -> f64 {
        let (tokens, sequences) = (of.tokens.max(1.0), of.sequences.max(1.0));
        let constant = constant.unwrap_or(1.0);
        match self {
            Aggregation::TokenMean => tokens,
            Aggregation::SeqMeanTokenMean => sequences * trained.max(1) as f64,
            Aggregation::SeqMeanTokenSum => sequences,
            Aggregation::SeqMeanTokenSumNorm => sequences * constant,
            Aggregation::Constant => constant,
        }
    }
}

/// Counts over the whole update, all micro-batches and ranks. They are floats so that they can be summed over ranks and,
/// where several optimizer steps share one rollout, be averages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Denominators {
    /// Trained tokens.
    pub tokens: f64,
    /// Sequences that a mean over sequences divides by: those with a trained token, and masked ones if the recipe counts
    /// them.
    pub sequences: f64,
}

impl Denominators {
    /// Counts trained tokens and the sequences that have any.
    ///
    /// `trained`: `[tokens]`; `starts`: `[sequences + 1]` offsets into it.
    pub fn count(trained: &[bool], starts: &[usize]) -> Denominators {
        let count = |range: &[bool]| range.iter().filter(|&&trained| trained).count();
        let sequences = starts.windows(2).filter(|ends| count(&trained[ends[0]..ends[1]]) > 0).count();
        Denominators { tokens: count(trained) as f64, sequences: sequences as f64 }
    }

    /// Adds what another micro-batch or rank has.
    pub fn add(&mut self, other: &Denominators) {
        self.tokens += other.tokens;
        self.sequences += other.sequences;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_denominators() {
        let trained = [true, false, true, false, false, true];
        let mut counts = Denominators::count(&trained, &[0, 3, 5, 6, 6]);
        assert_eq!(counts, Denominators { tokens: 3.0, sequences: 2.0 }, "sequences without a trained token do not count");
        counts.add(&Denominators { tokens: 5.0, sequences: 2.0 });
        let of = |aggregation: Aggregation| aggregation.denominator(2, Some(100.0), &counts);
        assert_eq!(of(Aggregation::TokenMean), 8.0);
        assert_eq!(of(Aggregation::SeqMeanTokenMean), 8.0);
        assert_eq!(of(Aggregation::SeqMeanTokenSum), 4.0);
        assert_eq!(of(Aggregation::SeqMeanTokenSumNorm), 400.0);
        assert_eq!(of(Aggregation::Constant), 100.0);
        assert_eq!(Aggregation::TokenMean.denominator(0, None, &Denominators::default()), 1.0);
        assert_eq!(Aggregation::SeqMeanTokenMean.denominator(0, None, &Denominators::default()), 1.0);
    }
}
