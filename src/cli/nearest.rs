//! The known name that a mistyped one most likely means.

/// The candidate with the fewest edits to `typed`, if they are few enough to be a slip. A name of which `typed` is the start
/// counts as one edit away.
#[must_use]
pub fn nearest<'a>(typed: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let slips_max = typed.len() / 3;
    candidates
        .map(|candidate| {
            let distance = if candidate.starts_with(typed) { 1 } else { edits(typed, candidate) };
            (distance, candidate)
        })
        .min()
        .filter(|(distance, _)| *distance <= slips_max)
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, drop or replace to make one of the other.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    // edits between the letters of `from` seen so far and each start of `to`
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (column, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted_as_by_hand() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("same", "same"), 0);
    }

    #[test]
    fn a_slip_finds_its_name_and_a_stranger_none() {
        let names = ["vram-mib", "vram-reserve-mib", "prefill", "prefill-block", "kv"];
        assert_eq!(nearest("vram_mib", names.into_iter()), Some("vram-mib"));
        assert_eq!(nearest("vram-reserve", names.into_iter()), Some("vram-reserve-mib"));
        assert_eq!(nearest("prefil", names.into_iter()), Some("prefill"));
        assert_eq!(nearest("colour", names.into_iter()), None);
    }
}
