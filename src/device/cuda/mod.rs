//! The operations on an NVIDIA GPU, or on an emulated one, which runs the same code: activations and products in bf16, sums in f32,
//! weights, gradients and moments in f32.
//!
//! From the ground up: `error` says what went wrong; `emulator` loads the emulated GPU; `driver` is one GPU and its stream;
//! `nccl` its end of a communicator; `allocator` its memory by purpose; `embedded` the compiled kernels, `arguments` what they take,
//! `launch` how they start; `opening` makes a device of all this; `buffers`, `indices` and `pages` are what it works on. Above these
//! lie the operations: `rows`, `gemm` (with `cublaslt` to measure against), `attention`, `blocks`, `head`, `optimizer`. The kernels
//! themselves are in `cuda/`.
//!
//! Nothing here depends on where memory lies or on how many multiprocessors a card has, but for speed: the same inputs give the
//! same bits.

mod allocator;
mod arguments;
mod attention;
mod blocks;
mod buffers;
mod cublaslt;
mod driver;
mod embedded;
mod emulator;
mod error;
mod gemm;
mod head;
mod indices;
mod launch;
mod nccl;
mod opening;
mod optimizer;
mod pages;
mod ranges;
pub mod roofline;
mod rows;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub use allocator::{Allocation, Purpose};
pub use buffers::Buffer;
pub use emulator::{EmulatorSettings, Finding, KernelCounters, LineCounters};
pub use error::{DeviceError, DeviceFailure};
pub use head::workspace_bytes as head_workspace_bytes;
pub use launch::LaunchTime;
pub use nccl::{Communicator, CommunicatorError, Moment, Request, SharedCall, nccl_version, new_communicator_id};
pub use opening::kernel_images;
pub use pages::PagedKeyValues;

use super::attention_plan::AttentionPlan;
use super::ops::{
    AdamWStep, AttendedRows, Cotangents, Device, Heads, LinearWeights, MemoryUse, ModelSizes, Role, Rotation, RotationGradients,
    Scores, Span,
};
use super::peaks::Peaks;
use super::traced::Ranges;
use allocator::{Allocator, Memory};
use arguments::{Address, HEAD_MAX_VOCABULARY, NORM_WIDTH_WIDE, PROJECTED_WIDTH};
use cublaslt::CublasLt;
use driver::Gpu;
use emulator::Emulator;
use gemm::{Layout, Output, Product};
use indices::Tables;
use launch::Kernels;

/// A GPU. Clones share it, and one thread at a time works on it: operations hand tables of indices from one to the next.
#[derive(Clone)]
pub struct CudaDevice {
    shared: Arc<Shared>,
    segment: usize,
    /// Rows of logits computed together, where a test wants fewer than memory allows.
    head_rows: Option<usize>,
    cublaslt: Option<Arc<CublasLt>>,
}

struct Shared {
    tables: Tables,
    kernels: Kernels,
    allocator: Arc<Allocator>,
    gpu: Arc<Gpu>,
}

/// The bf16 copy `[outputs, inputs]` of a matrix of weights that every product reads. A matrix that other ranks send arrives in it.
pub struct PackedWeights {
    copy: Buffer,
    outputs: usize,
    inputs: usize,
}

impl PackedWeights {
    fn outputs(&self) -> usize {
        self.outputs
    }
    fn inputs(&self) -> usize {
        self.inputs
    }
    fn address(&self) -> Address {
        self.copy.bf16(self.outputs * self.inputs)
    }
    fn holding(&self, length: usize) -> Address {
        assert_eq!(self.outputs * self.inputs, length, "a packed copy of other weights");
        self.address()
    }
    fn holding_at_least(&self, length: usize) -> Address {
        assert!(self.outputs * self.inputs >= length, "a packed copy of {} x {} numbers", self.outputs, self.inputs);
        self.address()
    }
}

impl CudaDevice {
    fn gpu(&self) -> &Gpu {
        &self.shared.gpu
    }
    fn kernels(&self) -> &Kernels {
        &self.shared.kernels
    }
    fn tables(&self) -> &Tables {
        &self.shared.tables
    }
    fn allocate(&self, purpose: Purpose, bytes: usize) -> Memory {
        self.shared.allocator.allocate(purpose, bytes)
    }
    fn segment(&self) -> usize {
        self.segment
    }
    fn cublaslt(&self) -> Option<&CublasLt> {
        self.cublaslt.as_deref()
    }
}

