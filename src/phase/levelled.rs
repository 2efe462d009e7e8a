//! Cutting a prompt into stretches of nearly the same length: the last is no stub.

/// Length of the longest of the stretches that [`levelled`] cuts.
#[must_use]
pub fn levelled_len(tokens: usize, most: u32) -> u32 {
    let stretches = tokens.div_ceil(most.max(1) as usize).max(1);
    u32::try_from(tokens.div_ceil(stretches)).unwrap_or(most).max(1)
}

/// Cuts `items` into as few stretches as `most` allows. None differs from another by more than one item, so the longest has
/// [`levelled_len`] items.
pub fn levelled<T>(items: &[T], most: u32) -> impl ExactSizeIterator<Item = &[T]> {
    let n_stretches = items.len().div_ceil(most.max(1) as usize);
    let longer = items.len().checked_rem(n_stretches).unwrap_or(0);
    let base = items.len().checked_div(n_stretches).unwrap_or(0);
    (0..n_stretches).map(move |index| {
        let start = index * base + index.min(longer);
        &items[start..start + base + usize::from(index < longer)]
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levelled_stretches_cover_everything_and_differ_by_at_most_one(n_items in 0usize..5000, most in 1u32..700) {
            let items: Vec<usize> = (0..n_items).collect();
            let lengths: Vec<usize> = levelled(&items, most).map(<[usize]>::len).collect();
            prop_assert_eq!(levelled(&items, most).flatten().copied().collect::<Vec<_>>(), &*items);
            prop_assert_eq!(lengths.len(), n_items.div_ceil(most as usize), "as few as can be");
            if let (Some(longest), Some(shortest)) = (lengths.iter().max(), lengths.iter().min()) {
                prop_assert!(longest - shortest <= 1 && *longest <= most as usize);
                prop_assert!(2 * lengths[lengths.len() - 1] >= *longest);
                prop_assert_eq!(*longest, levelled_len(n_items, most) as usize);
                // Cutting again by the longest changes nothing.
                let again: Vec<usize> = levelled(&items, levelled_len(n_items, most)).map(<[usize]>::len).collect();
                prop_assert_eq!(again, lengths);
            }
        }
    }
}
