//! Ratios of probabilities from differences of log-probabilities, without overflow.

/// Log-ratios are held within this before `exp`. One difference of 89 overflows f32, and 1,000 overflows f64; the
/// bound is the one in common use (verl).
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// `exp(log_ratio)` with the log-ratio held within [`LOG_RATIO_LIMIT`].
pub fn ratio(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
}

/// Whether [`ratio`] follows `log_ratio`, or is held and its derivative 0.
pub fn ratio_moves(log_ratio: f64) -> bool {
    log_ratio.abs() <= LOG_RATIO_LIMIT
}

/// Schulman's k3, `r - 1 - ln r` with `r` = [`ratio`]: for tokens drawn from the policy in the denominator, an estimate of
/// its divergence from the one in the numerator that is never negative (Schulman 2020, "Approximating KL divergence").
pub fn k3(log_ratio: f64) -> f64 {
    let log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
    log_ratio.exp_m1() - log_ratio
}
