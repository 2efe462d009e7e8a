//! How many drafts a window should carry.
//!
//! Owns the running acceptance of a source ([`Acceptance`]) and the choice of the depth that writes most tokens a second ([`best`]). Both
//! are plain arithmetic: when to try what does not seem to pay is for `probe`.

use crate::settings::DRAFTS_MAX;
use crate::units::TokenId;

const DEPTHS: usize = DRAFTS_MAX as usize;
/// Judged drafts after which an older one counts for a third: long enough to tell 0.6 from 0.7, short enough to follow a text from prose
/// into a table.
const MEMORY_DRAFTS: f64 = 64.0;
/// Judged drafts that an assumption counts for.
const PRIOR_DRAFTS: f64 = 4.0;
/// Least gain over writing without drafts. Acceptance is a guess from some dozen drafts, and a wrong guess of "just pays" costs time.
pub(super) const GAIN_MIN: f64 = 0.05;

/// Running share of accepted drafts by depth: of those whose forerunners in the window were accepted.
#[derive(Clone, Debug)]
pub struct Acceptance {
    /// Taken for granted of a depth until some are judged; where nothing is, the share of the depth before it is.
    priors: [Option<f64>; DEPTHS],
    /// Drafts judged, forgetting.
    judged: [f64; DEPTHS],
    /// Of them accepted.
    accepted: [f64; DEPTHS],
}

impl Acceptance {
    /// Nothing judged yet; of the first draft so much is taken for granted.
    #[must_use]
    pub fn new(prior: f64) -> Self {
        let mut priors = [None; DEPTHS];
        priors[0] = Some(prior);
        Self { priors, judged: [0.0; DEPTHS], accepted: [0.0; DEPTHS] }
    }

    /// Judges `drafts` by the tokens `chosen` in their places.
    pub fn judge(&mut self, drafts: &[TokenId], chosen: &[TokenId]) {
        let same = drafts.iter().zip(chosen).take_while(|(draft, chosen)| draft == chosen).count();
        self.note(drafts.len().min(chosen.len()), same);
    }

    /// Takes note of `drafts` of one window, of which the first `accepted` were. What follows the first that was not accepted says nothing.
    pub fn note(&mut self, drafts: usize, accepted: usize) {
        for depth in 0..drafts.min(accepted + 1).min(DEPTHS) {
            let kept = 1.0 - 1.0 / MEMORY_DRAFTS;
            self.judged[depth] = self.judged[depth] * kept + 1.0;
            self.accepted[depth] = self.accepted[depth] * kept + if depth < accepted { 1.0 } else { 0.0 };
        }
    }

    /// Makes what was judged at a depth, counted from 1, a mere assumption, so that news soon outweighs it.
    pub(super) fn doubt(&mut self, depth: usize) {
        if let Some(index) = depth.checked_sub(1).filter(|&index| index < DEPTHS) {
            self.priors[index] = Some(self.shares()[index]);
            (self.judged[index], self.accepted[index]) = (0.0, 0.0);
        }
    }

    /// Share of accepted drafts at each depth, given the ones before.
    #[must_use]
    pub fn shares(&self) -> [f64; DEPTHS] {
        let mut before = 0.0;
        std::array::from_fn(|depth| {
            let prior = self.priors[depth].unwrap_or(before);
            before = (PRIOR_DRAFTS * prior + self.accepted[depth]) / (PRIOR_DRAFTS + self.judged[depth]);
            before
        })
    }
}

/// What drafts cost now.
#[derive(Clone, Copy)]
pub struct DraftCosts<'a> {
    /// Seconds of a window of so many rows, the bytes that it will miss included; `None` where that is not known.
    pub window_s: &'a dyn Fn(usize) -> Option<f64>,
    /// Seconds of one step of the draft layer; 0 until it is known.
    pub mtp_step_s: f64,
}

/// A depth and what it comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Depth {
    /// Drafts of a window.
    pub drafts: usize,
    /// Tokens a second that this is expected to write; 0 where nothing is known.
    pub tokens_per_s: f64,
}

/// The depth that writes most tokens a second, at most `most`, for a source whose drafts take `step_s` each; 0 where drafts gain less than
/// 5 %. The first window that is not known is taken to cost no more than the one before it, so that it is tried and known; larger ones
/// wait for that.
#[must_use]
pub fn best(acceptance: &Acceptance, window_s: &dyn Fn(usize) -> Option<f64>, step_s: f64, most: usize) -> Depth {
    let Some(single_s) = window_s(1) else { return Depth { drafts: 0, tokens_per_s: 0.0 } };
    let without = Depth { drafts: 0, tokens_per_s: 1.0 / single_s };
    let mut best = Depth { tokens_per_s: without.tokens_per_s * (1.0 + GAIN_MIN), ..without };
    let (mut tokens, mut all_accepted, mut seconds) = (1.0, 1.0, single_s);
    for (drafts, share) in (1..=most).zip(acceptance.shares()) {
        all_accepted *= share;
        tokens += all_accepted;
        let known = window_s(1 + drafts);
        seconds = known.unwrap_or(seconds);
        let tokens_per_s = tokens / (seconds + step_s * depth_f64(drafts));
        if tokens_per_s > best.tokens_per_s {
            best = Depth { drafts, tokens_per_s };
        }
        if known.is_none() {
            break;
        }
    }
    if best.drafts == 0 { without } else { best }
}

