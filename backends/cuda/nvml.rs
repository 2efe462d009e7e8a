//! NVIDIA's management library, loaded at run time where it is there: who holds a card's memory, how the card is connected, and what is
//! free without a context. Nothing depends on it: without it the answer to each question is that nobody says.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

use crate::backend::survey::{CardUser, LinkFacts};
use crate::units::Bytes;

/// What the library is called, the system's own name first.
const NAMES: &[&str] = if cfg!(windows) { &["nvml.dll"] } else { &["libnvidia-ml.so.1", "libnvidia-ml.so"] };

const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;
/// What stands for "not available" in a count of bytes.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Programs of one card that are listed at most.
const USERS_MAX: c_uint = 1024;

type Device = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type OfDevice<T> = unsafe extern "C" fn(Device, *mut T) -> c_int;
type ListProcesses = unsafe extern "C" fn(Device, *mut c_uint, *mut Process) -> c_int;

/// The started library; stopped on drop.
pub struct Nvml {
    library: Library,
}

/// One card, as long as the library is started.
pub struct NvmlCard<'a> {
    nvml: &'a Nvml,
    device: Device,
}

impl Nvml {
    /// Loads and starts the library.
    ///
    /// # Errors
    /// Why it has no answers, in words.
    pub fn start() -> Result<Self, String> {
        // SAFETY: loads NVIDIA's library by its own names and nothing else; its initialisers may run in any process.
        let library = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let library = library.ok_or_else(|| format!("NVIDIA's management library ({}) cannot be loaded", NAMES[0]))?;
        let nvml = Self { library };
        let init: unsafe extern "C" fn() -> c_int = nvml.function(b"nvmlInit_v2\0").ok_or("NVIDIA's management library is too old")?;
        // SAFETY: the call takes nothing and may be made in any process.
        match unsafe { init() } {
            SUCCESS => Ok(nvml),
            code => Err(format!("NVIDIA's management library does not start (nvmlInit_v2 answers {code})")),
        }
    }

    /// A function of the library, whose type the caller takes from NVIDIA's header.
    fn function<F: Copy>(&self, name: &[u8]) -> Option<F> {
        // SAFETY: every name is called with the type that the header declares for it; the pointer is used while the library is loaded.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    /// The driver's version, such as `580.159.04`.
    #[must_use]
    pub fn driver_release(&self) -> Option<String> {
        let ask: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int = self.function(b"nvmlSystemGetDriverVersion\0")?;
        // SAFETY: the buffer has as many bytes as the call is told.
        text(|start, bytes| unsafe { ask(start, bytes) })
    }

    /// The card of a unique number, as `nvidia-smi -L` prints it.
    #[must_use]
    pub fn card(&self, uuid: &str) -> Option<NvmlCard<'_>> {
        let find: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int = self.function(b"nvmlDeviceGetHandleByUUID\0")?;
        let uuid = CString::new(uuid).ok()?;
        let mut device = ptr::null_mut();
        // SAFETY: the text ends in a zero; `device` is a place for one handle.
        (unsafe { find(uuid.as_ptr(), &raw mut device) } == SUCCESS).then_some(NvmlCard { nvml: self, device })
    }

    fn process_name(&self, pid: c_uint) -> Option<String> {
        let ask: unsafe extern "C" fn(c_uint, *mut c_char, c_uint) -> c_int = self.function(b"nvmlSystemGetProcessName\0")?;
        // SAFETY: the buffer has as many bytes as the call is told.
        text(|start, bytes| unsafe { ask(pid, start, bytes) }).filter(|name| !name.is_empty())
    }
}

/// A text that a call writes into a buffer.
fn text(ask: impl FnOnce(*mut c_char, c_uint) -> c_int) -> Option<String> {
    let mut buffer = [0_u8; 256];
    let answered = ask(buffer.as_mut_ptr().cast(), 255) == SUCCESS;
    let end = buffer.iter().position(|&byte| byte == 0)?;
    answered.then(|| String::from_utf8_lossy(&buffer[..end]).into_owned())
}

impl NvmlCard<'_> {
    fn ask<T: Default>(&self, name: &[u8]) -> Option<T> {
        let ask: OfDevice<T> = self.nvml.function(name)?;
        let mut value = T::default();
        // SAFETY: the handle is the started library's; `value` is a place for one value of the type that the header declares.
        (unsafe { ask(self.device, &raw mut value) } == SUCCESS).then_some(value)
    }

    /// Free memory.
    #[must_use]
    pub fn free_bytes(&self) -> Option<Bytes> {
        let memory: Memory = self.ask(b"nvmlDeviceGetMemoryInfo\0")?;
        (memory.free <= memory.total).then_some(Bytes(memory.free))
    }

    /// How the card is connected.
    #[must_use]
    pub fn link(&self) -> Option<LinkFacts> {
        Some(LinkFacts {
            generation: self.ask(b"nvmlDeviceGetCurrPcieLinkGeneration\0")?,
            lanes: self.ask(b"nvmlDeviceGetCurrPcieLinkWidth\0")?,
            generation_max: self.ask(b"nvmlDeviceGetMaxPcieLinkGeneration\0")?,
            lanes_max: self.ask(b"nvmlDeviceGetMaxPcieLinkWidth\0")?,
        })
    }

    /// Programs that compute or draw on the card, by process number.
    #[must_use]
    pub fn users(&self) -> Option<Vec<CardUser>> {
        let mut users = self.listed(b"nvmlDeviceGetComputeRunningProcesses_v3\0")?;
        users.extend(self.listed(b"nvmlDeviceGetGraphicsRunningProcesses_v3\0").unwrap_or_default());
        users.sort_by_key(|user| user.pid);
        users.dedup_by_key(|user| user.pid);
        Some(users)
    }

    fn listed(&self, name: &[u8]) -> Option<Vec<CardUser>> {
        let list: ListProcesses = self.nvml.function(name)?;
        let mut processes = Vec::new();
        let mut count: c_uint = 0;
        // Programs may come between the two calls.
        for _ in 0..4 {
            processes.resize(count as usize, Process::default());
            // SAFETY: the list has `count` places; the call writes no more of them, and the number there is.
            match unsafe { list(self.device, &raw mut count, processes.as_mut_ptr()) } {
                SUCCESS => break,
                INSUFFICIENT_SIZE if count <= USERS_MAX => {}
                _ => return None,
            }
        }
        processes.truncate(count as usize);
        let user = |process: &Process| CardUser {
            pid: process.pid,
            name: self.nvml.process_name(process.pid),
            bytes: (process.used != NOT_AVAILABLE).then_some(Bytes(process.used)),
        };
        Some(processes.iter().map(user).collect())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Some(stop) = self.function::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0") {
            // SAFETY: started once by `start`; no handle of it outlives this value.
            let _ = unsafe { stop() };
        }
    }
}
