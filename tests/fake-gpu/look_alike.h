/* What kernels-cuda/portable.cuh means on the look-alike: kernels become functions of a shared library, which the look-alike takes for
 * an image. The blocks of a grid run one after another; the threads of a block are fibers, which change turns at SYNC().
 *
 * A fiber is made once and used for all later blocks. Only its first turn goes through ucontext, whose every switch is a system call;
 * later ones jump. Turns go up through the threads and down again, so that a thread that reads what another has not written yet finds
 * that out in one direction or the other. */
#ifndef LOOK_ALIKE_H
#define LOOK_ALIKE_H

#include <setjmp.h>
#include <stddef.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#define DEVICE static inline
#define CONSTANT static const
#define SHARED static
#define SYNC() look_alike::wait_for_the_block()
#define UNROLL
#define EXPORT extern "C" __attribute__((visibility("default")))
/* By reference here, so that all kernels are called alike; the size tells the look-alike what a launch must bring. */
#define KERNEL(name, Args)                                        \
    EXPORT const size_t name##_args_bytes;                        \
    const size_t name##_args_bytes = sizeof(Args);                \
    EXPORT void name(const Args &args)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace look_alike {

typedef void (*Kernel)(const void *args);

struct Fiber {
    enum { IDLE, RUNNING, WAITING } state = IDLE;
    bool made = false;
    jmp_buf turn;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Index index;
};

static const size_t STACK_BYTES = 256 << 10;
static std::vector<std::unique_ptr<Fiber>> fibers;
static Fiber *current;
static Kernel kernel;
static const void *kernel_args;
static jmp_buf scheduler;
static ucontext_t before_first_turn;

/* Gives the turn back. */
static void pause() {
    if (!_setjmp(current->turn))
        _longjmp(scheduler, 1);
}

static void wait_for_the_block() {
    Fiber *self = current;
    self->state = Fiber::WAITING;
    pause();
    threadIdx = self->index;
}

static void run_fiber() {
    for (;;) {
        Fiber *self = current;
        kernel(kernel_args);
        self->state = Fiber::IDLE;
        pause();
    }
}

static void give_turn(Fiber &fiber) {
    current = &fiber;
    threadIdx = fiber.index;
    fiber.state = Fiber::RUNNING;
    if (_setjmp(scheduler))
        return;
    if (fiber.made)
        _longjmp(fiber.turn, 1);
    fiber.made = true;
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = NULL;
    makecontext(&fiber.context, run_fiber, 0);
    swapcontext(&before_first_turn, &fiber.context);
}

/* False where some threads ended while others waited for them. */
static bool run_block(size_t n_threads) {
    for (size_t at = 0; at < n_threads; at++) {
        fibers[at]->state = Fiber::WAITING;
        unsigned of_plane = (unsigned)at / blockDim.x;
        fibers[at]->index = {(unsigned)at % blockDim.x, of_plane % blockDim.y, of_plane / blockDim.y};
    }
    for (bool down = false;; down = !down) {
        size_t waiting = 0;
        for (size_t at = 0; at < n_threads; at++) {
            Fiber &fiber = *fibers[down ? n_threads - 1 - at : at];
            give_turn(fiber);
            waiting += fiber.state == Fiber::WAITING;
        }
        if (waiting == 0)
            return true;
        if (waiting != n_threads)
            return false;
    }
}

} /* namespace look_alike */

/* Runs a whole grid. False where a block came apart; nothing can be run afterwards. */
EXPORT bool look_alike_run(look_alike::Kernel kernel, const void *args, const unsigned grid[3], const unsigned block[3]) {
    using namespace look_alike;
    look_alike::kernel = kernel;
    kernel_args = args;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    size_t n_threads = (size_t)block[0] * block[1] * block[2];
    while (fibers.size() < n_threads)
        fibers.emplace_back(new Fiber);
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                if (!run_block(n_threads))
                    return false;
            }
    return true;
}

#endif
