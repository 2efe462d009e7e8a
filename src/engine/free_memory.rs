//! How much device memory is free, as far as the driver can be believed. The one place that asks.

use crate::backend::{Backend, BackendError, MemoryInfo};
use crate::phase::plan::DeviceBudget;
use crate::units::Bytes;

/// Share of a device that is taken to be ours where the driver does not say what is free, in percent.
const SAFE_SHARE_PERCENT: u64 = 80;

/// What a driver answers, judged.
#[derive(Clone, Debug)]
pub enum FreeMemory {
    /// A figure that can be.
    Believed {
        /// Free bytes.
        free: Bytes,
        /// The whole answer.
        info: MemoryInfo,
    },
    /// The driver says that it does not know.
    NotSaid(MemoryInfo),
    /// 0, or more than the total, twice.
    Impossible {
        /// Free bytes, as told.
        free: Bytes,
        /// The whole answer.
        info: MemoryInfo,
    },
    /// The query failed twice.
    Failed(BackendError),
}

impl FreeMemory {
    /// Asks `backend`, once more where the first answer cannot be: some drivers answer 0 just after a large free, or report an error that
    /// an earlier call left, which asking clears.
    #[must_use]
    pub fn read<B: Backend>(backend: &B) -> Self {
        match Self::judge(backend.memory_info()) {
            believed @ Self::Believed { .. } => believed,
            _ => Self::judge(backend.memory_info()),
        }
    }

    fn judge(answer: Result<MemoryInfo, BackendError>) -> Self {
        match answer {
            Ok(info) => match info.free {
                None => Self::NotSaid(info),
                Some(free) if free > Bytes::ZERO && free <= info.total => Self::Believed { free, info },
                Some(free) => Self::Impossible { free, info },
            },
            Err(error) => Self::Failed(error),
        }
    }

    /// The figure, where it can be.
    #[must_use]
    pub fn believed(&self) -> Option<Bytes> {
        match self {
            Self::Believed { free, .. } => Some(*free),
            Self::NotSaid(_) | Self::Impossible { .. } | Self::Failed(_) => None,
        }
    }

    /// What is wrong with the answer, for a line of the log; `None` where nothing is.
    #[must_use]
    pub fn complaint(&self) -> Option<String> {
        match self {
            Self::Believed { .. } => None,
            Self::NotSaid(_) => Some("the driver does not say how much memory is free".to_owned()),
            Self::Impossible { free, info } => {
                Some(format!("the driver's reading of free memory, {free} of {}, is not believed", info.total))
            }
            Self::Failed(error) => Some(format!("free memory cannot be read ({error})")),
        }
    }
}

/// Asks a device what it has for us.
///
/// A free figure that cannot be is not believed: our own books decide (at start nothing is ours, so the device counts as empty). Where
/// the driver says plainly that it does not know, a safe share of the total is used. Either is told in the second value.
#[must_use]
pub fn read_device_budget<B: Backend>(backend: &B) -> (DeviceBudget, Option<String>) {
    let capabilities = backend.capabilities();
    let budget = |total, used_by_others, os_budget| DeviceBudget {
        total,
        used_by_others,
        os_budget,
        context_bytes: capabilities.context_bytes + capabilities.context_growth_bytes,
        graph_node_bytes: capabilities.graph_node_bytes,
        borrow_spill: capabilities.borrow_spill,
        halves_max: capabilities.halves_max,
    };
    let safe_share = |total: Bytes| Bytes(total.0 / 100 * SAFE_SHARE_PERCENT);
    let reading = FreeMemory::read(backend);
    let complaint = reading.complaint();
    let notice = |then: String| complaint.map(|complaint| format!("{complaint}: {then}"));
    match reading {
        FreeMemory::Believed { free, info } => {
            // What is used is ours as far as our context goes.
            let used_by_others = (info.total - free).saturating_sub(capabilities.context_bytes);
            (budget(info.total, used_by_others, info.os_budget), None)
        }
        FreeMemory::NotSaid(MemoryInfo { total, os_budget, .. }) => {
            let ours = safe_share(total);
            let then = format!("planning with {ours}, {SAFE_SHARE_PERCENT} % of {total}; set --vram-mib to decide otherwise");
            (budget(total, total - ours, os_budget), notice(then))
        }
        FreeMemory::Impossible { info, .. } => {
            (budget(info.total, Bytes::ZERO, info.os_budget), notice("planning by our own books".to_owned()))
        }
        FreeMemory::Failed(_) => {
            // Not even the total is known; the largest allocation says how large the device is at least.
            let total = capabilities.max_allocation_bytes;
            let ours = safe_share(total);
            let then =
                format!("planning with {ours}, {SAFE_SHARE_PERCENT} % of the largest allocation; set --vram-mib to decide otherwise");
            (budget(total, total - ours, None), notice(then))
        }
    }
}
