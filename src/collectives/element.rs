//! What collectives carry: numbers of fixed size, little-endian on the wire, and how two of them become one.

use std::fmt::Debug;

use half::bf16;

use super::Reduction;

mod sealed {
    pub trait Sealed {}
}

/// A value that collectives carry.
pub trait Element: Copy + Default + PartialEq + Debug + Send + Sync + sealed::Sealed + 'static {
    /// As messages and headers name it.
    const NAME: &'static str;
    /// Its number in a message's header.
    const CODE: u8;
    const BYTES: usize;

    fn append_to(self, bytes: &mut Vec<u8>);
    /// `bytes` has exactly [`Element::BYTES`].
    fn read(bytes: &[u8]) -> Self;
}

/// A value that reductions combine. The value of rank 0 comes first, then each rank's in rank order.
pub trait Number: Element {
    /// What partial results are kept in: f32 for bf16, so that a sum is rounded once and not per rank.
    type Accumulator: Copy;

    fn widen(self) -> Self::Accumulator;
    fn narrow(accumulated: Self::Accumulator) -> Self;
    fn combine(accumulated: Self::Accumulator, next: Self, reduction: Reduction) -> Self::Accumulator;
}

macro_rules! element {
    ($type:ty, $name:literal, $code:literal) => {
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const NAME: &'static str = $name;
            const CODE: u8 = $code;
            const BYTES: usize = size_of::<$type>();

            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
            fn read(bytes: &[u8]) -> $type {
                let mut own = [0; size_of::<$type>()];
                own.copy_from_slice(bytes);
                <$type>::from_le_bytes(own)
            }
        }
    };
}

element!(u8, "u8", 1);
element!(u64, "u64", 2);
element!(bf16, "bf16", 3);
element!(f32, "f32", 4);
element!(f64, "f64", 5);

/// Counts of tokens and bytes. A sum wraps, as NCCL's does.
impl Number for u64 {
    type Accumulator = u64;

    fn widen(self) -> u64 {
        self
    }
    fn narrow(accumulated: u64) -> u64 {
        accumulated
    }
    fn combine(accumulated: u64, next: u64, reduction: Reduction) -> u64 {
        match reduction {
            Reduction::Sum => accumulated.wrapping_add(next),
            Reduction::Max => accumulated.max(next),
        }
    }
}

macro_rules! float {
    ($type:ty, $accumulator:ty, $widen:expr, $narrow:expr) => {
        /// The maximum is NaN if any rank's value is (the first one's bits), and of two equal values the first one's: a rank whose
        /// gradients have gone wrong is seen by all.
        impl Number for $type {
            type Accumulator = $accumulator;

            fn widen(self) -> $accumulator {
                $widen(self)
            }
            fn narrow(accumulated: $accumulator) -> $type {
                $narrow(accumulated)
            }
            fn combine(accumulated: $accumulator, next: $type, reduction: Reduction) -> $accumulator {
                let next = next.widen();
                match reduction {
                    Reduction::Sum => accumulated + next,
                    Reduction::Max if accumulated.is_nan() || accumulated >= next => accumulated,
                    Reduction::Max => next,
                }
            }
        }
    };
}

float!(f32, f32, |value| value, |value| value);
float!(f64, f64, |value| value, |value| value);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);

/// The bytes of `values` as they cross a wire.
pub(super) fn to_bytes<T: Element>(values: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * T::BYTES);
    for value in values {
        value.append_to(&mut bytes);
    }
    bytes
}

/// Fills `values` from as many bytes as they have.
pub(super) fn from_bytes<T: Element>(bytes: &[u8], values: &mut [T]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = T::read(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_maximum_shows_the_first_nan_and_keeps_the_first_of_equals() {
        let max = |a: f32, b: f32| f32::combine(a, b, Reduction::Max).to_bits();
        assert_eq!(max(1.0, f32::NAN), f32::NAN.to_bits());
        assert_eq!(max(f32::NAN, 1.0), f32::NAN.to_bits());
        assert_eq!(max(-0.0, 0.0), (-0.0f32).to_bits());
        assert_eq!(max(0.0, -0.0), 0.0f32.to_bits());
        assert_eq!(max(f32::NEG_INFINITY, -1.0), (-1.0f32).to_bits());
    }

    #[test]
    fn a_sum_of_bf16_is_rounded_once() {
        // 256 + 1 is 256 in bf16 (8 bits of mantissa): rounded at each step the ones would vanish.
        let values = [256.0, 1.0, 1.0, 1.0, 1.0].map(bf16::from_f32);
        let sum = values[1..].iter().fold(values[0].widen(), |sum, &value| bf16::combine(sum, value, Reduction::Sum));
        assert_eq!(bf16::narrow(sum).to_f32(), 260.0);
    }

    #[test]
    fn every_bit_survives_the_wire() {
        let values = [0.0f32, -0.0, f32::NAN, f32::from_bits(0x7fa0_0001), f32::MIN_POSITIVE / 2.0, 1.5];
        let bytes = to_bytes(&values);
        assert_eq!(bytes.len(), 24);
        assert_eq!(bytes[20..], [0, 0, 0xc0, 0x3f]);
        let mut back = [0.0f32; 6];
        from_bytes(&bytes, &mut back);
        assert_eq!(back.map(f32::to_bits), values.map(f32::to_bits));
    }
}
