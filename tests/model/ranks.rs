//! A batch cut over several ranks, each a thread: the scores of one rank bit for bit, its gradients but for rounding, and the
//! same calls in the same order everywhere, also where a rank has no tokens.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};

use learner::device::{AttentionPlan, CpuDevice, KEYS_PER_BLOCK, QuerySlice, SharedQueries};
use learner::model::{
    Cotangents, ModelConfig, NoExchange, ParameterSource, PassSettings, Scores, SequenceExchange, TrainingPass, Unit,
    UnitGradients, UnitTensors, Whole,
};
use learner::types::Batch;

use crate::support::{noisy_model, qwen2, qwen3, tokens};

const TEMPERATURE: f32 = 0.8;

/// Tokens of a chunk, which is never cut.
const CHUNK: usize = 128;

/// What one rank of a test is and does.
struct Rank {
    rank: usize,
    pass: TrainingPass,
    /// Of each scored row in the whole batch's.
    score_places: Vec<usize>,
    post: Post,
}

/// Deals chunks out in turn, each document starting one rank later than the one before.
fn deal(batch: &Batch, ranks: usize) -> Vec<Rank> {
    let lengths: Vec<usize> = batch.lengths().collect();
    let owner = |document: usize, position: usize| (position / CHUNK + document) % ranks;
    let is_split = |document: usize| ranks > 1 && lengths[document] > CHUNK;
    let blocks = |document: usize| (0..lengths[document]).step_by(KEYS_PER_BLOCK);
    let owned = |rank: usize, split: bool| -> usize {
        let documents = (0..lengths.len()).filter(|&document| is_split(document) == split);
        documents.map(|document| blocks(document).filter(|&first| owner(document, first) == rank).count()).sum()
    };
    let shared = (0..ranks).map(|rank| owned(rank, true)).max().unwrap_or(0);
    let of_rank = |rank: usize, post: Post| {
        let attention = AttentionPlan { shared, blocks: ranks * shared + owned(rank, false), ..AttentionPlan::default() };
        let mut pass = TrainingPass { attention, ..TrainingPass::default() };
        let mut filled: Vec<usize> = (0..ranks).map(|rank| rank * shared).collect();
        let mut whole = ranks * shared;
        let mut score_places = Vec::new();
        for (document, &length) in lengths.iter().enumerate() {
            let mut table = Vec::new();
            for first in blocks(document) {
                let next = if is_split(document) { &mut filled[owner(document, first)] } else { &mut whole };
                if is_split(document) || owner(document, first) == rank {
                    table.push(*next as u32);
                    *next += 1;
                }
            }
            let mut here = false;
            for first in (0..length).step_by(CHUNK).filter(|&first| owner(document, first) == rank) {
                here = true;
                let count = CHUNK.min(length - first);
                let (row, start) = (pass.ids.len(), batch.starts[document] + first);
                match pass.attention.slices.last_mut() {
                    Some(last) if last.document == document && last.first + last.length == first => last.length += count,
                    _ => pass.attention.slices.push(QuerySlice { row, length: count, document, first }),
                }
                pass.ids.extend_from_slice(&batch.ids[start..start + count]);
                pass.positions.extend(first..first + count);
                for (place, &scored) in batch.scored_rows.iter().enumerate() {
                    if (start..start + count).contains(&scored) {
                        pass.scored_rows.push(row + scored - start);
                        pass.targets.push(batch.ids[scored + 1]);
                        score_places.push(place);
                    }
                }
            }
            pass.attention.tables.push(if here { table } else { Vec::new() });
        }
        Rank { rank, pass, score_places, post }
    };
    let mut dealt: Vec<Rank> = posts(ranks).into_iter().enumerate().map(|(rank, post)| of_rank(rank, post)).collect();
    // Rows of split documents, rank by rank in the order of the rank's rows.
    let mut slices = Vec::new();
    let rows = |slices: &[QuerySlice]| slices.iter().filter(|slice| is_split(slice.document)).map(|slice| slice.length).sum();
    let most = dealt.iter().map(|rank| rows(&rank.pass.attention.slices)).max().unwrap_or(0);
    for rank in &dealt {
        let mut row = rank.rank * most;
        for slice in rank.pass.attention.slices.iter().filter(|slice| is_split(slice.document)) {
            slices.push(QuerySlice { row, ..*slice });
            row += slice.length;
        }
    }
    slices.sort_by_key(|slice| (slice.document, slice.first));
    for rank in &mut dealt {
        let here = |slice: &&QuerySlice| !rank.pass.attention.tables[slice.document].is_empty();
        let slices = slices.iter().filter(here).copied().collect();
        rank.pass.attention.queries = SharedQueries { rows: most, own: rank.rank * most, slices };
    }
    dealt
}

