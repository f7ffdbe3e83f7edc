//! Small tables that operations take from the host: ids, positions, spans, tiles.
//!
//! Every layer of a pass asks for the same ones, so the last table of each kind stays on the device and is sent again only when its
//! content has changed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::allocator::{Allocator, Memory, Purpose};
use super::arguments::{Address, AttentionKeys, AttentionSpan};
use super::driver::Gpu;

/// What a table is for; there is one of each on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Table {
    Ids,
    GatheredRows,
    ScatteredRows,
    Positions,
    GroupedRows,
    GroupStarts,
    GroupIds,
    AppendedSpans,
    SpanOfRow,
    Pages,
    DecodeSpans,
    ForwardTiles,
    BlockPages,
    BlockTiles,
    ContributedRows,
    WholeKeys,
    WholeTiles,
    SharedKeys,
    SharedTiles,
    Targets,
    LogProbCotangents,
    EntropyCotangents,
    Uniforms,
}

/// A number, or a plain struct of numbers without padding, that a table may hold.
///
/// # Safety
/// All bytes of the type are initialised.
pub unsafe trait Element: Copy {}
// SAFETY: numbers, and structs of i32.
unsafe impl Element for i32 {}
// SAFETY: as above.
unsafe impl Element for i64 {}
// SAFETY: as above.
unsafe impl Element for u64 {}
// SAFETY: as above.
unsafe impl Element for f32 {}
// SAFETY: as above.
unsafe impl Element for f64 {}
// SAFETY: as above.
unsafe impl Element for AttentionSpan {}
// SAFETY: as above.
unsafe impl Element for AttentionKeys {}

pub struct Tables {
    gpu: Arc<Gpu>,
    allocator: Arc<Allocator>,
    /// The content of each table and the memory that holds it.
    held: Mutex<HashMap<Table, (Vec<u8>, Memory)>>,
}

impl Tables {
    pub fn new(gpu: Arc<Gpu>, allocator: Arc<Allocator>) -> Tables {
        Tables { gpu, allocator, held: Mutex::default() }
    }

    /// The address of `values` on the device, good for launches until this table is asked for with other values.
    pub fn upload<T: Element>(&self, table: Table, values: &[T]) -> Address {
        // SAFETY: all bytes of an element are initialised.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        let mut held = self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((content, memory)) = held.get(&table)
            && content == bytes
        {
            return memory.address();
        }
        let memory = self.allocator.allocate(Purpose::Workspace, bytes.len());
        // SAFETY: the memory is as long; kernels that read the table before this one are ahead of it in the stream.
        unsafe { self.gpu.write(memory.address(), bytes) };
        let address = memory.address();
        held.insert(table, (bytes.to_vec(), memory));
        address
    }
}

/// Indices as kernels take them. All of them count things of one pass, or ids below a vocabulary.
pub fn narrow(indices: impl IntoIterator<Item = usize>) -> Vec<i32> {
    indices.into_iter().map(|index| i32::try_from(index).unwrap_or_else(|_| panic!("index {index} is beyond 31 bits"))).collect()
}
