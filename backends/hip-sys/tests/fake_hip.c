/* Stands in for HIP's runtime in tests: two devices, and a log of every call with its arguments as the C side sees them.
 * With -DWITHOUT_GRAPH_LAUNCH it lacks one function. */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef int error_t;
enum { SUCCESS = 0, INVALID_DEVICE = 101, NOT_READY = 600 };

static char calls[8192];

/* The calls since the last look, one a line. */
const char *fake_calls(void) {
    static char taken[sizeof calls];
    memcpy(taken, calls, sizeof calls);
    calls[0] = 0;
    return taken;
}

static error_t note(const char *format, ...) {
    size_t used = strlen(calls);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(calls + used, sizeof calls - used, format, arguments);
    va_end(arguments);
    strncat(calls, "\n", sizeof calls - strlen(calls) - 1);
    return SUCCESS;
}

static int absent(int device) { return device < 0 || device >= 2; }

const char *hipGetErrorName(error_t code) {
    return code == INVALID_DEVICE ? "hipErrorInvalidDevice" : code == NOT_READY ? "hipErrorNotReady" : NULL;
}
const char *hipGetErrorString(error_t code) { return code == INVALID_DEVICE ? "invalid device ordinal" : NULL; }

error_t hipInit(unsigned flags) { return note("hipInit %u", flags); }
error_t hipDriverGetVersion(int *version) { *version = 60342134; return SUCCESS; }
error_t hipRuntimeGetVersion(int *version) { *version = 60443484; return SUCCESS; }
error_t hipGetDeviceCount(int *count) { *count = 2; return SUCCESS; }
error_t hipSetDevice(int device) { return absent(device) ? INVALID_DEVICE : note("hipSetDevice %d", device); }
error_t hipDeviceGetName(char *name, int length, int device) {
    if (absent(device)) return INVALID_DEVICE;
    if (device == 0) {
        snprintf(name, length, "Fake card");
    } else { /* a name that is longer than there is room for, and not closed */
        memset(name, 'x', length);
    }
    return SUCCESS;
}
error_t hipDeviceGetAttribute(int *value, int attribute, int device) {
    if (absent(device)) return INVALID_DEVICE;
    *value = 1000 * device + attribute;
    return SUCCESS;
}
error_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = (size_t)5 << 30;
    *total_bytes = (size_t)8 << 30;
    return SUCCESS;
}
error_t hipGetLastError(void) { return note("hipGetLastError"); }
error_t hipDeviceSynchronize(void) { return note("hipDeviceSynchronize"); }

error_t hipMalloc(void **pointer, size_t bytes) { *pointer = (void *)0x100; return note("hipMalloc %zu", bytes); }
error_t hipFree(void *pointer) { return note("hipFree %p", pointer); }
error_t hipHostMalloc(void **pointer, size_t bytes, unsigned flags) { *pointer = (void *)0x200; return note("hipHostMalloc %zu %u", bytes, flags); }
error_t hipHostFree(void *pointer) { return note("hipHostFree %p", pointer); }
error_t hipHostRegister(void *pointer, size_t bytes, unsigned flags) { return note("hipHostRegister %p %zu %u", pointer, bytes, flags); }
error_t hipHostUnregister(void *pointer) { return note("hipHostUnregister %p", pointer); }
error_t hipHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = (void *)0x300; return note("hipHostGetDevicePointer %p %u", host, flags); }
error_t hipMemcpyAsync(void *to, const void *from, size_t bytes, unsigned kind, void *stream) { return note("hipMemcpyAsync %p %p %zu %u %p", to, from, bytes, kind, stream); }
error_t hipMemsetAsync(void *pointer, int value, size_t bytes, void *stream) { return note("hipMemsetAsync %p %d %zu %p", pointer, value, bytes, stream); }

error_t hipStreamCreateWithFlags(void **stream, unsigned flags) { *stream = (void *)0x400; return note("hipStreamCreateWithFlags %u", flags); }
error_t hipStreamDestroy(void *stream) { return note("hipStreamDestroy %p", stream); }
error_t hipStreamSynchronize(void *stream) { return note("hipStreamSynchronize %p", stream); }
error_t hipStreamWaitEvent(void *stream, void *event, unsigned flags) { return note("hipStreamWaitEvent %p %p %u", stream, event, flags); }
error_t hipEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)0x500; return note("hipEventCreateWithFlags %u", flags); }
error_t hipEventDestroy(void *event) { return note("hipEventDestroy %p", event); }
error_t hipEventRecord(void *event, void *stream) { return note("hipEventRecord %p %p", event, stream); }
error_t hipEventQuery(void *event) { note("hipEventQuery %p", event); return NOT_READY; }
error_t hipEventSynchronize(void *event) { return note("hipEventSynchronize %p", event); }
error_t hipEventElapsedTime(float *milliseconds, void *start, void *stop) { *milliseconds = 1.5f; return note("hipEventElapsedTime %p %p", start, stop); }

error_t hipStreamBeginCapture(void *stream, unsigned mode) { return note("hipStreamBeginCapture %p %u", stream, mode); }
error_t hipStreamEndCapture(void *stream, void **graph) { *graph = (void *)0x600; return note("hipStreamEndCapture %p", stream); }
error_t hipGraphInstantiate(void **executable, void *graph, void **node, char *log, size_t log_bytes) {
    *executable = (void *)0x700;
    *node = (void *)0x710;
    snprintf(log, log_bytes, "fine");
    return note("hipGraphInstantiate %p %zu", graph, log_bytes);
}
#ifndef WITHOUT_GRAPH_LAUNCH
error_t hipGraphLaunch(void *executable, void *stream) { return note("hipGraphLaunch %p %p", executable, stream); }
#endif
error_t hipGraphDestroy(void *graph) { return note("hipGraphDestroy %p", graph); }
error_t hipGraphExecDestroy(void *executable) { return note("hipGraphExecDestroy %p", executable); }

error_t hipModuleLoadData(void **module, const void *image) { *module = (void *)0x800; return note("hipModuleLoadData %s", (const char *)image); }
error_t hipModuleUnload(void *module) { return note("hipModuleUnload %p", module); }
error_t hipModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)0x900; return note("hipModuleGetFunction %p %s", module, name); }
error_t hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                              void *stream, void **arguments, void **extra) {
    return note("hipModuleLaunchKernel %p %u %u %u %u %u %u %u %p %d %p", function, gx, gy, gz, bx, by, bz, shared, stream,
                *(int *)arguments[0], (void *)extra);
}
