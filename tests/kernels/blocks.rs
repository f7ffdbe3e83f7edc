//! Attention over blocks of keys: the bits of attention over caches, however documents are cut over ranks; gradients against f64.

use std::ops::Range;

use learner::device::{AttendedRows, AttentionPlan, Device, Heads, KEYS_PER_BLOCK, QuerySlice, Role, SharedQueries};

use crate::accept::{Claim, assert_same_bits};
use crate::attention::run_whole;
use crate::inputs::{Inputs, far_below_zero, heads, peaked, spans};
use crate::reference::{self, Precision, wide};
use crate::subject::{Subject, Testable, activations, all, on_every_device};

on_every_device!(
    one_rank_has_the_bits_of_caches,
    ranks_have_the_bits_of_one,
    gradients,
    gradients_of_every_group,
    gradients_of_peaked_scores,
    gradients_of_scores_far_below_zero,
    gradients_over_segments,
    gradients_over_ranks,
    ranges_of_heads,
    rows_at_the_default_segment,
    blocks_hold_their_rows,
    nothing_here,
);

/// One rank's part of a batch: its plan over the blocks of all ranks, and the rows of the whole batch that it holds.
struct Share {
    plan: AttentionPlan,
    rows: Vec<usize>,
}

/// Deals documents out to `ranks`: chunk `c` of a document of even number, `blocks_per_chunk` blocks long, goes to rank `(c + document) %
/// ranks`; those of odd number stay whole. Blocks lie in rank order, `shared` of them per rank, in the order of the rank's rows, and so do
/// the rows of shared queries; every rank has a block and some rows that nobody fills. One rank exchanges with itself.
fn shares(lengths: &[usize], ranks: usize, blocks_per_chunk: usize) -> Vec<Share> {
    let is_shared = |document: usize| ranks == 1 || document.is_multiple_of(2);
    let mut shares: Vec<Share> = (0..ranks).map(|_| Share { plan: AttentionPlan::default(), rows: Vec::new() }).collect();
    // Of each rank, the blocks that it fills: `(document, block in the document)`.
    let mut filled: Vec<Vec<(usize, usize)>> = vec![Vec::new(); ranks];
    for (document, span) in spans(lengths).iter().enumerate() {
        let chunk = if is_shared(document) { blocks_per_chunk * KEYS_PER_BLOCK } else { span.length.max(1) };
        for first in (0..span.length).step_by(chunk) {
            let rank = (first / chunk + document) % ranks;
            let (share, length) = (&mut shares[rank], chunk.min(span.length - first));
            share.plan.slices.push(QuerySlice { row: share.rows.len(), length, document, first });
            share.rows.extend(span.start + first..span.start + first + length);
            let first_block = first / KEYS_PER_BLOCK;
            filled[rank].extend((first_block..first_block + length.div_ceil(KEYS_PER_BLOCK)).map(|block| (document, block)));
        }
    }
    let shared = filled.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let mut tables: Vec<Vec<u32>> = lengths.iter().map(|length| vec![0; length.div_ceil(KEYS_PER_BLOCK)]).collect();
    for (rank, blocks) in filled.iter().enumerate() {
        for (place, &(document, block)) in blocks.iter().enumerate() {
            tables[document][block] = (rank * shared + place) as u32;
        }
    }
    for share in &mut shares {
        let here = |document: usize| share.plan.slices.iter().any(|slice| slice.document == document);
        let own = |(document, table): (usize, &Vec<u32>)| if here(document) { table.clone() } else { Vec::new() };
        share.plan.tables = tables.iter().enumerate().map(own).collect();
        (share.plan.blocks, share.plan.shared) = (ranks * shared, shared);
    }
    let shared_slices = |share: &Share| -> Vec<QuerySlice> {
        share.plan.slices.iter().filter(|slice| is_shared(slice.document)).copied().collect()
    };
    let rows_of = |share: &Share| shared_slices(share).iter().map(|slice| slice.length).sum::<usize>();
    let rows = shares.iter().map(rows_of).max().unwrap_or(0) + 3;
    let mut slices = Vec::new();
    for (rank, share) in shares.iter().enumerate() {
        let mut row = rank * rows;
        for slice in shared_slices(share) {
            slices.push(QuerySlice { row, ..slice });
            row += slice.length;
        }
    }
    slices.sort_by_key(|slice| (slice.document, slice.first));
    for (rank, share) in shares.iter_mut().enumerate() {
        let here = |slice: &&QuerySlice| !share.plan.tables[slice.document].is_empty();
        let slices = slices.iter().filter(here).copied().collect();
        share.plan.queries = SharedQueries { rows, own: rank * rows, slices };
    }
    shares
}

