//! Goal: drafts never cost more than they bring, and bring what they can. Method: windows whose time and acceptance are drawn, with costs
//! learned the way the engine learns them.

use super::*;
use crate::engine::sampler::unit_random;
use crate::settings::{DraftSetting, SpecSetting};

/// Numbers from 0 up to below 1.
struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    fn unit(&mut self) -> f64 {
        self.drawn += 1;
        unit_random(self.seed, self.drawn)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the bound is small")]
    fn below(&mut self, bound: u32) -> u32 {
        (self.unit() * f64::from(bound)) as u32
    }
}

/// A device and a draft layer.
#[derive(Clone, Copy, Debug)]
struct World {
    /// Seconds of a row beside the first, which with its window takes one second.
    row_s: f64,
    /// Seconds of a draft.
    step_s: f64,
    /// Measured times lie this far around the true ones.
    noise: f64,
}

impl World {
    fn window_s(&self, rows: usize) -> f64 {
        1.0 + self.row_s * (rows - 1) as f64
    }
}

fn drafter(source: DraftSetting) -> Drafter {
    Drafter::new(&DraftSettings { source, ..DraftSettings::default() }, true)
}

fn verified(offered: &[TokenId], truth: &[TokenId]) -> Verified {
    let accepted = offered.iter().zip(truth).take_while(|(offered, truth)| offered == truth).count();
    Verified { tokens: truth[..=accepted].to_vec(), accepted, is_finite: true }
}

/// Mean seconds of a token with a drafter; drafts of the draft layer hold with the probability that `acceptance` gives at each token.
fn seconds_per_token(drafter: &mut Drafter, world: World, text: &[TokenId], acceptance: impl Fn(usize) -> f64, seed: u64) -> f64 {
    let mut random = Random::new(seed);
    // Running averages by rows; a window that never ran is taken to take as long as the next smaller one, as `Costs` does.
    let mut measured = [None::<f64>; 8];
    let (mut written, mut seconds) = (1, 0.0);
    while written + 8 < text.len() {
        let window_s = |rows: usize| (1..=rows).rev().find_map(|rows| measured[rows - 1]);
        let costs = DraftCosts { window_s: &window_s, mtp_step_s: world.step_s };
        let planned = drafter.plan(&text[..written - 1], &text[written - 1..written], 7, costs);
        let truth = &text[written..written + 8];
        let offered: Vec<TokenId> = match planned {
            Some(Drafting { source: DraftSource::Lookup, depth, .. }) => drafter.lookup_drafts(depth).to_vec(),
            Some(Drafting { source: DraftSource::Mtp, depth, .. }) => {
                seconds += depth as f64 * world.step_s;
                (0..depth).map(|ahead| if random.unit() < acceptance(written + ahead) { truth[ahead] } else { u32::MAX }).collect()
            }
            None => Vec::new(),
        };
        let took = world.window_s(1 + offered.len()) * (1.0 + world.noise * (2.0 * random.unit() - 1.0));
        seconds += took;
        let average = &mut measured[offered.len()];
        *average = Some(average.map_or(took, |average| average + 0.25 * (took - average)));
        let verified = verified(&offered, truth);
        written += verified.tokens.len();
        drafter.note(&offered, &verified);
    }
    seconds / (written - 1) as f64
}

/// Text in which nothing stands twice.
fn fresh_text(tokens: u32) -> Vec<TokenId> {
    (0..tokens).collect()
}

fn mean_of_seeds(source: DraftSetting, world: World, text: &[TokenId], acceptance: impl Fn(usize) -> f64) -> f64 {
    let seeds = 1..=3;
    seeds.map(|seed| seconds_per_token(&mut drafter(source), world, text, &acceptance, seed)).sum::<f64>() / 3.0
}

