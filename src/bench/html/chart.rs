//! Plots as inline SVG: a value for each arm at each place of a row, with its range.
//!
//! Places have equal distances, as the steps of a sweep usually double. The value axis starts at 0, so that twice as high is twice as
//! much. Colours are the page's, so a plot is right on light and on dark paper; each arm has a mark of its own shape besides.

use std::fmt::Write;

use super::escaped;
use crate::bench::arm::Arm;
use crate::bench::table::shown;

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 276.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 58.0;
/// Most names of places.
const NAMES_MAX: usize = 8;
/// Width of a letter, near enough.
const LETTER: f64 = 8.0;
/// From one line of names to the next.
const NAME_LINE: f64 = 15.0;
/// Between the marks of two arms at one place, so that their ranges do not cover each other.
const DODGE: f64 = 6.0;
/// Lines of the value axis at most.
const TICKS_MAX: f64 = 5.0;

/// A value of an arm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Which arm.
    pub arm: Arm,
    /// Index of the place.
    pub place: usize,
    /// The value.
    pub value: f64,
    /// Its range, where it has one.
    pub range: Option<(f64, f64)>,
}

/// A plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    /// Above the plot.
    pub title: String,
    /// What the places are.
    pub x_label: String,
    /// Names of the places.
    pub categories: Vec<String>,
    /// The values; those that are no numbers are left out.
    pub points: Vec<Point>,
    /// The values of an arm are joined: places are steps of one quantity.
    pub is_joined: bool,
    /// A line at 1 is drawn: values are ratios.
    pub is_ratio: bool,
}

impl Chart {
    /// The plot as an element.
    #[must_use]
    pub fn svg(&self) -> String {
        let finite = |point: &&Point| point.value.is_finite() && point.value >= 0.0 && point.place < self.categories.len();
        let points: Vec<&Point> = self.points.iter().filter(finite).collect();
        let highest = points.iter().map(|point| point.range.map_or(point.value, |(_, high)| high.max(point.value)));
        let highest = highest.fold(if self.is_ratio { 1.0 } else { 0.0 }, f64::max);
        let step = tick_step(highest);
        let ticks = (highest / step).ceil().max(1.0);
        let y = |value: f64| HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / (step * ticks);
        let label = escaped(&format!("{}, by {}", self.title, self.x_label));
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{label}\">\n");
        let mut line = 0.0;
        while line <= ticks {
            let (at, value) = (y(step * line), shown_tick(step * line));
            let _ = write!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>", WIDTH - RIGHT);
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>", LEFT - 6.0, at + 4.0);
            line += 1.0;
        }
        if self.is_ratio {
            let at = y(1.0);
            let _ = writeln!(svg, "<line class=\"one\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>", WIDTH - RIGHT);
        }
        self.write_places(&mut svg);
        for arm in Arm::ALL {
            let of_arm: Vec<&Point> = points.iter().copied().filter(|point| point.arm == arm).collect();
            self.write_arm(&mut svg, arm, &of_arm, &y);
        }
        svg.push_str("</svg>\n");
        svg
    }

    #[allow(clippy::cast_precision_loss, reason = "a few places")]
    fn x(&self, place: usize) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (place as f64 + 0.5) / self.categories.len().max(1) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "letters of a name")]
    fn write_places(&self, svg: &mut String) {
        let every = self.categories.len().div_ceil(NAMES_MAX).max(1);
        // Long names stand on two lines in turn.
        let longest = self.categories.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let is_tight = LETTER * longest as f64 > self.x(every) - self.x(0);
        for (index, (place, name)) in self.categories.iter().enumerate().step_by(every).enumerate() {
            let y = HEIGHT - BOTTOM + NAME_LINE + if is_tight && index % 2 == 1 { NAME_LINE } else { 0.0 };
            let _ = write!(svg, "<text x=\"{:.1}\" y=\"{y}\" text-anchor=\"middle\">", self.x(place));
            let _ = writeln!(svg, "{}</text>", escaped(name));
        }
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>", HEIGHT - 8.0, escaped(&self.x_label));
    }

    #[allow(clippy::cast_precision_loss, reason = "five arms")]
    fn write_arm(&self, svg: &mut String, arm: Arm, points: &[&Point], y: &dyn Fn(f64) -> f64) {
        let index = arm.index();
        let x = |point: &Point| self.x(point.place) + DODGE * (index as f64 - (Arm::ALL.len() - 1) as f64 / 2.0);
        if self.is_joined && points.len() > 1 {
            let corners: Vec<String> = points.iter().map(|point| format!("{:.1},{:.1}", x(point), y(point.value))).collect();
            let _ = writeln!(svg, "<polyline class=\"a{index}\" points=\"{}\"/>", corners.join(" "));
        }
        for point in points {
            let at = x(point);
            let mut told = format!("{arm}, {}: {}", self.categories[point.place], shown(point.value));
            let _ = write!(svg, "<g>");
            if let Some((low, high)) = point.range.filter(|(low, high)| low.is_finite() && high.is_finite()) {
                let _ = write!(told, " ({}–{})", shown(low), shown(high));
                let (low, high) = (y(low.max(0.0)), y(high));
                let _ = write!(svg, "<line class=\"a{index}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>");
            }
            let _ = writeln!(svg, "{}<title>{}</title></g>", mark(index, at, y(point.value)), escaped(&told));
        }
    }
}

