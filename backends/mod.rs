//! The backends this build has.
//!
//! [`host`] always. A GPU feature adds the question whether its driver is there, and `cuda` a whole backend. A build for cards on which
//! models do not run yet tells its user so by [`GPU_FEATURE`].

pub mod gpu_feature;
pub mod host;

use gpu_feature::GpuFeature;
use host::kernels::simd::SimdLevel;

use crate::backend::survey::{Cards, ProcessorFacts, Survey};

/// What this build finds: the processor, and the cards it could use.
#[must_use]
pub fn survey() -> Survey {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let host = ProcessorFacts { features: SimdLevel::features(), kernels: format!("{:?}", SimdLevel::detect()), threads };
    Survey { host, cards: cards() }
}

#[cfg(feature = "cuda")]
fn cards() -> Cards {
    cuda::survey()
}

#[cfg(not(feature = "cuda"))]
fn cards() -> Cards {
    let without = "built without a feature for cards: models run on the host. `cargo build --release --features cuda` uses NVIDIA's";
    Cards::NotInThisBuild { reason: GPU_FEATURE.map_or_else(|| without.to_owned(), |feature| feature.notice()) }
}

/// Whether models run on cards in this build.
pub const RUNS_ON_CARDS: bool = cfg!(feature = "cuda");

cfg_if::cfg_if! {
    if #[cfg(feature = "cuda")] {
        pub mod cuda;
        /// The GPU feature of this build.
        pub const GPU_FEATURE: Option<GpuFeature> =
            Some(GpuFeature { name: "CUDA", feature: "cuda", device_names: Some(cuda::driver::device_names) });
    } else if #[cfg(feature = "hip")] {
        pub mod hip;
        /// The GPU feature of this build.
        pub const GPU_FEATURE: Option<GpuFeature> =
            Some(GpuFeature { name: "HIP", feature: "hip", device_names: Some(hip::driver::device_names) });
    } else if #[cfg(feature = "sycl")] {
        /// The GPU feature of this build.
        pub const GPU_FEATURE: Option<GpuFeature> = Some(GpuFeature { name: "SYCL", feature: "sycl", device_names: None });
    } else {
        /// The GPU feature of this build: none.
        pub const GPU_FEATURE: Option<GpuFeature> = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_tells_of_its_gpu_feature_whether_or_not_the_driver_is_there() {
        assert_eq!(GPU_FEATURE.is_some(), cfg!(any(feature = "cuda", feature = "hip", feature = "sycl")));
        if let Some(feature) = GPU_FEATURE {
            let notice = feature.notice();
            assert!(notice.contains("on the host backend alone") && notice.contains(feature.name), "{notice}");
        }
    }
}
