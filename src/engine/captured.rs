//! Captured windows with the leases that make replaying them safe.
//!
//! A window is two graphs for each number of rows: the trunk, which reads experts through the table and bakes in no address of the
//! slab, and the head, which bakes in the head's. A model with a recurrent state has a third, which takes the state over the rows that
//! are accepted, and one with a draft layer has its own trunk and head. Whoever bakes in the head's address holds a lease on it, so that
//! a head that moved is noticed whether or not there are drafts. Beside each graph stands the same list of operations, so that a window can always be
//! run one operation after another: where a capture failed, and for the rest of the run where a graph turned out not to launch.

use std::rc::Rc;

use crate::backend::{Addr, Backend, BackendError, Op};
use crate::engine::EngineError;
use crate::model::forward::Forward;
use crate::model::forward::draft::DraftFrom;
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

/// Which list of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPart {
    /// All layers of so many rows.
    Trunk(usize),
    /// The output head's product of so many rows.
    Head(usize),
    /// The recurrent state over so many rows; only where there is one.
    Commit(usize),
    /// The draft layer over so many rows that wait for it, or its own last row; only where there is one.
    Draft(usize, DraftFrom),
    /// The output head's product of the draft layer's last row.
    DraftHead,
}

/// The windows of one to `n_rows` rows, each as graphs or as lists of operations.
pub struct CapturedWindows<B: Backend> {
    backend: Rc<B>,
    base: Addr,
    layout: WindowLayout,
    // By rows, one row first.
    trunks: Vec<CapturedOps<B>>,
    heads: Vec<CapturedOps<B>>,
    /// Empty without a recurrent state.
    commits: Vec<CapturedOps<B>>,
    /// By rows, then one for the draft layer's own row; empty without one.
    drafts: Vec<CapturedOps<B>>,
    /// `None` without a draft layer.
    draft_head: Option<CapturedOps<B>>,
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
        let no_leases = |ops| CapturedOps::eager(ops, Vec::new());
        let sizes = 1..=layout.n_rows;
        let trunks = sizes.clone().map(|n_rows| no_leases(forward.window_trunk(base, &layout, n_rows))).collect();
        let (mut commits, mut drafts) = (Vec::new(), Vec::new());
        if forward.shape.delta.is_some() {
            commits.extend(sizes.clone().map(|n_rows| no_leases(forward.window_commit(base, &layout, n_rows))));
        }
        if forward.shape.has_draft_layer {
            drafts.extend(sizes.map(|n_rows| no_leases(forward.draft_trunk(base, &layout, n_rows, DraftFrom::Trunk))));
            drafts.push(no_leases(forward.draft_trunk(base, &layout, 1, DraftFrom::Own)));
        }
        let capturing = backend.capabilities().graph_capture;
        let (heads, draft_head) = Default::default();
        let mut windows = Self { backend, base, layout, trunks, heads, commits, drafts, draft_head, capturing, recaptures: 0 };
        windows.list_heads(forward, regions);
        let mut failures = Failures::default();
        if windows.capturing {
            let Self { backend, trunks, commits, drafts, .. } = &mut windows;
            Self::capture(backend, [trunks, commits, drafts].into_iter().flatten(), stream, &mut failures)?;
        }
        windows.capture_heads(stream, &mut failures)?;
        Ok((windows, failures.notice()))
    }

    /// Makes the lists that read the head anew, with leases on where it lies now.
    fn list_heads(&mut self, forward: &Forward<'_>, regions: &Regions) {
        let head = regions.head();
        let list = |ops| CapturedOps::eager(ops, vec![regions.lease(head)]);
        // A head of its own never moves.
        let draft_list = |ops| if forward.resident.draft_head.is_some() { CapturedOps::eager(ops, Vec::new()) } else { list(ops) };
        let heads = (1..=self.layout.n_rows).map(|n_rows| forward.window_head(self.base, &self.layout, n_rows, head.start));
        self.heads = heads.map(list).collect();
        let draft_head = forward.shape.has_draft_layer.then(|| forward.draft_head(self.base, &self.layout, head.start));
        self.draft_head = draft_head.map(draft_list);
    }

    fn capture_heads(&mut self, stream: &B::Stream, failures: &mut Failures) -> Result<(), EngineError> {
        if !self.capturing {
            return Ok(());
        }
        Self::capture(&self.backend, self.heads.iter_mut().chain(&mut self.draft_head), stream, failures)
    }

    fn capture<'a>(
        backend: &B,
        lists: impl Iterator<Item = &'a mut CapturedOps<B>>,
        stream: &B::Stream,
        failures: &mut Failures,
    ) -> Result<(), EngineError> {
        for list in lists {
            failures.tried += 1;
            match list.record(backend, stream) {
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
        self.heads.iter().chain(&self.draft_head).all(|list| list.leases.iter().all(|lease| *lease == now))
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
        self.draft_head = None;
        self.list_heads(forward, regions);
        let mut failures = Failures::default();
        self.capture_heads(stream, &mut failures)?;
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

    /// Queues one part; `eager` leaves its graph alone. The witness proves that the slab belongs to decode; the leases are checked
    /// against it.
    ///
    /// # Errors
    /// [`PhaseError::StaleLease`](crate::phase::PhaseError::StaleLease), or the backend's.
    pub fn run(&self, part: WindowPart, witness: &Decode<'_, B>, stream: &B::Stream, eager: bool) -> Result<(), EngineError> {
        self.list(part).map_or(Ok(()), |list| list.run(&*self.backend, witness, stream, eager))
    }

    /// The list of a part; `None` for one that the model does not have.
    fn list(&self, part: WindowPart) -> Option<&CapturedOps<B>> {
        match part {
            WindowPart::Trunk(n_rows) => self.trunks.get(n_rows - 1),
            WindowPart::Head(n_rows) => self.heads.get(n_rows - 1),
            WindowPart::Commit(n_rows) => self.commits.get(n_rows - 1),
            WindowPart::Draft(n_rows, DraftFrom::Trunk) => self.drafts.get(n_rows - 1),
            WindowPart::Draft(_, DraftFrom::Own) => self.drafts.last(),
            WindowPart::DraftHead => self.draft_head.as_ref(),
        }
    }

    /// True where one of `parts` has a graph.
    #[must_use]
    pub fn has_graph(&self, parts: &[WindowPart]) -> bool {
        parts.iter().filter_map(|&part| self.list(part)).any(|list| list.graph.is_some())
    }

    fn lists(&self) -> impl Iterator<Item = &CapturedOps<B>> {
        [&self.trunks, &self.heads, &self.commits, &self.drafts].into_iter().flatten().chain(&self.draft_head)
    }

    /// Gives all graphs back; windows are lists of operations from here on. Nothing that replays one may be queued.
    pub fn give_up_graphs(&mut self) {
        self.capturing = false;
        let lists = [&mut self.trunks, &mut self.heads, &mut self.commits, &mut self.drafts];
        lists.into_iter().flatten().chain(&mut self.draft_head).for_each(|list| list.graph = None);
    }

    /// Device memory of all graphs.
    #[must_use]
    pub fn graph_bytes(&self) -> Bytes {
        let graphs = self.lists().filter_map(|list| list.graph.as_ref());
        graphs.map(|graph| self.backend.graph_bytes(graph)).sum()
    }
}
