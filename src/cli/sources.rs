//! Joins the three places a setting can come from: flags, environment, file.
//!
//! Flags win over the environment, that over the file, that over the default. The argument list is read twice: first with values
//! as raw text, to learn what was typed; then with the values of the other places put before it, so that one definition
//! ([`super::args`]) checks all. A value at fault is reported with its place, all of them in one message, before anything is
//! loaded. What the values mean together is for [`super::config`].

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};
use thiserror::Error;

use super::args::{self, Cli};
use super::exit::{Classified, ExitStatus};
use super::file::{self, FileError, FileSettings};
use super::nearest::nearest;

/// Commands of the design that this version does not have.
const LATER_COMMANDS: [&str; 1] = ["chat"];
/// Variables of the environment with our prefix that are no settings.
const OTHER_VARIABLES: [&str; 3] = ["EBBTIDE_REQUIRE_KERNELS", "EBBTIDE_CUDA_ARCHS", "EBBTIDE_CUDA_IMAGE"];
const PREFIX: &str = "EBBTIDE_";

/// Where a value comes from, the strongest first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Typed.
    Flag,
    /// In a variable of the environment.
    Environment {
        /// Its name.
        variable: String,
    },
    /// In the configuration file.
    File {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// Nobody said.
    Default,
}

impl Source {
    /// Sources of one rank do not win over each other.
    fn rank(&self) -> u8 {
        match self {
            Self::Flag => 0,
            Self::Environment { .. } => 1,
            Self::File { .. } => 2,
            Self::Default => 3,
        }
    }

    /// Whether this source goes before `other`.
    #[must_use]
    pub fn wins_over(&self, other: &Self) -> bool {
        self.rank() < other.rank()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Environment { variable } => f.write_str(variable),
            Self::File { path, line } => write!(f, "{}, line {line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One setting with its effective value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The flag without its dashes; of a bare argument what the help calls it.
    pub name: String,
    /// As written; `None` where nothing was said and there is no default.
    pub value: Option<OsString>,
    /// Where the value comes from.
    pub source: Source,
    /// What the help says of it.
    pub help: String,
    is_flag: bool,
    is_hidden: bool,
}

impl Setting {
    /// Whether it has dashes, and with them a variable and a key.
    #[must_use]
    pub fn is_flag(&self) -> bool {
        self.is_flag
    }

    /// Whether the help leaves it out, since this version only refuses it.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }
}

impl fmt::Display for Setting {
    /// As in a message: the flag with its value, and where it stands if not on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_flag, self.name.as_str()) {
            (true, "hf") => f.write_str("-hf")?,
            (true, name) => write!(f, "--{name}")?,
            (false, name) => f.write_str(name)?,
        }
        match self.value.as_deref().map(OsStr::to_string_lossy) {
            Some(value) if value != "true" => write!(f, " {}", shortened(&value))?,
            _ => {}
        }
        match &self.source {
            Source::Flag => Ok(()),
            Source::Default => f.write_str(" (default)"),
            source => write!(f, " (from {source})"),
        }
    }
}

/// A prompt can be long and have many lines; a message has one.
fn shortened(value: &str) -> String {
    let letters_max = 60;
    let mut short: String = value.chars().take(letters_max).map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    if value.chars().nth(letters_max).is_some() {
        short.push('…');
    }
    short
}

/// The effective settings of one command.
#[derive(Clone, Debug, Default)]
pub struct Settings(pub Vec<Setting>);

impl Settings {
    /// The setting of a name the command has.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.0.iter().find(|setting| setting.name == name)
    }

    /// Shows `value` as the default of a setting of which nobody said anything, where the program takes it from the machine.
    pub fn assume(&mut self, name: &str, value: impl fmt::Display) {
        if let Some(setting) = self.0.iter_mut().find(|setting| setting.name == name && setting.value.is_none()) {
            setting.value = Some(value.to_string().into());
        }
    }

    /// As [`Settings::get`], where somebody said something.
    #[must_use]
    pub fn said(&self, name: &str) -> Option<&Setting> {
        self.get(name).filter(|setting| setting.source != Source::Default)
    }
}

/// What the three places say together.
#[derive(Debug)]
pub struct Resolved {
    /// Typed values.
    pub cli: Cli,
    /// The same as text, with their places.
    pub settings: Settings,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// What looks like a mistake but stops nothing.
    pub warnings: Vec<String>,
}

/// Why the settings could not be read.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The argument list is at fault, or asks for help; prints itself.
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    /// A command of the design that is still to come.
    #[error(
        "`{0}` is not in this version; its commands: demo, run, serve, plan, logits, perplexity, bench, replay, tokenize, detokenize, devices, doctor, config"
    )]
    LaterCommand(String),
    /// The configuration file is at fault.
    #[error(transparent)]
    File(#[from] FileError),
    /// Values that are none of their settings, each with its place.
    #[error("{}", .0.join("\n"))]
    Values(Vec<String>),
}

