//! On which devices a test runs, and what must hold whatever it tests: two runs give the same bits.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use learner::device::cuda::{DeviceError, EmulatorSettings, Finding};
use learner::device::{CpuDevice, CudaDevice, Device, LinearWeights, Role};

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

impl Testable for CudaDevice {
    const ACTIVATIONS: Precision = Precision::Bf16;
}

/// A device under test: makes a fresh one for every run, attention reducing over segments of `segment` keys.
pub struct Subject<'a, D: Testable> {
    runs: usize,
    segment: Option<usize>,
    make: fn(run: usize, segment: Option<usize>) -> D,
    /// Called after each run, when the device and all its buffers are gone.
    after: &'a dyn Fn(usize),
}

impl<D: Testable> Subject<'_, D> {
    /// The same device with shorter segments, so that short sequences have several.
    pub fn with_segment(&self, keys: usize) -> Self {
        Subject { segment: Some(keys), ..*self }
    }

    /// Runs `work` on one variant of the device, where all of them would take too long.
    pub fn once<T>(&self, work: impl Fn(&D) -> T) -> T {
        self.run_variant(0, work)
    }

    fn run_variant<T>(&self, run: usize, work: impl Fn(&D) -> T) -> T {
        let device = (self.make)(run, self.segment);
        let results = work(&device);
        drop(device);
        (self.after)(run);
        results
    }

    /// Runs `work` on every variant of the device (each schedule of an emulated one; at least twice) and gives its results, which
    /// must be the same bits in all.
    #[track_caller]
    pub fn run<const N: usize>(&self, work: impl Fn(&D) -> [Vec<f32>; N]) -> [Vec<f32>; N] {
        let first = self.run_variant(0, &work);
        for run in 1..self.runs {
            for (index, (a, b)) in first.iter().zip(&self.run_variant(run, &work)).enumerate() {
                assert_same_bits(&format!("result {index} of runs 0 and {run}"), a, b);
            }
        }
        first
    }
}

pub fn cpu() -> Subject<'static, CpuDevice> {
    let make = |_: usize, segment: Option<usize>| segment.map_or_else(CpuDevice::new, CpuDevice::with_attention_segment);
    Subject { runs: 2, segment: None, make, after: &|_| {} }
}

// ---- the GPU: emulated, or the real one that LEARNER_TEST_DEVICE=cuda asks for ----

pub const EMULATED_DEVICES: usize = 8;

/// Whether to test a real GPU. One process cannot have both kinds.
pub fn is_real() -> bool {
    match std::env::var("LEARNER_TEST_DEVICE").as_deref() {
        Ok("cuda") => true,
        Ok("emulated") | Err(_) => false,
        Ok(other) => panic!("LEARNER_TEST_DEVICE is {other:?}: give \"cuda\" or \"emulated\""),
    }
}

/// All checkers on; run 0 to 3: copies early and late, threads forward and in reverse.
pub fn settings(run: usize) -> EmulatorSettings {
    EmulatorSettings {
        devices: EMULATED_DEVICES,
        late_copies: run % 2 == 1,
        reverse: run / 2 % 2 == 1,
        lazy_streams: run == 2,
        ..EmulatorSettings::default()
    }
}

/// The emulated GPUs of this process, whose settings and findings are one test's at a time.
pub struct Emulated {
    /// A device that no test runs on, there to read what is found on the others, also when they are gone.
    reader: &'static CudaDevice,
    _alone: MutexGuard<'static, ()>,
}

impl Emulated {
    /// None, and a line that says why, if the tests were built without GCC or run on a real GPU.
    pub fn take() -> Option<Emulated> {
        static ALONE: Mutex<()> = Mutex::new(());
        static READER: OnceLock<Option<CudaDevice>> = OnceLock::new();
        if is_real() {
            eprintln!("skipped: it runs on emulated GPUs, and LEARNER_TEST_DEVICE asks for a real one");
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let reader = READER.get_or_init(|| match CudaDevice::emulated(&settings(0), EMULATED_DEVICES - 1) {
            Ok(device) => Some(device),
            Err(DeviceError::NotBuilt(reason)) => {
                eprintln!("skipped: {reason}");
                None
            }
            Err(error) => panic!("{error}"),
        });
        let emulated = Emulated { reader: reader.as_ref()?, _alone: alone };
        emulated.reader.clear_findings();
        Some(emulated)
    }

    pub fn configure(&self, settings: &EmulatorSettings) {
        self.reader.configure(settings);
    }
    /// What was found since the last call.
    pub fn findings(&self) -> Vec<Finding> {
        let findings = self.reader.findings();
        self.reader.clear_findings();
        findings
    }
    #[track_caller]
    pub fn expect_no_findings(&self) {
        let findings: Vec<String> = self.findings().iter().map(Finding::to_string).collect();
        assert!(findings.is_empty(), "the emulated GPU found\n{}", findings.join("\n"));
    }
    pub fn counters(&self) -> Vec<learner::device::cuda::KernelCounters> {
        self.reader.counters()
    }
    pub fn clear_counters(&self) {
        self.reader.clear_counters();
    }
}

/// The real GPU, opened once: the last owner of a context would take it down, and every test would load all kernels again. Its
/// tests run one at a time (`--test-threads=1`).
pub fn real_gpu() -> CudaDevice {
    static GPU: OnceLock<CudaDevice> = OnceLock::new();
    GPU.get_or_init(|| CudaDevice::open(0).unwrap_or_else(|error| panic!("{error}"))).clone()
}

/// Runs a test on the GPU: an emulated one in every schedule, nothing found and nothing leaked in any.
pub fn on_gpu(test: fn(&Subject<CudaDevice>)) {
    fn with_segment(device: Result<CudaDevice, DeviceError>, segment: Option<usize>) -> CudaDevice {
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        match segment {
            Some(keys) => device.with_attention_segment(keys),
            None => device,
        }
    }
    if is_real() {
        let make = |_, segment| with_segment(Ok(real_gpu()), segment);
        test(&Subject { runs: 2, segment: None, make, after: &|_| {} });
        return;
    }
    let Some(emulated) = Emulated::take() else { return };
    let make = |run, segment| with_segment(CudaDevice::emulated(&settings(run), 0), segment);
    // The emulator looks for leaks when a device's context ends, which is when the last clone of the device is dropped.
    test(&Subject { runs: 4, segment: None, make, after: &|_| emulated.expect_no_findings() });
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
        mod gpu {
            $(#[test]
            fn $test() {
                crate::subject::on_gpu(super::$test);
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
