//! `ebbtide config`: every setting with its effective value and its source.
//!
//! The text is TOML that can be saved as a configuration file; settings without a value are comments in it.

use std::path::Path;

use serde_json::{Map, json};

use super::sources::{Setting, Settings};

/// Width to which values are padded, so that the sources stand in one column.
const VALUE_COLUMNS: usize = 36;

/// As TOML, a line for each setting.
#[must_use]
pub fn as_toml(settings: &Settings, file: Option<&Path>) -> String {
    let file = file.map_or_else(|| "none".to_owned(), |path| path.display().to_string());
    let mut text = format!("# flags go before the environment, that before the file, that before the defaults\n# file: {file}\n");
    for setting in shown(settings) {
        let line = match typed_value(setting) {
            Some(value) => format!("{:VALUE_COLUMNS$} # {}\n", format!("{} = {value}", setting.name), setting.source),
            None => format!("{:VALUE_COLUMNS$} # not set: {}\n", format!("# {} =", setting.name), setting.help),
        };
        text.push_str(&line);
    }
    text
}

/// As one JSON object: `file`, and `settings` by name with `value` (null where not set) and `source`.
#[must_use]
pub fn as_json(settings: &Settings, file: Option<&Path>) -> serde_json::Value {
    let entry = |setting: &Setting| json!({ "value": typed_value(setting), "source": setting.source.to_string() });
    let entries: Map<String, serde_json::Value> = shown(settings).map(|setting| (setting.name.clone(), entry(setting))).collect();
    json!({ "file": file, "settings": entries })
}

/// All but the file's own name, which cannot stand in a file, and what this version only refuses.
fn shown(settings: &Settings) -> impl Iterator<Item = &Setting> {
    settings.0.iter().filter(|setting| setting.name != "config" && !setting.is_hidden())
}

/// Numbers and switches as such, everything else as text.
fn typed_value(setting: &Setting) -> Option<toml::Value> {
    let text = setting.value.as_ref()?.to_string_lossy().into_owned();
    // Never printed: what is printed lands in logs and in messages to others.
    if setting.name == "api-key" {
        return Some(toml::Value::String("(set)".to_owned()));
    }
    let number = text.parse::<i64>().map(toml::Value::Integer);
    let value = number.or_else(|_| text.parse::<bool>().map(toml::Value::Boolean));
    // A whole number beyond TOML's would lose its last digits as a float.
    let whole = text.bytes().all(|byte| byte.is_ascii_digit());
    let value = value.or_else(|error| if whole { Err(error) } else { text.parse::<f64>().map(toml::Value::Float).map_err(|_| error) });
    Some(value.unwrap_or(toml::Value::String(text)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::cli::scratch::Scratch;
    use crate::cli::sources::{Environment, resolve};

    fn settings(line: &str, environment: &Environment) -> Settings {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        resolve(&words, environment).expect(line).settings
    }

    #[test]
    fn the_text_is_a_file_that_sets_the_same() {
        let environment = vec![(OsString::from("EBBTIDE_TEMP"), OsString::from("0.5"))];
        let first = settings("ebbtide config -m m\"o.gguf --kv q8_0 --deterministic --seed 7 --prefill auto:512", &environment);
        let text = as_toml(&first, None);
        let scratch = Scratch::new("show-again");
        let path = scratch.write("config.toml", text.as_bytes());
        let again = settings(&format!("ebbtide config --config {}", path.display()), &Vec::new());
        for (before, after) in shown(&first).zip(shown(&again)) {
            assert_eq!((&before.name, &before.value), (&after.name, &after.value), "{text}");
        }
    }

    #[test]
    fn every_line_names_its_source() {
        let environment = vec![(OsString::from("EBBTIDE_TEMP"), OsString::from("0.5"))];
        let text = as_toml(&settings("ebbtide config --kv q8_0", &environment), None);
        let line = |start: &str| text.lines().find(|line| line.starts_with(start)).map(|line| line.rsplit("# ").next());
        assert_eq!(line("kv = \"q8_0\""), Some(Some("flag")), "{text}");
        assert_eq!(line("temp = 0.5"), Some(Some("EBBTIDE_TEMP")), "{text}");
        assert_eq!(line("vram-mib = 8192"), Some(Some("default")), "{text}");
        assert!(text.contains("# top-k ="), "{text}");
    }

    #[test]
    fn json_has_typed_values_and_sources() {
        let value = as_json(&settings("ebbtide config --kv q8_0 --threads 3", &Vec::new()), None);
        assert_eq!(value["settings"]["kv"], json!({ "value": "q8_0", "source": "flag" }));
        assert_eq!(value["settings"]["threads"]["value"], json!(3));
        assert_eq!(value["settings"]["vram-mib"], json!({ "value": 8192, "source": "default" }));
        assert_eq!(value["settings"]["temp"]["value"], json!(null));
        assert_eq!(value["file"], json!(null));
    }
}
