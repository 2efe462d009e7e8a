//! Times of a block's parts, taken in one layer of each kind, for the planner.

use std::rc::Rc;

use crate::backend::{Backend, Op};
use crate::engine::EngineError;
use crate::engine::costs::BlockSample;

/// Events around one chunk's mixer half and one group of experts.
pub struct Probe<B: Backend> {
    backend: Rc<B>,
    mixer: [B::Event; 4],
    delta_net: [B::Event; 2],
    has_delta_net: bool,
    experts: [B::Event; 2],
    sample: BlockSample,
}

impl<B: Backend> Probe<B> {
    /// A probe that has not measured yet.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>) -> Result<Self, EngineError> {
        let event = || backend.create_event();
        let pair = || -> Result<_, EngineError> { Ok([event()?, event()?]) };
        let mixer = [event()?, event()?, event()?, event()?];
        Ok(Self { mixer, delta_net: pair()?, has_delta_net: false, experts: pair()?, sample: BlockSample::default(), backend })
    }

    /// Forgets the last block.
    pub fn begin(&mut self) {
        self.sample = BlockSample::default();
        self.has_delta_net = false;
    }

    /// Queues the mixer half of a chunk in a layer that is a delta net. Most layers of a model with any are, so it stands for the linear
    /// part of all.
    ///
    /// # Errors
    /// The backend's.
    pub fn launch_delta_net(&mut self, ops: &[Op], stream: &B::Stream) -> Result<(), EngineError> {
        let [start, end] = &self.delta_net;
        self.backend.record(stream, start)?;
        ops.iter().try_for_each(|op| self.backend.launch(stream, op))?;
        self.backend.record(stream, end)?;
        self.has_delta_net = true;
        Ok(())
    }

    /// Queues the mixer half of a chunk of `rows` tokens that starts at `position`, with attention timed apart from the rest.
    ///
    /// # Errors
    /// The backend's.
    pub fn launch_mixer(&mut self, ops: &[Op], rows: u32, position: usize, stream: &B::Stream) -> Result<(), EngineError> {
        let [start, before, after, end] = &self.mixer;
        self.backend.record(stream, start)?;
        for op in ops {
            let is_attention = matches!(op, Op::Attention { .. });
            if is_attention {
                self.backend.record(stream, before)?;
            }
            self.backend.launch(stream, op)?;
            if is_attention {
                self.backend.record(stream, after)?;
            }
        }
        self.backend.record(stream, end)?;
        self.sample.chunk_rows = rows;
        #[allow(clippy::cast_precision_loss, reason = "a count for an estimate")]
        let position = position as f64;
        self.sample.keys_seen = keys_seen(position, f64::from(rows));
        Ok(())
    }

    /// True while no group of this block was timed.
    pub fn wants_experts(&self) -> bool {
        self.sample.chunk_rows > 0 && self.sample.routed_rows == 0
    }

    /// Queues a group of `n_experts` experts with `routed_rows` rows between them.
    ///
    /// # Errors
    /// The backend's.
    pub fn launch_experts(&mut self, op: &Op, n_experts: usize, routed_rows: u32, stream: &B::Stream) -> Result<(), EngineError> {
        let [start, end] = &self.experts;
        self.backend.record(stream, start)?;
        self.backend.launch(stream, op)?;
        self.backend.record(stream, end)?;
        (self.sample.n_experts, self.sample.routed_rows) = (u32::try_from(n_experts).unwrap_or(u32::MAX), routed_rows);
        Ok(())
    }

    /// What was measured of a block whose work is done; `None` where nothing was.
    ///
    /// # Errors
    /// The backend's.
    pub fn finish(&mut self) -> Result<Option<BlockSample>, EngineError> {
        if self.sample.chunk_rows == 0 {
            return Ok(None);
        }
        let between = |start, end| self.backend.elapsed_s(start, end);
        let [start, before, after, end] = &self.mixer;
        self.sample.attention_s = between(before, after)?;
        self.sample.linear_s = match &self.delta_net {
            [start, end] if self.has_delta_net => between(start, end)?,
            _ => between(start, before)? + between(after, end)?,
        };
        if self.sample.routed_rows > 0 {
            self.sample.experts_s = between(&self.experts[0], &self.experts[1])?;
        }
        Ok(Some(self.sample))
    }
}

/// Keys that `rows` rows from `position` on look at, each all up to its own.
pub fn keys_seen(position: f64, rows: f64) -> f64 {
    rows * (position + (rows + 1.0) / 2.0)
}
