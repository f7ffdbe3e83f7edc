//! What each kernel must do at least: the bytes that have to cross memory once, and the FLOPs of its maths. One formula per kernel,
//! for `learner bench kernels` and the tour in `cuda/README.md`.
//!
//! Every input is read once and every output written once, as if caches were perfect. Index tables and the partial results that an
//! algorithm hands from one kernel to the next belong to the minimum and have a name of their own.

use super::arguments::{AttentionSpan, KEYS_PER_PAGE};
use super::{optimizer, rows};
use crate::device::attention_plan::AttentionPlan;
use crate::device::ops::Heads;

const BF16: u64 = 2;
const F32: u64 = 4;
const F64: u64 = 8;
const INDEX: u64 = 4;
/// Of a page, in a table of pages.
const PLACE: u64 = 8;
/// What a kernel knows of a tile of rows.
const TILE: u64 = size_of::<AttentionSpan>() as u64;

/// The floor of one launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Minimum {
    /// Named shares of the bytes.
    pub bytes: Vec<(&'static str, u64)>,
    /// On the tensor cores; 0 for kernels that are bound by memory.
    pub flops: u64,
}

impl Minimum {
    fn of<const N: usize>(bytes: [(&'static str, u64); N]) -> Minimum {
        Minimum { bytes: bytes.to_vec(), flops: 0 }
    }
    fn with_flops(self, flops: usize) -> Minimum {
        Minimum { flops: flops as u64, ..self }
    }
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn bf16(count: usize) -> u64 {
    BF16 * count as u64
}
fn f32(count: usize) -> u64 {
    F32 * count as u64
}
fn indices(count: usize) -> u64 {
    INDEX * count as u64
}

// ---- casts.cu ----

/// Either direction.
pub fn cast(length: usize) -> Minimum {
    Minimum::of([("bf16", bf16(length)), ("f32", f32(length))])
}
pub fn accumulate_floats(length: usize) -> Minimum {
    Minimum::of([("terms", f32(length)), ("sums, read and written", 2 * f32(length))])
}
pub fn scale_floats(length: usize) -> Minimum {
    Minimum::of([("read", f32(length)), ("written", f32(length))])
}
/// Gather and scatter.
pub fn move_rows(count: usize, width: usize) -> Minimum {
    Minimum::of([("read", bf16(count * width)), ("written", bf16(count * width)), ("row numbers", indices(count))])
}
pub fn sum_parts(parts: usize, width: usize) -> Minimum {
    Minimum::of([("parts", f32(parts * width)), ("sum, read and written", 2 * f32(width))])
}

// ---- embedding.cu ----

/// Of `unique` different ids among `rows`.
pub fn embed(rows: usize, unique: usize, width: usize) -> Minimum {
    Minimum::of([("table", f32(unique * width)), ("x", bf16(rows * width)), ("ids", indices(rows))])
}
pub fn embed_backward(rows: usize, unique: usize, width: usize) -> Minimum {
    Minimum::of([
        ("dx", bf16(rows * width)),
        ("dtable, read and written", 2 * f32(unique * width)),
        ("order, starts and ids", indices(rows + unique + 1 + unique)),
    ])
}

// ---- rms_norm.cu ----

pub fn rms_norm(rows: usize, width: usize) -> Minimum {
    Minimum::of([("x", bf16(rows * width)), ("y", bf16(rows * width)), ("weight", f32(width))])
}
pub fn add_rms_norm(rows: usize, width: usize) -> Minimum {
    Minimum::of([("x and branch", 2 * bf16(rows * width)), ("sum and y", 2 * bf16(rows * width)), ("weight", f32(width))])
}
/// Partial gradients of a weight that `rows` rows hand to `sum_parts`.
pub fn row_parts(rows: usize) -> usize {
    rows::parts_of(rows).0
}
pub fn rms_norm_backward(rows: usize, width: usize) -> Minimum {
    Minimum::of([
        ("dy and x", 2 * bf16(rows * width)),
        ("dx, read and written", 2 * bf16(rows * width)),
        ("weight", f32(width)),
        ("parts", f32(row_parts(rows) * width)),
    ])
}

// ---- rotate.cu, with the norms of queries and keys ----

fn rotated_width(heads: Heads) -> usize {
    heads.query_width() + heads.key_value_width()
}
pub fn rotate(rows: usize, positions: usize, heads: Heads) -> Minimum {
    Minimum::of([
        ("projected", bf16(rows * heads.projected_width())),
        ("rotated", bf16(rows * heads.projected_width())),
        ("cosines and sines", f32(positions * heads.head_dim)),
        ("positions", indices(rows)),
        ("norms", 2 * f32(heads.head_dim)),
    ])
}
/// The part of the values has neither rotation nor norm and stays as it is.
pub fn rotate_backward(rows: usize, positions: usize, heads: Heads) -> Minimum {
    Minimum::of([
        ("projected", bf16(rows * rotated_width(heads))),
        ("gradient, read and written", 2 * bf16(rows * rotated_width(heads))),
        ("cosines and sines", f32(positions * heads.head_dim)),
        ("positions", indices(rows)),
        ("norms", 2 * f32(heads.head_dim)),
        ("parts", f32(row_parts(rows) * 2 * heads.head_dim)),
    ])
}

// ---- attention, one sequence of `length` or several sequences alike ----

/// Pairs of a query and a key at or before it.
fn causal_pairs(length: usize) -> usize {
    length * (length + 1) / 2
}
pub fn append_keys_values(rows: usize, heads: Heads) -> Minimum {
    let copied = bf16(rows * 2 * heads.key_value_width());
    Minimum::of([("read", copied), ("written", copied), ("spans of rows", indices(rows)), ("page table", PLACE * pages(rows))])
}
fn pages(keys: usize) -> u64 {
    keys.div_ceil(KEYS_PER_PAGE) as u64
}
/// The rest of the last block is written too. A tile of rows, its block's place.
pub fn write_key_blocks(length: usize, heads: Heads) -> Minimum {
    Minimum::of([
        ("read", bf16(length * 2 * heads.key_value_width())),
        ("written", bf16(in_pages(length) * 2 * heads.key_value_width())),
        ("tiles and places of blocks", (TILE + PLACE) * pages(length)),
    ])
}
/// Of the rows of one rank, all heads in one range.
pub fn write_shared_queries(rows: usize, heads: Heads) -> Minimum {
    let statistics = 2 * f32(rows * heads.query_heads);
    let read = 2 * bf16(rows * heads.query_width()) + statistics;
    let written = bf16(rows * AttentionPlan::query_numbers(heads, &(0..heads.key_value_heads)));
    Minimum::of([("read", read), ("written", written), ("row numbers", indices(rows))])
}
/// Keys of the pages that hold `keys`.
fn in_pages(keys: usize) -> usize {
    keys.next_multiple_of(KEYS_PER_PAGE)
}
/// Two products per pair and query head: scores and outputs.
pub fn attention_forward(length: usize, heads: Heads) -> Minimum {
    Minimum::of([
        ("queries", bf16(length * heads.query_width())),
        ("keys and values", bf16(length * 2 * heads.key_value_width())),
        ("output", bf16(length * heads.query_width())),
        ("log-sum-exp", f32(length * heads.query_heads)),
        ("page table", PLACE * pages(length)),
    ])
    .with_flops(2 * 2 * heads.query_width() * causal_pairs(length))
}
pub fn attention_delta(length: usize, heads: Heads) -> Minimum {
    Minimum::of([("output and its gradient", 2 * bf16(length * heads.query_width())), ("delta", f32(length * heads.query_heads))])
}
fn attention_backward(length: usize, heads: Heads, written: u64, products: usize) -> Minimum {
    Minimum::of([
        ("queries", bf16(length * heads.query_width())),
        ("blocks of keys and values", bf16(in_pages(length) * 2 * heads.key_value_width())),
        ("gradient of the output", bf16(length * heads.query_width())),
        ("log-sum-exp and delta", 2 * f32(length * heads.query_heads)),
        ("gradient written", written),
    ])
    .with_flops(2 * products * heads.query_width() * causal_pairs(length))
}
/// Four products: scores, probabilities' gradient, dV, dK.
pub fn attention_backward_keys(length: usize, heads: Heads) -> Minimum {
    attention_backward(length, heads, bf16(length * 2 * heads.key_value_width()), 4)
}
/// Three products: scores, probabilities' gradient, dQ.
pub fn attention_backward_queries(length: usize, heads: Heads) -> Minimum {
    attention_backward(length, heads, bf16(length * heads.query_width()), 3)
}
/// One new row of each of `sequences` with `keys` keys, all in one segment.
pub fn attention_decode(sequences: usize, keys: usize, heads: Heads) -> Minimum {
    Minimum::of([
        ("queries", bf16(sequences * heads.query_width())),
        ("keys and values", bf16(sequences * keys * 2 * heads.key_value_width())),
        ("page table", sequences as u64 * 8 * pages(keys)),
        ("segments' results", segment_results(sequences, heads)),
    ])
    .with_flops(sequences * 2 * 2 * heads.query_width() * keys)
}
pub fn attention_merge(sequences: usize, heads: Heads) -> Minimum {
    Minimum::of([("segments' results", segment_results(sequences, heads)), ("output", bf16(sequences * heads.query_width()))])
}
/// An output before its division, its maximum and its sum.
fn segment_results(sequences: usize, heads: Heads) -> u64 {
    f32(sequences * heads.query_heads * (heads.head_dim + 2))
}

// ---- swiglu.cu ----

pub fn swiglu(rows: usize, width: usize) -> Minimum {
    Minimum::of([("gate and up", 2 * bf16(rows * width)), ("y", bf16(rows * width))])
}
pub fn swiglu_backward(rows: usize, width: usize) -> Minimum {
    Minimum::of([
        ("dy", bf16(rows * width)),
        ("gate and up, read and written", 4 * bf16(rows * width)),
        ("y", bf16(rows * width)),
    ])
}

// ---- gemm.cu: C [m, n] over k ----

/// `result_bytes` of one number of C: 2 for bf16, 4 for f32, 8 where f32 is added to.
pub fn gemm(m: usize, n: usize, k: usize, result_bytes: u64) -> Minimum {
    Minimum::of([("A", bf16(m * k)), ("B", bf16(n * k)), ("C", result_bytes * (m * n) as u64)]).with_flops(2 * m * n * k)
}

// ---- head.cu ----

pub fn head_scores(rows: usize, vocabulary: usize) -> Minimum {
    Minimum::of([("logits", f32(rows * vocabulary)), ("targets", indices(rows)), ("scores", 3 * f32(rows))])
}
/// Without a cotangent of the entropy.
pub fn head_gradient(rows: usize, vocabulary: usize) -> Minimum {
    Minimum::of([
        ("logits", f32(rows * vocabulary)),
        ("gradient of logits", bf16(rows * vocabulary.next_multiple_of(8))),
        ("targets", indices(rows)),
        ("scores and cotangents", 4 * f32(rows)),
    ])
}
pub fn head_sample(rows: usize, vocabulary: usize) -> Minimum {
    Minimum::of([
        ("logits", f32(rows * vocabulary)),
        ("uniforms", F64 * rows as u64),
        ("tokens and log-probabilities", 2 * f32(rows)),
    ])
}

// ---- adamw.cu, sum_of_squares.cu ----

/// Of a matrix: the bf16 copy is written too.
pub fn adamw(length: usize) -> Minimum {
    Minimum::of([
        ("weights, read and written", 2 * f32(length)),
        ("gradient", f32(length)),
        ("moments, read and written", 4 * f32(length)),
        ("bf16 copy", bf16(length)),
    ])
}
pub fn sum_of_squares(length: usize) -> Minimum {
    Minimum::of([("values", f32(length)), ("parts", F64 * optimizer::parts_of(length) as u64)])
}
pub fn sum_of_parts(length: usize) -> Minimum {
    Minimum::of([("parts", F64 * optimizer::parts_of(length) as u64), ("total", F64)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { query_heads: 8, key_value_heads: 4, head_dim: 64 };

    /// 2,048 rows of 1,024: 2 MiB numbers, 4 MiB of bf16.
    #[test]
    fn memory_bound_kernels_by_hand() {
        const MIB: u64 = 1 << 20;
        let (rows, width) = (2048, 1024);
        assert_eq!(rms_norm(rows, width).total_bytes(), 8 * MIB + 4096);
        assert_eq!(add_rms_norm(rows, width).total_bytes(), 16 * MIB + 4096);
        let parts = row_parts(rows) as u64 * 4096;
        assert_eq!(rms_norm_backward(rows, width).total_bytes(), 16 * MIB + 4096 + parts);
        assert_eq!(sum_parts(row_parts(rows), width).total_bytes(), parts + 8192);
        assert_eq!(swiglu(rows, width).total_bytes(), 12 * MIB);
        assert_eq!(swiglu_backward(rows, width).total_bytes(), 24 * MIB);
        assert_eq!(embed(rows, rows, width).total_bytes(), 12 * MIB + 8192);
        assert_eq!(embed_backward(rows, 1024, width).total_bytes(), 4 * MIB + 8 * MIB + 4 * (2048 + 1025 + 1024));
        assert_eq!(move_rows(rows, width).total_bytes(), 8 * MIB + 8192);
        assert_eq!(cast(rows * width).total_bytes(), 12 * MIB);
        assert_eq!(adamw(rows * width).total_bytes(), 60 * MIB, "30 bytes per parameter");
    }

    #[test]
    fn products_and_attention_by_hand() {
        assert_eq!(gemm(256, 128, 64, 2).total_bytes(), 2 * (256 * 64 + 128 * 64 + 256 * 128));
        assert_eq!(gemm(256, 128, 64, 2).flops, 2 * 256 * 128 * 64);
        // 3 queries see 1 + 2 + 3 = 6 keys in 8 heads of 64.
        assert_eq!(attention_forward(3, HEADS).flops, 4 * 64 * 8 * 6);
        assert_eq!(attention_forward(3, HEADS).total_bytes(), 2 * 3 * 512 + 2 * 3 * 512 + 2 * 3 * 512 + 4 * 3 * 8 + 8);
        assert_eq!(attention_backward_keys(3, HEADS).flops, 8 * 64 * 8 * 6);
        assert_eq!(attention_backward_queries(3, HEADS).flops, 6 * 64 * 8 * 6);
        // One block of 64 keys: 2 x 256 numbers each.
        let (queries, block, statistics) = (2 * 3 * 512, 64 * 512, 2 * 4 * 3 * 8);
        assert_eq!(attention_backward_keys(3, HEADS).total_bytes(), 2 * queries + 2 * block + statistics + 2 * 3 * 512);
        assert_eq!(attention_backward_queries(3, HEADS).total_bytes(), 3 * queries + 2 * block + statistics);
        assert_eq!(write_key_blocks(3, HEADS).total_bytes(), 2 * 3 * 512 + 2 * block + 24);
        assert_eq!(write_shared_queries(3, HEADS).total_bytes(), 2 * (2 * queries + statistics) + 12);
        assert_eq!(attention_decode(2, 65, HEADS).total_bytes(), 2 * 2 * 512 + 2 * 2 * 65 * 512 + 2 * 2 * 8 + 4 * 2 * 8 * 66);
        // 10 columns have a gradient of 16.
        assert_eq!(head_gradient(3, 10).total_bytes(), 120 + 96 + 12 + 48);
    }
}
