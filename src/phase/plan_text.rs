//! The plan for people: a few lines with both phases.

use std::fmt;

use super::plan::{LongerContext, PhaseBytes, Plan, PromptMemory, slot_terms};
use crate::settings::{CacheSizing, HeadAliasMode};

fn write_phase(f: &mut fmt::Formatter<'_>, name: &str, phase: &PhaseBytes) -> fmt::Result {
    let parts: Vec<String> = phase.owners.iter().map(|part| format!("{} {}", part.owner, part.bytes)).collect();
    writeln!(f, "  {name:<8}{} = {}", phase.total_bytes, parts.join(" + "))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "memory plan: {} of {} ({}) after a reserve of {}; context {} tokens, KV {:?}",
            self.budget_bytes, self.limit_bytes, self.limit_decided_by, self.reserve_bytes, self.ctx_tokens, self.kv_format
        )?;
        if let Some(LongerContext { ctx_tokens, slots, slots_q8_0 }) = self.longer_context {
            let left = |slots: Option<u32>| slots.map_or_else(|| "does not fit".to_owned(), |slots| format!("would leave {slots} slots"));
            write!(f, "  context {ctx_tokens} tokens {}", left(slots))?;
            writeln!(f, "{}", slots_q8_0.map_or_else(String::new, |slots| format!(", with --kv q8_0 {slots}")))?;
        }
        write_phase(f, "decode", &self.decode)?;
        write_phase(f, "prefill", &self.prefill)?;
        let classes = self.slot_table.classes(self.slots).filter(|&(_, count)| count > 0);
        let classes: Vec<String> = classes.map(|(bytes, count)| format!("{count} of {bytes}")).collect();
        let count = if classes.len() > 1 { format!("{}: ", self.slots) } else { String::new() };
        writeln!(f, "  slots   {count}{}, decided by {}", classes.join(" and "), self.slots_decided_by)?;
        writeln!(f, "  sum     {}", slot_terms(self))?;
        if self.slab.sizing == CacheSizing::Seed {
            let free = self.decode_free_bytes();
            writeln!(f, "  seed    the reserve of {} is not kept while tokens are written: {free} are free then", self.reserve_bytes)?;
        }
        let sizes = |block: u32, chunk: u32| format!("blocks of {block} (as one chunk: {chunk})");
        let kept_sizes = sizes(self.kept_head_block, self.kept_head_chunk);
        let (rows, end) = (self.window_rows, if self.window_rows > 1 { "s" } else { "" });
        writeln!(f, "  windows up to {rows} token{end}, in {} of decode buffers and {} of graphs", self.window_bytes, self.graph_bytes)?;
        let kept = match self.prompt_memory {
            PromptMemory::Loan { slots_max } => format!("{kept_sizes} in at most {slots_max} lent slots"),
            PromptMemory::Owned { bytes } => format!("{kept_sizes} in {bytes} of their own"),
            PromptMemory::None => "none".to_owned(),
        };
        write!(f, "  prompts head kept: {kept}; {}", self.prompt_decided_by)?;
        if self.alias_block > 0 {
            let how = if self.slab.mode == HeadAliasMode::Realloc { ", the head being freed for it" } else { "" };
            write!(f, "\n          head lent: {}{how}", sizes(self.alias_block, self.alias_chunk))?;
        }
        if self.wide_rows > 0 {
            write!(f, "\n          nothing lent: up to {} tokens in a wide window", self.wide_rows)?;
        }
        Ok(())
    }
}