impl Device for CudaDevice {
    type Buffer = Buffer;
    type Packed = PackedWeights;
    type KeyValues = PagedKeyValues;

    fn describe(&self) -> String {
        let gpu = self.gpu();
        let (major, minor) = gpu.capability;
        let gemm = if self.cublaslt.is_some() { ", products by cuBLASLt" } else { "" };
        let memory = crate::types::bytes(gpu.total_memory as u64);
        let checks = gpu.emulator.map_or(String::new(), Emulator::describe);
        let name = &gpu.name;
        format!("{name}, compute capability {major}.{minor}, {} multiprocessors, {memory}{gemm}{checks}", gpu.multiprocessors)
    }
    fn synchronize(&self) {
        self.gpu().synchronize();
    }
    fn check_sizes(&self, sizes: ModelSizes) -> Result<(), String> {
        let ModelSizes { heads, hidden, intermediate, vocabulary } = sizes;
        let refuse = |what: &str, value: usize, must: &str| Err(format!("{what} is {value}: {must} on a GPU"));
        if ![32, 64, 128].contains(&heads.head_dim) {
            return refuse("head_dim", heads.head_dim, "it must be 32, 64 or 128");
        }
        if !(1..=8).contains(&heads.group()) || heads.group() * heads.key_value_heads != heads.query_heads {
            return refuse("num_attention_heads", heads.query_heads, "it must be 1 to 8 times num_key_value_heads");
        }
        if heads.projected_width() > PROJECTED_WIDTH {
            return refuse(
                "the width of queries, keys and values",
                heads.projected_width(),
                &format!("it must be at most {PROJECTED_WIDTH}"),
            );
        }
        if hidden % 8 != 0 || hidden > NORM_WIDTH_WIDE {
            return refuse("hidden_size", hidden, &format!("it must be a multiple of 8 and at most {NORM_WIDTH_WIDE}"));
        }
        if intermediate % 8 != 0 {
            return refuse("intermediate_size", intermediate, "it must be a multiple of 8");
        }
        if vocabulary > HEAD_MAX_VOCABULARY {
            return refuse("vocab_size", vocabulary, &format!("it must be at most {HEAD_MAX_VOCABULARY}"));
        }
        Ok(())
    }
    fn peaks(&self) -> Option<Peaks> {
        Peaks::of(&self.gpu().name).filter(|_| !self.is_emulated())
    }
    fn memory_use(&self) -> Vec<MemoryUse> {
        let line = |Allocation { purpose, in_use, peak }| MemoryUse { purpose: Purpose::name(purpose), in_use, peak };
        self.allocations().into_iter().map(line).collect()
    }
    fn ranges(&self) -> Option<Box<dyn Ranges>> {
        ranges::Nvtx::find().map(|nvtx| Box::new(nvtx) as Box<dyn Ranges>)
    }
    fn activation_bytes(&self) -> usize {
        buffers::Precision::Bf16.bytes()
    }

    fn zeros(&self, role: Role, length: usize) -> Buffer {
        self.zeroed_buffer(role, length)
    }
    fn upload(&self, role: Role, values: &[f32]) -> Buffer {
        self.uploaded_buffer(role, values)
    }
    fn length(&self, buffer: &Buffer) -> usize {
        buffer.length()
    }
    fn number_bytes(&self, buffer: &Buffer) -> usize {
        buffer.precision().bytes()
    }
    fn write(&self, buffer: &mut Buffer, offset: usize, values: &[f32]) {
        self.write_buffer(buffer, offset, values);
    }
    fn read(&self, buffer: &Buffer, offset: usize, length: usize) -> Vec<f32> {
        self.read_buffer(buffer, offset, length)
    }
    fn clear(&self, buffer: &mut Buffer, length: usize) {
        self.clear_buffer(buffer, length);
    }
    fn copy_part(&self, from: &Buffer, from_offset: usize, to: &mut Buffer, to_offset: usize, length: usize) {
        self.copy_buffer(from, from_offset, to, to_offset, length);
    }
    fn scale(&self, buffer: &mut Buffer, factor: f32) {
        self.scale_buffer(buffer, factor);
    }
    fn accumulate(&self, from: &Buffer, to: &mut Buffer, length: usize) {
        self.accumulate_buffer(from, to, length);
    }
    fn gather_rows(&self, from: &Buffer, rows: &[usize], width: usize, to: &mut Buffer) {
        self.gathered_rows(from, rows, width, to);
    }
    fn scatter_rows(&self, from: &Buffer, rows: &[usize], width: usize, to: &mut Buffer) {
        self.scattered_rows(from, rows, width, to);
    }

