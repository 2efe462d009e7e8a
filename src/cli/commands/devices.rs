//! `ebbtide devices`: the processor and every card that this build could use.

use std::fmt::Write as _;

use crate::backend::survey::{CardFacts, CardUser, Cards, DriverFacts, ProcessorFacts, Survey, Surveyor};
use crate::cli::config::Config;
use crate::cli::exit::CommandError;
use crate::cli::{say, write_stdout};
use crate::units::Bytes;

/// Runs the command.
///
/// # Errors
/// Where stdout takes nothing. A driver or a card that does not work is a line of the list.
pub fn devices(config: &Config, survey: Surveyor) -> Result<(), CommandError> {
    let survey = survey();
    if config.json {
        return write_stdout(&format!("{}\n", serde_json::to_string_pretty(&survey).expect("numbers and text are JSON")));
    }
    write_stdout(&in_words(&survey))
}

fn in_words(survey: &Survey) -> String {
    let mut text = format!("host: {}\n", processor(&survey.host));
    match &survey.cards {
        Cards::NotInThisBuild { reason } => _ = writeln!(text, "cards: {}", say::harmless(reason)),
        Cards::Unavailable { interface, reason } => _ = writeln!(text, "cards: no {interface}: {}", say::harmless(reason)),
        Cards::Listed { driver, cards } => {
            let _ = writeln!(text, "driver: {}", driver_in_words(driver));
            if cards.is_empty() {
                text.push_str("cards: none\n");
            }
            cards.iter().for_each(|card| add_card(&mut text, driver, card));
        }
    }
    text
}

/// The processor in one line.
pub fn processor(facts: &ProcessorFacts) -> String {
    let of = |wanted| facts.features.iter().filter(move |(_, has)| *has == wanted).map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let (has, lacks) = (of(true), of(false));
    let lacks = if lacks.is_empty() { String::new() } else { format!("; without {lacks}") };
    let has = if has.is_empty() { "no vector instructions that kernels know".to_owned() } else { has };
    format!("{} threads, {} kernels: {has}{lacks}", facts.threads, facts.kernels)
}

/// The driver in one line.
pub fn driver_in_words(driver: &DriverFacts) -> String {
    let release = driver.release.as_deref().map_or_else(|| "of unknown release".to_owned(), |release| format!("driver {release}"));
    say::harmless(&format!("{} {}, {release}", driver.interface, driver.interface_version))
}

/// Who holds a card's memory, in one line.
pub fn users_in_words(users: &[CardUser]) -> String {
    let user = |user: &CardUser| {
        let held = user.bytes.map_or_else(|| "an unknown amount".to_owned(), |bytes| bytes.to_string());
        format!("{held} by process {}{}", user.pid, user.name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default())
    };
    let users: Vec<String> = users.iter().map(user).collect();
    say::harmless(&if users.is_empty() { "by no program".to_owned() } else { users.join(", ") })
}

fn add_card(text: &mut String, driver: &DriverFacts, card: &CardFacts) {
    let CardFacts { number, name, uuid, compute_capability, .. } = card;
    let default = if card.is_default { ", the default" } else { "" };
    let kind = if card.integrated { "shares the host's memory" } else { "memory of its own" };
    let _ = writeln!(text, "{number}: {} ({uuid}), compute capability {compute_capability}, {kind}{default}", say::harmless(name));
    let free = card.free_bytes.map_or_else(|| "an unknown amount".to_owned(), |free| free.to_string());
    let held = match (&card.users, &driver.users_unknown) {
        (Some(users), _) => format!("held {}", users_in_words(users)),
        (None, Some(reason)) => format!("by whom it is held nobody says: {reason}"),
        (None, None) => "by whom it is held nobody says".to_owned(),
    };
    let _ = writeln!(text, "   memory: {free} free of {}; {held}", card.total_bytes);
    let kernels = card.kernels_refused.as_ref().map_or_else(|| "run on it".to_owned(), |reason| say::harmless(reason));
    let _ = writeln!(text, "   kernels: {kernels}");
    let abilities = [
        (card.virtual_memory, "address ranges backed apart from being reserved"),
        (card.registers_host_memory, "host memory locked in place"),
        (card.registers_file_maps, "mapped files locked in place"),
        (card.reads_pageable_memory, "host memory read without a lock"),
    ];
    let of = |wanted| abilities.iter().filter(move |(has, _)| *has == wanted).map(|(_, what)| *what).collect::<Vec<_>>().join(", ");
    let (can, cannot) = (of(true), of(false));
    let _ = writeln!(
        text,
        "   can: {}; cannot: {}",
        if can.is_empty() { "none of these" } else { &can },
        if cannot.is_empty() { "nothing of these" } else { &cannot }
    );
    if let Some(link) = card.link {
        let _ =
            writeln!(text, "   link: PCIe {} x{} now, at most {} x{}", link.generation, link.lanes, link.generation_max, link.lanes_max);
    }
}

/// What programs hold of a card together, as far as it is known.
pub fn held_in_all(users: &[CardUser]) -> Bytes {
    users.iter().filter_map(|user| user.bytes).sum()
}
