//! The binary as a child process, with a deadline.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::engine::TempFile;

/// The bundled model.
pub const BARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
/// Tokens that the bundled model was not trained on.
pub const HELD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/held.u16");
/// The binary under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_ebbtide");

/// No call of a test may take longer, on however busy a machine.
const DEADLINE: Duration = Duration::from_secs(300);

/// A call in the making.
pub struct Call(Command);

/// What a call came to.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub took: Duration,
}

/// A call with arguments written in one line, split at blanks.
pub fn ebbtide(line: &str) -> Call {
    Call::of(BINARY).args(line.split_whitespace())
}

impl Call {
    /// A call of `program` that sees nothing of the tester's environment: no variables of ours, no home with a configuration.
    pub fn of(program: &str) -> Self {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/bin:/bin");
        Self(command)
    }

    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.0.arg(argument);
        self
    }

    pub fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.0.args(arguments);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.0.env(name, value);
        self
    }

    /// The child with both outputs piped.
    pub fn spawn(mut self) -> Child {
        self.0.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    /// Runs to the end, which must be an exit of its own without a panic.
    pub fn end(self) -> Ended {
        let called = format!("{:?}", self.0);
        let ended = wait(self.spawn());
        assert!(!ended.stderr.contains("panicked"), "{called}: {}", ended.stderr);
        assert!(ended.code >= 0, "{called} died by a signal: {}", ended.stderr);
        ended
    }

    /// Runs to exit code `code`.
    pub fn ends_with(self, code: i32) -> Ended {
        let called = format!("{:?}", self.0);
        let ended = self.end();
        assert_eq!(ended.code, code, "{called}\nstderr: {}\nstdout: {}", ended.stderr, ended.text());
        ended
    }

    /// Runs well and prints exactly one JSON object.
    pub fn json(self) -> Value {
        let ended = self.arg("--json").ends_with(0);
        let value: Value = serde_json::from_slice(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {}", ended.text()));
        assert!(value.is_object() && ended.text().ends_with('\n'), "{}", ended.text());
        value
    }

    /// Is refused with `code`, nothing on stdout, and all of `parts` on stderr.
    pub fn refused(self, code: i32, parts: &[&str]) -> Ended {
        let ended = self.fails(code, parts);
        assert!(ended.stdout.is_empty(), "a result in spite of refusal: {}", ended.text());
        ended
    }

    /// Ends with `code` and all of `parts` on stderr; what was written before stays on stdout.
    pub fn fails(self, code: i32, parts: &[&str]) -> Ended {
        let ended = self.ends_with(code);
        for part in parts {
            assert!(ended.stderr.contains(part), "{part:?} is not in: {}", ended.stderr);
        }
        ended
    }
}

impl Ended {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Waits for the end, reading both outputs beside; code -1 stands for a signal.
pub fn wait(mut child: Child) -> Ended {
    let started = Instant::now();
    let collect = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut stream) = stream {
                stream.read_to_end(&mut bytes).expect("a pipe can be read");
            }
            bytes
        })
    };
    let stdout = collect(child.stdout.take().map(|stream| Box::new(stream) as _));
    let stderr = collect(child.stderr.take().map(|stream| Box::new(stream) as _));
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            break status;
        }
        if started.elapsed() > DEADLINE {
            child.kill().expect("a child of ours");
            panic!("no end after {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let took = started.elapsed();
    let stderr = String::from_utf8_lossy(&stderr.join().expect("no panic")).into_owned();
    Ended { code: status.code().unwrap_or(-1), stdout: stdout.join().expect("no panic"), stderr, took }
}

/// A file with these bytes.
pub fn file_of(suffix: &str, bytes: &[u8]) -> TempFile {
    let file = TempFile::new(suffix);
    std::fs::write(&file.0, bytes).expect("the temporary folder can be written");
    file
}

/// Token numbers as `--tokens` takes them.
pub fn list(tokens: &[u32]) -> String {
    tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// `@` and the file's path.
pub fn at(file: &TempFile) -> OsString {
    let mut argument = OsString::from("@");
    argument.push(&file.0);
    argument
}

/// The array of token numbers at `key`.
pub fn token_numbers(report: &Value, key: &str) -> Vec<u32> {
    let numbers = report[key].as_array().unwrap_or_else(|| panic!("no array {key} in {report}"));
    numbers.iter().map(|number| u32::try_from(number.as_u64().expect("a number")).expect("32 bits")).collect()
}
