//! Ebbtide runs mixture-of-experts language models that are larger than the graphics card.
//!
//! VRAM is storage that depends on the phase: the output head is needed only while tokens are written, the prompt buffers only
//! while a prompt is read, so one piece of VRAM serves both. `ARCHITECTURE.md` is the map; the modules below stand in reading order.
#![deny(unsafe_code)]

#[cfg(any(all(feature = "cuda", feature = "hip"), all(feature = "cuda", feature = "sycl"), all(feature = "hip", feature = "sycl")))]
compile_error!(
    "features `cuda`, `hip` and `sycl` exclude each other: a build has one GPU backend. Choose one, e.g. `cargo build --features cuda`"
);

pub mod bench;
pub mod cli;
pub mod engine;
pub mod experts;
pub mod gguf;
#[cfg(feature = "serve")]
pub mod grammar;
#[cfg(not(feature = "serve"))]
#[path = "grammar/absent.rs"]
pub mod grammar;
pub mod model;
pub mod phase;
pub mod reply;
#[cfg(feature = "serve")]
pub mod server;
#[cfg(not(feature = "serve"))]
#[path = "server/absent.rs"]
pub mod server;
pub mod settings;
pub mod tokenizer;
pub mod worker;

pub mod backend;
#[path = "../backends/mod.rs"]
pub mod backends;
pub mod quant;
pub mod units;
