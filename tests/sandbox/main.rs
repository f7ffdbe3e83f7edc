//! Programs in the sandbox: honest ones and hostile ones, in both tiers.

#![cfg(target_os = "linux")]

mod speed;
