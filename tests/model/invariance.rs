//! A token's log-probability depends on its own prefix alone, bit for bit (DESIGN, rule 3).

use learner::device::CpuDevice;
use learner::model::{Extension, Hidden, KeyValueCache, Model, ModelConfig};
use learner::types::{Batch, Key, Purpose};

use crate::support::{noisy_model, qwen2, qwen3, tokens, with_threads};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Cuts of each sequence into calls of `extend`: all at once, one token at a time, or mixed.
#[derive(Clone, Copy, Debug)]
enum Chunking {
    Whole,
    Single,
    Mixed,
}

/// Log-probabilities of every token but the first by growing all sequences together. To read off the log-probability of a
/// GIVEN next token, `sample` is asked with uniforms that walk the distribution until it returns that token.
fn log_probs_by_extension(
    model: &Model<CpuDevice>,
    sequences: &[Vec<u32>],
    chunking: Chunking,
    temperature: f32,
) -> Vec<Vec<f32>> {
    let mut key = Key::new(Purpose::Evaluation, &[5]);
    let mut caches: Vec<KeyValueCache<CpuDevice>> = sequences.iter().map(|_| model.new_cache()).collect();
    let mut found: Vec<Vec<(usize, f32)>> = vec![Vec::new(); sequences.len()];
    loop {
        let mut extensions = Vec::new();
        let mut owners = Vec::new();
        for (index, cache) in caches.iter_mut().enumerate() {
            let (done, all) = (cache.length(), sequences[index].len() - 1);
            if done == all {
                continue;
            }
            let count = match chunking {
                Chunking::Whole => all,
                Chunking::Single => 1,
                Chunking::Mixed => 1 + key.below(9),
            };
            let end = (done + count).min(all);
            owners.push((index, end));
            extensions.push(Extension { cache, tokens: &sequences[index][done..end] });
        }
        if extensions.is_empty() {
            break;
        }
        let hidden = model.extend(&mut extensions);
        let wanted: Vec<u32> = owners.iter().map(|&(index, end)| sequences[index][end]).collect();
        for ((index, end), log_prob) in owners.into_iter().zip(log_probs_of(model, &hidden, &wanted, temperature)) {
            if let Some(log_prob) = log_prob {
                found[index].push((end, log_prob));
            }
        }
    }
    // Only the last token of a chunk has a state to sample from; NaN marks the others.
    let by_position = |(found, ids): (Vec<(usize, f32)>, &Vec<u32>)| {
        let mut log_probs = vec![f32::NAN; ids.len() - 1];
        found.into_iter().for_each(|(position, log_prob)| log_probs[position - 1] = log_prob);
        log_probs
    };
    found.into_iter().zip(sequences).map(by_position).collect()
}

fn log_probs_of(model: &Model<CpuDevice>, hidden: &Hidden<CpuDevice>, wanted: &[u32], temperature: f32) -> Vec<Option<f32>> {
    let mut found = vec![None; wanted.len()];
    for step in 0..2000 {
        let uniforms = vec![(step as f64 + 0.5) / 2000.0; wanted.len()];
        let drawn = model.sample(hidden, temperature, &uniforms, model.config().vocabulary);
        for (slot, ((id, log_prob), wanted)) in found.iter_mut().zip(drawn.into_iter().zip(wanted)) {
            if id == *wanted {
                *slot = Some(log_prob);
            }
        }
    }
    found
}

fn check(config: ModelConfig, segment: usize, lengths: &[usize], temperature: f32) {
    let vocabulary = config.vocabulary;
    let model = noisy_model(CpuDevice::with_attention_segment(segment), config, 1);
    let sequences: Vec<Vec<u32>> =
        lengths.iter().enumerate().map(|(index, &length)| tokens(length, vocabulary, index as u64)).collect();
    let slices: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    let packed = with_threads(2, || model.score(&Batch::pack(&slices, |_, _| true), temperature)).log_probs;
    let mut alone = Vec::new();
    for ids in &slices {
        alone.extend(with_threads(1, || model.score(&Batch::pack(&[ids], |_, _| true), temperature)).log_probs);
    }
    assert_eq!(bits(&packed), bits(&alone), "packed against alone");
    let some = Batch::pack(&slices, |sequence, token| (sequence + token) % 3 == 0);
    let all = Batch::pack(&slices, |_, _| true);
    let expected: Vec<f32> =
        some.scored_rows.iter().filter_map(|row| all.scored_rows.binary_search(row).ok()).map(|index| packed[index]).collect();
    assert_eq!(bits(&model.score(&some, temperature).log_probs), bits(&expected), "some rows scored against all");
    for chunking in [Chunking::Whole, Chunking::Single, Chunking::Mixed] {
        for threads in [1, 2] {
            let extended = with_threads(threads, || log_probs_by_extension(&model, &sequences, chunking, temperature));
            let mut compared = 0;
            for (index, (extended, packed)) in extended.concat().iter().zip(&packed).enumerate() {
                if !extended.is_nan() {
                    compared += 1;
                    assert_eq!(extended.to_bits(), packed.to_bits(), "{chunking:?}, {threads} threads, token {index}");
                }
            }
            // A token too unlikely for the walk over uniforms is not compared; most are.
            let expected = if matches!(chunking, Chunking::Single) { packed.len() / 2 } else { 1 };
            assert!(compared >= expected, "{chunking:?} compared only {compared} of {}", packed.len());
        }
    }
}

