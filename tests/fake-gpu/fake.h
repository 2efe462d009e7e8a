/* The state that the parts of the look-alike driver share. What it plays, and by which variables it fails, is told in README.md. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Numbers of cuda.h that the parts use. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    PRIMARY_CONTEXT_ACTIVE = 708,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    UNKNOWN = 999,
};

#define DEVICES_MAX 4
#define MIB ((size_t)1 << 20)

#define API __attribute__((visibility("default"))) int

/* A primary context: the memory and the streams of one device. */
struct context {
    int device;
    unsigned users;
    size_t used;
    struct stream *streams;
};

struct fake {
    bool started;
    /* The error after which every call fails with the same, as a real context's do; 0 while the device lives. */
    int lost;
    struct context contexts[DEVICES_MAX];
    /* Settings, see README.md. */
    int device_count, integrated_devices;
    size_t total, held;
    long create_fails_at, map_fails_at, malloc_fails_at, lost_at, lost_code, register_left, capture_allocates_at, free_times;
    const char *free_reading, *capture_fails;
    bool pageable, read_only_register, no_kernels, virtual_memory, reserve_fails;
};

extern struct fake fake;
extern _Thread_local struct context *current;
extern pthread_mutex_t fake_lock;

static inline void unlock_fake(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&fake_lock);
}

/* Holds the driver's one lock to the end of the function. */
#define LOCKED                                                  \
    __attribute__((cleanup(unlock_fake))) int locked_guard = 0; \
    (void)locked_guard;                                         \
    pthread_mutex_lock(&fake_lock)

/* Opens every call that needs a started driver. */
#define STARTED           \
    LOCKED;               \
    if (fake.lost)        \
        return fake.lost; \
    if (!fake.started)    \
        return NOT_INITIALIZED

/* Opens every call that works on the thread's current context. */
#define IN_CONTEXT                       \
    STARTED;                             \
    struct context *context = current;   \
    if (!context || context->users == 0) \
    return INVALID_CONTEXT

/* True at the call that a setting names, counted from 1; 0 names none. */
static inline bool strikes(long *countdown) {
    return *countdown > 0 && --*countdown == 0;
}

/* memory.c: the host bytes behind a range of device addresses, or NULL where it is not live. */
unsigned char *host_bytes(uint64_t address, size_t bytes, bool write);
/* Lets kernels read device addresses, or nobody. */
void open_memory(bool open);
bool margins_are_whole(void);

/* module.c: a kernel with its grid and a copy of its arguments, made by a launch. */
struct launch;
struct launch *hold_launch(struct launch *launch);
void let_go_of_launch(struct launch *launch);
/* False where the kernel met dead memory, wrote beside an allocation, or came apart at a barrier. */
bool run_launch(const struct launch *launch);

/* stream.c */
int run_all(struct context *context);
struct stream;
/* Queues or records a launch, whose one hold the stream takes over. */
int submit_launch(struct stream *stream, struct launch *launch);
/* Calls that a capture of this thread does not survive: it is invalid from then on. True where there was one. A thread may say that it
 * knows what it does (cuThreadExchangeStreamCaptureMode), which helps with some calls and not with all. */
bool ruins_capture(struct context *context);
bool ruins_capture_always(struct context *context);

#endif
