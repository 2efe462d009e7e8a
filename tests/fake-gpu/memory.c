/* Memory: a byte budget for the device, page-locked host memory beside it.
 *
 * A device address cannot be read by the processor, as on a real card, but for the time that a kernel runs; it is never given twice, and
 * what was freed is dead at once. Each allocation is a memory file that is mapped twice: at its device address, locked, and where the
 * driver reads and writes it. It ends where its last page does, as far as its alignment lets it, so that a kernel that goes on meets
 * pages that nothing lies in. Page-locked host memory has the same address on both sides. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum kind { DEVICE, MAPPED, PINNED, REGISTERED, REGISTERED_READ_ONLY };

struct allocation {
    struct allocation *next;
    struct context *context;
    enum kind kind;
    uint64_t address;
    size_t bytes, charged;
    unsigned char *host;
    /* Of device memory: its pages, at the device's addresses and at the driver's. */
    uint64_t first_page;
    unsigned char *pages;
    size_t pages_bytes;
    /* Of memory behind reserved addresses: its handle, and whether access was set. */
    struct handle *handle;
    bool accessible;
};

static struct allocation *allocations;
/* Addresses of the device, of which none is given twice: more than any test takes. */
#define FIRST_ADDRESS ((uint64_t)1 << 44)
#define END_ADDRESS (FIRST_ADDRESS + ((uint64_t)1 << 40))
static uint64_t next_address = FIRST_ADDRESS;

/* What a reader of fresh memory finds: NaN as a float, far out of range as an index. */
#define FRESH 0xFF
#define CHARGE ((size_t)512)
#define ALIGN ((size_t)256)
#define PAGE ((size_t)4096)
#define GUARD ((uint64_t)1 << 20)

static size_t rounded_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* True while kernels may run: device addresses can be read. */
static bool open_to_kernels;

