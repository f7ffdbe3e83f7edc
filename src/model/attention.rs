//! Where the rows of a pass find the keys and values that they attend to: in blocks, which ranks may share, or in caches.

use std::ops::Range;

use super::exchange::KeyValueExchange;
use super::generate::KeyValueCache;
use crate::device::{Device, Heads, KeyBlocks, Role, Span};

/// Attention as the layers of a pass want it.
pub(super) trait Attention<D: Device> {
    /// `rotated: [rows, projected_width]` to `attended: [rows, query_width]` at one layer, and `log_sum_exp: [rows, query_heads]`
    /// where there may be a backward.
    fn attend(&mut self, layer: usize, rotated: &D::Buffer, attended: &mut D::Buffer, log_sum_exp: &mut D::Buffer);
}

/// Sampling: new tokens of sequences that grow.
pub(super) struct CacheAttention<'a, 'b, D: Device> {
    pub device: &'a D,
    pub heads: Heads,
    pub spans: &'a [Span],
    pub caches: &'a mut [&'b mut KeyValueCache<D>],
}

impl<D: Device> Attention<D> for CacheAttention<'_, '_, D> {
    fn attend(&mut self, layer: usize, rotated: &D::Buffer, attended: &mut D::Buffer, _: &mut D::Buffer) {
        let mut caches: Vec<_> = self.caches.iter_mut().map(|cache| &mut cache.layers[layer]).collect();
        self.device.attention(rotated, self.heads, self.spans, &mut caches, attended, None);
    }
}

/// Buffers of blocks of keys and values, kept from layer to layer and from pass to pass.
pub(super) struct BlockBuffers<D: Device> {
    /// `[head groups]`
    blocks: Vec<D::Buffer>,
    /// One, or two where there are several groups: one is reduced while the next is computed.
    gradients: Vec<D::Buffer>,
}

impl<D: Device> BlockBuffers<D> {
    pub fn new() -> Self {
        BlockBuffers { blocks: Vec::new(), gradients: Vec::new() }
    }
}

/// The key/value heads of each group.
fn head_ranges(key_value_heads: usize, groups: usize) -> Vec<Range<usize>> {
    let groups = groups.clamp(1, key_value_heads);
    (0..groups).map(|group| group * key_value_heads / groups..(group + 1) * key_value_heads / groups).collect()
}

/// Numbers of the buffers of `blocks` blocks and of their gradients, as `(activations, gradients)`.
pub(crate) fn block_buffer_numbers(heads: Heads, head_groups: usize, blocks: usize) -> (usize, usize) {
    let ranges = head_ranges(heads.key_value_heads, head_groups);
    let numbers = |range: &Range<usize>| blocks * KeyBlocks::block_numbers(range.len(), heads.head_dim);
    let largest = ranges.iter().map(numbers).max().unwrap_or(0);
    (ranges.iter().map(numbers).sum(), ranges.len().min(2) * largest)
}

/// Training: whole documents, or this rank's part of them, over blocks. Key/value heads come in groups, one of which travels while
/// another computes.
pub(super) struct BlockAttention<'a, D: Device> {
    device: &'a D,
    heads: Heads,
    plan: &'a KeyBlocks,
    exchange: &'a mut dyn KeyValueExchange<D>,
    ranges: Vec<Range<usize>>,
    buffers: &'a mut BlockBuffers<D>,
}

impl<'a, D: Device> BlockAttention<'a, D> {
    pub fn new(
        device: &'a D,
        heads: Heads,
        plan: &'a KeyBlocks,
        exchange: &'a mut dyn KeyValueExchange<D>,
        buffers: &'a mut BlockBuffers<D>,
    ) -> Self {
        let ranges = head_ranges(heads.key_value_heads, exchange.head_groups());
        let numbers = ranges.iter().map(|range| plan.blocks * KeyBlocks::block_numbers(range.len(), heads.head_dim));
        reserve(device, Role::Activations, &mut buffers.blocks, numbers);
        BlockAttention { device, heads, plan, exchange, ranges, buffers }
    }

