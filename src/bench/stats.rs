//! Medians, quantiles and bootstrap intervals.
//!
//! Everything is a pure function of its numbers and, where something is drawn, of a seed: the same measurements give the same report.

use serde::Serialize;

/// Resamples behind an interval.
pub const RESAMPLES: usize = 2000;
/// Share of the resamples that lies within an interval.
pub const CONFIDENCE: f64 = 0.95;

/// A median with the least and the most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the values lie on either side.
    pub median: f64,
    /// The least value.
    pub min: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// Of `values`; `None` where there are none, or one of them is no number.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = sorted(values)?;
        Some(Self { median: quantile_of_sorted(&sorted, 0.5)?, min: *sorted.first()?, max: *sorted.last()? })
    }
}

/// Where a statistic may lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Half of `values` lie on either side; the mean of the middle two where their number is even. `None` where there are none, or one
/// of them is no number.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    quantile_of_sorted(&sorted(values)?, 0.5)
}

/// `None` where a value is not finite: it has no place in an order, and no figure should be built on it.
fn sorted(values: impl IntoIterator<Item = f64>) -> Option<Vec<f64>> {
    let mut values: Vec<f64> = values.into_iter().collect();
    if values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    Some(values)
}

/// The value below which a share of `share` lies, by linear interpolation between neighbours (as NumPy does unasked).
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in a list")]
fn quantile_of_sorted(sorted: &[f64], share: f64) -> Option<f64> {
    let place = sorted.len().checked_sub(1)? as f64 * share;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

/// The median over units of the median of each unit's values.
///
/// A unit is what was drawn from the world (a request), its values are repeated looks at it (trials).
#[must_use]
pub fn median_of_medians(units: &[Vec<f64>]) -> Option<f64> {
    median(units.iter().filter_map(|values| median(values.iter().copied())))
}

/// An interval for [`median_of_medians`] by the percentile bootstrap in two stages: units are drawn with replacement, and of each
/// drawn unit its values. `None` where nothing can vary: fewer than two values in all.
#[must_use]
pub fn bootstrap(units: &[Vec<f64>], resamples: usize, seed: u64) -> Option<Interval> {
    let units: Vec<&Vec<f64>> = units.iter().filter(|values| !values.is_empty()).collect();
    if units.iter().map(|values| values.len()).sum::<usize>() < 2 {
        return None;
    }
    let mut random = Random::new(seed);
    let mut medians = Vec::with_capacity(resamples);
    let mut drawn = Vec::with_capacity(units.len());
    let mut values = Vec::new();
    for _ in 0..resamples {
        drawn.clear();
        for _ in 0..units.len() {
            let unit = units[random.below(units.len())];
            values.clear();
            values.extend((0..unit.len()).map(|_| unit[random.below(unit.len())]));
            drawn.push(median(values.iter().copied())?);
        }
        medians.push(median(drawn.iter().copied())?);
    }
    let medians = sorted(medians)?;
    let tail = (1.0 - CONFIDENCE) / 2.0;
    Some(Interval { low: quantile_of_sorted(&medians, tail)?, high: quantile_of_sorted(&medians, 1.0 - tail)? })
}

/// A small seeded generator (SplitMix64): draws need to be even and repeatable, nothing more.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `n`, which must not be 0; uneven by less than n in 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        let scaled = (u128::from(self.bits()) * n as u128) >> 64;
        usize::try_from(scaled).expect("it is below n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quantiles_are_those_worked_out_by_hand() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
        assert_eq!(median([1.0, f64::NAN]), None);
        assert_eq!(Spread::of([2.0, 8.0, 4.0]), Some(Spread { median: 4.0, min: 2.0, max: 8.0 }));
        // Places 0.3 and 2.7 of four values: a tenth each way of the ends, in units of their gaps.
        assert!((quantile_of_sorted(&[10.0, 20.0, 40.0, 80.0], 0.1).expect("a value") - 13.0).abs() < 1e-12);
        assert!((quantile_of_sorted(&[10.0, 20.0, 40.0, 80.0], 0.9).expect("a value") - 68.0).abs() < 1e-12);
        assert_eq!(median_of_medians(&[vec![1.0, 9.0, 2.0], vec![4.0], vec![]]), Some(3.0));
    }

    /// Of the numbers 1 to 9 the median of a resample is at most k with the probability that at least 5 of 9 draws are: 0.0014 for
    /// 1, 0.030 for 2. So the interval reaches from 2 to 8, whichever way the draws fall.
    #[test]
    fn the_interval_of_nine_units_is_that_of_the_binomial_distribution() {
        let units: Vec<Vec<f64>> = (1..=9).map(|value| vec![f64::from(value)]).collect();
        for seed in 0..5 {
            assert_eq!(bootstrap(&units, 20_000, seed), Some(Interval { low: 2.0, high: 8.0 }), "seed {seed}");
        }
    }

    /// One unit of nine values is the same draw, one stage down.
    #[test]
    fn the_trials_of_a_single_unit_vary_too() {
        let unit = vec![(1..=9).map(f64::from).collect::<Vec<_>>()];
        assert_eq!(bootstrap(&unit, 20_000, 1), Some(Interval { low: 2.0, high: 8.0 }));
    }

    #[test]
    fn what_cannot_vary_has_no_interval_and_what_does_not_has_a_point() {
        assert_eq!(bootstrap(&[], 100, 1), None);
        assert_eq!(bootstrap(&[vec![], vec![2.0]], 100, 1), None);
        assert_eq!(bootstrap(&[vec![2.0], vec![2.0]], 100, 1), Some(Interval { low: 2.0, high: 2.0 }));
    }

    #[test]
    fn an_interval_follows_its_seed() {
        let mut random = Random::new(3);
        let units: Vec<Vec<f64>> = (0..40).map(|_| vec![random.below(1000) as f64]).collect();
        assert_eq!(bootstrap(&units, 200, 7), bootstrap(&units, 200, 7));
        assert_ne!(bootstrap(&units, 200, 7), bootstrap(&units, 200, 8));
    }

    /// The first outputs of the published generator for seed 0.
    #[test]
    fn random_bits_are_those_of_splitmix64() {
        let mut random = Random::new(0);
        assert_eq!([random.bits(), random.bits()], [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]);
        let mut counts = [0; 5];
        (0..5000).for_each(|_| counts[random.below(5)] += 1);
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