fn whole(lengths: &[usize]) -> Vec<Share> {
    vec![Share { plan: AttentionPlan::whole(lengths), rows: (0..lengths.iter().sum()).collect() }]
}

fn rows_of(values: &[f32], rows: &[usize], width: usize) -> Vec<f32> {
    rows.iter().flat_map(|&row| values[row * width..][..width].to_vec()).collect()
}

fn put_rows(all: &mut [f32], rows: &[usize], values: &[f32]) {
    let width = values.len() / rows.len().max(1);
    for (&row, values) in rows.iter().zip(values.chunks_exact(width.max(1))) {
        all[row * width..][..width].copy_from_slice(values);
    }
}

/// What all ranks compute together, by row of the batch: `[output, log_sum_exp, drotated]`. They take turns on one device, ranges of
/// heads one after another; every rank fills its part of one buffer of blocks, and of one of queries.
fn run_shares<D: Testable>(
    device: &D,
    rotated: &[f32],
    doutput: &[f32],
    heads: Heads,
    ranges: &[Range<usize>],
    shares: &[Share],
) -> [Vec<f32>; 3] {
    let (width, query_width) = (heads.projected_width(), heads.query_width());
    let total = rotated.len() / width;
    struct Rank<D: Device> {
        rotated: D::Buffer,
        doutput: D::Buffer,
        output: D::Buffer,
        log_sum_exp: D::Buffer,
        delta: D::Buffer,
        drotated: D::Buffer,
    }
    impl<D: Device> Rank<D> {
        fn attended(&self) -> AttendedRows<'_, D> {
            let Rank { rotated, doutput, log_sum_exp, delta, .. } = self;
            AttendedRows { rotated, doutput, log_sum_exp, delta }
        }
    }
    let rank = |share: &Share| {
        let rows = share.rows.len();
        Rank::<D> {
            rotated: activations(device, &rows_of(rotated, &share.rows, width)),
            doutput: activations(device, &rows_of(doutput, &share.rows, query_width)),
            output: device.upload(Role::Activations, &vec![5.0; rows * query_width]),
            log_sum_exp: device.upload(Role::Statistics, &vec![5.0; rows * heads.query_heads]),
            delta: device.upload(Role::Statistics, &vec![5.0; rows * heads.query_heads]),
            drotated: device.upload(Role::Activations, &vec![5.0; rows * width]),
        }
    };
    let mut ranks: Vec<Rank<D>> = shares.iter().map(rank).collect();
    // Every range's output must be there before its deltas are.
    let mut all_blocks = Vec::new();
    for range in ranges {
        let numbers = shares[0].plan.blocks * AttentionPlan::block_numbers(range.len(), heads.head_dim);
        let mut blocks = device.upload(Role::Activations, &vec![7.0; numbers]);
        for (rank, share) in ranks.iter().zip(shares) {
            device.write_key_blocks(&rank.rotated, heads, range.clone(), &share.plan, &mut blocks);
        }
        for (Rank { rotated, output, log_sum_exp, .. }, Share { plan, .. }) in ranks.iter_mut().zip(shares) {
            device.block_attention(rotated, heads, range.clone(), plan, &blocks, output, log_sum_exp);
        }
        all_blocks.push(blocks);
    }
    for (Rank { doutput, output, delta, .. }, Share { rows, .. }) in ranks.iter_mut().zip(shares) {
        device.attention_delta(doutput, output, heads, rows.len(), delta);
    }
    for (range, blocks) in ranges.iter().zip(&all_blocks) {
        let numbers = AttentionPlan::query_numbers(heads, range);
        let rows = shares.len() * shares[0].plan.queries.rows;
        let mut queries = device.upload(Role::Activations, &vec![f32::NAN; rows * numbers]);
        for (rank, Share { plan, .. }) in ranks.iter().zip(shares) {
            device.write_shared_queries(rank.attended(), heads, range.clone(), plan, &mut queries);
        }
        for (rank, Share { plan, .. }) in ranks.iter_mut().zip(shares) {
            let mut drotated = std::mem::replace(&mut rank.drotated, device.zeros(Role::Activations, 0));
            device.block_attention_backward(rank.attended(), heads, range.clone(), plan, blocks, &queries, &mut drotated);
            rank.drotated = drotated;
        }
    }
    let mut results = [query_width, heads.query_heads, width].map(|width| vec![f32::NAN; total * width]);
    for (rank, share) in ranks.iter().zip(shares) {
        for (result, buffer) in results.iter_mut().zip([&rank.output, &rank.log_sum_exp, &rank.drotated]) {
            put_rows(result, &share.rows, &all(device, buffer));
        }
    }
    results
}

