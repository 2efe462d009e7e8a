//! A replay as JSON, as tables and as a page.

use serde::Serialize;

use super::about::{self, About};
use super::arm::Arm;
use super::frontier_report::measured_cells;
use super::html::chart::{Chart, Point};
use super::html::{self, Part};
use super::replay::groups::{Group, GroupFigures, Ratio};
use super::replay::{ArmReport, Replay, ReplayResult, RequestReport};
use super::stats::{CONFIDENCE, RESAMPLES};
use super::table::{Align, Line, Table, one_line, shown, shown_or_none};

/// Most requests that text and page list one by one; JSON has all.
pub const LISTED_MAX: usize = 200;

/// What `replay --json` prints; names and meaning are a contract.
#[derive(Debug, Serialize)]
pub struct ReplayReport<'a> {
    /// Surroundings.
    #[serde(flatten)]
    pub about: &'a About,
    /// The file of requests.
    pub file: &'a str,
    /// Tokens of context of all engines.
    pub ctx_tokens: u32,
    /// Requests of the file.
    pub requests_recorded: usize,
    /// Trials of each arm.
    pub trials: u32,
    /// The arm that the others are compared with.
    pub base_arm: Arm,
    /// Draws behind an interval.
    pub resamples: usize,
    /// Share of the draws within an interval.
    pub confidence: f64,
    /// Start of the draws.
    pub seed: u64,
    /// `done`, `interrupted` or `failed`.
    pub ended: &'static str,
    /// All arms.
    pub arms: &'a [ArmReport],
    /// Requests by fresh tokens, and all.
    pub buckets: &'a [Group],
    /// All requests.
    pub requests: &'a [RequestReport],
}

impl<'a> ReplayReport<'a> {
    /// Of a result.
    #[must_use]
    pub fn new(about: &'a About, file: &'a str, replay: &Replay, result: &'a ReplayResult) -> Self {
        Self {
            about,
            file,
            ctx_tokens: result.ctx_tokens,
            requests_recorded: result.requests_recorded,
            trials: replay.trials,
            base_arm: result.base_arm,
            resamples: RESAMPLES,
            confidence: CONFIDENCE,
            seed: replay.seed,
            ended: about::ended(&result.ended),
            arms: &result.arms,
            buckets: &result.buckets,
            requests: &result.requests,
        }
    }
}

/// Groups, a line for each arm; arms that never started have a line at the end.
#[must_use]
pub fn bucket_table(result: &ReplayResult) -> Table {
    let right = |name| (name, Align::Right);
    let mut table = Table::new([
        ("fresh tokens", Align::Left),
        right("requests"),
        ("arm", Align::Left),
        right("first token ms"),
        right("read tok/s"),
        right("written tok/s"),
        right("read (95 %)"),
        right("written (95 %)"),
    ]);
    for group in &result.buckets {
        for figures in &group.results {
            table.lines.push(Line::Cells(vec![
                group.bucket.to_owned(),
                group.requests.to_string(),
                figures.arm.to_string(),
                shown(figures.first_token_s * 1e3),
                shown(figures.read_tokens_per_s),
                shown_or_none(figures.written_tokens_per_s),
                shown_ratio(figures.read_ratio),
                shown_ratio(figures.written_ratio),
            ]));
        }
    }
    for arm in &result.arms {
        if let Some(reason) = &arm.refused {
            let cells = vec![String::new(), String::new(), arm.arm.to_string()];
            table.lines.push(Line::Refused { cells, reason: reason.clone() });
        }
    }
    table
}

fn shown_ratio(ratio: Option<Ratio>) -> String {
    match ratio {
        None => "–".to_owned(),
        Some(Ratio { median, interval: None }) => format!("{} x", shown(median)),
        Some(Ratio { median, interval: Some(interval) }) => {
            format!("{} x ({}–{})", shown(median), shown(interval.low), shown(interval.high))
        }
    }
}

/// The first requests, a line for each arm.
#[must_use]
pub fn request_table(result: &ReplayResult) -> Table {
    let words = ["id", "tag", "arm", "way"];
    let names = ["line", "id", "tag", "prompt", "output", "arm", "fresh"];
    let measured =
        ["way", "slots", "kept", "chunk", "block", "link MiB", "first token ms", "read tok/s", "written tok/s", "read", "written"];
    let columns = names.into_iter().chain(measured).map(|name| (name, if words.contains(&name) { Align::Left } else { Align::Right }));
    let mut table = Table::new(columns);
    for request in result.requests.iter().take(LISTED_MAX) {
        for figures in &request.results {
            let name = |name: &Option<String>| one_line(name.as_deref().unwrap_or("–"));
            let mut cells = vec![
                request.line.to_string(),
                name(&request.id),
                name(&request.tag),
                request.prompt_tokens.to_string(),
                request.output_tokens.to_string(),
                figures.arm.to_string(),
                figures.figures.fresh_tokens.to_string(),
            ];
            cells.extend(measured_cells(&figures.figures));
            let times = |ratio: Option<f64>| ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{} x", shown(ratio)));
            cells.extend([times(figures.read_ratio), times(figures.written_ratio)]);
            table.lines.push(Line::Cells(cells));
        }
    }
    table
}

