//! Captured windows with the leases that make replaying them safe.
//!
//! A window is two graphs for each number of rows: the trunk, which reads experts through the table and bakes in no address of the
//! slab, and the head, which bakes in the head's. Beside each graph stands the same list of operations, so that a window can always be
//! run one operation after another: where a capture failed, and for the rest of the run where a graph turned out not to launch.

use std::rc::Rc;

use crate::backend::{Addr, Backend, BackendError, Op};
use crate::engine::EngineError;
use crate::model::forward::Forward;
use crate::model::layout::WindowLayout;
use crate::phase::region::{Lease, Regions};
use crate::phase::scheduler::Decode;
use crate::units::Bytes;

/// A list of operations that is replayed as one graph where that is possible.
struct CapturedOps<B: Backend> {
    ops: Vec<Op>,
    graph: Option<B::Graph>,
    leases: Vec<Lease>,
}

impl<B: Backend> CapturedOps<B> {
    fn eager(ops: Vec<Op>, leases: Vec<Lease>) -> Self {
        Self { ops, graph: None, leases }
    }

    fn record(&mut self, backend: &B, stream: &B::Stream) -> Result<(), BackendError> {
        backend.begin_capture(stream)?;
        let launched = self.ops.iter().try_for_each(|op| backend.launch(stream, op));
        // The capture is ended whatever happened, so that the stream is usable again.
        let graph = backend.end_capture(stream);
        self.graph = Some(launched.and(graph)?);
        Ok(())
    }

    fn run(&self, backend: &B, witness: &Decode<'_, B>, stream: &B::Stream, eager: bool) -> Result<(), EngineError> {
        witness.check_leases(&self.leases)?;
        match &self.graph {
            Some(graph) if !eager => backend.replay(stream, graph)?,
            _ => self.ops.iter().try_for_each(|op| backend.launch(stream, op))?,
        }
        Ok(())
    }
}

/// Which of a window's two lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// All layers.
    Trunk,
    /// The last norm and the output head's product.
    Head,
}

/// The windows of one to `n_rows` rows, each as two graphs or as two lists of operations.
pub struct CapturedWindows<B: Backend> {
    backend: Rc<B>,
    base: Addr,
    layout: WindowLayout,
    // By rows, one row first.
    trunks: Vec<CapturedOps<B>>,
    heads: Vec<CapturedOps<B>>,
    /// False where the device has no graphs, or one has failed to launch.
    capturing: bool,
    recaptures: u64,
}

/// Captures that failed in one go.
#[derive(Default)]
struct Failures {
    tried: u32,
    failed: u32,
    first: Option<BackendError>,
}

impl Failures {
    /// One line for all of them.
    fn notice(self) -> Option<String> {
        let Self { tried, failed, first } = self;
        first.map(|error| format!("windows run without a captured graph from here on, in {failed} of {tried} graphs: {error}"))
    }
}

impl<B: Backend> CapturedWindows<B> {
    /// Captures all windows of `layout`, whose buffers lie at `base`. The second value says which are not graphs, and why.
    ///
    /// # Errors
    /// A lost device. Captures that fail otherwise leave the windows as lists.
    pub fn new(
        backend: Rc<B>,
        base: Addr,
        layout: WindowLayout,
        forward: &Forward<'_>,
        regions: &Regions,
        stream: &B::Stream,
    ) -> Result<(Self, Option<String>), EngineError> {
        let trunks = (1..=layout.n_rows).map(|n_rows| CapturedOps::eager(forward.window_trunk(base, &layout, n_rows), Vec::new()));
        let (trunks, capturing) = (trunks.collect(), backend.capabilities().graph_capture);
        let mut windows = Self { backend, base, layout, trunks, heads: Vec::new(), capturing, recaptures: 0 };
        windows.heads = windows.head_lists(forward, regions);
        let mut failures = Failures::default();
        windows.capture(Half::Trunk, stream, &mut failures)?;
        windows.capture(Half::Head, stream, &mut failures)?;
        Ok((windows, failures.notice()))
    }

