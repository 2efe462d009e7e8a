//! Words for the user on stderr.
//!
//! A message may carry text from a hostile file or a pasted argument, so whatever would steer a terminal is written out instead. A
//! stderr that is closed or full is no reason to end the work that is reported on, nor to change its exit code.

use std::fmt::Display;
use std::io::Write;

/// Writes `text` as one or more whole lines.
pub fn line(text: impl Display) {
    let _ = std::io::stderr().write_all(format!("{}\n", harmless(&text.to_string())).as_bytes());
}

/// `text` with every control character but the line feed written out.
#[must_use]
pub fn harmless(text: &str) -> String {
    let steers = |letter: char| letter.is_control() && letter != '\n';
    if !text.contains(steers) {
        return text.to_owned();
    }
    text.chars().fold(String::with_capacity(text.len()), |mut clean, letter| {
        if steers(letter) {
            clean.extend(letter.escape_default());
        } else {
            clean.push(letter);
        }
        clean
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_steer_a_terminal_is_written_out() {
        assert_eq!(harmless("tensor \u{1b}[2Jblk.0\r\u{9b}1m"), "tensor \\u{1b}[2Jblk.0\\r\\u{9b}1m");
        assert_eq!(harmless("two\nlines, wörter"), "two\nlines, wörter");
    }
}
