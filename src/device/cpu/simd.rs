//! The processor's vector instructions, chosen at run time, and arithmetic that gives the same bits with and without them.
//!
//! Row-wise functions are written once, as plain loops over `f32::mul_add`, and compiled once per instruction set by
//! [`vectorised!`]: the compiler may vectorise them but may not regroup a float sum, so every body gives the same bits.
//! Only the GEMM tile (`kernel.rs`) uses intrinsics.

use std::sync::OnceLock;

/// Which body of a function runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Plain Rust; `mul_add` is then a correctly rounded library call, slow but with the same bits.
    Scalar,
    Avx2,
    Avx512,
}

impl InstructionSet {
    /// Every set this machine can run, slowest first.
    pub fn available() -> Vec<InstructionSet> {
        #[allow(unused_mut)]
        let mut sets = vec![InstructionSet::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(InstructionSet::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    sets.push(InstructionSet::Avx512);
                }
            }
        }
        sets
    }

    /// The fastest set this machine can run.
    pub fn detected() -> InstructionSet {
        static DETECTED: OnceLock<InstructionSet> = OnceLock::new();
        *DETECTED.get_or_init(|| *InstructionSet::available().last().unwrap_or(&InstructionSet::Scalar))
    }

    pub fn name(self) -> &'static str {
        match self {
            InstructionSet::Scalar => "scalar",
            InstructionSet::Avx2 => "AVX2",
            InstructionSet::Avx512 => "AVX-512",
        }
    }
}

/// Defines a function whose body is compiled once per instruction set and dispatched at run time.
macro_rules! vectorised {
    ($($(#[$meta:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)+) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($argument: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    body($($argument),*)
                }
                #[target_feature(enable = "avx2,fma,avx512f")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($argument: $type),*) $(-> $result)? {
                    body($($argument),*)
                }
                match $crate::device::cpu::simd::InstructionSet::detected() {
                    // SAFETY: `detected` returns a set only after the processor reported its features.
                    $crate::device::cpu::simd::InstructionSet::Avx2 => return unsafe { avx2($($argument),*) },
                    // SAFETY: as above.
                    $crate::device::cpu::simd::InstructionSet::Avx512 => return unsafe { avx512($($argument),*) },
                    $crate::device::cpu::simd::InstructionSet::Scalar => {}
                }
            }
            body($($argument),*)
        }
    )+};
}
pub(crate) use vectorised;

/// Sums are kept in this many lanes by index modulo `LANES`, then folded in halves: an order fixed by the index alone.
pub const LANES: usize = 16;

/// Adds lane `i + width` to lane `i` for width 8, 4, 2, 1.
#[inline(always)]
pub fn fold_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `sum(a[i] * b[i])` in lane order.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] = x[lane].mul_add(y[lane], lanes[lane]);
        }
    }
    for (lane, (x, y)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[lane] = x.mul_add(*y, lanes[lane]);
    }
    fold_lanes(lanes)
}

/// Largest element; NaN is not seen. The order does not matter, a maximum is exact.
#[inline(always)]
pub fn maximum(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, tail) = values.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = if block[lane] > lanes[lane] { block[lane] } else { lanes[lane] };
        }
    }
    let mut largest = f32::NEG_INFINITY;
    for &value in lanes.iter().chain(tail) {
        largest = if value > largest { value } else { largest };
    }
    largest
}

/// `e^x` with a relative error below 2e-7: `2^n * p(r)`, `r = x - n ln 2`, p the polynomial of Cephes' `expf`.
///
/// 0 below -87.3 (also for -inf), capped at `e^88` above, NaN stays NaN. Our own, so that a vector lane, a tail and a
/// scalar give the same bits.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LARGEST: f32 = 88.0;
    const SMALLEST: f32 = -87.3;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let clamped = if x > LARGEST { LARGEST } else { x };
    let clamped = if clamped < SMALLEST { SMALLEST } else { clamped };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN_2_HIGH, clamped);
    let r = n.mul_add(-LN_2_LOW, r);
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    let p = (p * r).mul_add(r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).wrapping_add(127)) << 23);
    let result = p * power;
    if x < SMALLEST { 0.0 } else { result }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorised! {
        fn exp_all(values: &mut [f32]) {
            for value in values.iter_mut() {
                *value = exp(*value);
            }
        }
    }

    #[test]
    fn exp_is_accurate_and_has_the_same_bits_in_every_body() {
        let inputs: Vec<f32> = (0..200_003).map(|i| -100.0 + i as f32 * 0.000_93).collect();
        let mut vector = inputs.clone();
        exp_all(&mut vector);
        for (&x, &y) in inputs.iter().zip(&vector) {
            assert_eq!(y.to_bits(), exp(x).to_bits(), "exp({x})");
            let exact = (x as f64).exp();
            let allowed = if x < -87.3 { 2e-38 } else { 2.0e-7 * exact };
            assert!(x > 88.0 || (y as f64 - exact).abs() <= allowed, "exp({x}) = {y}, exact {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn lane_sums_cover_tails() {
        for length in 0..70 {
            let values: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let ones = vec![1.0; length];
            assert_eq!(dot(&values, &ones), (length * length.saturating_sub(1) / 2) as f32);
            assert_eq!(maximum(&values), values.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
