//! The operations on the CPU, in f32: rows or columns in parallel, never the depth of a sum.
//!
//! `kernel` and `gemm` are the matrix products, `rows` what each token does by itself, `attention` and `head` the two
//! operations with a softmax, `key_blocks` where the keys and values of training passes lie, `optimizer` AdamW. `simd` chooses instructions, `parallel` shares work.

mod attention;
mod attention_backward;
pub mod gemm;
mod head;
pub mod kernel;
mod key_blocks;
mod optimizer;
mod parallel;
mod rows;
pub mod simd;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::attention_plan::AttentionPlan;
use super::ops::{
    AdamWStep, AttendedRows, Cotangents, Device, Heads, LinearWeights, Role, Rotation, RotationGradients, Scores, Span,
};
pub use attention::KeyValues;
use gemm::PackedWeights;
use kernel::PANEL;
use key_blocks::{BlockShape, QueryRows};
use rows::RotationSlices;
use simd::InstructionSet;

/// Keys per segment of attention (DESIGN, rule 3).
pub const ATTENTION_SEGMENT: usize = 8192;

/// The CPU. Clones share the scratch memory of the head.
#[derive(Clone)]
pub struct CpuDevice {
    set: InstructionSet,
    segment: usize,
    logits: Arc<Mutex<Vec<f32>>>,
}

impl Default for CpuDevice {
    fn default() -> CpuDevice {
        CpuDevice::new()
    }
}

impl CpuDevice {
    pub fn new() -> CpuDevice {
        CpuDevice::with_attention_segment(ATTENTION_SEGMENT)
    }

    /// A device whose attention reduces over segments of `segment` keys, rounded up to whole panels of 16: for tests, which
    /// would otherwise need sequences beyond 8,192 tokens to see two segments. Results of different lengths differ in rounding.
    pub fn with_attention_segment(segment: usize) -> CpuDevice {
        let segment = segment.max(1).next_multiple_of(PANEL);
        CpuDevice { set: InstructionSet::detected(), segment, logits: Arc::default() }
    }

    fn logits(&self) -> MutexGuard<'_, Vec<f32>> {
        self.logits.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn slices<'a>(rotation: &Rotation<'a, CpuDevice>) -> RotationSlices<'a> {
    RotationSlices {
        heads: rotation.heads,
        bias: rotation.bias.map(Vec::as_slice),
        query_key_norms: rotation.query_key_norms.map(|(query, key)| (query.as_slice(), key.as_slice())),
        norm_epsilon: rotation.norm_epsilon,
        table: rotation.table,
        positions: rotation.positions,
    }
}

impl Device for CpuDevice {
    type Buffer = Vec<f32>;
    type Packed = PackedWeights;
    type KeyValues = KeyValues;

    fn describe(&self) -> String {
        format!("CPU, {}, {} threads", self.set.name(), rayon::current_num_threads())
    }

    fn activation_bytes(&self) -> usize {
        size_of::<f32>()
    }
    fn zeros(&self, _role: Role, length: usize) -> Vec<f32> {
        vec![0.0; length]
    }
    fn upload(&self, _role: Role, values: &[f32]) -> Vec<f32> {
        values.to_vec()
    }
    fn length(&self, buffer: &Vec<f32>) -> usize {
        buffer.len()
    }
    fn number_bytes(&self, _buffer: &Vec<f32>) -> usize {
        size_of::<f32>()
    }
    fn write(&self, buffer: &mut Vec<f32>, offset: usize, values: &[f32]) {
        buffer[offset..offset + values.len()].copy_from_slice(values);
    }
    fn read(&self, buffer: &Vec<f32>, offset: usize, length: usize) -> Vec<f32> {
        buffer[offset..offset + length].to_vec()
    }
    fn clear(&self, buffer: &mut Vec<f32>, length: usize) {
        buffer[..length].fill(0.0);
    }
    fn copy_part(&self, from: &Vec<f32>, from_offset: usize, to: &mut Vec<f32>, to_offset: usize, length: usize) {
        to[to_offset..to_offset + length].copy_from_slice(&from[from_offset..from_offset + length]);
    }
    fn scale(&self, buffer: &mut Vec<f32>, factor: f32) {
        buffer.iter_mut().for_each(|value| *value *= factor);
    }
    fn accumulate(&self, from: &Vec<f32>, to: &mut Vec<f32>, length: usize) {
        to[..length].iter_mut().zip(&from[..length]).for_each(|(sum, &value)| *sum += value);
    }
    fn gather_rows(&self, from: &Vec<f32>, rows: &[usize], width: usize, to: &mut Vec<f32>) {
        for (target, &row) in to.chunks_exact_mut(width).zip(rows) {
            target.copy_from_slice(&from[row * width..(row + 1) * width]);
        }
    }
    fn scatter_rows(&self, from: &Vec<f32>, rows: &[usize], width: usize, to: &mut Vec<f32>) {
        for (source, &row) in from.chunks_exact(width).zip(rows) {
            to[row * width..(row + 1) * width].copy_from_slice(source);
        }
    }

