//! Dry runs: operations and copies that charge time and compute nothing, so that real shapes run in seconds.
//!
//! Budget, addresses, shapes and order are checked as ever. What the host wrote to pinned memory reaches the device and comes back;
//! weights, activations and caches are addresses alone and read as zeros. Logits are therefore zeros, and routes come from a
//! distribution instead of a router's product.
//!
//! A token's experts in a layer follow from the seed, the layer and the token's position: the same at any chunk, block or window. The
//! layer is known by the matrix whose product the router reads, the position by the operands of the attention, or of the delta rule over
//! a prompt, before it. A window's delta rule says no position: the last attention's are taken, which lie where they lay for the window
//! before.

use std::collections::HashMap;

use crate::backend::Addr;

/// How a dry run draws routes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DryRun {
    /// Every route follows from it.
    pub seed: u64,
    /// 0: all experts of a layer are alike. Above 0: the expert of rank `r` in its layer's order of popularity, which differs from
    /// layer to layer, is drawn in proportion to `1 / (r + 1)^skew`, as in Zipf's law.
    pub skew: f64,
}

impl DryRun {
    /// Uniform routing.
    #[must_use]
    pub const fn uniform(seed: u64) -> Self {
        Self { seed, skew: 0.0 }
    }
}

/// Tickets of a lottery in which experts hold shares by popularity; a power of two, so that 16 random bits draw one.
const TICKETS: usize = 1 << 16;

/// One step of a SplitMix64 sequence.
fn mixed(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The positions of rows in work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// They lie in memory, i32.
    Listed(Addr),
    /// They follow each other from here on.
    From(u32),
}

/// Draws routes and remembers what tells one router from another.
pub struct Router {
    run: DryRun,
    /// By number of experts: the rank that each ticket stands for.
    tickets: HashMap<u32, Vec<u32>>,
    /// By layer and number of experts: the expert of each rank.
    orders: HashMap<(u64, u32), Vec<u32>>,
    /// The last product's output and its matrix.
    last_product: (Addr, Addr),
    /// The positions of the rows in work, and how many.
    last_positions: (Positions, u32),
}

impl Router {
    /// A router of `run`.
    pub fn new(run: DryRun) -> Self {
        let nowhere = Addr(0);
        let last_positions = (Positions::From(0), 0);
        Self { run, tickets: HashMap::new(), orders: HashMap::new(), last_product: (nowhere, nowhere), last_positions }
    }

    /// Takes note of a product.
    pub fn note_product(&mut self, out: Addr, matrix: Addr) {
        self.last_product = (out, matrix);
    }

    /// Takes note of the positions of rows.
    pub fn note_positions(&mut self, positions: Positions, n_rows: u32) {
        self.last_positions = (positions, n_rows);
    }

    /// A number for the layer whose router logits lie at `logits`.
    pub fn layer_key(&self, logits: Addr) -> u64 {
        let (out, matrix) = self.last_product;
        if out == logits { matrix.0 } else { logits.0 }
    }

    /// The positions of `n_rows` rows in work, where they are known.
    pub fn positions(&self, n_rows: u32) -> Option<Positions> {
        (self.last_positions.1 == n_rows).then_some(self.last_positions.0)
    }

    /// Fills `ids` `[positions.len(), n_used]`, distinct and ascending in each row.
    pub fn route(&mut self, layer_key: u64, positions: impl Iterator<Item = u64>, n_expert: u32, n_used: u32, ids: &mut [u32]) {
        let DryRun { seed, skew } = self.run;
        let tickets = self.tickets.entry(n_expert).or_insert_with(|| tickets(n_expert, skew));
        let layer_seed = mixed(seed.wrapping_mul(GAMMA).wrapping_add(mixed(layer_key.wrapping_add(GAMMA))));
        let order = self.orders.entry((layer_key, n_expert)).or_insert_with(|| shuffled(n_expert, layer_seed));
        let mut taken = vec![0_u64; n_expert.div_ceil(64) as usize];
        for (position, ids) in positions.zip(ids.chunks_exact_mut(n_used as usize)) {
            draw(mixed(layer_seed.wrapping_add(position.wrapping_mul(GAMMA))), n_used, tickets, order, &mut taken);
            let chosen = taken.iter_mut().zip(0_u32..).flat_map(|(word, at)| {
                let mut bits = std::mem::take(word);
                std::iter::from_fn(move || {
                    let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                    bits &= bits - 1;
                    Some(64 * at + bit)
                })
            });
            for (id, expert) in ids.iter_mut().zip(chosen) {
                *id = expert;
            }
        }
    }
}

