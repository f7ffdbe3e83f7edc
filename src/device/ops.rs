//! The list of operations that a model is made of: each forward beside its hand-written backward.
//!
//! Shapes are row-major; `rows` counts tokens packed end to end. Buffers may be longer than an operation needs: they are
//! workspaces that grow to the largest batch seen. Gradients with respect to weights ACCUMULATE, all other outputs are
//! overwritten unless said otherwise. Whatever an operation computes for a row depends on that row alone, bit for bit, except
//! in attention, where it depends on the rows before it in its own sequence, and in weight gradients, which sum rows in a fixed order.

use std::ops::Range;

use super::attention_plan::AttentionPlan;
use super::peaks::Peaks;
use super::traced::Ranges;

/// What a buffer is for: it decides the precision that the device keeps it in, and its line in the allocation table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Parameters as the optimizer changes them, in f32; products read their [`Device::Packed`] copy.
    Weights,
    /// Sums of gradients, in f32.
    Gradients,
    /// Moments, in f32.
    Optimizer,
    /// Matrices of weights as they travel between ranks: as precise as products read them.
    Travelling,
    /// What flows between operations, forward and backward, in the device's activation precision.
    Activations,
    /// Small things whose precision matters: log-sum-exp, rotary tables. In f32.
    Statistics,
}

/// Heads of an attention layer. A projected row holds queries, keys and values: `[query_heads + 2 key_value_heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub query_heads: usize,
    pub key_value_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// Query heads that share one key/value head.
    pub fn group(self) -> usize {
        self.query_heads / self.key_value_heads
    }
    pub fn query_width(self) -> usize {
        self.query_heads * self.head_dim
    }
    pub fn key_value_width(self) -> usize {
        self.key_value_heads * self.head_dim
    }
    pub fn projected_width(self) -> usize {
        self.query_width() + 2 * self.key_value_width()
    }
}

/// The sizes of a model that a device may not be able to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    pub heads: Heads,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocabulary: usize,
}

/// Consecutive rows of a pass that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the pass.
    pub start: usize,
    /// Rows in the pass.
    pub length: usize,
}

/// What attention left behind and what came back to it, by row: the backward's inputs.
pub struct AttendedRows<'a, D: Device> {
    /// `[rows, projected_width]`
    pub rotated: &'a D::Buffer,
    /// `[rows, query_width]` the gradient of the output.
    pub doutput: &'a D::Buffer,
    /// `[rows, query_heads]`
    pub log_sum_exp: &'a D::Buffer,
    /// `[rows, query_heads]` from [`Device::attention_delta`].
    pub delta: &'a D::Buffer,
}

impl<D: Device> Clone for AttendedRows<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for AttendedRows<'_, D> {}

/// What is applied to projected rows before attention.
pub struct Rotation<'a, D: Device> {
    pub heads: Heads,
    /// `[projected_width]`, added first (Qwen2).
    pub bias: Option<&'a D::Buffer>,
    /// `[head_dim]` weights of the RMSNorm over each query head and each key head (Qwen3).
    pub query_key_norms: Option<(&'a D::Buffer, &'a D::Buffer)>,
    pub norm_epsilon: f32,
    /// `[positions, head_dim]`: cosines of the `head_dim / 2` angles, then their sines.
    pub table: &'a D::Buffer,
    /// `[rows]` place of each row in its sequence.
    pub positions: &'a [usize],
}

/// Where [`Device::rotate_backward`] adds gradients of its weights, as [`Rotation`] names them.
pub struct RotationGradients<'a, D: Device> {
    pub bias: Option<&'a mut D::Buffer>,
    pub query_key_norms: Option<(&'a mut D::Buffer, &'a mut D::Buffer)>,
}

/// A linear layer's weights `[outputs, inputs]`, as stored and as the device's forward product wants them.
pub struct LinearWeights<'a, D: Device> {
    pub values: &'a D::Buffer,
    pub packed: &'a D::Packed,
    pub outputs: usize,
    pub inputs: usize,
}

/// What the head says of each scored row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// `[scored_rows]` natural log-probability of the target token at the temperature of the call.
    pub log_probs: Vec<f32>,
    /// `[scored_rows]` entropy of the next-token distribution in nats.
    pub entropies: Vec<f32>,
}

/// Derivatives of a loss with respect to [`Scores`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cotangents {
    /// `[scored_rows]`
    pub log_probs: Vec<f32>,
    /// `[scored_rows]`; `None` where the loss has no entropy term.
    pub entropies: Option<Vec<f32>>,
}

