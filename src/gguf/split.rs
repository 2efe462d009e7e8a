//! Split sets: which files belong together, and the checks that they do.
//!
//! A set of three is `NAME-00001-of-00003.gguf` to `NAME-00003-of-00003.gguf`. Names count from 1; the key `split.no` inside counts from
//! 0; `split.tensors.count` is the total of the set, not of the shard. All metadata but `split.*` is in the first shard.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::GgufError;
use super::reader::Header;

const SHARD_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";

/// The parts of a shard's file name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ShardName {
    /// What stands before `-00001-of-00003.gguf`.
    prefix: String,
    /// From 1.
    number: u32,
    count: u32,
}

impl ShardName {
    /// Takes `NAME-ddddd-of-ddddd.gguf` apart; `None` for other names.
    fn parse(file_name: &str) -> Option<Self> {
        let stem = file_name.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| (text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten();
        Some(Self { prefix: prefix.to_owned(), number: digits(number)?, count: digits(count)? })
    }

    fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

/// All files of the model at `path`, in order: `path` is a file, any shard, or a folder that holds one model.
pub(super) fn files_of_model(path: &Path) -> Result<Vec<PathBuf>, GgufError> {
    let status = fs::metadata(path).map_err(|source| io_error(path, "open it", source))?;
    if status.is_dir() {
        let file = the_model_in(path)?;
        return files_of_set(&file);
    }
    files_of_set(path)
}

/// A path as errors show it.
pub(super) fn display(path: &Path) -> String {
    path.display().to_string()
}

pub(super) fn io_error(path: &Path, action: &'static str, source: std::io::Error) -> GgufError {
    GgufError::Io { file: display(path), action, source }
}

/// One file of the only model in a folder. Files of a set with a number outside the set are extra and refused.
fn the_model_in(folder: &Path) -> Result<PathBuf, GgufError> {
    let listing = fs::read_dir(folder).map_err(|source| io_error(folder, "list the folder", source))?;
    let mut models = BTreeSet::new();
    let mut last_file = None;
    for entry in listing {
        let path = entry.map_err(|source| io_error(folder, "list the folder", source))?.path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        models.insert(match ShardName::parse(&name) {
            Some(shard) => {
                check_number(&path, &shard)?;
                shard.sibling(1)
            }
            None => name,
        });
        last_file = Some(path);
    }
    let mut names = models.iter();
    match (names.next(), names.next(), last_file) {
        (Some(_), None, Some(file)) => Ok(file),
        (Some(first), Some(second), _) => {
            Err(GgufError::SeveralModels { file: display(folder), count: models.len(), first: first.clone(), second: second.clone() })
        }
        _ => Err(GgufError::EmptyFolder { file: display(folder) }),
    }
}

fn check_number(path: &Path, shard: &ShardName) -> Result<(), GgufError> {
    if (1..=shard.count).contains(&shard.number) {
        return Ok(());
    }
    Err(GgufError::ShardNumber { file: display(path), number: shard.number, count: shard.count })
}

/// `path` alone, or the whole set that its name says it belongs to. The first shard that is not there is named.
fn files_of_set(path: &Path) -> Result<Vec<PathBuf>, GgufError> {
    let Some(shard) = path.file_name().and_then(|name| name.to_str()).and_then(ShardName::parse) else {
        return Ok(vec![path.to_owned()]);
    };
    check_number(path, &shard)?;
    (1..=shard.count)
        .map(|number| {
            let sibling = path.with_file_name(shard.sibling(number));
            let missing = || GgufError::MissingShard { file: display(&sibling), number, count: shard.count };
            if sibling.exists() { Ok(sibling) } else { Err(missing()) }
        })
        .collect()
}

/// Checks that the headers of a set, in order, say what their names say and add up to the set's tensor count.
pub(super) fn check_set(headers: &[Header]) -> Result<(), GgufError> {
    match headers {
        [single] => check_single(single),
        _ => {
            for (index, header) in headers.iter().enumerate() {
                check_shard(header, index as u64, headers.len() as u64)?;
            }
            let total = headers.iter().map(|header| header.tensors.len() as u64).sum();
            headers.iter().try_for_each(|header| check_key(header, TENSORS_KEY, total))
        }
    }
}

/// A lone file must not be a shard of a larger set under another name.
fn check_single(header: &Header) -> Result<(), GgufError> {
    let count = header.metadata.u64_opt(COUNT_KEY)?.unwrap_or(1);
    if count <= 1 {
        return Ok(());
    }
    let number = header.metadata.u64(SHARD_KEY)?.saturating_add(1);
    Err(GgufError::RenamedShard { file: header.metadata.file().to_owned(), number, count })
}

fn check_shard(header: &Header, index: u64, count: u64) -> Result<(), GgufError> {
    check_key(header, COUNT_KEY, count)?;
    check_key(header, SHARD_KEY, index)
}

fn check_key(header: &Header, key: &'static str, wanted: u64) -> Result<(), GgufError> {
    let found = header.metadata.u64(key)?;
    if found == wanted {
        return Ok(());
    }
    Err(GgufError::ShardMismatch { file: header.metadata.file().to_owned(), key, found, wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_name_is_taken_apart_and_put_together() {
        let shard = ShardName::parse("my-of-model-00002-of-00003.gguf").unwrap();
        assert_eq!(shard, ShardName { prefix: "my-of-model".into(), number: 2, count: 3 });
        assert_eq!(shard.sibling(3), "my-of-model-00003-of-00003.gguf");
    }

    #[test]
    fn names_that_only_look_like_shards_are_whole_models() {
        for name in ["model.gguf", "model-2-of-3.gguf", "model-00002-of-0003.gguf", "model-+0002-of-00003.gguf", "a-00001-of-00002.bin"] {
            assert_eq!(ShardName::parse(name), None, "{name}");
        }
    }
}
