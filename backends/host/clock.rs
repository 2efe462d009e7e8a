//! Virtual time: what the work would have taken on a modelled device.
//!
//! Each stream has a time of its own; a copy also waits for the link in its direction, an operation for nothing but its stream. The
//! model is `max(flop / rate, bytes / bandwidth, bytes over the link / link) + latency` for an operation and `bytes / link + latency`
//! for a copy. Times are exact sums, so tests can compare them with arithmetic.

use crate::backend::Direction;

/// A modelled device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockProfile {
    /// Name, as flags and tables write it.
    pub name: &'static str,
    /// Arithmetic rate of products, in floating-point operations a second.
    pub flop_per_s: f64,
    /// Bandwidth of device memory, bytes a second.
    pub device_bytes_per_s: f64,
    /// Bandwidth of the link, each way, bytes a second.
    pub link_bytes_per_s: f64,
    /// Fixed time of a copy, seconds.
    pub copy_latency_s: f64,
    /// Fixed time of an operation, seconds.
    pub launch_latency_s: f64,
}

impl ClockProfile {
    /// A laptop with 8 GB of VRAM on a narrow link: 25 effective TFLOP/s, 350 GB/s, 12 GB/s.
    pub const LAPTOP_8GB: Self = Self {
        name: "laptop-8gb",
        flop_per_s: 25e12,
        device_bytes_per_s: 350e9,
        link_bytes_per_s: 12e9,
        copy_latency_s: 10e-6,
        launch_latency_s: 3e-6,
    };
    /// A data-centre card on a full link, as measured: 85 effective TFLOP/s, 4.1 TB/s, 52 GB/s.
    pub const H200: Self = Self {
        name: "h200",
        flop_per_s: 85e12,
        device_bytes_per_s: 4.1e12,
        link_bytes_per_s: 52e9,
        copy_latency_s: 6e-6,
        launch_latency_s: 0.5e-6,
    };
    /// The same card behind a link of 12 GB/s.
    pub const H200_12GBPS: Self = Self { name: "h200-12gbps", link_bytes_per_s: 12e9, ..Self::H200 };
}

/// What an operation asks of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub flop: f64,
    /// Bytes of device memory read and written.
    pub device_bytes: f64,
    /// Bytes read in place from host memory.
    pub link_bytes: f64,
}

/// The clock of one device.
#[derive(Clone, Debug)]
pub struct Clock {
    profile: ClockProfile,
    to_device_free_at_s: f64,
    to_host_free_at_s: f64,
}

impl Clock {
    /// A clock at zero.
    pub fn new(profile: ClockProfile) -> Self {
        Self { profile, to_device_free_at_s: 0.0, to_host_free_at_s: 0.0 }
    }

    /// When a copy that may start at `from_s` is done; the link serves one copy each way at a time.
    pub fn copy(&mut self, from_s: f64, bytes: f64, direction: Direction) -> f64 {
        let link = match direction {
            Direction::ToDevice => &mut self.to_device_free_at_s,
            Direction::ToHost => &mut self.to_host_free_at_s,
            Direction::OnDevice => {
                return from_s + self.profile.copy_latency_s + 2.0 * bytes / self.profile.device_bytes_per_s;
            }
        };
        let done = from_s.max(*link) + self.profile.copy_latency_s + bytes / self.profile.link_bytes_per_s;
        *link = done;
        done
    }

    /// When an operation that starts at `from_s` is done. Reads in place take the link, too.
    pub fn operation(&mut self, from_s: f64, cost: Cost) -> f64 {
        let own = (cost.flop / self.profile.flop_per_s).max(cost.device_bytes / self.profile.device_bytes_per_s);
        let mut done = from_s + self.profile.launch_latency_s + own;
        if cost.link_bytes > 0.0 {
            let crossed = from_s.max(self.to_device_free_at_s) + cost.link_bytes / self.profile.link_bytes_per_s;
            self.to_device_free_at_s = crossed;
            done = done.max(crossed + self.profile.launch_latency_s);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_copies_share_the_link_and_opposite_ways_do_not() {
        let mut clock = Clock::new(ClockProfile { copy_latency_s: 0.0, ..ClockProfile::LAPTOP_8GB });
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 1.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 2.0);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToHost), 1.0);
    }

    #[test]
    fn an_operation_takes_its_slowest_part() {
        let mut clock = Clock::new(ClockProfile { launch_latency_s: 0.0, ..ClockProfile::LAPTOP_8GB });
        let cost = Cost { flop: 25e12, device_bytes: 700e9, link_bytes: 6e9 };
        assert_eq!(clock.operation(1.0, cost), 3.0);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, ..Cost::default() }), 2.5);
    }

    #[test]
    fn the_profiles_are_those_that_their_names_promise() {
        let figures = |profile: ClockProfile| (profile.name, profile.flop_per_s, profile.device_bytes_per_s, profile.link_bytes_per_s);
        assert_eq!(figures(ClockProfile::LAPTOP_8GB), ("laptop-8gb", 25e12, 350e9, 12e9));
        assert_eq!(figures(ClockProfile::H200), ("h200", 85e12, 4.1e12, 52e9));
        assert_eq!(figures(ClockProfile::H200_12GBPS), ("h200-12gbps", 85e12, 4.1e12, 12e9));
        assert_eq!(ClockProfile { name: "h200", link_bytes_per_s: 52e9, ..ClockProfile::H200_12GBPS }, ClockProfile::H200);
    }

    #[test]
    fn latencies_are_paid_once_for_each_copy_and_operation() {
        let mut clock = Clock::new(ClockProfile { copy_latency_s: 0.5, launch_latency_s: 0.25, ..ClockProfile::LAPTOP_8GB });
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 1.5);
        assert_eq!(clock.copy(0.0, 12e9, Direction::ToDevice), 3.0);
        assert_eq!(clock.copy(0.0, 175e9, Direction::OnDevice), 1.5, "read and written, beside the link");
        assert_eq!(clock.operation(0.0, Cost::default()), 0.25);
        assert_eq!(clock.operation(0.0, Cost { link_bytes: 12e9, ..Cost::default() }), 4.25, "behind both copies");
    }
}
