//! What a build says of the devices it could use, before one is opened: plain facts for `ebbtide devices` and `ebbtide doctor`.
//!
//! Backends fill these in; whoever reads them needs no backend's name.

use serde::Serialize;

use crate::units::Bytes;

/// Asks this build's backends. Starts the driver, and takes a card's context for a moment.
pub type Surveyor = fn() -> Survey;

/// All that a build finds.
#[derive(Clone, Debug, Serialize)]
pub struct Survey {
    /// The processor, which the embedded backend computes on.
    pub host: ProcessorFacts,
    /// Cards, or why there are none.
    pub cards: Cards,
}

/// What matters of the processor.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessorFacts {
    /// Instruction sets that kernels have forms for, and whether this processor has each.
    pub features: Vec<(&'static str, bool)>,
    /// The form that is used.
    pub kernels: String,
    /// Threads that can run at once.
    pub threads: usize,
}

/// Cards of a build.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cards {
    /// This build runs no models on cards.
    NotInThisBuild {
        /// Why, and what would.
        reason: String,
    },
    /// The driver has no answer.
    Unavailable {
        /// What the driver offers, such as CUDA.
        interface: &'static str,
        /// Why, and the way out.
        reason: String,
    },
    /// The driver's list, which may be empty.
    Listed {
        /// The driver.
        driver: DriverFacts,
        /// Its cards, by number.
        cards: Vec<CardFacts>,
    },
}

/// What is known of a driver.
#[derive(Clone, Debug, Serialize)]
pub struct DriverFacts {
    /// What it offers, such as CUDA.
    pub interface: &'static str,
    /// The version of that.
    pub interface_version: String,
    /// Its own version, where something says.
    pub release: Option<String>,
    /// Why the users of a card are not known; `None` where they are.
    pub users_unknown: Option<String>,
}

/// A card as its driver describes it.
#[derive(Clone, Debug, Serialize)]
pub struct CardFacts {
    /// The driver's number, from 0.
    pub number: u32,
    /// What it is called.
    pub name: String,
    /// Its unique number, as `--device` takes it.
    pub uuid: String,
    /// Version of its instruction set, such as `9.0`.
    pub compute_capability: String,
    /// Shares memory with the processor.
    pub integrated: bool,
    /// `--device auto` takes this one.
    pub is_default: bool,
    /// All of its memory.
    pub total_bytes: Bytes,
    /// What was free before this program took anything, or the driver's context with it; `None` where nobody says.
    pub free_bytes: Option<Bytes>,
    /// Why this program's kernels do not run on it; `None` where they were loaded.
    pub kernels_refused: Option<String>,
    /// Address ranges can be reserved and backed separately.
    pub virtual_memory: bool,
    /// Host memory can be page-locked where it lies.
    pub registers_host_memory: bool,
    /// The same for a file that is mapped read-only.
    pub registers_file_maps: bool,
    /// Kernels read host memory that is not page-locked.
    pub reads_pageable_memory: bool,
    /// The link, where something says.
    pub link: Option<LinkFacts>,
    /// Programs that hold its memory; `None` where nobody says.
    pub users: Option<Vec<CardUser>>,
}

/// How a card is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LinkFacts {
    /// PCIe generation now; cards lower it while idle.
    pub generation: u32,
    /// Lanes now.
    pub lanes: u32,
    /// The best generation of card and slot.
    pub generation_max: u32,
    /// The most lanes of card and slot.
    pub lanes_max: u32,
}

/// A program that holds memory of a card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CardUser {
    /// Process number.
    pub pid: u32,
    /// What it is called, where the system says.
    pub name: Option<String>,
    /// How much it holds, where the driver says.
    pub bytes: Option<Bytes>,
}
