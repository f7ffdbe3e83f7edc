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

use crate::device::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice, SharedQueries};
use crate::model::{ModelConfig, StepFlops, TrainingPass};
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
    lengths: Vec<usize>,
    /// `[ranks]` slices in ascending order of document and position, adjacent ones joined.
    slices: Vec<Vec<Slice>>,
    /// `[documents]` held by more than one rank.
    split: Vec<bool>,
}

/// One rank's part of a packed batch. Labels are taken from the whole batch: the token that a slice's last row predicts lies
/// on another rank as often as not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextShard {
    pub pass: TrainingPass,
    /// `[scored_rows]` place in the whole batch's `scored_rows`: where its score belongs, and its cotangent is found.
    pub score_places: Vec<usize>,
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

    /// Slices of documents that several ranks share.
    fn shared_slices(&self, rank: usize) -> impl Iterator<Item = &Slice> {
        self.slices[rank].iter().filter(|slice| self.split[slice.document])
    }

    /// Slices of documents that the rank has to itself.
    fn whole_slices(&self, rank: usize) -> impl Iterator<Item = &Slice> {
        self.slices[rank].iter().filter(|slice| !self.split[slice.document])
    }

    /// Blocks of keys and values that each rank contributes to the exchange: collectives take equal shares, so the most of any
    /// rank. 0 if every document is whole.
    pub fn shared_blocks(&self) -> usize {
        (0..self.ranks()).map(|rank| blocks_of(self.shared_slices(rank))).max().unwrap_or(0)
    }

    /// Rows of queries that each rank contributes to the exchange of the backward: the most of any rank. 0 if every document is whole.
    pub fn shared_rows(&self) -> usize {
        let rows = |rank: usize| self.shared_slices(rank).map(|slice| slice.length).sum();
        (0..self.ranks()).map(rows).max().unwrap_or(0)
    }

    /// Blocks of keys and values that the rank computes with: those of all ranks, then its own whole documents'.
    pub fn key_blocks(&self, rank: usize) -> usize {
        self.ranks() * self.shared_blocks() + blocks_of(self.whole_slices(rank))
    }

    /// Where the keys and values lie that the rank's tokens attend to, and the queries that attend to its keys. Every rank has the same
    /// place for a shared block, and for a row of shared queries.
    pub fn attention(&self, rank: usize) -> AttentionPlan {
        let shared = self.shared_blocks();
        let mut tables = vec![Vec::new(); self.lengths.len()];
        for slice in self.shared_slices(rank) {
            tables[slice.document] = vec![0; self.lengths[slice.document].div_ceil(KEYS_PER_BLOCK)];
        }
        let mut note = |slice: &Slice, next: &mut usize| {
            let first = slice.first / KEYS_PER_BLOCK;
            for (place, block) in (first..).zip(*next..*next + slice.length.div_ceil(KEYS_PER_BLOCK)) {
                if let Some(entry) = tables[slice.document].get_mut(place) {
                    *entry = block as u32;
                }
                *next = block + 1;
            }
        };
        for other in 0..self.ranks() {
            let mut next = other * shared;
            self.shared_slices(other).for_each(|slice| note(slice, &mut next));
        }
        let mut blocks = self.ranks() * shared;
        for slice in self.whole_slices(rank) {
            let end = blocks + slice.length.div_ceil(KEYS_PER_BLOCK);
            tables[slice.document] = (blocks as u32..end as u32).collect();
            blocks = end;
        }
        let mut row = 0;
        let query_slice = |slice: &Slice| {
            let Slice { document, first, length } = *slice;
            row += length;
            QuerySlice { row: row - length, length, document, first }
        };
        let slices = self.slices[rank].iter().map(query_slice).collect();
        AttentionPlan { slices, tables, blocks, shared, queries: self.shared_queries(rank) }
    }

    fn shared_queries(&self, rank: usize) -> SharedQueries {
        let rows = self.shared_rows();
        let mut here = vec![false; self.lengths.len()];
        self.shared_slices(rank).for_each(|slice| here[slice.document] = true);
        let mut slices = Vec::new();
        for other in 0..self.ranks() {
            let mut row = other * rows;
            for &Slice { document, first, length } in self.shared_slices(other) {
                if here[document] {
                    slices.push(QuerySlice { row, length, document, first });
                }
                row += length;
            }
        }
        slices.sort_by_key(|slice| (slice.document, slice.first));
        SharedQueries { rows, own: rank * rows, slices }
    }

    /// Row of each of the rank's tokens in the packed batch.
    pub fn rows(&self, rank: usize) -> Vec<usize> {
        let starts: Vec<usize> = self
            .lengths
            .iter()
            .scan(0, |next, length| {
                let start = *next;
                *next += length;
                Some(start)
            })
            .collect();
        let rows = |slice: &Slice| {
            let first = starts[slice.document] + slice.first;
            first..first + slice.length
        };
        self.slices[rank].iter().flat_map(rows).collect()
    }

    /// One rank's part of `batch`, whose sequences must be the documents of this plan.
    pub fn shard(&self, batch: &Batch, rank: usize) -> ContextShard {
        assert!(batch.lengths().eq(self.lengths.iter().copied()), "the batch is not the one that was planned");
        let rows = self.rows(rank);
        let slices = self.slices[rank].iter();
        let score_places = self.score_places(batch, rank);
        let is_scored = |row: &usize| batch.scored_rows.binary_search(row).is_ok();
        let pass = TrainingPass {
            ids: rows.iter().map(|&row| batch.ids[row]).collect(),
            positions: slices.flat_map(|slice| slice.first..slice.first + slice.length).collect(),
            scored_rows: (0..rows.len()).filter(|&local| is_scored(&rows[local])).collect(),
            targets: score_places.iter().map(|&place| batch.ids[batch.scored_rows[place] + 1]).collect(),
            attention: self.attention(rank),
        };
        ContextShard { pass, score_places }
    }

    /// Of the rank's scored rows, ascending: the place of each in `batch.scored_rows`.
    pub fn score_places(&self, batch: &Batch, rank: usize) -> Vec<usize> {
        self.rows(rank).iter().filter_map(|row| batch.scored_rows.binary_search(row).ok()).collect()
    }
}