fn method(replay: &Replay, result: &ReplayResult) -> String {
    let trials = if replay.trials == 1 { "1 trial".to_owned() } else { format!("{} trials", replay.trials) };
    format!(
        "{trials} of {} requests in order, a fresh engine for each trial of each arm, nothing run before; output lengths forced,\n\
         tokens chosen greedily. Ratios are times as fast as `{}`: the same request of the same trial, the median over its trials,\n\
         the median over requests; in brackets the 95 % interval of {RESAMPLES} resamples of requests and of their trials (seed {}).",
        result.requests_recorded, result.base_arm, replay.seed,
    )
}

fn not_listed(result: &ReplayResult) -> Option<String> {
    let more = result.requests.len().checked_sub(LISTED_MAX).filter(|&more| more > 0)?;
    Some(format!("{more} more requests are in the JSON report alone."))
}

/// The report for a terminal.
#[must_use]
pub fn text(about: &About, replay: &Replay, result: &ReplayResult) -> String {
    let arms: String = replay.arms.iter().map(|arm| format!("  {:<12}{}\n", arm.name(), arm.explanation())).collect();
    let rest: String =
        [not_listed(result), about::early_end(&result.ended)].into_iter().flatten().map(|line| format!("{line}\n")).collect();
    let requests = if result.requests.is_empty() { String::new() } else { format!("{}\n", request_table(result)) };
    format!(
        "{}\ncontext {} tokens\n\n{arms}\n{}\n\n{requests}{}{rest}",
        one_line(&about.model),
        result.ctx_tokens,
        method(replay, result),
        bucket_table(result),
    )
}

/// The report as a page.
#[must_use]
pub fn page(about: &About, file: &str, replay: &Replay, result: &ReplayResult) -> String {
    let mut facts = about.facts();
    facts.push(("requests", format!("{}, {} of them, context {} tokens", file, result.requests_recorded, result.ctx_tokens)));
    let mut parts = vec![Part::Facts(facts), Part::Text(method(replay, result)), Part::Legend(replay.arms.clone())];
    parts.extend(about::early_end(&result.ended).map(Part::Text));
    parts.push(Part::Heading("By fresh tokens".to_owned()));
    parts.push(Part::Charts(MEASURES.iter().map(|measure| chart(measure, &result.buckets)).collect()));
    parts.push(Part::Table(bucket_table(result)));
    if !result.requests.is_empty() {
        parts.extend([Part::Heading("Every request".to_owned()), Part::Table(request_table(result))]);
    }
    parts.extend(not_listed(result).map(Part::Text));
    html::page(&format!("ebbtide replay: {}", about.model), &parts)
}

/// A value with its range.
type Value = (f64, Option<(f64, f64)>);
/// A figure of a group as plots show it, with its name.
type Measure = (&'static str, fn(&GroupFigures) -> Option<Value>, bool);
const MEASURES: [Measure; 4] = [
    ("Reading, times the base", |figures| figures.read_ratio.map(with_interval), true),
    ("Writing, times the base", |figures| figures.written_ratio.map(with_interval), true),
    ("Read, tokens a second", |figures| Some((figures.read_tokens_per_s, None)), false),
    ("Written, tokens a second", |figures| Some((figures.written_tokens_per_s?, None)), false),
];

fn with_interval(ratio: Ratio) -> Value {
    (ratio.median, ratio.interval.map(|interval| (interval.low, interval.high)))
}

fn chart((title, measure, is_ratio): &Measure, groups: &[Group]) -> Chart {
    let mut points = Vec::new();
    for (place, group) in groups.iter().enumerate() {
        let measured = group.results.iter().filter_map(|figures| Some((figures.arm, measure(figures)?)));
        points.extend(measured.map(|(arm, (value, range))| Point { arm, place, value, range }));
    }
    let categories = groups.iter().map(|group| group.bucket.to_owned()).collect();
    Chart { title: (*title).to_owned(), x_label: "fresh tokens".to_owned(), categories, points, is_joined: false, is_ratio: *is_ratio }
}
