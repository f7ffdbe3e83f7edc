//! Keys and values of one sequence at one layer, in pages of 64 keys: `[2 (keys, values), key_value_heads, 64, head_dim]` bf16.

use std::sync::Arc;

use super::allocator::{Allocator, Memory, Purpose};
use super::arguments::{Address, KEYS_PER_PAGE};
use super::driver::Gpu;
use crate::device::ops::Heads;

pub struct PagedKeyValues {
    gpu: Arc<Gpu>,
    allocator: Arc<Allocator>,
    key_value_heads: usize,
    bytes_per_page: usize,
    pages: Vec<Memory>,
    length: usize,
}

impl PagedKeyValues {
    pub fn new(gpu: Arc<Gpu>, allocator: Arc<Allocator>, heads: Heads) -> PagedKeyValues {
        let bytes_per_page = PagedKeyValues::bytes_of(heads, 1);
        PagedKeyValues { gpu, allocator, key_value_heads: heads.key_value_heads, bytes_per_page, pages: Vec::new(), length: 0 }
    }

    /// Bytes of the pages that hold `keys` keys and values of one layer.
    pub fn bytes_of(heads: Heads, keys: usize) -> usize {
        2 * heads.key_value_width() * keys.next_multiple_of(KEYS_PER_PAGE) * size_of::<u16>()
    }

    /// Keys held.
    pub fn length(&self) -> usize {
        self.length
    }

    pub fn clear(&mut self) {
        self.length = 0;
    }

    /// Makes room for `keys` more and counts them as held: the caller writes them.
    pub fn grow(&mut self, keys: usize) {
        self.length += keys;
        while self.pages.len() * KEYS_PER_PAGE < self.length {
            self.pages.push(self.allocator.allocate(Purpose::KeysAndValues, self.bytes_per_page));
        }
    }

    /// Addresses of the pages that hold keys, in order.
    pub fn addresses(&self) -> impl Iterator<Item = Address> + '_ {
        self.pages[..self.length.div_ceil(KEYS_PER_PAGE)].iter().map(Memory::address)
    }
}

/// Another continuation of the same prefix: what the pages hold is copied.
impl Clone for PagedKeyValues {
    fn clone(&self) -> PagedKeyValues {
        let mut copy = PagedKeyValues { gpu: self.gpu.clone(), allocator: self.allocator.clone(), pages: Vec::new(), ..*self };
        copy.length = 0;
        copy.grow(self.length);
        for (index, (from, to)) in self.addresses().zip(copy.addresses()).enumerate() {
            let keys = (self.length - index * KEYS_PER_PAGE).min(KEYS_PER_PAGE);
            self.copy_page(from, to, keys);
        }
        copy
    }
}

impl PagedKeyValues {
    /// A whole page at once; of the last one the part of each head that has been written.
    fn copy_page(&self, from: Address, to: Address, keys: usize) {
        let pieces = if keys == KEYS_PER_PAGE { 1 } else { 2 * self.key_value_heads };
        let pitch = self.bytes_per_page / pieces;
        let bytes = pitch / KEYS_PER_PAGE * keys;
        for piece in 0..pieces {
            let offset = (piece * pitch) as Address;
            // SAFETY: both are whole pages.
            unsafe { self.gpu.copy(from + offset, to + offset, bytes) };
        }
    }
}
