//! Random numbers that depend on what they are for, never on when they are drawn.
//!
//! A [`Key`] names a purpose and indices such as (seed, step, task, sample, position); every draw from it is a pure
//! function of the key and a counter. Two runs that do the same work in another order, with another number of
//! threads, or after a resume, therefore draw the same numbers (DESIGN, rule 6).

/// What a stream of random numbers is for. The discriminants are part of every run's reproducibility: append only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    Weights = 1,
    SampleToken = 2,
    DrawTasks = 3,
    Demonstration = 4,
    ShuffleDemonstrations = 5,
    Evaluation = 6,
    Bootstrap = 7,
    GenerateTask = 8,
    Benchmark = 9,
    /// The seeds of later stages of a run.
    Stage = 10,
}

/// A random stream: `(purpose, indices)` hashed to a state, then SplitMix64 in counter mode.
#[derive(Clone, Debug)]
pub struct Key {
    state: u64,
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits with full avalanche.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Key {
    pub fn new(purpose: Purpose, indices: &[u64]) -> Key {
        let mut state = mix(purpose as u64 ^ GOLDEN);
        for &index in indices {
            state = mix(state.wrapping_add(GOLDEN) ^ mix(index.wrapping_add(GOLDEN)));
        }
        Key { state }
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// Uniform in `[0, 1)` with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in `0..bound`; `bound` must be above 0. The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "an empty range has no member to draw");
        ((self.next_u64() as u128 * bound as u128) >> 64) as usize
    }

    /// Standard normal, by Box and Muller's transform (one of its two values).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// As if [`Key::normal`] had been called so many times.
    pub fn skip_normals(&mut self, count: usize) {
        self.state = self.state.wrapping_add(GOLDEN.wrapping_mul(2 * count as u64));
    }

    /// True with the given probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_key_same_numbers_and_every_index_matters() {
        let draw = |indices: &[u64]| Key::new(Purpose::SampleToken, indices).next_u64();
        assert_eq!(draw(&[1, 2, 3]), draw(&[1, 2, 3]));
        let others = [draw(&[1, 2, 3]), draw(&[2, 1, 3]), draw(&[1, 2]), draw(&[1, 2, 3, 0]), draw(&[0, 2, 3])];
        for (index, value) in others.iter().enumerate() {
            assert!(!others[..index].contains(value));
        }
        assert_ne!(Key::new(Purpose::Weights, &[1]).next_u64(), Key::new(Purpose::DrawTasks, &[1]).next_u64());
    }

    #[test]
    fn moments_of_uniform_and_normal() {
        let count = 100_000;
        let mut key = Key::new(Purpose::Weights, &[7]);
        let mean: f64 = (0..count).map(|_| key.uniform()).sum::<f64>() / count as f64;
        assert!((mean - 0.5).abs() < 0.005, "mean {mean}");
        let normals: Vec<f64> = (0..count).map(|_| key.normal()).collect();
        let mean = normals.iter().sum::<f64>() / count as f64;
        let variance = normals.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "mean {mean} variance {variance}");
    }
}
