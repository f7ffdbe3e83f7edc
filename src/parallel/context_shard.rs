//! One rank's part of a packed batch: its rows, and where attention finds the keys, values and queries of the documents that several
//! ranks share.

use super::context::{ContextPlan, Slice};
use crate::device::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice, SharedQueries};
use crate::model::TrainingPass;
use crate::types::Batch;

/// One rank's part of a packed batch. Labels are taken from the whole batch: the token that a slice's last row predicts lies
/// on another rank as often as not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextShard {
    pub pass: TrainingPass,
    /// `[scored_rows]` place in the whole batch's `scored_rows`: where its score belongs, and its cotangent is found.
    pub score_places: Vec<usize>,
}

impl ContextPlan {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

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

        #[test]
        fn one_rank_has_everything_in_place(lengths in mixtures(), pairs_per_token in 0usize..30_000) {
            let plan = ContextPlan::new(&lengths, 1, pairs_per_token);
            prop_assert_eq!(plan.rows(0), (0..plan.total_tokens()).collect::<Vec<_>>());
            prop_assert_eq!(plan.shared_blocks(), 0);
            prop_assert_eq!(plan.attention(0), AttentionPlan::whole(&lengths));
        }
    }
}
