//! Kernels launched by hand through cudarc: for faults that the device's own operations never commit, and for probes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaModule, CudaSlice, CudaStream, DeviceRepr, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// A fresh context on device 0 of whatever driver is loaded, with some modules.
pub struct Gpu {
    modules: Vec<Arc<CudaModule>>,
    pub stream: Arc<CudaStream>,
}

/// Threads and bytes of shared memory that a kernel asks for (`LaunchShape` of `cuda/include/device.h`).
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub threads: u32,
    pub shared_bytes: u32,
    pub argument_bytes: usize,
}

impl Gpu {
    pub fn open(images: &[&[u8]]) -> Gpu {
        let context = CudaContext::new(0).expect("device 0");
        let load = |image: &&[u8]| context.load_module(Ptx::from_binary(image.to_vec())).expect("a module");
        Gpu { modules: images.iter().map(load).collect(), stream: context.new_stream().expect("a stream") }
    }

    fn module_of(&self, kernel: &str) -> &Arc<CudaModule> {
        let module = self.modules.iter().find(|module| module.load_function(kernel).is_ok());
        module.unwrap_or_else(|| panic!("no module has a kernel {kernel}"))
    }

    pub fn upload<T: DeviceRepr + Clone>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).expect("device memory")
    }

    pub fn download<T: DeviceRepr + Clone + Default>(&self, slice: &CudaSlice<T>) -> Vec<T> {
        self.stream.clone_dtoh(slice).expect("a copy from the device")
    }

    pub fn shape(&self, kernel: &str) -> Shape {
        let name = format!("{kernel}_launch");
        let view = self.module_of(kernel).get_global(&name, &self.stream).unwrap_or_else(|error| panic!("{name}: {error}"));
        let bytes = self.stream.clone_dtoh(&view).expect("a launch shape");
        let word = |index: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * index + byte]));
        Shape { threads: word(0), shared_bytes: word(1), argument_bytes: word(2) as usize }
    }

    /// Launches one block with the shape that the kernel asks for, and waits for it.
    ///
    /// # Errors
    /// What the driver says of the launch or of the wait.
    pub fn launch<A: DeviceRepr>(&self, kernel: &str, arguments: &A) -> Result<(), DriverError> {
        let shape = self.shape(kernel);
        assert_eq!(shape.argument_bytes, size_of::<A>(), "the arguments of {kernel} are mirrored wrongly");
        self.launch_shaped(kernel, arguments, shape)
    }

    /// The same with another shape.
    pub fn launch_shaped<A: DeviceRepr>(&self, kernel: &str, arguments: &A, shape: Shape) -> Result<(), DriverError> {
        let function = self.module_of(kernel).load_function(kernel)?;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (shape.threads, 1, 1), shared_mem_bytes: shape.shared_bytes };
        let mut launch = self.stream.launch_builder(&function);
        launch.arg(arguments);
        // SAFETY: the kernel takes this struct; what its addresses lead to is the business of the test, whose faults the emulated
        // GPU stops before they do harm.
        unsafe { launch.launch(config)? };
        self.stream.synchronize()
    }
}
