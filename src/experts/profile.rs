//! What a cache has learned of a model, kept in a file from one start to the next.
//!
//! ```text
//! "EBBHEAT\0" | version u32 | n_layer u32 | n_expert u32 | identity 16 bytes | uses f32 x n_layer x n_expert | checksum u64
//! ```
//! All little-endian. The identity is a hash of what makes the model's experts what they are, the checksum one of all bytes before it.
//! A file is replaced as a whole or not at all: it is written under another name in the same folder and then renamed. A profile that
//! cannot be used changes nothing: the cache then learns anew.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::gguf::TensorInfo;
use crate::model::Model;

const MAGIC: &[u8; 8] = b"EBBHEAT\0";
/// Version of the format that is written, and the only one that is read.
pub const PROFILE_VERSION: u32 = 1;
/// Bytes before the uses.
const HEADER_BYTES: usize = 8 + 4 + 4 + 4 + 16;
const CHECKSUM_BYTES: usize = 8;
/// Bytes of each router that belong to a model's identity.
const ROUTER_BYTES: usize = 256;
/// What a new start keeps of the uses learned by earlier ones, so that another kind of text is soon followed.
const KEPT_SHARE: f32 = 0.5;
/// Uses above this are none that decay could leave.
const USES_MAX: f32 = 1e9;

/// Why a profile cannot be used. None of these stops a start.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The path names a folder, a pipe or a device.
    #[error("it is no regular file")]
    NotAFile,
    /// The file ends early or goes on too long.
    #[error("it has {found} bytes instead of {wanted}")]
    Length {
        /// Bytes of the file; one more than wanted stands for any number above.
        found: usize,
        /// Bytes of a profile of this model.
        wanted: usize,
    },
    /// It begins with something else.
    #[error("it is no expert profile, so it is neither read nor overwritten")]
    NoProfile,
    /// Written by another version.
    #[error("its format has version {found}, this program reads version {PROFILE_VERSION}")]
    Version {
        /// The file's version.
        found: u32,
    },
    /// It was learned with another model.
    #[error("it was learned with another model")]
    OtherModel,
    /// Its bytes are not those that were written.
    #[error("it is damaged: its checksum does not fit")]
    Damaged,
}

/// The identity of a model: what its file says of itself, its tensors' names, types, places and bytes, and the beginning of every
/// router, which tells apart what was trained from one model. Not the file's path, nor all weights, which would take a minute to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelIdentity([u8; 16]);

impl ModelIdentity {
    /// The identity of an opened model.
    #[must_use]
    pub fn of(model: &Model) -> Self {
        let mut hash = Fnv128::default();
        for key in ["general.architecture", "general.name"] {
            hash.text(model.file.metadata().string_opt(key).ok().flatten().unwrap_or_default().as_bytes());
        }
        for TensorInfo { name, shape, quant_type, offset, bytes, file_index } in model.file.tensors() {
            hash.text(name.as_bytes());
            hash.text(quant_type.to_string().as_bytes());
            hash.number(shape.len() as u64);
            shape.iter().for_each(|&dimension| hash.number(dimension));
            hash.number(*file_index as u64);
            hash.number(*offset);
            hash.number(*bytes);
        }
        for layer in &model.weights.layers {
            let router = model.file.tensor(&model.weights.dense[layer.router].tensor.name);
            let data = router.map_or(&[][..], |router| model.file.tensor_data(router));
            hash.text(&data[..data.len().min(ROUTER_BYTES)]);
        }
        Self(hash.0.to_le_bytes())
    }
}

/// Where a profile lies and what it belongs to.
#[derive(Clone, Debug)]
pub struct ProfileFile {
    path: PathBuf,
    identity: ModelIdentity,
    n_layer: u32,
    n_expert: u32,
}

