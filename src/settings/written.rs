//! How values are written: what is refused, and whole numbers within bounds.

use thiserror::Error;

/// Why a written value is no value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingError {
    /// The value is not one of a few words.
    #[error("`{value}` is not one of: {choices}")]
    Choice {
        /// What was written.
        value: String,
        /// The words that would do.
        choices: String,
    },
    /// The value is not written as a number.
    #[error("`{value}` is not a number; write {form}")]
    NotANumber {
        /// What was written.
        value: String,
        /// The forms that would do.
        form: &'static str,
    },
    /// The value is a number outside its bounds.
    #[error("{value} is out of bounds: {least} to {most} {unit}")]
    OutOfBounds {
        /// What was written.
        value: String,
        /// Smallest value that would do.
        least: String,
        /// Largest value that would do.
        most: String,
        /// What is counted.
        unit: &'static str,
    },
}

/// How a whole number is written, what it counts and where it may lie.
#[derive(Clone, Copy, Debug)]
pub struct WholeNumber {
    /// The forms that would do, for the message about a value that is none of them.
    pub form: &'static str,
    /// What is counted.
    pub unit: &'static str,
    /// Smallest value.
    pub least: u64,
    /// Largest value.
    pub most: u64,
}

impl WholeNumber {
    /// Reads `text` as a decimal number within the bounds.
    ///
    /// # Errors
    /// `NotANumber` for anything but digits with an optional sign, `OutOfBounds` for a number elsewhere, however long it is.
    pub fn parse(&self, text: &str) -> Result<u64, SettingError> {
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(SettingError::NotANumber { value: text.to_owned(), form: self.form });
        }
        match text.parse::<u64>() {
            Ok(number) if (self.least..=self.most).contains(&number) => Ok(number),
            _ => Err(SettingError::OutOfBounds {
                value: text.to_owned(),
                least: self.least.to_string(),
                most: self.most.to_string(),
                unit: self.unit,
            }),
        }
    }

    /// As [`WholeNumber::parse`], for bounds that fit 32 bits.
    ///
    /// # Errors
    /// The same; a bound above 32 bits is lowered to what fits.
    pub fn parse_u32(&self, text: &str) -> Result<u32, SettingError> {
        let narrowed = Self { most: self.most.min(u64::from(u32::MAX)), ..*self };
        narrowed.parse(text).map(|number| u32::try_from(number).expect("the bound fits 32 bits"))
    }
}