fn blocks_of<'a>(slices: impl Iterator<Item = &'a Slice>) -> usize {
    slices.map(|slice| slice.length.div_ceil(KEYS_PER_BLOCK)).sum()
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

    #[test]
    fn labels_are_those_of_the_whole_batch() {
        let ids: Vec<u32> = (0..300).collect();
        let batch = Batch::pack(&[&ids[..260], &ids[260..]], |_, token| token % 2 == 0);
        let plan = ContextPlan::new(&[260, 40], 3, 0);
        let mut targets = vec![None; batch.scored_rows.len()];
        for rank in 0..3 {
            let shard = plan.shard(&batch, rank);
            assert_eq!(shard.pass.ids.len(), plan.tokens(rank));
            let rows = plan.rows(rank);
            for (index, &row) in rows.iter().enumerate() {
                assert_eq!(shard.pass.ids[index], batch.ids[row]);
                assert_eq!(shard.pass.positions[index], if row < 260 { row } else { row - 260 });
            }
            let TrainingPass { targets: own, scored_rows, .. } = &shard.pass;
            for ((&place, &target), &local) in shard.score_places.iter().zip(own).zip(scored_rows) {
                assert_eq!(rows[local], batch.scored_rows[place]);
                assert_eq!(targets[place].replace(target), None, "scored twice");
            }
        }
        assert_eq!(targets.into_iter().flatten().collect::<Vec<_>>(), batch.targets());
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

        /// Shared blocks lie in their owner's part, alike for all ranks; those of whole documents come after them.
        #[test]
        fn every_run_of_keys_has_a_block_of_its_own(lengths in mixtures(), ranks in 1usize..12, pairs_per_token in 0usize..30_000) {
            let plan = ContextPlan::new(&lengths, ranks, pairs_per_token);
            let mut places = vec![None; lengths.len()];
            for rank in 0..ranks {
                let keys = plan.attention(rank);
                prop_assert_eq!((keys.rows(), keys.blocks, keys.shared), (plan.tokens(rank), plan.key_blocks(rank), plan.shared_blocks()));
                prop_assert_eq!((keys.queries.rows, keys.queries.own), (plan.shared_rows(), rank * plan.shared_rows()));
                let mut own = Vec::new();
                for slice in &keys.slices {
                    let table = &keys.tables[slice.document];
                    prop_assert_eq!(table.len(), lengths[slice.document].div_ceil(KEYS_PER_BLOCK));
                    let blocks = &table[slice.first / KEYS_PER_BLOCK..][..slice.length.div_ceil(KEYS_PER_BLOCK)];
                    own.extend(blocks.iter().map(|&block| block as usize));
                    if plan.split[slice.document] {
                        let part = rank * keys.shared..(rank + 1) * keys.shared;
                        prop_assert!(blocks.iter().all(|&block| part.contains(&(block as usize))));
                        let known = places[slice.document].get_or_insert_with(|| table.clone());
                        prop_assert_eq!(&*known, table);
                    } else {
                        prop_assert!(blocks.iter().all(|&block| (ranks * keys.shared..keys.blocks).contains(&(block as usize))));
                    }
                }
                let count = own.len();
                own.sort_unstable();
                own.dedup();
                prop_assert_eq!(own.len(), count, "a block for each run");
            }
        }

        /// A rank's queries of shared documents lie in its part in their order, and every rank that has keys of a document finds all its queries,
        /// ascending.
        #[test]
        fn every_query_of_a_shared_document_is_found(lengths in mixtures(), ranks in 1usize..12, pairs_per_token in 0usize..30_000) {
            let plan = ContextPlan::new(&lengths, ranks, pairs_per_token);
            let all: Vec<AttentionPlan> = (0..ranks).map(|rank| plan.attention(rank)).collect();
            // Of each row of the exchange: whose query it is.
            let mut queries = vec![None; ranks * plan.shared_rows()];
            for attention in &all {
                let contributed: Vec<usize> = attention.contributed_rows().collect();
                prop_assert!(contributed.len() <= attention.queries.rows);
                let mut positions = vec![None; attention.rows()];
                for slice in &attention.slices {
                    (0..slice.length).for_each(|row| positions[slice.row + row] = Some((slice.document, slice.first + row)));
                }
                for (place, row) in contributed.into_iter().enumerate() {
                    queries[attention.queries.own + place] = positions[row];
                }
            }
            for (rank, attention) in all.iter().enumerate() {
                let mut found = Vec::new();
                for slice in &attention.queries.slices {
                    for row in 0..slice.length {
                        prop_assert_eq!(queries[slice.row + row], Some((slice.document, slice.first + row)));
                        found.push((slice.document, slice.first + row));
                    }
                }
                let here = |document: &usize| plan.split[*document] && plan.slices(rank).iter().any(|slice| slice.document == *document);
                let expected: Vec<(usize, usize)> =
                    (0..lengths.len()).filter(here).flat_map(|document| (0..lengths[document]).map(move |position| (document, position))).collect();
                prop_assert!(found == expected, "rank {} does not find every query in its order", rank);
            }
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

        #[test]
        fn one_rank_has_everything_in_place(lengths in mixtures(), pairs_per_token in 0usize..30_000) {
            let plan = ContextPlan::new(&lengths, 1, pairs_per_token);
            prop_assert_eq!(plan.rows(0), (0..plan.total_tokens()).collect::<Vec<_>>());
            prop_assert_eq!(plan.shared_blocks(), 0);
            prop_assert_eq!(plan.attention(0), AttentionPlan::whole(&lengths));
        }
    }
}
