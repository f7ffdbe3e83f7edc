//! Axes with round numbers, shared by the terminal curve and the run page.

/// The range of an axis and the distance of its ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub low: f64,
    pub high: f64,
    /// Distance of neighbouring ticks: 1, 2 or 5 times a power of ten.
    pub step: f64,
}

impl Scale {
    /// An axis that starts and ends on ticks around `low..=high`, with about `intervals` steps.
    pub fn around(low: f64, high: f64, intervals: usize) -> Scale {
        let (low, high) = widen(low, high);
        let step = round_step((high - low) / intervals.max(1) as f64);
        // The small slack keeps 0.6000000001 from opening another interval.
        let floor = (low / step + 1e-9).floor() * step;
        let ceiling = (high / step - 1e-9).ceil() * step;
        Scale { low: floor, high: ceiling, step }
    }

    /// An axis over exactly `low..=high`, with ticks at most every `1 / intervals` of it and at whole numbers.
    pub fn steps(low: f64, high: f64, intervals: usize) -> Scale {
        let (low, high) = if high > low { (low, high) } else { (low - 0.5, high + 0.5) };
        Scale { low, high, step: round_step((high - low) / intervals.max(1) as f64).max(1.0) }
    }

    pub fn ticks(&self) -> Vec<f64> {
        let first = (self.low / self.step - 1e-9).ceil();
        let last = (self.high / self.step + 1e-9).floor();
        let count = (last - first).clamp(0.0, 1000.0) as usize;
        (0..=count).map(|index| (first + index as f64) * self.step).collect()
    }

    /// Where `value` lies between `low` (0) and `high` (1).
    pub fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// A tick's number with as many digits as the ticks need to differ.
    pub fn label(&self, value: f64) -> String {
        let size = self.low.abs().max(self.high.abs());
        if value.abs() < self.step * 1e-6 {
            return "0".to_string();
        }
        if size >= 1e7 || self.step < 1e-4 {
            return format!("{value:.1e}");
        }
        if size >= 1e4 && self.step >= 100.0 {
            return format!("{}k", value / 1000.0);
        }
        let digits = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{value:.digits$}")
    }
}

/// The least range that shows all finite `values`; none if there are none.
pub fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    values.into_iter().filter(|value| value.is_finite()).fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((f64::min(low, value), f64::max(high, value))),
    })
}

/// A range of some extent, for a curve that is flat.
fn widen(low: f64, high: f64) -> (f64, f64) {
    if high - low > 1e-12 * low.abs().max(high.abs()) {
        return (low, high);
    }
    match low {
        0.0 => (0.0, 1.0),
        value => (value - 0.5 * value.abs(), value + 0.5 * value.abs()),
    }
}

/// The first 1, 2 or 5 times a power of ten that is at least about `step`: a quarter below is near enough.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= step * 0.75).unwrap_or(10.0);
    factor * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale) -> Vec<String> {
        scale.ticks().into_iter().map(|tick| scale.label(tick)).collect()
    }

    #[test]
    fn round_numbers() {
        assert_eq!(labels(Scale::around(0.03, 0.61, 4)), ["0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(labels(Scale::around(0.0, 0.6, 3)), ["0", "0.2", "0.4", "0.6"]);
        assert_eq!(labels(Scale::around(-1.2, 2.9, 4)), ["-2", "-1", "0", "1", "2", "3"]);
        assert_eq!(labels(Scale::around(0.0, 130_000.0, 3)), ["0", "50k", "100k", "150k"]);
        assert_eq!(labels(Scale::around(0.0, 3e-6, 3)), ["0", "1.0e-6", "2.0e-6", "3.0e-6"]);
        assert_eq!(labels(Scale::steps(0.0, 32.0, 4)), ["0", "10", "20", "30"]);
        assert_eq!(labels(Scale::steps(0.0, 2.0, 8)), ["0", "1", "2"]);
    }

    #[test]
    fn flat_and_single_values_still_have_an_axis() {
        for value in [0.0, 5.0, -3.0, 1e-9, 1e12] {
            let scale = Scale::around(value, value, 4);
            assert!(scale.low <= value && value <= scale.high && scale.low < scale.high, "{value}: {scale:?}");
            assert!((2..8).contains(&scale.ticks().len()), "{value}: {scale:?}");
        }
        assert_eq!(Scale::steps(3.0, 3.0, 4).share(3.0), 0.5);
    }

    #[test]
    fn ranges_skip_what_is_not_finite() {
        assert_eq!(range([f64::NAN, 2.0, f64::INFINITY, -1.0]), Some((-1.0, 2.0)));
        assert_eq!(range([f64::NAN]), None);
    }
}