#[allow(clippy::cast_precision_loss, reason = "at most seven")]
fn depth_f64(drafts: usize) -> f64 {
    drafts as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(shares: [f64; DEPTHS]) -> Acceptance {
        let judged = 1e9;
        Acceptance { judged: [judged; DEPTHS], accepted: shares.map(|share| share * judged), ..Acceptance::new(0.5) }
    }

    /// The rate at a depth by the formula, term by term.
    fn rate(shares: &[f64], seconds: &[f64], step_s: f64, drafts: usize) -> f64 {
        let expected: f64 = (1..=drafts).map(|last| shares[..last].iter().product::<f64>()).sum();
        (1.0 + expected) / (seconds[drafts] + step_s * drafts as f64)
    }

    #[test]
    fn the_depth_is_the_best_of_all_by_the_formula() {
        let grid = [0.0, 0.3, 0.6, 0.85, 1.0];
        for (first, rest) in grid.iter().flat_map(|&first| grid.map(|rest| (first, rest))) {
            for (row_s, step_s, most) in
                [0.0, 0.1, 0.4, 1.0].into_iter().flat_map(|row_s| [(row_s, 0.0, 7), (row_s, 0.05, 5), (row_s, 0.3, 2)])
            {
                let shares = std::array::from_fn(|depth| if depth == 0 { first } else { rest });
                // A step in the costs makes the rate have more than one hill.
                let seconds: Vec<f64> = (0..8).map(|more| 1.0 + row_s * f64::from(more) + if more > 3 { 0.5 } else { 0.0 }).collect();
                let found = best(&settled(shares), &|rows| Some(seconds[rows - 1]), step_s, most);
                let rates: Vec<f64> = (0..=most).map(|drafts| rate(&shares, &seconds, step_s, drafts)).collect();
                let top = rates.iter().copied().fold(0.0, f64::max);
                if top > (1.0 + GAIN_MIN) * rates[0] + 1e-6 {
                    assert!((rates[found.drafts] - top).abs() < 1e-6, "{found:?} of {rates:?}");
                } else {
                    assert_eq!(found.drafts, 0, "{rates:?}");
                }
            }
        }
    }

    #[test]
    fn a_window_that_is_not_known_is_tried_one_row_at_a_time() {
        let acceptance = settled([0.9; DEPTHS]);
        let known = |rows_known: usize| move |rows: usize| (rows <= rows_known).then_some(1.0 + 0.01 * rows as f64);
        assert_eq!(best(&acceptance, &known(0), 0.0, 7), Depth { drafts: 0, tokens_per_s: 0.0 });
        assert_eq!(best(&acceptance, &known(1), 0.0, 7).drafts, 1);
        assert_eq!(best(&acceptance, &known(3), 0.0, 7).drafts, 3);
        assert_eq!(best(&acceptance, &known(8), 0.0, 7).drafts, 7);
    }

    #[test]
    fn a_depth_is_judged_only_where_all_before_it_were_accepted() {
        let mut acceptance = Acceptance::new(0.5);
        for _ in 0..200 {
            acceptance.judge(&[1, 2, 3], &[1, 9, 3]);
        }
        let shares = acceptance.shares();
        assert!(shares[0] > 0.95 && shares[1] < 0.1, "{shares:?}");
        assert_eq!(acceptance.judged[2], 0.0);
        assert!((shares[2] - shares[1]).abs() < 1e-9, "a depth that was never judged is like the one before it");
    }

    #[test]
    fn old_drafts_are_forgotten_and_doubted_ones_soon_outweighed() {
        let mut acceptance = Acceptance::new(0.5);
        (0..500).for_each(|_| acceptance.note(1, 0));
        let mut doubted = acceptance.clone();
        doubted.doubt(1);
        assert!((doubted.shares()[0] - acceptance.shares()[0]).abs() < 1e-9, "doubt alone changes nothing");
        (0..4).for_each(|_| doubted.note(1, 1));
        assert!(doubted.shares()[0] > 0.3, "{:?}", doubted.shares());
        (0..200).for_each(|_| acceptance.note(1, 1));
        assert!(acceptance.shares()[0] > 0.85, "{:?}", acceptance.shares());
        acceptance.doubt(0);
        acceptance.doubt(99);
    }
}
