//! The rows of a prompt sorted by expert.

/// Routes as the router wrote them.
pub struct Routes<'a> {
    /// `[n_rows, n_used]`, ascending in each row.
    pub ids: &'a [u32],
    /// `[n_rows, n_used]`.
    pub weights: &'a [f32],
    /// Experts of a row.
    pub n_used: usize,
}

/// Which rows go to which expert.
pub struct SortedRoutes<'a> {
    /// Rows of each expert.
    pub counts: &'a mut [u32],
    /// Rows by expert, ascending within one.
    pub rows: &'a mut [u32],
    /// The router's weight of each entry.
    pub weights: &'a mut [f32],
    /// `[n_rows, n_used]`: where each row stands in those lists.
    pub entries: &'a mut [u32],
}

/// Sorts `routes` by expert.
///
/// # Panics
/// Where an expert is beyond the counts, or a list shorter than the routes.
pub fn sort_routes(routes: &Routes<'_>, sorted: &mut SortedRoutes<'_>) {
    sorted.counts.fill(0);
    for &id in routes.ids {
        sorted.counts[id as usize] += 1;
    }
    let mut next: Vec<u32> = Vec::with_capacity(sorted.counts.len());
    let mut total = 0;
    for &count in sorted.counts.iter() {
        next.push(total);
        total += count;
    }
    let pairs = routes.ids.chunks(routes.n_used).zip(routes.weights.chunks(routes.n_used)).zip(sorted.entries.chunks_mut(routes.n_used));
    for (row, ((ids, weights), entries)) in (0_u32..).zip(pairs) {
        for ((&id, &weight), entry) in ids.iter().zip(weights).zip(entries) {
            let at = next[id as usize];
            (sorted.rows[at as usize], sorted.weights[at as usize], *entry) = (row, weight, at);
            next[id as usize] = at + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_know_their_entries() {
        let routes = Routes { ids: &[1, 3, 0, 3, 1, 2], weights: &[0.1, 0.9, 0.2, 0.8, 0.3, 0.7], n_used: 2 };
        let (mut counts, mut rows, mut weights, mut entries) = ([9; 5], [9; 6], [9.0; 6], [9; 6]);
        sort_routes(&routes, &mut SortedRoutes { counts: &mut counts, rows: &mut rows, weights: &mut weights, entries: &mut entries });
        assert_eq!(counts, [1, 2, 1, 2, 0]);
        assert_eq!(rows, [1, 0, 2, 2, 0, 1]);
        assert_eq!(weights, [0.2, 0.1, 0.3, 0.7, 0.9, 0.8]);
        assert_eq!(entries, [1, 4, 0, 5, 2, 3]);
    }
}
