//! Keys and values in blocks (see [`AttentionPlan`]): rows go in, matrices of one head come out as products want them. And rows of
//! queries, which the gradients of keys read where they were computed or where other ranks' have arrived.

use std::ops::Range;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::kernel::PANEL;
use super::parallel::for_row_blocks;
use crate::device::CpuDevice;
use crate::device::attention_plan::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice};
use crate::device::ops::{AttendedRows, Heads};

/// Which half of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Keys,
    Values,
}

/// Blocks that hold the key/value heads `range`.
#[derive(Clone, Debug)]
pub struct BlockShape {
    pub heads: Heads,
    pub range: Range<usize>,
}

impl BlockShape {
    /// Numbers of a block.
    pub fn numbers(&self) -> usize {
        AttentionPlan::block_numbers(self.range.len(), self.heads.head_dim)
    }

    /// Where `[KEYS_PER_BLOCK, head_dim]` of a head start in a block.
    pub fn offset(&self, part: Part, head: usize) -> usize {
        let half = if part == Part::Keys { 0 } else { self.range.len() };
        (half + head - self.range.start) * KEYS_PER_BLOCK * self.heads.head_dim
    }

    /// Query heads of the range.
    pub fn query_heads(&self) -> usize {
        self.range.len() * self.heads.group()
    }

    /// Numbers of a row of exchanged queries.
    fn query_numbers(&self) -> usize {
        AttentionPlan::query_numbers(self.heads, &self.range)
    }

    /// The columns of a head's keys or values in a projected row.
    pub fn columns(&self, part: Part, head: usize) -> Range<usize> {
        let Heads { head_dim, .. } = self.heads;
        let half = if part == Part::Keys { 0 } else { self.heads.key_value_width() };
        let start = self.heads.query_width() + half + head * head_dim;
        start..start + head_dim
    }

    /// Each `(part, head)` as its offset in a block and its columns in a row.
    fn places(&self) -> Vec<(usize, Range<usize>)> {
        let parts = [Part::Keys, Part::Values].into_iter();
        parts
            .flat_map(|part| self.range.clone().map(move |head| (part, head)))
            .map(|(part, head)| (self.offset(part, head), self.columns(part, head)))
            .collect()
    }
}

/// The rows of a document that are here, and its keys up to the last that they see.
pub struct Document<'a> {
    pub number: usize,
    pub slices: Vec<QuerySlice>,
    pub table: &'a [u32],
    pub keys: usize,
}

/// The documents that have rows here. Panics where the plan contradicts itself, on which the threads' shares of the work stand.
pub fn documents(plan: &AttentionPlan) -> Vec<Document<'_>> {
    let mut listed = vec![false; plan.blocks];
    for &block in plan.tables.iter().flatten() {
        assert!(!std::mem::replace(&mut listed[block as usize], true), "block {block} is listed twice");
    }
    let mut slices: Vec<Vec<QuerySlice>> = vec![Vec::new(); plan.tables.len()];
    let mut rows = 0;
    for &slice in &plan.slices {
        assert!(slice.row == rows && slice.first.is_multiple_of(KEYS_PER_BLOCK), "slices do not cover the rows: {slice:?}");
        rows += slice.length;
        slices[slice.document].push(slice);
    }
    let documents = slices.into_iter().zip(&plan.tables).enumerate().filter(|(_, (slices, _))| !slices.is_empty());
    documents
        .map(|(number, (slices, table))| {
            let keys = slices.iter().map(|slice| slice.first + slice.length).max().unwrap_or(0);
            Document { number, slices, table: &table[..keys.div_ceil(KEYS_PER_BLOCK)], keys }
        })
        .collect()
}

/// Copies the keys and values of every row to its block, and zeros to the rest of each slice's last block.
pub fn write(rotated: &[f32], shape: &BlockShape, plan: &AttentionPlan, blocks: &mut [f32]) {
    let (width, dim) = (shape.heads.projected_width(), shape.heads.head_dim);
    let mut sources: Vec<Option<Range<usize>>> = vec![None; plan.blocks];
    for slice in &plan.slices {
        for offset in (0..slice.length).step_by(KEYS_PER_BLOCK) {
            let block = plan.tables[slice.document][(slice.first + offset) / KEYS_PER_BLOCK];
            let end = (offset + KEYS_PER_BLOCK).min(slice.length);
            sources[block as usize] = Some(slice.row + offset..slice.row + end);
        }
    }
    let (numbers, places) = (shape.numbers(), shape.places());
    for_row_blocks(plan.blocks, numbers, [(blocks, numbers)], |first, _, [blocks]| {
        for (block, source) in blocks.chunks_exact_mut(numbers).zip(&sources[first..]) {
            let Some(rows) = source else { continue };
            for (offset, columns) in &places {
                let target = &mut block[*offset..offset + KEYS_PER_BLOCK * dim];
                let (filled, rest) = target.split_at_mut(rows.len() * dim);
                let rows = rotated[rows.start * width..rows.end * width].chunks_exact(width);
                for (target, row) in filled.chunks_exact_mut(dim).zip(rows) {
                    target.copy_from_slice(&row[columns.clone()]);
                }
                rest.fill(0.0);
            }
        }
    });
}

/// Rows of queries with what gradients need of them, from the first query head of a range on: row `r` of head `h` at
/// `r * pitch + h * head_dim`, its statistics at `r * pitch + h`.
#[derive(Clone, Copy)]
pub struct QueryRows<'a> {
    pub queries: &'a [f32],
    pub doutputs: &'a [f32],
    pub log_sum_exps: &'a [f32],
    pub deltas: &'a [f32],
    pub query_pitch: usize,
    pub doutput_pitch: usize,
    pub statistic_pitch: usize,
}