#[test]
fn writing_with_drafts_is_never_slower_than_without() {
    // A short text pays for what has to be learned at its start.
    for (text, bound) in [(fresh_text(500), 1.04), (fresh_text(4000), 1.02)] {
        for (noise, row_s) in [0.0, 0.2].into_iter().flat_map(|noise| [0.0, 0.1, 0.3, 0.6, 1.0].map(|row_s| (noise, row_s))) {
            for step_s in [0.0, 0.05, 0.2, 0.5] {
                let world = World { row_s, step_s, noise };
                for share in (0..=10).map(|tenths| f64::from(tenths) / 10.0) {
                    let seconds = mean_of_seeds(DraftSetting::Mtp, world, &text, |_| share);
                    assert!(seconds <= bound, "{seconds} s a token, 1 without drafts: acceptance {share}, {world:?}");
                }
                // Prose and tables by turns.
                let seconds = mean_of_seeds(DraftSetting::Mtp, world, &text, |token| if token / 400 % 2 == 0 { 0.9 } else { 0.1 });
                assert!(seconds <= bound, "{seconds} s a token, 1 without drafts: by turns, {world:?}");
            }
        }
    }
}

#[test]
fn drafts_bring_most_of_what_the_best_depth_would() {
    let text = fresh_text(4000);
    for (share, row_s, step_s) in [(0.9f64, 0.05, 0.02), (0.8, 0.1, 0.05), (0.6, 0.1, 0.1), (0.95, 0.3, 0.05), (0.5, 0.02, 0.0)] {
        let world = World { row_s, step_s, noise: 0.1 };
        let rate = |drafts: i32| {
            let tokens: f64 = (0..=drafts).map(|depth| share.powi(depth)).sum();
            tokens / (1.0 + f64::from(drafts) * (row_s + step_s))
        };
        let best = (0..=7).map(rate).fold(0.0, f64::max);
        let found = 1.0 / mean_of_seeds(DraftSetting::Mtp, world, &text, |_| share);
        assert!(found > 0.95 * best, "{found} tokens a second of {best}: acceptance {share}, {world:?}");
    }
}

#[test]
fn a_draft_layer_that_becomes_useful_is_found_again() {
    let text = fresh_text(6000);
    let world = World { row_s: 0.1, step_s: 0.05, noise: 0.1 };
    let seconds = mean_of_seeds(DraftSetting::Mtp, world, &text, |token| if token < 1000 { 0.05 } else { 0.9 });
    assert!(seconds < 0.62, "{seconds} s a token; the last 5,000 take 0.37 s each at the best depth");
}

/// Text of parts that stand in it again and again, with fresh tokens between them.
fn repeating_text(tokens: usize) -> Vec<TokenId> {
    let mut random = Random::new(5);
    let mut text = Vec::new();
    let mut next = 1000;
    while text.len() < tokens {
        let part = random.below(8) * 30;
        text.extend(part..part + 30);
        let fresh = random.below(40);
        text.extend(next..next + fresh);
        next += fresh;
    }
    text
}

#[test]
fn what_stands_in_the_text_is_drafted_from_it() {
    let text = repeating_text(4000);
    let world = World { row_s: 0.1, step_s: 0.1, noise: 0.1 };
    let mut of_both = drafter(DraftSetting::Both);
    let both = seconds_per_token(&mut of_both, world, &text, |_| 0.6, 1);
    let counters = of_both.counters();
    assert!(counters.lookup.accepted > 1000 && counters.mtp.accepted > 300, "{counters:?}");
    let (lookup, mtp) =
        (mean_of_seeds(DraftSetting::Lookup, world, &text, |_| 0.6), mean_of_seeds(DraftSetting::Mtp, world, &text, |_| 0.6));
    assert!(both < lookup && both < mtp && lookup < 0.85, "{both}, {lookup}, {mtp} s a token");
}

#[test]
fn matches_that_mislead_are_not_followed() {
    // Pairs of tokens come again, and what follows them never does.
    let mut random = Random::new(3);
    let text: Vec<TokenId> = (0..1500u32)
        .flat_map(|index| {
            let pair = random.below(5);
            [pair, pair + 10, 1000 + index]
        })
        .collect();
    let world = World { row_s: 0.3, step_s: 0.0, noise: 0.1 };
    let mut lookup = drafter(DraftSetting::Lookup);
    let seconds = seconds_per_token(&mut lookup, world, &text, |_| 0.0, 1);
    assert!(seconds <= 1.02, "{seconds} s a token, 1 without drafts: {:?}", lookup.counters());
}

