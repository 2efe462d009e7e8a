//! Lists of settings, as a sweep takes them: `auto,128,256`.

use std::collections::HashSet;
use std::error::Error;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::settings::{SettingError, WholeNumber};

/// Most entries of a list.
pub const ENTRIES_MAX: usize = 64;

/// Why a written list is none.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ListError {
    /// An entry is no value of its setting.
    #[error("entry {position}: {reason}")]
    Entry {
        /// Counted from 1.
        position: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// An entry stands there twice: it would be measured twice.
    #[error("`{value}` stands there twice")]
    Twice {
        /// The entry.
        value: String,
    },
    /// There are more entries than are taken.
    #[error("{count} entries are more than {ENTRIES_MAX}")]
    TooMany {
        /// How many.
        count: usize,
    },
}

/// Values of a setting, at least one, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

/// Reads values split by commas.
///
/// # Errors
/// [`ListError`].
pub fn parse<T>(text: &str) -> Result<List<T>, ListError>
where
    T: FromStr<Err: Error> + fmt::Display,
{
    parse_with(text, |entry| entry.parse::<T>().map_err(|error| error.to_string()))
}

/// As [`parse`], for numbers within bounds.
///
/// # Errors
/// [`ListError`].
pub fn parse_numbers(text: &str, bounds: WholeNumber) -> Result<List<u32>, ListError> {
    parse_with(text, |entry| bounds.parse_u32(entry).map_err(|error: SettingError| error.to_string()))
}

fn parse_with<T: fmt::Display>(text: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<List<T>, ListError> {
    let count = text.split(',').count();
    if count > ENTRIES_MAX {
        return Err(ListError::TooMany { count });
    }
    let mut values = Vec::with_capacity(count);
    let mut written = HashSet::new();
    for (index, entry) in text.split(',').enumerate() {
        let value = read(entry.trim()).map_err(|reason| ListError::Entry { position: index + 1, reason })?;
        if !written.insert(value.to_string()) {
            return Err(ListError::Twice { value: value.to_string() });
        }
        values.push(value);
    }
    Ok(List(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::ExpertCache;

    #[test]
    fn values_are_split_by_commas_and_each_stands_there_once() {
        let slots = |text: &str| parse::<ExpertCache>(text);
        assert_eq!(slots("auto, 8"), Ok(List(vec![ExpertCache::Auto, ExpertCache::Slots(8)])));
        assert_eq!(slots("8,+8"), Err(ListError::Twice { value: "8".to_owned() }));
        let told = slots("8,,9").expect_err("an empty entry").to_string();
        assert_eq!(told, "entry 2: `` is not a number; write `auto` or a whole number");
        assert!(slots("8,0").is_err() && slots("").is_err());
        let many: Vec<String> = (1..=65).map(|number| number.to_string()).collect();
        assert_eq!(slots(&many.join(",")), Err(ListError::TooMany { count: 65 }));
        assert!(slots(&many[1..].join(",")).is_ok());
    }
}
