//! The configuration file: TOML with one key for each flag, named as the flag.
//!
//! Owns finding and reading it. Every key must be known to some command, so that a slip is told with its line and the nearest
//! name; values stay text here, since [`super::args`] checks them like typed ones. The file has no sections.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use thiserror::Error;
use toml::de::{DeTable, DeValue};

use super::nearest::nearest;
use super::sources::Environment;

/// Most bytes of a configuration file; one with every flag has a few thousand.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a configuration file was refused.
#[derive(Debug, Error)]
pub enum FileError {
    /// The system did not give it.
    #[error("{}: cannot read the configuration: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is longer than any configuration.
    #[error("{}: longer than {FILE_BYTES_MAX} bytes, which is no configuration", .path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// It is not TOML.
    #[error("{}, line {line}: {message}", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// Keys that set nothing, and values of a kind no flag has; all of them.
    #[error("{}", .0.join("\n"))]
    Entries(Vec<String>),
}

/// Where to look.
#[derive(Debug, PartialEq, Eq)]
pub struct Location {
    /// The file.
    pub path: PathBuf,
    /// Somebody named it, so it must be there.
    pub named: bool,
}

/// One key of the file.
#[derive(Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// The name of a flag.
    pub name: String,
    /// As the flag would be given it.
    pub value: String,
    /// Counted from 1.
    pub line: usize,
}

/// What the file says.
#[derive(Debug, Default)]
pub struct FileSettings {
    /// The file, if one was read.
    pub path: Option<PathBuf>,
    entries: Vec<FileEntry>,
}

impl FileSettings {
    /// The entry of a flag.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&FileEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// The file that holds: `--config`, else `EBBTIDE_CONFIG`, else `ebbtide/config.toml` in the user's configuration folder.
#[must_use]
pub fn locate(typed: Option<&OsString>, environment: &Environment) -> Option<Location> {
    let variable =
        |name: &str| environment.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.as_os_str());
    if let Some(path) = typed.map(OsString::as_os_str).or_else(|| variable("EBBTIDE_CONFIG")) {
        return Some(Location { path: PathBuf::from(path), named: true });
    }
    let of_home = |home: &OsStr| Path::new(home).join(".config");
    let folder = variable("XDG_CONFIG_HOME").map(PathBuf::from).or_else(|| variable("HOME").map(of_home))?;
    Some(Location { path: folder.join("ebbtide").join("config.toml"), named: false })
}

/// Reads the file. One that nobody named may be missing.
///
/// # Errors
/// Where it cannot be read, is no TOML, or says what no flag takes; `known` are the names of all flags.
pub fn read(location: &Location, known: &[String]) -> Result<FileSettings, FileError> {
    let path = &location.path;
    let mut text = String::new();
    let taken = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    match taken {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !location.named => return Ok(FileSettings::default()),
        Err(source) => return Err(FileError::Read { path: path.clone(), source }),
        Ok(bytes) if bytes as u64 > FILE_BYTES_MAX => return Err(FileError::TooLong { path: path.clone() }),
        Ok(_) => {}
    }
    let entries = parse(&text, path, known)?;
    Ok(FileSettings { path: Some(path.clone()), entries })
}

fn parse(text: &str, path: &Path, known: &[String]) -> Result<Vec<FileEntry>, FileError> {
    let line_at = |offset: usize| text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| FileError::Syntax {
        path: path.to_owned(),
        line: error.span().map_or(1, |span| line_at(span.start)),
        message: error.message().to_owned(),
    })?;
    let mut entries = Vec::new();
    let mut faults = Vec::new();
    for (key, value) in table.get_ref() {
        let name: &str = key.get_ref();
        let line = line_at(key.span().start);
        match checked(name, value.get_ref(), known) {
            Ok(value) => entries.push(FileEntry { name: name.to_owned(), value, line }),
            Err(reason) => faults.push((line, format!("{}, line {line}: {reason}", path.display()))),
        }
    }
    faults.sort();
    if faults.is_empty() { Ok(entries) } else { Err(FileError::Entries(faults.into_iter().map(|(_, text)| text).collect())) }
}

fn checked(name: &str, value: &DeValue<'_>, known: &[String]) -> Result<String, String> {
    if name == "config" {
        return Err("`config` cannot stand in the file that it names".to_owned());
    }
    if !known.iter().any(|known| known == name) {
        let near = nearest(name, known.iter().map(String::as_str));
        let hint = near.map_or_else(|| "`ebbtide config` lists them".to_owned(), |near| format!("did you mean `{near}`?"));
        return Err(format!("`{name}` is no setting: {hint}"));
    }
    as_typed(value).ok_or_else(|| format!("`{name}` is {}; settings are text, numbers, true or false", value.type_str()))
}

/// The value as a flag would be given it.
fn as_typed(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(switch) => Some(switch.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<FileEntry>, String> {
        let known = ["kv", "vram-mib", "temp", "deterministic", "config"].map(str::to_owned);
        parse(text, Path::new("c.toml"), &known).map_err(|error| error.to_string())
    }

    #[test]
    fn values_become_what_a_flag_would_be_given() {
        let entries = parsed("kv = \"f32\"\nvram-mib = 8_000\n\ntemp = 0.5\ndeterministic = true\n").expect("all known");
        let mut told: Vec<_> = entries.iter().map(|entry| (entry.line, entry.name.as_str(), entry.value.as_str())).collect();
        told.sort_unstable();
        assert_eq!(told, [(1, "kv", "f32"), (2, "vram-mib", "8000"), (4, "temp", "0.5"), (5, "deterministic", "true")]);
    }

    #[test]
    fn every_unknown_key_is_told_with_its_line_and_the_nearest_name() {
        let message = parsed("kv = \"f32\"\nvram_mib = 1\ncolour = 2\n[section]\nkv = 1\n").expect_err("three of them");
        let lines: Vec<&str> = message.lines().collect();
        assert_eq!(
            lines,
            [
                "c.toml, line 2: `vram_mib` is no setting: did you mean `vram-mib`?",
                "c.toml, line 3: `colour` is no setting: `ebbtide config` lists them",
                "c.toml, line 4: `section` is no setting: `ebbtide config` lists them",
            ]
        );
    }

    #[test]
    fn what_is_no_toml_or_no_value_is_told_with_its_line() {
        assert!(parsed("kv = \"f32\"\nkv kv\n").expect_err("no TOML").starts_with("c.toml, line 2: "));
        assert!(parsed("kv = [1]").expect_err("a list").contains("line 1: `kv` is array"));
        assert!(parsed("config = \"d.toml\"").expect_err("itself").contains("`config` cannot stand"));
    }

    #[test]
    fn a_file_that_was_named_must_be_there() {
        let path = PathBuf::from("no/such/config.toml");
        assert!(read(&Location { path: path.clone(), named: true }, &[]).is_err());
        assert!(read(&Location { path, named: false }, &[]).expect("nobody named it").path.is_none());
    }
}
