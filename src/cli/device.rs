//! Opens the device that a command was asked to run on, and runs its work there.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::CliError;
use super::ranks::{Kept, RankError};
use crate::config::RunFile;
use crate::device::cuda::{DeviceFailure, EmulatorSettings};
use crate::device::{CpuDevice, CudaDevice, Device, DeviceChoice, GemmLibrary};
use crate::parallel::{Mesh, Ranks, World};

/// What a command does with a device, whichever it is.
pub trait Work {
    fn on<D: Device>(self, device: D) -> Result<(), CliError>;
}

/// Runs `work` on the device of that name, its matrix products made by `gemm`. A device that cannot be had is refused before the
/// work starts. On an emulated GPU the work fails if the checkers found anything.
pub fn run_on(choice: DeviceChoice, gemm: GemmLibrary, work: impl Work) -> Result<(), CliError> {
    let device = match choice {
        DeviceChoice::Cpu => return work.on(cpu(gemm)?),
        DeviceChoice::Cuda { ordinal } => CudaDevice::open(ordinal),
        DeviceChoice::Emulated { count } => CudaDevice::emulated(&for_work(count), 0),
    };
    let device = device.and_then(|device| device.with_gemm(gemm)).map_err(CliError::refused)?;
    unless_the_device_fails(|| work.on(device.clone()))??;
    unless_something_was_found(&device)
}

fn cpu(gemm: GemmLibrary) -> Result<CpuDevice, CliError> {
    match gemm {
        GemmLibrary::Own => Ok(CpuDevice::new()),
        GemmLibrary::CublasLt => Err(CliError::Refused("gemm = \"cublaslt\": only with a GPU; leave it out".into())),
    }
}

fn unless_something_was_found(device: &CudaDevice) -> Result<(), CliError> {
    match device.findings().as_slice() {
        [] => Ok(()),
        [first, ..] => {
            Err(CliError::Failed(format!("the emulated GPU found {first}; {} findings in all", device.findings().len())))
        }
    }
}

/// What one of several ranks does with its device.
pub trait RankWork {
    fn on<D: Device>(self, device: D, world: World<D>) -> Result<(), RankError>;
}

/// Runs the work of one rank on device `index` of this node, as [`run_on`] does, with links to the other ranks, which are kept until
/// the others know how it ended. What the device fails with unwinds.
pub fn run_rank(
    choice: DeviceChoice,
    run_file: &RunFile,
    index: usize,
    ranks: Ranks,
    mesh: Mesh,
    kept: &mut Kept,
    work: impl RankWork,
) -> Result<(), RankError> {
    let gemm = run_file.run.gemm;
    let device = match choice {
        DeviceChoice::Cpu => {
            let device = cpu(gemm)?;
            let world = World::over_hosts(&device, ranks, mesh)?;
            return work.on(device, world);
        }
        DeviceChoice::Cuda { ordinal } => CudaDevice::open(ordinal + index),
        DeviceChoice::Emulated { count } => CudaDevice::emulated(&for_work(count), index),
    };
    let device = device.and_then(|device| device.with_gemm(gemm)).map_err(CliError::refused)?;
    let world = World::over_nccl(&device, ranks, mesh, &run_file.parallel.liveness())?;
    kept.keep(world.clone());
    work.on(device.clone(), world)?;
    Ok(unless_something_was_found(&device)?)
}

/// Emulated GPUs that are to get something done: races, the costliest check, are left to the tests.
fn for_work(devices: usize) -> EmulatorSettings {
    EmulatorSettings { devices, check_races: false, ..EmulatorSettings::default() }
}

/// A device that fails while it runs unwinds with its message.
pub fn unless_the_device_fails<T>(work: impl FnOnce() -> T) -> Result<T, CliError> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| match payload.downcast::<DeviceFailure>() {
        Ok(failure) => CliError::failed(failure),
        Err(payload) => resume_unwind(payload),
    })
}
