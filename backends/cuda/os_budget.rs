//! What the system lets this process use of a card.
//!
//! Windows shares a card's memory among programs by budgets, and moves what is beyond a program's own to RAM, without a word to the driver's
//! interface, whose free memory therefore promises too much. Linux has no such budgets. Nobody has run this on Windows yet.

use cudarc::driver::sys::CUdevice;

use crate::units::Bytes;

/// The budget of this process on a device; `None` where the system has none, or does not say.
pub fn os_budget(device: CUdevice) -> Option<Bytes> {
    system::os_budget(device)
}

#[cfg(not(windows))]
mod system {
    use super::{Bytes, CUdevice};

    pub fn os_budget(_device: CUdevice) -> Option<Bytes> {
        None
    }
}

#[cfg(windows)]
mod system {
    use std::ptr;

    use windows_sys::Wdk::Graphics::Direct3D::{
        D3DKMT_CLOSEADAPTER, D3DKMT_MEMORY_SEGMENT_GROUP_LOCAL, D3DKMT_OPENADAPTERFROMLUID, D3DKMT_QUERYVIDEOMEMORYINFO,
        D3DKMTCloseAdapter, D3DKMTOpenAdapterFromLuid, D3DKMTQueryVideoMemoryInfo,
    };
    use windows_sys::Win32::Foundation::LUID;

    use super::super::driver::call;
    use super::{Bytes, CUdevice};

    /// The system's handle of a card, closed on drop.
    struct Adapter(u32);

    impl Drop for Adapter {
        fn drop(&mut self) {
            let close = D3DKMT_CLOSEADAPTER { hAdapter: self.0 };
            // SAFETY: the handle was opened once and is closed once. An error leaves nothing to do.
            let _ = unsafe { D3DKMTCloseAdapter(&raw const close) };
        }
    }

    /// The number by which the system knows a device of the driver's.
    fn luid(device: CUdevice) -> Option<LUID> {
        let (mut bytes, mut nodes) = ([0_u8; 8], 0);
        // SAFETY: the driver is started, for it gave the device; the first place has the eight bytes of a number, the second is a number's.
        unsafe { call!(cuDeviceGetLuid(bytes.as_mut_ptr().cast(), &raw mut nodes, device)) }.ok()?;
        let [low, high] = [0, 4].map(|at| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Some(LUID { LowPart: u32::from_le_bytes(low), HighPart: i32::from_le_bytes(high) })
    }

    pub fn os_budget(device: CUdevice) -> Option<Bytes> {
        let mut opened = D3DKMT_OPENADAPTERFROMLUID { AdapterLuid: luid(device)?, hAdapter: 0 };
        // SAFETY: the argument is a record of the call's own; 0 and above is success.
        if unsafe { D3DKMTOpenAdapterFromLuid(&raw mut opened) } < 0 {
            return None;
        }
        let adapter = Adapter(opened.hAdapter);
        let mut memory = D3DKMT_QUERYVIDEOMEMORYINFO {
            // None: this process.
            hProcess: ptr::null_mut(),
            hAdapter: adapter.0,
            MemorySegmentGroup: D3DKMT_MEMORY_SEGMENT_GROUP_LOCAL,
            ..Default::default()
        };
        // SAFETY: the adapter is open; the argument is a record of the call's own.
        (unsafe { D3DKMTQueryVideoMemoryInfo(&raw mut memory) } >= 0 && memory.Budget > 0).then_some(Bytes(memory.Budget))
    }
}
