//! Attention over caches: packed sequences, and the same bits however a sequence is cut into calls. Its backward is that of blocks.

use learner::device::{Heads, Role, Span};

use crate::accept::{Claim, assert_same_bits, largest};
use crate::inputs::{Inputs, far_below_zero, heads, peaked, spans};
use crate::reference::{self, Precision, wide};
use crate::subject::{Subject, Testable, activations, all, on_every_device};

on_every_device!(
    lengths_at_the_edges_of_tiles,
    head_dims_and_groups,
    peaked_scores,
    scores_far_below_zero,
    several_segments,
    no_sequences,
    chunked_and_decoded_rows_have_the_bits_of_the_whole,
    sequences_do_not_see_each_other,
);

/// Whole sequences through empty caches: `[output, log_sum_exp]`.
pub fn run_whole<D: Testable>(device: &D, rotated: &[f32], heads: Heads, lengths: &[usize]) -> [Vec<f32>; 2] {
    let rows: usize = lengths.iter().sum();
    let mut caches: Vec<D::KeyValues> = lengths.iter().map(|_| device.new_key_values(heads)).collect();
    let mut caches: Vec<&mut D::KeyValues> = caches.iter_mut().collect();
    let mut output = device.zeros(Role::Activations, rows * heads.query_width());
    let mut log_sum_exp = device.zeros(Role::Statistics, rows * heads.query_heads);
    let rotated = activations(device, rotated);
    device.attention(&rotated, heads, &spans(lengths), &mut caches, &mut output, Some(&mut log_sum_exp));
    [all(device, &output), all(device, &log_sum_exp)]
}

fn check<D: Testable>(subject: &Subject<D>, heads: Heads, lengths: &[usize], rotated: &[f32]) {
    let [output, log_sum_exp] = subject.run(|device| run_whole(device, rotated, heads, lengths));
    let [forward, naive] = [Precision::Exact, Precision::Bf16]
        .map(|precision| reference::attention(precision, &wide(rotated), heads, &spans(lengths)));
    let what = format!("output, {heads:?}, lengths {lengths:?}");
    let (exact, naive) = (&forward.output, &naive.output);
    Claim { what: &what, width: heads.query_width(), found: &output, exact, naive }.accept_activations::<D>();
    let exact = &forward.log_sum_exp;
    let what = format!("log-sum-exp, {heads:?}, lengths {lengths:?}");
    let allowed = 1e-5 * (1.0 + largest(exact.iter().copied()));
    Claim { what: &what, width: heads.query_heads, found: &log_sum_exp, exact, naive: exact }.accept_within(allowed, "f32");
}

fn check_normal<D: Testable>(subject: &Subject<D>, heads: Heads, lengths: &[usize]) {
    let rows: usize = lengths.iter().sum();
    check(subject, heads, lengths, &Inputs::new("attention").normal(rows * heads.projected_width(), 1.0));
}

fn lengths_at_the_edges_of_tiles<D: Testable>(subject: &Subject<D>) {
    check_normal(subject, heads(3, 1, 32), &[1, 127, 128, 129]);
    check_normal(subject, heads(2, 1, 64), &[129, 63, 1, 64, 65]);
    check_normal(subject, heads(1, 1, 128), &[128, 127, 1]);
}

fn head_dims_and_groups<D: Testable>(subject: &Subject<D>) {
    for (query_heads, key_value_heads) in [(2, 2), (6, 2), (5, 1), (7, 1), (8, 1)] {
        for (head_dim, lengths) in [(32, [70, 3]), (64, [9, 66]), (128, [1, 33])] {
            check_normal(subject, heads(query_heads, key_value_heads, head_dim), &lengths);
        }
    }
}

fn peaked_scores<D: Testable>(subject: &Subject<D>) {
    let heads = heads(3, 1, 64);
    check(subject, heads, &[80], &peaked(heads, 80));
}

fn scores_far_below_zero<D: Testable>(subject: &Subject<D>) {
    let heads = heads(2, 1, 64);
    check(subject, heads, &[70], &far_below_zero(heads, 70));
}

fn several_segments<D: Testable>(subject: &Subject<D>) {
    check_normal(&subject.with_segment(64), heads(3, 1, 64), &[200, 64, 65]);
    check_normal(&subject.with_segment(64), heads(2, 1, 128), &[130]);
}

fn no_sequences<D: Testable>(subject: &Subject<D>) {
    let heads = heads(4, 2, 64);
    let results = subject.run(|device| run_whole(device, &[], heads, &[]));
    assert!(results.iter().all(Vec::is_empty));
}