fn inputs(heads: Heads, lengths: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let rows: usize = lengths.iter().sum();
    let mut numbers = Inputs::new("blocks");
    (numbers.normal(rows * heads.projected_width(), 1.5), numbers.normal(rows * heads.query_width(), 1.0))
}

fn all_heads(heads: Heads) -> [Range<usize>; 1] {
    [(); 1].map(|()| 0..heads.key_value_heads)
}

/// Tails of one row, of a block less one, and whole blocks; several segments.
const LENGTHS: [usize; 5] = [129, 63, 1, 64, 200];

fn one_rank_has_the_bits_of_caches<D: Testable>(subject: &Subject<D>) {
    for heads in [heads(3, 1, 64), heads(4, 2, 32), heads(2, 2, 128), heads(7, 1, 64)] {
        let (rotated, doutput) = inputs(heads, &LENGTHS);
        let subject = subject.with_segment(64);
        let [output, log_sum_exp, _] =
            subject.run(|device| run_shares(device, &rotated, &doutput, heads, &all_heads(heads), &whole(&LENGTHS)));
        let [cached_output, cached_log_sum_exp] = subject.run(|device| run_whole(device, &rotated, heads, &LENGTHS));
        assert_same_bits(&format!("output, {heads:?}"), &output, &cached_output);
        assert_same_bits(&format!("log-sum-exp, {heads:?}"), &log_sum_exp, &cached_log_sum_exp);
    }
}

fn ranks_have_the_bits_of_one<D: Testable>(subject: &Subject<D>) {
    for (heads, blocks_per_chunk) in [(heads(4, 2, 32), 2), (heads(2, 1, 64), 1), (heads(1, 1, 128), 1)] {
        let lengths = [200, 65, 130, 3];
        let (rotated, doutput) = inputs(heads, &lengths);
        let subject = subject.with_segment(64);
        let run =
            |shares: &[Share]| subject.run(|device| run_shares(device, &rotated, &doutput, heads, &all_heads(heads), shares));
        let one = run(&whole(&lengths));
        for ranks in [1, 2, 3, 4, 8] {
            let found = run(&shares(&lengths, ranks, blocks_per_chunk));
            for (name, (found, one)) in ["output", "log-sum-exp", "drotated"].iter().zip(found.iter().zip(&one)) {
                assert_same_bits(&format!("{name}, {ranks} ranks, {heads:?}"), found, one);
            }
        }
    }
}

fn check_gradients<D: Testable>(
    subject: &Subject<D>,
    heads: Heads,
    lengths: &[usize],
    ranges: &[Range<usize>],
    shares: &[Share],
) {
    check_gradients_of(subject, heads, lengths, ranges, shares, &inputs(heads, lengths));
}

fn check_gradients_of<D: Testable>(
    subject: &Subject<D>,
    heads: Heads,
    lengths: &[usize],
    ranges: &[Range<usize>],
    shares: &[Share],
    (rotated, doutput): &(Vec<f32>, Vec<f32>),
) {
    let [output, _, drotated] = subject.run(|device| run_shares(device, rotated, doutput, heads, ranges, shares));
    let (rotated, doutput, spans) = (wide(rotated), wide(doutput), spans(lengths));
    let [(exact_output, exact), (naive_output, naive)] = [Precision::Exact, Precision::Bf16].map(|precision| {
        let output = reference::attention(precision, &rotated, heads, &spans).output;
        (output, reference::attention_backward(precision, &doutput, &rotated, heads, &spans))
    });
    let ranks = shares.len();
    let claim = |name: &str, width: usize, found: &[f32], exact: &[f64], naive: &[f64]| {
        let what = format!("{name}, {heads:?}, lengths {lengths:?}, {ranks} ranks, heads {ranges:?}");
        Claim { what: &what, width, found, exact, naive }.accept_activations::<D>();
    };
    claim("output", heads.query_width(), &output, &exact_output, &naive_output);
    claim("drotated", heads.projected_width(), &drotated, &exact, &naive);
}

