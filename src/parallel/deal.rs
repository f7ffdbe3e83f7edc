//! Which replica computes which micro-batch.

use std::cmp::Reverse;

use super::context::load;
use crate::types::Batch;

/// Deals batches to `replicas`: `[replicas][rounds]`, the batches' indices, `None` where there is nothing left to compute.
///
/// All ranks gather the same layers at the same time, so the replicas go through their batches in step: a round takes as long as its
/// heaviest batch. Batches in order of their load, so many at a time, make the sum of these times least. A token costs the keys it
/// attends to and `pairs_per_token`, as in [`ContextPlan`](super::ContextPlan). Depends on lengths and order alone; 0 replicas are read as 1.
pub fn deal<'a>(
    batches: impl IntoIterator<Item = &'a Batch>,
    replicas: usize,
    pairs_per_token: usize,
) -> Vec<Vec<Option<usize>>> {
    let loads: Vec<u128> = batches.into_iter().map(|batch| batch_load(batch, pairs_per_token)).collect();
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&index| (Reverse(loads[index]), index));
    let replicas = replicas.max(1);
    let rounds = loads.len().div_ceil(replicas);
    let of_replica = |replica| (0..rounds).map(move |round| round * replicas + replica);
    (0..replicas).map(|replica| of_replica(replica).map(|place| order.get(place).copied()).collect()).collect()
}

fn batch_load(batch: &Batch, pairs_per_token: usize) -> u128 {
    batch.lengths().map(|length| load(0, length, pairs_per_token)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn batch(lengths: &[usize]) -> Batch {
        let sequences: Vec<Vec<u32>> = lengths.iter().map(|&length| vec![0; length]).collect();
        Batch::pack(&sequences.iter().map(Vec::as_slice).collect::<Vec<_>>(), |_, _| false)
    }

    #[test]
    fn alike_batches_run_together() {
        let batches = [batch(&[10]), batch(&[1000]), batch(&[999]), batch(&[5, 5, 5]), batch(&[11])];
        assert_eq!(deal(&batches, 2, 0), [vec![Some(1), Some(4), Some(3)], vec![Some(2), Some(0), None]]);
        assert_eq!(deal(&batches, 1, 0), [[1, 2, 4, 0, 3].map(Some)]);
        assert_eq!(deal(&[], 3, 0), vec![vec![]; 3]);
    }

    proptest! {
        #[test]
        fn every_batch_is_dealt_once_and_no_pairing_of_two_is_better(
            lengths in proptest::collection::vec(1usize..2000, 0..24), replicas in 1usize..9, pairs_per_token in 0usize..3000
        ) {
            let batches: Vec<Batch> = lengths.iter().map(|&length| batch(&[length])).collect();
            let dealt = deal(&batches, replicas, pairs_per_token);
            prop_assert_eq!(dealt.len(), replicas);
            let rounds = lengths.len().div_ceil(replicas);
            prop_assert!(dealt.iter().all(|batches| batches.len() == rounds));
            let mut seen: Vec<usize> = dealt.iter().flatten().flatten().copied().collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            // Every batch of a round is at least as heavy as every one of the next: swapping two between rounds cannot help.
            let loads = |round: usize| dealt.iter().filter_map(move |batches| batches[round]).map(|index| lengths[index]);
            for round in 1..rounds {
                prop_assert!(loads(round - 1).min() >= loads(round).max());
            }
            // Only the last round has gaps.
            prop_assert!(dealt.iter().flat_map(|batches| batches.iter().take(rounds.saturating_sub(1))).all(Option::is_some));
        }
    }
}
