/* Modules and kernels. An image is a shared library of this machine that was compiled from kernels-cuda/ with look_alike.h; its functions
 * run when their turn in a stream comes. */
#include "fake.h"

#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef bool (*run_grid)(void (*kernel)(const void *), const void *args, const unsigned grid[3], const unsigned block[3]);

struct function {
    struct function *next;
    void (*kernel)(const void *args);
    run_grid run;
    size_t args_bytes;
    char name[];
};

struct module {
    void *library;
    struct function *functions;
};

struct launch {
    unsigned holders;
    const struct function *function;
    unsigned grid[3], block[3];
    _Alignas(16) unsigned char args[];
};

/* The length of an ELF file: its table of sections comes last. */
static size_t bytes_of_library(const unsigned char *image) {
    Elf64_Ehdr header;
    memcpy(&header, image, SELFMAG);
    if (memcmp(&header, ELFMAG, SELFMAG))
        return 0;
    memcpy(&header, image, sizeof header);
    return header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
}

API cuModuleLoadData(struct module **out, const unsigned char *image) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    if (fake.no_kernels)
        return NO_BINARY_FOR_GPU;
    size_t bytes = bytes_of_library(image);
    int file = bytes ? memfd_create("fake-gpu-image", 0) : -1;
    if (file < 0)
        return INVALID_IMAGE;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    void *library = write(file, image, bytes) == (ssize_t)bytes ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library)
        fprintf(stderr, "fake-gpu: %s\n", dlerror());
    close(file);
    if (!library)
        return INVALID_IMAGE;
    *out = calloc(1, sizeof **out);
    (*out)->library = library;
    return OK;
}

/* The library stays: queued work and graphs may still run its kernels, which a caller has to have waited for on a real device. */
API cuModuleUnload(struct module *module) {
    IN_CONTEXT;
    (void)module;
    return ruins_capture(context) ? CAPTURE_UNSUPPORTED : OK;
}

API cuModuleGetFunction(struct function **out, struct module *module, const char *name) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    char size_name[256];
    snprintf(size_name, sizeof size_name, "%s_args_bytes", name);
    void *kernel = dlsym(module->library, name);
    const size_t *args_bytes = dlsym(module->library, size_name);
    void *run = dlsym(module->library, "look_alike_run");
    if (!kernel || !args_bytes || !run)
        return NOT_FOUND;
    struct function *made = calloc(1, sizeof *made + strlen(name) + 1);
    made->next = module->functions;
    made->args_bytes = *args_bytes;
    /* As POSIX has it for dlsym: a pointer to an object holds one to a function. */
    *(void **)&made->kernel = kernel;
    *(void **)&made->run = run;
    strcpy(made->name, name);
    *out = module->functions = made;
    return OK;
}

/* A processor's threads have no local memory that a device would have to hold. */
API cuFuncGetAttribute(int *value, int attribute, struct function *function) {
    IN_CONTEXT;
    (void)context;
    const int local_bytes = 3;
    if (attribute != local_bytes || !function)
        return INVALID_VALUE;
    *value = 0;
    return OK;
}

API cuLaunchKernel(struct function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, struct stream *stream, void **arguments, void **extra) {
    IN_CONTEXT;
    (void)context;
    unsigned long long threads = (unsigned long long)block_x * block_y * block_z;
    bool fits = grid_x && grid_y && grid_z && grid_x <= 0x7fffffff && grid_y <= 65535 && grid_z <= 65535;
    if (!fits || threads == 0 || threads > 1024 || block_z > 64 || shared_bytes || arguments || !extra)
        return INVALID_VALUE;
    /* Pairs of a key and a value, as cuda.h has them: 1 the address of the arguments, 2 that of their length, 0 the end. */
    const void *args = NULL;
    size_t bytes = 0;
    for (void **at = extra; (uintptr_t)at[0] != 0; at += 2) {
        if ((uintptr_t)at[0] == 1)
            args = at[1];
        else if ((uintptr_t)at[0] == 2)
            bytes = *(size_t *)at[1];
        else
            return INVALID_VALUE;
    }
    if (!args || bytes != function->args_bytes || bytes > 4096) {
        fprintf(stderr, "fake-gpu: %s takes %zu bytes of arguments and was given %zu\n", function->name, function->args_bytes, bytes);
        return INVALID_VALUE;
    }
    struct launch *launch = aligned_alloc(16, (sizeof *launch + bytes + 15) / 16 * 16);
    launch->holders = 1;
    launch->function = function;
    memcpy(launch->grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof launch->grid);
    memcpy(launch->block, (unsigned[]){block_x, block_y, block_z}, sizeof launch->block);
    memcpy(launch->args, args, bytes);
    return submit_launch(stream, launch);
}

struct launch *hold_launch(struct launch *launch) {
    launch->holders++;
    return launch;
}

void let_go_of_launch(struct launch *launch) {
    if (launch && --launch->holders == 0)
        free(launch);
}

static sigjmp_buf beside_the_fault;

static void on_fault(int signal, siginfo_t *info, void *unused) {
    (void)signal;
    (void)unused;
    static char text[64];
    /* The address alone, as nothing else may be called here. */
    int length = snprintf(text, sizeof text, "fake-gpu: a kernel met dead memory at %p\n", info->si_addr);
    if (write(STDERR_FILENO, text, (size_t)length) < 0) {
    }
    siglongjmp(beside_the_fault, 1);
}

bool run_launch(const struct launch *launch) {
    struct sigaction met = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, before, before_bus;
    sigaction(SIGSEGV, &met, &before);
    sigaction(SIGBUS, &met, &before_bus);
    open_memory(true);
    volatile bool whole = false;
    if (!sigsetjmp(beside_the_fault, 1)) {
        whole = launch->function->run(launch->function->kernel, launch->args, launch->grid, launch->block);
        if (!whole)
            fprintf(stderr, "fake-gpu: threads of a block of %s ended while others waited for them\n", launch->function->name);
    }
    open_memory(false);
    sigaction(SIGSEGV, &before, NULL);
    sigaction(SIGBUS, &before_bus, NULL);
    if (whole && !margins_are_whole()) {
        fprintf(stderr, "fake-gpu: %s wrote beside an allocation\n", launch->function->name);
        return false;
    }
    return whole;
}