    fn pack(&self, weights: &Buffer, outputs: usize, inputs: usize) -> PackedWeights {
        let mut packed = PackedWeights { copy: self.buffer(Role::Travelling, outputs * inputs), outputs, inputs };
        self.repack(weights, &mut packed);
        packed
    }
    fn repack(&self, weights: &Buffer, packed: &mut PackedWeights) {
        let length = packed.outputs * packed.inputs;
        self.cast_to_bf16(weights.f32(length), packed.holding(length), length);
    }
    fn packed_bytes(&self, packed: &PackedWeights) -> usize {
        packed.copy.bytes()
    }
    fn receivable(&self, outputs: usize, inputs: usize, room: usize) -> (Buffer, PackedWeights) {
        assert!(room >= outputs * inputs, "room for {room} numbers of a matrix of {outputs} x {inputs}");
        let copy = self.zeroed_buffer(Role::Travelling, room);
        (self.buffer(Role::Weights, 0), PackedWeights { copy, outputs, inputs })
    }
    fn arrival<'a>(&self, _values: &'a mut Buffer, packed: &'a mut PackedWeights) -> &'a mut Buffer {
        &mut packed.copy
    }
    /// Products read a matrix where it arrived.
    fn arrived(&self, _values: &Buffer, _packed: &mut PackedWeights) {}
    fn linear(&self, x: &Buffer, weights: LinearWeights<'_, Self>, y: &mut Buffer, rows: usize) {
        let (outputs, inputs) = (weights.outputs, weights.inputs);
        let output = if y.precision() == buffers::Precision::F32 { Output::F32 } else { Output::Bf16 };
        self.multiply(&Product {
            layout: Layout::Nt,
            output,
            a: x.bf16(rows * inputs),
            b: weights.packed.holding(outputs * inputs),
            c: y.holding(y.precision(), rows * outputs),
            m: rows,
            n: outputs,
            k: inputs,
            pitch_c: outputs,
        });
    }
    fn linear_input_gradient(&self, dy: &Buffer, weights: LinearWeights<'_, Self>, dx: &mut Buffer, rows: usize) {
        let (outputs, inputs) = (weights.outputs, weights.inputs);
        self.multiply(&Product {
            layout: Layout::Nn,
            output: Output::Bf16,
            a: dy.bf16(rows * outputs),
            b: weights.packed.holding(outputs * inputs),
            c: dx.bf16(rows * inputs),
            m: rows,
            n: inputs,
            k: outputs,
            pitch_c: inputs,
        });
    }
    fn linear_weight_gradient(&self, dy: &Buffer, x: &Buffer, dw: &mut Buffer, rows: usize, outputs: usize, inputs: usize) {
        self.multiply(&Product {
            layout: Layout::Tn,
            output: Output::Add,
            a: dy.bf16(rows * outputs),
            b: x.bf16(rows * inputs),
            c: dw.f32(outputs * inputs),
            m: outputs,
            n: inputs,
            k: rows,
            pitch_c: inputs,
        });
    }

    fn embed(&self, table: &Buffer, packed: Option<&PackedWeights>, ids: &[u32], width: usize, x: &mut Buffer) {
        self.embed_rows(table, packed, ids, width, x);
    }
    fn embed_backward(&self, dx: &Buffer, ids: &[u32], width: usize, dtable: &mut Buffer) {
        self.embed_rows_backward(dx, ids, width, dtable);
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, epsilon: f32, rows: usize, width: usize, y: &mut Buffer) {
        self.norm(x, None, weight, epsilon, rows, width, y);
    }
    fn add_rms_norm(
        &self,
        x: &Buffer,
        branch: &Buffer,
        weight: &Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) {
        self.norm(x, Some((branch, sum)), weight, epsilon, rows, width, y);
    }
    fn rms_norm_backward(
        &self,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        epsilon: f32,
        rows: usize,
        width: usize,
        dx: &mut Buffer,
        dweight: &mut Buffer,
    ) {
        self.norm_backward(dy, x, weight, epsilon, rows, width, dx, dweight);
    }

