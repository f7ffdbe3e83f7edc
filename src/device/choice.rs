//! The names of devices, as `--device` and run files give them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// `cpu`
    Cpu,
    /// `cuda`, or `cuda:N` for the GPU that the driver numbers `N`
    Cuda { ordinal: usize },
    /// `emulated`, or `emulated:N` for a machine of `N` emulated GPUs
    Emulated { count: usize },
}

/// Whose matrix products a GPU runs. `own` or `cublaslt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmLibrary {
    /// Ours: k is never split, and a row's bits do not depend on the other rows.
    #[default]
    Own,
    /// cuBLASLt chooses its kernels by shape: sampled and recomputed log-probabilities may then differ.
    CublasLt,
}

impl FromStr for GemmLibrary {
    type Err = String;

    fn from_str(text: &str) -> Result<GemmLibrary, String> {
        match text {
            "own" => Ok(GemmLibrary::Own),
            "cublaslt" => Ok(GemmLibrary::CublasLt),
            _ => Err(format!("{text:?} is neither own nor cublaslt")),
        }
    }
}

/// Emulated GPUs of one machine at most: each reserves its own range of addresses.
const MOST_EMULATED: usize = 16;

impl FromStr for DeviceChoice {
    type Err = String;

    /// # Errors
    /// Says what was found and what would do.
    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        let unknown = || format!("{text:?} is no device: cpu, cuda, cuda:N, emulated or emulated:N");
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number.parse::<usize>().map_err(|_| unknown())?)),
            None => (text, None),
        };
        match (name, number) {
            ("cpu", None) => Ok(DeviceChoice::Cpu),
            ("cuda", ordinal) => Ok(DeviceChoice::Cuda { ordinal: ordinal.unwrap_or(0) }),
            ("emulated", count) => match count.unwrap_or(1) {
                count @ 1..=MOST_EMULATED => Ok(DeviceChoice::Emulated { count }),
                count => Err(format!("emulated:{count}: 1 to {MOST_EMULATED} emulated GPUs can be had")),
            },
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => write!(formatter, "cpu"),
            DeviceChoice::Cuda { ordinal } => write!(formatter, "cuda:{ordinal}"),
            DeviceChoice::Emulated { count } => write!(formatter, "emulated:{count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_others_refused_with_what_would_do() {
        for (text, choice) in [
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda { ordinal: 0 }),
            ("cuda:3", DeviceChoice::Cuda { ordinal: 3 }),
            ("emulated", DeviceChoice::Emulated { count: 1 }),
            ("emulated:8", DeviceChoice::Emulated { count: 8 }),
        ] {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for text in ["", "gpu", "cpu:1", "cuda:", "cuda:x", "cuda:-1", "emulated:0", "emulated:17", "CUDA", "emulated:8:1"] {
            let error = text.parse::<DeviceChoice>().expect_err(text);
            assert!(error.contains("emulated") && !error.contains('\n'), "{error}");
        }
    }
}
