//! What several test programs share. Each of them compiles this module anew and uses a part of it.
#![allow(dead_code, reason = "every test program uses another part")]

pub mod dry;
pub mod engine;
pub mod real_shapes;
pub mod rewrite;
pub mod synthetic;
