//! An opened model: its files mapped, its headers checked and joined.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::{GgufError, shown};
use super::map::FileMap;
use super::metadata::Metadata;
use super::reader::{Header, TensorInfo, parse};
use super::split::{check_set, display, files_of_model, io_error};

/// A GGUF model of one file or a split set, mapped read-only.
///
/// Opening checks everything the header says; after that, reading a tensor cannot fail.
#[derive(Debug)]
pub struct GgufFile {
    paths: Vec<PathBuf>,
    maps: Vec<FileMap>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Place in `tensors` by name.
    by_name: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens the model at `path`: a file, any shard of a split set, or a folder that holds one model.
    ///
    /// # Errors
    /// [`GgufError`] for a file that cannot be read, is no sound GGUF, or does not fit the others of its set.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let paths = files_of_model(path.as_ref())?;
        let maps: Vec<FileMap> = paths.iter().map(|path| map_file(path)).collect::<Result<_, _>>()?;
        let parse_one = |(path, map): (&PathBuf, &FileMap)| parse(map.as_slice(), &display(path));
        let headers: Vec<Header> = paths.iter().zip(&maps).map(parse_one).collect::<Result<_, _>>()?;
        check_set(&headers)?;
        Self::join(paths, maps, headers)
    }

    /// A model that is embedded in the program; messages call it `name`.
    ///
    /// # Errors
    /// [`GgufError`] where the bytes are no sound GGUF.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> Result<Self, GgufError> {
        let header = parse(bytes, name)?;
        Self::join(vec![PathBuf::from(name)], vec![FileMap::embedded(bytes)], vec![header])
    }

    fn join(paths: Vec<PathBuf>, maps: Vec<FileMap>, headers: Vec<Header>) -> Result<Self, GgufError> {
        let mut metadata = None;
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut by_name = HashMap::new();
        for (file_index, header) in headers.into_iter().enumerate() {
            for tensor in header.tensors {
                let index = tensors.len();
                if by_name.insert(tensor.name.clone(), index).is_some() {
                    let file = display(&paths[file_index]);
                    return Err(GgufError::DuplicateTensor { file, tensor: shown(&tensor.name), index: index as u64 });
                }
                tensors.push(TensorInfo { file_index, ..tensor });
            }
            metadata.get_or_insert(header.metadata);
        }
        let metadata = metadata.expect("a model has at least one file");
        Ok(Self { paths, maps, metadata, tensors, by_name })
    }

    /// The key-value pairs; those of the first shard for a split set.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, file by file in the order of their directories.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// The bytes of a tensor of this file.
    ///
    /// # Panics
    /// Where `tensor` is not one of [`tensors`](Self::tensors) of this model and lies outside its files.
    #[must_use]
    pub fn tensor_data(&self, tensor: &TensorInfo) -> &[u8] {
        let within = "a tensor of this model lies inside its file";
        let start = usize::try_from(tensor.offset).expect(within);
        let length = usize::try_from(tensor.bytes).expect(within);
        self.maps[tensor.file_index].as_slice().get(start..).and_then(|rest| rest.get(..length)).expect(within)
    }

    /// The files of the model, in order.
    #[must_use]
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The map of one file; `index` as in [`TensorInfo::file_index`].
    #[must_use]
    pub fn file_map(&self, index: usize) -> Option<&FileMap> {
        self.maps.get(index)
    }

    /// Bytes of all files together.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.maps.iter().map(FileMap::bytes).sum()
    }
}

/// Maps a regular, non-empty file. Others are refused before they are opened: opening a pipe would wait for its writer.
fn map_file(path: &Path) -> Result<FileMap, GgufError> {
    let status = fs::metadata(path).map_err(|source| io_error(path, "open it", source))?;
    if !status.is_file() {
        return Err(GgufError::NotAFile { file: display(path) });
    }
    if status.len() == 0 {
        return Err(GgufError::Empty { file: display(path) });
    }
    FileMap::open(path).map_err(|source| io_error(path, "map it into memory", source))
}
