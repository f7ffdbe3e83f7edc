//! Named ranges for NVIDIA's profilers (NVTX), where its library is installed.
//!
//! The library is looked for at run time; without it nothing is marked. Toolkits from CUDA 12.9 on no longer bring
//! `libnvToolsExt.so`: Nsight Systems then shows kernels by name, and the operations are in the Chrome trace.

use cudarc::nvtx::{result, sys};

use crate::device::traced::Ranges;

pub struct Nvtx;

impl Nvtx {
    /// `None` if there is no `libnvToolsExt.so` under any of its names.
    pub fn find() -> Option<Nvtx> {
        // SAFETY: only looks for the library. Every call of cudarc's nvtx without it would panic.
        unsafe { sys::is_culib_present() }.then_some(Nvtx)
    }
}

impl Ranges for Nvtx {
    fn begin(&self, name: &str) {
        result::range_push(name);
    }
    fn end(&self) {
        result::range_pop();
    }
}
