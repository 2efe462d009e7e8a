//! Who drafts the next window, and how much.
//!
//! Owns what was learned of both sources. Each window both are weighed by the tokens a second that they promise at their best depth, and the
//! better one drafts. A lookup costs nothing, so it is judged in every window, also where it was not offered; the draft layer is judged
//! by what it offered, and probed where it offers nothing.

use super::depth::{Acceptance, Depth, DraftCosts, best};
use super::probe::Probe;
use super::{DraftCounters, DraftSource, Lookup, Verified};
use crate::settings::DraftSettings;
use crate::units::TokenId;

/// Acceptance of a draft layer's first draft until some are judged.
const MTP_PRIOR: f64 = 0.7;
/// Matches of a lookup by least tokens, and acceptance until some are judged: the longer the match, the surer what follows.
const MATCH_CLASSES: [(usize, f64); 4] = [(2, 0.25), (3, 0.4), (5, 0.6), (9, 0.8)];
/// Gain over writing without drafts that errors of measured times do not explain.
const CLEAR_GAIN: f64 = 0.25;
/// Windows with drafts, where they gain less than that, until one without is measured again. Else a time of it that was too long by chance
/// would keep drafts on for good.
const SINGLE_WINDOWS: u32 = 32;

/// Drafts that the next window is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drafting {
    /// Who makes them.
    pub source: DraftSource,
    /// How many at most, at least one. The draft layer may stop earlier where it is not sure enough.
    pub depth: usize,
    is_probe: bool,
}

/// Chooses source and depth window by window. Life: [`Drafter::plan`] before a window, [`Drafter::note`] behind it. A window that failed
/// is not noted.
#[derive(Clone, Debug)]
pub struct Drafter {
    uses_mtp: bool,
    uses_lookup: bool,
    drafts_max: usize,
    /// Drafts are made whether or not they pay.
    always: bool,
    lookup: Lookup,
    /// What the lookup proposes for the window that was planned, and in which class of matches.
    proposal: Vec<TokenId>,
    match_class: usize,
    mtp: Acceptance,
    matches: [Acceptance; MATCH_CLASSES.len()],
    mtp_probe: Probe,
    lookup_probe: Probe,
    /// Most drafts that a window had so far. The next has at most one more: what larger windows take is not known.
    deepest: usize,
    /// Windows with drafts since the last one without.
    windows_since_single: u32,
    planned: Option<Drafting>,
    counters: DraftCounters,
}

impl Drafter {
    /// Nothing learned yet.
    #[must_use]
    pub fn new(settings: &DraftSettings, has_draft_layer: bool) -> Self {
        Self {
            uses_mtp: settings.uses_mtp() && has_draft_layer,
            uses_lookup: settings.uses_lookup(),
            drafts_max: settings.drafts_max(),
            always: settings.always,
            lookup: Lookup::new(),
            proposal: Vec::new(),
            match_class: 0,
            mtp: Acceptance::new(MTP_PRIOR),
            matches: MATCH_CLASSES.map(|(_, prior)| Acceptance::new(prior)),
            mtp_probe: Probe::default(),
            lookup_probe: Probe::default(),
            deepest: 0,
            windows_since_single: 0,
            planned: None,
            counters: DraftCounters::default(),
        }
    }

    /// Whether the draft layer may be asked, so that it has to follow the text.
    #[must_use]
    pub fn uses_mtp(&self) -> bool {
        self.uses_mtp
    }

    /// What was counted since the start.
    #[must_use]
    pub fn counters(&self) -> DraftCounters {
        self.counters
    }

    /// Plans the drafts of a window behind `sequence` whose first rows are `chosen`, tokens that are no part of it yet. `room` is the most
    /// drafts that there is use for: rows of the window, context and tokens still to be written. `None`: the window has no drafts.
    pub fn plan(&mut self, sequence: &[TokenId], chosen: &[TokenId], room: usize, costs: DraftCosts<'_>) -> Option<Drafting> {
        self.planned = None;
        self.proposal.clear();
        let most = self.drafts_max.min(room);
        let most = if self.always { most } else { most.min(self.deepest + 1) };
        if self.uses_lookup {
            self.lookup.sync(sequence, chosen);
            // All of it, whatever the room: it is judged by what is chosen anyway.
            let match_tokens = self.lookup.propose(self.drafts_max, &mut self.proposal);
            self.match_class = MATCH_CLASSES.iter().rposition(|&(least, _)| match_tokens >= least).unwrap_or(0);
        }
        if most > 0 {
            self.planned = if self.always { self.whatever_it_costs(most) } else { self.choose(most, costs) };
        }
        self.planned
    }

