//! A device that notes when each operation of another began and ended: the source of benchmarks' phases and traces.
//!
//! While it records it waits for the device after each operation, so that a span is that operation's own time; the sum is then more
//! than the time without recording, by the waits. While it does not record it adds a call, and a named range where a
//! profiler may be listening.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::attention_plan::AttentionPlan;
use super::ops::{
    AdamWStep, AttendedRows, Cotangents, Device, Heads, LinearWeights, MemoryUse, ModelSizes, Role, Rotation, RotationGradients,
    Scores, Span,
};
use super::peaks::Peaks;

/// One operation as it ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationSpan {
    /// The method of [`Device`].
    pub operation: &'static str,
    /// Sizes as the operation takes them: `[rows, outputs, inputs]` of a product, `[rows, width]` of a norm.
    pub shape: Vec<usize>,
    /// Since the recorder was made.
    pub start: Duration,
    pub end: Duration,
}

/// What surrounds each operation, for a profiler that shows named ranges.
pub trait Ranges: Send + Sync {
    fn begin(&self, name: &str);
    fn end(&self);
}

struct Recorder {
    origin: Instant,
    on: AtomicBool,
    spans: Mutex<Vec<OperationSpan>>,
    ranges: Option<Box<dyn Ranges>>,
}

/// A device and the record of what it was asked to do. Clones share the record.
#[derive(Clone)]
pub struct Traced<D: Device> {
    device: D,
    recorder: Arc<Recorder>,
}

impl<D: Device> Traced<D> {
    /// Also opens a named range around every operation, recorded or not, where the device has a place for them.
    pub fn new(device: D) -> Traced<D> {
        let ranges = device.ranges();
        let recorder = Recorder { origin: Instant::now(), on: AtomicBool::new(false), spans: Mutex::default(), ranges };
        Traced { device, recorder: Arc::new(recorder) }
    }

    /// Starts with an empty record.
    pub fn start_recording(&self) {
        self.device.synchronize();
        self.recorder.spans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.recorder.on.store(true, Ordering::Relaxed);
    }

    /// Operations in the record so far.
    pub fn recorded(&self) -> usize {
        self.recorder.spans.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Stops, and takes the record away.
    pub fn stop_recording(&self) -> Vec<OperationSpan> {
        self.recorder.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.recorder.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn run<T>(&self, operation: &'static str, shape: &[usize], work: impl FnOnce(&D) -> T) -> T {
        let Recorder { origin, on, spans, ranges } = &*self.recorder;
        if let Some(ranges) = ranges {
            ranges.begin(operation);
        }
        let result = if on.load(Ordering::Relaxed) {
            let start = origin.elapsed();
            let result = work(&self.device);
            self.device.synchronize();
            let span = OperationSpan { operation, shape: shape.to_vec(), start, end: origin.elapsed() };
            spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
            result
        } else {
            work(&self.device)
        };
        if let Some(ranges) = ranges {
            ranges.end();
        }
        result
    }
}

fn linear<'a, D: Device>(weights: LinearWeights<'a, Traced<D>>) -> LinearWeights<'a, D> {
    let LinearWeights { values, packed, outputs, inputs } = weights;
    LinearWeights { values, packed, outputs, inputs }
}

fn rotation<'a, D: Device>(rotation: &Rotation<'a, Traced<D>>) -> Rotation<'a, D> {
    let &Rotation { heads, bias, query_key_norms, norm_epsilon, table, positions } = rotation;
    Rotation { heads, bias, query_key_norms, norm_epsilon, table, positions }
}

fn attended<'a, D: Device>(rows: AttendedRows<'a, Traced<D>>) -> AttendedRows<'a, D> {
    let AttendedRows { rotated, doutput, log_sum_exp, delta } = rows;
    AttendedRows { rotated, doutput, log_sum_exp, delta }
}

fn total(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.length).sum()
}

/// Rows, query heads and key/value heads of the range, and their dimension.
fn block_shape(plan: &AttentionPlan, heads: Heads, range: &Range<usize>) -> [usize; 4] {
    [plan.rows(), range.len() * heads.group(), range.len(), heads.head_dim]
}

impl<D: Device> Device for Traced<D> {
    type Buffer = D::Buffer;
    type Packed = D::Packed;
    type KeyValues = D::KeyValues;

