//! The two timelines of an engine and the choice of the one that a prompt continues.
//!
//! The *main* timeline begins at row 0 of the caches. A *side* timeline lies in rows that main has not reached: a small request (an
//! agent's title, a second agent) is answered there, and main's long prefix stays. Main grows over it when it needs the rows.

use crate::engine::sequence::Sequence;

/// Rows whose loss is worth a side timeline or a parked copy.
pub const WORTH_KEEPING: usize = 64;
/// Loss below which a request takes main's place, however short it is.
const SIDE_LOSS_MIN: usize = 512;
/// Tokens that a side timeline has room to write at least.
const SIDE_ROOM_MIN: usize = 512;

/// Which of the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// From row 0 on.
    #[default]
    Main,
    /// Behind main.
    Side,
}

/// What a request needs.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens it may write at most.
    pub tokens_max: usize,
    /// Tokens of the prompt in the best parked conversation.
    pub parked: usize,
}

/// Where a request goes and what it finds there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Which timeline.
    pub place: Place,
    /// Row of its position 0.
    pub first_row: u32,
    /// Leading tokens that the timeline keeps; what follows in it is lost.
    pub kept: usize,
    /// Whether a parked conversation is copied in instead.
    pub resumes: bool,
}

/// Both timelines.
#[derive(Debug, Default)]
pub struct Timelines {
    main: Sequence,
    side: Option<Sequence>,
    active: Place,
}

impl Timelines {
    /// Which timeline is read and written now.
    #[must_use]
    pub fn place(&self) -> Place {
        self.active
    }

    /// The timeline that is read and written now.
    #[must_use]
    pub fn active(&self) -> &Sequence {
        match (&self.side, self.active) {
            (Some(side), Place::Side) => side,
            _ => &self.main,
        }
    }

    /// As [`Timelines::active`], to be changed.
    pub fn active_mut(&mut self) -> &mut Sequence {
        match (&mut self.side, self.active) {
            (Some(side), Place::Side) => side,
            _ => &mut self.main,
        }
    }

    /// The side timeline, where there is one.
    #[must_use]
    pub fn side(&self) -> Option<&Sequence> {
        self.side.as_ref()
    }

    /// Forgets both.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Forgets the side timeline.
    pub fn clear_side(&mut self) {
        self.side = None;
        self.active = Place::Main;
    }

    /// Makes `sequence` the timeline at `place`, and that the active one.
    pub fn set(&mut self, place: Place, sequence: Sequence) {
        self.active = place;
        match place {
            Place::Main => self.main = sequence,
            Place::Side => self.side = Some(sequence),
        }
    }

    /// Goes on with what is at `place`, cut back to `kept` tokens.
    pub fn continue_at(&mut self, place: Place, kept: usize) {
        self.active = place;
        self.active_mut().truncate(kept);
    }

    /// The timeline at `place`, where there is one.
    #[must_use]
    pub fn at(&self, place: Place) -> Option<&Sequence> {
        match place {
            Place::Main => Some(&self.main),
            Place::Side => self.side.as_ref(),
        }
    }

    /// Chooses the timeline for a request in caches of `n_ctx` rows: the one that holds most of the prompt; the side one where main
    /// would lose much more than the request is long. `reusable` says how many leading tokens of the prompt a timeline spares.
    #[must_use]
    pub fn decide(&self, wanted: Wanted, n_ctx: usize, reusable: impl Fn(Place, &Sequence) -> usize) -> Decision {
        let n_prompt = wanted.prompt_tokens;
        let in_main = reusable(Place::Main, &self.main);
        let in_side = self.side.as_ref().map_or(0, |side| reusable(Place::Side, side));
        if let Some(side) = self.side.as_ref().filter(|_| in_side > 0 && in_side >= in_main.max(wanted.parked)) {
            // A continuation that has outgrown its room moves to main, as any other.
            if side.first_row() as usize + n_prompt + SIDE_ROOM_MIN.min(wanted.tokens_max) <= n_ctx {
                return Decision { place: Place::Side, first_row: side.first_row(), kept: in_side, resumes: false };
            }
        }
        let resumes = wanted.parked > in_main;
        let kept = if resumes { 0 } else { in_main };
        let loss = self.main.len() - kept;
        let side_rows = n_prompt + wanted.tokens_max.min(n_prompt.max(SIDE_ROOM_MIN));
        // What main holds half of is the same conversation, told on from an earlier turn.
        let is_small = loss >= SIDE_LOSS_MIN.max(2 * n_prompt) && 2 * kept < n_prompt;
        if is_small && self.main.len() + side_rows <= n_ctx {
            let first_row = u32::try_from(n_ctx - side_rows).expect("rows are below 2^32");
            return Decision { place: Place::Side, first_row, kept: 0, resumes };
        }
        Decision { place: Place::Main, first_row: 0, kept, resumes }
    }

