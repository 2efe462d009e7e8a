//! Drafts: tokens guessed ahead, verified together in one window.
//!
//! Owns who guesses ([`Drafter`]), how many ([`depth`]), what stood in the text before ([`Lookup`]), which of the guesses hold ([`verify`])
//! and what is counted of them. All of it is plain arithmetic over tokens, logits and seconds: windows, and the steps of the draft layer,
//! are run by the engine. A wrong choice here costs time and never changes the text. `docs/drafts.md` tells the whole.

mod counters;
pub mod depth;
mod drafter;
mod lookup;
mod probe;
mod verify;

pub use counters::{DraftCounters, SourceCounters};
pub use depth::{Acceptance, DraftCosts};
pub use drafter::{Drafter, Drafting};
pub use lookup::{Lookup, MATCH_TOKENS_MAX, MATCH_TOKENS_MIN};
pub use verify::{Candidates, Verified, verify};

/// Who guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// The model's draft layer.
    Mtp,
    /// The text itself: what followed the last tokens where they stood before.
    Lookup,
}
