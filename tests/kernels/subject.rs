//! On which devices a test runs, and what must hold whatever it tests: two runs give the same bits.

use learner::device::{CpuDevice, Device, LinearWeights, Role};

use crate::accept::assert_same_bits;
use crate::reference::Precision;

/// A kind of device that can be tested.
pub trait Testable: Device {
    /// What it stores [`Role::Activations`] in, as far as the reference can tell.
    const ACTIVATIONS: Precision;
}

impl Testable for CpuDevice {
    const ACTIVATIONS: Precision = Precision::Exact;
}

/// A device under test: makes a fresh one for every run, attention reducing over segments of `segment` keys.
pub struct Subject<D: Testable> {
    runs: usize,
    segment: Option<usize>,
    make: fn(run: usize, segment: Option<usize>) -> D,
    /// Called after each run, when the device and all its buffers are gone.
    after: fn(run: usize),
}

impl<D: Testable> Subject<D> {
    /// The same device with shorter segments, so that short sequences have several.
    pub fn with_segment(&self, keys: usize) -> Subject<D> {
        Subject { segment: Some(keys), ..*self }
    }

    /// Runs `work` on every variant of the device (each schedule of an emulated one; at least twice) and gives its results, which
    /// must be the same bits in all.
    #[track_caller]
    pub fn run<const N: usize>(&self, work: impl Fn(&D) -> [Vec<f32>; N]) -> [Vec<f32>; N] {
        let once = |run: usize| {
            let device = (self.make)(run, self.segment);
            let results = work(&device);
            drop(device);
            (self.after)(run);
            results
        };
        let first = once(0);
        for run in 1..self.runs {
            for (index, (a, b)) in first.iter().zip(&once(run)).enumerate() {
                assert_same_bits(&format!("result {index} of runs 0 and {run}"), a, b);
            }
        }
        first
    }
}

pub fn cpu() -> Subject<CpuDevice> {
    let make = |_, segment: Option<usize>| segment.map_or_else(CpuDevice::new, CpuDevice::with_attention_segment);
    Subject { runs: 2, segment: None, make, after: |_| {} }
}

/// Declares each of these functions, which take a [`Subject`], as one test per device.
macro_rules! on_every_device {
    ($($test:ident),* $(,)?) => {
        mod cpu {
            $(#[test]
            fn $test() {
                super::$test(&crate::subject::cpu());
            })*
        }
    };
}
pub(crate) use on_every_device;

/// A weight matrix with the copy that products read.
pub struct Matrix<D: Device> {
    pub values: D::Buffer,
    pub packed: D::Packed,
    outputs: usize,
    inputs: usize,
}

impl<D: Device> Matrix<D> {
    pub fn new(device: &D, values: &[f32], inputs: usize) -> Matrix<D> {
        let outputs = values.len() / inputs;
        let values = device.upload(Role::Weights, values);
        let packed = device.pack(&values, outputs, inputs);
        Matrix { values, packed, outputs, inputs }
    }
    pub fn linear(&self) -> LinearWeights<'_, D> {
        LinearWeights { values: &self.values, packed: &self.packed, outputs: self.outputs, inputs: self.inputs }
    }
}

/// Uploads activations.
pub fn activations<D: Device>(device: &D, values: &[f32]) -> D::Buffer {
    device.upload(Role::Activations, values)
}

/// Everything in a buffer.
pub fn all<D: Device>(device: &D, buffer: &D::Buffer) -> Vec<f32> {
    device.read(buffer, 0, device.length(buffer))
}
