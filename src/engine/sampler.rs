//! From logits to a token: pure and seeded.
//!
//! Order: penalties, top-k, top-p, min-p, temperature, draw. At temperature 0 the best token is taken, the lowest number among equals.

use super::constraint::Allowed;
use crate::units::TokenId;

/// How to choose.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Sampling {
    /// Divides the logits; 0 takes the best token.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Candidates kept until their probabilities sum to this.
    pub top_p: f32,
    /// Candidates kept whose probability is at least this share of the best one's.
    pub min_p: f32,
    /// Start of the random sequence.
    pub seed: u64,
    /// Divides positive and multiplies negative logits of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Taken once from the logit of a recent token; 0 is off.
    pub presence_penalty: f32,
    /// Taken for each time a recent token occurs; 0 is off.
    pub frequency_penalty: f32,
    /// How many recent tokens the penalties look at; 0 switches them off.
    pub penalty_last_n: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.8,
            min_p: 0.0,
            seed: 0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
        }
    }
}

/// Number of the largest logit, the lowest number among equals; `None` where one is not finite or there are none.
#[must_use]
pub fn argmax(logits: &[f32]) -> Option<TokenId> {
    let mut best: Option<(TokenId, f32)> = None;
    for (token, &logit) in (0..).zip(logits) {
        if !logit.is_finite() {
            return None;
        }
        if best.is_none_or(|(_, most)| logit > most) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token)
}

/// As [`argmax`], of some tokens whose logits are known to be finite.
fn best_among(logits: &[f32], allowed: &Allowed) -> Option<TokenId> {
    let among = (0..).zip(logits).filter(|&(token, _)| allowed.contains(token));
    among.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(token, _)| token)
}

/// Natural logarithms of probabilities, of the logits as the model gives them: before penalties, cuts and temperature.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Logprobs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// Of the best tokens, best first, the lowest number first among equals.
    pub top: Vec<(TokenId, f32)>,
}

/// Of the token `chosen` and the `n_top` best ones, from one row of logits. With drafts each row of a window has its own. `None` where a
/// logit is not finite or `chosen` is no token.
#[must_use]
pub fn logprobs(logits: &[f32], chosen: TokenId, n_top: usize) -> Option<Logprobs> {
    let best = f64::from(logits[argmax(logits)? as usize]);
    let chosen = *logits.get(chosen as usize)?;
    // The best one is taken out before the sum, which cannot overflow then and is at least 1.
    let log_sum = best + logits.iter().map(|&logit| (f64::from(logit) - best).exp()).sum::<f64>().ln();
    #[allow(clippy::cast_possible_truncation, reason = "rounded once, at the end")]
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(n_top.min(logits.len()) + 1);
    for (token, &logit) in (0..).zip(logits) {
        if top.len() < n_top || top.last().is_some_and(|&(_, least)| logit > least) {
            let place = top.partition_point(|&(_, better)| better >= logit);
            top.insert(place, (token, logit));
            top.truncate(n_top);
        }
    }
    Some(Logprobs { chosen: of(chosen), top: top.into_iter().map(|(token, logit)| (token, of(logit))).collect() })
}

/// Chooses tokens one after another.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
}

