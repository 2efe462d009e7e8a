//! What became of drafts.

use serde::Serialize;

use super::DraftSource;

/// Drafts of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceCounters {
    /// Windows with at least one draft of this source as a row.
    pub windows: u64,
    /// Drafts that were rows of a window that ended well. One that its source made but that no window carried does not count.
    pub offered: u64,
    /// Of them, those equal to the token that was chosen in their place, up to the first that is not. What follows a token that ends the
    /// text does not count.
    pub accepted: u64,
}

impl SourceCounters {
    fn since(self, before: Self) -> Self {
        Self { windows: self.windows - before.windows, offered: self.offered - before.offered, accepted: self.accepted - before.accepted }
    }
}

/// Windows that wrote, and their drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounters {
    /// Windows from which a token was chosen, with drafts or without. Each gives one token beside its accepted drafts.
    pub windows: u64,
    /// Drafts of the draft layer.
    pub mtp: SourceCounters,
    /// Drafts of the lookup.
    pub lookup: SourceCounters,
}

impl DraftCounters {
    /// Takes note of a window; `drafts` are source, rows that were drafts, and those accepted.
    pub fn note(&mut self, drafts: Option<(DraftSource, usize, usize)>) {
        self.windows += 1;
        let Some((source, offered, accepted)) = drafts.filter(|&(_, offered, _)| offered > 0) else { return };
        let of_source = match source {
            DraftSource::Mtp => &mut self.mtp,
            DraftSource::Lookup => &mut self.lookup,
        };
        of_source.windows += 1;
        of_source.offered += offered as u64;
        of_source.accepted += accepted as u64;
    }

    /// Drafts of both sources that were rows of a window.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.mtp.offered + self.lookup.offered
    }

    /// Accepted drafts of both sources.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.mtp.accepted + self.lookup.accepted
    }

    /// Accepted drafts for each window that had any; `None` where none had.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn accepted_per_drafted_window(&self) -> Option<f64> {
        let windows = self.mtp.windows + self.lookup.windows;
        (windows > 0).then(|| self.accepted() as f64 / windows as f64)
    }

    /// Tokens that a window wrote; `None` where none did.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn tokens_per_window(&self) -> Option<f64> {
        (self.windows > 0).then(|| (self.windows + self.accepted()) as f64 / self.windows as f64)
    }

    /// What was counted since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self { windows: self.windows - before.windows, mtp: self.mtp.since(before.mtp), lookup: self.lookup.since(before.lookup) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_counted_with_drafts_or_without() {
        let mut counters = DraftCounters::default();
        assert_eq!((counters.tokens_per_window(), counters.accepted_per_drafted_window()), (None, None));
        counters.note(None);
        counters.note(Some((DraftSource::Mtp, 3, 2)));
        let before = counters;
        counters.note(Some((DraftSource::Lookup, 4, 0)));
        // The draft layer was asked and was not sure enough of anything.
        counters.note(Some((DraftSource::Mtp, 0, 0)));
        assert_eq!((counters.windows, counters.offered(), counters.accepted()), (4, 7, 2));
        assert_eq!((counters.mtp.windows, counters.lookup.windows), (1, 1));
        assert_eq!((counters.tokens_per_window(), counters.accepted_per_drafted_window()), (Some(1.5), Some(1.0)));
        let since = counters.since(&before);
        assert_eq!((since.windows, since.mtp, since.lookup.offered), (2, SourceCounters::default(), 4));
    }
}
