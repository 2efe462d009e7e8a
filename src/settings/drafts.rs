//! What a user can set about drafts: tokens guessed ahead and verified together in one window.

use std::fmt;
use std::str::FromStr;

use super::{SettingError, TokenSource, WholeNumber};

/// Most drafts of a window: the largest window has eight rows, and the first is a token that was chosen.
pub const DRAFTS_MAX: u32 = 7;

/// Who drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSetting {
    /// The model's draft layer.
    Mtp,
    /// What followed the last tokens where they stood before.
    Lookup,
    /// The better of the two, window by window; of a model without a draft layer the lookup alone.
    #[default]
    Both,
    /// Nobody.
    Off,
}
words!(DraftSetting { Mtp = "mtp", Lookup = "lookup", Both = "both", Off = "off" });

/// Drafts of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecSetting {
    /// As many as pay, up to [`DRAFTS_MAX`].
    #[default]
    Auto,
    /// As many as pay, up to this many; 0: none.
    Drafts(u32),
}
auto_or_number!(SpecSetting::Drafts, "drafts", 0, DRAFTS_MAX);

/// All about drafts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftSettings {
    /// Who drafts.
    pub source: DraftSetting,
    /// How many drafts a window has at most.
    pub most: SpecSetting,
    /// Probability under the draft head below which a draft of the draft layer is not offered; 0 offers all.
    pub min_p: f32,
    /// The tokens among which the draft layer chooses; `None`: all. A file until the model is known; an engine gets a list, ascending,
    /// each token once, at least one.
    pub vocab: Option<TokenSource>,
    /// For showing and measuring: every window has as many drafts as it may, whether or not they pay.
    pub always: bool,
    /// For measuring: each draft is taken with this probability, whatever the model says, by a draw of seed and position. The text means
    /// nothing then.
    pub force_acceptance: Option<f64>,
}

impl DraftSettings {
    /// Most drafts of a window; 0 where drafts are off.
    #[must_use]
    pub fn drafts_max(&self) -> usize {
        match (self.source, self.most) {
            (DraftSetting::Off, _) => 0,
            (_, SpecSetting::Auto) => DRAFTS_MAX as usize,
            (_, SpecSetting::Drafts(drafts)) => drafts.min(DRAFTS_MAX) as usize,
        }
    }

    /// Whether the draft layer drafts, where the model has one.
    #[must_use]
    pub fn uses_mtp(&self) -> bool {
        self.drafts_max() > 0 && matches!(self.source, DraftSetting::Mtp | DraftSetting::Both)
    }

    /// Whether earlier text is looked up.
    #[must_use]
    pub fn uses_lookup(&self) -> bool {
        self.drafts_max() > 0 && matches!(self.source, DraftSetting::Lookup | DraftSetting::Both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_drafts_print_as_they_are_written() {
        for word in DraftSetting::CHOICES {
            assert_eq!(word.parse::<DraftSetting>().map(|value| value.to_string()).as_deref(), Ok(*word));
        }
        for text in ["auto", "0", "7"] {
            assert_eq!(text.parse::<SpecSetting>().map(|value| value.to_string()).as_deref(), Ok(text));
        }
        assert_eq!("8".parse::<SpecSetting>().expect_err("a row too many").to_string(), "8 is out of bounds: 0 to 7 drafts");
    }

    #[test]
    fn drafts_are_off_without_a_source_and_without_rows() {
        let settings = |source, most| DraftSettings { source, most, ..DraftSettings::default() };
        let used = |settings: DraftSettings| (settings.drafts_max(), settings.uses_mtp(), settings.uses_lookup());
        assert_eq!(used(DraftSettings::default()), (7, true, true));
        assert_eq!(used(settings(DraftSetting::Off, SpecSetting::Drafts(3))), (0, false, false));
        assert_eq!(used(settings(DraftSetting::Both, SpecSetting::Drafts(0))), (0, false, false));
        assert_eq!(used(settings(DraftSetting::Mtp, SpecSetting::Drafts(3))), (3, true, false));
        assert_eq!(used(settings(DraftSetting::Lookup, SpecSetting::Auto)), (7, false, true));
    }
}
