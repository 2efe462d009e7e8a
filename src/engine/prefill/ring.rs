//! Experts on their way from host memory to the prompt path.
//!
//! The ring is a few groups of places, filled one after another on a copy stream and emptied in the same order by the products. A
//! group holds the matrices kind by kind (all gates, all ups, all downs), so that neighbouring experts, which are neighbours in the
//! file, too, cross the link in one piece. Groups that are filled ahead keep the link busy while the mixer half of the next layer
//! runs: their experts are a guess then, and one that no row went to is dropped.

use std::collections::VecDeque;
use std::rc::Rc;

use crate::backend::op::ExpertAddrs;
use crate::backend::{Addr, AddrRange, Backend};
use crate::engine::EngineError;
use crate::experts::Experts;
use crate::units::{Bytes, ExpertId};

/// Groups that a ring is cut into at most: what is free is filled by whole groups, so many of them keep more of a ring in use.
const GROUPS_MAX: u32 = 8;
/// Places of a group, where there are enough of them: fewer make the pieces that cross the link short.
const GROUP_PLACES: u32 = 8;

/// Experts that arrive together.
pub struct Group {
    /// Which of the ring's groups.
    index: usize,
    /// Who, ascending, and where.
    pub experts: VecDeque<(u32, ExpertAddrs)>,
}

/// The ring with the stream and events that order it; lives as long as the engine.
pub struct Ring<B: Backend> {
    backend: Rc<B>,
    copy_stream: B::Stream,
    handed_over: B::Event,
    arrived: Vec<B::Event>,
    consumed: Vec<B::Event>,
    places: Vec<AddrRange>,
    group_max: usize,
    next: usize,
    /// Filled or being filled, not yet taken, in order. All belong to one layer.
    ahead: VecDeque<Group>,
    /// Groups taken whose place is not free yet.
    taken: usize,
    /// Before and after the copies of one group, and its bytes once they are queued.
    timed: [B::Event; 2],
    timed_bytes: Option<Bytes>,
}

