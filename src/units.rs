//! Numbers with a meaning: newtypes where mixing two of them would compile.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

/// One mebibyte in bytes.
pub const MIB: u64 = 1 << 20;

/// A count of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `n` mebibytes.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(MIB))
    }

    /// This many bytes as mebibytes.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "for people to read")]
    pub fn as_mib(self) -> f64 {
        self.0 as f64 / MIB as f64
    }

    /// The next multiple of `align`, which must not be zero.
    #[must_use]
    pub const fn align_up(self, align: u64) -> Self {
        Self(self.0.div_ceil(align) * align)
    }

    /// `self - other`, zero instead of negative.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `self - other`, or `None` where that would be negative.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// As an index into host memory.
    ///
    /// # Panics
    /// Where an address space is smaller than the count, which a 64-bit build cannot meet.
    #[must_use]
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).expect("a byte count fits the address space")
    }
}

impl From<usize> for Bytes {
    fn from(n: usize) -> Self {
        Self(n as u64)
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, n: u64) -> Self {
        Self(self.0 * n)
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >= MIB {
            write!(f, "{:.1} MiB", self.as_mib())
        } else if self.0 >= 1024 {
            #[allow(clippy::cast_precision_loss, reason = "below one MiB")]
            let kib = self.0 as f64 / 1024.0;
            write!(f, "{kib:.1} KiB")
        } else {
            write!(f, "{} B", self.0)
        }
    }
}

/// Number of a token in the vocabulary.
pub type TokenId = u32;

/// Number of a VRAM slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// One routed expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId {
    /// Layer, counted from the input.
    pub layer: u32,
    /// Number of the expert within its layer.
    pub expert: u32,
}

impl fmt::Display for ExpertId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expert {} of layer {}", self.expert, self.layer)
    }
}