fn gradients<D: Testable>(subject: &Subject<D>) {
    let cases: [(Heads, &[usize]); 4] = [
        (heads(3, 1, 32), &[1, 127, 128, 129]),
        (heads(2, 1, 64), &[129, 63, 1, 64, 65]),
        (heads(1, 1, 128), &[128, 97, 1]),
        (heads(8, 2, 64), &[66]),
    ];
    for (heads, lengths) in cases {
        check_gradients(subject, heads, lengths, &all_heads(heads), &whole(lengths));
    }
}

fn gradients_of_every_group<D: Testable>(subject: &Subject<D>) {
    for (query_heads, key_value_heads) in [(2, 2), (6, 2), (5, 1), (7, 1), (8, 1)] {
        for (head_dim, lengths) in [(32, [70, 3]), (64, [9, 66]), (128, [1, 33])] {
            let heads = heads(query_heads, key_value_heads, head_dim);
            check_gradients(subject, heads, &lengths, &all_heads(heads), &whole(&lengths));
        }
    }
}

fn gradients_of_peaked_scores<D: Testable>(subject: &Subject<D>) {
    let (heads, lengths) = (heads(3, 1, 64), [80]);
    let values = (peaked(heads, 80), inputs(heads, &lengths).1);
    check_gradients_of(subject, heads, &lengths, &all_heads(heads), &whole(&lengths), &values);
}

fn gradients_of_scores_far_below_zero<D: Testable>(subject: &Subject<D>) {
    let (heads, lengths) = (heads(2, 1, 64), [70]);
    let values = (far_below_zero(heads, 70), inputs(heads, &lengths).1);
    check_gradients_of(subject, heads, &lengths, &all_heads(heads), &whole(&lengths), &values);
}

fn gradients_over_segments<D: Testable>(subject: &Subject<D>) {
    for (heads, lengths) in [(heads(3, 1, 64), &[200, 64, 65][..]), (heads(2, 1, 128), &[130])] {
        check_gradients(&subject.with_segment(64), heads, lengths, &all_heads(heads), &whole(lengths));
    }
}

fn gradients_over_ranks<D: Testable>(subject: &Subject<D>) {
    for (heads, ranks, blocks_per_chunk) in [(heads(4, 2, 32), 2, 1), (heads(3, 1, 64), 3, 2), (heads(2, 1, 128), 4, 1)] {
        let lengths = [200, 65, 130, 3];
        check_gradients(subject, heads, &lengths, &all_heads(heads), &shares(&lengths, ranks, blocks_per_chunk));
    }
}

/// Heads in ranges, the last of them smaller: the bits of all at once, and no range touches another's columns.
fn ranges_of_heads<D: Testable>(subject: &Subject<D>) {
    for heads in [heads(6, 3, 32), heads(3, 3, 64), heads(6, 3, 128)] {
        let lengths = [70, 129];
        let (rotated, doutput) = inputs(heads, &lengths);
        let shares = shares(&lengths, 2, 1);
        let run = |ranges: &[Range<usize>]| subject.run(|device| run_shares(device, &rotated, &doutput, heads, ranges, &shares));
        let one = run(&all_heads(heads));
        for ranges in [[0..2, 2..3], [2..3, 0..2]] {
            for (found, one) in run(&ranges).iter().zip(&one) {
                assert_same_bits(&format!("{heads:?}, {ranges:?}"), found, one);
            }
        }
        check_gradients(subject, heads, &lengths, &[0..1, 1..3], &shares);
    }
}

/// A document of more than one segment of 8,192 keys, its last rows alone on a second rank.
fn rows_at_the_default_segment<D: Testable>(subject: &Subject<D>) {
    let (heads, length, tail) = (heads(1, 1, 32), 8192 + 70, 134);
    let first = length - tail;
    let rotated = Inputs::new("segments").normal(length * heads.projected_width(), 1.5);
    let all_blocks = length.div_ceil(KEYS_PER_BLOCK);
    let plan = |row, first, length| AttentionPlan {
        slices: vec![QuerySlice { row, length, document: 0, first }],
        tables: vec![(0..all_blocks as u32).collect()],
        blocks: all_blocks,
        ..AttentionPlan::default()
    };
    let [found, found_statistics] = subject.once(|device| {
        let mut blocks =
            device.zeros(Role::Activations, all_blocks * AttentionPlan::block_numbers(heads.key_value_heads, heads.head_dim));
        let (before, after) = rotated.split_at(first * heads.projected_width());
        device.write_key_blocks(&activations(device, before), heads, 0..1, &plan(0, 0, first), &mut blocks);
        let after = activations(device, after);
        device.write_key_blocks(&after, heads, 0..1, &plan(0, first, tail), &mut blocks);
        let mut output = device.zeros(Role::Activations, tail * heads.query_width());
        let mut log_sum_exp = device.zeros(Role::Statistics, tail * heads.query_heads);
        device.block_attention(&after, heads, 0..1, &plan(0, first, tail), &blocks, &mut output, &mut log_sum_exp);
        [all(device, &output), all(device, &log_sum_exp)]
    });
    let [output, log_sum_exp] = subject.once(|device| run_whole(device, &rotated, heads, &[length]));
    assert_same_bits("output", &found, &output[first * heads.query_width()..]);
    assert_same_bits("log-sum-exp", &found_statistics, &log_sum_exp[first * heads.query_heads..]);
}

