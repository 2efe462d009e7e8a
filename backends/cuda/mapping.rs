//! How host memory is mapped, which decides whether the driver may lock it in place.
//!
//! Locking a private read-only map as read-only never returns from the driver's kernel module (seen twice with driver 580), so the
//! question is asked before each registration. Linux answers it in `/proc/self/maps`.

/// What the system says about the mapping of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// All of it is shared with a file or another process: it can be locked in place.
    Shared,
    /// Part of it is private to this process, such as the program's own data and heap memory.
    Private,
    /// The system does not say.
    Unknown,
}

/// Asks the system about `bytes` bytes at `start`.
#[must_use]
pub fn mapping_of(start: usize, bytes: usize) -> Mapping {
    std::fs::read_to_string("/proc/self/maps").map_or(Mapping::Unknown, |maps| mapping_in(&maps, start, start.saturating_add(bytes)))
}

/// The answer in a listing whose lines are `from-to rights …`, with `s` or `p` as the last letter of the rights.
fn mapping_in(maps: &str, start: usize, end: usize) -> Mapping {
    let mut covered = start;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some((from, to)), Some(rights)) = (words.next().and_then(|range| range.split_once('-')), words.next()) else { continue };
        let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16)) else { continue };
        if to <= covered || from >= end {
            continue;
        }
        if !rights.ends_with('s') {
            return Mapping::Private;
        }
        if from > covered {
            return Mapping::Unknown;
        }
        covered = to;
    }
    if covered >= end { Mapping::Shared } else { Mapping::Unknown }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        1000-3000 r--s 00000000 08:01 42 /models/first.gguf\n\
        3000-4000 r--s 00000000 08:01 43 /models/second.gguf\n\
        4000-6000 r-xp 00000000 08:01 44 /usr/bin/ebbtide\n\
        8000-9000 rw-p 00000000 00:00 0 [heap]\n\
        a000-b000 r--s 00000000 08:01 42 /models/first.gguf\n";

    #[test]
    fn a_range_is_shared_only_where_all_of_it_is() {
        for (range, expected) in [
            ((0x1000, 0x3000), Mapping::Shared),
            ((0x1800, 0x3800), Mapping::Shared),
            ((0x2000, 0x4001), Mapping::Private),
            ((0x5000, 0x5800), Mapping::Private),
            ((0x8000, 0xa800), Mapping::Private),
            ((0x7000, 0x7800), Mapping::Unknown),
            ((0x9800, 0xa800), Mapping::Unknown),
            ((0xa800, 0xb001), Mapping::Unknown),
        ] {
            assert_eq!(mapping_in(MAPS, range.0, range.1), expected, "{range:x?}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_program_s_own_memory_is_private() {
        let heap = vec![0_u8; 10_000];
        assert_eq!(mapping_of(heap.as_ptr().addr(), heap.len()), Mapping::Private);
        let constant: &'static str = MAPS;
        assert_eq!(mapping_of(constant.as_ptr().addr(), constant.len()), Mapping::Private);
    }
}