    fn rotate(&self, projected: &Buffer, rotation: &Rotation<'_, Self>, rotated: &mut Buffer) {
        self.rotated(projected, rotation, rotated);
    }
    fn rotate_backward(
        &self,
        projected: &Buffer,
        rotation: &Rotation<'_, Self>,
        gradient: &mut Buffer,
        weights: RotationGradients<'_, Self>,
    ) {
        self.rotated_backward(projected, rotation, gradient, weights);
    }

    fn new_key_values(&self, heads: Heads) -> PagedKeyValues {
        PagedKeyValues::new(self.shared.gpu.clone(), self.shared.allocator.clone(), heads)
    }
    fn clear_key_values(&self, key_values: &mut PagedKeyValues) {
        key_values.clear();
    }
    fn attention(
        &self,
        rotated: &Buffer,
        heads: Heads,
        spans: &[Span],
        caches: &mut [&mut PagedKeyValues],
        output: &mut Buffer,
        log_sum_exp: Option<&mut Buffer>,
    ) {
        self.attend(rotated, heads, spans, caches, output, log_sum_exp);
    }

    fn write_key_blocks(&self, rotated: &Buffer, heads: Heads, range: Range<usize>, plan: &AttentionPlan, blocks: &mut Buffer) {
        self.fill_key_blocks(rotated, heads, range, plan, blocks);
    }
    fn block_attention(
        &self,
        rotated: &Buffer,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Buffer,
        output: &mut Buffer,
        log_sum_exp: &mut Buffer,
    ) {
        self.attend_blocks(rotated, heads, range, plan, blocks, output, log_sum_exp);
    }
    fn attention_delta(&self, doutput: &Buffer, output: &Buffer, heads: Heads, rows: usize, delta: &mut Buffer) {
        self.output_delta(doutput, output, heads, rows, delta);
    }
    fn write_shared_queries(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        queries: &mut Buffer,
    ) {
        self.fill_shared_queries(rows, heads, range, plan, queries);
    }
    fn block_attention_backward(
        &self,
        rows: AttendedRows<'_, Self>,
        heads: Heads,
        range: Range<usize>,
        plan: &AttentionPlan,
        blocks: &Buffer,
        queries: &Buffer,
        drotated: &mut Buffer,
    ) {
        self.attend_blocks_backward(rows, heads, range, plan, blocks, queries, drotated);
    }

    fn swiglu(&self, gate_up: &Buffer, rows: usize, width: usize, y: &mut Buffer) {
        self.gated(gate_up, rows, width, y);
    }
    fn swiglu_backward(&self, dy: &Buffer, gate_up: &mut Buffer, rows: usize, width: usize, y: &mut Buffer) {
        self.gated_backward(dy, gate_up, rows, width, y);
    }

    fn head(&self, hidden: &Buffer, weights: LinearWeights<'_, Self>, targets: &[u32], temperature: f32) -> Scores {
        self.head_scores(hidden, weights.packed, targets, temperature)
    }
    fn head_backward(
        &self,
        hidden: &Buffer,
        weights: LinearWeights<'_, Self>,
        targets: &[u32],
        temperature: f32,
        cotangents: &Cotangents,
        dhidden: &mut Buffer,
        dweights: &mut Buffer,
    ) {
        self.head_gradients(hidden, weights, targets, temperature, cotangents, dhidden, dweights);
    }
    fn head_sample(
        &self,
        hidden: &Buffer,
        weights: LinearWeights<'_, Self>,
        temperature: f32,
        uniforms: &[f64],
        sampleable: usize,
    ) -> Vec<(u32, f32)> {
        self.head_samples(hidden, weights.packed, temperature, uniforms, sampleable)
    }

    fn sum_of_squares(&self, buffer: &Buffer) -> f64 {
        self.squares(buffer)
    }
    fn adamw(
        &self,
        weights: &mut Buffer,
        packed: Option<&mut PackedWeights>,
        gradient: &Buffer,
        first: &mut Buffer,
        second: &mut Buffer,
        step: AdamWStep,
    ) {
        self.adamw_step(weights, packed, gradient, (first, second), step);
    }
}
