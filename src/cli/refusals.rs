//! Settings that do not go together: one list, from which both the messages and the table in `docs/prefill-head-alias.md` are made.

/// Two settings, or a setting and a command, that exclude each other.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    /// What is refused, for the table.
    pub what: &'static str,
    /// Why.
    pub reason: &'static str,
    /// What to do instead.
    pub way_out: &'static str,
}

impl Refusal {
    /// The message for `said`, the settings as they were written.
    #[must_use]
    pub fn message(&self, said: &str) -> String {
        format!("{said}: {}. {}", self.reason, self.way_out)
    }
}

/// The alias where the head is needed throughout.
pub const ALIAS_WITH_ALL_LOGITS: Refusal = Refusal {
    what: "`--prefill-head-alias` with `logits` or `perplexity`",
    reason: "every row needs the output head, so its VRAM cannot be lent",
    way_out: "Leave the flag out, or write --prefill-head-alias=false",
};
/// A way of lending without a loan.
pub const MODE_WITHOUT_ALIAS: Refusal = Refusal {
    what: "`--head-alias-mode realloc` without `--prefill-head-alias`",
    reason: "it says how the head is lent, and the head is not lent",
    way_out: "Add --prefill-head-alias, or leave it at overlay",
};
/// The document's sizing without the document's loan.
pub const SIZING_WITHOUT_ALIAS: Refusal = Refusal {
    what: "`--cache-sizing seed` without `--prefill-head-alias`",
    reason: "it sizes the cache for a head that is lent, and the head is not lent",
    way_out: "Add --prefill-head-alias, or leave it at exact",
};
/// A block that its own chunk does not fit.
pub const BLOCK_BELOW_CHUNK: Refusal = Refusal {
    what: "`--prefill-block` below `--prefill`",
    reason: "a block holds whole chunks",
    way_out: "Raise --prefill-block or lower --prefill until they are equal",
};
/// A reserve that leaves nothing.
pub const RESERVE_IS_ALL: Refusal = Refusal {
    what: "`--vram-reserve-mib` of `--vram-mib` or more",
    reason: "the reserve leaves nothing of the limit",
    way_out: "Lower --vram-reserve-mib or raise --vram-mib",
};

/// Those that touch the alias and the memory it shares, in the order of the table.
pub const REFUSALS: [Refusal; 5] = [ALIAS_WITH_ALL_LOGITS, MODE_WITHOUT_ALIAS, SIZING_WITHOUT_ALIAS, BLOCK_BELOW_CHUNK, RESERVE_IS_ALL];

/// The table for the documentation.
#[must_use]
pub fn table() -> String {
    let rows = REFUSALS.iter().map(|refusal| format!("| {} | {} | {} |\n", refusal.what, refusal.reason, refusal.way_out));
    format!("| refused | why | what to do |\n|---|---|---|\n{}", rows.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_the_table_of_this_list() {
        let document = include_str!("../../docs/prefill-head-alias.md");
        let (begin, end) = ("<!-- refusals: a test holds this table to src/cli/refusals.rs -->\n", "<!-- end -->");
        let (_, rest) = document.split_once(begin).expect("the table's beginning is marked");
        let (written, _) = rest.split_once(end).expect("so is its end");
        assert_eq!(written, table(), "docs/prefill-head-alias.md is to have:\n{}", table());
    }
}
