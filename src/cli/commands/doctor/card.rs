//! Driver, cards, kernels, and who holds a card's memory.

use super::super::devices::{driver_in_words, held_in_all, users_in_words};
use super::{Check, Verdict};
use crate::backend::Capabilities;
use crate::backend::survey::{CardFacts, Cards};
use crate::phase::plan::DeviceBudget;

/// A card of which others hold more than one part in so many has something else running on it.
const HELD_SHARE: u64 = 16;

/// The driver and its cards. `wanted` is false where the host is to be used, which no driver can stop.
pub fn checks(cards: &Cards, wanted: bool) -> Vec<Check> {
    let stops = if wanted { Verdict::Problem } else { Verdict::Note };
    match cards {
        Cards::NotInThisBuild { reason } => vec![Check::new("driver", Verdict::NotRun, reason.clone())],
        Cards::Unavailable { interface, reason } => {
            let way_out = "in a container, pass the driver in (docker: --gpus all); without a card, --device host runs on the processor";
            vec![Check::new("driver", stops, format!("no {interface}: {reason}")).way_out(way_out)]
        }
        Cards::Listed { driver, cards } => {
            let mut checks = vec![Check::new("driver", Verdict::Fine, driver_in_words(driver))];
            if cards.is_empty() {
                checks.push(Check::new("card", stops, "the driver has no card").way_out("--device host runs on the processor"));
            }
            checks.extend(cards.iter().map(|card| of_card(card, stops)));
            checks
        }
    }
}

/// Whether the kernels run on a card. One that nobody uses by default stops nothing.
fn of_card(card: &CardFacts, stops: Verdict) -> Check {
    let name = format!("{}: {}, compute capability {}", card.number, card.name, card.compute_capability);
    match &card.kernels_refused {
        None => Check::new("kernels", Verdict::Fine, format!("{name}: loaded")),
        Some(reason) => {
            let verdict = if card.is_default { stops } else { Verdict::Note };
            Check::new("kernels", verdict, format!("{name}: {reason}")).way_out("or name another card with --device, or --device host")
        }
    }
}

/// What is free on the opened card, and who holds the rest.
pub fn free_memory(cards: &Cards, opened: &Capabilities, budget: &DeviceBudget, notice: Option<String>) -> Check {
    if let Some(notice) = notice {
        return Check::new("vram", Verdict::Note, notice).way_out("--vram-mib says how much may be used");
    }
    let free = budget.total.saturating_sub(budget.used_by_others);
    let users = match cards {
        Cards::Listed { driver, cards } => {
            let card = cards.iter().find(|card| card.name == opened.device && card.total_bytes == budget.total);
            match (card.and_then(|card| card.users.as_ref()), &driver.users_unknown) {
                (Some(users), _) if !users.is_empty() || held_in_all(users).0 > 0 => format!("; held {}", users_in_words(users)),
                (Some(_), _) => String::new(),
                (None, Some(reason)) => format!("; who holds the rest nobody says: {reason}"),
                (None, None) => "; who holds the rest nobody says".to_owned(),
            }
        }
        _ => String::new(),
    };
    let os_budget = budget.os_budget.map(|budget| format!(", {budget} by the system's word")).unwrap_or_default();
    let found = format!("{free} of {} for us{os_budget}{users}", budget.total);
    if budget.used_by_others.0 > budget.total.0 / HELD_SHARE {
        return Check::new("vram", Verdict::Note, found)
            .way_out("other programs on the card cost expert slots: end them, or use another card");
    }
    Check::new("vram", Verdict::Fine, found)
}
