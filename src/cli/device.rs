//! Opens the device that a command was asked to run on, and runs its work there.

use super::CliError;
use crate::device::{CpuDevice, Device, DeviceChoice};

/// What a command does with a device, whichever it is.
pub trait Work {
    fn on<D: Device>(self, device: D) -> Result<(), CliError>;
}

/// Runs `work` on the device of that name. A device that cannot be had is refused before the work starts.
pub fn run_on(choice: DeviceChoice, work: impl Work) -> Result<(), CliError> {
    match choice {
        DeviceChoice::Cpu => work.on(CpuDevice::new()),
        DeviceChoice::Cuda { .. } | DeviceChoice::Emulated { .. } => {
            Err(CliError::Refused(format!("{choice}: not in this build")))
        }
    }
}
