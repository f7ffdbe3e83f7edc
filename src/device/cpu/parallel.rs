//! Work for all threads: independent pieces by index, never a reduction.

use std::cell::RefCell;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

/// Below this many elementary operations, waking another thread costs more than it saves.
const WORTH_SHARING: usize = 32 * 1024;

/// Calls `piece(index)` for `0..pieces`, on all threads of the current pool where `operations` in all are worth it.
pub fn for_each(pieces: usize, operations: usize, piece: impl Fn(usize) + Sync + Send) {
    if pieces <= 1 || operations < WORTH_SHARING || rayon::current_num_threads() == 1 {
        (0..pieces).for_each(piece);
    } else {
        (0..pieces).into_par_iter().for_each(piece);
    }
}

/// A pointer that several threads write through, each to its own elements.
#[derive(Clone, Copy)]
pub struct Shared(*mut f32);

// SAFETY: `Shared` only carries the address; whoever dereferences it promises that no element is shared (see `slice`).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub fn new(values: &mut [f32]) -> Shared {
        Shared(values.as_mut_ptr())
    }

    pub fn pointer(self) -> *mut f32 {
        self.0
    }

    /// # Safety
    /// The elements must lie inside the slice that `self` was made from, which must outlive the result, and no other
    /// thread may touch them meanwhile.
    pub unsafe fn slice<'a>(self, start: usize, length: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), length) }
    }
}

/// Calls `piece(first row, rows)` on consecutive row blocks of `buffers`, given as (values, row width): each piece gets its own rows.
pub fn for_row_blocks<const N: usize>(
    rows: usize,
    operations_per_row: usize,
    buffers: [(&mut [f32], usize); N],
    piece: impl Fn(usize, usize, [&mut [f32]; N]) + Sync + Send,
) {
    let widths: [usize; N] = std::array::from_fn(|index| buffers[index].1);
    for (values, width) in &buffers {
        assert!(values.len() >= rows * width, "buffer of {} elements is too short for {rows} rows of {width}", values.len());
    }
    let shared = buffers.map(|(values, _)| Shared::new(values));
    let block = ROW_BLOCK;
    for_each(rows.div_ceil(block), rows * operations_per_row, |index| {
        let first = index * block;
        let count = block.min(rows - first);
        // SAFETY: blocks are disjoint ranges of rows, and the assertion above keeps them inside each buffer.
        piece(first, count, std::array::from_fn(|i| unsafe { shared[i].slice(first * widths[i], count * widths[i]) }));
    });
}

/// Rows of one piece of row-wise work. Also the unit of partial sums over rows (weight gradients of norms, biases), so it
/// is part of the results: a constant, never derived from the number of threads.
pub const ROW_BLOCK: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends this thread's scratch memory; its contents are whatever was left there. Must not be nested.
pub fn with_scratch<R>(length: usize, work: impl FnOnce(&mut [f32]) -> R) -> R {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < length {
            scratch.resize(length, 0.0);
        }
        work(&mut scratch[..length])
    })
}
