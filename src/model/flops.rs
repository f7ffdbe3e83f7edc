//! Floating-point operations that a training step asks of a model: the numerator of MFU. Only what the maths needs counts, not
//! what is computed twice to save memory.

use super::config::ModelConfig;
use super::parameters::{Kind, Layout};

/// FLOPs of a forward and backward pass, a multiplication and an addition counted as two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFlops {
    /// 6 per parameter and row that is multiplied by it (2 forward, 4 backward): the layers' matrices for every token, the head's for
    /// every scored token. Looking up an embedding, norms and biases are not counted.
    pub matrices: f64,
    /// `layers x query_width x sum over sequences of length^2`: the attention product over the full square, of which the convention
    /// takes `c` times (4 forward, 8 backward; Chowdhery et al. 2022, appendix B).
    pub attention_squares: f64,
}

impl StepFlops {
    /// Attention charged over the causal half only.
    pub const CAUSAL: f64 = 6.0;
    /// Attention charged over the whole square, as if nothing were masked.
    pub const FULL: f64 = 12.0;

    /// Of a step over packed sequences of `lengths`, `scored` tokens of which are trained.
    pub fn of(config: &ModelConfig, lengths: &[usize], scored: usize) -> StepFlops {
        let layout = Layout::new(config);
        let matrices = layout.entries.iter().filter(|entry| matches!(entry.kind, Kind::Matrix | Kind::ResidualMatrix));
        let layers: usize = matrices.map(|entry| entry.length()).sum();
        let head = layout.entries[layout.head].length();
        let tokens: usize = lengths.iter().sum();
        let squares: f64 = lengths.iter().map(|&length| (length as f64).powi(2)).sum();
        StepFlops {
            matrices: 6.0 * (layers as f64 * tokens as f64 + head as f64 * scored as f64),
            attention_squares: (config.layers * config.heads().query_width()) as f64 * squares,
        }
    }

    /// With attention counted `c` = [`StepFlops::CAUSAL`] or [`StepFlops::FULL`] times.
    pub fn total(&self, c: f64) -> f64 {
        self.matrices + c * self.attention_squares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand for `tiny`. A layer multiplies by 256 x 128 (queries, keys, values) + 128 x 128 (output) + 768 x 128 (gate, up)
    /// + 128 x 384 (down) = 196,608 parameters, the head by 440 x 128 = 56,320.
    #[test]
    fn counted_by_hand() {
        let config = ModelConfig::named("tiny").expect("a known shape");
        let flops = StepFlops::of(&config, &[4, 2], 3);
        assert_eq!(flops.matrices, 6.0 * (2.0 * 196_608.0 * 6.0 + 56_320.0 * 3.0));
        assert_eq!(flops.attention_squares, 2.0 * 128.0 * (16.0 + 4.0));
        assert_eq!(flops.total(StepFlops::CAUSAL), 15_169_536.0 + 30_720.0);
        assert_eq!(flops.total(StepFlops::FULL), 15_169_536.0 + 61_440.0);
    }

    /// One sequence of 4,096 tokens, all scored: 6 N per token, N without the embedding that is only looked up.
    #[test]
    fn a_published_shape() {
        let config = ModelConfig::named("qwen3-8b").expect("a known shape");
        let flops = StepFlops::of(&config, &[4096], 4096);
        let layer = 6144.0 * 4096.0 + 4096.0 * 4096.0 + 3.0 * 12_288.0 * 4096.0;
        assert_eq!(flops.matrices, 6.0 * 4096.0 * (36.0 * layer + 151_936.0 * 4096.0));
        assert_eq!(flops.attention_squares, 36.0 * 4096.0 * 4096.0 * 4096.0);
    }
}
