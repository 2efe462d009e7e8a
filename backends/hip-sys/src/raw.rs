//! Types and constants of the C interface, under the names it gives them.
//!
//! Owns nothing. Enumerations are integers here: a newer runtime may return a value that this list lacks. Values are those of
//! `hip/hip_runtime_api.h`.
#![allow(non_camel_case_types, non_upper_case_globals, reason = "the names are the C interface's own")]

use std::ffi::{c_int, c_uint, c_void};

/// What nearly every function returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct hipError_t(pub c_int);

/// Done, or queued.
pub const hipSuccess: hipError_t = hipError_t(0);
/// No room, on the device or in pinned memory.
pub const hipErrorOutOfMemory: hipError_t = hipError_t(2);
/// No device that this runtime can use.
pub const hipErrorNoDevice: hipError_t = hipError_t(100);
/// The device number is out of range; `hipInit` of a machine without a device says this too.
pub const hipErrorInvalidDevice: hipError_t = hipError_t(101);
/// Work queued before an event is not done yet.
pub const hipErrorNotReady: hipError_t = hipError_t(600);
/// The call may not be made while its stream is captured.
pub const hipErrorStreamCaptureUnsupported: hipError_t = hipError_t(900);

/// Number of a device, from 0.
pub type hipDevice_t = c_int;

/// Declares the pointers behind which the runtime keeps its objects; null is the value of none.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)+) => {
        $($(#[$doc])* pub type $name = *mut c_void;)+
    };
}
handles! {
    /// A queue of work; null is the device's default stream.
    hipStream_t;
    /// A point in a stream.
    hipEvent_t;
    /// A captured graph.
    hipGraph_t;
    /// A node of a captured graph.
    hipGraphNode_t;
    /// A graph that can be launched.
    hipGraphExec_t;
    /// A loaded code object.
    hipModule_t;
    /// A kernel of a module.
    hipFunction_t;
}

/// What `hipDeviceGetAttribute` is asked for. Most are numbers, a few are strings that are longer than the integer they are asked by.
pub type hipDeviceAttribute_t = c_int;

/// Between which memories `hipMemcpyAsync` copies.
pub type hipMemcpyKind = c_uint;
/// From host to device.
pub const hipMemcpyHostToDevice: hipMemcpyKind = 1;
/// From device to host.
pub const hipMemcpyDeviceToHost: hipMemcpyKind = 2;
/// From device to device.
pub const hipMemcpyDeviceToDevice: hipMemcpyKind = 3;
/// The runtime tells by the addresses.
pub const hipMemcpyDefault: hipMemcpyKind = 4;

/// Which calls of which threads spoil a capture.
pub type hipStreamCaptureMode = c_uint;
/// Unsafe calls of any thread.
pub const hipStreamCaptureModeGlobal: hipStreamCaptureMode = 0;
/// Unsafe calls of the capturing thread.
pub const hipStreamCaptureModeThreadLocal: hipStreamCaptureMode = 1;
/// None.
pub const hipStreamCaptureModeRelaxed: hipStreamCaptureMode = 2;

/// Flag of `hipStreamCreateWithFlags`: the stream does not wait for the default stream.
pub const hipStreamNonBlocking: c_uint = 1;
/// Flag of `hipEventCreateWithFlags`: the event carries no time and costs less.
pub const hipEventDisableTiming: c_uint = 2;
/// Flag of `hipHostMalloc`: pinned for all devices.
pub const hipHostMallocPortable: c_uint = 1;
/// Flag of `hipHostMalloc`: mapped into the device's addresses.
pub const hipHostMallocMapped: c_uint = 2;
/// Flag of `hipHostRegister`: pinned for all devices.
pub const hipHostRegisterPortable: c_uint = 1;
/// Flag of `hipHostRegister`: mapped into the device's addresses.
pub const hipHostRegisterMapped: c_uint = 2;