    fn pack(&self, weights: &Vec<f32>, outputs: usize, inputs: usize) -> PackedWeights {
        PackedWeights::pack(weights, outputs, inputs)
    }
    fn repack(&self, weights: &Vec<f32>, packed: &mut PackedWeights) {
        packed.repack(weights);
    }
    fn packed_bytes(&self, packed: &PackedWeights) -> usize {
        packed.bytes()
    }
    fn receivable(&self, outputs: usize, inputs: usize, room: usize) -> (Vec<f32>, PackedWeights) {
        let values = vec![0.0; room];
        let packed = PackedWeights::pack(&values[..outputs * inputs], outputs, inputs);
        (values, packed)
    }
    fn arrival<'a>(&self, values: &'a mut Vec<f32>, _packed: &'a mut PackedWeights) -> &'a mut Vec<f32> {
        values
    }
    fn arrived(&self, values: &Vec<f32>, packed: &mut PackedWeights) {
        packed.repack(&values[..packed.outputs * packed.inputs]);
    }
    fn linear(&self, x: &Vec<f32>, weights: LinearWeights<'_, Self>, y: &mut Vec<f32>, rows: usize) {
        gemm::forward(self.set, x, weights.packed, y, rows);
    }
    fn linear_input_gradient(&self, dy: &Vec<f32>, weights: LinearWeights<'_, Self>, dx: &mut Vec<f32>, rows: usize) {
        gemm::input_gradient(self.set, dy, weights.values, dx, (rows, weights.outputs, weights.inputs));
    }
    fn linear_weight_gradient(&self, dy: &Vec<f32>, x: &Vec<f32>, dw: &mut Vec<f32>, rows: usize, outputs: usize, inputs: usize) {
        gemm::weight_gradient(self.set, dy, x, dw, (rows, outputs, inputs));
    }

    fn embed(&self, table: &Vec<f32>, _: Option<&Self::Packed>, ids: &[u32], width: usize, x: &mut Vec<f32>) {
        rows::embed(table, ids, width, x);
    }
    fn embed_backward(&self, dx: &Vec<f32>, ids: &[u32], width: usize, dtable: &mut Vec<f32>) {
        rows::embed_backward(dx, ids, width, dtable);
    }

    fn rms_norm(&self, x: &Vec<f32>, weight: &Vec<f32>, epsilon: f32, rows: usize, width: usize, y: &mut Vec<f32>) {
        rows::rms_norm(x, &weight[..width], epsilon, rows, y);
    }
    fn add_rms_norm(
        &self,
        x: &Vec<f32>,
        branch: &Vec<f32>,
        weight: &Vec<f32>,
        epsilon: f32,
        rows: usize,
        width: usize,
        sum: &mut Vec<f32>,
        y: &mut Vec<f32>,
    ) {
        rows::add_rms_norm(x, branch, &weight[..width], epsilon, rows, sum, y);
    }
    fn rms_norm_backward(
        &self,
        dy: &Vec<f32>,
        x: &Vec<f32>,
        weight: &Vec<f32>,
        epsilon: f32,
        rows: usize,
        width: usize,
        dx: &mut Vec<f32>,
        dweight: &mut Vec<f32>,
    ) {
        rows::rms_norm_backward(dy, x, &weight[..width], epsilon, rows, dx, dweight);
    }

    fn rotate(&self, projected: &Vec<f32>, rotation: &Rotation<'_, Self>, rotated: &mut Vec<f32>) {
        rows::rotate(projected, slices(rotation), rotated);
    }
    fn rotate_backward(
        &self,
        projected: &Vec<f32>,
        rotation: &Rotation<'_, Self>,
        gradient: &mut Vec<f32>,
        weights: RotationGradients<'_, Self>,
    ) {
        let norms = weights.query_key_norms.map(|(query, key)| (query.as_mut_slice(), key.as_mut_slice()));
        rows::rotate_backward(projected, slices(rotation), gradient, weights.bias.map(Vec::as_mut_slice), norms);
    }

