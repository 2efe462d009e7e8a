//! In which form products read activations: what the user asked for, and what the device multiplies fastest.

use crate::backend::op::Path;
use crate::quant::{ActivationFormat, QuantType};
use crate::settings::Activations;
use crate::units::Bytes;

/// Bytes of weights that are unpacked at a time where 16-bit floats are asked for on a device that does not choose them itself.
pub const HALVES_MAX_UNSAID: Bytes = Bytes::mib(48);

/// How activations are rounded for products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// Activations stay floats.
    pub exact: bool,
    /// Prompts are read in 16-bit floats, with at most so many bytes of weights unpacked at a time; `None`: in what goes with the weights.
    pub halves_max: Option<Bytes>,
}

impl Arithmetic {
    /// Nothing is rounded.
    pub const EXACT: Self = Self { exact: true, halves_max: None };

    /// What was asked for, on a device with this [`halves_max`](crate::backend::Capabilities::halves_max).
    #[must_use]
    pub fn of(activations: Activations, halves_max: Option<Bytes>) -> Self {
        let halves_max = if activations == Activations::F16 { halves_max.or(Some(HALVES_MAX_UNSAID)) } else { halves_max };
        Self { exact: activations == Activations::F32, halves_max }
    }

    /// The form of rows beside weights of `quant_type`. Floats stay beside floats: those are the few small matrices that decide, such as
    /// routers.
    #[must_use]
    pub fn format(self, path: Path, quant_type: QuantType) -> ActivationFormat {
        let in_halves = path == Path::Prompt && self.halves_max.is_some() && !self.exact && quant_type != QuantType::F32;
        if in_halves { ActivationFormat::F16 } else { ActivationFormat::for_weights(quant_type, self.exact) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_for_devices_that_choose_them_or_where_asked_for() {
        let of_prompt = |activations, halves_max| Arithmetic::of(activations, halves_max).format(Path::Prompt, QuantType::Q8_0);
        for (activations, on_host, on_card) in [
            (Activations::Q8, ActivationFormat::Q8_0, ActivationFormat::F16),
            (Activations::F16, ActivationFormat::F16, ActivationFormat::F16),
            (Activations::F32, ActivationFormat::F32, ActivationFormat::F32),
        ] {
            assert_eq!(of_prompt(activations, None), on_host, "{activations}");
            assert_eq!(of_prompt(activations, Some(Bytes::mib(1))), on_card, "{activations}");
        }
        assert_eq!(Arithmetic::of(Activations::F16, Some(Bytes::mib(1))).halves_max, Some(Bytes::mib(1)), "the device's own limit");
    }

    #[test]
    fn halves_are_for_prompts_and_not_for_floats() {
        let quantised = Arithmetic { exact: false, halves_max: None };
        let halves = Arithmetic { halves_max: Some(Bytes::mib(1)), ..quantised };
        assert_eq!(quantised.format(Path::Prompt, QuantType::Q4_K), ActivationFormat::Q8_K);
        assert_eq!(halves.format(Path::Prompt, QuantType::Q4_K), ActivationFormat::F16);
        assert_eq!(halves.format(Path::Prompt, QuantType::BF16), ActivationFormat::F16);
        assert_eq!(halves.format(Path::Prompt, QuantType::F32), ActivationFormat::F32);
        assert_eq!(halves.format(Path::Window, QuantType::Q4_K), ActivationFormat::Q8_K);
        assert_eq!(Arithmetic { exact: true, ..halves }.format(Path::Prompt, QuantType::Q4_K), ActivationFormat::F32);
    }
}
