//! How much RAM may be pinned: what was asked for, unless the machine or the group of processes has less to give.
//!
//! Pinned pages cannot be taken back by the system, so pinning all that is there ends in a killed process. Linux tells what is available
//! in `/proc/meminfo`, and what a control group allows in `memory.max` (version 2) or `memory.limit_in_bytes` (version 1); other systems
//! tell nothing here, and then only the system's own refusal bounds the pinning.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::units::Bytes;

/// Largest part of the available RAM that is left alone, and its share.
const HEADROOM_MAX: Bytes = Bytes::mib(2048);
const HEADROOM_SHARE: u64 = 8;
/// Older control groups write no limit as the largest number there is, in whole pages.
const NO_LIMIT: u64 = 1 << 62;

/// What the system says of its RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostRam {
    /// Bytes that programs can have without swapping.
    pub available: Option<Bytes>,
    /// Most bytes that the control groups of this process allow, the smallest of them.
    pub group_limit: Option<Bytes>,
}

/// How much may be pinned, and why not more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinBudget {
    /// Bytes at most; `None` where nothing bounds them.
    pub most: Option<Bytes>,
    /// What was asked for.
    pub asked: Option<Bytes>,
    ram: HostRam,
}

impl HostRam {
    /// Asks the running system.
    #[must_use]
    pub fn of_this_system() -> Self {
        Self::read(Path::new("/"))
    }

    /// Asks the system whose `proc` and `sys` lie in `root`. What cannot be read is unknown.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok();
        let available = text("proc/meminfo").and_then(|meminfo| available_of(&meminfo));
        let groups = text("proc/self/cgroup").unwrap_or_default();
        let group_limit = groups.lines().filter_map(|line| limit_of_group(root, line)).min();
        Self { available, group_limit }
    }

    /// Bytes that may be pinned where `asked` were asked for: no more than is available or the group allows, less a headroom.
    #[must_use]
    pub fn pin_budget(self, asked: Option<Bytes>) -> PinBudget {
        let most = [asked, self.available.map(without_headroom), self.group_limit.map(without_headroom)].into_iter().flatten().min();
        PinBudget { most, asked, ram: self }
    }
}

impl PinBudget {
    /// A budget of `bytes` that no system bounds.
    #[must_use]
    pub const fn of(bytes: Option<Bytes>) -> Self {
        Self { most: bytes, asked: bytes, ram: HostRam { available: None, group_limit: None } }
    }

    /// Whether less may be pinned than was asked for.
    #[must_use]
    pub fn is_clamped(&self) -> bool {
        self.asked.is_some() && self.most != self.asked
    }

    /// Whether `bytes` more may be pinned beside `pinned`.
    #[must_use]
    pub fn allows(&self, pinned: Bytes, bytes: Bytes) -> bool {
        self.most.is_none_or(|most| pinned + bytes <= most)
    }
}

impl fmt::Display for PinBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(most) = self.most else { return f.write_str("nothing bounds pinning") };
        let of_system = |bytes: Bytes, what: &str| format!("{bytes} {what} less {}", bytes - without_headroom(bytes));
        let terms = [
            self.asked.map(|asked| format!("--pin-mib allows {asked}")),
            self.ram.available.map(|bytes| of_system(bytes, "of RAM available")),
            self.ram.group_limit.map(|bytes| of_system(bytes, "allowed by the control group")),
        ];
        let terms: Vec<String> = terms.into_iter().flatten().collect();
        write!(f, "at most {most} may be pinned, the smallest of: {}", terms.join(", "))
    }
}

fn without_headroom(bytes: Bytes) -> Bytes {
    bytes.saturating_sub(HEADROOM_MAX.min(Bytes(bytes.0 / HEADROOM_SHARE)))
}

/// `MemAvailable` of `/proc/meminfo`, which counts in units of 1,024 bytes.
fn available_of(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.saturating_mul(1024)))
}

