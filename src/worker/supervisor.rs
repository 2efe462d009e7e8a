//! Keeps a worker alive from the server's side.
//!
//! ```text
//! start -> Hello .. Ready -> (requests) -> Died -> start again, at once
//!                                          three deaths within a minute -> GaveUp, for good
//!          StartFailed -> GaveUp where it never was ready; it says why
//! ```
//! A worker is waited for before the next one starts, so what it held of the device is free by then. Its standard input is closed when
//! this side ends in whatever way, and a worker whose input ends exits by itself.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::protocol::{FromWorker, PROTOCOL_VERSION, ToWorker, read_frame, write_frame};

/// Deaths within [`DEATHS_WITHIN`] after which no worker is started any more.
pub const DEATHS_MAX: usize = 3;
/// See [`DEATHS_MAX`].
pub const DEATHS_WITHIN: Duration = Duration::from_secs(60);
/// How often a process that is to end is looked at.
const POLL: Duration = Duration::from_millis(10);

/// How a worker is started.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables that it shall have, or not have where `None`.
    pub environment: Vec<(OsString, Option<OsString>)>,
}

/// What happens to workers.
#[derive(Debug)]
pub enum WorkerEvent {
    /// One has started.
    Started {
        /// Its process.
        pid: u32,
    },
    /// It said something.
    Message(FromWorker),
    /// It is gone; what was asked of it is lost. Another one is started.
    Died {
        /// How it ended.
        reason: String,
    },
    /// It is gone, and no other will come.
    GaveUp {
        /// Why.
        reason: String,
        /// Exit code that a failed start would have, where the first start failed.
        exit_status: Option<u8>,
    },
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    to_worker: Option<Sender<ToWorker>>,
    child: Option<Child>,
    stopping: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can fail runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A worker and the thread that watches it.
pub struct Supervisor {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

/// Hands messages to whatever worker runs. Cheap to clone.
#[derive(Clone)]
pub struct WorkerSender {
    shared: Arc<Shared>,
}

impl WorkerSender {
    /// Sends; false where no worker runs. A worker that dies before it reads shows as [`WorkerEvent::Died`].
    pub fn send(&self, message: ToWorker) -> bool {
        self.shared.lock().to_worker.as_ref().is_some_and(|sender| sender.send(message).is_ok())
    }
}

impl Supervisor {
    /// Starts a worker and watches it. `on_event` is called from a thread of its own, in order.
    pub fn start(command: WorkerCommand, on_event: impl FnMut(WorkerEvent) + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let watched = Arc::clone(&shared);
        let watcher = Some(std::thread::spawn(move || Watcher { shared: watched, command, on_event, deaths: VecDeque::new() }.watch()));
        Self { shared, watcher }
    }

    /// The way to the worker.
    #[must_use]
    pub fn sender(&self) -> WorkerSender {
        WorkerSender { shared: Arc::clone(&self.shared) }
    }

    /// Lets the worker end by itself for at most `patience`, then ends it. Returns once it is gone.
    pub fn stop(mut self, patience: Duration) {
        let asked = Instant::now();
        {
            let mut state = self.shared.lock();
            state.stopping = true;
            if let Some(sender) = state.to_worker.take() {
                // Behind this, its input ends.
                let _ = sender.send(ToWorker::Stop);
            }
        }
        let Some(watcher) = self.watcher.take() else { return };
        while !watcher.is_finished() {
            if asked.elapsed() >= patience
                && let Some(child) = &mut self.shared.lock().child
            {
                // It may be gone already.
                let _ = child.kill();
            }
            std::thread::sleep(POLL);
        }
        let _ = watcher.join();
    }
}

/// How one worker ended.
struct Ending {
    reason: String,
    was_ready: bool,
    /// It said that its start failed, or is none of ours: another one would fare no better.
    hopeless: Option<(String, Option<u8>)>,
}

struct Watcher<F> {
    shared: Arc<Shared>,
    command: WorkerCommand,
    on_event: F,
    deaths: VecDeque<Instant>,
}

impl<F: FnMut(WorkerEvent)> Watcher<F> {
    fn watch(mut self) {
        let mut ever_ready = false;
        loop {
            let Ending { reason, was_ready, hopeless } = self.run_one();
            if self.shared.lock().stopping {
                return;
            }
            ever_ready |= was_ready;
            if let Some((reason, exit_status)) = hopeless.filter(|_| !ever_ready) {
                return (self.on_event)(WorkerEvent::GaveUp { reason, exit_status });
            }
            if self.is_one_death_too_many() {
                let seconds = DEATHS_WITHIN.as_secs();
                let reason = format!("{reason}; that was the {DEATHS_MAX}rd end within {seconds} s, so none is started any more");
                return (self.on_event)(WorkerEvent::GaveUp { reason, exit_status: None });
            }
            (self.on_event)(WorkerEvent::Died { reason });
        }
    }

    fn is_one_death_too_many(&mut self) -> bool {
        self.deaths.push_back(Instant::now());
        self.deaths.retain(|death| death.elapsed() <= DEATHS_WITHIN);
        self.deaths.len() >= DEATHS_MAX
    }

