//! Tables: made once, printed as text or as HTML.

use std::fmt;

use super::stats::Spread;

/// On which side a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A line of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A cell for every column.
    Cells(Vec<String>),
    /// The first cells, and in place of the others why they are not there.
    Refused {
        /// The first cells.
        cells: Vec<String>,
        /// The reason.
        reason: String,
    },
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Names and sides of columns.
    pub columns: Vec<(String, Align)>,
    /// Lines.
    pub lines: Vec<Line>,
}

impl Table {
    /// A table without lines.
    #[must_use]
    pub fn new<'a>(columns: impl IntoIterator<Item = (&'a str, Align)>) -> Self {
        Self { columns: columns.into_iter().map(|(name, align)| (name.to_owned(), align)).collect(), lines: Vec::new() }
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(name, _)| name.chars().count()).collect();
        for line in &self.lines {
            let (Line::Cells(cells) | Line::Refused { cells, .. }) = line;
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = (*width).max(cell.chars().count());
            }
        }
        widths
    }
}

impl fmt::Display for Table {
    /// Columns parted by two blanks; each line ends in a line feed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let write_cells = |f: &mut fmt::Formatter<'_>, cells: &[String], rest: &str| {
            let mut text = String::new();
            for ((cell, &width), (_, align)) in cells.iter().zip(&widths).zip(&self.columns) {
                match align {
                    Align::Left => text.push_str(&format!("{cell:<width$}  ")),
                    Align::Right => text.push_str(&format!("{cell:>width$}  ")),
                }
            }
            text.push_str(rest);
            writeln!(f, "{}", text.trim_end())
        };
        let names: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        write_cells(f, &names, "")?;
        for line in &self.lines {
            match line {
                Line::Cells(cells) => write_cells(f, cells, "")?,
                Line::Refused { cells, reason } => write_cells(f, cells, &format!("not run: {reason}"))?,
            }
        }
        Ok(())
    }
}

/// A number for people: four digits, fewer where it is whole.
#[must_use]
pub fn shown(number: f64) -> String {
    match number.abs() {
        large if large >= 1000.0 => format!("{number:.0}"),
        large if large >= 100.0 => format!("{number:.1}"),
        middle if middle >= 1.0 => format!("{number:.2}"),
        _ => format!("{number:.3}"),
    }
}

/// A name from outside on one line: whatever would steer a terminal or break a table is a blank.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// A number that may not be there.
#[must_use]
pub fn shown_or_none(number: Option<f64>) -> String {
    number.map_or_else(|| "–".to_owned(), shown)
}

/// `median (min–max)`, or the median alone where all values are one.
#[must_use]
pub fn shown_spread(spread: Option<Spread>) -> String {
    match spread {
        None => "–".to_owned(),
        Some(Spread { median, min, max }) if min >= max => shown(median),
        Some(Spread { median, min, max }) => format!("{} ({}–{})", shown(median), shown(min), shown(max)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_each_other_and_a_refusal_takes_what_is_left_of_its_line() {
        let mut table = Table::new([("arm", Align::Left), ("tok/s", Align::Right)]);
        table.lines.push(Line::Cells(vec!["default".to_owned(), "1".to_owned()]));
        table.lines.push(Line::Refused { cells: vec!["loan".to_owned()], reason: "no room".to_owned() });
        assert_eq!(table.to_string(), "arm      tok/s\ndefault      1\nloan     not run: no room\n");
    }

    #[test]
    fn numbers_have_four_digits() {
        let numbers = [0.123_45, 1.0, 12.345, 123.45, 12_345.6, -2.5].map(shown);
        assert_eq!(numbers, ["0.123", "1.00", "12.35", "123.5", "12346", "-2.50"]);
        assert_eq!(shown_spread(Spread::of([1.0, 3.0, 2.0])), "2.00 (1.00–3.00)");
        assert_eq!(shown_spread(Spread::of([1.0])), "1.00");
        assert_eq!(shown_spread(None), "–");
    }
}
