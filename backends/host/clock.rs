//! Virtual time: what the work would have taken on a modelled device.
//!
//! Each stream has a time of its own, and so has the host: what it queues starts no earlier than its own time, which goes on to the end
//! of whatever it waits for. A copy also takes the [link](super::link) in its direction, and so does an operation that reads host memory
//! in place; other operations wait for nothing but their stream, as on a device with a copy engine.
//!
//! ```text
//! copy      = latency + bytes / link                                          of the link's time
//! operation = launch + max(shortest, flop / rate, bytes / bandwidth) + weights unpacked / rate
//!             or launch + the link's time for what is read in place, where that is longer
//! ```
//! Times are sums of such terms, so tests can compare them with arithmetic. `flop / rate` has two rates, for products with weights and
//! for attention. Weights of experts are unpacked once for a prompt operation, whatever the number of rows: over a pass through all
//! layers this is the fixed time of a pass. One link speed holds for copies and for reads in place, as was measured.

use std::ops::Add;

use super::link::Link;
use crate::backend::Direction;

/// A modelled device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockProfile {
    /// Name, as flags and tables write it.
    pub name: &'static str,
    /// Rate of products with weights, in floating-point operations a second.
    pub linear_flop_per_s: f64,
    /// Rate of attention, in floating-point operations a second; masked pairs do not count.
    pub attention_flop_per_s: f64,
    /// Rate at which weights of experts are unpacked for a prompt, weights a second; infinite where the rate of products covers it.
    pub unpacked_weights_per_s: f64,
    /// Bandwidth of device memory, bytes a second.
    pub device_bytes_per_s: f64,
    /// Bandwidth of the link, each way, bytes a second.
    pub link_bytes_per_s: f64,
    /// Fixed time of a copy, seconds; the link is taken meanwhile.
    pub copy_latency_s: f64,
    /// Time between operations, seconds.
    pub launch_latency_s: f64,
    /// Time of an operation that has next to nothing to do, seconds.
    pub shortest_operation_s: f64,
}

impl ClockProfile {
    /// A laptop with 8 GB of VRAM on a narrow link: 25 effective TFLOP/s, 350 GB/s, 12 GB/s.
    ///
    /// The rates are assumptions, the middle of what such cards have; 25 TFLOP/s is an effective figure that covers unpacking, by
    /// products that decode weights as they go. Fixed times are those of [`ClockProfile::H200`].
    pub const LAPTOP_8GB: Self = Self {
        name: "laptop-8gb",
        linear_flop_per_s: 25e12,
        attention_flop_per_s: 25e12,
        unpacked_weights_per_s: f64::INFINITY,
        device_bytes_per_s: 350e9,
        link_bytes_per_s: 12e9,
        ..Self::H200
    };
    /// A data-centre card on a full link, with the speeds of llama.cpp's kernels: 85 and 297 effective TFLOP/s, 4.1 TB/s, 52 GB/s.
    ///
    /// - Both rates, and 35 ms a pass, are the fit of llama.cpp's prompt times on an H200 with Qwen3-30B-A3B all on the card. A pass
    ///   unpacks that model's 29.0e9 expert weights; 0.85e12 a second leaves 1 ms of the 35 to the starts of operations. (Written
    ///   and read as f16, 4 bytes a weight, this traffic takes 28 ms of device memory's time.)
    /// - The link: 417 MiB from pinned memory at 52.1 GB/s, a kernel reading in place at 51. Copies of 64 KiB, 256 KiB and 1 MiB in a
    ///   row ran at 16, 34.5 and 47.8 GB/s: 2.5 microseconds each beside the bytes.
    /// - 0.5 microseconds a node of a graph of empty kernels. A token at depth 8,192 takes llama.cpp 4.3 ms with all weights on the
    ///   card: 5 microseconds for each of 818 operations.
    pub const H200: Self = Self {
        name: "h200",
        linear_flop_per_s: 85e12,
        attention_flop_per_s: 297e12,
        unpacked_weights_per_s: 0.85e12,
        device_bytes_per_s: 4.1e12,
        link_bytes_per_s: 52e9,
        copy_latency_s: 2.5e-6,
        launch_latency_s: 0.5e-6,
        shortest_operation_s: 4.5e-6,
    };
    /// The same card behind a link of 12 GB/s.
    pub const H200_12GBPS: Self = Self { name: "h200-12gbps", link_bytes_per_s: 12e9, ..Self::H200 };
}

