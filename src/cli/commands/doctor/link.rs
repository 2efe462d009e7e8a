//! Page-locked memory and the link, measured: the two that decide how fast experts reach the card.

use std::time::Instant;

use serde::Serialize;

use super::{Check, Verdict};
use crate::backend::{Backend, BackendError, Copy, DeviceMemory, Direction};
use crate::units::Bytes;

/// Bytes of a measured copy, where the card has four times as much.
const COPY_BYTES: Bytes = Bytes::mib(256);
const COPY_BYTES_MIN: Bytes = Bytes::mib(1);
/// Copies each way, of which the fastest counts: a link wakes up with the first.
const COPIES: u32 = 4;
/// Slower than PCIe 3 with four lanes: a card in the wrong slot, or a laptop that saves power.
const SLOW_BYTES_PER_S: f64 = 3e9;

/// What was measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LinkSpeed {
    /// Of each copy.
    copy_bytes: Bytes,
    to_device_bytes_per_s: f64,
    to_host_bytes_per_s: f64,
    /// Locking memory, zeroing included.
    pin_bytes_per_s: f64,
}

/// Locks memory and copies it both ways.
pub fn check<B: Backend>(backend: &B) -> (Vec<Check>, Option<LinkSpeed>) {
    match measured(backend) {
        Ok(speed) => {
            let gb = |bytes_per_s: f64| bytes_per_s / 1e9;
            let pinning = format!("{} locked at {:.1} GB/s", speed.copy_bytes, gb(speed.pin_bytes_per_s));
            let link = format!("{:.1} GB/s to the card, {:.1} back", gb(speed.to_device_bytes_per_s), gb(speed.to_host_bytes_per_s));
            let link = match speed.to_device_bytes_per_s < SLOW_BYTES_PER_S {
                true => Check::new("link", Verdict::Note, link)
                    .way_out("experts cross this link: put the card into a slot with 16 lanes, and a laptop on its charger"),
                false => Check::new("link", Verdict::Fine, link),
            };
            (vec![Check::new("pinning", Verdict::Fine, pinning), link], Some(speed))
        }
        Err(error) => {
            let way_out = "page-locked memory, and a little VRAM, must be there: end other programs, raise the limit of the container";
            (vec![Check::new("pinning", Verdict::Problem, error.to_string()).way_out(way_out)], None)
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "speeds for people to read")]
fn measured<B: Backend>(backend: &B) -> Result<LinkSpeed, BackendError> {
    let free = backend.memory_info()?.free.unwrap_or(COPY_BYTES_MIN);
    let copy_bytes = COPY_BYTES.min(Bytes(free.0 / 4)).max(COPY_BYTES_MIN);
    let began = Instant::now();
    let pinned = backend.alloc_pinned(copy_bytes, "measuring the link")?;
    let pin_s = began.elapsed().as_secs_f64();
    let buffer = backend.malloc(copy_bytes, "measuring the link")?;
    let stream = backend.create_stream()?;
    let (before, after) = (backend.create_event()?, backend.create_event()?);
    let (host, device) = (pinned.range().start, buffer.range().start);
    let fastest = |dst, src, direction| -> Result<f64, BackendError> {
        let mut least = f64::INFINITY;
        for _ in 0..COPIES {
            backend.record(&stream, &before)?;
            backend.copy(&stream, Copy { dst, src, bytes: copy_bytes, direction })?;
            backend.record(&stream, &after)?;
            backend.synchronise(&stream)?;
            least = least.min(backend.elapsed_s(&before, &after)?);
        }
        Ok(copy_bytes.0 as f64 / least.max(1e-9))
    };
    Ok(LinkSpeed {
        copy_bytes,
        to_device_bytes_per_s: fastest(device, host, Direction::ToDevice)?,
        to_host_bytes_per_s: fastest(host, device, Direction::ToHost)?,
        pin_bytes_per_s: copy_bytes.0 as f64 / pin_s.max(1e-9),
    })
}