impl Sampler {
    /// A sampler.
    #[must_use]
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling }
    }

    /// Start of the random sequence.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.sampling.seed
    }

    /// Tokens of the history that a choice looks at, the last ones.
    #[must_use]
    pub fn history_tokens(&self) -> usize {
        if self.is_penalising() { self.sampling.penalty_last_n as usize } else { 0 }
    }

    fn is_penalising(&self) -> bool {
        let Sampling { repeat_penalty, presence_penalty, frequency_penalty, penalty_last_n, .. } = self.sampling;
        penalty_last_n > 0 && (repeat_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0)
    }

    /// Chooses the token at `position` after `history`. The draw depends on seed and position alone, so it does not matter how many
    /// tokens were chosen before. `None` where a logit is not finite.
    #[must_use]
    pub fn choose(&self, logits: &[f32], history: &[TokenId], position: usize) -> Option<TokenId> {
        self.choose_among(logits, &Allowed::All, history, position)
    }

    /// As [`Sampler::choose`], among some tokens alone: the others are no candidates for any cut. `None` also where none is allowed.
    #[must_use]
    pub fn choose_among(&self, logits: &[f32], allowed: &Allowed, history: &[TokenId], position: usize) -> Option<TokenId> {
        let best = argmax(logits)?;
        let penalised = self.penalise(logits, history);
        let logits = penalised.as_deref().unwrap_or(logits);
        if self.sampling.temperature <= 0.0 {
            return match allowed {
                Allowed::Only(_) => best_among(logits, allowed),
                Allowed::All if penalised.is_some() => argmax(logits),
                Allowed::All => Some(best),
            };
        }
        let candidates = self.candidates(logits, allowed);
        (!candidates.is_empty()).then(|| draw(&candidates, unit_random(self.sampling.seed, position as u64)))
    }

    fn penalise(&self, logits: &[f32], history: &[TokenId]) -> Option<Vec<f32>> {
        if !self.is_penalising() {
            return None;
        }
        let Sampling { repeat_penalty, presence_penalty, frequency_penalty, penalty_last_n, .. } = self.sampling;
        let mut adjusted = logits.to_vec();
        let recent = &history[history.len().saturating_sub(penalty_last_n as usize)..];
        let mut seen = std::collections::BTreeMap::new();
        for &token in recent {
            let times = seen.entry(token).or_insert(0u16);
            *times = times.saturating_add(1);
        }
        for (token, times) in seen {
            let Some(logit) = adjusted.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repeat_penalty } else { *logit * repeat_penalty };
            *logit -= presence_penalty + frequency_penalty * f32::from(times);
        }
        Some(adjusted)
    }

    /// Candidates with their weights at the sampler's temperature, best first.
    fn candidates(&self, logits: &[f32], allowed: &Allowed) -> Vec<(TokenId, f64)> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let mut ranked: Vec<(TokenId, f32)> = (0..).zip(logits.iter().copied()).filter(|&(token, _)| allowed.contains(token)).collect();
        let by_rank = |a: &(TokenId, f32), b: &(TokenId, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        // Only the candidates that stay are sorted: of a whole vocabulary that would cost many times as much.
        if (1..ranked.len()).contains(&(top_k as usize)) {
            ranked.select_nth_unstable_by(top_k as usize - 1, by_rank);
            ranked.truncate(top_k as usize);
        }
        ranked.sort_unstable_by(by_rank);
        let Some(&(_, best)) = ranked.first() else { return Vec::new() };
        let best = f64::from(best);
        let weight = |logit: f32, divisor: f32| ((f64::from(logit) - best) / f64::from(divisor)).exp();
        let total: f64 = ranked.iter().map(|&(_, logit)| weight(logit, 1.0)).sum();
        let mut summed = 0.0;
        let mut kept = 0;
        for &(_, logit) in &ranked {
            let probability = weight(logit, 1.0) / total;
            if kept > 0 && (summed >= f64::from(top_p) || probability * total < f64::from(min_p)) {
                break;
            }
            summed += probability;
            kept += 1;
        }
        ranked.truncate(kept);
        ranked.into_iter().map(|(token, logit)| (token, weight(logit, temperature))).collect()
    }
}