/// What an operation asks of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations of products with weights.
    pub linear_flop: f64,
    /// Floating-point operations of attention.
    pub attention_flop: f64,
    /// Weights unpacked before rows meet them.
    pub unpacked_weights: f64,
    /// Bytes of device memory read and written.
    pub device_bytes: f64,
    /// Bytes read in place from host memory.
    pub link_bytes: f64,
    /// Steps behind the first, where an operation joins several.
    pub further_steps: f64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            linear_flop: self.linear_flop + other.linear_flop,
            attention_flop: self.attention_flop + other.attention_flop,
            unpacked_weights: self.unpacked_weights + other.unpacked_weights,
            device_bytes: self.device_bytes + other.device_bytes,
            link_bytes: self.link_bytes + other.link_bytes,
            further_steps: self.further_steps + other.further_steps + 1.0,
        }
    }
}

/// Virtual seconds of work since the clock began, whether or not they lay beside each other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BusySeconds {
    /// The link to the device: copies and reads in place.
    pub to_device_s: f64,
    /// The link to the host.
    pub to_host_s: f64,
    /// Operations, without what they waited for the link.
    pub operations_s: f64,
}

/// The clock of one device.
#[derive(Clone, Debug)]
pub struct Clock {
    profile: ClockProfile,
    to_device: Link,
    to_host: Link,
    busy: BusySeconds,
}

/// Spans of a link beyond which it is worth asking what can be forgotten.
const SPANS_UNASKED: usize = 64;

impl Clock {
    /// A clock at zero.
    pub fn new(profile: ClockProfile) -> Self {
        Self { profile, to_device: Link::default(), to_host: Link::default(), busy: BusySeconds::default() }
    }

    /// How long each part has worked.
    pub fn busy(&self) -> BusySeconds {
        self.busy
    }

    /// When a copy that may start at `from_s` is done; the link serves one copy each way at a time.
    pub fn copy(&mut self, from_s: f64, bytes: f64, direction: Direction) -> f64 {
        let (link, busy_s) = match direction {
            Direction::ToDevice => (&mut self.to_device, &mut self.busy.to_device_s),
            Direction::ToHost => (&mut self.to_host, &mut self.busy.to_host_s),
            Direction::OnDevice => {
                return from_s + self.profile.copy_latency_s + 2.0 * bytes / self.profile.device_bytes_per_s;
            }
        };
        let duration_s = self.profile.copy_latency_s + bytes / self.profile.link_bytes_per_s;
        *busy_s += duration_s;
        link.book(from_s, duration_s)
    }

    /// When an operation that starts at `from_s` is done. Reads in place take the link, too.
    pub fn operation(&mut self, from_s: f64, cost: Cost) -> f64 {
        let profile = &self.profile;
        let products_s = cost.linear_flop / profile.linear_flop_per_s + cost.attention_flop / profile.attention_flop_per_s;
        let steps = 1.0 + cost.further_steps;
        let own_s = products_s.max(cost.device_bytes / profile.device_bytes_per_s).max(steps * profile.shortest_operation_s);
        let launches_s = steps * profile.launch_latency_s;
        let unpacking_s = cost.unpacked_weights / profile.unpacked_weights_per_s;
        let link_s = cost.link_bytes / profile.link_bytes_per_s;
        self.busy.to_device_s += link_s;
        self.busy.operations_s += own_s + unpacking_s + launches_s;
        (from_s + own_s + unpacking_s).max(self.to_device.book(from_s, link_s)) + launches_s
    }

    /// True where so many spans are booked that [`Clock::forget`] is worth its question.
    pub fn has_much_to_forget(&self) -> bool {
        self.to_device.n_spans().max(self.to_host.n_spans()) > SPANS_UNASKED
    }

    /// Drops bookings before `before_s`, the earliest time that any work can still start at.
    pub fn forget(&mut self, before_s: f64) {
        self.to_device.forget(before_s);
        self.to_host.forget(before_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A laptop whose operations and copies take no time beside what they move and compute.
    const AT_ONCE: ClockProfile =
        ClockProfile { copy_latency_s: 0.0, launch_latency_s: 0.0, shortest_operation_s: 0.0, ..ClockProfile::LAPTOP_8GB };

    #[test]
    fn two_copies_share_the_link_and_opposite_ways_do_not() {
        let mut clock = Clock::new(AT_ONCE);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 1.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 2.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToHost), 1.0);
    }

    #[test]
    fn a_copy_told_of_late_takes_the_gap_before_one_told_of_early() {
        let mut clock = Clock::new(AT_ONCE);
        assert_eq!(clock.copy(2.0, 12e9, Direction::ToDevice), 3.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 1.0);
        assert_eq!(clock.copy(0.5, 18e9, Direction::ToDevice), 3.5, "1 s of it in the gap, the rest behind");
    }

