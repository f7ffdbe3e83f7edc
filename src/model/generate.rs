//! Sequences that grow: caches, extension by any number of tokens, sampling.

use super::Model;
use super::forward::{Caches, Pass};
use crate::device::Device;

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
        let layers = (0..self.config.layers).map(|_| self.device.new_key_values(self.config.heads())).collect();
        KeyValueCache { layers, length: 0 }
    }

    /// Runs all new tokens of all sequences in one ragged pass and appends to their caches. The result holds, for each
    /// extension, the state after its LAST token, ready for [`Model::sample`].
    ///
    /// Panics if an extension has no tokens, or an id is not below the vocabulary.
    pub fn extend(&self, extensions: &mut [Extension<'_, D>]) -> Hidden<D> {
        assert!(extensions.iter().all(|extension| !extension.tokens.is_empty()), "an extension without tokens");
        let pass = Pass::pack(extensions.iter().map(|extension| (extension.cache.length, extension.tokens)));
        let last_rows: Vec<usize> = pass.spans.iter().map(|span| span.start + span.length - 1).collect();
        let mut caches: Vec<&mut KeyValueCache<D>> = extensions.iter_mut().map(|extension| &mut *extension.cache).collect();
        let mut workspace = self.workspace();
        self.forward(&mut workspace, &pass, Caches::Kept(&mut caches), false, last_rows.len());
        for (cache, span) in caches.iter_mut().zip(&pass.spans) {
            cache.length += span.length;
        }
        self.final_norm(&mut workspace, &last_rows);
        let rows = last_rows.len();
        let mut buffer = self.device.zeros(rows * self.config.hidden);
        self.device.copy(&workspace.scored.normed, &mut buffer, rows * self.config.hidden);
        Hidden { buffer, rows }
    }

    /// Draws the next token of each row: `(id, log-probability)`. The id is the first whose cumulative probability, over ids
    /// `0..sampleable` in ascending order, exceeds `uniforms[row]` in `[0, 1)`; ids from `sampleable` on (the padding of a
    /// vocabulary) are never drawn. The log-probability is the one [`Model::score`] gives at this temperature, over the whole
    /// vocabulary, bit for bit. Temperature 0 takes the likeliest id, the lowest on ties, and reports it at temperature 1.
    pub fn sample(&self, hidden: &Hidden<D>, temperature: f32, uniforms: &[f64], sampleable: usize) -> Vec<(u32, f32)> {
        assert_eq!(hidden.rows, uniforms.len(), "one uniform number per row");
        let head = self.parameters[self.layout.head].linear();
        self.device.head_sample(&hidden.buffer, head, temperature, uniforms, sampleable)
    }
}
