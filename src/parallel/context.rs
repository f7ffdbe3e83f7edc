//! Context parallelism on the host: which rank computes which tokens of a packed batch.
//!
//! A causal query at position `p` attends to `p + 1` keys, so equal numbers of tokens are far from equal work; and in the backward a
//! key sums over all queries after it, so that the work of keys falls where that of queries rises. Long documents are cut into chunks of
//! [`CHUNK_TOKENS`], and a chunk goes with its mirror, the first with the last: such a pair attends to as many keys as queries attend to
//! it (but for what the last chunk lacks), so that what balances the one balances the other. Pairs and short documents are dealt out, heaviest first, each to the rank with
//! the least so far. Short documents stay whole, and need nothing from other ranks.
//!
//! **Bound.** With items of load at most `m`, the most loaded of `R` ranks carries at most `mean + m (1 - 1/R)` (Graham 1966): before
//! its last item came it was the least loaded. A document stays whole only if it is at most an eighth of the mean or a single
//! pair, so no rank exceeds the mean by more than an eighth of it or the heaviest pair, whichever is more.
//!
//! The assignment is a function of the lengths alone: the same on every rank, with nothing to communicate.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::device::KEYS_PER_BLOCK;
use crate::model::{ModelConfig, StepFlops};
use crate::types::Batch;

/// Tokens of a chunk: whole blocks of keys, so that every block is of one rank.
pub const CHUNK_TOKENS: usize = 2 * KEYS_PER_BLOCK;

/// A document is short, and stays whole, where its load is at most this part of a rank's fair share.
const SHORT_DIVISOR: u128 = 8;

/// Consecutive tokens of one document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slice {
    pub document: usize,
    /// Position of the first token in its document.
    pub first: usize,
    /// Tokens, at least one.
    pub length: usize,
}

/// What every rank of a context group computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextPlan {
    pub(super) lengths: Vec<usize>,
    /// `[ranks]` slices in ascending order of document and position, adjacent ones joined.
    pub(super) slices: Vec<Vec<Slice>>,
    /// `[documents]` held by more than one rank.
    pub(super) split: Vec<bool>,
}

/// What any token costs, wherever it stands, in units of what one pair of a query and a key costs in attention: the ratio of the
/// model's other FLOPs per token to attention's per pair.
pub fn pairs_per_token(config: &ModelConfig) -> usize {
    let flops = StepFlops::of(config, &[1], 1);
    // A sequence's square is two pairs per pair that the causal mask leaves.
    (flops.matrices / (2.0 * StepFlops::CAUSAL * flops.attention_squares)).round() as usize
}

/// Work of `length` tokens from position `first` on, in attention pairs.
pub(super) fn load(first: usize, length: usize, pairs_per_token: usize) -> u128 {
    let (first, length) = (first as u128, length as u128);
    length * (first + pairs_per_token as u128) + length * (length + 1) / 2
}

