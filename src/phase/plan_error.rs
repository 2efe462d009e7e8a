//! Why no plan can be made, and what was found to help: every way out in a message has been tried by the planner.

use std::fmt;

use thiserror::Error;

use crate::units::Bytes;

/// Settings with which a plan can be made, each on its own. All of them were tried; `None` where a setting does not help.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WayOut {
    /// The least `--vram-mib`, where that setting and not the device is the limit.
    pub vram_mib: Option<u64>,
    /// The most tokens of `--ctx`.
    pub ctx_tokens: Option<u32>,
    /// Whether `--kv q8_0` is enough.
    pub kv_q8_0: bool,
    /// The most slots of `--expert-cache`, where slots were asked for.
    pub slots: Option<u32>,
    /// The most of `--vram-reserve-mib`, where a reserve was asked for.
    pub reserve_mib: Option<u64>,
}

impl WayOut {
    /// True where no setting helps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for WayOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways: Vec<String> = [
            self.vram_mib.map(|mib| format!("raise --vram-mib to {mib} or more")),
            self.slots.map(|slots| format!("lower --expert-cache to {slots}")),
            self.reserve_mib.map(|mib| format!("lower --vram-reserve-mib to {mib}")),
            self.ctx_tokens.map(|tokens| format!("lower --ctx to {tokens}")),
            self.kv_q8_0.then(|| "choose --kv q8_0".to_owned()),
        ]
        .into_iter()
        .flatten()
        .collect();
        match ways.as_slice() {
            [] => f.write_str("no setting helps: free memory on the device or take a smaller model"),
            ways => f.write_str(&ways.join(", or ")),
        }
    }
}

/// Why no plan can be made. None of these passes by waiting: something must be set otherwise.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// The parts that every token needs do not fit.
    #[error(
        "the model needs {needed} of VRAM for its resident parts, head and one expert slot with a context of {ctx_tokens} tokens; {budget} are \
         there after a reserve of {reserve}: {way_out}"
    )]
    ResidentTooLarge {
        /// What is needed at least.
        needed: Bytes,
        /// What is there.
        budget: Bytes,
        /// What is kept free.
        reserve: Bytes,
        /// The context asked for or tried last.
        ctx_tokens: u32,
        /// What would do.
        way_out: WayOut,
    },
    /// More slots were asked for than fit.
    #[error("--expert-cache {asked} needs {needed}, {left} are left for slots: {way_out}; or leave it at auto")]
    SlotsTooMany {
        /// Slots asked for.
        asked: u32,
        /// Their bytes, no more than the model's experts take.
        needed: Bytes,
        /// Bytes left for slots.
        left: Bytes,
        /// What would do.
        way_out: WayOut,
    },
    /// Not even one token can be read at a time.
    #[error("no room to read a prompt: its buffers need {needed} for a chunk of one token, {left} can be had: {way_out}")]
    NoPromptRoom {
        /// Bytes for one token.
        needed: Bytes,
        /// Bytes that can be lent or owned.
        left: Bytes,
        /// What would do.
        way_out: WayOut,
    },
    /// The founding document's sizing reads in chunks of its ladder only, and none fits.
    #[error(
        "--cache-sizing seed: a chunk of {chunk} tokens needs {needed}, {left} can be had of the slots and what is free, with 512 MiB to spare: \
         use --cache-sizing exact, more slots, or --head-alias-mode realloc{}",
        if way_out.is_empty() { String::new() } else { format!(", or {way_out}") }
    )]
    NoSeedChunk {
        /// The smallest chunk that was tried.
        chunk: u32,
        /// Bytes of its buffers.
        needed: Bytes,
        /// Bytes that can be had.
        left: Bytes,
        /// What would do.
        way_out: WayOut,
    },
    /// The head is to be freed on a device that lets prompt buffers lie in the slab only.
    #[error(
        "--head-alias-mode realloc lets prompt buffers continue beside the slab, which this device does not support (borrow_spill): use \
         --head-alias-mode overlay"
    )]
    NoSpill,
    /// The reserve leaves nothing.
    #[error("a reserve of {reserve} leaves nothing of {limit}: {way_out}")]
    ReserveTooLarge {
        /// The reserve asked for.
        reserve: Bytes,
        /// What it is taken from.
        limit: Bytes,
        /// What would do.
        way_out: WayOut,
    },
    /// Other programs hold the whole device, or the system lets us use nothing of it.
    #[error("nothing of the device's {total} can be used: others hold {used_by_others}; end them or choose another device")]
    DeviceFull {
        /// All memory of the device.
        total: Bytes,
        /// What others hold.
        used_by_others: Bytes,
    },
}
