//! SIGINT and readers that leave: the program ends soon, with what it has.

use std::io::Read;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::engine::{TempFile, tokens};
use crate::program::{BARD, ebbtide, file_of, wait};

/// A context far above the bundled model's own, so that reading and writing would take minutes.
const LONG: &str = "--ctx 65536 --temp 0 --ignore-eos";
const END_WITHIN: Duration = Duration::from_secs(5);

fn interrupt(child: &Child) {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -INT {}", child.id())).status().expect("a shell");
    assert!(sent.success());
}

/// Waits for words on the child's stderr.
fn await_stderr(child: &mut Child, words: &str) -> String {
    let stream = child.stderr.as_mut().expect("piped");
    let mut seen = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&seen).contains(words) {
        assert_eq!(stream.read(&mut byte).expect("a pipe"), 1, "it ended: {}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

fn reading_a_long_prompt() -> Child {
    let prompt = file_of(
        ".u16",
        &tokens(1, 60_000, 4000).iter().flat_map(|&id| u16::try_from(id).expect("small").to_le_bytes()).collect::<Vec<_>>(),
    );
    let mut child = ebbtide(&format!("run -m {BARD} -v {LONG} --tokens {}", prompt.0.display())).spawn();
    await_stderr(&mut child, "memory plan");
    std::thread::sleep(Duration::from_millis(300));
    child
}

#[test]
fn a_signal_while_reading_ends_the_program_within_seconds() {
    let child = reading_a_long_prompt();
    let sent = Instant::now();
    interrupt(&child);
    let ended = wait(child);
    assert!(sent.elapsed() < END_WITHIN, "{:?}", sent.elapsed());
    assert_eq!((ended.code, ended.text().trim()), (130, ""), "{}", ended.stderr);
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn a_second_signal_ends_the_program_at_once() {
    let mut child = reading_a_long_prompt();
    interrupt(&child);
    let sent = Instant::now();
    // The system makes one of two signals that it delivers together, so the second is repeated.
    while child.try_wait().expect("a child of ours").is_none() {
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(50));
    }
    let ended = wait(child);
    assert!(sent.elapsed() < Duration::from_secs(3), "{:?}", sent.elapsed());
    assert_eq!(ended.code, 130, "{}", ended.stderr);
}

#[test]
fn a_signal_while_writing_keeps_the_text_so_far() {
    for json in [false, true] {
        let profile = TempFile::new(".heat");
        let mut child =
            ebbtide(&format!("run -m {BARD} {LONG} --json={json} --tokens 5,6,7,8")).arg("--expert-profile").arg(&profile.0).spawn();
        let mut start = vec![0; if json { 0 } else { 20 }];
        child.stdout.as_mut().expect("piped").read_exact(&mut start).expect("text comes while it is written");
        if json {
            await_stderr(&mut child, "reading: done");
            std::thread::sleep(Duration::from_millis(300));
        }
        let sent = Instant::now();
        interrupt(&child);
        let ended = wait(child);
        assert!(sent.elapsed() < END_WITHIN, "{:?}", sent.elapsed());
        assert_eq!(ended.code, 130, "{}", ended.stderr);
        assert!(ended.stderr.contains("interrupted"), "{}", ended.stderr);
        assert!(profile.0.exists(), "what was learned until then is kept");
        if json {
            let report: serde_json::Value = serde_json::from_slice(&ended.stdout).expect("one object");
            assert_eq!(report["finish"], "cancelled");
            assert!(!report["tokens"].as_array().expect("a list").is_empty(), "{report}");
        } else {
            assert!(ended.text().ends_with('\n'), "{}", ended.text());
        }
    }
}

#[test]
fn waiting_for_a_pipe_that_nobody_writes_to_is_interrupted_too() {
    // Nobody writes to this pipe, so reading the prompt never ends by itself.
    let folder = crate::common::engine::TempFile::new(".fifo");
    assert!(Command::new("mkfifo").arg(&folder.0).status().expect("mkfifo").success());
    let child = ebbtide(&format!("run -m {BARD} --prompt-file {}", folder.0.display())).spawn();
    std::thread::sleep(Duration::from_millis(500));
    let sent = Instant::now();
    interrupt(&child);
    let ended = wait(child);
    assert!(sent.elapsed() < END_WITHIN, "{:?}", sent.elapsed());
    assert_eq!(ended.code, 130, "{}", ended.stderr);
}

#[test]
fn a_reader_that_leaves_ends_the_writing() {
    let mut child = ebbtide(&format!("run -m {BARD} {LONG} -p hello")).spawn();
    let mut start = [0; 10];
    let mut stdout = child.stdout.take().expect("piped");
    stdout.read_exact(&mut start).expect("text comes while it is written");
    drop(stdout);
    let left = Instant::now();
    let ended = wait(child);
    assert!(left.elapsed() < END_WITHIN, "{:?}", left.elapsed());
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("cannot write to stdout") && !ended.stderr.contains("panicked"), "{}", ended.stderr);
}

#[test]
fn a_stderr_that_takes_nothing_changes_neither_text_nor_code() {
    let expected = ebbtide(&format!("run -m {BARD} -n 8 --temp 0 --tokens 5,6,7")).ends_with(0);
    for redirection in ["2>/dev/full", "2>&-"] {
        let command = format!("exec {} run -m {BARD} -v -n 8 --temp 0 --tokens 5,6,7 {redirection}", crate::program::BINARY);
        let ended = crate::program::Call::of("sh").arg("-c").arg(command).ends_with(0);
        assert_eq!(ended.stdout, expected.stdout, "{redirection}");
    }
    let command = format!("exec {} plan -m {BARD} >/dev/full", crate::program::BINARY);
    crate::program::Call::of("sh").arg("-c").arg(command).refused(1, &["cannot write to stdout"]);
}

#[test]
fn a_signal_while_measuring_keeps_the_figures_so_far() {
    let line = format!("bench -m {BARD} -v --json --ctx 1024 --prompts 300 --write 2 --repeat 100 --vram-mib 7");
    let mut child = ebbtide(&line).spawn();
    // Each arm's plan is told as its engine starts, so with the second the first arm has run.
    await_stderr(&mut child, "memory plan");
    await_stderr(&mut child, "memory plan");
    let sent = Instant::now();
    interrupt(&child);
    let ended = wait(child);
    assert!(sent.elapsed() < END_WITHIN, "{:?}", sent.elapsed());
    assert_eq!(ended.code, 130, "{}", ended.stderr);
    let report: Value = serde_json::from_slice(&ended.stdout).expect("one JSON object");
    assert_eq!(report["ended"], "interrupted");
    let runs: Vec<_> = report["rows"].as_array().expect("rows").iter().map(|row| row["runs"].as_u64()).collect();
    assert!(runs.first().is_some_and(|runs| *runs >= Some(1)) && runs.iter().all(|runs| *runs < Some(100)), "{runs:?}");
}