/// Letters between ranks. A rank that panics hangs up, so that nobody waits for it.
struct Post {
    to: Vec<Sender<Vec<f32>>>,
    from: Vec<Receiver<Vec<f32>>>,
}

fn posts(ranks: usize) -> Vec<Post> {
    let mut posts: Vec<Post> = (0..ranks).map(|_| Post { to: Vec::new(), from: Vec::new() }).collect();
    for sender in 0..ranks {
        for receiver in 0..ranks {
            let (to, from) = channel();
            posts[sender].to.push(to);
            posts[receiver].from.push(from);
        }
    }
    posts
}

impl Post {
    /// Sends `letter(rank)` to every rank, and gives what each of them sent.
    fn exchange(&self, letter: impl Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
        for (rank, to) in self.to.iter().enumerate() {
            to.send(letter(rank)).expect("the other rank is there");
        }
        self.from.iter().map(|from| from.recv().expect("the other rank is there")).collect()
    }
}

/// What a rank was asked for: `gather 1536`, `Layer(1), then Some(Head)`.
type Log = Vec<String>;

struct Exchange<'a> {
    rank: usize,
    head_groups: usize,
    post: &'a Post,
    log: Log,
}

impl SequenceExchange<CpuDevice> for Exchange<'_> {
    fn ranks(&self) -> usize {
        self.post.to.len()
    }

    fn head_groups(&self) -> usize {
        self.head_groups
    }

    fn gather(&mut self, blocks: &mut Vec<f32>, share: usize, meanwhile: &mut dyn FnMut()) {
        self.log.push(format!("gather {share}"));
        let own = blocks[self.rank * share..(self.rank + 1) * share].to_vec();
        meanwhile();
        for (rank, theirs) in self.post.exchange(|_| own.clone()).into_iter().enumerate() {
            blocks[rank * share..(rank + 1) * share].copy_from_slice(&theirs);
        }
    }
}

/// Whole parameters, with every call written down. The backward of the embedding is given no tensors.
struct Source<'a> {
    whole: Whole<'a, CpuDevice>,
    log: Log,
}

impl ParameterSource<CpuDevice> for Source<'_> {
    fn forward(&mut self, unit: Unit, next: Option<Unit>, compute: &mut dyn FnMut(&UnitTensors<'_, CpuDevice>)) {
        self.log.push(format!("forward {unit:?}, then {next:?}"));
        self.whole.forward(unit, next, compute);
    }

    fn backward(
        &mut self,
        unit: Unit,
        next: Option<Unit>,
        compute: &mut dyn FnMut(&UnitTensors<'_, CpuDevice>, &mut UnitGradients<'_, CpuDevice>),
    ) {
        self.log.push(format!("backward {unit:?}, then {next:?}"));
        self.whole.backward(unit, next, &mut |tensors, gradients| match unit {
            Unit::Embedding => compute(&UnitTensors::new(Vec::new()), gradients),
            _ => compute(tensors, gradients),
        });
    }

    fn finish_backward(&mut self) {
        self.log.push("finish".to_string());
    }
}

/// Of a loss that ties all scores together.
fn cotangents(scores: &Scores) -> Cotangents {
    let mean = scores.log_probs.iter().sum::<f32>() / scores.log_probs.len() as f32;
    let log_probs = scores.log_probs.iter().enumerate().map(|(row, x)| ((row * 7 % 11) as f32 - 4.0) * 0.1 + 0.01 * (x - mean));
    let entropies = (0..scores.log_probs.len()).map(|row| ((row * 5 % 7) as f32 - 2.0) * 0.1);
    Cotangents { log_probs: log_probs.collect(), entropies: Some(entropies.collect()) }
}

/// What one rank, or all together, found.
struct Found {
    scores: Scores,
    gradients: BTreeMap<String, Vec<f32>>,
    /// Of scoring alone, of the parameters asked for, and of the exchanges.
    logs: [Log; 3],
}