/// Keys, then values, head by head; zeros after the last row of a slice; other blocks as they were.
fn blocks_hold_their_rows<D: Testable>(subject: &Subject<D>) {
    let (heads, range) = (heads(6, 3, 32), 1..3);
    let lengths = [65, 0, 2];
    let (rotated, _) = inputs(heads, &lengths);
    let plan = AttentionPlan { blocks: 4, ..AttentionPlan::whole(&lengths) };
    let numbers = plan.blocks * AttentionPlan::block_numbers(range.len(), heads.head_dim);
    let [found] = subject.run(|device| {
        let mut blocks = device.upload(Role::Activations, &vec![7.0; numbers]);
        device.write_key_blocks(&activations(device, &rotated), heads, range.clone(), &plan, &mut blocks);
        [all(device, &blocks)]
    });
    let mut expected = vec![7.0; numbers];
    let dim = heads.head_dim;
    // (row, block, key of the block)
    let places = (0..65).map(|row| (row, row / KEYS_PER_BLOCK, row % KEYS_PER_BLOCK)).chain([(65, 2, 0), (66, 2, 1)]);
    expected[..3 * AttentionPlan::block_numbers(2, dim)].fill(0.0);
    for (row, block, key) in places {
        for (part, column_head) in [(0, 6 + 1), (1, 6 + 2), (2, 6 + 3 + 1), (3, 6 + 3 + 2)] {
            let at = ((block * 4 + part) * KEYS_PER_BLOCK + key) * dim;
            let column = row * heads.projected_width() + column_head * dim;
            expected[at..at + dim].copy_from_slice(&rotated[column..column + dim]);
        }
    }
    assert_same_bits("blocks", &found, &expected);
}

/// A rank without rows attends to nothing, and adds nothing to what others exchange.
fn nothing_here<D: Testable>(subject: &Subject<D>) {
    let heads = heads(4, 2, 64);
    let queries = SharedQueries { rows: 4, own: 8, slices: Vec::new() };
    let plan = AttentionPlan { tables: vec![Vec::new(); 2], blocks: 3, shared: 1, queries, ..AttentionPlan::default() };
    let numbers = [plan.blocks * AttentionPlan::block_numbers(2, 64), 3 * 4 * AttentionPlan::query_numbers(heads, &(0..2))];
    let found = subject.run(|device| {
        let [rotated, doutput] = [(); 2].map(|()| activations(device, &[]));
        let [mut output, mut drotated] = [(); 2].map(|()| activations(device, &[]));
        let [mut log_sum_exp, mut delta] = [(); 2].map(|()| device.zeros(Role::Statistics, 0));
        let [mut blocks, mut queries] = numbers.map(|numbers| device.upload(Role::Activations, &vec![7.0; numbers]));
        device.write_key_blocks(&rotated, heads, 0..2, &plan, &mut blocks);
        device.block_attention(&rotated, heads, 0..2, &plan, &blocks, &mut output, &mut log_sum_exp);
        device.attention_delta(&doutput, &output, heads, 0, &mut delta);
        let rows = AttendedRows { rotated: &rotated, doutput: &doutput, log_sum_exp: &log_sum_exp, delta: &delta };
        device.write_shared_queries(rows, heads, 0..2, &plan, &mut queries);
        device.block_attention_backward(rows, heads, 0..2, &plan, &blocks, &queries, &mut drotated);
        [all(device, &blocks), all(device, &queries)]
    });
    for (found, numbers) in found.iter().zip(numbers) {
        assert_same_bits("what is exchanged", found, &vec![7.0; numbers]);
    }
}