static void set_rights(const struct allocation *at) {
    mprotect((void *)(uintptr_t)at->first_page, at->pages_bytes, open_to_kernels ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void open_memory(bool open) {
    if (open_to_kernels == open)
        return;
    open_to_kernels = open;
    for (const struct allocation *at = allocations; at; at = at->next)
        if (at->kind == DEVICE || (at->kind == MAPPED && at->accessible))
            set_rights(at);
}

/* False where something was written beside an allocation, within its last page. */
bool margins_are_whole(void) {
    for (const struct allocation *at = allocations; at; at = at->next)
        if (at->kind == DEVICE) {
            for (const unsigned char *byte = at->pages; byte < at->host; byte++)
                if (*byte != FRESH)
                    return false;
            for (const unsigned char *byte = at->host + at->bytes; byte < at->pages + at->pages_bytes; byte++)
                if (*byte != FRESH)
                    return false;
        }
    return true;
}

/* Maps the pages of device memory twice. */
static bool map_pages(struct allocation *made) {
    int file = memfd_create("fake-gpu", 0);
    if (file < 0)
        return false;
    void *at_device = (void *)(uintptr_t)made->first_page;
    bool mapped = ftruncate(file, (off_t)made->pages_bytes) == 0 &&
                  mmap(at_device, made->pages_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0) == at_device;
    if (mapped) {
        made->pages = mmap(NULL, made->pages_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        mapped = made->pages != MAP_FAILED;
        if (!mapped)
            munmap(at_device, made->pages_bytes);
    }
    close(file);
    return mapped;
}

static struct allocation *insert(struct context *context, enum kind kind, uint64_t address, unsigned char *host, size_t bytes) {
    struct allocation *made = calloc(1, sizeof *made);
    *made = (struct allocation){.next = allocations, .context = context, .kind = kind, .address = address, .bytes = bytes, .host = host};
    return allocations = made;
}

static struct allocation *take(uint64_t address, bool (*fits)(enum kind)) {
    for (struct allocation **link = &allocations; *link; link = &(*link)->next)
        if ((*link)->address == address && fits((*link)->kind)) {
            struct allocation *taken = *link;
            *link = taken->next;
            return taken;
        }
    return NULL;
}

static bool is_device(enum kind kind) { return kind == DEVICE; }
static bool is_pinned(enum kind kind) { return kind == PINNED; }
static bool is_registered(enum kind kind) { return kind == REGISTERED || kind == REGISTERED_READ_ONLY; }

unsigned char *host_bytes(uint64_t address, size_t bytes, bool write) {
    for (struct allocation *at = allocations; at; at = at->next)
        if (address >= at->address && address - at->address <= at->bytes && bytes <= at->bytes - (address - at->address))
            return (write && at->kind == REGISTERED_READ_ONLY) || (at->kind == MAPPED && !at->accessible) ? NULL : at->host + (address - at->address);
    /* Host memory that nobody locked: its address is its own, and the device may or may not reach it. */
    bool of_the_device = address >= FIRST_ADDRESS && address < next_address;
    return fake.pageable && !of_the_device ? (unsigned char *)(uintptr_t)address : NULL;
}

static size_t free_bytes(const struct context *context) {
    size_t taken = context->used + fake.held;
    return taken < fake.total ? fake.total - taken : 0;
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    IN_CONTEXT;
    *total = fake.total;
    *free = free_bytes(context);
    if (!fake.free_reading || fake.free_times == 0)
        return OK;
    if (fake.free_times > 0)
        fake.free_times--;
    if (!strcmp(fake.free_reading, "zero"))
        *free = 0;
    else if (!strcmp(fake.free_reading, "above"))
        *free = fake.total + 1;
    else
        return UNKNOWN;
    return OK;
}

API cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    if (bytes == 0)
        return INVALID_VALUE;
    if (strikes(&fake.malloc_fails_at) || bytes > free_bytes(context))
        return OUT_OF_MEMORY;
    struct allocation pages = {
        .charged = rounded_up(bytes, CHARGE), .first_page = next_address, .pages_bytes = rounded_up(bytes, PAGE)};
    if (pages.charged > free_bytes(context) || pages.pages_bytes > END_ADDRESS - next_address || !map_pages(&pages))
        return OUT_OF_MEMORY;
    memset(pages.pages, FRESH, pages.pages_bytes);
    size_t offset = (pages.pages_bytes - bytes) / ALIGN * ALIGN;
    struct allocation *made = insert(context, DEVICE, next_address + offset, pages.pages + offset, bytes);
    made->charged = pages.charged;
    made->first_page = pages.first_page;
    made->pages = pages.pages;
    made->pages_bytes = pages.pages_bytes;
    context->used += made->charged;
    next_address = rounded_up(next_address + made->pages_bytes + GUARD, PAGE);
    set_rights(made);
    *address = made->address;
    return OK;
}

/* Waits for the whole device first, as measured on a real one. */
API cuMemFree_v2(uint64_t address) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    int fault = run_all(context);
    if (fault)
        return fault;
    struct allocation *taken = take(address, is_device);
    if (!taken)
        return INVALID_VALUE;
    taken->context->used -= taken->charged;
    munmap((void *)(uintptr_t)taken->first_page, taken->pages_bytes);
    munmap(taken->pages, taken->pages_bytes);
    free(taken);
    return OK;
}

API cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    if (bytes == 0)
        return INVALID_VALUE;
    *pointer = NULL;
    if (bytes > SIZE_MAX / 2 || posix_memalign(pointer, 4096, bytes))
        return OUT_OF_MEMORY;
    memset(*pointer, FRESH, bytes);
    insert(context, PINNED, (uint64_t)(uintptr_t)*pointer, *pointer, bytes);
    return OK;
}

