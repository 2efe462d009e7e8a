//! Writes a float32 matrix in NumPy's `.npy` format, row by row.
//!
//! The file is format version 1.0: magic, version, a header padded so that the data starts at a multiple of 64 bytes, then rows in
//! C order, little-endian. The file has its name only once every row is there ([`part_file`]).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::exit::{Classified, ExitStatus};
use super::part_file::{self, Part};

/// Bytes to whose multiple the data is aligned.
const ALIGNMENT: usize = 64;
/// Magic, version 1.0, and the header's length as 16 bits.
const PREAMBLE_BYTES: usize = 10;

/// Why a matrix was not written.
#[derive(Debug, Error)]
pub enum NpyError {
    /// The system refused.
    #[error("{}: cannot write the matrix", .path.display())]
    Write {
        /// The target.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A row of another length.
    #[error("row {row} has {found} values, the matrix {expected} columns")]
    RowLength {
        /// Counted from 0.
        row: usize,
        /// Values given.
        found: usize,
        /// Values a row has.
        expected: usize,
    },
    /// More or fewer rows than announced.
    #[error("{found} rows were written of {expected} announced")]
    RowCount {
        /// Rows written, with the one too many.
        found: usize,
        /// Rows announced.
        expected: usize,
    },
}

impl Classified for NpyError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Failed
    }
}

/// A matrix on its way to a file. Life: [`NpyWriter::create`], then [`NpyWriter::write_row`] for each row, then
/// [`NpyWriter::finish`]; dropped before that, it leaves nothing behind.
pub struct NpyWriter {
    file: BufWriter<File>,
    target: PathBuf,
    part: Option<Part>,
    rows: usize,
    columns: usize,
    rows_written: usize,
}

impl NpyWriter {
    /// Starts a matrix of `shape.0` rows and `shape.1` columns at `target`.
    ///
    /// # Errors
    /// Where the temporary file beside the target cannot be made, or the target is a folder.
    pub fn create(target: &Path, shape: (usize, usize)) -> Result<Self, NpyError> {
        let failed = |source| NpyError::Write { path: target.to_owned(), source };
        let (file, part) = part_file::open(target).map_err(failed)?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&header(shape)).map_err(failed)?;
        Ok(Self { file, target: target.to_owned(), part, rows: shape.0, columns: shape.1, rows_written: 0 })
    }

    /// Adds a row.
    ///
    /// # Errors
    /// Where the row has another length than the matrix, is one too many, or cannot be written.
    pub fn write_row(&mut self, row: &[f32]) -> Result<(), NpyError> {
        if row.len() != self.columns {
            return Err(NpyError::RowLength { row: self.rows_written, found: row.len(), expected: self.columns });
        }
        if self.rows_written == self.rows {
            return Err(NpyError::RowCount { found: self.rows + 1, expected: self.rows });
        }
        for value in row {
            self.file.write_all(&value.to_le_bytes()).map_err(|source| NpyError::Write { path: self.target.clone(), source })?;
        }
        self.rows_written += 1;
        Ok(())
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Where rows are missing, or the last bytes or the name cannot be written.
    pub fn finish(mut self) -> Result<(), NpyError> {
        if self.rows_written != self.rows {
            return Err(NpyError::RowCount { found: self.rows_written, expected: self.rows });
        }
        let flushed = self.file.flush();
        let named = flushed.and_then(|()| self.part.as_ref().map_or(Ok(()), Part::take_name));
        named.map_err(|source| NpyError::Write { path: self.target.clone(), source })
    }
}

