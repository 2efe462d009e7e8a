//! Which vector instructions the kernels may use.

/// A set of instructions; each level includes those below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// Portable code, the reference for the other levels.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
}

impl SimdLevel {
    /// The highest level this processor has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// The instruction sets that levels and single kernels look for, and whether this processor has each.
    #[must_use]
    pub fn features() -> Vec<(&'static str, bool)> {
        #[cfg(target_arch = "x86_64")]
        return vec![
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512bw", is_x86_feature_detected!("avx512bw")),
            ("avx512vl", is_x86_feature_detected!("avx512vl")),
            ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
            ("avx512vbmi", is_x86_feature_detected!("avx512vbmi")),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    /// The levels this processor has, lowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let highest = Self::detect();
        [Self::Scalar, Self::Avx2, Self::Avx512].into_iter().filter(|level| *level <= highest).collect()
    }
}
