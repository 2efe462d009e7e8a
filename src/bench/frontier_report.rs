//! A sweep as JSON, as a table and as a page.

use std::collections::BTreeSet;

use serde::Serialize;

use super::about::{self, About};
use super::arm::Arm;
use super::figures::Figures;
use super::frontier::{Row, Sweep, SweepResult};
use super::html::chart::{Chart, Point};
use super::html::{self, Part};
use super::stats::Spread;
use super::table::{Align, Line, Table, one_line, shown, shown_spread};

/// Most groups of plots on a page; the table has all.
const FACETS_MAX: usize = 12;
/// What every report says of its method.
const WARM_UP: &str = "Every engine is fresh. It reads its longest prompt and writes once before it is timed, so that the planner\n\
    chooses by measured costs; then each prompt is timed once in each repetition. The arms take turns, and ratios are taken within\n\
    a repetition. Figures: median (least–most).";

/// What `bench --json` prints; names and meaning are a contract.
#[derive(Debug, Serialize)]
pub struct SweepReport<'a> {
    /// Surroundings.
    #[serde(flatten)]
    pub about: &'a About,
    /// Runs of each kind.
    pub repeat: u32,
    /// Runs of each engine before it is timed.
    pub warm_up_runs: u32,
    /// Tokens written after each prompt.
    pub write_tokens: u32,
    /// What prompts are made of: `random` or `text`.
    pub material: &'static str,
    /// Arms with what each sets.
    pub arms: Vec<ArmText>,
    /// `done`, `interrupted` or `failed`.
    pub ended: &'static str,
    /// All rows.
    pub rows: &'a [Row],
}

/// An arm with its explanation.
#[derive(Debug, Serialize)]
pub struct ArmText {
    /// Which.
    pub arm: Arm,
    /// What it sets.
    pub explanation: &'static str,
}

impl<'a> SweepReport<'a> {
    /// Of a result.
    #[must_use]
    pub fn new(about: &'a About, sweep: &Sweep, result: &'a SweepResult) -> Self {
        Self {
            about,
            repeat: sweep.repeat,
            warm_up_runs: 1,
            write_tokens: sweep.write_tokens,
            material: sweep.material.name(),
            arms: Arm::ALL.into_iter().map(|arm| ArmText { arm, explanation: arm.explanation() }).collect(),
            ended: about::ended(&result.ended),
            rows: &result.rows,
        }
    }
}

/// What is swept, beside the prompt: a name, and a row's value.
type Dimension = (&'static str, fn(&Row) -> String);
const DIMENSIONS: [Dimension; 4] = [
    ("context", |row| row.ctx_tokens.to_string()),
    ("slots asked", |row| row.slots_asked.clone()),
    ("chunk asked", |row| row.chunk_asked.clone()),
    ("block asked", |row| row.block_asked.clone()),
];
const PROMPT: Dimension = ("prompt tokens", |row| row.prompt_tokens.to_string());

/// Those that have more than one value.
fn swept(rows: &[Row]) -> Vec<Dimension> {
    DIMENSIONS.into_iter().filter(|(_, value)| rows.iter().map(value).collect::<BTreeSet<_>>().len() > 1).collect()
}

/// All rows.
#[must_use]
pub fn table(rows: &[Row]) -> Table {
    let swept = swept(rows);
    let has_budgets = swept.iter().any(|(name, _)| *name == "slots asked");
    let mut columns: Vec<(&str, Align)> = swept.iter().map(|(name, _)| (*name, Align::Right)).collect();
    if has_budgets {
        columns.push(("VRAM MiB", Align::Right));
    }
    columns.extend([("prompt", Align::Right), ("arm", Align::Left)]);
    let measured =
        ["way", "slots", "kept", "chunk", "block", "link MiB", "first token ms", "read tok/s", "written tok/s", "read", "written"];
    columns.extend(measured.map(|name| (name, if name == "way" { Align::Left } else { Align::Right })));
    let mut table = Table::new(columns);
    for row in rows {
        let mut cells: Vec<String> = swept.iter().map(|(_, value)| value(row)).collect();
        if has_budgets {
            cells.push(shown(row.vram_bytes.as_mib()));
        }
        cells.extend([row.prompt_tokens.to_string(), row.arm.to_string()]);
        table.lines.push(match (&row.figures, &row.refused) {
            (Some(figures), _) => {
                cells.extend(measured_cells(figures));
                cells.extend([ratio(row.read_ratio), ratio(row.written_ratio)]);
                Line::Cells(cells)
            }
            (None, reason) => Line::Refused { cells, reason: reason.clone().unwrap_or_default() },
        });
    }
    table
}

fn ratio(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "–".to_owned(), |spread| format!("{} x", shown(spread.median)))
}