    fn head_lists(&self, forward: &Forward<'_>, regions: &Regions) -> Vec<CapturedOps<B>> {
        let head = regions.head();
        let list = |n_rows| {
            let ops = forward.window_head(self.base, &self.layout, n_rows, head.start);
            CapturedOps::eager(ops, vec![regions.lease(head)])
        };
        (1..=self.layout.n_rows).map(list).collect()
    }

    fn capture(&mut self, half: Half, stream: &B::Stream, failures: &mut Failures) -> Result<(), EngineError> {
        if !self.capturing {
            return Ok(());
        }
        let lists = match half {
            Half::Trunk => &mut self.trunks,
            Half::Head => &mut self.heads,
        };
        for list in lists {
            failures.tried += 1;
            match list.record(&*self.backend, stream) {
                Ok(()) => {}
                Err(error @ BackendError::DeviceLost { .. }) => return Err(error.into()),
                Err(error) => {
                    failures.failed += 1;
                    failures.first.get_or_insert(error);
                }
            }
        }
        Ok(())
    }

    /// True where the head lies where the graphs look for it, as it was placed when they were captured.
    #[must_use]
    pub fn head_is_current(&self, regions: &Regions) -> bool {
        let now = regions.lease(regions.head());
        self.heads.iter().all(|list| list.leases.iter().all(|lease| *lease == now))
    }

    /// Makes the head's graphs anew for where the head lies now, the old ones given back first: no byte more than before is taken. The
    /// value says which are lists from here on, and why.
    ///
    /// # Errors
    /// A lost device.
    pub fn recapture_head(&mut self, forward: &Forward<'_>, regions: &Regions, stream: &B::Stream) -> Result<Option<String>, EngineError> {
        // Queued replays read the old graphs until they have run.
        self.backend.synchronise(stream)?;
        self.heads.clear();
        self.heads = self.head_lists(forward, regions);
        let mut failures = Failures::default();
        self.capture(Half::Head, stream, &mut failures)?;
        self.recaptures += u64::from(failures.tried - failures.failed);
        if failures.failed > 0 {
            // A head that moves with every prompt is not tried, and told of, every time.
            self.capturing = false;
        }
        Ok(failures.notice())
    }

    /// Graphs that were captured again because the head had moved, since the start.
    #[must_use]
    pub fn recaptures(&self) -> u64 {
        self.recaptures
    }

    /// Queues one half of a window of `n_rows` rows; `eager` leaves its graph alone. The witness proves that the slab belongs to decode;
    /// the leases are checked against it.
    ///
    /// # Errors
    /// [`PhaseError::StaleLease`](crate::phase::PhaseError::StaleLease), or the backend's.
    pub fn run(&self, half: Half, n_rows: usize, witness: &Decode<'_, B>, stream: &B::Stream, eager: bool) -> Result<(), EngineError> {
        let lists = match half {
            Half::Trunk => &self.trunks,
            Half::Head => &self.heads,
        };
        lists[n_rows - 1].run(&*self.backend, witness, stream, eager)
    }

    /// True where a window of `n_rows` rows has a graph.
    #[must_use]
    pub fn has_graph(&self, n_rows: usize) -> bool {
        [&self.trunks, &self.heads].iter().any(|lists| lists[n_rows - 1].graph.is_some())
    }

    /// Gives all graphs back; windows are lists of operations from here on. Nothing that replays one may be queued.
    pub fn give_up_graphs(&mut self) {
        self.capturing = false;
        self.trunks.iter_mut().chain(&mut self.heads).for_each(|list| list.graph = None);
    }

    /// Device memory of all graphs.
    #[must_use]
    pub fn graph_bytes(&self) -> Bytes {
        let graphs = self.trunks.iter().chain(&self.heads).filter_map(|list| list.graph.as_ref());
        graphs.map(|graph| self.backend.graph_bytes(graph)).sum()
    }
}
