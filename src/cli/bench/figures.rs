//! Figures that several benchmarks print: times, shares of a peak, memory by purpose.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use crate::device::{Device, Traced};
use crate::model::Model;
use crate::types::{self, bytes};

/// Times of repetitions of the same work, in the unit of whoever measured them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of at least one time; the median of an even number is the mean of the middle two.
    pub fn of(mut times: Vec<f64>) -> Spread {
        assert!(!times.is_empty(), "nothing was timed");
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        let median = if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2.0 };
        Spread { median, min: times[0], max: times[times.len() - 1] }
    }
}

/// Runs `work` and waits for the device: its result and the milliseconds of it.
pub fn timed<D: Device, T, E>(device: &D, work: impl FnOnce() -> Result<T, E>) -> Result<(T, f64), E> {
    device.synchronize();
    let start = Instant::now();
    let result = work()?;
    device.synchronize();
    Ok((result, start.elapsed().as_secs_f64() * 1e3))
}

/// Model FLOPs utilisation: the share of the peak that the model's own FLOPs make up. `None` where the peak is not known.
pub fn utilisation(flops: f64, milliseconds: f64, peak: Option<f64>) -> Option<f64> {
    peak.map(|peak| flops / (milliseconds / 1e3) / peak)
}

/// Bytes by purpose: the most that the device gave out at once where it keeps count, else what the model computes for itself.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryTable {
    /// `device` or `computed`
    pub source: &'static str,
    pub bytes: BTreeMap<&'static str, usize>,
}

impl MemoryTable {
    /// `training`: tokens of the largest micro-batch, and whether layers are run again in the backward; `cached`: tokens held in
    /// key/value caches.
    pub fn of<D: Device>(model: &Model<Traced<D>>, training: Option<(usize, bool)>, cached: usize) -> MemoryTable {
        let counted = model.device().memory_use();
        if !counted.is_empty() {
            let bytes = counted.iter().filter(|line| line.peak > 0).map(|line| (line.purpose, line.peak)).collect();
            return MemoryTable { source: "device", bytes };
        }
        let memory = model.memory_by_purpose(training.is_some_and(|(_, recompute)| recompute));
        let mut bytes = BTreeMap::from([("weights", memory.weights), ("packed weights", memory.packed)]);
        if let Some((tokens, _)) = training {
            bytes.insert("gradients", memory.gradients);
            bytes.insert("optimizer", memory.optimizer);
            bytes.insert("activations", memory.activations_per_token * tokens);
        }
        if cached > 0 {
            bytes.insert("keys and values", memory.key_values_per_token * cached);
        }
        MemoryTable { source: "computed", bytes }
    }

    /// `weights 1.2 MB, gradients 1.2 MB`
    pub fn line(&self) -> String {
        let parts: Vec<String> =
            self.bytes.iter().map(|(purpose, &count)| format!("{purpose} {}", bytes(count as u64))).collect();
        parts.join(", ")
    }
}

/// The most bytes of memory that this process has had since it began, as the system counts them; `None` where it does not tell (only
/// Linux does).
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kibibytes * 1024)
}

/// A percentage, or `n/a`: an unknown peak has no share.
pub fn percent(share: Option<f64>) -> String {
    share.map_or("n/a".to_string(), types::percent)
}

/// `forward 12.30 ms, head 4.50 ms`
pub fn phase_line(phases: &BTreeMap<&'static str, f64>) -> String {
    let parts: Vec<String> = phases.iter().map(|(phase, time)| format!("{phase} {time:.2} ms")).collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summed_up() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_has_had_what_it_has_touched() {
        let touched = vec![1u8; 64 << 20];
        assert!(peak_resident_bytes().is_some_and(|bytes| bytes >= 64 << 20), "{}", touched.len());
    }

    /// 989e12 FLOPs in two seconds on a peak of 989e12 a second is one half.
    #[test]
    fn utilisation_is_a_share_of_the_peak_or_nothing() {
        assert_eq!(utilisation(989e12, 2000.0, Some(989e12)), Some(0.5));
        assert_eq!(utilisation(989e12, 2000.0, None), None);
        assert_eq!((percent(Some(0.5)), percent(None)), ("50.0 %".to_string(), "n/a".to_string()));
    }
}