fn plan(drafter: &mut Drafter, sequence: &[TokenId], room: usize) -> Option<(DraftSource, usize)> {
    let costs = DraftCosts { window_s: &|rows| Some(1.0 + 0.01 * rows as f64), mtp_step_s: 0.01 };
    let (chosen, sequence) = sequence.split_last().expect("a token");
    drafter.plan(sequence, &[*chosen], room, costs).map(|drafting| (drafting.source, drafting.depth))
}

/// Windows in which all drafts hold, so that as many are made as may be.
fn grow(drafter: &mut Drafter) {
    for _ in 0..30 {
        let depth = plan(drafter, &[1, 2, 3, 4], 7).map_or(0, |(_, depth)| depth);
        let drafts = [9; 8];
        drafter.note(&drafts[..depth], &Verified { tokens: drafts[..=depth].to_vec(), accepted: depth, is_finite: true });
    }
}

#[test]
fn sources_that_are_off_or_not_there_do_not_draft() {
    let repeated = [1, 2, 3, 4, 5, 1, 2, 3];
    assert_eq!(plan(&mut drafter(DraftSetting::Off), &repeated, 7), None);
    assert_eq!(plan(&mut drafter(DraftSetting::Mtp), &repeated, 7).map(|(source, _)| source), Some(DraftSource::Mtp));
    let without_layer = |source| Drafter::new(&DraftSettings { source, ..DraftSettings::default() }, false);
    assert_eq!(plan(&mut without_layer(DraftSetting::Mtp), &repeated, 7), None);
    assert_eq!(plan(&mut without_layer(DraftSetting::Both), &repeated, 7).map(|(source, _)| source), Some(DraftSource::Lookup));
    assert_eq!(plan(&mut without_layer(DraftSetting::Both), &[1, 2, 3, 4], 7), None);
    let few = DraftSettings { most: SpecSetting::Drafts(2), ..DraftSettings::default() };
    let mut few = Drafter::new(&few, true);
    grow(&mut few);
    assert_eq!(plan(&mut few, &[1, 2, 3, 4], 7), Some((DraftSource::Mtp, 2)));
    let none = DraftSettings { most: SpecSetting::Drafts(0), ..DraftSettings::default() };
    assert_eq!(plan(&mut Drafter::new(&none, true), &repeated, 7), None);
}

#[test]
fn no_more_is_drafted_than_there_is_use_for() {
    let mut mtp = drafter(DraftSetting::Both);
    assert_eq!(plan(&mut mtp, &[1, 2, 3, 4], 7), Some((DraftSource::Mtp, 1)), "one row more than was ever run");
    grow(&mut mtp);
    for room in 0..8 {
        assert_eq!(plan(&mut mtp, &[1, 2, 3, 4], room), (room > 0).then_some((DraftSource::Mtp, room)));
    }
}

#[test]
fn the_lookup_drafts_what_followed_and_is_judged_where_it_was_not_offered() {
    let mut both = drafter(DraftSetting::Both);
    let repeated = [1, 2, 3, 4, 5, 1, 2, 3];
    // A short match promises less than the draft layer at first.
    assert_eq!(plan(&mut both, &repeated, 7).map(|(source, _)| source), Some(DraftSource::Mtp));
    let mut windows = 0;
    while plan(&mut both, &repeated, 7).map(|(source, _)| source) == Some(DraftSource::Mtp) {
        both.note(&[4], &Verified { tokens: vec![4, 5], accepted: 1, is_finite: true });
        windows += 1;
        assert!(windows < 100, "it is as good as the draft layer, and costs nothing");
    }
    assert_eq!(both.lookup_drafts(3), [4, 5, 1]);
    assert_eq!(both.lookup_drafts(99).len(), 7);
    assert_eq!(both.counters().lookup.offered, 0);
}