/// Marks `n_used` experts in `taken`. A draw of one who is in already is repeated; where the lottery is so skewed that this takes too
/// long, the next by popularity comes in.
fn draw(row_seed: u64, n_used: u32, tickets: &[u32], order: &[u32], taken: &mut [u64]) {
    let mut state = row_seed;
    let mut left = n_used;
    let mut take = |expert: u32| {
        let (word, bit) = (&mut taken[(expert / 64) as usize], 1_u64 << (expert % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    };
    for _ in 0..4 * n_used {
        state = state.wrapping_add(GAMMA);
        let bits = mixed(state);
        for pair in bits.to_le_bytes().as_chunks::<2>().0 {
            let ticket = u16::from_le_bytes(*pair);
            if take(order[tickets[usize::from(ticket)] as usize]) {
                left -= 1;
                if left == 0 {
                    return;
                }
            }
        }
    }
    for &expert in order {
        if take(expert) {
            left -= 1;
            if left == 0 {
                return;
            }
        }
    }
}

/// The ranks `0..n_expert`, each as often as its share asks for.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "shares of 65,536 tickets")]
fn tickets(n_expert: u32, skew: f64) -> Vec<u32> {
    let weight = |rank: u32| f64::from(rank + 1).powf(-skew);
    let total: f64 = (0..n_expert).map(weight).sum();
    let mut tickets = Vec::with_capacity(TICKETS);
    let mut sum = 0.0;
    for rank in 0..n_expert {
        sum += weight(rank);
        tickets.resize(((sum / total * TICKETS as f64).round() as usize).min(TICKETS), rank);
    }
    tickets.resize(TICKETS, n_expert - 1);
    tickets
}

/// The numbers `0..n` in an order that follows from the seed.
#[allow(clippy::cast_possible_truncation, reason = "a remainder of a 32-bit number")]
fn shuffled(n: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n).collect();
    for last in (1..n).rev() {
        let other = mixed(seed ^ u64::from(last).wrapping_mul(GAMMA)) % u64::from(last + 1);
        order.swap(last as usize, other as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    //! Goal: routes look as documented and cost little. Method: counts over many rows.
    use super::*;

    fn routes(run: DryRun, layer_key: u64, positions: std::ops::Range<u64>, n_expert: u32, n_used: u32) -> Vec<u32> {
        let mut ids = vec![u32::MAX; usize::try_from(positions.end - positions.start).expect("few") * n_used as usize];
        Router::new(run).route(layer_key, positions, n_expert, n_used, &mut ids);
        ids
    }

    /// How often each expert was chosen, most popular first.
    fn counts(ids: &[u32], n_expert: u32) -> Vec<usize> {
        let mut counts = vec![0; n_expert as usize];
        for &id in ids {
            counts[id as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts
    }

    #[test]
    fn experts_of_a_row_are_distinct_ascending_and_in_range() {
        for (n_expert, n_used, skew) in [(128, 8, 0.0), (256, 8, 1.2), (512, 10, 0.5), (5, 5, 3.0), (1, 1, 0.0), (70, 3, 40.0)] {
            let ids = routes(DryRun { seed: 1, skew }, 3, 0..500, n_expert, n_used);
            for row in ids.chunks_exact(n_used as usize) {
                assert!(row.is_sorted_by(|a, b| a < b) && row.iter().all(|&id| id < n_expert), "{n_expert}, {n_used}, {skew}: {row:?}");
            }
        }
    }

    #[test]
    fn a_route_follows_from_seed_layer_and_position_alone() {
        let run = DryRun { seed: 7, skew: 0.8 };
        let whole = routes(run, 11, 0..100, 128, 8);
        assert_eq!(routes(run, 11, 40..60, 128, 8), whole[40 * 8..60 * 8], "whatever the chunk");
        for other in [routes(run, 12, 0..100, 128, 8), routes(DryRun { seed: 8, ..run }, 11, 0..100, 128, 8)] {
            let same = whole.chunks_exact(8).zip(other.chunks_exact(8)).filter(|(a, b)| a == b).count();
            assert!(same < 5, "{same} of 100 rows are alike");
        }
        let mut router = Router::new(run);
        router.note_product(Addr(1), Addr(500));
        router.note_positions(Positions::Listed(Addr(9)), 4);
        assert_eq!((router.layer_key(Addr(1)), router.layer_key(Addr(2))), (500, 2), "known by its matrix, else by its place");
        assert_eq!((router.positions(4), router.positions(5)), (Some(Positions::Listed(Addr(9))), None));
    }

    #[test]
    fn uniform_routing_gives_all_experts_their_share_and_skewed_routing_zipfs() {
        let rows = 20_000;
        let uniform = counts(&routes(DryRun::uniform(3), 1, 0..rows, 128, 8), 128);
        let share = 20_000.0 * 8.0 / 128.0;
        assert!(uniform.iter().all(|&count| (count as f64 / share - 1.0).abs() < 0.15), "{uniform:?}");
        // One expert a row: no draw is repeated, so shares are those of the law.
        let skewed = counts(&routes(DryRun { seed: 3, skew: 1.0 }, 1, 0..rows, 64, 1), 64);
        let total: f64 = (1..=64).map(|rank| 1.0 / f64::from(rank)).sum();
        for rank in [1_u32, 2, 4] {
            let expected = 20_000.0 / f64::from(rank) / total;
            let found = skewed[rank as usize - 1] as f64;
            assert!((found / expected - 1.0).abs() < 0.1, "rank {rank}: {found}, {expected} expected");
        }
    }

    #[test]
    fn layers_have_favourites_of_their_own() {
        let run = DryRun { seed: 3, skew: 1.5 };
        let favourite = |layer| {
            let ids = routes(run, layer, 0..2000, 128, 1);
            (0..128_u32).max_by_key(|&expert| ids.iter().filter(|&&id| id == expert).count())
        };
        let favourites: std::collections::BTreeSet<_> = (0..16).map(favourite).collect();
        assert!(favourites.len() > 10, "{favourites:?}");
    }
}
