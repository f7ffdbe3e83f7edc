//! Charts as SVG text: lines over steps, stacked columns over steps, and scores with intervals side by side. Colours and
//! fonts come from the page's style sheet through class names, so that light and dark need one drawing only.

use std::fmt::Write;

use super::layout::number;
use super::scale::{Scale, range};

/// Size of a drawing in its own units; the page scales it to its column.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 220.0;
/// Room for the numbers of the axes.
const LEFT: f64 = 46.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 38.0;
/// At most this many hover strips per chart: more would be narrower than a pixel.
const STRIPS: usize = 300;

/// A named list of points, drawn in colour number `colour` (class `cN` of the style sheet).
pub struct Series {
    pub name: String,
    pub colour: usize,
    /// `(step, value)` with rising steps.
    pub points: Vec<(f64, f64)>,
}

/// A measured score with its confidence interval.
pub struct Score {
    pub label: String,
    /// Place on a step axis; unused where scores stand side by side.
    pub step: f64,
    pub value: f64,
    pub interval: Option<(f64, f64)>,
    /// A second, hollow point, and its name.
    pub beside: Option<f64>,
}

/// Text that may stand in HTML, also within a quoted attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Lines over steps with scores set on them. `None` when there is nothing to draw.
pub fn lines(label: &str, series: &[Series], scores: &[Score]) -> Option<String> {
    let steps =
        || series.iter().flat_map(|series| series.points.iter().map(|point| point.0)).chain(scores.iter().map(|s| s.step));
    let values = series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
    let ends = scores.iter().flat_map(|score| score.interval.map_or([score.value; 2], |(low, high)| [low, high]));
    let (first, last) = range(steps())?;
    let (bottom, top) = range(values.chain(ends).chain([0.0]))?;
    let mut frame = Frame::new(label, Scale::steps(first, last, 6), Scale::around(bottom, top, 4));
    frame.grid("step");
    for series in series {
        frame.line(series);
    }
    // The scores come last, above the strips, so that hovering finds them.
    frame.strips(series);
    for score in scores {
        frame.score(frame.x_of(score.step), score, &score.label);
    }
    Some(frame.finish())
}

/// Columns over steps, one per step, of layers stacked on each other. Layers share their steps: `layers[i].points[s].0`
/// is the same for all `i`. With `shares` each column is scaled to 1. `None` when there is nothing to draw.
pub fn stack(label: &str, layers: &[Series], shares: bool) -> Option<String> {
    let columns = layers.first()?.points.len();
    let total = |column: usize| layers.iter().map(|layer| layer.points[column].1.max(0.0)).sum::<f64>();
    let (first, last) = range(layers[0].points.iter().map(|point| point.0))?;
    let top = if shares { 1.0 } else { range((0..columns).map(total))?.1 };
    // Half a step of room on both sides, so that the outer columns are whole.
    let width = if columns > 1 { (last - first) / (columns - 1) as f64 } else { 1.0 };
    let x = Scale { low: first - 0.5 * width, high: last + 0.5 * width, ..Scale::steps(first, last, 6) };
    let mut frame = Frame::new(label, x, Scale::around(0.0, top, 4));
    frame.grid("step");
    for column in 0..columns {
        let step = layers[0].points[column].0;
        let whole = if shares { total(column) } else { 1.0 };
        let (left, right) = (frame.x_of(step - 0.46 * width), frame.x_of(step + 0.46 * width));
        let mut below = 0.0;
        for layer in layers {
            let value = layer.points[column].1.max(0.0);
            if value > 0.0 && whole > 0.0 {
                let (from, to) = (frame.y_of(below / whole), frame.y_of((below + value) / whole));
                frame.rectangle(&format!("fill c{}", layer.colour), left, to, right - left, from - to, "");
                below += value;
            }
        }
    }
    frame.strips(layers);
    Some(frame.finish())
}

/// Scores from 0 to 1 side by side, each with its interval; `beside` names the hollow points.
pub fn scores(label: &str, scores: &[Score], beside: &str) -> Option<String> {
    let values = scores.iter().flat_map(|score| {
        let (low, high) = score.interval.unwrap_or((score.value, score.value));
        [low, high, score.value, score.beside.unwrap_or(score.value)]
    });
    let (_, top) = range(values)?;
    let x = Scale { low: -0.5, high: scores.len() as f64 - 0.5, step: 1.0 };
    let mut frame = Frame::new(label, x, Scale::around(0.0, top.max(0.1), 4));
    frame.horizontal_grid();
    let places: Vec<f64> = (0..scores.len()).map(|index| frame.x_of(index as f64)).collect();
    let path: Vec<(f64, f64)> = places.iter().zip(scores).map(|(&x, score)| (x, frame.y_of(score.value))).collect();
    frame.polyline("line faint c0", &path);
    let room = (WIDTH - LEFT - RIGHT) / scores.len() as f64;
    let mut free_from = 0.0;
    for (&x, score) in places.iter().zip(scores) {
        if let Some(value) = score.beside {
            let y = frame.y_of(value);
            let title = escape(&format!("{}: {beside} {}", score.label, number(value)));
            frame.draw(format_args!(
                r#"<circle class="hollow c1" cx="{x:.1}" cy="{y:.1}" r="4.5"><title>{title}</title></circle>"#
            ));
        }
        frame.score(x, score, &score.label);
        if room >= 50.0 {
            frame.text("value", x + 9.0, frame.y_of(score.value) + 4.5, "start", &format!("{:.3}", score.value));
        }
        // Names stand on two lines. Those that would overlap are left out; hovering and the table of results have them.
        let (first, second) = score.label.rsplit_once(' ').unwrap_or((&score.label, ""));
        let half = 3.8 * first.chars().count().max(second.chars().count()) as f64;
        if x - half >= free_from {
            free_from = x + half;
            frame.text("tick", x, HEIGHT - BOTTOM + 16.0, "middle", first);
            frame.text("tick", x, HEIGHT - BOTTOM + 31.0, "middle", second);
        }
    }
    Some(frame.finish())
}

