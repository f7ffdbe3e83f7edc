//! Where the rows of a pass find the keys and values that they attend to, and in the backward the queries that attend to their keys: in
//! blocks and rows that ranks bring to each other, or in caches.

use std::ops::Range;

use super::exchange::SequenceExchange;
use super::generate::KeyValueCache;
use crate::device::{AttendedRows, AttentionPlan, Device, Heads, Role, Span};

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

/// Buffers of what attention exchanges, kept from layer to layer and from pass to pass.
pub(super) struct BlockBuffers<D: Device> {
    /// `[head groups]` blocks of keys and values.
    blocks: Vec<D::Buffer>,
    /// Shared queries of one group, or of two where there are several: of the one that computes and of the one that travels.
    queries: Vec<D::Buffer>,
}

impl<D: Device> BlockBuffers<D> {
    pub fn new() -> Self {
        BlockBuffers { blocks: Vec::new(), queries: Vec::new() }
    }
}

/// The key/value heads of each group.
fn head_ranges(key_value_heads: usize, groups: usize) -> Vec<Range<usize>> {
    let groups = groups.clamp(1, key_value_heads);
    (0..groups).map(|group| group * key_value_heads / groups..(group + 1) * key_value_heads / groups).collect()
}

/// Numbers of a row of exchanged queries, over all groups of heads.
pub(crate) fn exchanged_query_numbers(heads: Heads, head_groups: usize) -> usize {
    let ranges = head_ranges(heads.key_value_heads, head_groups);
    ranges.iter().map(|range| AttentionPlan::query_numbers(heads, range)).sum()
}

/// Of them, those that the buffers hold at a time.
pub(crate) fn query_buffer_numbers(heads: Heads, head_groups: usize) -> usize {
    query_buffers(heads, &head_ranges(heads.key_value_heads, head_groups)).sum()
}

/// Numbers of a row in each buffer of queries: groups take turns in them.
fn query_buffers(heads: Heads, ranges: &[Range<usize>]) -> impl Iterator<Item = usize> {
    let largest = ranges.iter().map(|range| AttentionPlan::query_numbers(heads, range)).max().unwrap_or(0);
    std::iter::repeat_n(largest, ranges.len().min(2))
}

/// Training: whole documents, or this rank's part of them, over blocks. Key/value heads come in groups, one of which travels while
/// another computes.
pub(super) struct BlockAttention<'a, D: Device> {
    device: &'a D,
    heads: Heads,
    plan: &'a AttentionPlan,
    exchange: &'a mut dyn SequenceExchange<D>,
    ranges: Vec<Range<usize>>,
    buffers: &'a mut BlockBuffers<D>,
}

impl<'a, D: Device> BlockAttention<'a, D> {
    pub fn new(
        device: &'a D,
        heads: Heads,
        plan: &'a AttentionPlan,
        exchange: &'a mut dyn SequenceExchange<D>,
        buffers: &'a mut BlockBuffers<D>,
    ) -> Self {
        let ranges = head_ranges(heads.key_value_heads, exchange.head_groups());
        let numbers = ranges.iter().map(|range| plan.blocks * AttentionPlan::block_numbers(range.len(), heads.head_dim));
        reserve(device, &mut buffers.blocks, numbers);
        BlockAttention { device, heads, plan, exchange, ranges, buffers }
    }

    /// Fills the blocks with a layer's keys and values, of all ranks, and hands each group to `ready` while the next one travels.
    fn fill(&mut self, rotated: &D::Buffer, ready: &mut dyn FnMut(Range<usize>, &D::Buffer)) {
        let (device, heads, plan, ranges) = (self.device, self.heads, self.plan, &self.ranges);
        let share = |group: usize| plan.shared * AttentionPlan::block_numbers(ranges[group].len(), heads.head_dim);
        in_groups::<D>(
            self.exchange,
            ranges.len(),
            &mut self.buffers.blocks[..ranges.len()],
            &share,
            &mut |group, blocks| device.write_key_blocks(rotated, heads, ranges[group].clone(), plan, blocks),
            &mut |group, blocks| ready(ranges[group].clone(), blocks),
        );
    }