    /// Fills the blocks with a layer's keys and values, of all ranks, and hands each group to `ready` while the next one travels.
    ///
    /// ```text
    /// travel   |         | gather 0 | gather 1 | gather 2 |
    /// compute  | write 0 | write 1  | ready 0  | ready 1  | ready 2
    ///          |         |          | write 2  |          |
    /// ```
    fn fill(&mut self, rotated: &D::Buffer, ready: &mut dyn FnMut(Range<usize>, &D::Buffer)) {
        let (ranges, blocks) = (&self.ranges, &mut self.buffers.blocks[..self.ranges.len()]);
        let write = |group: usize, blocks: &mut D::Buffer| {
            self.device.write_key_blocks(rotated, self.heads, ranges[group].clone(), self.plan, blocks);
        };
        write(0, &mut blocks[0]);
        for group in 0..ranges.len() {
            let (before, rest) = blocks.split_at_mut(group);
            let (here, after) = rest.split_at_mut(1);
            self.exchange.gather(&mut here[0], share(self.plan, self.heads, &ranges[group]), &mut || {
                if let Some(blocks) = before.last() {
                    ready(ranges[group - 1].clone(), blocks);
                }
                if let Some(blocks) = after.first_mut() {
                    write(group + 1, blocks);
                }
            });
        }
        if let (Some(range), Some(blocks)) = (ranges.last(), blocks.last()) {
            ready(range.clone(), blocks);
        }
    }

    /// Fills the blocks with the keys and values of a layer whose forward lies back.
    pub fn fill_again(&mut self, rotated: &D::Buffer) {
        self.fill(rotated, &mut |_, _| {});
    }

    /// `drotated: [rows, projected_width]` from the layer's blocks and what [`Attention::attend`] gave.
    ///
    /// ```text
    /// travel   |            | reduce 0   | reduce 1   |
    /// compute  | backward 0 | backward 1 | backward 2 |
    /// ```
    pub fn backward(
        &mut self,
        dattended: &D::Buffer,
        rotated: &D::Buffer,
        attended: &D::Buffer,
        log_sum_exp: &D::Buffer,
        drotated: &mut D::Buffer,
    ) {
        let (device, heads, plan) = (self.device, self.heads, self.plan);
        let groups = self.ranges.len();
        let largest = self.ranges.iter().map(|range| KeyBlocks::block_numbers(range.len(), heads.head_dim)).max().unwrap_or(0);
        let numbers = std::iter::repeat_n(plan.blocks * largest, groups.min(2));
        reserve(device, Role::Gradients, &mut self.buffers.gradients, numbers);
        let (ranges, BlockBuffers { blocks, gradients }) = (&self.ranges, &mut *self.buffers);
        let backward = |group: usize, drotated: &mut D::Buffer, dblocks: &mut D::Buffer| {
            let range = ranges[group].clone();
            let blocks = &blocks[group];
            device.block_attention_backward(
                dattended,
                rotated,
                attended,
                log_sum_exp,
                heads,
                range,
                plan,
                blocks,
                drotated,
                dblocks,
            );
        };
        let (first, rest) = gradients.split_at_mut(1);
        let (mut here, mut other) = (&mut first[0], rest.first_mut());
        backward(0, drotated, here);
        for (group, range) in ranges.iter().enumerate() {
            self.exchange.reduce(here, share(plan, heads, range), &mut || {
                if let (Some(dblocks), true) = (&mut other, group + 1 < groups) {
                    backward(group + 1, drotated, dblocks);
                }
            });
            device.read_key_block_gradients(here, heads, range.clone(), plan, drotated);
            if let Some(other) = &mut other {
                std::mem::swap(&mut here, other);
            }
        }
    }
}

impl<D: Device> Attention<D> for BlockAttention<'_, D> {
    /// Leaves the layer's keys and values in the blocks, for the backward.
    fn attend(&mut self, _: usize, rotated: &D::Buffer, attended: &mut D::Buffer, log_sum_exp: &mut D::Buffer) {
        let (device, heads, plan) = (self.device, self.heads, self.plan);
        self.fill(rotated, &mut |range, blocks| {
            device.block_attention(rotated, heads, range, plan, blocks, attended, log_sum_exp);
        });
    }
}

/// Numbers that each rank contributes to the exchange of some key/value heads.
fn share(plan: &KeyBlocks, heads: Heads, range: &Range<usize>) -> usize {
    plan.shared * KeyBlocks::block_numbers(range.len(), heads.head_dim)
}

/// Makes the buffers at least as long as `numbers` says. What must grow is dropped first.
fn reserve<D: Device>(device: &D, role: Role, buffers: &mut Vec<D::Buffer>, numbers: impl Iterator<Item = usize>) {
    for (index, numbers) in numbers.enumerate() {
        match buffers.get_mut(index) {
            Some(buffer) if device.length(buffer) >= numbers => {}
            Some(buffer) => {
                *buffer = device.zeros(role, 0);
                *buffer = device.zeros(role, numbers);
            }
            None => buffers.push(device.zeros(role, numbers)),
        }
    }
}