impl<'a> QueryRows<'a> {
    /// Of the pass.
    pub fn of_pass(rows: AttendedRows<'a, CpuDevice>, shape: &BlockShape, count: usize) -> Self {
        let heads = shape.heads;
        let AttendedRows { rotated, doutput, log_sum_exp, delta } = rows;
        let long_enough = rotated.len() >= count * heads.projected_width()
            && doutput.len() >= count * heads.query_width()
            && log_sum_exp.len().min(delta.len()) >= count * heads.query_heads;
        assert!(long_enough, "a buffer is too short for {count} rows");
        let first_head = shape.range.start * heads.group();
        let from = |values: &'a Vec<f32>, first: usize| values.get(first..).unwrap_or(&[]);
        QueryRows {
            queries: from(rotated, first_head * heads.head_dim),
            doutputs: from(doutput, first_head * heads.head_dim),
            log_sum_exps: from(log_sum_exp, first_head),
            deltas: from(delta, first_head),
            query_pitch: heads.projected_width(),
            doutput_pitch: heads.query_width(),
            statistic_pitch: heads.query_heads,
        }
    }

    /// That ranks have exchanged: queries, gradients of outputs, then the statistics. A number has room for one in f32; half of what is
    /// there for two stays 0.
    pub fn exchanged(values: &'a [f32], shape: &BlockShape) -> Self {
        let (width, pitch) = (shape.query_heads() * shape.heads.head_dim, shape.query_numbers());
        let from = |first: usize| values.get(first..).unwrap_or(&[]);
        QueryRows {
            queries: values,
            doutputs: from(width),
            log_sum_exps: from(2 * width),
            deltas: from(2 * width + shape.query_heads()),
            query_pitch: pitch,
            doutput_pitch: pitch,
            statistic_pitch: pitch,
        }
    }
}

/// Copies the rows that this rank contributes to its part of `queries`, in the layout of [`QueryRows::exchanged`].
pub fn write_queries(rows: QueryRows<'_>, shape: &BlockShape, plan: &AttentionPlan, queries: &mut [f32]) {
    let (heads, numbers) = (shape.query_heads(), shape.query_numbers());
    let width = heads * shape.heads.head_dim;
    let sources: Vec<usize> = plan.contributed_rows().collect();
    let own = &mut queries[plan.queries.own * numbers..];
    for_row_blocks(sources.len(), numbers, [(own, numbers)], |first, _, [own]| {
        for (target, &row) in own.chunks_exact_mut(numbers).zip(&sources[first..]) {
            target[..width].copy_from_slice(&rows.queries[row * rows.query_pitch..][..width]);
            target[width..2 * width].copy_from_slice(&rows.doutputs[row * rows.doutput_pitch..][..width]);
            let statistics = &mut target[2 * width..];
            statistics.fill(0.0);
            statistics[..heads].copy_from_slice(&rows.log_sum_exps[row * rows.statistic_pitch..][..heads]);
            statistics[heads..2 * heads].copy_from_slice(&rows.deltas[row * rows.statistic_pitch..][..heads]);
        }
    });
}

/// A head's keys or values out of the blocks, as products read them.
#[derive(Clone, Copy)]
pub struct HeadBlocks<'a> {
    pub blocks: &'a [f32],
    pub shape: &'a BlockShape,
    pub table: &'a [u32],
    pub head: usize,
}

impl HeadBlocks<'_> {
    fn each(&self, part: Part) -> impl Iterator<Item = &[f32]> {
        let length = KEYS_PER_BLOCK * self.shape.heads.head_dim;
        self.table.iter().map(move |&block| {
            let start = block as usize * self.shape.numbers() + self.shape.offset(part, self.head);
            &self.blocks[start..start + length]
        })
    }

    /// `[keys / 16, head_dim, 16]`, whole blocks
    pub fn panels(&self, part: Part) -> Vec<f32> {
        let dim = self.shape.heads.head_dim;
        let mut panels = vec![0.0; self.table.len() * KEYS_PER_BLOCK * dim];
        for (panels, block) in panels.chunks_exact_mut(KEYS_PER_BLOCK * dim).zip(self.each(part)) {
            for (key, row) in block.chunks_exact(dim).enumerate() {
                let panel = &mut panels[key / PANEL * PANEL * dim..][..PANEL * dim];
                for (k, &value) in row.iter().enumerate() {
                    panel[k * PANEL + key % PANEL] = value;
                }
            }
        }
        panels
    }

    /// `[keys, head_dim rounded up to 16]`, zero beyond `head_dim`, whole blocks
    pub fn rows(&self, part: Part) -> Vec<f32> {
        let dim = self.shape.heads.head_dim;
        let padded = dim.next_multiple_of(PANEL);
        let mut rows = vec![0.0; self.table.len() * KEYS_PER_BLOCK * padded];
        let sources = self.each(part).flat_map(|block| block.chunks_exact(dim));
        for (target, row) in rows.chunks_exact_mut(padded).zip(sources) {
            target[..dim].copy_from_slice(row);
        }
        rows
    }
}

/// What `bring` makes of every head of every document, `[documents][heads of the range]` end to end.
pub fn bring<T: Send>(
    blocks: &[f32],
    shape: &BlockShape,
    documents: &[Document<'_>],
    bring: impl Fn(HeadBlocks<'_>) -> T + Sync + Send,
) -> Vec<T> {
    let heads = shape.range.len();
    (0..documents.len() * heads)
        .into_par_iter()
        .map(|index| {
            let table = documents[index / heads].table;
            bring(HeadBlocks { blocks, shape, table, head: shape.range.start + index % heads })
        })
        .collect()
}
