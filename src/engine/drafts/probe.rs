//! Now and then one draft more than seems to pay, so that a bad guess of acceptance or cost does not stay for good.
//!
//! Counts windows and nothing else: no clock, no draw. Probing costs at most about a hundredth of the time.

/// Windows between two probes at first, and again once one has paid.
const WINDOWS_MIN: u32 = 32;
/// Windows between two probes at most.
const WINDOWS_MAX: u32 = 1024;
/// Share of the time that probes may take where none of their drafts is accepted.
const TIME_SHARE: f64 = 0.01;
/// Probes in a row at most: where so many accepted ones do not make the choice, cost stands against it and not acceptance.
const ROW_MAX: u32 = 8;

/// When a source was probed last, and how that went.
#[derive(Clone, Debug)]
pub struct Probe {
    windows_since: u32,
    interval: u32,
    /// Drafts of the last probe, until it has paid.
    tried: Option<usize>,
    /// Probes in a row whose draft was accepted: the next window is one more, for a few tell what a single one does not.
    in_a_row: u32,
}

impl Default for Probe {
    fn default() -> Self {
        Self { windows_since: 0, interval: WINDOWS_MIN, tried: None, in_a_row: 0 }
    }
}

impl Probe {
    /// Whether the next window should carry `drafts` + 1 drafts, where `drafts` seem best. It would take `more_s` seconds more than one
    /// with `drafts`, which takes `window_s`. Called once for each window of which the source could be probed.
    pub fn is_due(&mut self, drafts: usize, window_s: f64, more_s: f64) -> bool {
        if self.tried.is_some_and(|tried| drafts >= tried) {
            *self = Self::default();
        }
        self.windows_since = self.windows_since.saturating_add(1);
        let affordable = f64::from(self.windows_since) * window_s * TIME_SHARE >= more_s;
        let again = (1..ROW_MAX).contains(&self.in_a_row);
        if !again {
            self.in_a_row = 0;
        }
        if !again && (self.windows_since < self.interval || !affordable) {
            return false;
        }
        self.windows_since = 0;
        if !again {
            self.interval = self.interval.saturating_mul(2).min(WINDOWS_MAX);
        }
        self.tried = Some(drafts + 1);
        true
    }

    /// Takes note of whether the draft that a probe added was accepted.
    pub fn note(&mut self, accepted: bool) {
        self.in_a_row = if accepted { self.in_a_row + 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The windows, counted from 1, in which a probe was due.
    fn due(probe: &mut Probe, windows: u32, drafts: usize, more_s: f64) -> Vec<u32> {
        (1..=windows).filter(|_| probe.is_due(drafts, 1.0, more_s)).collect()
    }

    #[test]
    fn probes_that_do_not_pay_grow_rare_within_bounds() {
        let found = due(&mut Probe::default(), 5000, 0, 0.1);
        assert_eq!(found[..6], [32, 96, 224, 480, 992, 2016]);
        assert_eq!(found[6..], [3040, 4064], "never rarer than one in 1,024");
    }

    #[test]
    fn a_probe_that_costs_much_waits_until_it_is_small_beside_the_rest() {
        assert_eq!(due(&mut Probe::default(), 500, 0, 2.0), [200, 400]);
    }

    #[test]
    fn an_accepted_probe_is_followed_by_another_and_one_that_paid_starts_anew() {
        let mut probe = Probe::default();
        assert_eq!(due(&mut probe, 32, 0, 0.1), [32]);
        probe.note(true);
        assert!(probe.is_due(0, 1.0, 0.1));
        probe.note(false);
        assert!(!probe.is_due(0, 1.0, 0.1));
        assert_eq!(due(&mut probe, 100, 0, 0.1), [63], "the next interval is twice as long");
        assert_eq!(due(&mut probe, 100, 1, 0.1), [32, 96], "what was tried is the choice now");
    }

    #[test]
    fn probes_that_are_accepted_and_still_do_not_pay_come_to_an_end() {
        let mut probe = Probe::default();
        let probed = |_: &u32| {
            let is_due = probe.is_due(0, 1.0, 1.1);
            if is_due {
                probe.note(true);
            }
            is_due
        };
        assert_eq!((1..=300).filter(probed).count(), 16, "eight from window 110 on, where they can be afforded, and eight more");
    }
}
