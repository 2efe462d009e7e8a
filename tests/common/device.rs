//! A backend with a stream and the few steps that every test of a backend repeats.

use ebbtide::backend::op::Op;
use ebbtide::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction, PinnedMemory};
use ebbtide::units::Bytes;

/// A device under test.
pub struct Rig<B: Backend> {
    pub backend: B,
    pub stream: B::Stream,
}

impl<B: Backend> Rig<B> {
    pub fn new(backend: B) -> Self {
        let stream = backend.create_stream().expect("a stream");
        Self { backend, stream }
    }

    /// Device memory of undefined contents.
    pub fn buffer(&self, bytes: usize) -> B::Buffer {
        self.backend.malloc(Bytes::from(bytes), "a test").expect("device memory")
    }

    /// Pinned memory that holds `data`.
    pub fn pinned(&self, data: &[u8]) -> B::Pinned {
        let pinned = self.backend.alloc_pinned(Bytes::from(data.len()), "a test").expect("pinned memory");
        pinned.write(0, data);
        pinned
    }

    /// Overwrites device memory from `dst` on, and waits.
    pub fn put(&self, dst: Addr, data: &[u8]) {
        let staging = self.pinned(data);
        let copy = Copy { dst, src: staging.range().start, bytes: Bytes::from(data.len()), direction: Direction::ToDevice };
        self.backend.copy(&self.stream, copy).expect("a copy");
        self.backend.synchronise(&self.stream).expect("the copy is done");
    }

    /// Device memory that holds `data`.
    pub fn upload(&self, data: &[u8]) -> B::Buffer {
        let buffer = self.buffer(data.len());
        self.put(start(&buffer), data);
        buffer
    }

    pub fn upload_f32(&self, data: &[f32]) -> B::Buffer {
        self.upload(&bytes_of(data))
    }

    pub fn upload_i32(&self, data: &[i32]) -> B::Buffer {
        self.upload(&data.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// What a range holds once the stream's work is done.
    pub fn download(&self, range: AddrRange) -> Vec<u8> {
        let landing = self.pinned(&vec![0; range.bytes.as_usize()]);
        let copy = Copy { dst: landing.range().start, src: range.start, bytes: range.bytes, direction: Direction::ToHost };
        self.backend.copy(&self.stream, copy).expect("a copy");
        self.backend.synchronise(&self.stream).expect("the work before the copy is done");
        let mut data = vec![0; range.bytes.as_usize()];
        landing.read(0, &mut data);
        data
    }

    pub fn download_f32(&self, memory: &impl DeviceMemory) -> Vec<f32> {
        self.download(memory.range()).as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    pub fn download_i32(&self, memory: &impl DeviceMemory) -> Vec<i32> {
        self.download(memory.range()).as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }

    /// What the device reads in registered host memory.
    pub fn read_registered(&self, registered: &B::Registered, offset: usize, bytes: usize) -> Vec<u8> {
        let buffer = self.buffer(bytes);
        let src = start(registered).offset(Bytes::from(offset));
        let copy = Copy { dst: start(&buffer), src, bytes: Bytes::from(bytes), direction: Direction::ToDevice };
        self.backend.copy(&self.stream, copy).expect("a copy");
        self.download(buffer.range())
    }

    /// Launches and waits: an error of either.
    pub fn run(&self, op: &Op) -> Result<(), BackendError> {
        self.backend.launch(&self.stream, op)?;
        self.backend.synchronise(&self.stream)
    }
}

/// The first address of a memory.
pub fn start(memory: &impl DeviceMemory) -> Addr {
    memory.range().start
}

/// Floats as the device stores them.
pub fn bytes_of(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// `bytes` bytes of a memory, from `offset` on.
pub fn part(memory: &impl DeviceMemory, offset: u64, bytes: u64) -> AddrRange {
    AddrRange { start: start(memory).offset(Bytes(offset)), bytes: Bytes(bytes) }
}