    /// Fills the blocks with the keys and values of a layer whose forward lies back.
    pub fn fill_again(&mut self, rotated: &D::Buffer) {
        self.fill(rotated, &mut |_, _| {});
    }

    /// `drotated: [rows, projected_width]` from the layer's blocks and what [`Attention::attend`] gave. `delta: [rows, query_heads]` is
    /// room to work in.
    pub fn backward(
        &mut self,
        dattended: &D::Buffer,
        rotated: &D::Buffer,
        attended: &D::Buffer,
        log_sum_exp: &D::Buffer,
        delta: &mut D::Buffer,
        drotated: &mut D::Buffer,
    ) {
        let (device, heads, plan, ranges) = (self.device, self.heads, self.plan, &self.ranges);
        device.attention_delta(dattended, attended, heads, plan.rows(), delta);
        let rows = AttendedRows { rotated, doutput: dattended, log_sum_exp, delta };
        let all_rows = self.exchange.ranks() * plan.queries.rows;
        let BlockBuffers { blocks, queries } = &mut *self.buffers;
        let numbers = query_buffers(heads, ranges).map(|numbers| all_rows * numbers);
        let share = |group: usize| plan.queries.rows * AttentionPlan::query_numbers(heads, &ranges[group]);
        in_groups::<D>(
            self.exchange,
            ranges.len(),
            reserve(device, queries, numbers),
            &share,
            &mut |group, queries| device.write_shared_queries(rows, heads, ranges[group].clone(), plan, queries),
            &mut |group, queries| {
                let range = ranges[group].clone();
                device.block_attention_backward(rows, heads, range, plan, &blocks[group], queries, drotated);
            },
        );
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

/// Exchanges something of each of `groups` groups of heads: `write` fills this rank's part of a buffer, `share` numbers of which travel, and
/// `ready` is handed the group with all ranks' parts while the next one travels. Groups take turns in the buffers: one for each, or
/// two.
///
/// ```text
/// travel   |         | gather 0 | gather 1 | gather 2 |
/// compute  | write 0 | write 1  | ready 0  | ready 1  | ready 2
///          |         |          | write 2  |          |
/// ```
fn in_groups<D: Device>(
    exchange: &mut dyn SequenceExchange<D>,
    groups: usize,
    buffers: &mut [D::Buffer],
    share: &dyn Fn(usize) -> usize,
    write: &mut dyn FnMut(usize, &mut D::Buffer),
    ready: &mut dyn FnMut(usize, &D::Buffer),
) {
    let count = buffers.len();
    write(0, &mut buffers[0]);
    // The one that travels is away meanwhile.
    let mut here: Vec<Option<&mut D::Buffer>> = buffers.iter_mut().map(Some).collect();
    for group in 0..groups {
        let Some(travels) = here[group % count].take() else { continue };
        exchange.gather(travels, share(group), &mut || {
            if let Some(before) = group.checked_sub(1)
                && let Some(arrived) = &here[before % count]
            {
                ready(before, arrived);
            }
            if group + 1 < groups
                && let Some(next) = &mut here[(group + 1) % count]
            {
                write(group + 1, next);
            }
        });
        here[group % count] = Some(travels);
    }
    ready(groups - 1, &buffers[(groups - 1) % count]);
}

/// Makes buffers at least as long as `numbers` says, and gives them. What must grow is dropped first.
fn reserve<'a, D: Device>(
    device: &D,
    buffers: &'a mut Vec<D::Buffer>,
    numbers: impl Iterator<Item = usize>,
) -> &'a mut [D::Buffer] {
    let mut count = 0;
    for numbers in numbers {
        match buffers.get_mut(count) {
            Some(buffer) if device.length(buffer) >= numbers => {}
            Some(buffer) => {
                *buffer = device.zeros(Role::Activations, 0);
                *buffer = device.zeros(Role::Activations, numbers);
            }
            None => buffers.push(device.zeros(Role::Activations, numbers)),
        }
        count += 1;
    }
    &mut buffers[..count]
}
