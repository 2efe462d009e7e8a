//! A report as one page of HTML that needs nothing else: no script, no font, no picture from anywhere.
//!
//! Everything that comes from outside (names of models, of requests, reasons) goes through [`escaped`]; the page forbids itself to
//! load anything, so that even a fault there would fetch nothing.

pub mod chart;

use super::arm::Arm;
use super::table::{Align, Line, Table};
use chart::Chart;

/// A part of a page.
#[derive(Clone, Debug)]
pub enum Part {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// Names with values.
    Facts(Vec<(&'static str, String)>),
    /// The arms with their colours and what each sets.
    Legend(Vec<Arm>),
    /// Plots.
    Charts(Vec<Chart>),
    /// A table.
    Table(Table),
}

const STYLE: &str = include_str!("html/style.css");

/// The page.
#[must_use]
pub fn page(title: &str, parts: &[Part]) -> String {
    let title = escaped(title);
    let body: String = parts.iter().map(part).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n</body>\n</html>\n"
    )
}

fn part(part: &Part) -> String {
    match part {
        Part::Heading(text) => format!("<h2>{}</h2>\n", escaped(text)),
        Part::Text(text) => format!("<p>{}</p>\n", escaped(text)),
        Part::Facts(facts) => {
            let fact = |(name, value): &(&str, String)| format!("<dt>{}</dt><dd>{}</dd>\n", escaped(name), escaped(value));
            format!("<dl class=\"facts\">\n{}</dl>\n", facts.iter().map(fact).collect::<String>())
        }
        Part::Legend(arms) => {
            let item = |arm: &Arm| {
                let mark = chart::mark(arm.index(), 8.0, 8.0);
                let swatch = format!("<svg class=\"swatch\" viewBox=\"0 0 16 16\" aria-hidden=\"true\">{mark}</svg>");
                format!("<li>{swatch}<span><b>{}</b>: {}</span></li>\n", escaped(arm.name()), escaped(arm.explanation()))
            };
            format!("<ul class=\"legend\">\n{}</ul>\n", arms.iter().map(item).collect::<String>())
        }
        Part::Charts(charts) => {
            let figure =
                |chart: &Chart| format!("<figure>\n<figcaption>{}</figcaption>\n{}</figure>\n", escaped(&chart.title), chart.svg());
            // A plot without a value says nothing.
            let figures: String = charts.iter().filter(|chart| !chart.points.is_empty()).map(figure).collect();
            if figures.is_empty() { figures } else { format!("<div class=\"charts\">\n{figures}</div>\n") }
        }
        Part::Table(table) => table_html(table),
    }
}

fn table_html(table: &Table) -> String {
    let class = |column: usize| match table.columns.get(column) {
        Some((_, Align::Right)) => " class=\"n\"",
        _ => "",
    };
    let heads: String =
        table.columns.iter().enumerate().map(|(column, (name, _))| format!("<th{}>{}</th>", class(column), escaped(name))).collect();
    let cells = |cells: &[String]| -> String {
        cells.iter().enumerate().map(|(column, cell)| format!("<td{}>{}</td>", class(column), escaped(cell))).collect()
    };
    let line = |line: &Line| match line {
        Line::Cells(row) => format!("<tr>{}</tr>\n", cells(row)),
        Line::Refused { cells: first, reason } => {
            let span = table.columns.len().saturating_sub(first.len()).max(1);
            format!("<tr>{}<td class=\"why\" colspan=\"{span}\">not run: {}</td></tr>\n", cells(first), escaped(reason))
        }
    };
    let lines: String = table.lines.iter().map(line).collect();
    // A wide table scrolls in its own frame, by keyboard too, and the page stays as wide as the screen.
    format!("<div class=\"wide\" tabindex=\"0\"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}</tbody>\n</table></div>\n")
}

/// `text` so that it is text and nothing else, in elements and in quoted attributes.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // No place in HTML, written out or not.
            control if control.is_control() && control != '\n' && control != '\t' => safe.push('\u{fffd}'),
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_stays_text() {
        let evil = "</td><script>alert('x')</script>\" onload=\"&\u{0}\u{1b}[1m";
        let safe = escaped(evil);
        assert!(!safe.contains(['<', '>', '"', '\'', '\u{0}', '\u{1b}']), "{safe}");
        let mut table = Table::new([(evil, Align::Left), ("n", Align::Right)]);
        table.lines.push(Line::Cells(vec![evil.to_owned(), "1".to_owned()]));
        table.lines.push(Line::Refused { cells: vec![evil.to_owned()], reason: evil.to_owned() });
        let points = vec![chart::Point { arm: Arm::Auto, place: 0, value: 1.0, range: None }];
        let chart =
            Chart { title: evil.to_owned(), x_label: evil.to_owned(), categories: vec![evil.to_owned()], points, ..Chart::default() };
        let parts =
            [Part::Heading(evil.to_owned()), Part::Facts(vec![("model", evil.to_owned())]), Part::Charts(vec![chart]), Part::Table(table)];
        let page = page(evil, &parts);
        assert!(!page.contains("<script") && !page.contains("onload=\"") && page.matches("alert(&#39;x&#39;)").count() >= 8, "{page}");
    }
}
