//! Follows one JSON value character by character, so that it can be passed on before it is whole.
//!
//! Raw line feeds and other control characters inside strings, which models write and JSON forbids, are written as escapes.

use std::fmt::Write as _;

/// Objects and lists inside one another at most; deeper ones are no call that anybody means.
const DEPTH_MAX: usize = 128;

/// What a character was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// Part of the value, which goes on.
    Inside,
    /// The value's last character.
    Last,
    /// Behind the value, which ended before it: only numbers do.
    Behind,
    /// Not JSON.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Object,
    Array,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// A value.
    Value,
    /// A value, or the end of a list that has none.
    ValueOrEnd,
    /// A key, or the end of an object that has none.
    KeyOrEnd,
    Key,
    Colon,
    CommaOrEnd,
    /// Inside a string; whether it is a key.
    String {
        is_key: bool,
    },
    /// Behind a backslash in a string.
    Escape {
        is_key: bool,
    },
    /// So many hexadecimal digits of an escape are missing.
    Hex {
        is_key: bool,
        missing: u8,
    },
    /// Inside `true`, `false` or `null`, whose rest this is.
    Word(&'static str),
    Number(Number),
}

/// Where in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::ExponentDigits)
    }

    fn step(self, character: char) -> Option<Self> {
        Some(match (self, character) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus, '1'..='9') | (Self::Whole, '0'..='9') => Self::Whole,
            (Self::Zero | Self::Whole, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Whole | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => Self::ExponentDigits,
            _ => return None,
        })
    }
}

/// One value. White space before it is passed over.
#[derive(Clone, Debug)]
pub(super) struct JsonScan {
    open: Vec<Open>,
    expect: Expect,
}

impl JsonScan {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), expect: Expect::Value }
    }

    /// Takes a character; adds what it is in the value's text to `out`.
    pub(super) fn step(&mut self, character: char, out: &mut String) -> Scanned {
        let scanned = self.next(character);
        if matches!(scanned, Scanned::Inside | Scanned::Last) {
            if matches!(self.expect, Expect::String { .. }) && character < ' ' {
                let escaped = match character {
                    '\n' => write!(out, "\\n"),
                    '\r' => write!(out, "\\r"),
                    '\t' => write!(out, "\\t"),
                    other => write!(out, "\\u{:04x}", u32::from(other)),
                };
                escaped.expect("a string takes all");
            } else {
                out.push(character);
            }
        }
        scanned
    }

    fn next(&mut self, character: char) -> Scanned {
        let is_white = matches!(character, ' ' | '\n' | '\r' | '\t');
        match self.expect {
            Expect::String { is_key } => match character {
                '\\' => self.go(Expect::Escape { is_key }),
                '"' if is_key => self.go(Expect::Colon),
                '"' => self.end_value(),
                _ => Scanned::Inside,
            },
            Expect::Escape { is_key } => match character {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(Expect::String { is_key }),
                'u' => self.go(Expect::Hex { is_key, missing: 4 }),
                _ => Scanned::Invalid,
            },
            Expect::Hex { .. } if !character.is_ascii_hexdigit() => Scanned::Invalid,
            Expect::Hex { is_key, missing: 1 } => self.go(Expect::String { is_key }),
            Expect::Hex { is_key, missing } => self.go(Expect::Hex { is_key, missing: missing - 1 }),
            Expect::Word(rest) => match rest.strip_prefix(character) {
                Some("") => self.end_value(),
                Some(rest) => self.go(Expect::Word(rest)),
                None => Scanned::Invalid,
            },
            Expect::Number(number) => match number.step(character) {
                Some(number) => self.go(Expect::Number(number)),
                None if !number.may_end() => Scanned::Invalid,
                None if self.open.is_empty() => Scanned::Behind,
                None => {
                    self.expect = Expect::CommaOrEnd;
                    self.next(character)
                }
            },
            _ if is_white => Scanned::Inside,
            Expect::Value => self.begin_value(character),
            Expect::ValueOrEnd if character == ']' => self.close(Open::Array),
            Expect::ValueOrEnd => self.begin_value(character),
            Expect::KeyOrEnd if character == '}' => self.close(Open::Object),
            Expect::KeyOrEnd | Expect::Key if character == '"' => self.go(Expect::String { is_key: true }),
            Expect::Colon if character == ':' => self.go(Expect::Value),
            Expect::CommaOrEnd => match (character, self.open.last()) {
                (',', Some(Open::Object)) => self.go(Expect::Key),
                (',', Some(Open::Array)) => self.go(Expect::Value),
                ('}', _) => self.close(Open::Object),
                (']', _) => self.close(Open::Array),
                _ => Scanned::Invalid,
            },
            Expect::KeyOrEnd | Expect::Key | Expect::Colon => Scanned::Invalid,
        }
    }

    fn go(&mut self, expect: Expect) -> Scanned {
        self.expect = expect;
        Scanned::Inside
    }

    fn begin_value(&mut self, character: char) -> Scanned {
        match character {
            '"' => self.go(Expect::String { is_key: false }),
            '{' | '[' if self.open.len() == DEPTH_MAX => Scanned::Invalid,
            '{' => {
                self.open.push(Open::Object);
                self.go(Expect::KeyOrEnd)
            }
            '[' => {
                self.open.push(Open::Array);
                self.go(Expect::ValueOrEnd)
            }
            't' => self.go(Expect::Word("rue")),
            'f' => self.go(Expect::Word("alse")),
            'n' => self.go(Expect::Word("ull")),
            '-' => self.go(Expect::Number(Number::Minus)),
            '0' => self.go(Expect::Number(Number::Zero)),
            '1'..='9' => self.go(Expect::Number(Number::Whole)),
            _ => Scanned::Invalid,
        }
    }

    fn close(&mut self, which: Open) -> Scanned {
        if self.open.pop() != Some(which) {
            return Scanned::Invalid;
        }
        self.end_value()
    }

    fn end_value(&mut self) -> Scanned {
        self.expect = Expect::CommaOrEnd;
        if self.open.is_empty() { Scanned::Last } else { Scanned::Inside }
    }
}

