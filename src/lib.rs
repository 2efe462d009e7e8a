//! Ebbtide runs mixture-of-experts language models that are larger than the graphics card.
#![deny(unsafe_code)]

#[cfg(any(all(feature = "cuda", feature = "hip"), all(feature = "cuda", feature = "sycl"), all(feature = "hip", feature = "sycl")))]
compile_error!(
    "features `cuda`, `hip` and `sycl` exclude each other: a build has one GPU backend. Choose one, e.g. `cargo build --features cuda`"
);

pub mod cli;
pub mod gguf;
pub mod quant;
pub mod settings;
pub mod tokenizer;
pub mod units;