impl ProfileFile {
    /// The profile at `path` of a model.
    #[must_use]
    pub fn new(path: &Path, model: &Model) -> Self {
        let (n_layer, n_expert) = (model.shape.n_layer, model.shape.n_expert);
        Self { path: path.to_owned(), identity: ModelIdentity::of(model), n_layer, n_expert }
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn n_routed(&self) -> usize {
        self.n_layer as usize * self.n_expert as usize
    }

    fn bytes(&self) -> usize {
        HEADER_BYTES + self.n_routed() * 4 + CHECKSUM_BYTES
    }

    /// Uses of each expert, layer by layer, as far as a new start goes by them; `None` where there is no file yet.
    ///
    /// # Errors
    /// Why the file cannot be used.
    pub fn load(&self) -> Result<Option<Vec<f32>>, ProfileError> {
        // Asked before opening: a pipe would be waited for.
        match fs::metadata(&self.path) {
            Ok(metadata) if !metadata.is_file() => return Err(ProfileError::NotAFile),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let mut bytes = Vec::new();
        File::open(&self.path)?.take(self.bytes() as u64 + 1).read_to_end(&mut bytes)?;
        self.decode(&bytes).map(Some)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Vec<f32>, ProfileError> {
        let fields = bytes.get(..HEADER_BYTES);
        let Some(fields) = fields else { return Err(ProfileError::Length { found: bytes.len(), wanted: self.bytes() }) };
        if &fields[..8] != MAGIC {
            return Err(ProfileError::NoProfile);
        }
        let number = |at: usize| u32::from_le_bytes(fields[at..at + 4].try_into().expect("four bytes"));
        if number(8) != PROFILE_VERSION {
            return Err(ProfileError::Version { found: number(8) });
        }
        if (number(12), number(16)) != (self.n_layer, self.n_expert) || fields[20..] != self.identity.0 {
            return Err(ProfileError::OtherModel);
        }
        if bytes.len() != self.bytes() {
            return Err(ProfileError::Length { found: bytes.len(), wanted: self.bytes() });
        }
        let (checked, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
        if fnv64(checked).to_le_bytes() != *checksum {
            return Err(ProfileError::Damaged);
        }
        let uses = checked[HEADER_BYTES..].as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
        let sound = |uses: f32| if (0.0..=USES_MAX).contains(&uses) { Ok(uses * KEPT_SHARE) } else { Err(ProfileError::Damaged) };
        uses.map(sound).collect()
    }

    fn encode(&self, uses: &[f32]) -> Vec<u8> {
        assert_eq!(uses.len(), self.n_routed(), "a profile has a number for each expert");
        let mut bytes = Vec::with_capacity(self.bytes());
        bytes.extend(MAGIC);
        for number in [PROFILE_VERSION, self.n_layer, self.n_expert] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.identity.0);
        uses.iter().for_each(|uses| bytes.extend(uses.to_le_bytes()));
        bytes.extend(fnv64(&bytes).to_le_bytes());
        bytes
    }

    /// Writes the uses of each expert, layer by layer. Whoever reads meanwhile finds the old file or the new one.
    ///
    /// # Errors
    /// [`ProfileError::NotAFile`] and [`ProfileError::NoProfile`] where the path names something that must not be replaced, such as a
    /// model; the system's. The old file stays then.
    pub fn save(&self, uses: &[f32]) -> Result<(), ProfileError> {
        // Through a link, so that the file is replaced and not the link.
        let target = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        if fs::metadata(&target).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(ProfileError::NotAFile);
        }
        if !may_be_replaced(&target)? {
            return Err(ProfileError::NoProfile);
        }
        let name = target.file_name().ok_or(ProfileError::NotAFile)?;
        let mut temporary_name = std::ffi::OsString::from(".");
        temporary_name.push(name);
        temporary_name.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(temporary_name);
        let written = write_new(&temporary, &self.encode(uses)).and_then(|()| fs::rename(&temporary, &target));
        if let Err(error) = written {
            // Where it was never made there is nothing to remove.
            let _ = fs::remove_file(&temporary);
            return Err(error.into());
        }
        // The new name is on the disk once the folder is. A system that cannot do that for folders has its own order.
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

/// Whether a file is absent, empty, or a profile, sound or not: anything else somebody needs.
fn may_be_replaced(path: &Path) -> io::Result<bool> {
    let mut start = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(MAGIC.len() as u64).read_to_end(&mut start)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    Ok(MAGIC.starts_with(&start))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // What a killed process of the same number has left.
    let _ = fs::remove_file(path);
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// FNV-1a of 64 bits. A change of one byte always changes it, since every step can be undone.
fn fnv64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// FNV-1a of 128 bits over fields; texts carry their length, so that no two lists of fields are one run of bytes.
struct Fnv128(u128);

impl Default for Fnv128 {
    fn default() -> Self {
        Self(0x6C62_272E_07BB_0142_62B8_2175_6295_C58D)
    }
}

impl Fnv128 {
    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013B);
        }
    }

    fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        self.number(text.len() as u64);
        self.bytes(text);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what was saved is what is loaded, and nothing else is taken for it. Method: a profile of a few experts, and every way in
    //! which a file can be wrong.
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ebbtide-profile-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).expect("the temporary folder can be written");
            Self(path)
        }