#[test]
fn scoring_equals_extending_in_any_chunking_for_qwen3() {
    check(qwen3(true), 8192, &[37, 5, 18, 2], 1.0);
}

#[test]
fn scoring_equals_extending_at_another_temperature_for_qwen2() {
    check(qwen2(), 8192, &[21, 40, 3], 0.7);
}

#[test]
fn scoring_equals_extending_across_segments_of_keys() {
    check(qwen3(false), 16, &[70, 33, 16, 17], 1.0);
    check(qwen2(), 32, &[65, 32], 1.0);
}

#[test]
fn segments_change_only_rounding() {
    let ids = tokens(90, 53, 3);
    let batch = Batch::pack(&[&ids], |_, _| true);
    let scores = [16, 48, 8192]
        .map(|segment| noisy_model(CpuDevice::with_attention_segment(segment), qwen3(true), 1).score(&batch, 1.0).log_probs);
    for other in &scores[..2] {
        for (a, b) in other.iter().zip(&scores[2]) {
            assert!((a - b).abs() < 2e-5, "{a} against {b}");
        }
    }
}

#[test]
fn a_cloned_cache_continues_like_the_original() {
    let model = noisy_model(CpuDevice::new(), qwen3(true), 2);
    let (prompt, next) = (tokens(23, 53, 1), tokens(4, 53, 2));
    let mut cache = model.new_cache();
    model.extend(&mut [Extension { cache: &mut cache, tokens: &prompt }]);
    let mut clone = cache.clone();
    let hidden =
        model.extend(&mut [Extension { cache: &mut cache, tokens: &next }, Extension { cache: &mut clone, tokens: &next }]);
    let drawn = model.sample(&hidden, 1.0, &[0.3, 0.3], 53);
    assert_eq!(drawn[0], drawn[1]);
    assert_eq!((cache.length(), clone.length()), (27, 27));
}

#[test]
fn greedy_takes_the_likeliest_and_excluded_ids_are_never_drawn() {
    let model = noisy_model(CpuDevice::new(), qwen3(true), 4);
    let ids = tokens(9, 53, 1);
    let mut cache = model.new_cache();
    let hidden = model.extend(&mut [Extension { cache: &mut cache, tokens: &ids }]);
    let (best, best_log_prob) = model.sample(&hidden, 0.0, &[0.9], 53)[0];
    for step in 0..200 {
        let uniform = [step as f64 / 200.0];
        let (id, log_prob) = model.sample(&hidden, 1.0, &uniform, 53)[0];
        assert!(log_prob <= best_log_prob && (id != best || log_prob == best_log_prob));
        let (limited, limited_log_prob) = model.sample(&hidden, 1.0, &uniform, 20)[0];
        assert!(limited < 20, "drew excluded id {limited}");
        let sequence = [ids.clone(), vec![limited]].concat();
        let scored = model.score(&Batch::pack(&[&sequence], |_, token| token == 9), 1.0).log_probs;
        assert_eq!(scored[0].to_bits(), limited_log_prob.to_bits(), "an excluded id still counts in the log-probability");
    }
}

#[test]
fn prompts_longer_than_a_pass_are_cut_without_changing_a_bit() {
    let model = noisy_model(CpuDevice::new(), ModelConfig { max_positions: 4096, ..qwen3(true) }, 6);
    let prompts = [tokens(700, 53, 1), tokens(1500, 53, 2), tokens(3, 53, 3)];
    let mut caches: Vec<_> = prompts.iter().map(|_| model.new_cache()).collect();
    let mut extensions: Vec<_> = caches.iter_mut().zip(&prompts).map(|(cache, tokens)| Extension { cache, tokens }).collect();
    let hidden = model.extend(&mut extensions);
    let drawn = model.sample(&hidden, 1.0, &[0.2, 0.5, 0.8], 53);
    assert_eq!(caches.iter().map(KeyValueCache::length).collect::<Vec<_>>(), [700, 1500, 3]);
    for (prompt, (id, log_prob)) in prompts.iter().zip(drawn) {
        let sequence = [prompt.clone(), vec![id]].concat();
        let scored = model.score(&Batch::pack(&[&sequence], |_, token| token == prompt.len()), 1.0).log_probs;
        assert_eq!(scored[0].to_bits(), log_prob.to_bits(), "prompt of {} tokens", prompt.len());
    }
}
