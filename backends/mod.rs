//! The backends this build has.
//!
//! [`host`] always. A GPU feature adds the question whether its driver is there; its kernels come in a later version, so
//! [`GPU_FEATURE`] is what the program tells its user instead.

pub mod gpu_feature;
pub mod host;

use gpu_feature::GpuFeature;

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
