//! One direction of the link, booked by intervals of virtual time.
//!
//! Streams are drained in whatever order somebody waits for them, so bookings do not come in the order of their times. A transfer that
//! may start at some time takes the idle time of the link from then on, in as many pieces as it meets gaps: the link never idles while
//! a transfer is ready. Booked time is therefore the same whatever the order of bookings; who books first has the earlier end where
//! two compete.

use std::collections::VecDeque;

/// Spans kept at most. What is older than the oldest of them is taken to be busy: a stream that lags that far finds no gap there.
const SPANS_MAX: usize = 1024;

/// Busy time from `start_s` to `end_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Span {
    start_s: f64,
    end_s: f64,
}

/// The bookings of one direction.
#[derive(Clone, Debug, Default)]
pub struct Link {
    /// Ascending; no two touch.
    busy: VecDeque<Span>,
    /// Time up to here is taken to be busy: spans were dropped to keep the bound.
    floor_s: f64,
    /// Nobody books from before this any more.
    past_s: f64,
}

impl Link {
    /// Books `duration_s` of idle time from `from_s` on and returns when it is over.
    pub fn book(&mut self, from_s: f64, duration_s: f64) -> f64 {
        debug_assert!(from_s >= self.past_s, "{from_s} is over, what was booked before {} is forgotten", self.past_s);
        if duration_s <= 0.0 {
            return from_s;
        }
        let from_s = from_s.max(self.floor_s);
        // Every gap from `from_s` to the end is filled, so the transfer and the spans it meets become one.
        let first = self.busy.partition_point(|span| span.end_s < from_s);
        let (mut at_s, mut left_s) = (from_s, duration_s);
        let mut joined = Span { start_s: from_s, end_s: from_s };
        let mut n_joined = 0;
        for span in self.busy.iter().skip(first) {
            let gap_s = (span.start_s - at_s).max(0.0);
            if left_s < gap_s {
                break;
            }
            n_joined += 1;
            joined.start_s = joined.start_s.min(span.start_s);
            if left_s == gap_s {
                // It ends where this span begins.
                at_s += left_s;
                joined.end_s = span.end_s;
                left_s = 0.0;
                break;
            }
            left_s -= gap_s;
            at_s = span.end_s.max(at_s);
        }
        let done_s = at_s + left_s;
        joined.end_s = joined.end_s.max(done_s);
        self.busy.drain(first..first + n_joined);
        self.busy.insert(first, joined);
        while self.busy.len() > SPANS_MAX {
            self.forget_oldest();
        }
        done_s
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.busy.pop_front() {
            self.floor_s = self.floor_s.max(oldest.end_s);
        }
    }

    /// Drops what lies before `before_s`, the earliest time that anything can still be booked from.
    pub fn forget(&mut self, before_s: f64) {
        while self.busy.front().is_some_and(|span| span.end_s <= before_s) {
            self.busy.pop_front();
        }
        self.past_s = self.past_s.max(before_s);
    }

    /// Spans that are kept.
    pub fn n_spans(&self) -> usize {
        self.busy.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spans(link: &Link) -> Vec<(f64, f64)> {
        link.busy.iter().map(|span| (span.start_s, span.end_s)).collect()
    }

    #[test]
    fn an_earlier_transfer_that_is_booked_later_does_not_wait_behind_a_later_one() {
        let mut link = Link::default();
        assert_eq!(link.book(100.0, 5.0), 105.0);
        assert_eq!(link.book(1.0, 2.0), 3.0);
        assert_eq!(link.book(2.0, 1.0), 4.0, "behind the one that it meets");
        assert_eq!(spans(&link), [(1.0, 4.0), (100.0, 105.0)]);
    }

    #[test]
    fn a_transfer_is_split_over_the_gaps_that_it_meets() {
        let mut link = Link::default();
        link.book(2.0, 1.0);
        link.book(5.0, 1.0);
        assert_eq!(link.book(0.0, 5.0), 7.0, "2 s before the first, 2 s between, 1 s behind");
        assert_eq!(spans(&link), [(0.0, 7.0)]);
    }

    #[test]
    fn a_transfer_that_fills_a_gap_exactly_ends_where_the_next_begins() {
        let mut link = Link::default();
        link.book(0.0, 1.0);
        link.book(3.0, 1.0);
        assert_eq!(link.book(0.5, 2.0), 3.0);
        assert_eq!(spans(&link), [(0.0, 4.0)]);
        assert_eq!(link.book(4.0, 1.0), 5.0);
        assert_eq!(spans(&link), [(0.0, 5.0)], "neighbours are one span");
    }

    #[test]
    fn an_empty_transfer_takes_no_time_and_leaves_no_trace() {
        let mut link = Link::default();
        link.book(0.0, 4.0);
        assert_eq!(link.book(1.0, 0.0), 1.0);
        assert_eq!(link.n_spans(), 1);
    }

    #[test]
    fn what_nobody_can_book_any_more_is_forgotten() {
        let mut link = Link::default();
        for second in 0..10 {
            link.book(f64::from(2 * second), 1.0);
        }
        link.forget(10.5);
        assert_eq!(spans(&link).first(), Some(&(10.0, 11.0)));
        assert_eq!(link.n_spans(), 5);
        assert_eq!(link.book(10.5, 0.25), 11.25, "what is still busy is kept whole");
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "is forgotten")]
    fn a_booking_from_before_what_was_forgotten_is_a_fault_of_ours() {
        let mut link = Link::default();
        link.forget(10.5);
        link.book(10.0, 0.25);
    }

    #[test]
    fn spans_have_a_bound_and_the_oldest_go_first() {
        let mut link = Link::default();
        let n_bookings = u32::try_from(SPANS_MAX).expect("small") + 100;
        for second in 0..n_bookings {
            link.book(f64::from(2 * second), 1.0);
        }
        assert_eq!(link.n_spans(), SPANS_MAX);
        assert_eq!(link.book(0.0, 1.0), 200.0, "after the hundredth, which ended at 199");
    }

    proptest! {
        /// Times are whole numbers, so sums are exact.
        #[test]
        fn busy_time_is_that_of_all_transfers_in_any_order(wanted in prop::collection::vec((0u32..200, 1u32..20), 1..60)) {
            let mut forward = Link::default();
            let mut backward = Link::default();
            for &(from, duration) in &wanted {
                let done = forward.book(from.into(), duration.into());
                prop_assert!(done >= f64::from(from + duration), "no transfer is faster than the link");
            }
            for &(from, duration) in wanted.iter().rev() {
                backward.book(from.into(), duration.into());
            }
            let total: f64 = spans(&forward).iter().map(|(start, end)| end - start).sum();
            prop_assert_eq!(total, wanted.iter().map(|&(_, duration)| f64::from(duration)).sum::<f64>());
            prop_assert!(spans(&forward).windows(2).all(|pair| pair[0].1 < pair[1].0), "ascending, and no two touch");
            prop_assert_eq!(spans(&forward), spans(&backward));
        }
    }
}