    fn describe(&self) -> String {
        self.device.describe()
    }
    fn check_sizes(&self, sizes: ModelSizes) -> Result<(), String> {
        self.device.check_sizes(sizes)
    }
    fn synchronize(&self) {
        self.device.synchronize();
    }
    fn peaks(&self) -> Option<Peaks> {
        self.device.peaks()
    }
    fn memory_use(&self) -> Vec<MemoryUse> {
        self.device.memory_use()
    }
    fn activation_bytes(&self) -> usize {
        self.device.activation_bytes()
    }

    fn zeros(&self, role: Role, length: usize) -> D::Buffer {
        self.run("zeros", &[length], |device| device.zeros(role, length))
    }
    fn upload(&self, role: Role, values: &[f32]) -> D::Buffer {
        self.run("upload", &[values.len()], |device| device.upload(role, values))
    }
    fn length(&self, buffer: &D::Buffer) -> usize {
        self.device.length(buffer)
    }
    fn number_bytes(&self, buffer: &D::Buffer) -> usize {
        self.device.number_bytes(buffer)
    }
    fn write(&self, buffer: &mut D::Buffer, offset: usize, values: &[f32]) {
        self.run("write", &[values.len()], |device| device.write(buffer, offset, values));
    }
    fn read(&self, buffer: &D::Buffer, offset: usize, length: usize) -> Vec<f32> {
        self.run("read", &[length], |device| device.read(buffer, offset, length))
    }
    fn clear(&self, buffer: &mut D::Buffer, length: usize) {
        self.run("clear", &[length], |device| device.clear(buffer, length));
    }
    fn copy_part(&self, from: &D::Buffer, from_offset: usize, to: &mut D::Buffer, to_offset: usize, length: usize) {
        self.run("copy_part", &[length], |device| device.copy_part(from, from_offset, to, to_offset, length));
    }
    fn copy(&self, from: &D::Buffer, to: &mut D::Buffer, length: usize) {
        self.run("copy", &[length], |device| device.copy(from, to, length));
    }
    fn scale(&self, buffer: &mut D::Buffer, factor: f32) {
        self.run("scale", &[self.device.length(buffer)], |device| device.scale(buffer, factor));
    }
    fn accumulate(&self, from: &D::Buffer, to: &mut D::Buffer, length: usize) {
        self.run("accumulate", &[length], |device| device.accumulate(from, to, length));
    }
    fn gather_rows(&self, from: &D::Buffer, rows: &[usize], width: usize, to: &mut D::Buffer) {
        self.run("gather_rows", &[rows.len(), width], |device| device.gather_rows(from, rows, width, to));
    }
    fn scatter_rows(&self, from: &D::Buffer, rows: &[usize], width: usize, to: &mut D::Buffer) {
        self.run("scatter_rows", &[rows.len(), width], |device| device.scatter_rows(from, rows, width, to));
    }

    fn pack(&self, weights: &D::Buffer, outputs: usize, inputs: usize) -> D::Packed {
        self.run("pack", &[outputs, inputs], |device| device.pack(weights, outputs, inputs))
    }
    fn repack(&self, weights: &D::Buffer, packed: &mut D::Packed) {
        self.run("repack", &[self.device.length(weights)], |device| device.repack(weights, packed));
    }
    fn packed_bytes(&self, packed: &D::Packed) -> usize {
        self.device.packed_bytes(packed)
    }
    fn receivable(&self, outputs: usize, inputs: usize, room: usize) -> (D::Buffer, D::Packed) {
        self.run("receivable", &[outputs, inputs], |device| device.receivable(outputs, inputs, room))
    }
    fn arrival<'a>(&self, values: &'a mut D::Buffer, packed: &'a mut D::Packed) -> &'a mut D::Buffer {
        self.device.arrival(values, packed)
    }
    fn arrived(&self, values: &D::Buffer, packed: &mut D::Packed) {
        self.run("arrived", &[], |device| device.arrived(values, packed));
    }
    fn linear(&self, x: &D::Buffer, weights: LinearWeights<'_, Self>, y: &mut D::Buffer, rows: usize) {
        let shape = [rows, weights.outputs, weights.inputs];
        self.run("linear", &shape, |device| device.linear(x, linear(weights), y, rows));
    }
    fn linear_input_gradient(&self, dy: &D::Buffer, weights: LinearWeights<'_, Self>, dx: &mut D::Buffer, rows: usize) {
        let shape = [rows, weights.outputs, weights.inputs];
        self.run("linear_input_gradient", &shape, |device| device.linear_input_gradient(dy, linear(weights), dx, rows));
    }
    fn linear_weight_gradient(
        &self,
        dy: &D::Buffer,
        x: &D::Buffer,
        dw: &mut D::Buffer,
        rows: usize,
        outputs: usize,
        inputs: usize,
    ) {
        self.run("linear_weight_gradient", &[rows, outputs, inputs], |device| {
            device.linear_weight_gradient(dy, x, dw, rows, outputs, inputs);
        });
    }