/// The limit that one line of `/proc/self/cgroup` leads to, `number:controllers:path`: the smallest on the way from the group to the root.
/// In a container the path may be that of the host, and then the root of what is mounted holds the limit.
fn limit_of_group(root: &Path, line: &str) -> Option<Bytes> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (mounted, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        named if named.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        _ => return None,
    };
    let top = root.join(mounted);
    let mut group: PathBuf = top.join(path.trim_start_matches('/'));
    let mut least = None;
    while group.starts_with(&top) {
        let limit = fs::read_to_string(group.join(file)).ok().and_then(|text| text.trim().parse().ok());
        let limit = limit.filter(|&bytes| bytes < NO_LIMIT).map(Bytes);
        least = [least, limit].into_iter().flatten().min();
        if !group.pop() {
            break;
        }
    }
    least
}

#[cfg(test)]
mod tests {
    //! Goal: no more is pinned than the smallest of all bounds, and the bound is told. Method: folders that look like `/proc` and
    //! `/sys/fs/cgroup` of several systems.
    use super::*;

    struct System(PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("ebbtide-ram-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("the temporary folder can be written");
                fs::write(path, text).expect("the temporary folder can be written");
            }
            Self(root)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:       16384000 kB\nMemFree: 5 kB\nMemAvailable:    8388608 kB\n");

    #[test]
    fn the_smallest_limit_between_group_and_root_counts() {
        let system = System::new(
            "v2",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/user.slice/app.scope\n"),
                ("sys/fs/cgroup/user.slice/app.scope/memory.max", "max\n"),
                ("sys/fs/cgroup/user.slice/memory.max", "4294967296\n"),
            ],
        );
        assert_eq!(HostRam::read(&system.0), HostRam { available: Some(Bytes::mib(8192)), group_limit: Some(Bytes::mib(4096)) });
    }

    #[test]
    fn the_older_groups_are_read_where_they_are_mounted() {
        let system = System::new(
            "v1",
            &[
                ("proc/self/cgroup", "3:cpu,cpuacct:/docker/ab\n2:memory:/docker/ab\n"),
                // In a container the group is mounted as the root.
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
                ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
        assert_eq!(HostRam::read(&system.0), HostRam { available: None, group_limit: Some(Bytes::mib(1024)) });
    }

    #[test]
    fn a_system_that_tells_nothing_bounds_nothing() {
        let system = System::new("none", &[("proc/meminfo", "MemAvailable: many\n"), ("proc/self/cgroup", "nonsense\n0::\n::\n")]);
        let ram = HostRam::read(&system.0);
        assert_eq!(ram, HostRam::default());
        assert_eq!(ram.pin_budget(None).most, None);
        assert_eq!(ram.pin_budget(Some(Bytes(7))).most, Some(Bytes(7)));
    }

    #[test]
    fn what_was_asked_for_is_clamped_to_the_smallest_bound_and_that_is_told() {
        let ram = HostRam { available: Some(Bytes::mib(65_536)), group_limit: Some(Bytes::mib(8192)) };
        let budget = ram.pin_budget(Some(Bytes::mib(999 * 1024)));
        assert_eq!((budget.most, budget.is_clamped()), (Some(Bytes::mib(8192 - 1024)), true));
        let text = budget.to_string();
        for part in [
            "at most 7168.0 MiB",
            "--pin-mib allows 1022976.0 MiB",
            "65536.0 MiB of RAM available less 2048.0 MiB",
            "8192.0 MiB allowed by",
        ] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        let small = ram.pin_budget(Some(Bytes::mib(100)));
        assert_eq!((small.most, small.is_clamped()), (Some(Bytes::mib(100)), false));
        let scarce = HostRam { available: Some(Bytes::mib(800)), group_limit: None };
        assert_eq!(scarce.pin_budget(None).most, Some(Bytes::mib(700)));
    }
}
