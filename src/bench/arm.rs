//! The ways of setting an engine that are compared, each under the same budget.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::settings::{AliasThreshold, BlockSetting, EngineSettings};

/// A way of setting an engine. What it does with a prompt is for the engine to choose within that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// The founding document's default.
    Default,
    /// A loan of any size, the head kept.
    Loan,
    /// The head always lent.
    Alias,
    /// The head always lent, in the founding document's order.
    AliasChunk,
    /// The planner chooses.
    Auto,
}

impl Arm {
    /// All of them, the one that others are compared with first.
    pub const ALL: [Self; 5] = [Self::Default, Self::Loan, Self::Alias, Self::AliasChunk, Self::Auto];

    /// As typed and printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Loan => "loan",
            Self::Alias => "alias",
            Self::AliasChunk => "alias-chunk",
            Self::Auto => "auto",
        }
    }

    /// What it sets, in a line.
    #[must_use]
    pub const fn explanation(self) -> &'static str {
        match self {
            Self::Default => "head kept, block = chunk, the largest chunk that the loan affords: the founding document's default",
            Self::Loan => "head kept, blocks of any length in a loan of any size",
            Self::Alias => "head lent for every prompt, blocks of any length",
            Self::AliasChunk => "head lent for every prompt, block = chunk: the founding document's order",
            Self::Auto => "the head may be lent; the planner takes the way it predicts to be fastest",
        }
    }

    /// Its place among [`Arm::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        Self::ALL.iter().position(|&arm| arm == self).expect("all are there")
    }

    /// `base` with what this arm sets. A block of `base` holds where the arm is not one chunk a block.
    #[must_use]
    pub fn settings(self, base: &EngineSettings) -> EngineSettings {
        let block = match self {
            Self::Default | Self::AliasChunk => BlockSetting::Chunk,
            Self::Loan | Self::Alias | Self::Auto => base.block,
        };
        let (head_alias, alias_min_tokens) = match self {
            Self::Default | Self::Loan => (false, AliasThreshold::Auto),
            Self::Alias | Self::AliasChunk => (true, AliasThreshold::Tokens(0)),
            Self::Auto => (true, AliasThreshold::Auto),
        };
        EngineSettings { block, head_alias, alias_min_tokens, ..base.clone() }
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no arm has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is not one of: {}", Arm::ALL.map(Arm::name).join(", "))]
pub struct UnknownArm {
    /// What was written.
    pub value: String,
}

impl FromStr for Arm {
    type Err = UnknownArm;

    fn from_str(text: &str) -> Result<Self, UnknownArm> {
        Self::ALL.into_iter().find(|arm| arm.name() == text).ok_or_else(|| UnknownArm { value: text.to_owned() })
    }
}

impl Serialize for Arm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The order in which arms take their turn in a repetition: each comes first in its time, and every other repetition runs backwards,
/// so that a machine that grows warm or busy favours none.
#[must_use]
pub fn turn(arms: &[Arm], repetition: u32) -> Vec<Arm> {
    let mut order = arms.to_vec();
    if !order.is_empty() {
        order.rotate_left(repetition as usize / 2 % arms.len());
    }
    if repetition % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_print_as_they_are_typed() {
        for arm in Arm::ALL {
            assert_eq!(arm.to_string().parse(), Ok(arm));
            assert_eq!(Arm::ALL[arm.index()], arm);
        }
        let error = "head".parse::<Arm>().expect_err("no arm").to_string();
        assert_eq!(error, "`head` is not one of: default, loan, alias, alias-chunk, auto");
    }

    #[test]
    fn an_arm_changes_block_and_alias_alone() {
        let base = EngineSettings { block: BlockSetting::Tokens(512), threads: 3, head_alias: true, ..EngineSettings::default() };
        for arm in Arm::ALL {
            let settings = arm.settings(&base);
            let EngineSettings { block, head_alias, alias_min_tokens, .. } = base.clone();
            assert_eq!(EngineSettings { block, head_alias, alias_min_tokens, ..settings.clone() }, base, "{arm}");
            assert_eq!(settings.block == BlockSetting::Chunk, matches!(arm, Arm::Default | Arm::AliasChunk), "{arm}");
            assert_eq!(settings.head_alias, !matches!(arm, Arm::Default | Arm::Loan), "{arm}");
        }
    }

    #[test]
    fn arms_take_turns_at_being_first_and_every_other_repetition_runs_backwards() {
        let names = |repetition| turn(&[Arm::Default, Arm::Loan, Arm::Auto], repetition);
        assert_eq!(names(0), [Arm::Default, Arm::Loan, Arm::Auto]);
        assert_eq!(names(1), [Arm::Auto, Arm::Loan, Arm::Default]);
        assert_eq!(names(2), [Arm::Loan, Arm::Auto, Arm::Default]);
        assert!(turn(&[], 3).is_empty());
    }
}