    fn embed(&self, table: &D::Buffer, packed: Option<&Self::Packed>, ids: &[u32], width: usize, x: &mut D::Buffer) {
        self.run("embed", &[ids.len(), width], |device| device.embed(table, packed, ids, width, x));
    }
    fn embed_backward(&self, dx: &D::Buffer, ids: &[u32], width: usize, dtable: &mut D::Buffer) {
        self.run("embed_backward", &[ids.len(), width], |device| device.embed_backward(dx, ids, width, dtable));
    }

    fn rms_norm(&self, x: &D::Buffer, weight: &D::Buffer, epsilon: f32, rows: usize, width: usize, y: &mut D::Buffer) {
        self.run("rms_norm", &[rows, width], |device| device.rms_norm(x, weight, epsilon, rows, width, y));
    }
    fn add_rms_norm(
        &self,
        x: &D::Buffer,
        branch: &D::Buffer,
        weight: &D::Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        sum: &mut D::Buffer,
        y: &mut D::Buffer,
    ) {
        self.run("add_rms_norm", &[rows, width], |device| {
            device.add_rms_norm(x, branch, weight, epsilon, rows, width, sum, y);
        });
    }
    fn rms_norm_backward(
        &self,
        dy: &D::Buffer,
        x: &D::Buffer,
        weight: &D::Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        dx: &mut D::Buffer,
        dweight: &mut D::Buffer,
    ) {
        self.run("rms_norm_backward", &[rows, width], |device| {
            device.rms_norm_backward(dy, x, weight, epsilon, rows, width, dx, dweight);
        });
    }

    fn rotate(&self, projected: &D::Buffer, of: &Rotation<'_, Self>, rotated: &mut D::Buffer) {
        let shape = [of.positions.len(), of.heads.projected_width()];
        self.run("rotate", &shape, |device| device.rotate(projected, &rotation(of), rotated));
    }
    fn rotate_backward(
        &self,
        projected: &D::Buffer,
        of: &Rotation<'_, Self>,
        gradient: &mut D::Buffer,
        weights: RotationGradients<'_, Self>,
    ) {
        let shape = [of.positions.len(), of.heads.projected_width()];
        let RotationGradients { bias, query_key_norms } = weights;
        self.run("rotate_backward", &shape, |device| {
            device.rotate_backward(projected, &rotation(of), gradient, RotationGradients { bias, query_key_norms });
        });
    }

    fn new_key_values(&self, heads: Heads) -> D::KeyValues {
        self.device.new_key_values(heads)
    }
    fn clear_key_values(&self, key_values: &mut D::KeyValues) {
        self.device.clear_key_values(key_values);
    }
    fn attention(
        &self,
        rotated: &D::Buffer,
        heads: Heads,
        spans: &[Span],
        caches: &mut [&mut D::KeyValues],
        output: &mut D::Buffer,
        log_sum_exp: Option<&mut D::Buffer>,
    ) {
        let shape = [total(spans), heads.query_heads, heads.key_value_heads, heads.head_dim];
        self.run("attention", &shape, |device| device.attention(rotated, heads, spans, caches, output, log_sum_exp));
    }

    fn write_key_blocks(
        &self,
        rotated: &D::Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &mut D::Buffer,
    ) {
        self.run("write_key_blocks", &block_shape(plan, heads, &range), |device| {
            device.write_key_blocks(rotated, heads, range, plan, blocks);
        });
    }
    fn block_attention(
        &self,
        rotated: &D::Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &D::Buffer,
        output: &mut D::Buffer,
        log_sum_exp: &mut D::Buffer,
    ) {
        self.run("block_attention", &block_shape(plan, heads, &range), |device| {
            device.block_attention(rotated, heads, range, plan, blocks, output, log_sum_exp);
        });
    }
    fn attention_delta(&self, doutput: &D::Buffer, output: &D::Buffer, heads: Heads, rows: usize, delta: &mut D::Buffer) {
        self.run("attention_delta", &[rows, heads.query_heads, heads.head_dim], |device| {
            device.attention_delta(doutput, output, heads, rows, delta);
        });
    }
    fn write_shared_queries(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        queries: &mut D::Buffer,
    ) {
        self.run("write_shared_queries", &block_shape(plan, heads, &range), |device| {
            device.write_shared_queries(attended(rows), heads, range, plan, queries);
        });
    }
    fn block_attention_backward(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &D::Buffer,
        queries: &D::Buffer,
        drotated: &mut D::Buffer,
    ) {
        self.run("block_attention_backward", &block_shape(plan, heads, &range), |device| {
            device.block_attention_backward(attended(rows), heads, range, plan, blocks, queries, drotated);
        });
    }

