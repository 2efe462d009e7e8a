//! The recurrent state of a model with delta nets: one on the device, of the timeline that is read and written now.
//!
//! Unlike keys and values it cannot be cut back. Windows leave it alone until rows are accepted; a prompt's block takes it along, so it
//! is copied out before the block and copied back where the block does not come to its end. Whoever changes it by half makes it the state
//! of no sequence, and the next request starts from a copy or from nothing.

use std::rc::Rc;

use crate::backend::{Addr, AddrRange, Backend, Copy, DeviceMemory, Direction};
use crate::engine::EngineError;
use crate::model::ModelShape;
use crate::model::layout::StateLayout;
use crate::units::Bytes;

/// The state and the copy that a block can be undone from.
pub struct Recurrent<B: Backend> {
    backend: Rc<B>,
    /// `None` where the model has no recurrent state.
    memory: Option<Memory<B>>,
    /// Tokens of the active timeline that the state holds; `None` where it is of no sequence.
    position: Option<usize>,
}

struct Memory<B: Backend> {
    state: B::Buffer,
    block_start: B::Pinned,
}

impl<B: Backend> Recurrent<B> {
    /// Takes the memory. The state is of no sequence yet.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, shape: &ModelShape) -> Result<Self, EngineError> {
        let memory = match StateLayout::new(shape).bytes() {
            Bytes::ZERO => None,
            bytes => Some(Memory {
                state: backend.malloc(bytes, "recurrent state")?,
                block_start: backend.alloc_pinned(bytes, "recurrent state at a block's start")?,
            }),
        };
        Ok(Self { backend, memory, position: None })
    }

    /// Whether the model has any.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.memory.is_some()
    }

    /// Where it lies.
    #[must_use]
    pub fn addr(&self) -> Addr {
        self.memory.as_ref().map_or(Addr(0), |memory| memory.state.range().start)
    }

    /// Tokens of the active timeline that it holds; `None` where it is of no sequence, or there is none.
    #[must_use]
    pub fn position(&self) -> Option<usize> {
        self.position
    }

    /// The state has come to be that after `position` tokens, or of no sequence.
    pub fn set_position(&mut self, position: Option<usize>) {
        self.position = position.filter(|_| self.is_there());
    }

    /// Makes it the state before any token, in the order of `stream`.
    ///
    /// # Errors
    /// The backend's; it is of no sequence then.
    pub fn clear(&mut self, stream: &B::Stream) -> Result<(), EngineError> {
        self.position = None;
        if let Some(memory) = &self.memory {
            self.backend.fill(stream, memory.state.range(), 0)?;
        }
        self.set_position(Some(0));
        Ok(())
    }

    /// Copies it to host memory at `target`, in the order of `stream`.
    ///
    /// # Errors
    /// The backend's.
    pub fn copy_out(&self, target: Addr, stream: &B::Stream) -> Result<(), EngineError> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let AddrRange { start: src, bytes } = memory.state.range();
        Ok(self.backend.copy(stream, Copy { dst: target, src, bytes, direction: Direction::ToHost })?)
    }

    /// Makes it the copy at `source`, of `position` tokens, in the order of `stream`.
    ///
    /// # Errors
    /// The backend's; it is of no sequence then.
    pub fn copy_in(&mut self, source: Addr, position: usize, stream: &B::Stream) -> Result<(), EngineError> {
        self.position = None;
        if let Some(memory) = &self.memory {
            let AddrRange { start: dst, bytes } = memory.state.range();
            self.backend.copy(stream, Copy { dst, src: source, bytes, direction: Direction::ToDevice })?;
        }
        self.set_position(Some(position));
        Ok(())
    }

    /// Keeps what it is now, so that a block can be undone; until that ends, it is of no sequence.
    ///
    /// # Errors
    /// The backend's; it is what it was then.
    pub fn begin_block(&mut self, stream: &B::Stream) -> Result<UndoBlock, EngineError> {
        match &self.memory {
            // Before any token it need not be kept.
            Some(memory) if self.position != Some(0) => self.copy_out(memory.block_start.range().start, stream)?,
            _ => {}
        }
        Ok(UndoBlock { position: self.position.take() })
    }

    /// Makes it what it was before a block that did not come to its end.
    ///
    /// # Errors
    /// The backend's; it is of no sequence then.
    pub fn undo_block(&mut self, undo: UndoBlock, stream: &B::Stream) -> Result<(), EngineError> {
        match (&self.memory, undo.position) {
            (None, _) | (_, None) => Ok(()),
            (Some(_), Some(0)) => self.clear(stream),
            (Some(memory), Some(position)) => self.copy_in(memory.block_start.range().start, position, stream),
        }
    }
}

/// What it takes to undo a block.
#[derive(Clone, Copy, Debug)]
#[must_use = "a block ends by taking its position or by being undone"]
pub struct UndoBlock {
    position: Option<usize>,
}