    /// As many drafts as there is room for, of the draft layer where it may be asked.
    fn whatever_it_costs(&self, most: usize) -> Option<Drafting> {
        let source = if self.uses_mtp { DraftSource::Mtp } else { DraftSource::Lookup };
        let has_any = source == DraftSource::Mtp || !self.proposal.is_empty();
        has_any.then_some(Drafting { source, depth: most, is_probe: false })
    }

    fn choose(&mut self, most: usize, costs: DraftCosts<'_>) -> Option<Drafting> {
        let has_proposal = !self.proposal.is_empty();
        let of_lookup = has_proposal.then(|| best(&self.matches[self.match_class], costs.window_s, 0.0, most));
        let of_mtp = self.uses_mtp.then(|| best(&self.mtp, costs.window_s, costs.mtp_step_s, most));
        let (source, Depth { drafts, tokens_per_s }) = match (of_lookup, of_mtp) {
            // Among equals that write without drafts, the draft layer is the one to be probed: the lookup is judged as it is.
            (Some(lookup), Some(mtp)) if lookup.drafts > 0 && lookup.tokens_per_s >= mtp.tokens_per_s => (DraftSource::Lookup, lookup),
            (_, Some(mtp)) => (DraftSource::Mtp, mtp),
            (Some(lookup), None) => (DraftSource::Lookup, lookup),
            (None, None) => return None,
        };
        let is_clear = (costs.window_s)(1).is_some_and(|single_s| tokens_per_s * single_s > 1.0 + CLEAR_GAIN);
        if drafts > 0 && !is_clear && self.windows_since_single >= SINGLE_WINDOWS {
            return None;
        }
        let is_probe = drafts < most && self.is_probe_due(source, drafts, costs);
        if is_probe && source == DraftSource::Mtp {
            self.mtp.doubt(drafts + 1);
        }
        let depth = drafts + usize::from(is_probe);
        (depth > 0).then_some(Drafting { source, depth, is_probe })
    }

    fn is_probe_due(&mut self, source: DraftSource, drafts: usize, costs: DraftCosts<'_>) -> bool {
        let (probe, step_s) = match source {
            DraftSource::Mtp => (&mut self.mtp_probe, costs.mtp_step_s),
            DraftSource::Lookup => (&mut self.lookup_probe, 0.0),
        };
        // Where not even this window is known there is nothing to compare with.
        let Some(now_s) = (costs.window_s)(1 + drafts) else { return false };
        let more_s = (costs.window_s)(2 + drafts).map_or(0.0, |probed_s| (probed_s - now_s).max(0.0)) + step_s;
        probe.is_due(drafts, now_s, more_s)
    }

    /// What the lookup drafts for the window that was planned, at most `depth` tokens.
    #[must_use]
    pub fn lookup_drafts(&self, depth: usize) -> &[TokenId] {
        &self.proposal[..depth.min(self.proposal.len())]
    }

    /// Takes note of a window that ended well: the drafts that were rows of it, and what it came to.
    pub fn note(&mut self, offered: &[TokenId], verified: &Verified) {
        let planned = self.planned.take();
        self.counters.note(planned.map(|drafting| (drafting.source, offered.len(), verified.accepted)));
        self.matches[self.match_class].judge(&self.proposal, &verified.tokens);
        self.proposal.clear();
        self.deepest = self.deepest.max(offered.len());
        self.windows_since_single = if offered.is_empty() { 0 } else { self.windows_since_single.saturating_add(1) };
        let Some(Drafting { source, depth, is_probe }) = planned else { return };
        if source == DraftSource::Mtp {
            self.mtp.note(offered.len().min(verified.tokens.len()), verified.accepted);
        }
        if is_probe {
            let probe = match source {
                DraftSource::Mtp => &mut self.mtp_probe,
                DraftSource::Lookup => &mut self.lookup_probe,
            };
            probe.note(verified.accepted >= depth);
        }
    }
}

#[cfg(test)]
#[path = "drafter_tests.rs"]
mod tests;
