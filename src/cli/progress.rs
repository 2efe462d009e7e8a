//! Says on stderr how far a long piece of work is.
//!
//! On a terminal a bar; elsewhere plain lines, each a new tenth and at least a second after the last, so that a log stays short.
//! Nothing is ever written to stdout, which belongs to a command's result.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::say;

/// Least time between two lines.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// Most redraws of a bar in a second.
const BAR_HERTZ: u8 = 10;

/// One piece of work. [`Progress::set`] may be called as often as is convenient.
pub struct Progress {
    label: String,
    started: Instant,
    output: Output,
}

enum Output {
    Bar(ProgressBar),
    Lines(LinePacer),
    Quiet,
}

impl Progress {
    /// Work of `total` units, all of a kind that `label` makes clear ("loading experts").
    #[must_use]
    pub fn new(label: &str, total: u64) -> Self {
        let started = Instant::now();
        let output =
            if std::io::stderr().is_terminal() { Output::Bar(bar(label, total)) } else { Output::Lines(LinePacer::new(total, started)) };
        Self { label: label.to_owned(), started, output }
    }

    /// Work that nobody wants to hear of.
    #[must_use]
    pub fn quiet() -> Self {
        Self { label: String::new(), started: Instant::now(), output: Output::Quiet }
    }

    /// `done` units are done, counted from the start of the work.
    pub fn set(&mut self, done: u64) {
        match &mut self.output {
            Output::Bar(bar) => bar.set_position(done),
            Output::Lines(pacer) => {
                if let Some(percent) = pacer.due(done, Instant::now()) {
                    say::line(format_args!("{}: {percent} %", self.label));
                }
            }
            Output::Quiet => {}
        }
    }

    /// The work ended well; says how long it took. Dropped without this call, a bar just goes away.
    pub fn finish(self) {
        match &self.output {
            // A bar that stayed would end without a line feed, and what comes next on stdout would be glued to it.
            Output::Bar(bar) => bar.finish_and_clear(),
            Output::Lines(_) => {}
            Output::Quiet => return,
        }
        say::line(format_args!("{}: done in {:.1} s", self.label, self.started.elapsed().as_secs_f64()));
    }
}

fn bar(label: &str, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {percent:>3} % {elapsed} (left: {eta})");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(BAR_HERTZ));
    bar.set_style(style.expect("the template is a constant that parses"));
    bar.set_prefix(label.to_owned());
    bar
}

/// Decides which steps are worth a line; the clock is handed in.
struct LinePacer {
    total: u64,
    tenths_told: u64,
    last_line: Instant,
}

impl LinePacer {
    fn new(total: u64, started: Instant) -> Self {
        Self { total: total.max(1), tenths_told: 0, last_line: started }
    }

    /// The percentage to print, if a line is due. The end is not: the work's last line says that.
    fn due(&mut self, done: u64, now: Instant) -> Option<u64> {
        let share = |parts: u64| u64::try_from(u128::from(done) * u128::from(parts) / u128::from(self.total)).unwrap_or(u64::MAX);
        let tenths = share(10);
        if done >= self.total || tenths <= self.tenths_told || now.saturating_duration_since(self.last_line) < LINE_INTERVAL {
            return None;
        }
        let percent = share(100);
        self.tenths_told = tenths;
        self.last_line = now;
        Some(percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_work_has_one_line_a_tenth() {
        let start = Instant::now();
        let mut pacer = LinePacer::new(1000, start);
        let told: Vec<u64> = (0..=1000).filter_map(|done| pacer.due(done, start + Duration::from_secs(2 * done))).collect();
        assert_eq!(told, [10, 20, 30, 40, 50, 60, 70, 80, 90]);
    }

    #[test]
    fn fast_work_has_at_most_one_line_a_second() {
        let start = Instant::now();
        let mut pacer = LinePacer::new(1000, start);
        let told: Vec<u64> = (0..=1000).filter_map(|done| pacer.due(done, start + Duration::from_millis(3 * done))).collect();
        assert_eq!(told, [33, 66], "three seconds: a line after the first and the second");
        let mut pacer = LinePacer::new(1000, start);
        assert!((0..=1000).all(|done| pacer.due(done, start).is_none()));
    }

    #[test]
    fn empty_and_huge_work_divides_by_nothing() {
        let start = Instant::now();
        let later = start + LINE_INTERVAL;
        assert_eq!(LinePacer::new(0, start).due(0, later), None);
        assert_eq!(LinePacer::new(u64::MAX, start).due(u64::MAX / 2, later), Some(49));
    }
}