impl<B: Backend> Ring<B> {
    /// A ring that has no memory yet.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>) -> Result<Self, EngineError> {
        let events = || (0..GROUPS_MAX).map(|_| backend.create_event()).collect::<Result<Vec<_>, _>>();
        Ok(Self {
            copy_stream: backend.create_stream()?,
            handed_over: backend.create_event()?,
            arrived: events()?,
            consumed: events()?,
            places: Vec::new(),
            group_max: 0,
            next: 0,
            ahead: VecDeque::new(),
            taken: 0,
            timed: [backend.create_event()?, backend.create_event()?],
            timed_bytes: None,
            backend,
        })
    }

    /// Takes `range` with room for `n_places` experts, once `compute` has come as far as it has been told to: the range was handed
    /// over in that order, and nothing may land in it before.
    ///
    /// # Errors
    /// The backend's.
    pub fn begin(&mut self, range: AddrRange, n_places: u32, compute: &B::Stream) -> Result<(), EngineError> {
        let n_groups = (n_places / GROUP_PLACES).clamp(2.min(n_places.max(1)), GROUPS_MAX);
        let group_places = n_places / n_groups;
        let group_bytes = Bytes(range.bytes.0 / u64::from(n_places.max(1)) * u64::from(group_places));
        self.places = (0..u64::from(n_groups))
            .map(|index| AddrRange { start: range.start.offset(group_bytes * index), bytes: group_bytes })
            .collect();
        self.group_max = group_places as usize;
        self.next = 0;
        self.ahead.clear();
        self.taken = 0;
        // Marked anew: the marks of a prompt that failed are lost.
        self.consumed.iter().chain([&self.handed_over]).try_for_each(|event| self.backend.record(compute, event))?;
        Ok(self.backend.wait(&self.copy_stream, &self.handed_over)?)
    }

    /// Starts filling groups with `wanted` experts of `layer`, ascending, while there are groups that are free or will be. Takes from
    /// `wanted` what it started.
    ///
    /// # Errors
    /// The backend's.
    pub fn fill_ahead(&mut self, layer: u32, wanted: &mut VecDeque<u32>, experts: &mut Experts<B>) -> Result<(), EngineError> {
        while !wanted.is_empty() && self.ahead.len() + self.taken < self.places.len() {
            let chosen: Vec<u32> = wanted.drain(..wanted.len().min(self.group_max)).collect();
            let index = self.next;
            self.next = (index + 1) % self.places.len();
            self.backend.wait(&self.copy_stream, &self.consumed[index])?;
            let is_timed = self.timed_bytes.is_none();
            if is_timed {
                self.backend.record(&self.copy_stream, &self.timed[0])?;
            }
            let addrs = self.copy_group(layer, &chosen, self.places[index], experts)?;
            if is_timed {
                self.backend.record(&self.copy_stream, &self.timed[1])?;
                let expert_bytes: Bytes = experts.matrix_bytes(layer).into_iter().sum();
                self.timed_bytes = Some(expert_bytes * chosen.len() as u64);
            }
            self.backend.record(&self.copy_stream, &self.arrived[index])?;
            self.ahead.push_back(Group { index, experts: chosen.into_iter().zip(addrs).collect() });
        }
        Ok(())
    }

    /// Queues the copies of a group, a run of neighbours in one piece.
    fn copy_group(&self, layer: u32, chosen: &[u32], place: AddrRange, experts: &mut Experts<B>) -> Result<Vec<ExpertAddrs>, EngineError> {
        let bytes = experts.matrix_bytes(layer);
        let n_chosen = chosen.len() as u64;
        let up = place.start.offset(bytes[0] * n_chosen);
        let starts: [Addr; 3] = [place.start, up, up.offset(bytes[1] * n_chosen)];
        debug_assert!(starts[2].offset(bytes[2] * n_chosen) <= place.end(), "a group leaves its place");
        let at = |index: usize| {
            let [gate, up, down] = std::array::from_fn(|part| starts[part].offset(bytes[part] * index as u64));
            ExpertAddrs { gate, up, down }
        };
        let mut start = 0;
        while start < chosen.len() {
            let count = (start..chosen.len()).take_while(|&at| (chosen[at] - chosen[start]) as usize == at - start).count();
            let first = ExpertId { layer, expert: chosen[start] };
            experts.copy_run(first, u32::try_from(count).expect("at most a layer's experts"), at(start), &self.copy_stream)?;
            start += count;
        }
        Ok((0..chosen.len()).map(at).collect())
    }

    /// Forgets what was timed: the next group is.
    pub fn begin_timing(&mut self) {
        self.timed_bytes = None;
    }

    /// Bytes and seconds of the group that was timed, once its copies are done.
    ///
    /// # Errors
    /// The backend's.
    pub fn timed(&self) -> Result<Option<(Bytes, f64)>, EngineError> {
        let Some(bytes) = self.timed_bytes else { return Ok(None) };
        self.backend.synchronise_event(&self.timed[1])?;
        Ok(Some((bytes, self.backend.elapsed_s(&self.timed[0], &self.timed[1])?)))
    }

    /// The last expert that is on its way, where any is.
    pub fn last_ahead(&self) -> Option<u32> {
        self.ahead.back().and_then(|group| group.experts.back()).map(|&(expert, _)| expert)
    }

    /// The oldest group that is on its way, for products on `compute`, which wait for it. To be given to [`Ring::consumed`].
    ///
    /// # Errors
    /// The backend's.
    pub fn next_group(&mut self, compute: &B::Stream) -> Result<Option<Group>, EngineError> {
        let Some(group) = self.ahead.pop_front() else { return Ok(None) };
        self.backend.wait(compute, &self.arrived[group.index])?;
        self.taken += 1;
        Ok(Some(group))
    }

    /// Frees a group's place as soon as `compute` has come this far.
    ///
    /// # Errors
    /// The backend's.
    pub fn consumed(&mut self, group: Group, compute: &B::Stream) -> Result<(), EngineError> {
        self.taken -= 1;
        Ok(self.backend.record(compute, &self.consumed[group.index])?)
    }

    /// Forgets groups that nobody wants. What comes next into their places is queued behind them.
    pub fn drop_ahead(&mut self) {
        self.ahead.clear();
    }

    /// Waits until nothing is on its way: nothing may land in the arena once it is handed back.
    ///
    /// # Errors
    /// The backend's.
    pub fn finish(&mut self) -> Result<(), EngineError> {
        self.drop_ahead();
        self.taken = 0;
        Ok(self.backend.synchronise(&self.copy_stream)?)
    }
}
