//! The built-in engine: the trainer's own forward pass over key/value caches, one ragged batch at a time.
//!
//! Every advance feeds each busy sequence the tokens it has not read yet (a whole prompt, an observation, or the token
//! sampled last) and samples one token for each sequence that has read everything. The arithmetic is the trainer's, so a
//! log-probability noted here equals the one the trainer recomputes, bit for bit (DESIGN, rule 3).

use std::collections::BTreeMap;

use super::{Engine, EngineError, Finish, SampleKey, SampledTurn, SequenceId, Settings};
use crate::device::Device;
use crate::model::{Extension, KeyValueCache, Model};
use crate::types::{Key, Purpose};

pub struct BuiltinEngine<'a, D: Device> {
    model: &'a Model<D>,
    settings: Settings,
    stop_token: u32,
    /// Ids from here on are padding of the vocabulary and are never sampled.
    sampleable: usize,
    sequences: BTreeMap<SequenceId, Sequence<D>>,
    opened: usize,
}

struct Sequence<D: Device> {
    key: SampleKey,
    cache: KeyValueCache<D>,
    /// Tokens not yet in the cache.
    unread: Vec<u32>,
    /// Tokens of the sequence so far, read or not: the position of the next sampled token.
    length: u64,
    turn: Option<Turn>,
}

struct Turn {
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    token_limit: usize,
}

impl<'a, D: Device> BuiltinEngine<'a, D> {
    /// `stop_token` ends a turn; ids of `sampleable` and above are never sampled.
    pub fn new(model: &'a Model<D>, settings: Settings, stop_token: u32, sampleable: usize) -> Self {
        BuiltinEngine { model, settings, stop_token, sampleable, sequences: BTreeMap::new(), opened: 0 }
    }
}

impl<D: Device> Engine for BuiltinEngine<'_, D> {
    fn open(&mut self, key: SampleKey) -> SequenceId {
        let id = SequenceId(self.opened);
        self.opened += 1;
        let sequence = Sequence { key, cache: self.model.new_cache(), unread: Vec::new(), length: 0, turn: None };
        self.sequences.insert(id, sequence);
        id
    }

    fn request_turn(&mut self, sequence: SequenceId, tokens: &[u32], turn_tokens: usize) {
        assert!(!tokens.is_empty() && turn_tokens > 0, "a turn needs something to follow and room for a token");
        let sequence = self.sequences.get_mut(&sequence).expect("the sequence is open");
        sequence.unread.extend_from_slice(tokens);
        sequence.length += tokens.len() as u64;
        sequence.turn = Some(Turn { ids: Vec::new(), log_probs: Vec::new(), token_limit: turn_tokens });
    }

    fn close(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
    }

    fn busy(&self) -> bool {
        self.sequences.values().any(|sequence| sequence.turn.is_some())
    }

    fn advance(&mut self) -> Result<Vec<SampledTurn>, EngineError> {
        // 1. Choose rows: every busy sequence in order, as many unread tokens as the pass has room for.
        let mut room = self.settings.max_rows;
        let mut reading: Vec<(SequenceId, Vec<u32>)> = Vec::new();
        for (&id, sequence) in self.sequences.iter_mut().filter(|(_, sequence)| sequence.turn.is_some()) {
            let count = sequence.unread.len().min(room);
            if count == 0 {
                break;
            }
            room -= count;
            reading.push((id, sequence.unread.drain(..count).collect()));
        }
        if reading.is_empty() {
            return Ok(Vec::new());
        }

        // 2. One ragged forward pass; the hidden state of each sequence's last new row comes back.
        let mut tokens = reading.iter();
        let mut extensions = Vec::with_capacity(reading.len());
        let mut next = tokens.next();
        for (&id, sequence) in self.sequences.iter_mut() {
            if let Some((reading_id, ids)) = next
                && *reading_id == id
            {
                extensions.push(Extension { cache: &mut sequence.cache, tokens: ids });
                next = tokens.next();
            }
        }
        let hidden = self.model.extend(&mut extensions);

        // 3. Sample a token for every row. Rows in the middle of a prompt draw too and are not used: their numbers
        //    belong to positions that no sampled token has.
        let uniforms: Vec<f64> = reading.iter().map(|(id, _)| self.sequences[id].uniform()).collect();
        let sampled = self.model.sample(&hidden, self.settings.temperature as f32, &uniforms, self.sampleable);

        // 4. Append to the turns; those that stopped or used up their allowance are done.
        let mut done = Vec::new();
        for ((id, _), (token, log_prob)) in reading.iter().zip(sampled) {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            if !sequence.unread.is_empty() {
                continue;
            }
            if !log_prob.is_finite() {
                return Err(EngineError::NotFinite);
            }
            let Some(turn) = &mut sequence.turn else { continue };
            turn.ids.push(token);
            turn.log_probs.push(log_prob);
            sequence.unread.push(token);
            sequence.length += 1;
            let finish = if token == self.stop_token {
                Finish::Stop
            } else if turn.ids.len() == turn.token_limit {
                Finish::Length
            } else {
                continue;
            };
            if let Some(turn) = sequence.turn.take() {
                done.push(SampledTurn { sequence: *id, ids: turn.ids, log_probs: turn.log_probs, finish });
            }
        }
        Ok(done)
    }
}

impl<D: Device> Sequence<D> {
    /// The random number of the next position.
    fn uniform(&self) -> f64 {
        let SampleKey { seed, stream, step, task, sample } = self.key;
        Key::new(Purpose::SampleToken, &[seed, stream, step, task, sample, self.length]).uniform()
    }
}
