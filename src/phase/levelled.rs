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

/// As [`levelled_len`], in whole steps: a multiple of `step`, or all of `tokens`. At most `limit`, which is a multiple of `step` or as much
/// as there can be.
#[must_use]
pub fn stepped_len(tokens: usize, most: u32, limit: u32, step: u32) -> u32 {
    let stepped = levelled_len(tokens, most.min(limit)).next_multiple_of(step.max(1)).min(limit.max(1));
    u32::try_from(tokens.max(1)).map_or(stepped, |tokens| tokens.min(stepped))
}

/// As [`levelled`] for items that are counted from `start` on, with borders between stretches at multiples of `step` of that count;
/// `most` is at least `step`, or holds everything.
pub fn levelled_from<T>(start: usize, items: &[T], most: u32, step: u32) -> impl Iterator<Item = &[T]> {
    let (end, step) = (start + items.len(), step.max(1) as usize);
    let most = (most.max(1) as usize).max(step);
    let mut at = start;
    std::iter::from_fn(move || {
        let left = end - at;
        if left == 0 {
            return None;
        }
        let levelled = left.div_ceil(left.div_ceil(most));
        let border = (at + levelled).next_multiple_of(step);
        // A border behind what fits goes one step back; the end is one, too.
        let border = if left <= most {
            end
        } else if border - at > most {
            border - step
        } else {
            border
        };
        let stretch = &items[at - start..border - start];
        at = border;
        Some(stretch)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn stretches_with_a_step_end_at_its_multiples_and_fit(start in 0usize..500, n_items in 0usize..3000, most in 64u32..700) {
            let items: Vec<usize> = (start..start + n_items).collect();
            let stretches: Vec<&[usize]> = levelled_from(start, &items, most, 64).collect();
            prop_assert_eq!(stretches.concat(), &*items);
            let ends: Vec<usize> = stretches.iter().map(|stretch| stretch.last().expect("none is empty") + 1).collect();
            prop_assert!(ends.iter().rev().skip(1).all(|end| end % 64 == 0));
            prop_assert!(stretches.iter().all(|stretch| stretch.len() <= most as usize));
            // At most half a stretch more than the fewest, for borders that are not where they would be.
            prop_assert!(stretches.len() <= n_items.div_ceil((most - most % 64) as usize) + 1);
        }

        #[test]
        fn without_a_step_they_are_the_levelled_ones(n_items in 0usize..3000, most in 1u32..700) {
            let items: Vec<usize> = (0..n_items).collect();
            prop_assert!(levelled_from(7, &items, most, 1).eq(levelled(&items, most)));
        }

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
