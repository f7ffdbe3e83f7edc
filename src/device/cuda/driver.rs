//! A thin safe layer over cudarc: one GPU, one stream that orders everything on it, memory and modules.
//!
//! Because all work of a device goes through its one stream, memory that is freed and given out again cannot be written before
//! the kernels that were launched earlier have read it. Only communicators have streams of their own, ordered with this one by
//! events (`nccl`). cudarc's own tracking by events is off.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError as CudaError, result};

use super::arguments::Address;
use super::emulator::Emulator;
use super::error::{DeviceError, name_of, raise};

/// One GPU and its stream.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: usize,
    /// Dynamic shared memory that a block may ask for, in bytes.
    pub shared_memory: usize,
    pub total_memory: usize,
    pub emulator: Option<&'static Emulator>,
}

impl Gpu {
    /// Names of the devices that the driver finds, by ordinal. Opens none of them.
    pub fn names() -> Result<Vec<String>, DeviceError> {
        let count = CudaContext::device_count().map_err(|error| DeviceError::NoDevice { ordinal: 0, problem: name_of(error) })?;
        let name = |ordinal| cudarc::driver::result::device::get(ordinal).and_then(cudarc::driver::result::device::get_name);
        let problem = |ordinal, error| DeviceError::NoDevice { ordinal, problem: name_of(error) };
        (0..count).map(|ordinal| name(ordinal).map_err(|error| problem(ordinal as usize, error))).collect()
    }

    /// Opens device `ordinal` of whatever driver the process has loaded; the caller has made sure that there is one.
    pub fn open(ordinal: usize, emulator: Option<&'static Emulator>) -> Result<Gpu, DeviceError> {
        let problem = |error: CudaError| DeviceError::NoDevice { ordinal, problem: name_of(error) };
        let devices = CudaContext::device_count().map_err(problem)?.max(0) as usize;
        if ordinal >= devices {
            return Err(DeviceError::NoDevice { ordinal, problem: format!("there are {devices}, counted from 0") });
        }
        let context = CudaContext::new(ordinal).map_err(problem)?;
        // SAFETY: everything that this context runs is ordered by the stream below, or with it by events of `nccl`.
        unsafe { context.disable_event_tracking() };
        let attribute = |attribute| context.attribute(attribute).map(|value| value.max(0) as usize).map_err(problem);
        Ok(Gpu {
            stream: context.new_stream().map_err(problem)?,
            name: context.name().map_err(problem)?,
            capability: context.compute_capability().map_err(problem)?,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            total_memory: context.total_mem().map_err(problem)?,
            emulator,
            context,
        })
    }

    /// The calls of the driver act on the context of the calling thread.
    pub fn bound(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread()
    }

    /// The result of a call that only a broken device, or a mistake of ours, can make fail.
    pub fn expect<T>(&self, what: &str, result: Result<T, CudaError>) -> T {
        result.unwrap_or_else(|error| self.fail(what, error))
    }

    pub fn fail(&self, what: &str, error: CudaError) -> ! {
        let findings = self.emulator.map(Emulator::first_finding).unwrap_or_default();
        raise(format!("{what} on {}: {}{findings}", self.name, name_of(error)))
    }

    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits for everything that was asked of the device. On an emulated one, a finding ends the run here.
    pub fn synchronize(&self) {
        self.expect("waiting for the stream", self.drain());
        if let Some(emulator) = self.emulator {
            emulator.raise_findings();
        }
    }

    /// Waits without looking at findings.
    pub fn drain(&self) -> Result<(), CudaError> {
        self.bound()?;
        self.stream.synchronize()
    }

    // ---- other streams ----

