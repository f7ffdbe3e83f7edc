//! The language-model head: logits of bounded chunks of rows in f32, reduced at once to scores, gradients or samples.

use super::allocator::{Memory, Purpose};
use super::arguments::{Address, HeadGradient, HeadSample, HeadScores};
use super::buffers::Buffer;
use super::gemm::{Layout, Output, Product};
use super::indices::{Table, narrow};
use super::{CudaDevice, PackedWeights};
use crate::device::ops::{Cotangents, LinearWeights, Scores, inverse_temperature};

/// Logits that exist at once. A chunk reads all weights of the head: many rows share that, and still need little beside the weights.
const LOGIT_BYTES: usize = 256 << 20;
/// Rows of a chunk are a multiple of this where there is room: the tiles of the products.
const CHUNK_GRAIN: usize = 128;

/// Rows of logits computed together: a function of the vocabulary alone, as it decides the order of a sum over rows.
fn chunk_rows(vocabulary: usize) -> usize {
    let rows = (LOGIT_BYTES / (pitch(vocabulary) * size_of::<f32>())).max(1);
    if rows > CHUNK_GRAIN { rows / CHUNK_GRAIN * CHUNK_GRAIN } else { rows }
}

/// From one row of logits, or of their gradients, to the next.
fn pitch(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

/// Numbers in the logits, or in their gradients, of one chunk of `rows` rows in all.
fn chunk_numbers(vocabulary: usize, rows: usize) -> usize {
    chunk_rows(vocabulary).min(rows) * pitch(vocabulary)
}

/// Bytes that the gradients of `rows` scored rows need while they are computed: a chunk's logits in f32 and their gradients in
/// bf16, and the scores.
pub fn workspace_bytes(vocabulary: usize, rows: usize) -> usize {
    chunk_numbers(vocabulary, rows) * (size_of::<f32>() + size_of::<u16>()) + score_bytes(rows)
}

/// Three f32 a row.
fn score_bytes(rows: usize) -> usize {
    3 * rows * size_of::<f32>()
}

/// The address of number `index` of f32 and i32 arrays.
fn at(start: Address, index: usize) -> Address {
    start + (index * 4) as Address
}

/// Rows of the chunk at hand, and where its inputs and logits are.
struct Chunk {
    first: usize,
    rows: usize,
    hidden: Address,
    logits: Address,
}

/// The scores of all rows: three arrays after one another.
struct ScoreArrays {
    memory: Memory,
    rows: usize,
}

impl ScoreArrays {
    fn log_probs(&self, row: usize) -> Address {
        at(self.memory.address(), row)
    }
    fn entropies(&self, row: usize) -> Address {
        at(self.memory.address(), self.rows + row)
    }
    fn log_sum_exps(&self, row: usize) -> Address {
        at(self.memory.address(), 2 * self.rows + row)
    }
}

impl CudaDevice {
    /// Calls `use_logits` for every chunk of rows, its logits being computed.
    fn for_each_chunk(&self, hidden: &Buffer, weights: &PackedWeights, rows: usize, mut use_logits: impl FnMut(&Chunk)) {
        let (vocabulary, inputs) = (weights.outputs(), weights.inputs());
        let hidden = hidden.bf16(rows * inputs);
        let step = self.head_rows.unwrap_or(chunk_rows(vocabulary)).min(rows);
        let logits = self.allocate(Purpose::Workspace, chunk_numbers(vocabulary, rows) * size_of::<f32>());
        let mut first = 0;
        while first < rows {
            let count = step.min(rows - first);
            let chunk = Chunk { first, rows: count, hidden: hidden + (first * inputs * 2) as Address, logits: logits.address() };
            self.multiply(&Product {
                layout: Layout::Nt,
                output: Output::F32,
                a: chunk.hidden,
                b: weights.address(),
                c: chunk.logits,
                m: count,
                n: vocabulary,
                k: inputs,
                pitch_c: pitch(vocabulary),
            });
            use_logits(&chunk);
            first += count;
        }
    }

    fn score_arrays(&self, rows: usize) -> ScoreArrays {
        ScoreArrays { memory: self.allocate(Purpose::Workspace, score_bytes(rows)), rows }
    }

    fn targets(&self, targets: &[u32]) -> Address {
        self.tables().upload(Table::Targets, &narrow(targets.iter().map(|&target| target as usize)))
    }

    fn score_chunk(&self, chunk: &Chunk, vocabulary: usize, targets: Address, temperature: f32, scores: &ScoreArrays) {
        let arguments = HeadScores {
            logits: chunk.logits,
            targets: at(targets, chunk.first),
            log_probs: scores.log_probs(chunk.first),
            entropies: scores.entropies(chunk.first),
            log_sum_exps: scores.log_sum_exps(chunk.first),
            rows: chunk.rows as i64,
            vocabulary: vocabulary as i64,
            pitch: pitch(vocabulary) as i64,
            inverse_temperature: inverse_temperature(temperature),
            reserved: 0,
        };
        self.kernels().launch("head_scores", [chunk.rows, 1, 1], &arguments);
    }

    pub(super) fn head_scores(&self, hidden: &Buffer, weights: &PackedWeights, targets: &[u32], temperature: f32) -> Scores {
        let rows = targets.len();
        if rows == 0 {
            return Scores::default();
        }
        let (scores, targets) = (self.score_arrays(rows), self.targets(targets));
        self.for_each_chunk(hidden, weights, rows, |chunk| {
            self.score_chunk(chunk, weights.outputs(), targets, temperature, &scores);
        });
        // SAFETY: the first two arrays of `rows` floats, which the kernels have written.
        let mut log_probs = unsafe { self.gpu().read::<f32>(scores.memory.address(), 2 * rows) };
        let entropies = log_probs.split_off(rows);
        Scores { log_probs, entropies }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn head_gradients(
        &self,
        hidden: &Buffer,
        weights: LinearWeights<'_, CudaDevice>,
        targets: &[u32],
        temperature: f32,
        cotangents: &Cotangents,
        dhidden: &mut Buffer,
        dweights: &mut Buffer,
    ) {
        let (rows, vocabulary, inputs) = (targets.len(), weights.outputs, weights.inputs);
        if rows == 0 {
            return;
        }
        let (scores, targets) = (self.score_arrays(rows), self.targets(targets));
        let dlog_probs = self.tables().upload(Table::LogProbCotangents, &cotangents.log_probs);
        let dentropies = cotangents.entropies.as_ref().map(|entropies| self.tables().upload(Table::EntropyCotangents, entropies));
        let (dhidden, dweights) = (dhidden.bf16(rows * inputs), dweights.f32(vocabulary * inputs));
        let dlogits = self.allocate(Purpose::Workspace, chunk_numbers(vocabulary, rows) * size_of::<u16>());
        self.for_each_chunk(hidden, weights.packed, rows, |chunk| {
            self.score_chunk(chunk, vocabulary, targets, temperature, &scores);
            let arguments = HeadGradient {
                logits: chunk.logits,
                targets: at(targets, chunk.first),
                log_probs: scores.log_probs(chunk.first),
                entropies: scores.entropies(chunk.first),
                log_sum_exps: scores.log_sum_exps(chunk.first),
                dlog_probs: at(dlog_probs, chunk.first),
                dentropies: dentropies.map_or(0, |dentropies| at(dentropies, chunk.first)),
                dlogits: dlogits.address(),
                rows: chunk.rows as i64,
                vocabulary: vocabulary as i64,
                pitch: pitch(vocabulary) as i64,
                pitch_d: pitch(vocabulary) as i64,
                inverse_temperature: inverse_temperature(temperature),
                reserved: 0,
            };
            self.kernels().launch("head_gradient", [chunk.rows, 1, 1], &arguments);
            self.multiply(&Product {
                layout: Layout::Nn,
                output: Output::Bf16,
                a: dlogits.address(),
                b: weights.packed.address(),
                c: dhidden + (chunk.first * inputs * 2) as Address,
                m: chunk.rows,
                n: inputs,
                k: vocabulary,
                pitch_c: inputs,
            });
            self.multiply(&Product {
                layout: Layout::Tn,
                output: Output::Add,
                a: dlogits.address(),
                b: chunk.hidden,
                c: dweights,
                m: vocabulary,
                n: inputs,
                k: chunk.rows,
                pitch_c: inputs,
            });
        });
    }

    pub(super) fn head_samples(
        &self,
        hidden: &Buffer,
        weights: &PackedWeights,
        temperature: f32,
        uniforms: &[f64],
        sampleable: usize,
    ) -> Vec<(u32, f32)> {
        let rows = uniforms.len();
        if rows == 0 {
            return Vec::new();
        }
        let uniforms = self.tables().upload(Table::Uniforms, uniforms);
        let samples = self.allocate(Purpose::Workspace, 2 * rows * size_of::<u32>());
        let (tokens, log_probs) = (samples.address(), at(samples.address(), rows));
        self.for_each_chunk(hidden, weights, rows, |chunk| {
            let arguments = HeadSample {
                logits: chunk.logits,
                uniforms: uniforms + (chunk.first * size_of::<f64>()) as Address,
                tokens: at(tokens, chunk.first),
                log_probs: at(log_probs, chunk.first),
                rows: chunk.rows as i64,
                vocabulary: weights.outputs() as i64,
                sampleable: sampleable as i64,
                pitch: pitch(weights.outputs()) as i64,
                inverse_temperature: inverse_temperature(temperature),
                greedy: i32::from(temperature == 0.0),
            };
            self.kernels().launch("head_sample", [chunk.rows, 1, 1], &arguments);
        });
        // SAFETY: `rows` ids and as many floats, which the kernels have written.
        let words = unsafe { self.gpu().read::<u32>(samples.address(), 2 * rows) };
        let (tokens, log_probs) = words.split_at(rows);
        tokens.iter().zip(log_probs).map(|(&token, &bits)| (token, f32::from_bits(bits))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_bounded_and_whole_tiles_where_they_can_be() {
        assert_eq!(chunk_rows(151_936), 384);
        assert_eq!(chunk_rows(1 << 27), 1);
        assert_eq!(workspace_bytes(151_936, 10_000), 384 * 151_936 * 6 + 120_000);
        assert_eq!(workspace_bytes(10, 5), 5 * 16 * 6 + 60);
        assert!(chunk_rows(300) * pitch(300) * 4 <= LOGIT_BYTES);
    }
}