    /// Starts a worker and passes on what it says, until it is gone.
    fn run_one(&mut self) -> Ending {
        let mut ending = Ending { reason: String::new(), was_ready: false, hopeless: None };
        let mut child = match self.spawn() {
            Ok(child) => child,
            Err(error) => {
                ending.reason = format!("the worker cannot be started ({}): {error}", self.command.program.display());
                return ending;
            }
        };
        let (pid, input, output) = (child.id(), child.stdin.take(), child.stdout.take());
        {
            let mut state = self.shared.lock();
            state.child = Some(child);
            if !state.stopping {
                state.to_worker = input.map(writer);
            }
        }
        (self.on_event)(WorkerEvent::Started { pid });
        let mut output = BufReader::new(output.expect("its output is a pipe of ours"));
        let fault = loop {
            match read_frame::<FromWorker>(&mut output) {
                Ok(Some(FromWorker::Hello(hello))) if hello.version != PROTOCOL_VERSION => {
                    let version = hello.version;
                    let reason = format!(
                        "the worker speaks version {version} of the protocol and the server {PROTOCOL_VERSION}: the program was replaced, restart the server"
                    );
                    ending.hopeless = Some((reason.clone(), None));
                    break Some(reason);
                }
                Ok(Some(message)) => {
                    ending.was_ready |= matches!(message, FromWorker::Ready(_));
                    if let FromWorker::StartFailed { exit_status, message } = &message {
                        ending.hopeless = Some((message.clone(), Some(*exit_status)));
                    }
                    (self.on_event)(WorkerEvent::Message(message));
                }
                Ok(None) => break None,
                Err(error) => break Some(error.to_string()),
            }
        };
        self.shared.lock().to_worker = None;
        let status = self.reap(fault.is_some());
        let ended = status.map_or_else(|| "in an unknown way".to_owned(), |status| format!("with {status}"));
        ending.reason = match (&ending.hopeless, fault) {
            (Some((reason, _)), _) => reason.clone(),
            (None, Some(fault)) => format!("the worker ended {ended} ({fault})"),
            (None, None) => format!("the worker ended {ended}"),
        };
        ending
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for (name, value) in &self.command.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        // A Ctrl-C at the terminal is for the server, which ends the worker in its own time.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.spawn()
    }

    /// Waits for the worker's end, or brings it about.
    fn reap(&self, kill: bool) -> Option<ExitStatus> {
        loop {
            let mut state = self.shared.lock();
            let child = state.child.as_mut()?;
            if kill {
                let _ = child.kill();
            }
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => {
                    state.child = None;
                    return Some(status);
                }
                Err(_) => {
                    state.child = None;
                    return None;
                }
            }
            drop(state);
            std::thread::sleep(POLL);
        }
    }
}

/// A thread that writes what it is handed: a pipe that is full must not stop who hands over.
fn writer(mut input: ChildStdin) -> Sender<ToWorker> {
    let (sender, messages) = channel();
    std::thread::spawn(move || {
        while let Ok(message) = messages.recv() {
            if write_frame(&mut input, &message).is_err() {
                return;
            }
        }
    });
    sender
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A worker that is a shell: `script` with a greeting of the given version before it.
    fn shell(version: u32, script: &str) -> WorkerCommand {
        let mut frame = Vec::new();
        let hello = FromWorker::Hello(super::super::protocol::Hello { version, pid: 1 });
        write_frame(&mut frame, &hello).expect("a vector takes all");
        let octal: String = frame.iter().map(|byte| format!("\\{byte:03o}")).collect();
        let arguments = ["-c".to_owned(), format!("printf '{octal}'; {script}")].map(OsString::from).to_vec();
        WorkerCommand { program: "/bin/sh".into(), arguments, environment: Vec::new() }
    }

    fn events_of(command: WorkerCommand) -> (Supervisor, std::sync::mpsc::Receiver<WorkerEvent>) {
        let (sender, events) = channel();
        (Supervisor::start(command, move |event| drop(sender.send(event))), events)
    }

    const WAIT: Duration = Duration::from_secs(20);

    #[test]
    fn three_deaths_end_it() {
        let (supervisor, events) = events_of(shell(PROTOCOL_VERSION, "exit 7"));
        let mut deaths = 0;
        loop {
            match events.recv_timeout(WAIT).expect("an event") {
                WorkerEvent::Died { reason } => {
                    deaths += 1;
                    assert!(reason.contains('7'), "{reason}");
                }
                WorkerEvent::GaveUp { reason, exit_status } => {
                    assert!(reason.contains("none is started") && exit_status.is_none(), "{reason}");
                    break;
                }
                WorkerEvent::Started { .. } | WorkerEvent::Message(_) => {}
            }
        }
        assert_eq!(deaths, DEATHS_MAX - 1);
        assert!(!supervisor.sender().send(ToWorker::Stop), "nobody is there to take it");
    }

    #[test]
    fn another_version_is_not_spoken_to() {
        let (_supervisor, events) = events_of(shell(PROTOCOL_VERSION + 1, "sleep 60"));
        let gave_up = events.iter().find_map(|event| match event {
            WorkerEvent::GaveUp { reason, .. } => Some(reason),
            _ => None,
        });
        assert!(gave_up.is_some_and(|reason| reason.contains("restart the server")));
    }

    #[test]
    fn a_worker_that_does_not_stop_is_ended() {
        let (supervisor, events) = events_of(shell(PROTOCOL_VERSION, "trap '' TERM; while :; do sleep 1; done"));
        assert!(matches!(events.recv_timeout(WAIT), Ok(WorkerEvent::Started { .. })));
        assert!(matches!(events.recv_timeout(WAIT), Ok(WorkerEvent::Message(FromWorker::Hello(_)))));
        let asked = Instant::now();
        supervisor.stop(Duration::from_millis(100));
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        assert!(events.try_iter().all(|event| !matches!(event, WorkerEvent::Died { .. })), "it was no death");
    }

    #[test]
    fn its_input_ends_when_it_is_to_stop() {
        // Reads to the end of its input, so it exits only when that comes.
        let (supervisor, events) = events_of(shell(PROTOCOL_VERSION, "cat >/dev/null"));
        assert!(matches!(events.recv_timeout(WAIT), Ok(WorkerEvent::Started { .. })));
        let asked = Instant::now();
        supervisor.stop(Duration::from_secs(60));
        assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    }
}
