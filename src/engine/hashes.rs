//! What every window computed, as one line of text each: to compare two runs without storing them. `docs/window-hashes.md` has the
//! format.

use std::fmt::{self, Write as _};
use std::io::{BufWriter, Write};

use crate::engine::EngineError;

/// First line; the number goes up when the columns change.
const HEADER: &str = "# ebbtide window hashes 1: window position rows residual logits best";

/// Writes the lines of an engine's windows.
pub struct WindowHashes {
    out: BufWriter<Box<dyn Write>>,
    windows: u64,
    line: String,
}

impl WindowHashes {
    /// Starts with the header line.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`].
    pub fn new(out: Box<dyn Write>) -> Result<Self, EngineError> {
        let mut out = BufWriter::new(out);
        writeln!(out, "{HEADER}").map_err(EngineError::WindowHashes)?;
        Ok(Self { out, windows: 0, line: String::new() })
    }

    /// Writes a window's line: `residual` are the bytes of its rows after the last layer, `logits` its rows where it has a head.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`].
    pub fn write<'a>(
        &mut self,
        position: usize,
        n_rows: usize,
        residual: &[u8],
        logits: Option<impl Iterator<Item = &'a [f32]> + Clone>,
    ) -> Result<(), EngineError> {
        self.line.clear();
        let put = |line: &mut String, text: fmt::Arguments<'_>| line.write_fmt(text).expect("a string takes all text");
        put(&mut self.line, format_args!("{} {position} {n_rows} {:016x}", self.windows, Fnv1a::default().over(residual).0));
        match logits {
            None => self.line.push_str(" - -"),
            Some(rows) => {
                let words = |hash: Fnv1a, row: &[f32]| row.iter().fold(hash, |hash, value| hash.over(&value.to_le_bytes()));
                put(&mut self.line, format_args!(" {:016x}", rows.clone().fold(Fnv1a::default(), words).0));
                for (row, logits) in rows.enumerate() {
                    let before = if row == 0 { ' ' } else { ',' };
                    put(&mut self.line, format_args!("{before}{}", best(logits)));
                }
            }
        }
        self.line.push('\n');
        self.windows += 1;
        self.out.write_all(self.line.as_bytes()).map_err(EngineError::WindowHashes)
    }

    /// Hands everything to the system.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`].
    pub fn flush(&mut self) -> Result<(), EngineError> {
        self.out.flush().map_err(EngineError::WindowHashes)
    }
}

/// The number of the largest logit, the first among equals; no logit counts that is no number.
fn best(logits: &[f32]) -> usize {
    let better = |best: (usize, f32), (token, &logit): (usize, &f32)| if logit > best.1 { (token, logit) } else { best };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), better).0
}

/// The 64-bit FNV-1a hash.
#[derive(Clone, Copy)]
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    fn over(self, bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(self.0, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)))
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the file says what its description promises. Method: known values of the hash, and lines of small windows.
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Rc<RefCell<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_hash_has_the_published_values() {
        for (text, hash) in [("", 0xcbf2_9ce4_8422_2325_u64), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)] {
            assert_eq!(Fnv1a::default().over(text.as_bytes()).0, hash, "{text}");
        }
    }

    #[test]
    fn a_line_names_window_position_rows_both_hashes_and_the_best_of_each_row() {
        let out = Shared::default();
        let mut hashes = WindowHashes::new(Box::new(out.clone())).expect("memory takes it");
        let logits = [[1.0_f32, 3.0, 3.0], [f32::NAN, -1.0, -2.0]];
        hashes.write(7, 1, b"a", None::<std::slice::ChunksExact<'_, f32>>).expect("memory takes it");
        hashes.write(8, 2, b"foobar", Some(logits.as_flattened().chunks_exact(3))).expect("memory takes it");
        hashes.flush().expect("memory takes it");
        let of_logits: Vec<u8> = logits.as_flattened().iter().flat_map(|logit| logit.to_le_bytes()).collect();
        let hash = Fnv1a::default().over(&of_logits).0;
        let expected = format!("{HEADER}\n0 7 1 af63dc4c8601ec8c - -\n1 8 2 85944171f73967e8 {hash:016x} 1,1\n");
        assert_eq!(String::from_utf8(out.0.take()).expect("text"), expected);
    }
}
