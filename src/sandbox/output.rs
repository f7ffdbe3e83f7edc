//! A program's output, kept in bounded memory: its first and its last bytes.

use std::collections::VecDeque;

/// Keeps the first and the last `capacity / 2` bytes of a stream, and counts the rest.
#[derive(Debug)]
pub struct HeadAndTail {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_capacity: usize,
    tail_capacity: usize,
    total: u64,
}

impl HeadAndTail {
    pub fn new(capacity: u64) -> HeadAndTail {
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        let head_capacity = capacity - capacity / 2;
        HeadAndTail { head: Vec::new(), tail: VecDeque::new(), head_capacity, tail_capacity: capacity / 2, total: 0 }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let (to_head, rest) = bytes.split_at(bytes.len().min(self.head_capacity - self.head.len()));
        self.head.extend_from_slice(to_head);
        let rest = &rest[rest.len().saturating_sub(self.tail_capacity)..];
        let surplus = (self.tail.len() + rest.len()).saturating_sub(self.tail_capacity);
        self.tail.drain(..surplus);
        self.tail.extend(rest);
    }

    /// Bytes written by the program, kept or not.
    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn truncated(&self) -> bool {
        self.total > (self.head.len() + self.tail.len()) as u64
    }

    /// What was kept; where bytes were dropped between head and tail, a line says how many.
    pub fn into_bytes(self) -> Vec<u8> {
        let dropped = self.total - (self.head.len() + self.tail.len()) as u64;
        let mut bytes = self.head;
        if dropped > 0 {
            bytes.extend_from_slice(format!("\n[{dropped} bytes left out]\n").as_bytes());
        }
        bytes.extend(self.tail);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn head_and_tail_of_a_long_stream() {
        let mut kept = HeadAndTail::new(8);
        for chunk in [&b"abc"[..], b"defghij", b"klm"] {
            kept.push(chunk);
        }
        assert_eq!((kept.total(), kept.truncated()), (13, true));
        assert_eq!(kept.into_bytes(), b"abcd\n[5 bytes left out]\njklm");
    }

    proptest! {
        #[test]
        fn chunking_does_not_matter(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..200, capacity in 0u64..100) {
            let (mut whole, mut parts) = (HeadAndTail::new(capacity), HeadAndTail::new(capacity));
            whole.push(&bytes);
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            parts.push(first);
            parts.push(second);
            prop_assert_eq!(whole.truncated(), bytes.len() as u64 > capacity);
            prop_assert_eq!(whole.into_bytes(), parts.into_bytes());
        }
    }
}