        fn profile(&self) -> ProfileFile {
            ProfileFile { path: self.0.join("heat"), identity: ModelIdentity([7; 16]), n_layer: 2, n_expert: 3 }
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).expect("a folder");
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const USES: [f32; 6] = [0.0, 1.0, 2.5, 4000.0, 1e-30, 8.0];

    #[test]
    fn half_of_what_was_saved_is_loaded_and_nothing_else_is_left_behind() {
        let folder = Folder::new("round");
        let profile = folder.profile();
        assert_eq!(profile.load().expect("no file is no fault"), None);
        profile.save(&[9.0; 6]).expect("the folder can be written");
        profile.save(&USES).expect("a file can be replaced");
        assert_eq!(profile.load().expect("sound"), Some(USES.map(|uses| uses / 2.0).to_vec()));
        assert_eq!(folder.names(), ["heat"]);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let profile = Folder::new("bits").profile();
        let sound = profile.encode(&USES);
        assert!(profile.decode(&sound).is_ok());
        for at in 0..sound.len() {
            for bit in 0..8 {
                let mut flipped = sound.clone();
                flipped[at] ^= 1 << bit;
                assert!(profile.decode(&flipped).is_err(), "bit {bit} of byte {at}");
            }
            assert!(profile.decode(&sound[..at]).is_err(), "cut to {at} bytes");
        }
        let longer = [sound.as_slice(), &[0]].concat();
        assert!(matches!(profile.decode(&longer), Err(ProfileError::Length { .. })));
    }

    #[test]
    fn a_file_that_is_something_else_is_never_overwritten() {
        let folder = Folder::new("something-else");
        let profile = folder.profile();
        let model = b"GGUF and twelve gigabytes of weights";
        fs::write(profile.path(), model).expect("a scratch file");
        assert!(matches!(profile.load(), Err(ProfileError::Length { .. } | ProfileError::NoProfile)));
        assert!(matches!(profile.save(&USES), Err(ProfileError::NoProfile)));
        assert_eq!(fs::read(profile.path()).expect("it is there"), model);
        // A profile that was cut is ours to replace.
        fs::write(profile.path(), &MAGIC[..5]).expect("a scratch file");
        profile.save(&USES).expect("saved");
        assert!(profile.load().expect("sound").is_some());
    }

    #[test]
    fn each_fault_is_told_apart() {
        let profile = Folder::new("faults").profile();
        let told = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = profile.encode(&USES);
            change(&mut bytes);
            profile.decode(&bytes).expect_err("a fault").to_string()
        };
        assert_eq!(told(&|bytes| bytes.clear()), "it has 0 bytes instead of 68");
        assert_eq!(told(&|bytes| bytes.truncate(67)), "it has 67 bytes instead of 68");
        assert_eq!(told(&|bytes| bytes[0] = b'G'), "it is no expert profile, so it is neither read nor overwritten");
        assert_eq!(told(&|bytes| bytes[8] = 2), "its format has version 2, this program reads version 1");
        assert_eq!(told(&|bytes| bytes[30] ^= 1), "it was learned with another model");
        assert_eq!(told(&|bytes| bytes[40] ^= 1), "it is damaged: its checksum does not fit");
        // A file that was written with numbers that are no uses.
        for nonsense in [f32::NAN, -1.0, f32::INFINITY, 2e9] {
            let bytes = profile.encode(&[nonsense; 6]);
            assert!(matches!(profile.decode(&bytes), Err(ProfileError::Damaged)), "{nonsense}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_neither_read_nor_replaced() {
        let folder = Folder::new("kinds");
        let mut profile = folder.profile();
        fs::create_dir(&profile.path).expect("a folder in it");
        assert!(matches!(profile.load(), Err(ProfileError::NotAFile)));
        assert!(matches!(profile.save(&USES), Err(ProfileError::NotAFile)));
        assert!(profile.path.is_dir());
        profile.path = folder.0.join("absent").join("heat");
        assert!(matches!(profile.load(), Ok(None)));
        assert!(matches!(profile.save(&USES), Err(ProfileError::Io(_))));
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link_to_the_new_profile() {
        let folder = Folder::new("link");
        let (profile, real) = (folder.profile(), folder.0.join("real"));
        fs::write(&real, MAGIC).expect("the beginning of a profile");
        std::os::unix::fs::symlink(&real, &profile.path).expect("a link");
        profile.save(&USES).expect("written through the link");
        assert!(fs::symlink_metadata(&profile.path).expect("there").file_type().is_symlink());
        assert!(ProfileFile { path: real, ..profile }.load().expect("sound").is_some());
    }
}
