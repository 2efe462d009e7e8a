//! The plan for people: a few lines with both phases.

use std::fmt;

use super::plan::{PhaseBytes, Plan, PromptMemory};

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
        write_phase(f, "decode", &self.decode)?;
        write_phase(f, "prefill", &self.prefill)?;
        writeln!(f, "  slots   {} of {}, decided by {}", self.slots, self.slot_bytes, self.slots_decided_by)?;
        let kept = match self.prompt_memory {
            PromptMemory::Loan { slots_max } => format!("{} tokens in at most {slots_max} lent slots", self.kept_head_chunk),
            PromptMemory::Owned { bytes } => format!("{} tokens in {bytes} of their own", self.kept_head_chunk),
            PromptMemory::None => "none".to_owned(),
        };
        write!(f, "  chunk   head kept: {kept} ({})", self.prompt_decided_by)?;
        if self.alias_chunk > 0 {
            write!(f, "; head lent: {} tokens", self.alias_chunk)?;
        }
        Ok(())
    }
}