    /// A stream beside the device's own, whose blocks go first where both have some: kernels that exchange with other devices wait
    /// for those devices' kernels, and few of them hold up many.
    pub fn urgent_stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.bound()?;
        let (_least, greatest) = result::stream::get_priority_range()?;
        self.context.new_stream_with_priority(greatest)
    }

    /// What is asked of stream `then` from now on begins when everything asked of stream `first` so far is done.
    pub fn order(&self, first: &CudaStream, then: &CudaStream) -> Result<(), CudaError> {
        self.bound()?;
        then.wait(&first.record_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))?)
    }

    // ---- time ----

    /// A moment in the device's stream, to measure from or to.
    pub fn moment(&self) -> CudaEvent {
        self.moment_in(&self.stream)
    }

    pub fn moment_in(&self, stream: &CudaStream) -> CudaEvent {
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        self.expect("recording an event", self.bound().and_then(|()| stream.record_event(timed)))
    }

    /// Waits for both moments: the microseconds between them.
    pub fn microseconds(&self, from: &CudaEvent, to: &CudaEvent) -> f64 {
        f64::from(self.expect("reading an event", from.elapsed_ms(to))) * 1e3
    }

    // ---- memory ----

    /// `bytes` > 0 of device memory with nothing in it.
    pub fn allocate(&self, bytes: usize) -> Result<Address, CudaError> {
        self.bound()?;
        // SAFETY: the stream is alive; whoever reads the memory has written it before.
        unsafe { result::malloc_async(self.stream.cu_stream(), bytes) }
    }

    /// Takes memory back once everything asked for so far is done. Failures are not raised: this runs while unwinding, too.
    ///
    /// # Safety
    /// The address comes from [`Gpu::allocate`], and nothing uses it any more.
    pub unsafe fn free(&self, address: Address) {
        if self.bound().is_ok() {
            // SAFETY: the caller's promise.
            let _ = unsafe { result::free_async(address, self.stream.cu_stream()) };
        }
    }

    /// Free bytes as the driver sees them.
    pub fn free_memory(&self) -> usize {
        self.context.mem_get_info().map_or(0, |(free, _)| free)
    }

    /// # Safety
    /// `to` is the start of as many bytes of device memory.
    pub unsafe fn write<T: Copy>(&self, to: Address, values: &[T]) {
        if values.is_empty() {
            return;
        }
        // SAFETY: the caller's promise; the driver has taken pageable memory when the call returns.
        let copy = || unsafe { result::memcpy_htod_async(to, values, self.stream.cu_stream()) };
        self.expect("copying to the device", self.bound().and_then(|()| copy()));
    }

    /// Waits for the device, then copies from it.
    ///
    /// # Safety
    /// `from` is the start of as many bytes of device memory, which any bit pattern of `T` may hold.
    pub unsafe fn read<T: Copy + Default>(&self, from: Address, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        if count > 0 {
            // SAFETY: the caller's promise; the wait below comes before anybody sees `values`.
            let copy = |values: &mut [T]| unsafe { result::memcpy_dtoh_async(values, from, self.stream.cu_stream()) };
            self.expect("copying from the device", self.bound().and_then(|()| copy(&mut values)));
        }
        self.synchronize();
        values
    }

    /// # Safety
    /// `address` is the start of `bytes` of device memory.
    pub unsafe fn clear(&self, address: Address, bytes: usize) {
        if bytes == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let set = || unsafe { result::memset_d8_async(address, 0, bytes, self.stream.cu_stream()) };
        self.expect("clearing memory", self.bound().and_then(|()| set()));
    }

    /// # Safety
    /// Both addresses are starts of `bytes` of device memory.
    pub unsafe fn copy(&self, from: Address, to: Address, bytes: usize) {
        if bytes == 0 {
            return;
        }
        // SAFETY: the caller's promise.
        let copy = || unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream.cu_stream()) };
        self.expect("copying on the device", self.bound().and_then(|()| copy()));
    }

    // ---- modules ----

    pub fn load(&self, image: &[u8]) -> Result<Module, CudaError> {
        self.bound()?;
        // The driver reads words from the image.
        let mut aligned = vec![0u64; image.len().div_ceil(8) + 1];
        // SAFETY: a vector of words seen as bytes, at least as long as the image.
        let bytes = unsafe { std::slice::from_raw_parts_mut(aligned.as_mut_ptr().cast::<u8>(), image.len()) };
        bytes.copy_from_slice(image);
        // SAFETY: a whole image, with zeros after it.
        let handle = unsafe { result::module::load_data(aligned.as_ptr().cast::<c_void>())? };
        Ok(Module { handle, context: self.context.clone() })
    }

    /// # Safety
    /// `argument` is what the kernel takes, and every address in it is good for what the kernel does with it.
    pub unsafe fn launch<A>(
        &self,
        function: Function,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        argument: &A,
    ) -> Result<(), CudaError> {
        self.bound()?;
        let parameter = std::ptr::from_ref(argument).cast_mut().cast::<c_void>();
        let (grid, block) = ((grid[0], grid[1], grid[2]), (threads, 1, 1));
        // SAFETY: the caller's promise; the driver copies the argument when it is called.
        unsafe { result::launch_kernel(function.0, grid, block, shared, self.stream.cu_stream(), &mut [parameter]) }
    }
}

/// A loaded image; its functions live as long as it does.
pub struct Module {
    handle: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's handles may be used from any thread that has bound the context, as every method does.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: as for the module.
unsafe impl Send for Function {}
// SAFETY: as for the module.
unsafe impl Sync for Function {}

impl Module {
    pub fn function(&self, name: &str) -> Option<Function> {
        self.context.bind_to_thread().ok()?;
        // SAFETY: the module is loaded.
        unsafe { result::module::get_function(self.handle, CString::new(name).ok()?) }.ok().map(Function)
    }

    /// Address and bytes of a variable.
    pub fn variable(&self, name: &str) -> Option<(Address, usize)> {
        self.context.bind_to_thread().ok()?;
        // SAFETY: the module is loaded.
        unsafe { result::module::get_global(self.handle, CString::new(name).ok()?) }.ok()
    }
}

impl Function {
    /// Allows launches with as much dynamic shared memory. The function's context is that of the calling thread.
    pub fn allow_shared_memory(self, bytes: i32) -> Result<(), CudaError> {
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function's module is loaded.
        unsafe { result::function::set_function_attribute(self.0, attribute, bytes) }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: unloaded once, here, and none of its kernels is still running.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}
