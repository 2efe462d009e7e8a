//! The list of functions, and the table of their addresses in a loaded library.
//!
//! [`with_functions`] is the one place where a function is written down; the table here and the methods of `result.rs` come from it.
//! Signatures are those of `hip/hip_runtime_api.h`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::raw::{
    hipDevice_t, hipDeviceAttribute_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t, hipGraphNode_t, hipMemcpyKind,
    hipModule_t, hipStream_t, hipStreamCaptureMode,
};

/// Calls the macro `$declare` with every function that returns a `hipError_t`: its C name, its name as a method, its arguments.
macro_rules! with_functions {
    ($declare:ident) => {
        $declare! {
            /// Starts the runtime; `flags` is 0.
            hipInit => init(flags: c_uint);
            /// Version of the driver below the runtime.
            hipDriverGetVersion => driver_get_version(version: *mut c_int);
            /// Version of the runtime: 10,000,000 x major + 100,000 x minor + patch.
            hipRuntimeGetVersion => runtime_get_version(version: *mut c_int);
            /// Devices that the runtime can use.
            hipGetDeviceCount => get_device_count(count: *mut c_int);
            /// Makes `device` the one that later calls of this thread mean.
            hipSetDevice => set_device(device: c_int);
            /// Writes the device's name, cut to `length` bytes, a zero byte among them.
            hipDeviceGetName => device_get_name(name: *mut c_char, length: c_int, device: hipDevice_t);
            /// One number about a device.
            hipDeviceGetAttribute => device_get_attribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int);
            /// Free and total bytes of the thread's device.
            hipMemGetInfo => mem_get_info(free_bytes: *mut usize, total_bytes: *mut usize);
            /// The last error of this thread, which it clears; an error is what the method returns.
            hipGetLastError => get_last_error();
            /// Waits until the thread's device has nothing to do.
            hipDeviceSynchronize => device_synchronize();

            /// Takes device memory.
            hipMalloc => malloc(pointer: *mut *mut c_void, bytes: usize);
            /// Gives device memory back; waits for the device.
            hipFree => free(pointer: *mut c_void);
            /// Takes pinned host memory.
            hipHostMalloc => host_malloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
            /// Gives pinned host memory back.
            hipHostFree => host_free(pointer: *mut c_void);
            /// Pins host memory that the caller has.
            hipHostRegister => host_register(pointer: *mut c_void, bytes: usize, flags: c_uint);
            /// Ends what `hipHostRegister` began.
            hipHostUnregister => host_unregister(pointer: *mut c_void);
            /// The device's address of mapped host memory; `flags` is 0.
            hipHostGetDevicePointer => host_get_device_pointer(device: *mut *mut c_void, host: *mut c_void, flags: c_uint);
            /// Queues a copy.
            hipMemcpyAsync => memcpy_async(
                to: *mut c_void, from: *const c_void, bytes: usize, kind: hipMemcpyKind, stream: hipStream_t
            );
            /// Queues the filling of bytes with the low byte of `value`.
            hipMemsetAsync => memset_async(pointer: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t);

            /// Makes a stream.
            hipStreamCreateWithFlags => stream_create_with_flags(stream: *mut hipStream_t, flags: c_uint);
            /// Ends a stream.
            hipStreamDestroy => stream_destroy(stream: hipStream_t);
            /// Waits until a stream has nothing to do.
            hipStreamSynchronize => stream_synchronize(stream: hipStream_t);
            /// Makes later work of a stream wait for an event; `flags` is 0.
            hipStreamWaitEvent => stream_wait_event(stream: hipStream_t, event: hipEvent_t, flags: c_uint);
            /// Makes an event.
            hipEventCreateWithFlags => event_create_with_flags(event: *mut hipEvent_t, flags: c_uint);
            /// Ends an event.
            hipEventDestroy => event_destroy(event: hipEvent_t);
            /// Puts an event behind the work that a stream has now.
            hipEventRecord => event_record(event: hipEvent_t, stream: hipStream_t);
            /// Asks for an event without waiting; `hipErrorNotReady` where it is still to come.
            hipEventQuery => event_query(event: hipEvent_t);
            /// Waits for an event.
            hipEventSynchronize => event_synchronize(event: hipEvent_t);
            /// Milliseconds between two events that carry time.
            hipEventElapsedTime => event_elapsed_time(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t);

            /// Begins to record a stream's work instead of doing it.
            hipStreamBeginCapture => stream_begin_capture(stream: hipStream_t, mode: hipStreamCaptureMode);
            /// Ends a recording; the graph is null where it failed.
            hipStreamEndCapture => stream_end_capture(stream: hipStream_t, graph: *mut hipGraph_t);
            /// Makes a graph ready to launch.
            hipGraphInstantiate => graph_instantiate(
                executable: *mut hipGraphExec_t, graph: hipGraph_t, error_node: *mut hipGraphNode_t, log: *mut c_char, log_bytes: usize
            );
            /// Queues a graph.
            hipGraphLaunch => graph_launch(executable: hipGraphExec_t, stream: hipStream_t);
            /// Ends a graph; what was made ready from it stays.
            hipGraphDestroy => graph_destroy(graph: hipGraph_t);
            /// Ends a graph that was made ready.
            hipGraphExecDestroy => graph_exec_destroy(executable: hipGraphExec_t);

            /// Loads a code object from memory.
            hipModuleLoadData => module_load_data(module: *mut hipModule_t, image: *const c_void);
            /// Ends a module and its kernels.
            hipModuleUnload => module_unload(module: hipModule_t);
            /// Finds a kernel by name.
            hipModuleGetFunction => module_get_function(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char);
            /// Queues a kernel: blocks of the grid, threads of a block, bytes of dynamic shared memory, pointers to the arguments.
            hipModuleLaunchKernel => module_launch_kernel(
                function: hipFunction_t, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
                block_z: c_uint, shared_bytes: c_uint, stream: hipStream_t, arguments: *mut *mut c_void, extra: *mut *mut c_void
            );
        }
    };
}
pub(crate) use with_functions;

