//! The functions of the table as methods that return a `Result`.
//!
//! Leaves validity of pointers and handles to the caller, as the C interface does.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::error::HipError;
use crate::raw::{
    hipDevice_t, hipDeviceAttribute_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t, hipGraphNode_t, hipMemcpyKind,
    hipModule_t, hipStream_t, hipStreamCaptureMode, hipSuccess,
};
use crate::table::{Functions, with_functions};

macro_rules! declare_methods {
    ($($(#[$doc:meta])* $name:ident => $method:ident($($argument:ident: $type:ty),* $(,)?);)+) => {
        #[allow(clippy::too_many_arguments, reason = "as many as the C functions have")]
        impl Functions {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// Anything but `hipSuccess`, an earlier failure of queued work included.
                ///
                /// # Safety
                /// Pointers are valid for what the function reads and writes, queued work included; handles are of this runtime
                /// and alive.
                pub unsafe fn $method(&self $(, $argument: $type)*) -> Result<(), HipError> {
                    // SAFETY: the table's functions have these signatures; the caller vouches for the arguments.
                    self.check(stringify!($name), unsafe { (self.$name)($($argument),*) })
                }
            )+
        }
    };
}
with_functions!(declare_methods);

impl Functions {
    fn check(&self, call: &'static str, code: hipError_t) -> Result<(), HipError> {
        if code == hipSuccess {
            return Ok(());
        }
        // SAFETY: both functions take any number and return a static string or null.
        let (name, text) = unsafe { (static_text((self.hipGetErrorName)(code)), static_text((self.hipGetErrorString)(code))) };
        Err(HipError { call, code, name, text })
    }
}

/// # Safety
/// `text` is null or a string that ends in a zero byte and lives.
unsafe fn static_text(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
