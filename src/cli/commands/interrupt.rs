//! Ctrl-C and termination: the first stops the work at its next step, the second ends the program at once.
//!
//! Some steps ask nobody: a huge text on its way through the tokenizer, a pipe that nobody writes to. Where the work does not stop
//! within [`GRACE`], the program ends all the same; text so far is on stdout already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::cli::exit::ExitStatus;
use crate::cli::say;

/// Time for the work to stop by itself after the first signal.
const GRACE: Duration = Duration::from_secs(4);

/// Set once the user asked to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from here on. Where no handler can be set, the system's default stays: the signal ends the program.
    pub fn listen() -> Self {
        Self::listen_and(|| ())
    }

    /// As [`Interrupt::listen`], with something to do at the first signal; it must not wait for anything.
    pub fn listen_and(at_first: impl Fn() + Send + 'static) -> Self {
        let interrupt = Self::default();
        let flag = Arc::clone(&interrupt.0);
        let set = ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::Relaxed) {
                end_now();
            }
            at_first();
            // Not in this handler, which has to hear the second signal. Without a thread, that one remains.
            let _ = std::thread::Builder::new().spawn(|| {
                std::thread::sleep(GRACE);
                end_now();
            });
        });
        if let Err(error) = set {
            say::line(format_args!("warning: signals end the program without closing words: {error}"));
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

fn end_now() -> ! {
    std::process::exit(ExitStatus::Interrupted as i32)
}