/// Runs two sequences in calls of these many rows of each; a call of 0 rows leaves a sequence out.
fn run_in_calls<D: Testable>(device: &D, sequences: [&[f32]; 2], heads: Heads, calls: &[[usize; 2]]) -> [Vec<f32>; 2] {
    let (width, query_width) = (heads.projected_width(), heads.query_width());
    let mut caches = [device.new_key_values(heads), device.new_key_values(heads)];
    let mut done = [0; 2];
    let mut outputs = [Vec::new(), Vec::new()];
    for counts in calls {
        let (mut rotated, mut spans, mut members) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            spans.push(Span { start: rotated.len() / width, length: count });
            rotated.extend_from_slice(&sequences[index][done[index] * width..][..count * width]);
            done[index] += count;
            members.push(index);
        }
        let rows = rotated.len() / width;
        let mut output = device.zeros(Role::Activations, rows * query_width);
        let mut members_caches: Vec<&mut D::KeyValues> =
            caches.iter_mut().enumerate().filter(|(index, _)| members.contains(index)).map(|(_, cache)| cache).collect();
        device.attention(&activations(device, &rotated), heads, &spans, &mut members_caches, &mut output, None);
        let output = all(device, &output);
        for (&index, span) in members.iter().zip(&spans) {
            outputs[index].extend_from_slice(&output[span.start * query_width..][..span.length * query_width]);
        }
    }
    outputs
}

/// Prefill in pieces, decode of few rows and single rows, alone and beside another sequence: the bits of one call each.
fn chunked_and_decoded_rows_have_the_bits_of_the_whole<D: Testable>(subject: &Subject<D>) {
    let long: &[[usize; 2]] = &[[70, 0], [1, 65], [1, 1], [0, 2], [2, 1], [56, 1], [5, 30]];
    let short: &[[usize; 2]] = &[[1, 3], [1, 1], [60, 1], [1, 1], [4, 64]];
    for (heads, calls) in [
        (heads(3, 1, 64), long),
        (heads(8, 1, 32), short),
        (heads(5, 1, 128), short),
        (heads(2, 2, 64), short),
        (heads(7, 1, 64), short),
    ] {
        let lengths = [0, 1].map(|index| calls.iter().map(|counts| counts[index]).sum::<usize>());
        let mut numbers = Inputs::new("chunks");
        let sequences = lengths.map(|length| numbers.normal(length * heads.projected_width(), 1.5));
        let sequences = [&sequences[0][..], &sequences[1][..]];
        let subject = subject.with_segment(64);
        let whole = subject.run(|device| {
            let [first, _] = run_in_calls(device, sequences, heads, &[[lengths[0], 0]]);
            let [_, second] = run_in_calls(device, sequences, heads, &[[0, lengths[1]]]);
            [first, second]
        });
        let cut = subject.run(|device| run_in_calls(device, sequences, heads, calls));
        let single = vec![[1, 1]; *lengths.iter().min().unwrap_or(&0)];
        let decoded = subject.run(|device| run_in_calls(device, sequences, heads, &single));
        for index in 0..2 {
            assert_same_bits(&format!("{heads:?}, sequence {index} in calls"), &cut[index], &whole[index]);
            let start = &whole[index][..decoded[index].len()];
            assert_same_bits(&format!("{heads:?}, sequence {index} row by row"), &decoded[index], start);
        }
    }
}

/// A cache that is cloned goes its own way, one that is cleared starts again, and packing changes nothing.
fn sequences_do_not_see_each_other<D: Testable>(subject: &Subject<D>) {
    let heads = heads(4, 2, 32);
    let (width, query_width) = (heads.projected_width(), heads.query_width());
    let mut numbers = Inputs::new("own sequences");
    let (a, b) = (numbers.normal(40 * width, 1.0), numbers.normal(40 * width, 1.0));
    let attend = |device: &D, rows: &[f32], cache: &mut D::KeyValues| {
        let span = Span { start: 0, length: rows.len() / width };
        let mut output = device.zeros(Role::Activations, span.length * query_width);
        device.attention(&activations(device, rows), heads, &[span], &mut [cache], &mut output, None);
        all(device, &output)
    };
    let [original, after_clone, cloned, cleared] = subject.run(|device| {
        let mut cache = device.new_key_values(heads);
        attend(device, &a[..20 * width], &mut cache);
        let mut clone = cache.clone();
        let cloned = attend(device, &b[20 * width..], &mut clone);
        let after_clone = attend(device, &a[20 * width..], &mut cache);
        device.clear_key_values(&mut cache);
        let cleared = attend(device, &a, &mut cache);
        let mut fresh = device.new_key_values(heads);
        [attend(device, &a, &mut fresh), after_clone, cloned, cleared]
    });
    assert_same_bits("a cleared cache", &cleared, &original);
    assert_same_bits("a cache that was cloned", &after_clone, &original[20 * query_width..]);
    let mixed = [&a[..20 * width], &b[20 * width..]].concat();
    let [expected] = subject.run(|device| [attend(device, &mixed, &mut device.new_key_values(heads))]);
    assert_same_bits("a clone", &cloned, &expected[20 * query_width..]);
}
