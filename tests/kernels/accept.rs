//! When a kernel's result is accepted: by the rule of DESIGN, section 8.3, which is FlashAttention's.
//!
//! What a device stores in bf16 may be off the exact result by twice what a straightforward bf16 implementation is off, plus one
//! rounding. What it keeps in f32 is held to f32, on every device.

use crate::reference::Precision;
use crate::subject::Testable;

/// The allowance of what is computed in f32, relative to the largest exact value: some hundred roundings of 2^-24.
const FLOAT_TOLERANCE: f64 = 1e-5;

/// A tensor in which `found` is judged: rows of `width`, for naming the worst element.
pub struct Claim<'a> {
    pub what: &'a str,
    pub width: usize,
    pub found: &'a [f32],
    pub exact: &'a [f64],
    /// The same from [`Precision::Bf16`].
    pub naive: &'a [f64],
}

impl Claim<'_> {
    /// Accepts a tensor that the device stores in its precision of activations.
    #[track_caller]
    pub fn accept_activations<D: Testable>(&self) {
        match D::ACTIVATIONS {
            Precision::Exact => self.accept_floats(),
            Precision::Bf16 => {
                let naive = largest(self.exact.iter().zip(self.naive).map(|(exact, naive)| naive - exact));
                self.accept_within(2.0 * naive + rounding_probe(self.exact), &format!("naive bf16 is off by {naive:.3e}"));
            }
        }
    }

    /// Accepts a tensor that is computed and kept in f32.
    #[track_caller]
    pub fn accept_floats(&self) {
        let scale = largest(self.exact.iter().copied());
        self.accept_within(FLOAT_TOLERANCE * scale, &format!("computed in f32, largest value {scale:.3e}"));
    }

    /// Accepts a tensor whose elements may each be off by `allowed`.
    #[track_caller]
    pub fn accept_within(&self, allowed: f64, reason: &str) {
        assert_eq!(self.found.len(), self.exact.len(), "{}: number of elements", self.what);
        let difference = |index: usize| f64::from(self.found[index]) - self.exact[index];
        let broken = self.found.iter().position(|value| !value.is_finite());
        let worst = broken.or_else(|| (0..self.found.len()).max_by(|&a, &b| difference(a).abs().total_cmp(&difference(b).abs())));
        let Some(worst) = worst else { return };
        if broken.is_none() && difference(worst).abs() <= allowed {
            return;
        }
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let relative = squares(&mut (0..self.found.len()).map(difference)) / squares(&mut self.exact.iter().copied());
        panic!(
            "{}: element [{}, {}] is {:e}, exactly {:e}: off by {:.3e}, allowed {allowed:.3e} ({reason}); relative L2 {:.3e}",
            self.what,
            worst / self.width,
            worst % self.width,
            self.found[worst],
            self.exact[worst],
            difference(worst).abs(),
            relative.sqrt(),
        );
    }
}

/// What one rounding step costs at the size of these values: the largest `|(x + 0.3 - 0.3) - x|` in bf16.
fn rounding_probe(values: &[f64]) -> f64 {
    let stored = |value: f64| Precision::Bf16.stored(value);
    largest(values.iter().map(|&value| {
        let x = stored(value);
        stored(stored(x + 0.3) - 0.3) - x
    }))
}

pub fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, value| most.max(value.abs()))
}

/// Equal bit for bit, or a panic that names the first difference.
#[track_caller]
pub fn assert_same_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}: number of elements");
    if let Some(index) = (0..a.len()).find(|&index| a[index].to_bits() != b[index].to_bits()) {
        let count = (0..a.len()).filter(|&index| a[index].to_bits() != b[index].to_bits()).count();
        panic!("{what}: {count} of {} elements differ, the first at {index}: {:e} against {:e}", a.len(), a[index], b[index]);
    }
}
