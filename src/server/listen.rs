//! The accept loop: limits that hold before a request is one, and a graceful end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

/// Most connections at a time; more wait to be accepted.
pub const CONNECTIONS_MAX: usize = 1024;
/// Time for the headers of a request, and for a connection without one.
pub const HEADER_TIME_MAX: Duration = Duration::from_secs(60);
/// Past these bounds the connection is closed without an answer of ours; `auth` refuses far earlier.
const HARD_HEADER_BYTES_MAX: usize = 256 << 10;
const HARD_HEADERS_MAX: usize = 1000;
/// Wait after the system refused to accept: it is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Who sent a request.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Serves until `stop` becomes true; then open connections may end what they do. Returns the number of those that still do.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>, patience: Duration) -> usize {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let slot = tokio::select! {
            slot = Arc::clone(&slots).acquire_owned() => slot.expect("the semaphore is never closed"),
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (router, stop) = (router.clone().layer(Extension(Peer(peer))), stop.clone());
        tokio::spawn(async move {
            serve_one(stream, router, stop).await;
            drop(slot);
        });
    }
    drop(listener);
    let all = u32::try_from(CONNECTIONS_MAX).expect("a small number");
    let _ = tokio::time::timeout(patience, slots.acquire_many(all)).await;
    CONNECTIONS_MAX - slots.available_permits()
}

async fn serve_one(stream: TcpStream, router: Router, mut stop: watch::Receiver<bool>) {
    // Small events must not wait for one another.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME_MAX)
        .max_buf_size(HARD_HEADER_BYTES_MAX)
        .max_headers(HARD_HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    // What goes wrong with one connection is told to nobody but its client.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
