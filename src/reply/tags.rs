//! A tag in streamed text: how much of it may have begun.

/// Bytes at the end of `text` that are a beginning of `tag`, but not all of it.
pub(super) fn begun(text: &str, tag: &str) -> usize {
    let most = text.len().min(tag.len().saturating_sub(1));
    (1..=most).rev().find(|&length| text.as_bytes().ends_with(&tag.as_bytes()[..length])).unwrap_or(0)
}

/// A tag looked for in text that comes character by character.
#[derive(Clone, Debug)]
pub(super) struct TagSearch {
    tag: &'static str,
    /// Beginning of the tag, held back.
    held: String,
}

impl TagSearch {
    pub(super) fn new(tag: &'static str) -> Self {
        Self { tag, held: String::new() }
    }

    /// Takes a character; adds what is not of the tag to `out`. True where the tag is whole.
    pub(super) fn step(&mut self, character: char, out: &mut String) -> bool {
        self.held.push(character);
        if self.held == self.tag {
            self.held.clear();
            return true;
        }
        let kept = begun(&self.held, self.tag);
        out.extend(self.held.drain(..self.held.len() - kept));
        false
    }

    /// What was held back, and will not become the tag.
    pub(super) fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_become_the_tag_is_held() {
        assert_eq!(begun("abc<to", "<tool>"), 3);
        assert_eq!(begun("<tool>", "<tool>"), 0);
        assert_eq!(begun("aab", "aabb"), 3);
        let mut search = TagSearch::new("aab");
        let mut out = String::new();
        let found: Vec<bool> = "aaaabx".chars().map(|character| search.step(character, &mut out)).collect();
        assert_eq!((found, out.as_str()), (vec![false, false, false, false, true, false], "aax"));
    }
}
