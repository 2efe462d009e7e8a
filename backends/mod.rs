//! The backends this build has.

pub mod host;
