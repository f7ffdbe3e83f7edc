//! A small curve for terminals and logs: braille dots for the line, `o` for the marks, numbers on both axes.

/// Columns and rows of the drawing area in characters; each holds 2 x 4 dots.
const COLUMNS: usize = 60;
const ROWS: usize = 10;

/// Draws `line` and `marks` (both `(x, y)`) as lines of text. Empty when nothing finite is given.
pub fn curve(y_label: &str, line: &[(f64, f64)], marks: &[(f64, f64)]) -> Vec<String> {
    let _ = (y_label, line, marks, COLUMNS, ROWS);
    Vec::new()
}
