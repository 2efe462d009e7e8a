//! A bounded little-endian cursor over the bytes of a header.
//!
//! The one place that turns lengths into slices. A request for more bytes than are left is an error that names the field and how many
//! are missing; nothing is allocated before that comparison. Field names are `format_args!`, so they cost nothing while all is well.

use std::fmt::Arguments;

use super::error::GgufError;

/// Reads forward through `bytes`; `file` is what errors call the file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    file: &'a str,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], file: &'a str) -> Self {
        Self { bytes, position: 0, file }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> u64 {
        self.position as u64
    }

    /// What errors call the file.
    pub(super) fn file(&self) -> &'a str {
        self.file
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Checks that `needed` more bytes are there.
    fn check_left(&self, field: Arguments<'_>, needed: u64) -> Result<usize, GgufError> {
        match usize::try_from(needed) {
            Ok(needed) if needed <= self.left() => Ok(needed),
            _ => Err(GgufError::Truncated {
                file: self.file.to_owned(),
                field: field.to_string(),
                offset: self.position(),
                needed,
                left: self.left() as u64,
            }),
        }
    }

    /// Checks a claimed count of items of at least `min_bytes` (not 0) each against the bytes left; the result is safe as a capacity.
    pub(super) fn check_count(&self, field: Arguments<'_>, count: u64, min_bytes: usize) -> Result<usize, GgufError> {
        Ok(self.check_left(field, count.saturating_mul(min_bytes as u64))? / min_bytes)
    }

    pub(super) fn take(&mut self, field: Arguments<'_>, n_bytes: u64) -> Result<&'a [u8], GgufError> {
        let n_bytes = self.check_left(field, n_bytes)?;
        let taken = &self.bytes[self.position..self.position + n_bytes];
        self.position += n_bytes;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, field: Arguments<'_>) -> Result<[u8; N], GgufError> {
        let taken = self.take(field, N as u64)?;
        Ok(taken.try_into().expect("take returns as many bytes as it was asked for"))
    }

    pub(super) fn u32(&mut self, field: Arguments<'_>) -> Result<u32, GgufError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: Arguments<'_>) -> Result<u64, GgufError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A string: a u64 length of at most `max` bytes, then that many bytes of UTF-8.
    pub(super) fn string(&mut self, field: Arguments<'_>, max: u64) -> Result<&'a str, GgufError> {
        let n_bytes = self.u64(format_args!("length of {field}"))?;
        let offset = self.position();
        let bytes = self.take(field, n_bytes)?;
        if n_bytes > max {
            return Err(GgufError::NameTooLong { file: self.file.to_owned(), field: field.to_string(), bytes: n_bytes, max });
        }
        std::str::from_utf8(bytes).map_err(|error| GgufError::NotUtf8 {
            file: self.file.to_owned(),
            field: field.to_string(),
            offset,
            bad_byte: error.valid_up_to(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_past_the_end_is_refused_with_its_offset_and_the_missing_bytes() {
        let mut cursor = Cursor::new(&[1, 0, 0, 0, 2, 0], "f.gguf");
        assert_eq!(cursor.u32(format_args!("first")).unwrap(), 1);
        let message = cursor.u32(format_args!("second")).unwrap_err().to_string();
        assert!(message.contains("f.gguf: second at byte 4 needs 4 bytes but 2 are left: at least 2 bytes are missing"), "{message}");
        assert_eq!(cursor.position(), 4, "a refused read moves nothing");
    }

    #[test]
    fn a_count_whose_bytes_overflow_is_refused() {
        let cursor = Cursor::new(&[0; 64], "f.gguf");
        assert_eq!(cursor.check_count(format_args!("items"), 8, 8).unwrap(), 8);
        assert!(matches!(cursor.check_count(format_args!("items"), u64::MAX / 2, 8), Err(GgufError::Truncated { needed: u64::MAX, .. })));
    }

    #[test]
    fn a_string_that_is_no_utf8_is_refused_with_its_place() {
        let mut bytes = 3u64.to_le_bytes().to_vec();
        bytes.extend([b'a', 0xff, b'b']);
        let error = Cursor::new(&bytes, "f.gguf").string(format_args!("key 0"), 10).unwrap_err();
        assert!(matches!(error, GgufError::NotUtf8 { offset: 8, bad_byte: 1, .. }), "{error}");
    }
}
