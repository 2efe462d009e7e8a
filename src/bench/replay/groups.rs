//! Requests by their fresh tokens, and what an arm is worth in each group.
//!
//! A ratio pairs: the same request of the same trial, arm over base. Of a request its trials' median is taken, of a group its
//! requests' median. The interval draws requests with replacement, and of each drawn request its trials (see
//! [`bootstrap`](crate::bench::stats::bootstrap)), so it speaks of requests like these and not of these alone.

use serde::Serialize;

use crate::bench::arm::Arm;
use crate::bench::figures::{READ, Run, Speed, WRITTEN, ratios};
use crate::bench::stats::{self, Interval, RESAMPLES};

/// Requests of alike many fresh tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bucket(usize);

/// Largest numbers of fresh tokens of all buckets but the last, and the names of all.
const BOUNDS: [usize; 4] = [64, 512, 2048, 8192];
const NAMES: [&str; 5] = ["1-64", "65-512", "513-2048", "2049-8192", "over 8192"];
/// The name of the group of all requests.
const ALL: &str = "all";

impl Bucket {
    /// The bucket of a number of fresh tokens.
    #[must_use]
    pub fn of(fresh_tokens: usize) -> Self {
        Self(BOUNDS.iter().filter(|&&most| fresh_tokens > most).count())
    }

    /// Its least and most tokens.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self.0]
    }
}

/// One request under one arm.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// Which arm.
    pub arm: Arm,
    /// The request's bucket.
    pub bucket: Bucket,
    /// Its runs under the arm.
    pub runs: &'a [Run],
    /// Its runs under the base, with which these are compared; `None` where these are the base's own.
    pub base: Option<&'a [Run]>,
}

/// How many times as fast as the base, with where that may lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The median.
    pub median: f64,
    /// Where it may lie; `None` where nothing could be drawn, from a single run.
    pub interval: Option<Interval>,
}

/// An arm's figures in a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupFigures {
    /// Which arm.
    pub arm: Arm,
    /// Median seconds to the first token.
    pub first_token_s: f64,
    /// Median tokens read a second.
    pub read_tokens_per_s: f64,
    /// Median tokens written a second, of requests that wrote more than one.
    pub written_tokens_per_s: Option<f64>,
    /// Reading against the base; `None` of the base itself, and where that did not run.
    pub read_ratio: Option<Ratio>,
    /// Writing, likewise.
    pub written_ratio: Option<Ratio>,
}

/// A group of requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The bucket's name, or `all`.
    pub bucket: &'static str,
    /// Requests in it.
    pub requests: usize,
    /// Each arm's figures.
    pub results: Vec<GroupFigures>,
}

/// All groups that have requests, by tokens, and all requests last.
#[must_use]
pub fn all(arms: &[Arm], samples: &[Sample<'_>], seed: u64) -> Vec<Group> {
    let mut buckets: Vec<Bucket> = samples.iter().map(|sample| sample.bucket).collect();
    buckets.sort_unstable();
    buckets.dedup();
    let of_bucket = |bucket| samples.iter().copied().filter(|sample| sample.bucket == bucket).collect::<Vec<_>>();
    let mut groups: Vec<Group> = buckets.into_iter().map(|bucket| group(bucket.name(), arms, &of_bucket(bucket), seed)).collect();
    if !samples.is_empty() {
        groups.push(group(ALL, arms, samples, seed));
    }
    groups
}

fn group(name: &'static str, arms: &[Arm], samples: &[Sample<'_>], seed: u64) -> Group {
    let of_arm = |arm| samples.iter().copied().filter(|sample| sample.arm == arm).collect::<Vec<_>>();
    let requests = arms.iter().map(|&arm| of_arm(arm).len()).max().unwrap_or(0);
    let results = arms.iter().filter_map(|&arm| figures(arm, &of_arm(arm), seed)).collect();
    Group { bucket: name, requests, results }
}

/// `None` where the arm ran nothing.
fn figures(arm: Arm, samples: &[Sample<'_>], seed: u64) -> Option<GroupFigures> {
    let median = |speed: Speed| {
        let by_request: Vec<Vec<f64>> = samples.iter().map(|sample| sample.runs.iter().filter_map(speed).collect()).collect();
        stats::median_of_medians(&by_request)
    };
    let ratio = |speed: Speed| {
        let by_request: Vec<Vec<f64>> = samples.iter().filter_map(|sample| Some(ratios(sample.runs, sample.base?, speed))).collect();
        let interval = stats::bootstrap(&by_request, RESAMPLES, seed);
        stats::median_of_medians(&by_request).map(|median| Ratio { median, interval })
    };
    Some(GroupFigures {
        arm,
        first_token_s: median(|run| Some(run.first_token_s))?,
        read_tokens_per_s: median(READ)?,
        written_tokens_per_s: median(WRITTEN),
        read_ratio: ratio(READ),
        written_ratio: ratio(WRITTEN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figures::tests::run;

    #[test]
    fn every_number_of_tokens_has_its_bucket() {
        let names = [1, 64, 65, 512, 513, 2048, 2049, 8192, 8193, 1 << 20].map(|tokens| Bucket::of(tokens).name());
        let expected = ["1-64", "1-64", "65-512", "65-512", "513-2048", "513-2048", "2049-8192", "2049-8192", "over 8192", "over 8192"];
        assert_eq!(names, expected);
    }

    /// Two requests of two trials; the arm reads each twice, four times and twice as fast, and one trial of the base is missing.
    #[test]
    fn a_group_has_medians_of_requests_and_ratios_within_trials() {
        let base = [vec![run(0, 4.0, 2), run(1, 8.0, 2)], vec![run(0, 1.0, 2)]];
        let arm = [vec![run(0, 2.0, 4), run(1, 2.0, 4)], vec![run(0, 0.5, 4), run(1, 0.1, 4)]];
        let bucket = Bucket::of(100);
        let samples: Vec<Sample<'_>> = (0..2)
            .flat_map(|index| {
                let base = &base[index][..];
                let of_base = Sample { arm: Arm::Default, bucket, runs: base, base: None };
                [of_base, Sample { arm: Arm::Auto, bucket, runs: &arm[index], base: Some(base) }]
            })
            .collect();
        let groups = all(&[Arm::Default, Arm::Auto], &samples, 1);
        assert_eq!(groups.iter().map(|group| group.bucket).collect::<Vec<_>>(), ["65-512", "all"]);
        assert_eq!((groups[0].requests, groups[0].results.len()), (2, 2));
        let [default, auto] = &groups[1].results[..] else { panic!("two arms") };
        assert!((default.first_token_s - 3.5).abs() < 1e-12, "between medians 6 and 1");
        assert_eq!((default.read_ratio, default.written_ratio), (None, None));
        let ratio = auto.read_ratio.expect("both ran");
        assert!((ratio.median - 2.5).abs() < 1e-12, "between medians 3 and 2");
        let interval = ratio.interval.expect("three pairs");
        assert!(interval.low >= 2.0 && interval.high <= 4.0 && interval.low < ratio.median && interval.high > ratio.median, "{interval:?}");
        assert_eq!(auto.written_ratio.map(|ratio| ratio.median), Some(2.0));
    }

    #[test]
    fn without_requests_there_are_no_groups() {
        assert!(all(&[Arm::Default], &[], 1).is_empty());
    }
}