/// From the way to the written tokens a second.
pub(super) fn measured_cells(figures: &Figures) -> [String; 9] {
    let ms = |spread: Spread| Spread { median: spread.median * 1e3, min: spread.min * 1e3, max: spread.max * 1e3 };
    [
        figures.way.to_string(),
        figures.slots.to_string(),
        figures.slots_kept.to_string(),
        figures.chunk.to_string(),
        figures.block.to_string(),
        shown(figures.link_bytes.as_mib()),
        shown_spread(Some(ms(figures.first_token_s))),
        shown_spread(Some(figures.read_tokens_per_s)),
        shown_spread(figures.written_tokens_per_s),
    ]
}

/// The report for a terminal.
#[must_use]
pub fn text(about: &About, sweep: &Sweep, result: &SweepResult) -> String {
    let arms: String = Arm::ALL.into_iter().map(|arm| format!("  {:<12}{}\n", arm.name(), arm.explanation())).collect();
    let end = about::early_end(&result.ended).map_or_else(String::new, |end| format!("\n{end}\n"));
    format!(
        "{}\n{}\n\n{arms}\n{}\n\n{}\n{}{end}",
        one_line(&about.model),
        described(sweep),
        WARM_UP,
        table(&result.rows),
        "read and written: times as fast as `default`",
    )
}

fn described(sweep: &Sweep) -> String {
    let repetitions = if sweep.repeat == 1 { "1 repetition".to_owned() } else { format!("{} repetitions", sweep.repeat) };
    let forced = sweep.base.drafts.force_acceptance.map_or_else(String::new, |forced| format!("; acceptance of drafts forced to {forced}"));
    format!("{repetitions}, {} tokens written greedily after prompts of {} tokens{forced}", sweep.write_tokens, sweep.material.name())
}

/// The report as a page.
#[must_use]
pub fn page(about: &About, sweep: &Sweep, result: &SweepResult) -> String {
    let mut facts = about.facts();
    facts.push(("method", described(sweep)));
    let mut parts = vec![Part::Facts(facts), Part::Text(WARM_UP.to_owned()), Part::Legend(Arm::ALL.to_vec())];
    parts.extend(about::early_end(&result.ended).map(Part::Text));
    parts.extend(charts(&result.rows));
    parts.push(Part::Heading("All figures".to_owned()));
    parts.push(Part::Text(
        "link: bytes of experts over the link, reading and writing. kept: slots in use while the prompt is read. read and written: times \
         as fast as the default."
            .to_owned(),
    ));
    parts.push(Part::Table(table(&result.rows)));
    html::page(&format!("ebbtide bench: {}", about.model), &parts)
}

/// A speed of a row as plots show it, with its name.
type Measure = (&'static str, fn(&Row) -> Option<Spread>, bool);
const MEASURES: [Measure; 4] = [
    ("Read, tokens a second", |row| Some(row.figures.as_ref()?.read_tokens_per_s), false),
    ("Written, tokens a second", |row| row.figures.as_ref()?.written_tokens_per_s, false),
    ("Reading, times the default", |row| row.read_ratio, true),
    ("First token, seconds", |row| Some(row.figures.as_ref()?.first_token_s), false),
];

/// Plots over the first swept dimension, slots before all; a group of plots for each value of the others.
fn charts(rows: &[Row]) -> Vec<Part> {
    let mut dimensions = swept(rows);
    dimensions.push(PROMPT);
    dimensions.sort_by_key(|(name, _)| *name != "slots asked");
    // With nothing else swept, prompts are the places.
    let (axis, others) = dimensions.split_first().expect("the prompt is there");
    let group_of = |row: &Row| others.iter().map(|(name, value)| format!("{name} {}", value(row))).collect::<Vec<_>>().join(", ");
    let mut groups: Vec<String> = Vec::new();
    rows.iter().map(group_of).for_each(|group| {
        if !groups.contains(&group) {
            groups.push(group);
        }
    });
    let mut parts = Vec::new();
    for group in groups.iter().take(FACETS_MAX) {
        let of_group: Vec<&Row> = rows.iter().filter(|row| group_of(row) == *group).collect();
        parts.push(Part::Heading(if group.is_empty() { "Figures by prompt".to_owned() } else { group.clone() }));
        parts.push(Part::Charts(MEASURES.iter().map(|measure| chart(measure, axis, &of_group)).collect()));
    }
    if groups.len() > FACETS_MAX {
        parts.push(Part::Text(format!("{} more groups are in the table alone.", groups.len() - FACETS_MAX)));
    }
    parts
}

fn chart((title, measure, is_ratio): &Measure, (axis, place): &Dimension, rows: &[&Row]) -> Chart {
    let mut categories: Vec<String> = Vec::new();
    let mut points = Vec::new();
    for row in rows {
        let name = place(row);
        let index = categories.iter().position(|category| *category == name).unwrap_or_else(|| {
            categories.push(name);
            categories.len() - 1
        });
        if let Some(spread) = measure(row) {
            points.push(Point { arm: row.arm, place: index, value: spread.median, range: Some((spread.min, spread.max)) });
        }
    }
    Chart { title: (*title).to_owned(), x_label: (*axis).to_owned(), categories, points, is_joined: true, is_ratio: *is_ratio }
}