impl ContextPlan {
    /// Deals the documents of a batch out to `ranks` ranks. A token costs the keys it attends to and `pairs_per_token`: 0
    /// balances the attention area alone, [`pairs_per_token`] the time of a model's step.
    ///
    /// There may be more ranks than pairs of chunks: the last ranks then have no tokens. 0 ranks are read as 1.
    pub fn new(lengths: &[usize], ranks: usize, pairs_per_token: usize) -> ContextPlan {
        let ranks = ranks.max(1);
        let whole = |length: usize| load(0, length, pairs_per_token);
        let total: u128 = lengths.iter().map(|&length| whole(length)).sum();
        // What one rank takes together: a short document, or a chunk and its mirror. The middle one of an odd number has none.
        let mut items: Vec<Vec<Slice>> = Vec::new();
        for (document, &length) in lengths.iter().enumerate() {
            let short = length <= 2 * CHUNK_TOKENS || whole(length) * ranks as u128 * SHORT_DIVISOR <= total;
            let step = if short || ranks == 1 { length.max(1) } else { CHUNK_TOKENS };
            let firsts = (0..length).step_by(step);
            let chunks: Vec<Slice> = firsts.map(|first| Slice { document, first, length: step.min(length - first) }).collect();
            let (early, late) = chunks.split_at(chunks.len().div_ceil(2));
            let mirrors = late.iter().rev().map(Some).chain(std::iter::repeat(None));
            items.extend(
                early.iter().zip(mirrors).map(|(&chunk, mirror)| std::iter::once(chunk).chain(mirror.copied()).collect()),
            );
        }
        let weight = |item: &[Slice]| -> u128 { item.iter().map(|slice| load(slice.first, slice.length, pairs_per_token)).sum() };
        // The document's number comes last: documents of equal length are interchangeable.
        items.sort_by_key(|item| (Reverse(weight(item)), lengths[item[0].document], item[0].first, item[0].document));

        let mut slices = vec![Vec::new(); ranks];
        let mut least_loaded: BinaryHeap<Reverse<(u128, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
        for item in items {
            if let Some(mut top) = least_loaded.peek_mut() {
                let Reverse((carried, rank)) = &mut *top;
                *carried += weight(&item);
                slices[*rank].extend(item);
            }
        }
        slices.iter_mut().for_each(join);
        let split = lengths.iter().enumerate().map(|(document, &length)| is_split(&slices, document, length)).collect();
        ContextPlan { lengths: lengths.to_vec(), slices, split }
    }

    /// Of a batch's sequences.
    pub fn of(batch: &Batch, ranks: usize, pairs_per_token: usize) -> ContextPlan {
        ContextPlan::new(&batch.lengths().collect::<Vec<_>>(), ranks, pairs_per_token)
    }

    pub fn ranks(&self) -> usize {
        self.slices.len()
    }

    /// Of one rank, ascending by document and position.
    pub fn slices(&self, rank: usize) -> &[Slice] {
        &self.slices[rank]
    }

    /// Tokens of the whole batch.
    pub fn total_tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn tokens(&self, rank: usize) -> usize {
        self.slices[rank].iter().map(|slice| slice.length).sum()
    }

    /// Of the rank that has most.
    pub fn most_tokens(&self) -> usize {
        (0..self.ranks()).map(|rank| self.tokens(rank)).max().unwrap_or(0)
    }

    /// Pairs of a query of this rank and a key that it attends to.
    pub fn area(&self, rank: usize) -> u128 {
        self.load(rank, 0)
    }

    /// Pairs of a key of this rank and a query that attends to it: what its gradients of keys and values sum over.
    pub fn key_area(&self, rank: usize) -> u128 {
        let seen = |slice: &Slice| {
            let (after, length) = ((self.lengths[slice.document] - slice.first) as u128, slice.length as u128);
            length * after - length * (length - 1) / 2
        };
        self.slices[rank].iter().map(seen).sum()
    }

    /// What the rank carries, as [`ContextPlan::new`] counts it.
    pub fn load(&self, rank: usize, pairs_per_token: usize) -> u128 {
        self.slices[rank].iter().map(|slice| load(slice.first, slice.length, pairs_per_token)).sum()
    }
}

/// Orders a rank's slices and joins those that touch.
fn join(slices: &mut Vec<Slice>) {
    slices.sort_unstable();
    slices.dedup_by(|next, kept| {
        let touch = next.document == kept.document && next.first == kept.first + kept.length;
        if touch {
            kept.length += next.length;
        }
        touch
    });
}

/// After [`join`], a rank that has all of a document has it as one slice.
fn is_split(slices: &[Vec<Slice>], document: usize, length: usize) -> bool {
    length > 0 && !slices.iter().any(|slices| slices.binary_search(&Slice { document, first: 0, length }).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Key, Purpose};
    use proptest::prelude::*;

    fn slice(document: usize, first: usize, length: usize) -> Slice {
        Slice { document, first, length }
    }

    /// Four chunks of areas 8,256 + 16,384 i: the heaviest and the lightest go together.
    #[test]
    fn one_document_on_two_ranks_by_hand() {
        let plan = ContextPlan::new(&[512], 2, 0);
        assert_eq!(plan.slices(0), [slice(0, 0, 128), slice(0, 384, 128)]);
        assert_eq!(plan.slices(1), [slice(0, 128, 256)]);
        assert_eq!((plan.area(0), plan.area(1)), (65_664, 65_664));
        assert_eq!((plan.shared_blocks(), plan.key_blocks(0)), (4, 8));
    }

    /// 1,000 tokens are long beside 100: four pairs, of areas 131,200 three times and 8,256 + 98,644. The short one stays whole, though more
    /// ranks than pairs are there.
    #[test]
    fn more_ranks_than_pairs() {
        let plan = ContextPlan::new(&[100, 0, 1000], 12, 0);
        let tokens: Vec<usize> = (0..12).map(|rank| plan.tokens(rank)).collect();
        assert_eq!(tokens, [256, 256, 256, 232, 100, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((plan.slices(4), plan.slices(3)), (&[slice(0, 0, 100)][..], &[slice(2, 0, 128), slice(2, 896, 104)][..]));
        assert_eq!((plan.slices(11), plan.rows(11)), (&[][..], vec![]));
        assert_eq!((plan.area(0), plan.area(3), plan.key_area(3)), (131_200, 106_900, 125_332));
        assert_eq!((plan.shared_blocks(), plan.key_blocks(4), plan.key_blocks(9)), (4, 50, 48));
        assert_eq!((plan.shared_rows(), plan.attention(4).queries.slices.len()), (256, 0));
    }

    /// Qwen3-8B: 6 x (36 x 192,937,984 + 151,936 x 4,096) FLOPs per token, 12 x 36 x 4,096 per pair.
    #[test]
    fn a_token_costs_as_much_as_so_many_pairs() {
        let config = ModelConfig::named("qwen3-8b").expect("a known shape");
        assert_eq!(pairs_per_token(&config), 25_662);
    }

    /// One document of 131,072 tokens: every rank within 1 % of the mean at any degree up to 16, in area, by queries and by keys, and in
    /// tokens.
    #[test]
    fn a_long_document_is_balanced_closely() {
        for ranks in [2, 3, 4, 6, 8, 16] {
            let plan = ContextPlan::new(&[131_072], ranks, 0);
            let mean = 131_072.0 * 131_073.0 / 2.0 / ranks as f64;
            for rank in 0..ranks {
                for area in [plan.area(rank), plan.key_area(rank)] {
                    assert!((area as f64 / mean - 1.0).abs() < 0.01, "{ranks} ranks, rank {rank}");
                }
                assert!((plan.tokens(rank) as f64 * ranks as f64 / 131_072.0 - 1.0).abs() < 0.02, "{ranks} ranks, rank {rank}");
            }
        }
    }

    /// The heaviest pair may be an inner one, where the last chunk is short: the bound is of that one.
    #[test]
    fn a_short_last_chunk_weighs_little() {
        let plan = ContextPlan::new(&[385], 2, 0);
        assert_eq!((plan.slices(0), plan.slices(1)), (&[slice(0, 128, 256)][..], &[slice(0, 0, 128), slice(0, 384, 1)][..]));
        assert_eq!((plan.area(0), plan.area(1)), (65_664, 8_641));
    }

    /// Several long documents: what balances the work of queries balances that of keys, though a rank has more of one document and less of
    /// another.
    #[test]
    fn the_work_of_keys_is_balanced_too() {
        for lengths in [&[100_000, 31_000][..], &[60_000, 40_000, 20_000, 11_000], &[131_072, 1000, 1000]] {
            for (ranks, pairs_per_token) in [(3, 0), (8, 0), (8, 25_662), (16, 25_662)] {
                let plan = ContextPlan::new(lengths, ranks, pairs_per_token);
                let total: u128 = (0..ranks).map(|rank| plan.key_area(rank)).sum();
                assert_eq!(total, (0..ranks).map(|rank| plan.area(rank)).sum());
                for rank in 0..ranks {
                    let share = plan.key_area(rank) as f64 * ranks as f64 / total as f64;
                    assert!(share < 1.05, "{lengths:?}, {ranks} ranks, {pairs_per_token} a token, rank {rank}: {share}");
                }
            }
        }
    }

    /// Many short documents beside a long one: what each token costs keeps them from gathering on one rank.
    #[test]
    fn short_documents_spread_when_tokens_cost() {
        let mut lengths = vec![128; 1024];
        lengths.push(131_072);
        let plan = ContextPlan::new(&lengths, 8, 25_662);
        for rank in 0..8 {
            assert!(plan.tokens(rank) < 2 * 32_768, "rank {rank}: {}", plan.tokens(rank));
        }
        assert!(plan.split[..1024].iter().all(|split| !split) && plan.split[1024]);
    }

    fn mixtures() -> impl Strategy<Value = Vec<usize>> {
        let length = prop_oneof![0usize..300, 0usize..5_000, 0usize..131_073];
        proptest::collection::vec(length, 0..20)
    }

    /// What each rank holds, without the documents' numbers.
    fn anonymous(lengths: &[usize], ranks: usize) -> Vec<Vec<(usize, usize, usize)>> {
        let plan = ContextPlan::new(lengths, ranks, 7);
        let of_rank = |rank| {
            let mut slices: Vec<_> =
                plan.slices(rank).iter().map(|slice| (lengths[slice.document], slice.first, slice.length)).collect();
            slices.sort_unstable();
            slices
        };
        (0..ranks).map(of_rank).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_token_is_on_one_rank(lengths in mixtures(), ranks in 1usize..40, pairs_per_token in 0usize..30_000) {
            let plan = ContextPlan::new(&lengths, ranks, pairs_per_token);
            let mut seen = vec![false; plan.total_tokens()];
            for rank in 0..ranks {
                let rows = plan.rows(rank);
                prop_assert!(rows.is_sorted(), "keys come in a fixed order");
                prop_assert_eq!(rows.len(), plan.tokens(rank));
                for row in rows {
                    prop_assert!(!std::mem::replace(&mut seen[row], true), "row {} twice", row);
                }
                for slice in plan.slices(rank) {
                    prop_assert!(slice.first % CHUNK_TOKENS == 0);
                    let end = slice.first + slice.length;
                    prop_assert!(end % CHUNK_TOKENS == 0 || end == lengths[slice.document]);
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }

        /// The bound of the module's head, in whole numbers.
        #[test]
        fn no_rank_carries_much_more_than_the_mean(
            lengths in mixtures(), ranks in 1usize..40, pairs_per_token in 0usize..30_000
        ) {
            let plan = ContextPlan::new(&lengths, ranks, pairs_per_token);
            let loads: Vec<u128> = (0..ranks).map(|rank| plan.load(rank, pairs_per_token)).collect();
            let (total, most) = (loads.iter().sum::<u128>(), loads.iter().max().copied().unwrap_or(0));
            // As if its last chunk were full: then all pairs of a document weigh the same.
            let longest = lengths.iter().max().copied().unwrap_or(0).next_multiple_of(CHUNK_TOKENS).max(CHUNK_TOKENS);
            let pair = load(0, CHUNK_TOKENS, pairs_per_token) + load(longest - CHUNK_TOKENS, CHUNK_TOKENS, pairs_per_token);
            let share = ranks as u128;
            prop_assert!(most * share <= total + (share - 1) * pair.max(total / share / SHORT_DIVISOR), "{loads:?}");
        }

        #[test]
        fn the_order_of_documents_does_not_matter(lengths in mixtures(), ranks in 1usize..20, seed in 0u64..1000) {
            let mut shuffled = lengths.clone();
            Key::new(Purpose::Benchmark, &[seed]).shuffle(&mut shuffled);
            prop_assert_eq!(anonymous(&lengths, ranks), anonymous(&shuffled, ranks));
        }

    }
}