/// Picks by weight; `random` lies in [0, 1).
fn draw(candidates: &[(TokenId, f64)], random: f64) -> TokenId {
    let total: f64 = candidates.iter().map(|&(_, weight)| weight).sum();
    let mut left = random * total;
    for &(token, weight) in candidates {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    candidates.last().expect("there is at least one candidate").0
}

/// A number in [0, 1) from seed and position: splitmix64 of their mix.
#[allow(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
pub(super) fn unit_random(seed: u64, position: u64) -> f64 {
    let mut state = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^= state >> 31;
    (state >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(change: impl Fn(&mut Sampling)) -> Sampler {
        let mut sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, ..Sampling::default() };
        change(&mut sampling);
        Sampler::new(sampling)
    }

    #[test]
    fn the_best_token_is_the_lowest_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), Some(1));
        assert_eq!(argmax(&[]), None);
    }

    #[test]
    fn logits_that_are_no_numbers_choose_nothing() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(sampler(|_| ()).choose(&[0.0, bad], &[], 0), None);
        }
    }

    #[test]
    fn only_what_is_allowed_is_chosen_and_cuts_are_made_among_it() {
        let only = |tokens: &[TokenId]| Allowed::Only(std::sync::Arc::new(tokens.iter().copied().collect()));
        let logits = [9.0, 1.0, 5.0, 1.0];
        for (allowed, expected) in [(only(&[1, 2]), Some(2)), (only(&[3, 1]), Some(1)), (only(&[7]), None), (only(&[]), None)] {
            for change in [|s: &mut Sampling| s.temperature = 0.0, |s: &mut Sampling| s.top_k = 1, |s: &mut Sampling| s.top_p = 0.01] {
                assert_eq!(sampler(change).choose_among(&logits, &allowed, &[], 0), expected, "{allowed:?}");
            }
        }
        let drawn = (0..100).filter_map(|position| sampler(|_| ()).choose_among(&logits, &only(&[1, 3]), &[], position));
        let drawn: std::collections::BTreeSet<TokenId> = drawn.collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [1, 3]);
        let nan = [f32::NAN, 1.0];
        assert_eq!(sampler(|_| ()).choose_among(&nan, &only(&[1]), &[], 0), None, "a row that is not finite chooses nothing");
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let sampler = sampler(|_| ());
        let logits = [0.0f32, 3f32.ln()];
        let ones = (0..4000).filter(|&position| sampler.choose(&logits, &[], position) == Some(1)).count();
        assert!((2880..3120).contains(&ones), "{ones} of 4000, 3000 expected");
    }

    #[test]
    fn the_same_seed_and_position_draw_the_same_token() {
        let logits: Vec<f32> = (0..50u8).map(|i| f32::from(i % 7)).collect();
        let (one, other) = (sampler(|s| s.seed = 9), sampler(|s| s.seed = 10));
        let tokens = |sampler: &Sampler| (0..40).map(|position| sampler.choose(&logits, &[], position)).collect::<Vec<_>>();
        assert_eq!(tokens(&one), tokens(&one));
        assert_ne!(tokens(&one), tokens(&other));
    }

    #[test]
    fn cuts_leave_only_the_best() {
        let logits = [0.0, 5.0, 4.9, -1.0];
        for cut in [sampler(|s| s.top_k = 1), sampler(|s| s.top_p = 0.1), sampler(|s| s.min_p = 0.99)] {
            assert!((0..100).all(|position| cut.choose(&logits, &[], position) == Some(1)));
        }
    }

    #[test]
    fn a_cut_by_rank_keeps_the_lowest_numbers_of_equals() {
        let logits: Vec<f32> = (0..200u8).map(|token| f32::from(token % 5)).collect();
        let candidates = sampler(|s| s.top_k = 7).candidates(&logits, &Allowed::All);
        let tokens: Vec<TokenId> = candidates.into_iter().map(|(token, _)| token).collect();
        assert_eq!(tokens, [4, 9, 14, 19, 24, 29, 34]);
        assert_eq!(sampler(|s| s.top_k = 200).candidates(&logits, &Allowed::All), sampler(|_| ()).candidates(&logits, &Allowed::All));
    }

    #[test]
    fn logprobs_are_logarithms_of_probabilities_and_ranked() {
        let probabilities = [0.1f32, 0.4, 0.05, 0.4, 0.05];
        let logits = probabilities.map(|probability| probability.ln() + 700.0);
        let found = logprobs(&logits, 0, 3).expect("finite");
        let close = |found: f32, probability: f32| (found - probability.ln()).abs() < 1e-4;
        assert!(close(found.chosen, 0.1), "{found:?}");
        assert_eq!(found.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [1, 3, 0]);
        assert!(found.top.iter().all(|&(token, logprob)| close(logprob, probabilities[token as usize])), "{found:?}");
        let all = logprobs(&logits, 4, 99).expect("finite").top;
        assert_eq!(all.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [1, 3, 0, 2, 4]);
        let sum: f32 = all.iter().map(|&(_, logprob)| logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
        assert_eq!(logprobs(&logits, 4, 0).expect("finite").top, []);
    }

    #[test]
    fn logprobs_of_nothing_and_of_what_is_no_number_are_none() {
        assert_eq!(logprobs(&[], 0, 1), None);
        assert_eq!(logprobs(&[0.0, 1.0], 2, 1), None);
        assert_eq!(logprobs(&[0.0, f32::NAN], 0, 1), None);
        let far = logprobs(&[f32::MIN, f32::MAX], 0, 1).expect("finite");
        assert!(far.chosen < -1e38 && far.top == [(1, 0.0)], "{far:?}");
    }

    #[test]
    fn penalties_move_the_choice_away_from_recent_tokens() {
        let greedy = |change: fn(&mut Sampling)| {
            sampler(|s| {
                s.temperature = 0.0;
                change(s);
            })
        };
        let logits = [1.0, 2.0];
        assert_eq!(greedy(|_| ()).choose(&logits, &[1], 0), Some(1));
        assert_eq!(greedy(|s| s.repeat_penalty = 3.0).choose(&logits, &[1], 0), Some(0));
        assert_eq!(greedy(|s| s.presence_penalty = 1.5).choose(&logits, &[1], 0), Some(0));
        assert_eq!(greedy(|s| s.frequency_penalty = 0.6).choose(&logits, &[1, 1], 0), Some(0));
        assert_eq!(greedy(|s| s.frequency_penalty = 0.6).choose(&logits, &[1], 0), Some(1));
    }

    #[test]
    fn a_token_repeated_past_the_counter_is_still_penalised() {
        let sampler = sampler(|s| {
            s.temperature = 0.0;
            s.frequency_penalty = 1.0;
            s.penalty_last_n = 1 << 20;
        });
        assert_eq!(sampler.choose(&[1.0, 2.0], &vec![1; 1 << 16], 0), Some(0));
    }
}