macro_rules! declare_table {
    ($($(#[$doc:meta])* $name:ident => $method:ident($($argument:ident: $type:ty),* $(,)?);)+) => {
        /// Addresses of the runtime's functions, all of them present.
        ///
        /// The fields are the functions as they are in C. The methods of nearly the same names return a `Result` and are what
        /// a caller wants.
        #[allow(non_snake_case, reason = "the names are the C interface's own")]
        #[derive(Clone, Copy, Debug)]
        pub struct Functions {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($type),*) -> hipError_t,)+
            /// The symbol of an error, a static string.
            pub hipGetErrorName: unsafe extern "C" fn(hipError_t) -> *const c_char,
            /// A few words about an error, a static string.
            pub hipGetErrorString: unsafe extern "C" fn(hipError_t) -> *const c_char,
        }

        impl Functions {
            /// Names of all functions of the table.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name),)+ "hipGetErrorName", "hipGetErrorString"];

            /// Looks up every function; the name of the first that is missing is the error.
            ///
            /// # Safety
            /// The library is HIP's runtime, or one whose functions of these names have HIP's signatures, and stays loaded
            /// as long as the table is used.
            pub(crate) unsafe fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller vouches that the functions of these names have the fields' signatures.
                    $($name: unsafe { address(library, stringify!($name)) }?,)+
                    // SAFETY: as above.
                    hipGetErrorName: unsafe { address(library, "hipGetErrorName") }?,
                    // SAFETY: as above.
                    hipGetErrorString: unsafe { address(library, "hipGetErrorString") }?,
                })
            }
        }
    };
}
with_functions!(declare_table);

/// One function of the library; its name is the error.
///
/// # Safety
/// `F` is the function's type.
unsafe fn address<F: Copy>(library: &Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: the caller vouches for the type.
    unsafe { library.get::<F>(name) }.map(|symbol| *symbol).map_err(|_| name)
}
