//! Opens a GPU, real or emulated, and what is asked of one beside operations: its memory, its times, what the emulator found.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::allocator::{Allocation, Allocator};
use super::arguments::KEYS_PER_PAGE;
use super::cublaslt::CublasLt;
use super::driver::Gpu;
use super::emulator::Emulator;
use super::indices::Tables;
use super::launch::Kernels;
use super::{CudaDevice, DeviceError, EmulatorSettings, Finding, KernelCounters, LaunchTime, Shared, embedded};
use crate::device::GemmLibrary;
use crate::device::cpu::ATTENTION_SEGMENT;

/// The compiled kernels of this binary as (name, image), for real GPUs or for the emulated one: for tests that launch by hand.
#[doc(hidden)]
pub fn kernel_images(real: bool) -> &'static [(&'static str, &'static [u8])] {
    if real { embedded::FAT_BINARIES } else { embedded::EMULATED_KERNELS }
}

/// Whether this process has begun with real GPUs: the driver's library, once loaded, cannot be exchanged for the emulator's.
static REAL_IN_USE: AtomicBool = AtomicBool::new(false);

fn begin_with_real_ones() -> Result<(), DeviceError> {
    if Emulator::is_loaded() {
        return Err(DeviceError::OtherKindInUse("emulated ones"));
    }
    // SAFETY: only looks for the driver's library. Every call of cudarc without one would panic.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(DeviceError::NoDriver { names: "libcuda.so, libcuda.so.1".to_string() });
    }
    REAL_IN_USE.store(true, Ordering::Relaxed);
    Ok(())
}

impl CudaDevice {
    /// GPU `ordinal` of this machine, counted from 0.
    ///
    /// # Errors
    /// One line: there is no driver, no such device, or no kernels in this binary, and how to get it.
    pub fn open(ordinal: usize) -> Result<CudaDevice, DeviceError> {
        begin_with_real_ones()?;
        if let Some(reason) = embedded::NO_FAT_BINARIES {
            return Err(DeviceError::NotBuilt(reason));
        }
        CudaDevice::new(Gpu::open(ordinal, None)?, embedded::FAT_BINARIES)
    }

    /// The GPUs of this machine, as the driver names them, by ordinal.
    ///
    /// # Errors
    /// One line: there is no driver, or it finds none.
    pub fn names() -> Result<Vec<String>, DeviceError> {
        begin_with_real_ones()?;
        Gpu::names()
    }

    /// Emulated GPU `ordinal` of `settings.devices`. The settings are those of all emulated GPUs of the process from now on, but
    /// for the number of devices and their memory, which stay as they were first.
    ///
    /// # Errors
    /// One line: the binary was built without GCC, for another processor, or the process already uses a real GPU.
    pub fn emulated(settings: &EmulatorSettings, ordinal: usize) -> Result<CudaDevice, DeviceError> {
        if REAL_IN_USE.load(Ordering::Relaxed) {
            return Err(DeviceError::OtherKindInUse("real ones"));
        }
        let emulator = Emulator::start(settings)?;
        CudaDevice::new(Gpu::open(ordinal, Some(emulator))?, embedded::EMULATED_KERNELS)
    }

    fn new(gpu: Gpu, images: &[(&str, &[u8])]) -> Result<CudaDevice, DeviceError> {
        let gpu = Arc::new(gpu);
        let kernels = Kernels::load(gpu.clone(), images)?;
        let allocator = Arc::new(Allocator::new(gpu.clone()));
        let tables = Tables::new(gpu.clone(), allocator.clone());
        Ok(CudaDevice {
            shared: Arc::new(Shared { tables, kernels, allocator, gpu }),
            segment: ATTENTION_SEGMENT,
            head_rows: None,
            cublaslt: None,
        })
    }

    /// Why this binary has no kernels for real GPUs, or no emulated GPU: what was missing when it was built.
    pub fn missing_from_the_binary() -> (Option<&'static str>, Option<&'static str>) {
        (embedded::NO_FAT_BINARIES, embedded::NO_EMULATOR)
    }

    /// The same device, its products made by `library`.
    ///
    /// # Errors
    /// One line if there is no cuBLASLt.
    pub fn with_gemm(self, library: GemmLibrary) -> Result<CudaDevice, DeviceError> {
        let cublaslt = match library {
            GemmLibrary::Own => None,
            GemmLibrary::CublasLt => Some(Arc::new(CublasLt::new(self.shared.gpu.clone(), &self.shared.allocator)?)),
        };
        Ok(CudaDevice { cublaslt, ..self })
    }

    /// The same device, its attention reducing over segments of `segment` keys, rounded up to whole pages: for tests, which would
    /// otherwise need sequences beyond 8,192 tokens to see two segments.
    pub fn with_attention_segment(self, segment: usize) -> CudaDevice {
        CudaDevice { segment: segment.max(1).next_multiple_of(KEYS_PER_PAGE), ..self }
    }

    /// The same device, its head computing the logits of `rows` rows at a time: for tests, which would otherwise need thousands of
    /// rows to see a second chunk.
    pub fn with_head_rows(self, rows: usize) -> CudaDevice {
        CudaDevice { head_rows: Some(rows.max(1)), ..self }
    }

    /// The table of memory by purpose.
    pub fn allocations(&self) -> Vec<Allocation> {
        self.shared.allocator.table()
    }

    /// Times every launch from now on with events of the device, until [`CudaDevice::launch_times`].
    pub fn time_launches(&self) {
        self.kernels().time_launches();
    }
    /// The launches since then, in order.
    pub fn launch_times(&self) -> Vec<LaunchTime> {
        self.kernels().take_times()
    }

    // ---- emulated GPUs: empty, and without effect, on real ones ----

    pub fn is_emulated(&self) -> bool {
        self.gpu().emulator.is_some()
    }
    /// Changes the settings of all emulated GPUs of the process.
    pub fn configure(&self, settings: &EmulatorSettings) {
        self.when_emulated(|emulator| emulator.configure(settings));
    }
    /// What the checkers have found since [`CudaDevice::clear_findings`], waiting for the device first.
    pub fn findings(&self) -> Vec<Finding> {
        self.when_emulated(Emulator::findings)
    }
    pub fn clear_findings(&self) {
        self.when_emulated(Emulator::clear_findings);
    }
    /// Counters since [`CudaDevice::clear_counters`].
    pub fn counters(&self) -> Vec<KernelCounters> {
        self.when_emulated(Emulator::counters)
    }
    pub fn clear_counters(&self) {
        self.when_emulated(Emulator::clear_counters);
    }

    fn when_emulated<T: Default>(&self, run: impl FnOnce(&Emulator) -> T) -> T {
        self.gpu().emulator.map_or_else(T::default, |emulator| {
            let _ = self.gpu().drain(); // a lost device still has findings
            run(emulator)
        })
    }
}
