//! Cutting a step's samples into micro-batches that bound the memory of activations.

use crate::types::{Batch, Sample};

/// Samples that go through the model together.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatch {
    /// Indices of the samples, in the order in which they are packed.
    pub members: Vec<usize>,
    pub packed: Batch,
}

impl MicroBatch {
    /// For a rank that has nothing to compute, but takes part in what all ranks do.
    pub(super) fn empty() -> MicroBatch {
        pack(&[], Vec::new())
    }
}

/// Groups samples into packed batches of at most `max_tokens` tokens (a longer sample gets a batch of its own), short
/// ones first.
///
/// The order depends on lengths and indices alone. Sorting by length keeps the attention tiles of a batch alike.
pub fn micro_batches(samples: &[Sample], max_tokens: usize) -> Vec<MicroBatch> {
    let mut order: Vec<usize> = (0..samples.len()).filter(|&index| samples[index].trained_count() > 0).collect();
    order.sort_by_key(|&index| (samples[index].ids.len(), index));
    let mut batches = Vec::new();
    let mut members: Vec<usize> = Vec::new();
    let mut tokens = 0;
    for index in order {
        let length = samples[index].ids.len();
        if !members.is_empty() && tokens + length > max_tokens {
            batches.push(pack(samples, std::mem::take(&mut members)));
            tokens = 0;
        }
        members.push(index);
        tokens += length;
    }
    if !members.is_empty() {
        batches.push(pack(samples, members));
    }
    batches
}

fn pack(samples: &[Sample], members: Vec<usize>) -> MicroBatch {
    let sequences: Vec<&[u32]> = members.iter().map(|&index| samples[index].ids.as_slice()).collect();
    let packed = Batch::pack(&sequences, |sequence, token| samples[members[sequence]].trained[token]);
    MicroBatch { members, packed }
}

/// A value for each trained token of a batch's samples, in the order of its scored rows: `value(sample index, token)`.
pub(super) fn per_token<T>(samples: &[Sample], members: &[usize], value: impl Fn(usize, usize) -> T) -> Vec<T> {
    let trained = |index: usize| (1..samples[index].ids.len()).filter(move |&token| samples[index].trained[token]);
    members
        .iter()
        .flat_map(|&index| trained(index).map(move |token| (index, token)))
        .map(|(index, token)| value(index, token))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(length: usize, trained: usize) -> Sample {
        Sample {
            ids: (0..length as u32).collect(),
            trained: (0..length).map(|token| token >= length - trained).collect(),
            sampled_log_probs: vec![0.0; length],
            advantage: length as f32,
        }
    }

    proptest! {
        #[test]
        fn every_trained_token_is_scored_once_and_batches_are_bounded(
            shapes in proptest::collection::vec((2usize..40, 0usize..2), 0..30), max_tokens in 1usize..100
        ) {
            let samples: Vec<Sample> = shapes.iter().map(|&(length, trained)| sample(length, trained * (length - 1))).collect();
            let batches = micro_batches(&samples, max_tokens);
            let mut seen: Vec<usize> = batches.iter().flat_map(|batch| batch.members.clone()).collect();
            seen.sort();
            let expected: Vec<usize> = (0..samples.len()).filter(|&index| samples[index].trained_count() > 0).collect();
            prop_assert_eq!(seen, expected);
            for MicroBatch { members, packed } in &batches {
                prop_assert!(packed.ids.len() <= max_tokens || members.len() == 1);
                let targets = per_token(&samples, members, |index, token| samples[index].ids[token]);
                prop_assert_eq!(packed.targets(), targets);
            }
        }
    }
}
