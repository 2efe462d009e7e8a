//! Recurrent state of all delta nets, as it lies on the device and in the host's copies of it.

use super::Carver;
use crate::backend::op::DeltaShape;
use crate::backend::{Addr, AddrRange};
use crate::model::ModelShape;
use crate::units::Bytes;

/// ```text
/// | state of net 0 | history of net 0 | state of net 1 | ..
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateLayout {
    history: Bytes,
    history_offset: Bytes,
    net_bytes: Bytes,
    n_nets: u32,
}

impl StateLayout {
    /// The layout of a model's state; empty where it has no delta nets.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        shape.delta.map_or_else(Self::default, |delta| Self::of_nets(delta, shape.n_delta_layer()))
    }

    fn of_nets(delta: DeltaShape, n_nets: u32) -> Self {
        let mut carver = Carver::default();
        carver.take("recurrent state", delta.state_bytes());
        let history = carver.take("convolution history", delta.history_bytes());
        Self { history: history.bytes, history_offset: history.offset, net_bytes: carver.end, n_nets }
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.net_bytes * u64::from(self.n_nets)
    }

    /// State and history of one net, in memory that starts at `base`.
    #[must_use]
    pub fn net(&self, base: Addr, net: u32) -> AddrRange {
        AddrRange { start: base.offset(self.net_bytes * u64::from(net)), bytes: self.history_offset + self.history }
    }

    /// Where the state of one net lies, and its history.
    #[must_use]
    pub fn addrs(&self, base: Addr, net: u32) -> (Addr, Addr) {
        let start = self.net(base, net).start;
        (start, start.offset(self.history_offset))
    }
}