fn on_one_rank(config: &ModelConfig, batch: &Batch, recompute: bool) -> Found {
    let model = noisy_model(device(), config.clone(), 3);
    let mut gradients = model.new_gradients();
    let settings = PassSettings { temperature: TEMPERATURE, recompute };
    let pass = TrainingPass::whole(batch);
    let source = &mut model.whole(Some(&mut gradients));
    let scores = model.network().forward_backward(source, &mut NoExchange, &pass, settings, cotangents);
    assert_eq!(scores, model.score(batch, TEMPERATURE), "scored with and without a backward");
    let gradients = gradients.tensors().map(|(name, _, values)| (name, values)).collect();
    Found { scores, gradients, logs: Default::default() }
}

fn device() -> CpuDevice {
    CpuDevice::with_attention_segment(192)
}

fn run(rank: &Rank, config: &ModelConfig, head_groups: usize, recompute: bool, scored: usize) -> Found {
    let model = noisy_model(device(), config.clone(), 3);
    let mut gradients = model.new_gradients();
    let mut exchange = Exchange { rank: rank.rank, head_groups, post: &rank.post, log: Log::new() };
    let mut source = Source { whole: model.whole(None), log: Log::new() };
    let alone = model.network().score(&mut source, &mut exchange, &rank.pass, TEMPERATURE);
    let score_log = [source.log, std::mem::take(&mut exchange.log)].concat();

    let mut source = Source { whole: model.whole(Some(&mut gradients)), log: Log::new() };
    let settings = PassSettings { temperature: TEMPERATURE, recompute };
    let mut everywhere = Scores::default();
    let scores = model.network().forward_backward(&mut source, &mut exchange, &rank.pass, settings, |scores| {
        everywhere = gather_scores(rank, scores, scored);
        let all = cotangents(&everywhere);
        let own = |values: &[f32]| rank.score_places.iter().map(|&place| values[place]).collect::<Vec<_>>();
        Cotangents { log_probs: own(&all.log_probs), entropies: all.entropies.map(|values| own(&values)) }
    });
    assert_eq!(scores, alone, "scored with and without a backward");
    let logs = [score_log, source.log, exchange.log];
    let gradients = gradients.tensors().map(|(name, _, values)| (name, values)).collect();
    Found { scores: everywhere, gradients, logs }
}

/// The scores of the whole batch, on every rank.
fn gather_scores(rank: &Rank, scores: &Scores, scored: usize) -> Scores {
    let places: Vec<f32> = rank.score_places.iter().map(|&place| place as f32).collect();
    let [places, log_probs, entropies] =
        [&places, &scores.log_probs, &scores.entropies].map(|values| rank.post.exchange(|_| values.clone()).concat());
    let mut all = Scores { log_probs: vec![f32::NAN; scored], entropies: vec![f32::NAN; scored] };
    for ((place, log_prob), entropy) in places.into_iter().zip(log_probs).zip(entropies) {
        all.log_probs[place as usize] = log_prob;
        all.entropies[place as usize] = entropy;
    }
    all
}