/// The mark of an arm at a place: colour and shape.
#[must_use]
pub fn mark(index: usize, x: f64, y: f64) -> String {
    let corners = |corners: &[(f64, f64)]| {
        let places: Vec<String> = corners.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy)).collect();
        format!("<polygon class=\"a{index}\" points=\"{}\"/>", places.join(" "))
    };
    match index {
        0 => format!("<circle class=\"a{index}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>"),
        1 => corners(&[(-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)]),
        2 => corners(&[(0.0, -4.5), (4.5, 3.5), (-4.5, 3.5)]),
        3 => corners(&[(0.0, 4.5), (4.5, -3.5), (-4.5, -3.5)]),
        _ => corners(&[(0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)]),
    }
}

/// The least of 1, 2, 5 times a power of ten with which `highest` is reached in a few steps.
fn tick_step(highest: f64) -> f64 {
    if highest <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((highest / TICKS_MAX).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| highest / step <= TICKS_MAX).unwrap_or(10.0 * power)
}

/// As short as it can be told: 0, 0.05, 250, 12k.
fn shown_tick(value: f64) -> String {
    if value >= 1e4 {
        return format!("{}k", rounded(value / 1e3));
    }
    rounded(value)
}

/// Without digits that say nothing.
fn rounded(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_axis_has_a_few_round_steps() {
        for (highest, step) in [(1.0, 0.2), (1.1, 0.5), (3.7, 1.0), (47.0, 10.0), (9200.0, 2000.0), (0.031, 0.01), (0.0, 1.0)] {
            assert!((tick_step(highest) - step).abs() < 1e-9, "{highest}: {}", tick_step(highest));
        }
        assert_eq!([0.0, 0.4, 250.0, 2000.0, 12_500.0].map(shown_tick), ["0", "0.4", "250", "2000", "12.5k"]);
    }

    #[test]
    fn marks_stand_where_their_values_are() {
        let point = |arm, place, value| Point { arm, place, value, range: Some((value / 2.0, value)) };
        let chart = Chart {
            categories: vec!["512".to_owned(), "2048".to_owned()],
            points: vec![point(Arm::Alias, 0, 100.0), point(Arm::Alias, 1, 50.0), point(Arm::Auto, 1, f64::NAN)],
            is_joined: true,
            ..Chart::default()
        };
        let svg = chart.svg();
        // Alias stands in the middle of its place; 100 is the axis's end, 50 half way down to its start.
        assert!(svg.contains("points=\"141.5,14.0 320.5,116.0\""), "{svg}");
        assert_eq!(svg.matches("<title>").count(), 2, "no mark for what is no number: {svg}");
        assert!(svg.contains("<title>alias, 512: 100.0 (50.00–100.0)</title>"), "{svg}");
    }

    #[test]
    fn no_values_are_an_empty_plot() {
        assert!(Chart::default().svg().ends_with("</svg>\n"));
    }
}
