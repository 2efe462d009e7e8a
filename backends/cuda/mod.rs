//! The CUDA device of a build with the feature `cuda`; so far the question whether its driver is there.
#![allow(unsafe_code, reason = "the driver is a C library; every block says why it may be called")]

pub mod driver;
