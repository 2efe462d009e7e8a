//! Goal: the program on a card, seen from outside: what `devices` and `doctor` find, and exit codes. Method: the built binary runs as a
//! child on the look-alike driver of `tests/fake-gpu/`, whose faults are set by variables.

mod common;
#[path = "common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;
#[path = "cli/program.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod program;

use fake_gpu::surroundings;
use program::{BARD, Call, ebbtide};
use serde_json::Value;

/// A call on the look-alike, whose faults `settings` are.
fn on_card(line: &str, settings: &[(&str, &str)]) -> Call {
    let call = surroundings().into_iter().fold(ebbtide(line), |call, (name, value)| call.env(name, value));
    settings.iter().fold(call, |call, (name, value)| call.env(name, value))
}

/// The one check of a name, and its verdict.
fn check<'a>(report: &'a Value, name: &str) -> (&'a str, String) {
    let checks = report["checks"].as_array().expect("a list");
    let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {report:#}"));
    (check["verdict"].as_str().expect("a word"), format!("{} {}", check["found"], check["way_out"]))
}

/// The report of a doctor who ends with `code`.
fn doctor(line: &str, settings: &[(&str, &str)], code: i32) -> Value {
    let ended = on_card(&format!("doctor {line} --json"), settings).ends_with(code);
    serde_json::from_slice(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.text()))
}

