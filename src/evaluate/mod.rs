//! Held-out evaluation: pass@k and behaviour, with confidence intervals.