    #[test]
    fn an_operation_takes_its_slowest_part() {
        let mut clock = Clock::new(AT_ONCE);
        let cost = Cost { linear_flop: 25e12, device_bytes: 700e9, link_bytes: 6e9, ..Cost::default() };
        assert_eq!(clock.operation(1.0, cost), 3.0);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, ..Cost::default() }), 1.0, "the link was idle until 1.0");
    }

    #[test]
    fn products_attention_and_unpacking_have_rates_of_their_own() {
        let profile = ClockProfile { unpacked_weights_per_s: 4e9, attention_flop_per_s: 50e12, ..AT_ONCE };
        let mut clock = Clock::new(profile);
        let products = Cost { linear_flop: 25e12, attention_flop: 25e12, device_bytes: 35e9, ..Cost::default() };
        assert_eq!(clock.operation(0.0, products), 1.5);
        assert_eq!(clock.operation(0.0, Cost { unpacked_weights: 1e9, ..products }), 1.75, "whatever the rows take");
        assert_eq!(Clock::new(AT_ONCE).operation(0.0, Cost { unpacked_weights: 1e9, ..Cost::default() }), 0.0);
    }

    #[test]
    fn a_read_in_place_and_a_copy_share_the_link() {
        let mut clock = Clock::new(AT_ONCE);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, ..Cost::default() }), 1.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 2.0);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, linear_flop: 25e12, ..Cost::default() }), 3.0);
        assert_eq!(clock.copy(0.0, 6e9, Direction::ToHost), 0.5);
        assert_eq!(clock.busy(), BusySeconds { to_device_s: 3.0, to_host_s: 0.5, operations_s: 1.0 });
    }

    #[test]
    fn the_profiles_are_those_that_their_names_promise() {
        let figures = |profile: ClockProfile| {
            let ClockProfile { name, linear_flop_per_s, attention_flop_per_s, device_bytes_per_s, link_bytes_per_s, .. } = profile;
            (name, [linear_flop_per_s, attention_flop_per_s, device_bytes_per_s, link_bytes_per_s])
        };
        assert_eq!(figures(ClockProfile::LAPTOP_8GB), ("laptop-8gb", [25e12, 25e12, 350e9, 12e9]));
        assert_eq!(figures(ClockProfile::H200), ("h200", [85e12, 297e12, 4.1e12, 52e9]));
        assert_eq!(figures(ClockProfile::H200_12GBPS), ("h200-12gbps", [85e12, 297e12, 4.1e12, 12e9]));
        assert_eq!(ClockProfile { name: "h200", link_bytes_per_s: 52e9, ..ClockProfile::H200_12GBPS }, ClockProfile::H200);
    }

    #[test]
    fn the_h200_copies_pieces_and_starts_kernels_as_measured() {
        // Pieces from pinned memory, 50 in a row: KiB and GB/s.
        for (kib, measured) in [(64.0, 16.0), (256.0, 34.5), (1024.0, 47.8)] {
            let (mut clock, bytes) = (Clock::new(ClockProfile::H200), kib * 1024.0);
            let seconds = (0..50).map(|_| clock.copy(0.0, bytes, Direction::ToDevice)).fold(0.0, f64::max);
            let rate = 50.0 * bytes / seconds / 1e9;
            assert!((rate / measured - 1.0).abs() < 0.10, "{kib} KiB at {rate:.1} GB/s, {measured} measured");
        }
        // The model's 128 experts of 3 x 2048 x 768 weights in 48 layers: most of the 35 ms that a pass takes beside its tokens.
        let weights = 48.0 * 128.0 * 3.0 * 2048.0 * 768.0;
        let unpacking = weights / ClockProfile::H200.unpacked_weights_per_s;
        assert!((0.9 * 35e-3..35e-3).contains(&unpacking), "{unpacking} s");
    }

    #[test]
    fn latencies_are_paid_once_for_each_copy_and_operation() {
        let mut clock = Clock::new(ClockProfile { copy_latency_s: 0.5, launch_latency_s: 0.25, ..AT_ONCE });
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 1.5);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 3.0);
        assert_eq!(clock.copy(0.0, 175e9, Direction::OnDevice), 1.5, "read and written, beside the link");
        assert_eq!(clock.operation(0.0, Cost::default()), 0.25);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, ..Cost::default() }), 4.25, "behind both copies");
    }

    #[test]
    fn no_operation_is_shorter_than_the_shortest() {
        let mut clock = Clock::new(ClockProfile { shortest_operation_s: 0.5, ..AT_ONCE });
        assert_eq!(clock.operation(0.0, Cost { device_bytes: 35e9, ..Cost::default() }), 0.5);
        assert_eq!(clock.operation(0.0, Cost { device_bytes: 350e9, ..Cost::default() }), 1.0);
    }
}