/// Whether `text` is one JSON value, perhaps with white space around it.
pub(super) fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The value at the text's start as it was passed on, and what is left behind it.
    fn scan(text: &str) -> Option<(String, &str)> {
        let mut scan = JsonScan::new();
        let mut out = String::new();
        for (at, character) in text.char_indices() {
            match scan.step(character, &mut out) {
                Scanned::Inside => {}
                Scanned::Last => return Some((out, &text[at + character.len_utf8()..])),
                Scanned::Behind => return Some((out, &text[at..])),
                Scanned::Invalid => return None,
            }
        }
        None
    }

    #[test]
    fn values_end_where_they_end() {
        for (value, rest) in [
            (r#"{"a": [1, -2.5e+3, {"b": "}\"]"}], "c": null}"#, "}\n"),
            ("[]", "]"),
            ("{}", ""),
            ("true", "x"),
            ("-0.5", ","),
            ("12", " "),
            (r#""\u00e9\\""#, "\""),
        ] {
            assert_eq!(scan(&format!("{value}{rest}")), Some((value.to_owned(), rest)));
        }
    }

    #[test]
    fn what_is_no_json_is_seen_at_once() {
        for text in ["[1,]", "{\"a\" 1}", "{a: 1}", "[01]", "+1", "\"\\x\"", "tru e", "[}", "1. ", "'a'", &"[".repeat(200)] {
            assert_eq!(scan(text), None, "{text}");
        }
    }

    #[test]
    fn raw_control_characters_in_strings_become_escapes() {
        let (value, _) = scan("{\n\"a\": \"x\ny\t\u{1}\"}").expect("it is repaired");
        assert_eq!(value, "{\n\"a\": \"x\\ny\\t\\u0001\"}");
        assert!(is_json(&value));
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<f32>().prop_filter("a number", |value| value.is_finite()).prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            ".{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                proptest::collection::btree_map(".{0,4}", inner, 0..4).prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn all_that_is_json_is_passed_on(value in json(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.expect("it is written");
            let followed = format!("{text}\n");
            prop_assert_eq!(scan(&followed), Some((text, "\n")));
        }

        #[test]
        fn what_is_passed_on_is_json(text in "[\\[\\]{}\",:0-9a-z.\\\\ \n-]{0,24}") {
            if let Some((value, _)) = scan(&format!("{text} ")) {
                prop_assert!(is_json(&value), "{}", value);
            }
        }
    }
}
