//! Kernels by name, and their launches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use cudarc::driver::CudaEvent;

use super::arguments::{Arguments, LaunchShape};
use super::driver::{Function, Gpu, Module};
use super::error::{DeviceError, name_of, raise};

/// Blocks per multiprocessor of a kernel that strides over its work: enough to fill it with any block size.
const BLOCKS_PER_MULTIPROCESSOR: usize = 8;

#[derive(Clone, Copy)]
struct Kernel {
    function: Function,
    shape: LaunchShape,
}

/// The loaded kernels of one device.
pub struct Kernels {
    gpu: Arc<Gpu>,
    modules: Vec<Module>,
    /// Those that were launched before.
    known: RwLock<HashMap<String, Kernel>>,
    /// While launches are timed: each with the moments before and after it.
    timed: Mutex<Option<Vec<(String, CudaEvent, CudaEvent)>>>,
}

/// One timed launch.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchTime {
    pub kernel: String,
    pub microseconds: f64,
}

impl Kernels {
    /// Loads images given as (name, contents).
    pub fn load(gpu: Arc<Gpu>, images: &[(&str, &[u8])]) -> Result<Kernels, DeviceError> {
        let load = |(name, image): &(&str, &[u8])| {
            gpu.load(image).map_err(|error| DeviceError::Kernels {
                device: gpu.name.clone(),
                problem: format!("{name} is refused with {}: it needs compute capability 8.0 or later, and a driver as new as the CUDA that compiled it",
                    name_of(error)),
            })
        };
        let modules = images.iter().map(load).collect::<Result<_, _>>()?;
        Ok(Kernels { gpu, modules, known: RwLock::default(), timed: Mutex::default() })
    }

    /// Launches a kernel over `grid` blocks; nothing if there are none.
    pub fn launch<A: Arguments>(&self, name: &str, grid: [usize; 3], arguments: &A) {
        if grid.contains(&0) {
            return;
        }
        let kernel = self.kernel(name);
        let takes = kernel.shape.argument_bytes as usize;
        if takes != size_of::<A>() {
            raise(format!(
                "kernel {name} takes {takes} bytes of arguments, not {}: arguments.rs and arguments.h differ",
                size_of::<A>()
            ));
        }
        let grid =
            grid.map(|blocks| u32::try_from(blocks).unwrap_or_else(|_| raise(format!("{blocks} blocks of {name} are too many"))));
        let (threads, shared) = (kernel.shape.threads as u32, kernel.shape.shared_bytes as u32);
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        let before = timed.as_ref().map(|_| self.gpu.moment());
        // SAFETY: the kernel takes this struct; its addresses are of buffers that the calling operation has measured.
        let launched = unsafe { self.gpu.launch(kernel.function, grid, threads, shared, arguments) };
        launched.unwrap_or_else(|error| self.gpu.fail(&format!("launching {name}"), error));
        if let (Some(timed), Some(before)) = (timed.as_mut(), before) {
            timed.push((name.to_string(), before, self.gpu.moment()));
        }
    }

    /// From now on every launch is timed, until [`Kernels::take_times`].
    pub fn time_launches(&self) {
        *self.timed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// The launches since [`Kernels::time_launches`], in order.
    pub fn take_times(&self) -> Vec<LaunchTime> {
        let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        let time = |(kernel, before, after): (String, CudaEvent, CudaEvent)| {
            let microseconds = self.gpu.microseconds(&before, &after);
            LaunchTime { kernel, microseconds }
        };
        timed.into_iter().map(time).collect()
    }

    /// Launches a kernel whose blocks stride over work for `threads` threads.
    pub fn launch_striding<A: Arguments>(&self, name: &str, threads: usize, arguments: &A) {
        let blocks = threads.div_ceil(self.kernel(name).shape.threads as usize);
        self.launch(name, [blocks.min(self.gpu.multiprocessors * BLOCKS_PER_MULTIPROCESSOR), 1, 1], arguments);
    }

    fn kernel(&self, name: &str) -> Kernel {
        if let Some(&kernel) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            return kernel;
        }
        let kernel = self.find(name).unwrap_or_else(|problem| raise(format!("kernel {name} {problem}")));
        self.known.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_string(), kernel);
        kernel
    }

    fn find(&self, name: &str) -> Result<Kernel, String> {
        let find = |module: &Module| Some((module.function(name)?, module.variable(&format!("{name}_launch"))?));
        let (function, (address, bytes)) = self.modules.iter().find_map(find).ok_or("is not in this binary")?;
        if bytes != size_of::<LaunchShape>() {
            return Err(format!("describes itself in {bytes} bytes"));
        }
        // SAFETY: a variable of this size and of four integers.
        let shape = unsafe { self.gpu.read::<i32>(address, 4) };
        let &[threads, shared_bytes, argument_bytes, reserved] = &shape[..] else {
            return Err("describes itself badly".to_string());
        };
        let shape = LaunchShape { threads, shared_bytes, argument_bytes, reserved };
        if shared_bytes as usize > self.gpu.shared_memory {
            return Err(format!("needs {shared_bytes} bytes of shared memory, and a block has {} here", self.gpu.shared_memory));
        }
        function.allow_shared_memory(shared_bytes).map_err(name_of)?;
        Ok(Kernel { function, shape })
    }
}
