/* The few calls of NVIDIA's management library that the backend makes, for the devices that device.c plays: one other program holds what
 * FAKE_GPU_HELD_MIB says. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default"))) int

enum { SUCCESS = 0, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

struct memory {
    uint64_t total, free, used;
};
struct process {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
};

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 10) : otherwise;
}

static uint64_t mib(const char *name, long otherwise) {
    return (uint64_t)setting(name, otherwise) << 20;
}

API nvmlInit_v2(void) {
    return setting("FAKE_GPU_NVML", 1) ? SUCCESS : DRIVER_NOT_LOADED;
}

API nvmlShutdown(void) {
    return SUCCESS;
}

API nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "999.42");
    return SUCCESS;
}

API nvmlSystemGetProcessName(unsigned pid, char *text, unsigned length) {
    if (pid != 4711)
        return NOT_FOUND;
    snprintf(text, length, "hog");
    return SUCCESS;
}

/* The handle is the number of the device, from 1, with which its unique number ends. */
API nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    size_t length = strlen(uuid);
    if (length < 2)
        return NOT_FOUND;
    *device = (void *)(uintptr_t)(1 + strtoul(uuid + length - 2, NULL, 16));
    return SUCCESS;
}

API nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    (void)device;
    memory->total = mib("FAKE_GPU_TOTAL_MIB", 256);
    memory->used = mib("FAKE_GPU_HELD_MIB", 0);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

API nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *out) {
    (void)device;
    *out = 1;
    return SUCCESS;
}

API nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *out) {
    (void)device;
    *out = 8;
    return SUCCESS;
}

API nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *out) {
    (void)device;
    *out = 4;
    return SUCCESS;
}

API nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *out) {
    (void)device;
    *out = 16;
    return SUCCESS;
}

API nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *out) {
    (void)device;
    unsigned room = *count, there = setting("FAKE_GPU_HELD_MIB", 0) > 0;
    *count = there;
    if (room < there)
        return INSUFFICIENT_SIZE;
    if (there)
        *out = (struct process){.pid = 4711, .used = mib("FAKE_GPU_HELD_MIB", 0)};
    return SUCCESS;
}

API nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process *out) {
    (void)device;
    (void)out;
    *count = 0;
    return SUCCESS;
}