/// One drawing: axes, and the marks made so far.
struct Frame {
    x: Scale,
    y: Scale,
    svg: String,
}

impl Frame {
    fn new(label: &str, x: Scale, y: Scale) -> Frame {
        let label = escape(label);
        let svg = format!(r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">"#);
        Frame { x, y, svg }
    }

    fn finish(mut self) -> String {
        self.svg.push_str("</svg>");
        self.svg
    }

    fn x_of(&self, value: f64) -> f64 {
        LEFT + self.x.share(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y_of(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.share(value) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&mut self, element: std::fmt::Arguments) {
        // Writing to a String cannot fail.
        let _ = self.svg.write_fmt(element);
    }

    fn text(&mut self, class: &str, x: f64, y: f64, anchor: &str, text: &str) {
        let text = escape(text);
        self.draw(format_args!(r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#));
    }

    fn rectangle(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64, inside: &str) {
        self.draw(format_args!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.2}" width="{width:.2}" height="{height:.2}">{inside}</rect>"#
        ));
    }

    fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let points = points.join(" ");
        self.draw(format_args!(r#"<polyline class="{class}" points="{points}"/>"#));
    }

    /// Lines and numbers of both axes.
    fn grid(&mut self, x_name: &str) {
        self.horizontal_grid();
        for tick in self.x.ticks() {
            let (x, floor) = (self.x_of(tick), HEIGHT - BOTTOM);
            self.polyline("axis", &[(x, floor), (x, floor + 4.0)]);
            let label = self.x.label(tick);
            self.text("tick", x, floor + 17.0, "middle", &label);
        }
        self.text("tick", 0.5 * (LEFT + WIDTH - RIGHT), HEIGHT - 5.0, "middle", x_name);
    }

    fn horizontal_grid(&mut self) {
        for tick in self.y.ticks() {
            let y = self.y_of(tick);
            let class = if tick.abs() < 1e-9 * self.y.step { "axis" } else { "grid" };
            self.polyline(class, &[(LEFT, y), (WIDTH - RIGHT, y)]);
            let label = self.y.label(tick);
            self.text("tick", LEFT - 7.0, y + 4.0, "end", &label);
        }
    }

    fn line(&mut self, series: &Series) {
        let finite = series.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
        let points: Vec<(f64, f64)> = finite.map(|&(x, y)| (self.x_of(x), self.y_of(y))).collect();
        self.polyline(&format!("line c{}", series.colour), &points);
        if let [(x, y)] = points[..] {
            self.draw(format_args!(r#"<circle class="dot c{}" cx="{x:.1}" cy="{y:.1}" r="3.5"/>"#, series.colour));
        }
    }

    /// A point with its interval, at `x` in drawing units.
    fn score(&mut self, x: f64, score: &Score, name: &str) {
        let y = self.y_of(score.value);
        let mut title = format!("{name}: {}", number(score.value));
        let mut whisker = String::new();
        if let Some((low, high)) = score.interval {
            let (from, to) = (self.y_of(low), self.y_of(high));
            let (left, right) = (x - 4.0, x + 4.0);
            whisker = format!(
                r#"<path class="whisker" d="M{x:.1} {from:.1}V{to:.1}M{left:.1} {from:.1}H{right:.1}M{left:.1} {to:.1}H{right:.1}"/>"#
            );
            let _ = write!(title, ", 95 % interval {} to {}", number(low), number(high));
        }
        let title = escape(&title);
        self.draw(format_args!(r#"<g class="score">{whisker}<circle cx="{x:.1}" cy="{y:.1}" r="5"/><title>{title}</title></g>"#));
    }

    /// Invisible strips over the whole height that show a step's numbers on hover.
    fn strips(&mut self, series: &[Series]) {
        let Some(longest) = series.iter().max_by_key(|series| series.points.len()) else { return };
        let steps: Vec<f64> = longest.points.iter().map(|point| point.0).collect();
        let every = steps.len().div_ceil(STRIPS).max(1);
        let width = (WIDTH - LEFT - RIGHT) * every as f64 / steps.len().max(1) as f64;
        for &step in steps.iter().step_by(every) {
            let mut title = format!("step {}", number(step));
            for series in series {
                let found = series.points.binary_search_by(|point| point.0.total_cmp(&step));
                if let Ok(index) = found {
                    let _ = write!(title, "\n{}: {}", series.name, number(series.points[index].1));
                }
            }
            let title = escape(&title);
            let left = (self.x_of(step) - 0.5 * width).max(LEFT);
            self.rectangle("strip", left, TOP, width, HEIGHT - TOP - BOTTOM, &format!("<title>{title}</title>"));
        }
    }
}