/// One step of AdamW on one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    pub learning_rate: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    pub weight_decay: f32,
    /// Steps taken, this one included: 1 at the first.
    pub step: u64,
    /// Every gradient is multiplied by this first (clipping).
    pub gradient_scale: f32,
}

/// One line of a device's table of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// `weights`, `activations`, `workspace` ...
    pub purpose: &'static str,
    pub in_use: usize,
    /// The most that was in use at once.
    pub peak: usize,
}

/// Inverse of a sampling temperature; 0 (greedy) reports log-probabilities at temperature 1.
pub fn inverse_temperature(temperature: f32) -> f32 {
    if temperature == 0.0 { 1.0 } else { 1.0 / temperature }
}

/// A place that holds buffers and runs the operations.
pub trait Device: Clone + Send + Sync + Sized + 'static {
    /// A vector of numbers on the device.
    type Buffer: Send + Sync;
    /// A weight matrix in the layout that [`Device::linear`] reads.
    type Packed: Send + Sync;
    /// Keys and values of one sequence at one layer, growing at the end.
    type KeyValues: Clone + Send + Sync;

    /// For people: `CPU, AVX2, 2 threads`.
    fn describe(&self) -> String;

    /// Whether the device can run a model of these sizes.
    ///
    /// # Errors
    /// One line naming the size, in the words of a Hugging Face config.json, that it cannot.
    fn check_sizes(&self, _sizes: ModelSizes) -> Result<(), String> {
        Ok(())
    }

    // ---- for those who measure ----
    /// Returns when everything asked of the device so far is done; a device that works at once has nothing to wait for.
    fn synchronize(&self) {}
    /// What the device can do at most; `None` where that is not known, and then nothing is called a share of it.
    fn peaks(&self) -> Option<Peaks> {
        None
    }
    /// Memory by purpose as the device gave it out; empty where nobody keeps count.
    fn memory_use(&self) -> Vec<MemoryUse> {
        Vec::new()
    }
    /// Where a profiler of the device takes named ranges; `None` where nothing listens.
    fn ranges(&self) -> Option<Box<dyn Ranges>> {
        None
    }

    // ---- buffers ----
    /// Bytes of one number of [`Role::Activations`].
    fn activation_bytes(&self) -> usize;
    fn zeros(&self, role: Role, length: usize) -> Self::Buffer;
    fn upload(&self, role: Role, values: &[f32]) -> Self::Buffer;
    fn length(&self, buffer: &Self::Buffer) -> usize;
    /// Bytes of one number of the buffer: 4 where it is f32, 2 where it is bf16.
    fn number_bytes(&self, buffer: &Self::Buffer) -> usize;
    /// `buffer[offset..offset + values.len()] = values`
    fn write(&self, buffer: &mut Self::Buffer, offset: usize, values: &[f32]);
    /// A copy of `buffer[offset..offset + length]`.
    fn read(&self, buffer: &Self::Buffer, offset: usize, length: usize) -> Vec<f32>;
    /// `buffer[..length] = 0`
    fn clear(&self, buffer: &mut Self::Buffer, length: usize);
    /// `to[..length] = from[..length]`
    fn copy(&self, from: &Self::Buffer, to: &mut Self::Buffer, length: usize) {
        self.copy_part(from, 0, to, 0, length);
    }
    /// `to[to_offset..][..length] = from[from_offset..][..length]`, rounded where `to` is less precise. Between buffers that differ in
    /// [`Device::number_bytes`] both offsets must be multiples of 8.
    fn copy_part(&self, from: &Self::Buffer, from_offset: usize, to: &mut Self::Buffer, to_offset: usize, length: usize);
    /// `buffer *= factor`
    fn scale(&self, buffer: &mut Self::Buffer, factor: f32);
    /// `to[..length] += from[..length]`, in f32
    fn accumulate(&self, from: &Self::Buffer, to: &mut Self::Buffer, length: usize);
    /// `to[i] = from[rows[i]]`, rows of `width`
    fn gather_rows(&self, from: &Self::Buffer, rows: &[usize], width: usize, to: &mut Self::Buffer);
    /// `to[rows[i]] = from[i]`, rows of `width`; other rows stay as they are
    fn scatter_rows(&self, from: &Self::Buffer, rows: &[usize], width: usize, to: &mut Self::Buffer);

    // ---- linear layers: y = x W^T, W: [outputs, inputs] ----
    fn pack(&self, weights: &Self::Buffer, outputs: usize, inputs: usize) -> Self::Packed;
    fn repack(&self, weights: &Self::Buffer, packed: &mut Self::Packed);
    fn packed_bytes(&self, packed: &Self::Packed) -> usize;
    /// A matrix that other ranks send, as `(values, packed)`, with room for `room` numbers (at least `outputs * inputs`) where it
    /// arrives. A device whose products read a matrix as it travels keeps no `values` beside the packed copy.
    fn receivable(&self, outputs: usize, inputs: usize, room: usize) -> (Self::Buffer, Self::Packed);
    /// Where such a matrix arrives: `[room]` of [`Role::Travelling`].
    fn arrival<'a>(&self, values: &'a mut Self::Buffer, packed: &'a mut Self::Packed) -> &'a mut Self::Buffer;
    /// Brings `packed` up to date with what has arrived.
    fn arrived(&self, values: &Self::Buffer, packed: &mut Self::Packed);
    /// `y[rows, outputs] = x[rows, inputs] W^T`
    fn linear(&self, x: &Self::Buffer, weights: LinearWeights<'_, Self>, y: &mut Self::Buffer, rows: usize);
    /// `dx[rows, inputs] = dy[rows, outputs] W`
    fn linear_input_gradient(&self, dy: &Self::Buffer, weights: LinearWeights<'_, Self>, dx: &mut Self::Buffer, rows: usize);
    /// `dw[outputs, inputs] += dy[rows, outputs]^T x[rows, inputs]`
    fn linear_weight_gradient(
        &self,
        dy: &Self::Buffer,
        x: &Self::Buffer,
        dw: &mut Self::Buffer,
        rows: usize,
        outputs: usize,
        inputs: usize,
    );

    // ---- embedding ----
    /// `x[i] = table[ids[i]]`, rows of `width`. A table that was received ([`Device::receivable`]) is read where it arrived.
    fn embed(&self, table: &Self::Buffer, packed: Option<&Self::Packed>, ids: &[u32], width: usize, x: &mut Self::Buffer);
    /// `dtable[ids[i]] += dx[i]`, in ascending `i`
    fn embed_backward(&self, dx: &Self::Buffer, ids: &[u32], width: usize, dtable: &mut Self::Buffer);

    // ---- RMSNorm: y = weight * x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich 2019) ----
    fn rms_norm(&self, x: &Self::Buffer, weight: &Self::Buffer, epsilon: f32, rows: usize, width: usize, y: &mut Self::Buffer);
    /// A residual connection and the norm after it in one pass over memory: `sum = x + branch`, `y = norm(sum)`.
    #[allow(clippy::too_many_arguments)]
    fn add_rms_norm(
        &self,
        x: &Self::Buffer,
        branch: &Self::Buffer,
        weight: &Self::Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        sum: &mut Self::Buffer,
        y: &mut Self::Buffer,
    );
    /// `dx += ..`, so that the gradient of a residual stream collects its branches; `dweight += ..`
    #[allow(clippy::too_many_arguments)]
    fn rms_norm_backward(
        &self,
        dy: &Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        dx: &mut Self::Buffer,
        dweight: &mut Self::Buffer,
    );

    // ---- bias, query/key norm, rotary embedding (Su et al. 2021; halves rotated, not pairs) ----
    /// `rotated[rows, projected_width]` from `projected`, of which the values part only gets its bias.
    fn rotate(&self, projected: &Self::Buffer, rotation: &Rotation<'_, Self>, rotated: &mut Self::Buffer);
    /// Turns `gradient` from that of `rotated` into that of `projected`, in place. `projected` is read only where heads are normed.
    fn rotate_backward(
        &self,
        projected: &Self::Buffer,
        rotation: &Rotation<'_, Self>,
        gradient: &mut Self::Buffer,
        weights: RotationGradients<'_, Self>,
    );

    // ---- attention ----
    fn new_key_values(&self, heads: Heads) -> Self::KeyValues;
    /// Forgets every key and value but keeps the memory.
    fn clear_key_values(&self, key_values: &mut Self::KeyValues);
    /// Appends the keys and values of `spans[i]`'s rows to `caches[i]`, then attends each new row to all keys up to its own.
    ///
    /// `output: [rows, query_width]`; `log_sum_exp: [rows, query_heads]` if the backward will want it. Scores are scaled by
    /// `1 / sqrt(head_dim)` and reduced over fixed segments of keys counted from the sequence's start, merged ascending, so
    /// that the bits do not depend on how the sequence was cut into calls.
    fn attention(
        &self,
        rotated: &Self::Buffer,
        heads: Heads,
        spans: &[Span],
        caches: &mut [&mut Self::KeyValues],
        output: &mut Self::Buffer,
        log_sum_exp: Option<&mut Self::Buffer>,
    );

    // ---- attention of training passes: keys and values in blocks, for the key/value heads `range` and the query heads of their groups ----
    /// Copies the keys and values of every row to its place in `blocks`, and zeros to the rest of each slice's last block.
    fn write_key_blocks(
        &self,
        rotated: &Self::Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &mut Self::Buffer,
    );
    /// Attends each row to all keys of its document up to its own: the columns of `range`'s query heads in `output: [rows, query_width]`
    /// and `log_sum_exp: [rows, query_heads]`. The bits are those of [`Device::attention`].
    #[allow(clippy::too_many_arguments)]
    fn block_attention(
        &self,
        rotated: &Self::Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Self::Buffer,
        output: &mut Self::Buffer,
        log_sum_exp: &mut Self::Buffer,
    );
    /// `delta[row, head]`, the sum over the head's columns of `doutput * output`, both `[rows, query_width]`: what the backward takes from the
    /// gradient of each probability.
    fn attention_delta(&self, doutput: &Self::Buffer, output: &Self::Buffer, heads: Heads, rows: usize, delta: &mut Self::Buffer);
    /// Copies this rank's rows of shared documents to its part of `queries` (see [`SharedQueries`]), for the query heads of `range`.
    fn write_shared_queries(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        queries: &mut Self::Buffer,
    );
    /// Backward of [`Device::write_key_blocks`] and [`Device::block_attention`]: overwrites the columns of `range`'s query, key and value
    /// heads in `drotated: [rows, projected_width]`. A key's gradient sums over all queries of its document in their order: those of shared
    /// documents are in `queries`, so that its bits do not depend on which rank computed what.
    #[allow(clippy::too_many_arguments)]
    fn block_attention_backward(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Self::Buffer,
        queries: &Self::Buffer,
        drotated: &mut Self::Buffer,
    );

    // ---- SwiGLU: y = silu(gate) * up (Shazeer 2020), gate_up: [rows, 2 * width] with gate first ----
    fn swiglu(&self, gate_up: &Self::Buffer, rows: usize, width: usize, y: &mut Self::Buffer);
    /// Turns `gate_up` into its gradient in place and gives `y` again, which the next weight gradient needs.
    fn swiglu_backward(&self, dy: &Self::Buffer, gate_up: &mut Self::Buffer, rows: usize, width: usize, y: &mut Self::Buffer);

    // ---- head: log-probability and entropy of the next token; logits only in bounded chunks of rows ----
    /// Scores `targets[i]` under `softmax(hidden[i] W^T / temperature)`; `hidden: [targets, inputs]`.
    fn head(&self, hidden: &Self::Buffer, weights: LinearWeights<'_, Self>, targets: &[u32], temperature: f32) -> Scores;
    /// `dhidden = ..`, `dweights += ..` for `cotangents` of the scores that [`Device::head`] gave. Computes the logits again.
    #[allow(clippy::too_many_arguments)]
    fn head_backward(
        &self,
        hidden: &Self::Buffer,
        weights: LinearWeights<'_, Self>,
        targets: &[u32],
        temperature: f32,
        cotangents: &Cotangents,
        dhidden: &mut Self::Buffer,
        dweights: &mut Self::Buffer,
    );
    /// Draws one token per row by inverting the cumulative distribution over ids `0..sampleable` in ascending order at
    /// `uniforms[i]` in `[0, 1)`; temperature 0 takes the largest logit, the lowest id on ties. The log-probability is that of
    /// [`Device::head`], over the full vocabulary, bit for bit.
    fn head_sample(
        &self,
        hidden: &Self::Buffer,
        weights: LinearWeights<'_, Self>,
        temperature: f32,
        uniforms: &[f64],
        sampleable: usize,
    ) -> Vec<(u32, f32)>;

    // ---- optimizer ----
    /// Sum of squares in f64, over fixed chunks in ascending order.
    fn sum_of_squares(&self, buffer: &Self::Buffer) -> f64;
    /// AdamW (Loshchilov and Hutter 2019) in PyTorch's form; `first` and `second` are the moments. Brings `packed` up to date.
    fn adamw(
        &self,
        weights: &mut Self::Buffer,
        packed: Option<&mut Self::Packed>,
        gradient: &Self::Buffer,
        first: &mut Self::Buffer,
        second: &mut Self::Buffer,
        step: AdamWStep,
    );
}
