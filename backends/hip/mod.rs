//! The HIP device of a build with the feature `hip`; so far the question whether its runtime is there.

pub mod driver;
