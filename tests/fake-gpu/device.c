/* Starting the driver, its devices, their primary contexts, and what error numbers are called. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake fake;
_Thread_local struct context *current;
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 10) : otherwise;
}

static void read_settings(void) {
    fake.device_count = (int)setting("FAKE_GPU_DEVICES", 1);
    if (fake.device_count > DEVICES_MAX)
        fake.device_count = DEVICES_MAX;
    fake.integrated_devices = (int)setting("FAKE_GPU_INTEGRATED", 0);
    fake.total = (size_t)setting("FAKE_GPU_TOTAL_MIB", 256) * MIB;
    fake.held = (size_t)setting("FAKE_GPU_HELD_MIB", 0) * MIB;
    fake.malloc_fails_at = setting("FAKE_GPU_MALLOC_FAILS_AT", 0);
    fake.virtual_memory = setting("FAKE_GPU_VIRTUAL_MEMORY", 1) != 0;
    fake.reserve_fails = setting("FAKE_GPU_RESERVE_FAILS", 0) != 0;
    fake.create_fails_at = setting("FAKE_GPU_CREATE_FAILS_AT", 0);
    fake.map_fails_at = setting("FAKE_GPU_MAP_FAILS_AT", 0);
    fake.lost_at = setting("FAKE_GPU_LOST_AT", 0);
    fake.lost_code = setting("FAKE_GPU_LOST_CODE", ILLEGAL_ADDRESS);
    fake.register_left = setting("FAKE_GPU_REGISTER_BYTES", -1);
    fake.capture_allocates_at = setting("FAKE_GPU_CAPTURE_ALLOCATES_AT", 0);
    fake.capture_fails = getenv("FAKE_GPU_CAPTURE_FAILS");
    fake.free_reading = getenv("FAKE_GPU_FREE");
    fake.free_times = setting("FAKE_GPU_FREE_TIMES", -1);
    fake.no_kernels = setting("FAKE_GPU_NO_KERNELS", 0) != 0;
    fake.pageable = setting("FAKE_GPU_PAGEABLE", 0) != 0;
    fake.read_only_register = setting("FAKE_GPU_READ_ONLY_REGISTER", 1) != 0;
}

API cuInit(unsigned flags) {
    LOCKED;
    if (flags)
        return INVALID_VALUE;
    if (fake.started)
        return fake.lost;
    read_settings();
    long refusal = setting("FAKE_GPU_INIT", OK);
    if (refusal)
        return (int)refusal;
    if (fake.device_count == 0)
        return NO_DEVICE;
    fake.started = true;
    return OK;
}

API cuDriverGetVersion(int *version) {
    *version = (int)setting("FAKE_GPU_VERSION", 12040);
    return OK;
}

API cuDeviceGetCount(int *count) {
    STARTED;
    *count = fake.device_count;
    return OK;
}

API cuDeviceGet(int *device, int ordinal) {
    STARTED;
    if (ordinal < 0 || ordinal >= fake.device_count)
        return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API cuDeviceGetName(char *name, int length, int device) {
    STARTED;
    if (length < 1 || device < 0 || device >= fake.device_count)
        return INVALID_VALUE;
    snprintf(name, (size_t)length, "Look-alike %d", device);
    return OK;
}

API cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    STARTED;
    for (int at = 0; at < 16; at++)
        uuid[at] = (unsigned char)(0xA0 + at);
    uuid[15] = (unsigned char)device;
    return OK;
}

API cuDeviceTotalMem_v2(size_t *bytes, int device) {
    STARTED;
    (void)device;
    *bytes = fake.total;
    return OK;
}

API cuDeviceGetAttribute(int *value, int attribute, int device) {
    STARTED;
    switch (attribute) {
    case 18: *value = device < fake.integrated_devices; return OK;
    case 16: *value = 8; return OK;
    case 39: *value = 1024; return OK;
    case 40: *value = 2; return OK;
    case 75: *value = 8; return OK;
    case 76: *value = 6; return OK;
    case 88: *value = fake.pageable; return OK;
    case 99: *value = 1; return OK;
    case 102: *value = fake.virtual_memory; return OK;
    case 113: *value = fake.read_only_register; return OK;
    default: return INVALID_VALUE;
    }
}

API cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    STARTED;
    (void)flags;
    return device < 0 || device >= fake.device_count ? INVALID_DEVICE : OK;
}

API cuDevicePrimaryCtxRetain(struct context **context, int device) {
    STARTED;
    if (device < 0 || device >= fake.device_count)
        return INVALID_DEVICE;
    *context = &fake.contexts[device];
    (*context)->device = device;
    (*context)->users++;
    return OK;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    STARTED;
    if (fake.contexts[device].users == 0)
        return INVALID_CONTEXT;
    fake.contexts[device].users--;
    return OK;
}

API cuCtxSetCurrent(struct context *context) {
    STARTED;
    if (context && context->users == 0)
        return INVALID_CONTEXT;
    current = context;
    return OK;
}

API cuCtxSynchronize(void) {
    IN_CONTEXT;
    if (ruins_capture_always(context))
        return CAPTURE_UNSUPPORTED;
    return run_all(context);
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int told(int code, const char **out, bool text) {
    for (size_t at = 0; at < sizeof errors / sizeof *errors; at++)
        if (errors[at].code == code) {
            *out = text ? errors[at].text : errors[at].name;
            return OK;
        }
    *out = NULL;
    return INVALID_VALUE;
}

API cuGetErrorName(int code, const char **name) {
    return told(code, name, false);
}

API cuGetErrorString(int code, const char **text) {
    return told(code, text, true);
}