impl Classified for SourceError {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Arguments(error) if !error.use_stderr() => ExitStatus::Done,
            _ => ExitStatus::Usage,
        }
    }
}

/// Variables of the environment, as `std::env::vars_os` gives them.
pub type Environment = Vec<(OsString, OsString)>;

/// Reads the argument list (the program's name first), the environment and the configuration file.
///
/// # Errors
/// Where a name or a value is none, or the file cannot be read.
pub fn resolve(arguments: &[OsString], environment: &Environment) -> Result<Resolved, SourceError> {
    let arguments = with_long_hf(arguments);
    let command = args::command();
    let raw = raw(command.clone()).try_get_matches_from(&arguments).map_err(explained)?;
    let (name, typed) = raw.subcommand().expect("the definition demands a command");
    let subcommand = command.find_subcommand(name).expect("it was just matched").clone();

    let known = known_names(&command);
    let file = match file::locate(typed.get_one::<OsString>("config"), environment) {
        Some(location) => file::read(&location, &known)?,
        None => FileSettings::default(),
    };
    let settings = Settings(subcommand.get_arguments().map(|arg| effective(arg, typed, environment, &file)).collect());
    check_values(&subcommand, &settings)?;

    let cli = Cli::from_arg_matches(&command.try_get_matches_from(joined(&arguments, &settings))?)?;
    Ok(Resolved { cli, settings, file: file.path, warnings: unknown_variables(environment, &known) })
}

/// `-hf` has two letters, which the parser would read as `-h` and print the help.
fn with_long_hf(arguments: &[OsString]) -> Vec<OsString> {
    let mut previous: Option<&OsString> = None;
    let mut flags_ended = false;
    let mut result = Vec::with_capacity(arguments.len());
    for argument in arguments {
        flags_ended |= argument == "--";
        let is_text = previous.is_some_and(|previous| previous == "-p" || previous == "--prompt");
        let rewritten = argument == "-hf" && !flags_ended && !is_text;
        result.push(if rewritten { OsString::from("--hf") } else { argument.clone() });
        previous = Some(argument);
    }
    result
}

/// The same flags with any value at all. The defaults stay.
fn raw(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|subcommand| subcommand.mut_args(|arg| arg.value_parser(ValueParser::os_string())))
}

fn explained(error: clap::Error) -> SourceError {
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(name)) if LATER_COMMANDS.contains(&name.as_str()) => SourceError::LaterCommand(name.clone()),
        _ => SourceError::Arguments(error),
    }
}