/// All bytes before the data.
fn header((rows, columns): (usize, usize)) -> Vec<u8> {
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    // The header ends in a newline, which counts into the alignment.
    let total = (PREAMBLE_BYTES + dictionary.len() + 1).next_multiple_of(ALIGNMENT);
    let length = u16::try_from(total - PREAMBLE_BYTES).expect("two numbers of at most 20 digits keep a header short");
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(b"\x93NUMPY\x01\x00");
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(dictionary.as_bytes());
    bytes.resize(total - 1, b' ');
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::*;
    use crate::cli::scratch::Scratch;

    #[test]
    fn the_bytes_are_those_that_numpy_saves() {
        // numpy.save of numpy.array([[1, -2, 0.5], [0, 3, 4]], dtype='<f4'): a header of 118 bytes, data from byte 128.
        let scratch = Scratch::new("npy-bytes");
        let path = scratch.path("m.npy");
        let mut writer = NpyWriter::create(&path, (2, 3)).expect("a new file");
        writer.write_row(&[1.0, -2.0, 0.5]).expect("first row");
        writer.write_row(&[0.0, 3.0, 4.0]).expect("second row");
        writer.finish().expect("both rows");
        let mut expected = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }".to_vec();
        expected.resize(127, b' ');
        expected.push(b'\n');
        for word in [0x3f80_0000_u32, 0xc000_0000, 0x3f00_0000, 0, 0x4040_0000, 0x4080_0000] {
            expected.extend_from_slice(&word.to_le_bytes());
        }
        assert_eq!(std::fs::read(&path).expect("it is there"), expected);
        assert_eq!(std::fs::read_dir(scratch.folder()).expect("the folder").count(), 1, "no temporary file is left");
    }

    #[test]
    fn data_starts_at_a_multiple_of_64_for_every_shape() {
        for exponent in 0..19 {
            let bytes = header((10_usize.pow(exponent), 151_936));
            assert_eq!(bytes.len() % ALIGNMENT, 0);
            assert_eq!(bytes.last(), Some(&b'\n'));
            assert_eq!(usize::from(u16::from_le_bytes([bytes[8], bytes[9]])) + PREAMBLE_BYTES, bytes.len());
        }
    }

    #[test]
    fn a_matrix_with_rows_missing_leaves_the_old_file_and_no_part() {
        let scratch = Scratch::new("npy-missing");
        let path = scratch.write("m.npy", b"before");
        let mut writer = NpyWriter::create(&path, (2, 1)).expect("a new file");
        writer.write_row(&[1.0]).expect("first row");
        assert!(matches!(writer.finish(), Err(NpyError::RowCount { found: 1, expected: 2 })));
        assert_eq!(std::fs::read(&path).expect("untouched"), b"before");
        assert_eq!(std::fs::read_dir(scratch.folder()).expect("the folder").count(), 1);
    }

    #[test]
    fn a_row_of_another_length_or_one_too_many_is_refused() {
        let scratch = Scratch::new("npy-rows");
        let mut writer = NpyWriter::create(&scratch.path("m.npy"), (1, 2)).expect("a new file");
        assert!(matches!(writer.write_row(&[1.0]), Err(NpyError::RowLength { row: 0, found: 1, expected: 2 })));
        writer.write_row(&[1.0, 2.0]).expect("the row");
        assert!(matches!(writer.write_row(&[1.0, 2.0]), Err(NpyError::RowCount { found: 2, expected: 1 })));
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link_and_its_file_is_replaced() {
        let scratch = Scratch::new("npy-link");
        let (file, link) = (scratch.write("m.npy", b"before"), scratch.path("link.npy"));
        std::os::unix::fs::symlink(&file, &link).expect("a new link");
        let mut writer = NpyWriter::create(&link, (1, 1)).expect("a new part");
        writer.write_row(&[1.0]).expect("the row");
        writer.finish().expect("the only row");
        assert!(fs::symlink_metadata(&link).expect("it is there").is_symlink());
        assert!(fs::read(&file).expect("it is there").starts_with(b"\x93NUMPY"));
        let error = NpyWriter::create(scratch.folder(), (1, 1)).err().expect("a folder is no file");
        assert!(matches!(error, NpyError::Write { source, .. } if source.kind() == io::ErrorKind::IsADirectory));
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = NpyWriter::create(Path::new("no/such/m.npy"), (1, 1)).err().expect("no folder");
        assert_eq!(error.to_string(), "no/such/m.npy: cannot write the matrix");
    }
}