    /// Whether going on as decided loses enough of what is at its place to be parked.
    #[must_use]
    pub fn loses(&self, decision: Decision) -> bool {
        self.at(decision.place).is_some_and(|sequence| sequence.len() - decision.kept.min(sequence.len()) >= WORTH_KEEPING)
    }

    /// Whether main, grown to `rows` rows, runs into the side timeline.
    #[must_use]
    pub fn runs_into_side(&self, rows: usize) -> bool {
        self.active == Place::Main && self.side.as_ref().is_some_and(|side| rows > side.first_row() as usize)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the timeline that saves most is chosen, and a long one does not fall to a small request. Method: timelines of counted
    //! tokens; no device.
    use super::*;
    use crate::engine::sequence::Reuse;
    use crate::units::TokenId;

    const N_CTX: usize = 8192;

    /// Tokens that tell conversations apart.
    fn conversation(name: TokenId, n: TokenId) -> Vec<TokenId> {
        (0..n).map(|index| name * 100_000 + index).collect()
    }

    fn with_main(tokens: &[TokenId]) -> Timelines {
        let mut timelines = Timelines::default();
        timelines.active_mut().extend_read(tokens);
        timelines
    }

    fn decide(timelines: &Timelines, prompt: &[TokenId], tokens_max: usize, parked: usize) -> Decision {
        let wanted = Wanted { prompt_tokens: prompt.len(), tokens_max, parked };
        timelines.decide(wanted, N_CTX, |_, sequence| sequence.reusable(prompt, Reuse::Any))
    }

    #[test]
    fn a_conversation_goes_on_where_it_stands() {
        let timelines = with_main(&conversation(1, 4000));
        let longer = conversation(1, 4100);
        assert_eq!(decide(&timelines, &longer, 10_000, 0), Decision { place: Place::Main, first_row: 0, kept: 4000, resumes: false });
        // Another ending, told again: what is lost is short.
        let mut edited = longer.clone();
        edited[3900] = 7;
        assert_eq!(decide(&timelines, &edited, 10_000, 0).kept, 3900);
    }

    #[test]
    fn a_small_request_leaves_a_long_conversation_alone() {
        let mut timelines = with_main(&conversation(1, 4000));
        let title = conversation(2, 300);
        let decision = decide(&timelines, &title, 32_000, 0);
        assert_eq!(decision, Decision { place: Place::Side, first_row: 8192 - 300 - 512, kept: 0, resumes: false });
        assert!(!timelines.loses(decision), "nothing lies there");
        timelines.set(Place::Side, Sequence::starting_at(decision.first_row));
        timelines.active_mut().extend_read(&title);
        assert_eq!(decide(&timelines, &conversation(2, 320), 100, 0).place, Place::Side);
        assert_eq!(
            decide(&timelines, &conversation(1, 4100), 100, 0),
            Decision { place: Place::Main, first_row: 0, kept: 4000, resumes: false }
        );
        assert!(!timelines.runs_into_side(8000), "the side is active");
        timelines.continue_at(Place::Main, 4000);
        assert!(!timelines.runs_into_side(7380) && timelines.runs_into_side(7381));
        assert_eq!(decide(&timelines, &conversation(2, 700), 900, 0).place, Place::Side, "a new place, with more room");
    }

    #[test]
    fn a_long_request_takes_main_and_so_does_one_without_room_beside_it() {
        let timelines = with_main(&conversation(1, 4000));
        assert_eq!(decide(&timelines, &conversation(2, 2001), 10, 0).place, Place::Main);
        let full = with_main(&conversation(1, 7600));
        let decision = decide(&full, &conversation(2, 300), 512, 0);
        assert_eq!((decision.place, decision.kept), (Place::Main, 0));
        assert!(full.loses(decision));
        assert_eq!(decide(&with_main(&conversation(1, 500)), &conversation(2, 100), 10, 0).place, Place::Main, "little is lost");
    }

    #[test]
    fn the_best_of_live_and_parked_is_taken() {
        let timelines = with_main(&conversation(1, 400));
        let mut prompt = conversation(1, 100);
        prompt.extend(conversation(2, 900));
        assert_eq!(decide(&timelines, &prompt, 10, 99), Decision { place: Place::Main, first_row: 0, kept: 100, resumes: false });
        assert_eq!(decide(&timelines, &prompt, 10, 500), Decision { place: Place::Main, first_row: 0, kept: 0, resumes: true });
    }
}
