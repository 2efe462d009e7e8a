//! Which experts a block's rows go to.

/// The experts of a layer that have rows.
#[derive(Default)]
pub struct RoutedRows {
    /// Ascending: number, first entry in the lists of rows by expert, and count.
    pub experts: Vec<(u32, u32, u32)>,
}

impl RoutedRows {
    /// From the rows of each expert of the layer.
    pub fn of_counts(counts: &[u32]) -> Self {
        let mut first = 0;
        let experts = (0..).zip(counts).filter_map(|(expert, &count)| {
            let place = (expert, first, count);
            first += count;
            (count > 0).then_some(place)
        });
        Self { experts: experts.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_with_rows_follow_one_another() {
        assert_eq!(RoutedRows::of_counts(&[0, 2, 0, 1]).experts, [(1, 0, 2), (3, 2, 1)]);
    }
}
