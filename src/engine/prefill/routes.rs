//! The rows of a block sorted by expert.

/// Which rows go to which expert of a layer.
#[derive(Default)]
pub struct RoutedRows {
    /// For each expert that has rows, ascending: its number, first entry and count.
    pub experts: Vec<(u32, u32, u32)>,
    /// Rows by expert, ascending within one.
    pub rows: Vec<u32>,
    /// The router's weight of each entry.
    pub weights: Vec<f32>,
    /// `[n_rows, n_used]`: where each row stands in those lists, ascending.
    pub entries: Vec<u32>,
}

impl RoutedRows {
    /// Sorts `ids` and `weights` `[n_rows, n_used]` by expert, rows ascending within one.
    pub fn sort(ids: &[u32], weights: &[f32], n_used: usize, n_expert: usize) -> Self {
        let mut counts = vec![0u32; n_expert];
        for &id in ids {
            counts[id as usize] += 1;
        }
        let mut first = Vec::with_capacity(n_expert);
        let mut experts = Vec::new();
        let mut total = 0;
        for (expert, &count) in (0u32..).zip(&counts) {
            first.push(total);
            if count > 0 {
                experts.push((expert, total, count));
            }
            total += count;
        }
        let (mut rows, mut sorted_weights, mut entries) = (vec![0; ids.len()], vec![0.0; ids.len()], Vec::with_capacity(ids.len()));
        for (row, (ids, weights)) in (0u32..).zip(ids.chunks(n_used).zip(weights.chunks(n_used))) {
            for (&id, &weight) in ids.iter().zip(weights) {
                let at = first[id as usize];
                rows[at as usize] = row;
                sorted_weights[at as usize] = weight;
                entries.push(at);
                first[id as usize] = at + 1;
            }
        }
        Self { experts, rows, weights: sorted_weights, entries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_know_their_entries() {
        let ids = [1, 3, 0, 3, 1, 2];
        let weights = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7];
        let routed = RoutedRows::sort(&ids, &weights, 2, 4);
        assert_eq!(routed.experts, [(0, 0, 1), (1, 1, 2), (2, 3, 1), (3, 4, 2)]);
        assert_eq!(routed.rows, [1, 0, 2, 2, 0, 1]);
        assert_eq!(routed.weights, [0.2, 0.1, 0.3, 0.7, 0.9, 0.8]);
        assert_eq!(routed.entries, [1, 4, 0, 5, 2, 3]);
    }
}
