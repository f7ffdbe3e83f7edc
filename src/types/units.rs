//! Quantities as people read them.

/// Bytes for people.
pub fn bytes(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.0} kB", (count as f64 / 1e3).ceil()),
        1_000_000..1_000_000_000 => format!("{:.0} MB", count as f64 / 1e6),
        _ => format!("{:.1} GB", count as f64 / 1e9),
    }
}

/// A share of 1 for people.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_keep_what_people_want_to_know() {
        assert_eq!([0, 12, 1536, 4 << 20, 3 << 30].map(bytes), ["0 kB", "1 kB", "2 kB", "4 MB", "3.2 GB"]);
    }
}
