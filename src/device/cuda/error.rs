//! What can go wrong: before the device is there, an error; while it runs, a failure that unwinds to the command line.
//!
//! Operations of a device give no results to check: what fails while they run (memory, a launch, a finding of the emulated GPU)
//! ends the run, and only its message matters. [`DeviceFailure`] is the payload of such an unwinding; nothing prints a backtrace.

use cudarc::driver::DriverError as CudaError;
use thiserror::Error;

/// Why a device cannot be opened: one line that says what was looked for, where, and how to get it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    #[error("no CUDA driver on this machine: none of {names} is on the loader's path; install NVIDIA's driver")]
    NoDriver { names: String },
    #[error("the CUDA driver finds no device {ordinal}: {problem} (`nvidia-smi` shows what it sees)")]
    NoDevice { ordinal: usize, problem: String },
    #[error("{0}")]
    NotBuilt(&'static str),
    #[error("the kernels do not load on {device}: {problem}")]
    Kernels { device: String, problem: String },
    #[error("one process uses either real or emulated GPUs, and this one has begun with {0}")]
    OtherKindInUse(&'static str),
    #[error("the emulated GPU does not start: {0}")]
    Emulator(String),
    #[error("no cuBLASLt on this machine: none of {names} is on the loader's path; set gemm = \"own\"")]
    NoCublasLt { names: String },
    #[error("cuBLASLt does not start: {0}; set gemm = \"own\"")]
    CublasLt(String),
    #[error(
        "no NCCL on this machine: libnccl.so is not on the loader's path; install NVIDIA's libnccl2 and libnccl-dev, or link \
         libnccl.so to the libnccl.so.2 that you have in a folder of LD_LIBRARY_PATH"
    )]
    NoNccl,
    #[error("NCCL does not start: {0} (NCCL_DEBUG=INFO says more)")]
    Nccl(String),
}

/// A device that failed while it was running, as one line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct DeviceFailure(pub String);

/// Unwinds with a [`DeviceFailure`].
pub fn raise(message: String) -> ! {
    std::panic::resume_unwind(Box::new(DeviceFailure(message)))
}

/// `CUDA_ERROR_OUT_OF_MEMORY` and the like: the driver's own text of an error needs the driver, its name does not.
pub fn name_of(error: CudaError) -> String {
    format!("{:?}", error.0)
}
