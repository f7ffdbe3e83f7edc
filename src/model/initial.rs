//! Fresh weights, a function of a seed: any part of a tensor is drawn alike whether or not the rest of it is.

use std::ops::Range;

use super::config::ModelConfig;
use super::parameters::{Kind, Layout};
use crate::types::{Key, Purpose};

/// Elements `range` of the stored tensor `index`: embeddings normal with deviation 0.02, matrices `1 / sqrt(fan_in)`, the two
/// output projections of a layer divided by `sqrt(2 layers)` (Radford et al. 2019), norms 1, biases 0.
pub fn initial_values(config: &ModelConfig, layout: &Layout, index: usize, range: Range<usize>, seed: u64) -> Vec<f32> {
    let entry = &layout.entries[index];
    let fan_in = 1.0 / (entry.inputs as f64).sqrt();
    let deviation = match entry.kind {
        Kind::Embedding => 0.02,
        Kind::Matrix => fan_in,
        Kind::ResidualMatrix => fan_in / (2.0 * config.layers as f64).sqrt(),
        Kind::Norm => return vec![1.0; range.len()],
        Kind::Bias => return vec![0.0; range.len()],
    };
    let mut key = Key::new(Purpose::Weights, &[seed, index as u64]);
    key.skip_normals(range.start);
    range.map(|_| (deviation * key.normal()) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_drawn_as_in_the_whole() {
        let config = ModelConfig::named("tiny").expect("a known shape");
        let layout = Layout::new(&config);
        for (index, entry) in layout.entries.iter().enumerate() {
            let whole = initial_values(&config, &layout, index, 0..entry.length(), 7);
            let (third, half) = (entry.length() / 3, entry.length() / 2);
            assert_eq!(initial_values(&config, &layout, index, third..half, 7), whole[third..half]);
        }
    }
}