/* Does not wait: nothing says that a real driver does. Work still queued finds dead memory. */
API cuMemFreeHost(void *pointer) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    struct allocation *taken = take((uint64_t)(uintptr_t)pointer, is_pinned);
    if (!taken)
        return INVALID_VALUE;
    memset(taken->host, FRESH, taken->bytes);
    free(taken->host);
    free(taken);
    return OK;
}

/* The access rights of the mapping that holds all of a range, such as "r--s"; empty where none does. */
static void rights_of(const void *pointer, size_t bytes, char rights[5]) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], seen[5];
    unsigned long from, to, first = (unsigned long)pointer;
    rights[0] = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %4s", &from, &to, seen) == 3 && from <= first && first + bytes <= to)
            memcpy(rights, seen, sizeof seen);
    if (maps)
        fclose(maps);
}

API cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    bool read_only = flags & 8;
    if (bytes == 0)
        return INVALID_VALUE;
    if (read_only && !fake.read_only_register)
        return NOT_SUPPORTED;
    char rights[5];
    rights_of(pointer, bytes, rights);
    bool shared = rights[3] == 's', writable = rights[1] == 'w';
    if (read_only && !shared && !writable) {
        fprintf(stderr, "fake-gpu: a real driver hangs here: a private read-only map was registered as read-only\n");
        abort();
    }
    if (!read_only && !writable)
        return INVALID_VALUE;
    uint64_t address = (uint64_t)(uintptr_t)pointer;
    for (struct allocation *at = allocations; at; at = at->next)
        if (is_registered(at->kind) && address < at->address + at->bytes && at->address < address + bytes)
            return ALREADY_REGISTERED;
    if (fake.register_left >= 0) {
        if (bytes > (size_t)fake.register_left)
            return OUT_OF_MEMORY;
        fake.register_left -= (long)bytes;
    }
    insert(context, read_only ? REGISTERED_READ_ONLY : REGISTERED, address, pointer, bytes);
    return OK;
}

/* Does not wait, as cuMemFreeHost. */
API cuMemHostUnregister(void *pointer) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    struct allocation *taken = take((uint64_t)(uintptr_t)pointer, is_registered);
    if (!taken)
        return NOT_REGISTERED;
    free(taken);
    return OK;
}

API cuMemHostGetDevicePointer_v2(uint64_t *address, void *pointer, unsigned flags) {
    STARTED;
    *address = (uint64_t)(uintptr_t)pointer;
    for (struct allocation *at = allocations; at; at = at->next)
        if (at->kind != DEVICE && at->kind != MAPPED && *address >= at->address && *address < at->address + at->bytes)
            return flags ? INVALID_VALUE : OK;
    return INVALID_VALUE;
}

/* Virtual memory: ranges of addresses, handles of memory, and mappings of the one at the other. */
#define UNIT (2 * MIB)

struct handle {
    struct context *context;
    int file;
    size_t bytes;
    /* One for whoever made it, one for each mapping. */
    unsigned holders;
};

struct range {
    struct range *next;
    uint64_t start;
    size_t bytes;
};
static struct range *ranges;

static void let_go_of_handle(struct handle *handle) {
    if (--handle->holders)
        return;
    handle->context->used -= handle->bytes;
    close(handle->file);
    free(handle);
}

static bool in_units(uint64_t start, size_t bytes) {
    return bytes && start % UNIT == 0 && bytes % UNIT == 0;
}

/* The first mapping or allocation that has a byte of a range. */
static struct allocation *first_in(uint64_t start, size_t bytes) {
    for (struct allocation *at = allocations; at; at = at->next)
        if (at->address < start + bytes && start < at->address + at->bytes)
            return at;
    return NULL;
}

API cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    STARTED;
    (void)properties;
    (void)option;
    *bytes = UNIT;
    return fake.virtual_memory ? OK : NOT_SUPPORTED;
}

