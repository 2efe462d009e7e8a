//! What prompts are made of.

use super::stats::Random;
use crate::units::TokenId;

/// Where the tokens of prompts come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Material {
    /// Random tokens. A router spreads them near evenly over the experts, which no real text does.
    Random {
        /// Start of the sequence.
        seed: u64,
    },
    /// Tokens of a text, at least one. A prompt starts somewhere in it and goes on at its start where it ends.
    Text(Vec<TokenId>),
}

impl Material {
    /// In a word, for reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Random { .. } => "random",
            Self::Text(_) => "text",
        }
    }

    /// The prompt of a number. Prompts of different numbers differ from their start on, so that none is answered from what an earlier
    /// one left in the engine.
    #[must_use]
    pub fn prompt(&self, number: u64, prompt_tokens: usize, n_vocab: u32) -> Vec<TokenId> {
        match self {
            Self::Random { seed } => {
                let mut random = Random::new(Random::new(seed ^ number.rotate_left(32)).bits());
                let mut token = || TokenId::try_from(random.below(n_vocab as usize)).expect("it is below a 32-bit number");
                (0..prompt_tokens).map(|_| token()).collect()
            }
            Self::Text(tokens) => {
                // The golden section of the text from one start to the next: starts lie far apart and never in step.
                let step = tokens.len() as u64 * 618 / 1000 + 1;
                let start = number.wrapping_mul(step) % tokens.len().max(1) as u64;
                let start = usize::try_from(start).expect("it lies within the text");
                tokens.iter().copied().cycle().skip(start).take(prompt_tokens).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_follow_their_number_and_nothing_else() {
        let random = Material::Random { seed: 5 };
        let prompt = random.prompt(3, 200, 50);
        assert_eq!(prompt, random.prompt(3, 200, 50));
        assert!(prompt.iter().all(|&token| token < 50) && prompt.iter().max() > prompt.iter().min());
        assert_ne!(prompt, random.prompt(4, 200, 50));
        assert_ne!(prompt, Material::Random { seed: 6 }.prompt(3, 200, 50));
        assert_eq!(prompt[..100], random.prompt(3, 100, 50), "a shorter prompt is the start of a longer one");
    }

    #[test]
    fn a_text_is_read_from_different_starts_and_round_its_end() {
        let text = Material::Text((0..10).collect());
        assert_eq!(text.prompt(0, 12, 99), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]);
        let starts: Vec<TokenId> = (0..5).map(|number| text.prompt(number, 1, 99)[0]).collect();
        assert_eq!(starts, [0, 7, 4, 1, 8]);
        assert_eq!(Material::Text(vec![4]).prompt(9, 3, 99), [4, 4, 4]);
    }
}
