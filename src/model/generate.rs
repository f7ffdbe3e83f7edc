//! Sequences that grow: caches, extension by any number of tokens, sampling.

use super::Model;
use super::attention::CacheAttention;
use super::exchange::{ParameterSource, Unit};
use super::forward::Rows;
use super::workspace::Keep;
use crate::device::{Device, Role, Span};

/// Keys and values of one sequence at every layer. A clone starts another continuation of the same prefix.
pub struct KeyValueCache<D: Device> {
    pub(super) layers: Vec<D::KeyValues>,
    length: usize,
}

impl<D: Device> Clone for KeyValueCache<D> {
    fn clone(&self) -> Self {
        KeyValueCache { layers: self.layers.clone(), length: self.length }
    }
}

impl<D: Device> KeyValueCache<D> {
    /// Tokens seen so far.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// New tokens of one sequence: at least one.
pub struct Extension<'a, D: Device> {
    pub cache: &'a mut KeyValueCache<D>,
    pub tokens: &'a [u32],
}

/// What the head reads, one row per sequence: `[rows, hidden]`.
pub struct Hidden<D: Device> {
    buffer: D::Buffer,
    rows: usize,
}

impl<D: Device> Hidden<D> {
    pub fn rows(&self) -> usize {
        self.rows
    }
}

impl<D: Device> Model<D> {
    /// An empty cache.
    pub fn new_cache(&self) -> KeyValueCache<D> {
        let (device, config) = (self.device(), self.config());
        let layers = (0..config.layers).map(|_| device.new_key_values(config.heads())).collect();
        KeyValueCache { layers, length: 0 }
    }

    /// Runs all new tokens of all sequences, packed together without padding, and appends to their caches. The result holds,
    /// for each extension, the state after its LAST token, ready for [`Model::sample`].
    ///
    /// Many tokens are run in passes of bounded size, cut anywhere: how they are cut does not change a bit, and memory stays small.
    /// Panics if an extension has no tokens, or an id is not below the vocabulary.
    pub fn extend(&self, extensions: &mut [Extension<'_, D>]) -> Hidden<D> {
        assert!(extensions.iter().all(|extension| !extension.tokens.is_empty()), "an extension without tokens");
        let (device, config) = (self.device(), self.config());
        let (rows, hidden) = (extensions.len(), config.hidden);
        let mut buffer = device.zeros(Role::Activations, rows * hidden);
        let workspace = &mut self.network.memory().workspace;
        let (mut first, mut done) = (0, 0); // the first unfinished extension, and how many of its tokens have been run
        while first < rows {
            let pieces = next_pieces(&extensions[first..], done);
            let part = &mut extensions[first..first + pieces.len()];
            let finished = part.iter().zip(&pieces).filter(|(extension, piece)| piece.end == extension.tokens.len()).count();
            let (mut ids, mut positions, mut spans) = (Vec::new(), Vec::new(), Vec::new());
            for (extension, piece) in part.iter().zip(&pieces) {
                let past = extension.cache.length;
                spans.push(Span { start: ids.len(), length: piece.len() });
                ids.extend_from_slice(&extension.tokens[piece.clone()]);
                positions.extend(past..past + piece.len());
            }
            let last_rows: Vec<usize> = spans[..finished].iter().map(|span| span.start + span.length - 1).collect();
            let mut caches: Vec<&mut KeyValueCache<D>> = part.iter_mut().map(|extension| &mut *extension.cache).collect();
            let mut attention = CacheAttention { device, heads: config.heads(), spans: &spans, caches: &mut caches };
            let (mut source, tokens) = (self.whole(None), Rows { ids: &ids, positions: &positions, scored: &last_rows });
            self.network.forward(workspace, &mut source, &mut attention, tokens, Keep::Nothing);
            source.forward(Unit::Head, None, &mut |tensors| {
                self.network.norm_scored(workspace, tensors, &last_rows, Keep::Nothing);
            });
            for (cache, span) in caches.iter_mut().zip(&spans) {
                cache.length += span.length;
            }
            let places: Vec<usize> = (first..first + finished).collect();
            device.scatter_rows(&workspace.scored.normed, &places, hidden, &mut buffer);
            done = pieces.get(finished).map_or(0, |piece| piece.end);
            first += finished;
        }
        Hidden { buffer, rows }
    }

    /// Draws the next token of each row: `(id, log-probability)`. The id is the first whose cumulative probability, over ids
    /// `0..sampleable` in ascending order, exceeds `uniforms[row]` in `[0, 1)`; ids from `sampleable` on (the padding of a
    /// vocabulary) are never drawn. The log-probability is the one [`Model::score`] gives at this temperature, over the whole
    /// vocabulary, bit for bit. Temperature 0 takes the likeliest id, the lowest on ties, and reports it at temperature 1.
    pub fn sample(&self, hidden: &Hidden<D>, temperature: f32, uniforms: &[f64], sampleable: usize) -> Vec<(u32, f32)> {
        assert_eq!(hidden.rows, uniforms.len(), "one uniform number per row");
        let head = self.parameters[self.layout().head].linear();
        self.device().head_sample(&hidden.buffer, head, temperature, uniforms, sampleable)
    }
}

/// Tokens of the largest pass of [`Model::extend`].
const TOKENS_PER_PASS: usize = 1024;

/// The token ranges that fit into one pass: of the first extension from `done` on, then of those after it. Only the last range may
/// end before its extension does.
fn next_pieces<D: Device>(extensions: &[Extension<'_, D>], done: usize) -> Vec<std::ops::Range<usize>> {
    let mut room = TOKENS_PER_PASS;
    let mut start = done;
    let mut pieces = Vec::new();
    for extension in extensions {
        if room == 0 {
            break;
        }
        let end = extension.tokens.len().min(start + room);
        pieces.push(start..end);
        room -= end - start;
        start = 0;
    }
    pieces
}
