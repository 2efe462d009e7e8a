//! Processor kernels over plain slices: products with quantised weights, attention, delta nets, norms, routing and experts.
//!
//! Two families of products share the weights of a file as they are:
//! - the prompt path ([`gemm`]) decodes panels of 16 weight rows once and multiplies them with all tokens of a tile;
//! - the window path ([`matvec`]) reads each weight row once for at most eight rows of activations.
//!
//! Every kernel has a scalar form and forms for AVX2 and AVX-512, picked by [`simd::SimdLevel`] at run time. Shapes are
//! checked by assertion at the entry of each kernel: they come from the checked model description, never from a file.
#![allow(unsafe_code, reason = "vector loads and disjoint writes from several threads; each block says why it holds")]
#![allow(clippy::cast_possible_truncation, reason = "bit fields of quantised blocks are narrowed on purpose")]
#![allow(clippy::needless_range_loop, reason = "one index walks over several arrays, as in the drawings of the layouts")]

pub mod activations;
pub mod attention;
pub mod attention_window;
mod codes;
mod codes_32;
mod codes_iq;
mod codes_k;
pub mod delta_conv;
pub mod delta_prompt;
mod delta_step;
#[cfg(test)]
mod delta_tests;
pub mod delta_window;
pub mod dot;
mod floats;
pub mod gates;
pub mod gemm;
mod gemm_avx2;
mod gemm_avx512;
mod gemm_scalar;
#[cfg(test)]
mod gemm_tests;
pub mod halves;
pub mod kv;
mod kv_tile;
pub mod matvec;
pub mod moe;
mod moe_prompt;
#[cfg(test)]
mod moe_tests;
mod moe_window;
pub mod norm;
mod panel;
pub mod rope;
pub mod router;
pub mod routes;
pub mod shared_slice;
pub mod simd;
pub mod swiglu;
#[cfg(test)]
mod test_data;
mod vector;
