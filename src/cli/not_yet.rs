//! Flags of the command line's contract that this version does not carry out.
//!
//! A flag, or a value of one, is in [`NOT_YET`] or reaches the engine: there is no third way. An entry goes when its feature comes,
//! in the same commit.

/// A flag of which this version carries out some values, or none.
#[derive(Clone, Copy, Debug)]
pub struct NotYet {
    /// The flag without its dashes.
    pub flag: &'static str,
    /// Values that are carried out, or that ask for nothing.
    pub accepts: &'static [&'static str],
    /// Why the others are not, and what to do.
    pub reason: &'static str,
}

const NO_PACING: &str = "copies run at the machine's own speed. Leave the flag out";

/// All of them.
pub const NOT_YET: &[NotYet] = &[
    NotYet { flag: "hf", accepts: &[], reason: "nothing is downloaded. Fetch the GGUF file yourself and name it with -m FILE" },
    NotYet { flag: "sim-link-gbps", accepts: &[], reason: NO_PACING },
    NotYet { flag: "sim-link-us", accepts: &[], reason: NO_PACING },
];
