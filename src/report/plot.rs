//! A small curve for terminals and logs: braille dots for the line, `●` for the marks, numbers on both axes.

use super::scale::{Scale, range};

/// Columns and rows of the drawing area in characters; each holds 2 x 4 dots.
const COLUMNS: usize = 60;
const ROWS: usize = 10;

/// Bits of the dots of one braille character, by row and column (Unicode block U+2800).
const DOTS: [[u32; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

/// Draws `line` and `marks` (both `(x, y)`) as lines of text; the line is joined in the order given. Points that are not
/// finite are left out; empty when none is left.
pub fn curve(y_label: &str, line: &[(f64, f64)], marks: &[(f64, f64)]) -> Vec<String> {
    let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
    };
    let (line, marks) = (finite(line), finite(marks));
    let all = || line.iter().chain(&marks);
    let (Some((left, right)), Some((bottom, top))) = (range(all().map(|point| point.0)), range(all().map(|point| point.1)))
    else {
        return Vec::new();
    };
    let mut canvas = Canvas { x: Scale::steps(left, right, 6), y: Scale::around(bottom, top, 4), dots: [[0; COLUMNS]; ROWS] };
    for pair in line.windows(2) {
        canvas.join(pair[0], pair[1]);
    }
    if let [only] = line[..] {
        canvas.join(only, only);
    }
    let mut characters: Vec<Vec<char>> = canvas.dots.iter().map(|row| row.iter().map(|&dots| braille(dots)).collect()).collect();
    for &(x, y) in &marks {
        let (column, row) = canvas.dot(x, y);
        characters[row / 4][column / 2] = '●';
    }
    canvas.with_axes(y_label, &characters)
}

struct Canvas {
    x: Scale,
    y: Scale,
    /// `[ROWS][COLUMNS]` dots set in each character.
    dots: [[u32; COLUMNS]; ROWS],
}

impl Canvas {
    /// Column (from the left) and row (from the top) of the dot nearest to a point.
    fn dot(&self, x: f64, y: f64) -> (usize, usize) {
        let place = |share: f64, dots: usize| (share.clamp(0.0, 1.0) * (dots - 1) as f64).round() as usize;
        (place(self.x.share(x), 2 * COLUMNS), place(1.0 - self.y.share(y), 4 * ROWS))
    }

    /// Sets the dots of a straight line between two points.
    fn join(&mut self, from: (f64, f64), to: (f64, f64)) {
        let (from, to) = (self.dot(from.0, from.1), self.dot(to.0, to.1));
        let steps = from.0.abs_diff(to.0).max(from.1.abs_diff(to.1)).max(1);
        for step in 0..=steps {
            let between = |a: usize, b: usize| (a as f64 + (b as f64 - a as f64) * step as f64 / steps as f64).round() as usize;
            let (column, row) = (between(from.0, to.0), between(from.1, to.1));
            self.dots[row / 4][column / 2] |= DOTS[row % 4][column % 2];
        }
    }

    fn with_axes(&self, y_label: &str, characters: &[Vec<char>]) -> Vec<String> {
        let mut row_labels = vec![String::new(); ROWS];
        for tick in self.y.ticks() {
            row_labels[self.dot(self.x.low, tick).1 / 4] = self.y.label(tick);
        }
        let width = row_labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
        let mut lines = vec![format!("{:width$} {y_label}", "")];
        for (label, row) in row_labels.iter().zip(characters) {
            let border = if label.is_empty() { '│' } else { '┤' };
            let row: String = row.iter().collect();
            lines.push(format!("{label:>width$} {border}{}", row.trim_end_matches(' ')));
        }
        let mut axis = vec!['─'; COLUMNS];
        let mut numbers: Vec<char> = vec![' '; COLUMNS + width + 8];
        let mut free_from = 0;
        for tick in self.x.ticks() {
            let column = self.dot(tick, self.y.low).0 / 2;
            let label = self.x.label(tick);
            let start = (width + 2 + column).saturating_sub(label.chars().count() / 2);
            axis[column] = '┬';
            if start >= free_from {
                free_from = start + label.chars().count() + 1;
                numbers.splice(start..free_from - 1, label.chars());
            }
        }
        lines.push(format!("{:width$} └{}", "", axis.into_iter().collect::<String>()));
        lines.push(numbers.into_iter().collect::<String>().trim_end().to_string());
        lines
    }
}

/// A blank for no dots: the empty braille character shows as faint dots in some fonts.
fn braille(dots: u32) -> char {
    if dots == 0 { ' ' } else { char::from_u32(0x2800 + dots).unwrap_or(' ') }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rising_curve_with_marks() {
        let line: Vec<(f64, f64)> = (0..=32).map(|step| (f64::from(step), 0.3 + 0.3 * f64::from(step) / 32.0)).collect();
        let lines = curve("pass rate", &line, &[(0.0, 0.31), (16.0, 0.44), (32.0, 0.6)]);
        assert_eq!(lines.len(), ROWS + 3);
        assert_eq!(lines[0].trim(), "pass rate");
        assert!(lines[1].starts_with("0.6 ┤") && lines[1].ends_with('●'), "{}", lines.join("\n"));
        assert!(lines[ROWS].starts_with("0.3 ┤"), "{}", lines.join("\n"));
        assert_eq!(lines.iter().map(|line| line.matches('●').count()).sum::<usize>(), 3);
        assert_eq!(lines[ROWS + 2].split_whitespace().collect::<Vec<_>>(), ["0", "5", "10", "15", "20", "25", "30"]);
        assert_eq!(lines[ROWS + 1].matches('┬').count(), 7);
    }

    #[test]
    fn every_row_and_column_of_a_diagonal_is_drawn() {
        let lines = curve("y", &[(0.0, 0.0), (60.0, 1.0)], &[]);
        for row in &lines[1..=ROWS] {
            assert!(row.chars().any(|character| ('\u{2801}'..='\u{28ff}').contains(&character)), "{}", lines.join("\n"));
        }
    }

    #[test]
    fn odd_input_is_no_trouble() {
        assert!(curve("y", &[], &[]).is_empty());
        assert!(curve("y", &[(f64::NAN, 1.0), (1.0, f64::INFINITY)], &[]).is_empty());
        assert_eq!(curve("y", &[(3.0, 0.0)], &[]).len(), ROWS + 3);
        assert_eq!(curve("y", &[], &[(3.0, 7.5)]).len(), ROWS + 3);
        assert_eq!(curve("y", &[(0.0, -1e300), (1.0, 1e300)], &[]).len(), ROWS + 3);
    }
}
