//! What the expert cache has learned, from one start to the next: loaded before the slots are filled, saved while and after a request.
//!
//! A file that cannot be used or written costs one line and nothing else. While tokens are written, a thread of its own waits for the
//! disk, and no more often than once a minute.

use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Engine;
use crate::backend::Backend;
use crate::experts::{Experts, ProfileError, ProfileFile};
use crate::model::Model;

/// Windows between two looks at the clock.
const WINDOWS_PER_LOOK: u32 = 64;
/// Least time between two savings of one request.
const PAUSE: Duration = Duration::from_secs(60);

/// The profile of one engine.
pub struct Learned {
    file: ProfileFile,
    windows: u32,
    saved_at: Instant,
    saving: Option<JoinHandle<Result<(), ProfileError>>>,
}

impl Learned {
    /// Hands the profile at `path` to a cache that was not filled yet.
    pub fn load<B: Backend>(path: &Path, model: &Model, experts: &mut Experts<B>, notices: &mut Vec<String>) -> Self {
        let file = ProfileFile::new(path, model);
        match file.load() {
            Ok(Some(uses)) => experts.set_learned(&uses),
            Ok(None) => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                if folder.is_some_and(|folder| !folder.is_dir()) {
                    notices.push(format!("expert profile {}: its folder is not there, so nothing will be saved", path.display()));
                }
            }
            Err(error) => notices.push(format!("expert profile {} is not used: {error}", path.display())),
        }
        Self { file, windows: 0, saved_at: Instant::now(), saving: None }
    }

    /// To be called once a window; true where it is time to save.
    fn is_due(&mut self) -> bool {
        self.windows += 1;
        self.windows.is_multiple_of(WINDOWS_PER_LOOK) && self.saved_at.elapsed() >= PAUSE
    }

    fn start_saving(&mut self, uses: &[f32]) -> Result<(), ProfileError> {
        self.wait()?;
        self.saved_at = Instant::now();
        let (file, uses) = (self.file.clone(), uses.to_vec());
        self.saving = Some(std::thread::Builder::new().name("expert profile".to_owned()).spawn(move || file.save(&uses))?);
        Ok(())
    }

    /// Waits for a saving under way.
    fn wait(&mut self) -> Result<(), ProfileError> {
        match self.saving.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(saved)) => saved,
            Some(Err(_)) => panic!("saving an expert profile does not panic"),
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Saves what the cache has learned, where a profile was asked for, and waits for the disk. A failure becomes a notice.
    pub fn save_expert_profile(&mut self) {
        self.with_profile(|learned, uses| {
            // What an earlier saving met, this one meets, too.
            let _ = learned.wait();
            learned.saved_at = Instant::now();
            learned.file.save(uses)
        });
    }

    /// Starts to save after a window, where it is time.
    pub(super) fn save_now_and_then(&mut self) {
        self.with_profile(|learned, uses| if learned.is_due() { learned.start_saving(uses) } else { Ok(()) });
    }

    fn with_profile(&mut self, save: impl FnOnce(&mut Learned, &[f32]) -> Result<(), ProfileError>) {
        if let Some(learned) = &mut self.learned
            && let Err(error) = save(learned, self.experts.cache().learned())
        {
            self.notices.push(format!("expert profile {} is not saved: {error}", learned.file.path().display()));
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: long requests save now and then, off the path of windows. Method: the bundled model's profile, and a clock set back.
    use super::*;

    #[test]
    fn a_long_request_saves_once_a_minute_at_most_and_what_was_saved_is_there() {
        let model = Model::open(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf")).expect("the bundled model");
        let path = std::env::temp_dir().join(format!("ebbtide-learned-{}", std::process::id()));
        let file = ProfileFile::new(&path, &model);
        let mut learned = Learned { file: file.clone(), windows: 0, saved_at: Instant::now(), saving: None };
        assert!((0..1000).all(|_| !learned.is_due()), "less than a minute is over");
        let long_ago = |learned: &mut Learned| {
            learned.windows = 0;
            learned.saved_at = Instant::now().checked_sub(PAUSE).expect("the machine has been up for a minute");
        };
        long_ago(&mut learned);
        assert_eq!((0..WINDOWS_PER_LOOK).position(|_| learned.is_due()), Some(WINDOWS_PER_LOOK as usize - 1));
        let n_routed = model.shape.n_routed_experts() as usize;
        learned.start_saving(&vec![6.0; n_routed]).expect("a thread");
        assert!((0..1000).all(|_| !learned.is_due()), "it was saved just now");
        learned.wait().expect("the temporary folder can be written");
        assert_eq!(file.load().expect("sound"), Some(vec![3.0; n_routed]));
        // A folder in its place: told by the next call that looks.
        std::fs::remove_file(&path).expect("it is there");
        std::fs::create_dir(&path).expect("a folder");
        long_ago(&mut learned);
        learned.start_saving(&vec![1.0; n_routed]).expect("a thread");
        assert!(matches!(learned.wait(), Err(ProfileError::NotAFile)));
        assert!(learned.wait().is_ok(), "once");
        std::fs::remove_dir(&path).expect("a folder");
    }
}
