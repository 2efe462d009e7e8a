//! RAM, its limits, and how much of a model lies in it.

use std::fs;

use super::{Check, Verdict};
use crate::experts::ram::HostRam;
use crate::model::Model;
use crate::settings::EngineSettings;
use crate::units::Bytes;

/// Limits and RAM, against the model where one is named.
pub fn checks(model: Option<&Model>) -> Vec<Check> {
    let wanted = model.map(|model| Bytes(model.file.file_bytes()));
    let mut checks = vec![locked_memory(wanted), ram(wanted)];
    checks.extend(model.map(page_cache));
    checks
}

/// What the system lets a process lock; `None` in the second place means no limit, in the first that it does not say.
fn lock_limit() -> Option<Option<Bytes>> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(None),
        bytes => bytes.parse().ok().map(|bytes| Some(Bytes(bytes))),
    }
}

fn locked_memory(wanted: Option<Bytes>) -> Check {
    match lock_limit() {
        None => Check::new("memlock", Verdict::NotRun, "the system does not say how much a process may lock"),
        Some(None) => Check::new("memlock", Verdict::Fine, "a process may lock any amount of memory"),
        Some(Some(limit)) => {
            let found = format!("a process may lock {limit} (ulimit -l); drivers that lock memory by themselves are often not counted");
            let enough = wanted.is_some_and(|wanted| wanted <= limit);
            let verdict = if enough { Verdict::Fine } else { Verdict::Note };
            let check = Check::new("memlock", verdict, found);
            if enough {
                check
            } else {
                check.way_out("where pinning is refused: `ulimit -l unlimited`, or memlock in limits.conf or the container's settings")
            }
        }
    }
}

fn ram(wanted: Option<Bytes>) -> Check {
    let ram = HostRam::of_this_system();
    let parts = [
        ram.available.map(|bytes| format!("{bytes} available")),
        ram.group_limit.map(|bytes| format!("{bytes} allowed by the control group")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() {
        return Check::new("ram", Verdict::NotRun, "the system does not say how much RAM is available");
    }
    let room = [ram.available, ram.group_limit].into_iter().flatten().min();
    match wanted.zip(room) {
        Some((wanted, room)) if wanted > room => {
            let found = format!("{}; the model has {wanted}", parts.join(", "));
            Check::new("ram", Verdict::Note, found)
                .way_out("experts beyond it come from the disk: free RAM, or take a smaller quantisation")
        }
        Some((wanted, _)) => Check::new("ram", Verdict::Fine, format!("{}; the model has {wanted}", parts.join(", "))),
        None => Check::new("ram", Verdict::Fine, parts.join(", ")),
    }
}

fn page_cache(model: &Model) -> Check {
    let all = Bytes(model.file.file_bytes());
    let maps = (0..).map_while(|index| model.file.file_map(index));
    let Some(cached) = maps.map(|map| map.bytes_in_ram()).sum::<Option<u64>>().map(Bytes) else {
        return Check::new("page cache", Verdict::NotRun, "the system does not say how much of the model lies in RAM");
    };
    let found = format!("{cached} of the model's {all} lie in RAM");
    match cached.0 >= all.0 / 10 * 9 {
        true => Check::new("page cache", Verdict::Fine, found),
        false => Check::new("page cache", Verdict::Note, format!("{found}: the first start reads the rest from the disk")),
    }
}

/// Whether the model may be pinned, or need not be.
pub fn pinning_budget(settings: &EngineSettings, model: &Model, reads_pageable: bool) -> Check {
    let budget = HostRam::of_this_system().pin_budget(settings.pin);
    let wanted = Bytes(model.file.file_bytes());
    if budget.allows(Bytes::ZERO, wanted) {
        return Check::new("pin budget", Verdict::Fine, format!("all {wanted} of the model may be pinned"));
    }
    let found = format!("the model has {wanted}; {budget}");
    if reads_pageable {
        return Check::new("pin budget", Verdict::Note, found)
            .way_out("the rest is read without a lock, which is slower: free RAM, or raise --pin-mib");
    }
    Check::new("pin budget", Verdict::Problem, found).way_out("this device reads page-locked memory only: free RAM, or raise --pin-mib")
}
