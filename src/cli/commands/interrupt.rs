//! Ctrl-C and termination: the first stops the work at its next step, the second ends the program at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::exit::ExitStatus;

/// Set once the user asked to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from here on. Where no handler can be set, the system's default stays: the signal ends the program.
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let flag = Arc::clone(&interrupt.0);
        let set = ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::Relaxed) {
                std::process::exit(ExitStatus::Interrupted as i32);
            }
        });
        if let Err(error) = set {
            eprintln!("warning: signals end the program without closing words: {error}");
        }
        interrupt
    }

    /// True once asked to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// As an event's answer.
    pub fn control(&self) -> std::ops::ControlFlow<()> {
        if self.is_set() { std::ops::ControlFlow::Break(()) } else { std::ops::ControlFlow::Continue(()) }
    }
}
