//! Text that lines up: durations, sanitised lines, two-column facts and tables.

/// A duration for people: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "n/a".to_string();
    }
    if seconds < 9.95 { format!("{seconds:.1} s") } else { whole_duration(seconds.round()) }
}

/// A time still to come, in whole seconds, as nobody knows it better: `1 s`, `3 min 05 s`.
pub fn time_left(seconds: f64) -> String {
    if seconds.is_finite() && seconds >= 0.0 { whole_duration(seconds.ceil()) } else { "n/a".to_string() }
}

fn whole_duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// A measured number for people, with about four digits: `0`, `0.0312`, `3.142`, `1234`, `4.0e-5`.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "n/a".to_string();
    }
    if value == value.trunc() && size < 1e9 {
        return format!("{value:.0}");
    }
    match size {
        0.0..1e-3 => format!("{value:.1e}"),
        1e-3..1.0 => format!("{value:.4}"),
        1.0..100.0 => format!("{value:.3}"),
        100.0..1000.0 => format!("{value:.1}"),
        1000.0..1e9 => format!("{value:.0}"),
        _ => format!("{value:.2e}"),
    }
}

/// `text` with every control character but the newline shown as `?`: a task's name or a program's output must not be
/// able to move the cursor or recolour the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() && character != '\n' { '?' } else { character }).collect()
}

/// `(name, value)` rows with the values in one column; further lines of a value are indented to it.
pub fn facts(rows: &[(String, String)]) -> Vec<(String, String)> {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for (name, value) in rows {
        for (index, part) in value.split('\n').enumerate() {
            let shown = if index == 0 { name.as_str() } else { "" };
            lines.push((format!("{shown:<width$}"), part.to_string()));
        }
    }
    lines
}

/// A table as lines: the header, a rule, then the rows. Columns whose cells are numbers are right-aligned.
pub fn table(headers: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).chain([headers.len()]).max().unwrap_or(0);
    let cell = |row: &[String], column: usize| row.get(column).map_or("", String::as_str).to_string();
    let mut widths = vec![0; columns];
    let mut numeric = vec![true; columns];
    for column in 0..columns {
        widths[column] = headers.get(column).map_or(0, |header| header.chars().count());
        for row in rows {
            let text = cell(row, column);
            widths[column] = widths[column].max(text.chars().count());
            numeric[column] &= text.is_empty() || looks_numeric(&text);
        }
    }
    let join = |cells: Vec<String>| {
        let padded = cells.iter().enumerate().map(|(column, text)| {
            let width = widths[column];
            if numeric[column] { format!("{text:>width$}") } else { format!("{text:<width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let header = (0..columns).map(|column| headers.get(column).copied().unwrap_or("").to_string()).collect();
    let rule = widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>().join("  ");
    let body = rows.iter().map(|row| join((0..columns).map(|column| cell(row, column)).collect()));
    [join(header), rule].into_iter().chain(body).collect()
}

/// A cell that reads as a number, with or without sign, interval or unit: `-0.25`, `0.53 [0.49, 0.57]`, `12 s`, `n/a`.
fn looks_numeric(text: &str) -> bool {
    text == "n/a" || text == "-" || text.trim_start_matches(['+', '-', '[', '±', '.']).starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases =
            [(0.0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185.0, "3 min 05 s")];
        for (seconds, expected) in cases {
            assert_eq!(duration(seconds), expected);
        }
        assert_eq!(duration(7625.0), "2 h 07 min");
        assert_eq!(duration(f64::NAN), "n/a");
        assert_eq!(duration(f64::INFINITY), "n/a");
        assert_eq!([time_left(0.2), time_left(184.5), time_left(f64::NAN)], ["1 s", "3 min 05 s", "n/a"]);
    }

    #[test]
    fn numbers() {
        let cases = [
            (0.0, "0"),
            (3.0, "3"),
            (0.03125, "0.0312"),
            (std::f64::consts::PI, "3.142"),
            (4e-5, "4.0e-5"),
            (-0.25, "-0.2500"),
            (1234.5, "1234"),
            (f64::NAN, "n/a"),
        ];
        for (value, expected) in cases {
            assert_eq!(number(value), expected);
        }
    }

    #[test]
    fn control_characters_cannot_reach_the_terminal() {
        assert_eq!(printable("a\x1b[31mb\rc\u{9b}d\ne"), "a?[31mb?c?d\ne");
    }

    #[test]
    fn tables_line_up() {
        let rows = vec![
            vec!["after rft".to_string(), "0.31 [0.28, 0.34]".to_string(), "-".to_string()],
            vec!["après rl".to_string(), "0.5".to_string()],
        ];
        let lines = table(&["policy", "pass@1", "gain"], &rows);
        assert_eq!(
            lines,
            [
                "policy                pass@1  gain",
                "---------  -----------------  ----",
                "after rft  0.31 [0.28, 0.34]     -",
                "après rl                 0.5"
            ]
        );
        assert_eq!(table(&[], &[]), ["", ""]);
    }

    #[test]
    fn facts_keep_one_column_for_values() {
        let rows = [("model".to_string(), "qwen3".to_string()), ("memory".to_string(), "12 MB\n8 MB".to_string())];
        let lines: Vec<String> = facts(&rows).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
        assert_eq!(lines, ["model  qwen3", "memory 12 MB", "       8 MB"]);
    }
}
