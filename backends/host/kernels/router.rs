//! The choice of experts: softmax over all, the K largest, their shares.

/// One chosen expert and its share of the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// Number of the expert in its layer.
    pub expert: u32,
    /// Factor of the expert's result.
    pub weight: f32,
}

/// What the sum of the chosen probabilities counts as at least: the smallest normal half float, as models were trained.
const SUM_MIN: f32 = 1.0 / 16_384.0;

/// Chooses the `out.len()` experts with the largest probability, ties to the lower number, and writes them ascending by number.
///
/// Weights are the probabilities divided by their sum, times `scale`.
///
/// # Panics
/// Where more experts are to be chosen than there are.
pub fn choose_experts(logits: &[f32], scale: f32, out: &mut [Route]) {
    assert!(out.len() <= logits.len(), "{} of {} experts", out.len(), logits.len());
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut routes: Vec<Route> = logits
        .iter()
        .zip(0_u32..)
        // A NaN counts as never chosen before a number; its share would be meaningless anyway.
        .map(|(logit, expert)| Route { expert, weight: if logit.is_nan() { 0.0 } else { (logit - largest).exp() } })
        .collect();
    let total: f64 = routes.iter().map(|route| f64::from(route.weight)).sum();
    routes.iter_mut().for_each(|route| route.weight = (f64::from(route.weight) / total) as f32);
    // The sort is stable, so that equal probabilities keep the lower number first.
    routes.sort_by(|left, right| right.weight.total_cmp(&left.weight));
    out.copy_from_slice(&routes[..out.len()]);
    out.sort_by_key(|route| route.expert);
    let sum = out.iter().map(|route| route.weight).sum::<f32>().max(SUM_MIN);
    out.iter_mut().for_each(|route| route.weight = route.weight / sum * scale);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    fn chosen(logits: &[f32], count: usize) -> Vec<Route> {
        let mut out = vec![Route { expert: 0, weight: 0.0 }; count];
        choose_experts(logits, 1.0, &mut out);
        out
    }

    #[test]
    fn the_largest_are_chosen_ascending_and_their_shares_sum_to_one() {
        let logits = Numbers::seeded(51).floats(128, 6.0);
        let routes = chosen(&logits, 8);
        assert!(routes.is_sorted_by(|left, right| left.expert < right.expert));
        let least = routes.iter().map(|route| logits[route.expert as usize]).fold(f32::INFINITY, f32::min);
        assert_eq!(logits.iter().filter(|logit| **logit >= least).count(), 8);
        let total: f64 = routes.iter().map(|route| f64::from(logits[route.expert as usize]).exp()).sum();
        for route in routes {
            let exact = f64::from(logits[route.expert as usize]).exp() / total;
            assert!((f64::from(route.weight) - exact).abs() < 1e-6, "{route:?} for {exact}");
        }
    }

    #[test]
    fn a_tie_goes_to_the_lower_number() {
        let experts: Vec<u32> = chosen(&[1.0, 3.0, 2.0, 2.0, 2.0], 3).iter().map(|route| route.expert).collect();
        assert_eq!(experts, [1, 2, 3]);
    }

    #[test]
    fn a_tiny_sum_is_held_at_the_smallest_normal_half() {
        let mut logits = vec![0.0; 100_000];
        logits[5] = 0.1;
        let route = chosen(&logits, 1)[0];
        let probability = 0.1_f64.exp() / (99_999.0 + 0.1_f64.exp());
        assert!((f64::from(route.weight) - probability * 16_384.0).abs() < 1e-4, "{route:?}");
    }

    #[test]
    fn the_scale_multiplies_every_share() {
        let mut out = [Route { expert: 0, weight: 0.0 }; 2];
        choose_experts(&[0.0, 0.0], 2.5, &mut out);
        assert_eq!(out.map(|route| route.weight), [1.25, 1.25]);
    }
}