/// All ranks at once: their scores, which all have, and the sums of their gradients.
fn on_ranks(config: &ModelConfig, batch: &Batch, ranks: usize, head_groups: usize, recompute: bool) -> Found {
    let scored = batch.scored_rows.len();
    let found: Vec<Found> = std::thread::scope(|scope| {
        let threads: Vec<_> = deal(batch, ranks)
            .into_iter()
            .map(|rank| scope.spawn(move || run(&rank, config, head_groups, recompute, scored)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that does its part")).collect()
    });
    let mut found = found.into_iter();
    let mut all = found.next().expect("at least one rank");
    for other in found {
        assert_eq!(other.logs, all.logs, "ranks ask for the same in the same order");
        assert_eq!(bits(&other.scores), bits(&all.scores));
        for (sum, values) in all.gradients.values_mut().zip(other.gradients.into_values()) {
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
    all
}

fn bits(scores: &Scores) -> Vec<u32> {
    scores.log_probs.iter().chain(&scores.entropies).map(|value| value.to_bits()).collect()
}

fn batch(lengths: &[usize]) -> Batch {
    let sequences: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(index, &length)| tokens(length, 53, index as u64)).collect();
    let slices: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
    Batch::pack(&slices, |sequence, token| (sequence + token) % 3 != 0)
}

/// The largest `L2(a - b) / L2(b)` of any tensor.
fn largest_difference(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let of_tensor = |(name, b): (&String, &Vec<f32>)| {
        let difference = norm(&mut a[name].iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        difference / norm(&mut b.iter().map(|b| f64::from(*b)))
    };
    b.iter().map(of_tensor).fold(0.0, f64::max)
}

fn check(config: &ModelConfig, lengths: &[usize], ranks: &[usize], head_groups: &[usize]) {
    let batch = batch(lengths);
    let one = on_one_rank(config, &batch, false);
    for &ranks in ranks {
        let mut first: Option<Found> = None;
        for &head_groups in head_groups {
            for recompute in [false, true] {
                let found = on_ranks(config, &batch, ranks, head_groups, recompute);
                assert_eq!(bits(&found.scores), bits(&one.scores), "{ranks} ranks, {head_groups} head groups");
                match &first {
                    None => {
                        let difference = largest_difference(&found.gradients, &one.gradients);
                        println!("{lengths:?}: {ranks} ranks, gradients off by {difference:.1e}");
                        assert!(difference <= 1e-5, "{ranks} ranks: {difference}");
                        first = Some(found);
                    }
                    // Neither head groups nor running layers again change a bit.
                    Some(first) => assert_eq!(found.gradients, first.gradients, "{head_groups} groups, recompute {recompute}"),
                }
            }
        }
    }
}

/// Three key/value heads, so that two groups are unequal.
fn three_heads() -> ModelConfig {
    ModelConfig { query_heads: 6, key_value_heads: 3, ..qwen3(true) }
}

#[test]
fn any_number_of_ranks_scores_the_same_bits() {
    check(&three_heads(), &[700, 100, 1, 300, 0, 129], &[1, 2, 3, 4, 8], &[1, 2, 5]);
}

#[test]
fn a_qwen2_with_one_key_value_head_is_cut_too() {
    check(&qwen2(), &[257, 64], &[2, 3], &[1, 2]);
}

#[test]
fn untied_embeddings_have_gradients_of_their_own() {
    check(&qwen3(false), &[130, 260], &[3], &[2]);
}

/// The gradient of an embedding that one token looks up is what flowed back to that token, through all layers: no sum hides a bit.
#[test]
fn what_flows_back_to_a_token_has_the_bits_of_one_rank() {
    let config = ModelConfig { layers: 3, ..qwen3(false) };
    let lengths = [700, 130, 260];
    let mut batch = batch(&lengths);
    // The last 13 ids stand once each, some in every document and chunk.
    batch.ids.iter_mut().for_each(|id| *id %= 40);
    for (place, id) in (40..53).enumerate() {
        batch.ids[place * 83] = id;
    }
    let looked_up = |found: &Found| -> Vec<u32> {
        let rows = &found.gradients["model.embed_tokens.weight"][40 * config.hidden..];
        rows.iter().map(|value| value.to_bits()).collect()
    };
    let one = on_one_rank(&config, &batch, false);
    assert!(one.gradients["model.embed_tokens.weight"][40 * config.hidden..].iter().all(|value| *value != 0.0));
    for ranks in [2, 3, 4, 8] {
        let found = on_ranks(&config, &batch, ranks, 2, false);
        assert_eq!(looked_up(&found), looked_up(&one), "{ranks} ranks");
    }
}

/// One short document: all ranks but one only take part.
#[test]
fn ranks_without_tokens_make_the_same_calls() {
    check(&three_heads(), &[70], &[3], &[2]);
    let batch = batch(&[70]);
    let found = on_ranks(&three_heads(), &batch, 3, 2, false);
    let [score, parameters, exchange] = found.logs;
    assert_eq!(
        score[..4],
        [
            "forward Embedding, then Some(Layer(0))",
            "forward Layer(0), then Some(Layer(1))",
            "forward Layer(1), then Some(Head)",
            "forward Head, then None"
        ]
    );
    assert_eq!(score[4..], ["gather 0"; 4]);
    let expected = [
        "forward Embedding, then Some(Layer(0))",
        "forward Layer(0), then Some(Layer(1))",
        "forward Layer(1), then Some(Head)",
        "backward Head, then Some(Layer(1))",
        "backward Layer(1), then Some(Layer(0))",
        "backward Layer(0), then Some(Embedding)",
        "backward Embedding, then None",
        "finish",
    ];
    assert_eq!(parameters, expected);
    let backward = ["gather 0"; 4];
    assert_eq!(exchange, [&["gather 0"; 4][..], &backward, &backward].concat());
}

#[test]
fn running_layers_again_changes_no_bit() {
    for config in [three_heads(), qwen2(), qwen3(false)] {
        let batch = batch(&[200, 3, 65]);
        let [kept, again] = [false, true].map(|recompute| on_one_rank(&config, &batch, recompute));
        assert_eq!((kept.scores, kept.gradients), (again.scores, again.gradients));
    }
}