    fn new_key_values(&self, heads: Heads) -> KeyValues {
        KeyValues::new(heads)
    }
    fn clear_key_values(&self, key_values: &mut KeyValues) {
        key_values.clear();
    }
    fn attention(
        &self,
        rotated: &Vec<f32>,
        heads: Heads,
        spans: &[Span],
        caches: &mut [&mut KeyValues],
        output: &mut Vec<f32>,
        log_sum_exp: Option<&mut Vec<f32>>,
    ) {
        let log_sum_exp = log_sum_exp.map(Vec::as_mut_slice);
        attention::forward(self.set, self.segment, rotated, heads, spans, caches, output, log_sum_exp);
    }
    fn write_key_blocks(
        &self,
        rotated: &Vec<f32>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &mut Vec<f32>,
    ) {
        key_blocks::write(rotated, &BlockShape { heads, range }, plan, blocks);
    }
    fn block_attention(
        &self,
        rotated: &Vec<f32>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Vec<f32>,
        output: &mut Vec<f32>,
        log_sum_exp: &mut Vec<f32>,
    ) {
        let shape = BlockShape { heads, range };
        attention::forward_blocks(self.set, self.segment, rotated, &shape, plan, blocks, output, log_sum_exp);
    }
    fn attention_delta(&self, doutput: &Vec<f32>, output: &Vec<f32>, heads: Heads, rows: usize, delta: &mut Vec<f32>) {
        attention_backward::delta(doutput, output, heads, rows, delta);
    }
    fn write_shared_queries(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        queries: &mut Vec<f32>,
    ) {
        let shape = BlockShape { heads, range };
        key_blocks::write_queries(QueryRows::of_pass(rows, &shape, plan.rows()), &shape, plan, queries);
    }
    fn block_attention_backward(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Vec<f32>,
        queries: &Vec<f32>,
        drotated: &mut Vec<f32>,
    ) {
        attention_backward::backward(self.set, rows, &BlockShape { heads, range }, plan, blocks, queries, drotated);
    }

    fn swiglu(&self, gate_up: &Vec<f32>, rows: usize, width: usize, y: &mut Vec<f32>) {
        rows::swiglu(gate_up, rows, width, y);
    }
    fn swiglu_backward(&self, dy: &Vec<f32>, gate_up: &mut Vec<f32>, rows: usize, width: usize, y: &mut Vec<f32>) {
        rows::swiglu_backward(dy, gate_up, rows, width, y);
    }

    fn head(&self, hidden: &Vec<f32>, weights: LinearWeights<'_, Self>, targets: &[u32], temperature: f32) -> Scores {
        head::scores(self.set, &mut self.logits(), hidden, weights.packed, targets, temperature)
    }
    fn head_backward(
        &self,
        hidden: &Vec<f32>,
        weights: LinearWeights<'_, Self>,
        targets: &[u32],
        temperature: f32,
        cotangents: &Cotangents,
        dhidden: &mut Vec<f32>,
        dweights: &mut Vec<f32>,
    ) {
        let (packed, values) = (weights.packed, weights.values);
        let scratch = &mut self.logits();
        head::backward(self.set, scratch, hidden, packed, values, targets, temperature, cotangents, dhidden, dweights);
    }
    fn head_sample(
        &self,
        hidden: &Vec<f32>,
        weights: LinearWeights<'_, Self>,
        temperature: f32,
        uniforms: &[f64],
        sampleable: usize,
    ) -> Vec<(u32, f32)> {
        head::sample(self.set, &mut self.logits(), hidden, weights.packed, temperature, uniforms, sampleable)
    }

    fn sum_of_squares(&self, buffer: &Vec<f32>) -> f64 {
        optimizer::sum_of_squares(buffer)
    }
    fn adamw(
        &self,
        weights: &mut Vec<f32>,
        packed: Option<&mut PackedWeights>,
        gradient: &Vec<f32>,
        first: &mut Vec<f32>,
        second: &mut Vec<f32>,
        step: AdamWStep,
    ) {
        optimizer::adamw(weights, gradient, first, second, step);
        if let Some(packed) = packed {
            packed.repack(weights);
        }
    }
}