/// Every flag of every command, by its long name; the file may set what another command needs.
fn known_names(command: &clap::Command) -> Vec<String> {
    let flags = command.get_subcommands().flat_map(clap::Command::get_arguments).filter_map(clap::Arg::get_long);
    let mut names: Vec<String> = flags.map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The variable that sets a flag.
#[must_use]
pub fn variable_of(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}

fn effective(arg: &clap::Arg, typed: &ArgMatches, environment: &Environment, file: &FileSettings) -> Setting {
    let id = arg.get_id().as_str();
    let value_name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let name = arg.get_long().map_or_else(|| value_name.unwrap_or_else(|| id.to_owned()), str::to_owned);
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let parsed = typed.get_raw(id).and_then(|mut values| values.next_back()).map(OsStr::to_os_string);
    let setting = |value, source| Setting {
        name: name.clone(),
        value,
        source,
        help: help.clone(),
        is_flag: arg.get_long().is_some(),
        is_hidden: arg.is_hide_set(),
    };

    if typed.value_source(id) == Some(ValueSource::CommandLine) || arg.is_positional() {
        let source = if parsed.is_some() { Source::Flag } else { Source::Default };
        return setting(parsed, source);
    }
    let variable = variable_of(&name);
    // An empty variable is the usual way to unset one for a single call.
    if let Some((_, value)) = environment.iter().find(|(key, value)| key == variable.as_str() && !value.is_empty()) {
        return setting(Some(value.clone()), Source::Environment { variable });
    }
    if let Some(entry) = file.get(&name) {
        let path = file.path.clone().unwrap_or_default();
        return setting(Some(entry.value.clone().into()), Source::File { path, line: entry.line });
    }
    setting(parsed, Source::Default)
}

/// Checks every value on its own, so that all faults come in one message, each with its place.
fn check_values(subcommand: &clap::Command, settings: &Settings) -> Result<(), SourceError> {
    let mut faults = Vec::new();
    for (arg, setting) in subcommand.get_arguments().zip(&settings.0) {
        let (Some(value), Some(_)) = (&setting.value, arg.get_long()) else { continue };
        let alone = clap::Command::new("value").arg(arg.clone()).try_get_matches_from(["value".into(), assigned(&setting.name, value)]);
        if let Err(error) = alone {
            let nameless = if value.to_str().is_none() { "it is not UTF-8" } else { "it has no value" };
            let reason = std::error::Error::source(&error).map_or_else(|| nameless.to_owned(), ToString::to_string);
            faults.push(format!("{setting}: {reason}"));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(SourceError::Values(faults)) }
}

/// `--name=value`.
fn assigned(name: &str, value: &OsStr) -> OsString {
    let mut argument = OsString::from(format!("--{name}="));
    argument.push(value);
    argument
}

/// The argument list with the values of environment and file right after the command, where flags that follow win over them.
fn joined(arguments: &[OsString], settings: &Settings) -> Vec<OsString> {
    let (start, flags) = arguments.split_at(2.min(arguments.len()));
    let elsewhere = settings.0.iter().filter(|setting| matches!(setting.source, Source::Environment { .. } | Source::File { .. }));
    let values = elsewhere.filter_map(|setting| setting.value.as_deref().map(|value| assigned(&setting.name, value)));
    start.iter().cloned().chain(values).chain(flags.iter().cloned()).collect()
}

/// Variables that look like a setting and are none; others with our prefix may belong to a build or a script.
fn unknown_variables(environment: &Environment, known: &[String]) -> Vec<String> {
    let variables: Vec<String> = known.iter().map(|name| variable_of(name)).collect();
    let names = environment.iter().filter_map(|(name, _)| name.to_str()).filter(|name| name.starts_with(PREFIX));
    names
        .filter(|name| !OTHER_VARIABLES.contains(name) && !variables.iter().any(|variable| variable == name))
        .filter_map(|name| {
            nearest(name, variables.iter().map(String::as_str))
                .map(|near| format!("the variable {name} sets nothing: did you mean {near}?"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::CommandArgs;
    use crate::cli::scratch::Scratch;
    use crate::settings::KvType;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn variables(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
    }

    fn error(line: &str, environment: &Environment) -> String {
        let error = resolve(&words(line), environment).expect_err(line);
        assert_eq!(error.exit_status(), ExitStatus::Usage, "{line}");
        error.to_string()
    }

    fn kv_of(resolved: &Resolved) -> (KvType, &Source) {
        let CommandArgs::Plan(plan) = &resolved.cli.command else { panic!("a plan was asked for") };
        (plan.engine.memory.kv, &resolved.settings.get("kv").expect("plan has --kv").source)
    }

    #[test]
    fn flags_win_over_the_environment_and_that_over_the_file() {
        let scratch = Scratch::new("sources-order");
        let path = scratch.write("config.toml", b"# mine\nkv = \"q8_0\"\nvram-mib = 6000\n");
        let line = format!("ebbtide plan --config {}", path.display());
        let environment = variables(&[("EBBTIDE_KV", "f32")]);

        let resolved = resolve(&words("ebbtide plan"), &Vec::new()).expect("defaults");
        assert_eq!(kv_of(&resolved), (KvType::F16, &Source::Default));
        let resolved = resolve(&words(&line), &Vec::new()).expect("file");
        assert_eq!(kv_of(&resolved), (KvType::Q8_0, &Source::File { path: path.clone(), line: 2 }));
        let resolved = resolve(&words(&line), &environment).expect("environment");
        assert_eq!(kv_of(&resolved), (KvType::F32, &Source::Environment { variable: "EBBTIDE_KV".to_owned() }));
        let resolved = resolve(&words(&format!("{line} --kv f16")), &environment).expect("flag");
        assert_eq!(kv_of(&resolved), (KvType::F16, &Source::Flag));
        assert_eq!(resolved.file, Some(path));
    }

    #[test]
    fn the_file_is_found_by_flag_by_variable_and_in_the_user_s_folder() {
        let scratch = Scratch::new("sources-place");
        std::fs::create_dir_all(scratch.path("ebbtide")).expect("a folder");
        scratch.write("ebbtide/config.toml", b"kv = \"q8_0\"");
        let other = scratch.write("other.toml", b"kv = \"f32\"");
        let home = scratch.folder().to_str().expect("a plain path");
        let at_home = variables(&[("XDG_CONFIG_HOME", home)]);
        assert_eq!(kv_of(&resolve(&words("ebbtide plan"), &at_home).expect("found")).0, KvType::Q8_0);
        let both = variables(&[("XDG_CONFIG_HOME", home), ("EBBTIDE_CONFIG", other.to_str().expect("a plain path"))]);
        assert_eq!(kv_of(&resolve(&words("ebbtide plan"), &both).expect("named")).0, KvType::F32);
        let nowhere = variables(&[("XDG_CONFIG_HOME", "no/such/folder")]);
        assert_eq!(kv_of(&resolve(&words("ebbtide plan"), &nowhere).expect("none")).0, KvType::F16);
        assert!(error("ebbtide plan --config no/such.toml", &Vec::new()).contains("no/such.toml"));
    }

    #[test]
    fn all_values_at_fault_are_told_at_once_with_their_places() {
        let scratch = Scratch::new("sources-faults");
        let path = scratch.write("config.toml", b"\nvram-mib = 0\n");
        let message = error(
            &format!("ebbtide plan --prefill 99999999 --threads -1 --config {}", path.display()),
            &variables(&[("EBBTIDE_KV", "q4_0")]),
        );
        assert!(message.contains("--kv q4_0 (from EBBTIDE_KV): `q4_0` is not one of: f32, f16, q8_0"), "{message}");
        assert!(message.contains("--prefill 99999999: 99999999 is out of bounds: 1 to 131072 tokens"), "{message}");
        assert!(message.contains("--threads -1: -1 is out of bounds: 1 to 1024 threads"), "{message}");
        assert!(message.contains(&format!("--vram-mib 0 (from {}, line 2): 0 is out of bounds", path.display())), "{message}");
    }

    #[test]
    fn an_unknown_flag_is_refused_with_the_nearest_name() {
        let message = error("ebbtide run --prefil-head-alias", &Vec::new());
        assert!(message.contains("'--prefill-head-alias'"), "{message}");
        let message = error("ebbtide run --vram-reserve 300", &Vec::new());
        assert!(message.contains("'--vram-reserve-mib'"), "{message}");
        assert!(error("ebbtide run --kv", &Vec::new()).contains("--kv"));
        assert!(error("ebbtide run --prefill -1", &Vec::new()).contains("-1 is out of bounds"));
        assert!(error("ebbtide pln", &Vec::new()).contains("'plan'"));
    }

    #[test]
    fn a_command_of_a_later_version_is_told_apart_from_a_typo() {
        for name in LATER_COMMANDS {
            let message = error(&format!("ebbtide {name} -m model.gguf"), &Vec::new());
            assert!(message.starts_with(&format!("`{name}` is not in this version")), "{message}");
        }
    }

    #[test]
    fn hf_does_not_print_the_help() {
        let resolved = resolve(&words("ebbtide run -hf owner/model -p -hf"), &Vec::new()).expect("it parses");
        let CommandArgs::Run(run) = &resolved.cli.command else { panic!("a run was asked for") };
        assert_eq!(run.model.hf.as_deref(), Some("owner/model"));
        assert_eq!(run.text.prompt.as_deref(), Some("-hf"));
        assert_eq!(resolved.settings.get("hf").expect("run has it").to_string(), "-hf owner/model");
    }

    #[test]
    fn help_and_version_end_well_even_with_a_broken_file() {
        for line in ["ebbtide --help", "ebbtide run --help", "ebbtide --version"] {
            let broken = variables(&[("EBBTIDE_CONFIG", "no/such.toml"), ("EBBTIDE_KV", "foo")]);
            assert_eq!(resolve(&words(line), &broken).expect_err(line).exit_status(), ExitStatus::Done);
        }
    }

    #[test]
    fn a_switch_can_be_set_anywhere_and_taken_back_by_a_flag() {
        let deterministic = |line: &str, value: &str| {
            let resolved = resolve(&words(line), &variables(&[("EBBTIDE_DETERMINISTIC", value)])).expect(line);
            let CommandArgs::Plan(plan) = resolved.cli.command else { panic!("a plan was asked for") };
            plan.engine.general.deterministic
        };
        assert!(deterministic("ebbtide plan", "1"));
        assert!(!deterministic("ebbtide plan", ""));
        assert!(!deterministic("ebbtide plan --deterministic=false", "1"));
        assert!(deterministic("ebbtide plan --deterministic", "off"));
    }

    #[test]
    fn a_setting_of_another_command_is_left_alone_and_a_typo_warned_of() {
        let environment = variables(&[("EBBTIDE_TEMP", "0.5"), ("EBBTIDE_VRAM", "1"), ("EBBTIDE_REQUIRE_KERNELS", "1")]);
        let resolved = resolve(&words("ebbtide plan"), &environment).expect("plan has no --temp");
        assert_eq!(resolved.warnings, ["the variable EBBTIDE_VRAM sets nothing: did you mean EBBTIDE_VRAM_MIB?"]);
    }
    #[test]
    fn a_message_shows_a_long_prompt_cut_and_on_one_line() {
        let prompt = format!("two\nlines {}", "and more ".repeat(20));
        let arguments: Vec<OsString> = ["ebbtide", "run", "-p", &prompt].map(OsString::from).into();
        let resolved = resolve(&arguments, &Vec::new()).expect("it parses");
        let shown = resolved.settings.get("prompt").expect("run has it").to_string();
        assert!(shown.starts_with("--prompt two lines and more") && shown.ends_with('…'), "{shown}");
    }
}
