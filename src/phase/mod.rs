//! VRAM as storage that depends on the phase: the plan of both phases, who owns which range, and the machine that moves between them.
//!
//! [`plan`] is a pure function of model, budget and settings. [`region`] keeps the books of one slab. [`scheduler`] is the only place
//! that moves VRAM between phases; it is written once against the [`Backend`](crate::backend::Backend) trait.

pub mod levelled;
pub mod plan;
pub mod plan_error;
pub mod plan_text;
pub mod prompt_sizes;
pub mod region;
pub mod scheduler;
pub mod slab;

pub use plan::{DeviceBudget, Plan, PlanError, PromptMemory, WayOut};
pub use region::{Loan, RegionError, Regions};
pub use scheduler::{HeadRef, Phase, PhaseError, Scheduler};
pub use slab::SlabSizes;
