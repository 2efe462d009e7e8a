//! The server as a process: everything wired together, from the first moment to the last.
//!
//! ```text
//! bound port -> /health answers -> model opened -> worker started -> ready
//! signal -> no new connections, queue answered with 503 -> running request ends or is cancelled -> worker stopped -> gone, within 5 s
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;

use super::call::{ServeError, ServeOptions, ServedModel};
use super::dispatcher::{Dispatcher, Ended};
use super::error::ApiError;
use super::live::{Health, Live};
use super::queue::Queue;
use super::{App, app, listen};
use crate::worker::supervisor::Supervisor;

/// Time for a running request to end after the first signal.
const RUNNING_PATIENCE: Duration = Duration::from_millis(1500);
/// Time for a worker to save and end.
const WORKER_PATIENCE: Duration = Duration::from_millis(1500);
/// Time for connections to send what they have.
const CONNECTION_PATIENCE: Duration = Duration::from_millis(500);
/// Most threads for rendering and tokenising.
const BLOCKING_THREADS: usize = 8;

/// Serves until asked to stop. `open` reads the model's file, which may take a moment.
///
/// # Errors
/// Where there is nothing to serve, see [`ServeError`].
pub fn serve<E: Send + 'static>(
    options: ServeOptions,
    open: impl FnOnce() -> Result<ServedModel, E> + Send + 'static,
) -> Result<(), ServeError<E>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().max_blocking_threads(BLOCKING_THREADS).build()?;
    let done = runtime.block_on(run(options, open));
    // A template or a text at work in a thread is not waited for.
    runtime.shutdown_background();
    done
}

async fn run<E: Send + 'static>(
    options: ServeOptions,
    open: impl FnOnce() -> Result<ServedModel, E> + Send + 'static,
) -> Result<(), ServeError<E>> {
    let ServeOptions { listener, worker, access, queue_max, log, on_stoppable } = options;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (stop_sender, stop) = watch::channel(false);
    on_stoppable(Box::new(move || {
        // Nobody is left to stop where this fails.
        let _ = stop_sender.send(true);
    }));
    let (queue, live) = (Arc::new(Queue::new(queue_max)), Arc::new(Live::default()));
    let shared = Arc::new(App::new(Arc::clone(&queue), Arc::clone(&live), access));
    let connections = tokio::spawn(listen::serve(listener, app(Arc::clone(&shared)), stop.clone(), CONNECTION_PATIENCE + RUNNING_PATIENCE));

    let mut stopped = stop.clone();
    let opened = tokio::select! {
        opened = tokio::task::spawn_blocking(open) => opened.map_err(std::io::Error::other)?,
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
    };
    let model = opened.map_err(ServeError::Open)?;
    let _ = shared.model.set(Arc::new(model));

    let (sender, events) = unbounded_channel();
    let supervisor = Supervisor::start(worker, move |event| {
        // Nobody hears it once the server ends.
        let _ = sender.send(event);
    });
    let link = supervisor.sender();
    let dispatcher = Dispatcher { queue: Arc::clone(&queue), live: Arc::clone(&live), link, events, log };
    let mut dispatching = tokio::spawn(dispatcher.run(stop.clone()));
    let ended = tokio::select! {
        ended = &mut dispatching => Some(ended.map_err(std::io::Error::other)?),
        _ = stopped.wait_for(|stop| *stop) => None,
    };
    let failed = match ended {
        Some(Ended::StartFailed { exit_status, message }) => Some(ServeError::StartFailed { exit_status, message }),
        // Dead for good: say so to who asks until somebody stops it.
        Some(Ended::Stopped) => {
            let _ = stopped.wait_for(|stop| *stop).await;
            None
        }
        None => {
            live.change(|state| state.health = Health::Stopping);
            queue.close(&ApiError::unavailable("stopping", "the server is being stopped"));
            let _ = tokio::time::timeout(RUNNING_PATIENCE, &mut dispatching).await;
            None
        }
    };
    let stopping = tokio::task::spawn_blocking(move || supervisor.stop(WORKER_PATIENCE));
    let _ = stopping.await;
    if failed.is_none() {
        // The worker's last words reach those who wait for them.
        let _ = tokio::time::timeout(CONNECTION_PATIENCE, connections).await;
    }
    failed.map_or(Ok(()), Err)
}