#[test]
fn devices_lists_every_card_with_what_matters_of_it() {
    let settings = [("FAKE_GPU_DEVICES", "2"), ("FAKE_GPU_INTEGRATED", "1"), ("FAKE_GPU_HELD_MIB", "56"), ("FAKE_GPU_PAGEABLE", "1")];
    let list = on_card("devices", &settings).json();
    let listed = &list["cards"]["listed"];
    assert_eq!((&listed["driver"]["interface_version"], &listed["driver"]["release"]), (&"12.4".into(), &"999.42".into()));
    let cards = listed["cards"].as_array().expect("a list");
    assert_eq!(cards.len(), 2);
    let second = &cards[1];
    for (field, value) in [
        ("number", Value::from(1)),
        ("name", "Look-alike 1".into()),
        ("uuid", "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae01".into()),
        ("compute_capability", "8.6".into()),
        ("integrated", false.into()),
        ("is_default", true.into()),
        ("total_bytes", (256 << 20).into()),
        ("free_bytes", (200 << 20).into()),
        ("kernels_refused", Value::Null),
        ("registers_file_maps", true.into()),
        ("reads_pageable_memory", true.into()),
    ] {
        assert_eq!(second[field], value, "{field} in {second:#}");
    }
    assert_eq!(second["users"][0]["name"], "hog");
    assert_eq!(second["link"]["lanes_max"], 16);
    assert_eq!((&cards[0]["integrated"], &cards[0]["is_default"]), (&true.into(), &false.into()));

    let text = on_card("devices", &settings).ends_with(0).text();
    for part in [
        "host: ",
        "driver: CUDA 12.4, driver 999.42",
        "1: Look-alike 1 (GPU-",
        "200.0 MiB free of 256.0 MiB",
        "56.0 MiB by process 4711 (hog)",
        "PCIe 1 x8 now, at most 4 x16",
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

#[test]
fn devices_goes_on_where_something_is_missing() {
    let without_nvml = on_card("devices", &[("FAKE_GPU_NVML", "0")]).json();
    let listed = &without_nvml["cards"]["listed"];
    assert!(listed["driver"]["users_unknown"].as_str().expect("told").contains("nvmlInit_v2"), "{listed:#}");
    assert_eq!((&listed["cards"][0]["free_bytes"], &listed["cards"][0]["users"]), (&(256 << 20).into(), &Value::Null));
    let old = on_card("devices", &[("FAKE_GPU_VERSION", "11080")]).ends_with(0).text();
    assert!(old.contains("cards: no CUDA: the driver speaks CUDA 11.8, at least 12.0 is needed"), "{old}");
    let none = on_card("devices", &[("FAKE_GPU_DEVICES", "0")]).ends_with(0).text();
    assert!(none.contains("CUDA_ERROR_NO_DEVICE"), "{none}");
}

#[test]
fn a_doctor_with_nothing_to_find_measures_the_link_and_plans() {
    let report = doctor(&format!("-m {BARD} --ctx 512"), &[], 0);
    for name in ["processor", "driver", "kernels", "device", "vram", "pinning", "link", "plan"] {
        let (verdict, found) = check(&report, name);
        assert!(verdict == "fine" || name == "link", "{name} is {verdict}: {found}");
    }
    for speed in ["to_device_bytes_per_s", "to_host_bytes_per_s", "pin_bytes_per_s"] {
        assert!(report["link"][speed].as_f64().expect("measured") > 0.0, "{speed}");
    }
    assert!(check(&report, "plan").1.contains(" slots"), "{report:#}");
    // What only the machine decides is looked at, too.
    for name in ["memlock", "ram", "page cache", "pin budget"] {
        assert_ne!(check(&report, name).0, "problem", "{name}");
    }
}

#[test]
fn what_stops_a_start_is_a_problem_with_a_way_out_and_exit_code_4() {
    for (settings, line, name, parts) in [
        (("FAKE_GPU_VERSION", "11080"), "", "driver", ["CUDA 11.8", "update NVIDIA's driver"]),
        (("FAKE_GPU_DEVICES", "0"), "", "driver", ["CUDA_ERROR_NO_DEVICE", "--device host"]),
        (("FAKE_GPU_NO_KERNELS", "1"), "", "kernels", ["compute capability 8.6", "EBBTIDE_CUDA_ARCHS=86"]),
        (("FAKE_GPU_NO_KERNELS", "1"), "", "device", ["compute capability 8.6", "--device"]),
        (("FAKE_GPU_DEVICES", "1"), "--device 3", "device", ["there is no device 3", "ebbtide devices"]),
        (("FAKE_GPU_DEVICES", "1"), "--pin-mib 1 -m BARD", "pin budget", ["--pin-mib allows 1.0 MiB", "raise --pin-mib"]),
        (("FAKE_GPU_TOTAL_MIB", "64"), "-m BARD --ctx 2048 --vram-mib 2", "plan", ["--vram-mib", "would"]),
    ] {
        let report = doctor(&line.replace("BARD", BARD), &[settings], 4);
        let (verdict, found) = check(&report, name);
        assert_eq!((verdict, &report["verdict"]), ("problem", &"problem".into()), "{settings:?}: {found}");
        for part in parts {
            assert!(found.contains(part), "{settings:?}: {part} is not in: {found}");
        }
    }
    let ended = on_card("doctor", &[("FAKE_GPU_VERSION", "11080")]).fails(4, &["error: what stops a start: driver"]);
    assert!(ended.text().contains("problem  driver"), "{}", ended.text());
    // On the processor no driver is needed.
    let report = doctor("--device host", &[("FAKE_GPU_VERSION", "11080")], 0);
    assert_eq!(check(&report, "driver").0, "note");
}

#[test]
fn a_card_that_another_program_uses_is_noted_with_its_name() {
    let report = doctor("", &[("FAKE_GPU_TOTAL_MIB", "1024"), ("FAKE_GPU_HELD_MIB", "900")], 0);
    let (verdict, found) = check(&report, "vram");
    assert_eq!(verdict, "note");
    assert!(found.contains("900.0 MiB by process 4711 (hog)"), "{found}");
}

#[test]
fn a_missing_driver_is_one_clear_sentence() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&folder).expect("a folder for the test");
    for library in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.join(library), []).expect("an empty file");
    }
    let call = |line: &str| ebbtide(line).env("LD_LIBRARY_PATH", &folder);
    let ended = call("doctor").fails(4, &["what stops a start: driver"]);
    assert!(ended.text().contains("libcuda.so") && ended.text().contains("--gpus all"), "{}", ended.text());
    assert!(call("devices").ends_with(0).text().contains("cards: no CUDA: neither libcuda.so"));
    call(&format!("run -m {BARD} -p x -n 1")).refused(4, &["libcuda.so"]);
}