API cuMemAddressReserve(uint64_t *start, size_t bytes, size_t alignment, uint64_t wanted, unsigned long long flags) {
    STARTED;
    if (!fake.virtual_memory)
        return NOT_SUPPORTED;
    if (fake.reserve_fails)
        return UNKNOWN;
    if (!in_units(0, bytes) || alignment || wanted || flags)
        return INVALID_VALUE;
    uint64_t first = rounded_up(next_address, UNIT);
    if (bytes > END_ADDRESS - first)
        return OUT_OF_MEMORY;
    struct range *made = calloc(1, sizeof *made);
    *made = (struct range){.next = ranges, .start = first, .bytes = bytes};
    ranges = made;
    next_address = first + bytes + GUARD;
    *start = first;
    return OK;
}

API cuMemAddressFree(uint64_t start, size_t bytes) {
    STARTED;
    for (struct range **link = &ranges; *link; link = &(*link)->next)
        if ((*link)->start == start && (*link)->bytes == bytes) {
            if (first_in(start, bytes))
                return INVALID_VALUE;
            struct range *taken = *link;
            *link = taken->next;
            free(taken);
            return OK;
        }
    return INVALID_VALUE;
}

API cuMemCreate(struct handle **out, size_t bytes, const void *properties, unsigned long long flags) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    if (!in_units(0, bytes) || !properties || flags)
        return INVALID_VALUE;
    if (strikes(&fake.create_fails_at) || bytes > free_bytes(context))
        return OUT_OF_MEMORY;
    int file = memfd_create("fake-gpu", 0);
    if (file < 0 || ftruncate(file, (off_t)bytes))
        return OUT_OF_MEMORY;
    *out = calloc(1, sizeof **out);
    **out = (struct handle){.context = context, .file = file, .bytes = bytes, .holders = 1};
    context->used += bytes;
    return OK;
}

API cuMemRelease(struct handle *handle) {
    IN_CONTEXT;
    (void)context;
    let_go_of_handle(handle);
    return OK;
}

API cuMemMap(uint64_t start, size_t bytes, size_t offset, struct handle *handle, unsigned long long flags) {
    IN_CONTEXT;
    if (!in_units(start, bytes) || offset || bytes != handle->bytes || flags || first_in(start, bytes))
        return INVALID_VALUE;
    struct range *in = ranges;
    while (in && (start < in->start || start + bytes > in->start + in->bytes))
        in = in->next;
    if (!in)
        return INVALID_VALUE;
    if (strikes(&fake.map_fails_at))
        return UNKNOWN;
    void *at_device = (void *)(uintptr_t)start;
    if (mmap(at_device, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE, handle->file, 0) != at_device)
        return OUT_OF_MEMORY;
    unsigned char *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle->file, 0);
    if (pages == MAP_FAILED)
        return OUT_OF_MEMORY;
    memset(pages, FRESH, bytes);
    struct allocation *made = insert(context, MAPPED, start, pages, bytes);
    made->first_page = start;
    made->pages = pages;
    made->pages_bytes = bytes;
    made->handle = handle;
    handle->holders++;
    return OK;
}

API cuMemSetAccess(uint64_t start, size_t bytes, const void *access, size_t count) {
    IN_CONTEXT;
    (void)context;
    struct allocation *at = first_in(start, bytes);
    if (!access || count != 1 || !at || at->kind != MAPPED || at->address != start || at->bytes != bytes)
        return INVALID_VALUE;
    at->accessible = true;
    set_rights(at);
    return OK;
}

static bool is_mapped(enum kind kind) { return kind == MAPPED; }

/* Does not wait, as measured. */
API cuMemUnmap(uint64_t start, size_t bytes) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    struct allocation *at = first_in(start, bytes);
    if (!at || at->kind != MAPPED || at->address != start || at->bytes != bytes)
        return INVALID_VALUE;
    take(start, is_mapped);
    munmap((void *)(uintptr_t)start, bytes);
    munmap(at->pages, bytes);
    let_go_of_handle(at->handle);
    free(at);
    return OK;
}