    fn swiglu(&self, gate_up: &D::Buffer, rows: usize, width: usize, y: &mut D::Buffer) {
        self.run("swiglu", &[rows, width], |device| device.swiglu(gate_up, rows, width, y));
    }
    fn swiglu_backward(&self, dy: &D::Buffer, gate_up: &mut D::Buffer, rows: usize, width: usize, y: &mut D::Buffer) {
        self.run("swiglu_backward", &[rows, width], |device| device.swiglu_backward(dy, gate_up, rows, width, y));
    }

    fn head(&self, hidden: &D::Buffer, weights: LinearWeights<'_, Self>, targets: &[u32], temperature: f32) -> Scores {
        let shape = [targets.len(), weights.outputs, weights.inputs];
        self.run("head", &shape, |device| device.head(hidden, linear(weights), targets, temperature))
    }
    fn head_backward(
        &self,
        hidden: &D::Buffer,
        weights: LinearWeights<'_, Self>,
        targets: &[u32],
        temperature: f32,
        cotangents: &Cotangents,
        dhidden: &mut D::Buffer,
        dweights: &mut D::Buffer,
    ) {
        let shape = [targets.len(), weights.outputs, weights.inputs];
        self.run("head_backward", &shape, |device| {
            device.head_backward(hidden, linear(weights), targets, temperature, cotangents, dhidden, dweights);
        });
    }
    fn head_sample(
        &self,
        hidden: &D::Buffer,
        weights: LinearWeights<'_, Self>,
        temperature: f32,
        uniforms: &[f64],
        sampleable: usize,
    ) -> Vec<(u32, f32)> {
        let shape = [uniforms.len(), weights.outputs, weights.inputs];
        self.run("head_sample", &shape, |device| device.head_sample(hidden, linear(weights), temperature, uniforms, sampleable))
    }

    fn sum_of_squares(&self, buffer: &D::Buffer) -> f64 {
        self.run("sum_of_squares", &[self.device.length(buffer)], |device| device.sum_of_squares(buffer))
    }
    fn adamw(
        &self,
        weights: &mut D::Buffer,
        packed: Option<&mut D::Packed>,
        gradient: &D::Buffer,
        first: &mut D::Buffer,
        second: &mut D::Buffer,
        step: AdamWStep,
    ) {
        let shape = [self.device.length(weights)];
        self.run("adamw", &shape, |device| device.adamw(weights, packed, gradient, first, second, step));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CpuDevice;

    #[test]
    fn operations_are_noted_only_while_recording_and_compute_the_same() {
        let traced = Traced::new(CpuDevice::new());
        let x = traced.upload(Role::Activations, &[1.0, 2.0, 3.0, 4.0]);
        let weight = traced.upload(Role::Weights, &[1.0, 1.0]);
        traced.start_recording();
        let mut y = traced.zeros(Role::Activations, 4);
        traced.rms_norm(&x, &weight, 1e-6, 2, 2, &mut y);
        let spans = traced.stop_recording();
        traced.rms_norm(&x, &weight, 1e-6, 2, 2, &mut y);
        assert!(traced.stop_recording().is_empty());

        let named: Vec<_> = spans.iter().map(|span| (span.operation, span.shape.as_slice())).collect();
        assert_eq!(named, [("zeros", &[4][..]), ("rms_norm", &[2, 2][..])]);
        assert!(spans.is_sorted_by(|a, b| a.start <= a.end && a.end <= b.start));
        let mut expected = vec![0.0; 4];
        CpuDevice::new().rms_norm(&x, &weight, 1e-6, 2, 2, &mut expected);
        assert_eq!(y, expected);
    }
}
