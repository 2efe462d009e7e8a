// Products of quantised weights with one to eight quantised activation rows: Op::MatMul of a window, and the machinery that the experts of
// a window share with it (window_experts.cuh).
//
// A warp takes a step after another: the bytes of a few neighbouring weight rows, or of a piece of one, which lie together in memory. It
// copies them to shared memory in pieces of 16 bytes, one step ahead of its work, so that memory on either side of the link is read once,
// in whole lines and with many reads under way; then it takes them apart there, slice by slice, once for all activation rows. LANES
// threads share a weight row, and a result is the sum over them of chains over their slices: an order that depends on the number of columns
// alone.
#pragma once
#include "matrix_units.cuh"
#include "window_dot.cuh"

// Most rows of a window, as backend::WINDOW_ROWS_MAX.
#define WINDOW_ROWS 8
// Weights of a step, and slices that a thread has of them.
#define STEP_WEIGHTS 2048
#define STEP_SLICES (STEP_WEIGHTS / SLICE)
#define THREAD_SLICES (STEP_SLICES / WARP)
// Warps of a block that multiplies.
#define PRODUCT_WARPS 4
#define PRODUCT_BLOCK (PRODUCT_WARPS * WARP)

#ifdef __CUDACC__

// Threads of a warp see what the others have written; every thread of the block calls it as often as the others.
DEVICE void sync_warp() { __syncwarp(); }

// The sum over `lanes` neighbouring threads, a power of two; every thread of the block calls it.
DEVICE float sum_over_lanes(float value, uint32_t lanes) {
    UNROLL
    for (uint32_t apart = WARP / 2; apart > 0; apart /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, value, apart);
        value = apart < lanes ? value + other : value;
    }
    return value;
}

#else

DEVICE void sync_warp() { SYNC(); }

DEVICE float sum_over_lanes(float value, uint32_t lanes) {
    SHARED float values[1024];
    for (uint32_t apart = WARP / 2; apart > 0; apart /= 2) {
        SYNC();
        values[threadIdx.x] = value;
        SYNC();
        value = apart < lanes ? value + values[threadIdx.x ^ apart] : value;
    }
    return value;
}

#endif

// Shared memory of a warp for the bytes of one step: they begin within its first 16, and a word behind them is read, not used.
template <class Q> struct Stage {
    enum { BYTES = (STEP_WEIGHTS / Q::LEN * Q::BYTES + 15 + 15 + 4) / 16 * 16 };
};

// How a weight row of `n` numbers is cut; depends on that number alone.
struct Cut {
    uint32_t slices;   // of a row
    uint32_t lanes;    // threads that share it
    uint32_t rows;     // that a warp takes at a time
    uint32_t segments; // steps of a row
};

DEVICE Cut cut_row(uint32_t n) {
    Cut cut;
    cut.slices = n / SLICE;
    cut.lanes = cut.slices <= STEP_SLICES / 4 ? 8 : cut.slices <= STEP_SLICES / 2 ? 16 : 32;
    cut.rows = WARP / cut.lanes;
    cut.segments = (cut.slices + STEP_SLICES - 1) / STEP_SLICES;
    return cut;
}

// Weight rows that one warp multiplies: groups of Cut::rows.
struct WarpRows {
    const uint8_t *weights; // of the matrix
    uint64_t row_bytes;
    uint32_t n_out;
    uint32_t n_in;
    uint32_t first_group;
    uint32_t group_stride;
    uint32_t n_groups; // the same for all warps of a block; those that lie behind the end are left out
};

// Begins to copy `bytes` bytes from `from` on into `stage`, with what lies beside them in the first and the last 16 bytes.
DEVICE void copy_step(uint8_t *stage, const uint8_t *from, uint32_t bytes) {
    uint32_t skip = (uint32_t)((uint64_t)from & 15), n_chunks = (skip + bytes + 15) / 16;
    const uint8_t *begin = from - skip;
    UNROLL
    for (uint32_t at = lane_of_warp(); at < n_chunks; at += WARP)
        copy_chunk((uint16_t *)(stage + 16 * at), (const uint16_t *)(begin + 16 * at), true);
}

// Loads the code book of a type; the block's threads see it after their next SYNC().
template <class Q> DEVICE void load_book(uint32_t *book) {
    if constexpr (Codes<Q>::BOOK > 0) {
        for (uint32_t at = threadIdx.x; at < Codes<Q>::BOOK; at += blockDim.x)
            book[at] = Codes<Q>::book(at);
    }
}

// Multiplies weight rows with `n_rows` activation rows, `rows[0]` to `rows[n_rows - 1]`, at most ROWS: `store(output, row, product)` is
// called by one thread for each product. `stages` are two of this warp, `max_rows` is `n_rows` or more and the same in all warps of the
// block, whose threads all call this together. What they have put into shared memory before is seen by all.
template <class Q, int ROWS, class Store>
DEVICE void multiply_rows(const WarpRows &task, const uint8_t *const *rows, uint32_t n_rows, uint32_t max_rows, uint8_t *stages,
                          const uint32_t *book, Store store) {
    const uint32_t block_slices = Q::LEN / SLICE;
    Cut cut = cut_row(task.n_in);
    uint32_t lane = lane_of_warp() % cut.lanes, of_group = lane_of_warp() / cut.lanes;
    uint32_t n_steps = task.n_groups * cut.segments;

    // Where the bytes of a step lie, and how many they are.
    auto begin_step = [&](uint32_t group, uint32_t segment, uint8_t *stage) {
        uint32_t first = (task.first_group + group * task.group_stride) * cut.rows;
        if (first < task.n_out && n_rows > 0) {
            const uint8_t *from = task.weights + first * task.row_bytes + (uint64_t)(segment * (STEP_WEIGHTS / Q::LEN)) * Q::BYTES;
            uint32_t left = task.n_out - first, together = left < cut.rows ? left : cut.rows;
            uint32_t rest = cut.slices - segment * STEP_SLICES;
            copy_step(stage, from, cut.segments == 1 ? together * (uint32_t)task.row_bytes
                                                     : (rest < STEP_SLICES ? rest : STEP_SLICES) / block_slices * Q::BYTES);
        }
        end_copies();
    };

    float sums[ROWS];
    RowSlice own[ROWS == 1 ? THREAD_SLICES : 1];
    begin_step(0, 0, stages);
    SYNC();
    for (uint32_t step = 0, group = 0, segment = 0; step < n_steps; step++) {
        uint32_t next_group = group, next_segment = segment + 1;
        if (next_segment == cut.segments) {
            next_group++;
            next_segment = 0;
        }
        if (step + 1 < n_steps)
            begin_step(next_group, next_segment, stages + (step + 1) % 2 * Stage<Q>::BYTES);
        else
            end_copies();
        uint32_t first_slice = segment * STEP_SLICES;
        uint32_t group_row = (task.first_group + group * task.group_stride) * cut.rows, output = group_row + of_group;
        if (ROWS == 1 && n_rows > 0 && (step == 0 || cut.segments > 1)) {
            // A single row's numbers stay in registers, and are on their way while the weights are.
            UNROLL
            for (int k = 0; k < THREAD_SLICES; k++) {
                uint32_t slice = first_slice + lane + k * cut.lanes;
                if (slice < cut.slices)
                    take_row_slice<Q>(rows[0], task.n_in, slice, own[k]);
            }
        }
        if (segment == 0) {
            UNROLL
            for (int row = 0; row < ROWS; row++)
                sums[row] = 0.0f;
        }
        wait_for_copies<1>();
        sync_warp();
        const uint8_t *stage = stages + step % 2 * Stage<Q>::BYTES;
        if (output < task.n_out && n_rows > 0) {
            uint64_t from = (uint64_t)task.weights + group_row * task.row_bytes + (uint64_t)(segment * (STEP_WEIGHTS / Q::LEN)) * Q::BYTES;
            uint32_t begin = (uint32_t)(from & 15) + of_group * (uint32_t)task.row_bytes;
            UNROLL
            for (int k = 0; k < THREAD_SLICES; k++) {
                uint32_t of_step = lane + k * cut.lanes, slice = first_slice + of_step;
                if (slice < cut.slices) {
                    Slice weights;
                    Codes<Q>::take(stage, begin + of_step / block_slices * Q::BYTES, of_step % block_slices, book, weights);
                    if (ROWS == 1) {
                        sums[0] = add_slice<Q>(weights, own[ROWS == 1 ? k : 0], sums[0]);
                    } else {
                        UNROLL
                        for (int row = 0; row < ROWS; row++) {
                            if (row < (int)n_rows) {
                                take_row_slice<Q>(rows[row], task.n_in, slice, own[0]);
                                sums[row] = add_slice<Q>(weights, own[0], sums[row]);
                            }
                        }
                    }
                }
            }
        }
        if (next_segment == 0) {
            float mine = 0.0f;
            UNROLL
            for (int row = 0; row < ROWS; row++) {
                if (row < (int)max_rows) {
                    float sum = sum_over_lanes(sums[row], cut.lanes);
                    mine = (int)lane == row ? sum : mine;
                }
            }
            if (lane < n_rows && output < task.n_out)
                store(output, lane, mine);
        }
        // The stage is overwritten two steps on.
        sync_warp();
        group = next_group;
        segment = next_segment;
    }
}

// Matrices of one type that are multiplied with the same rows.
#define WINDOW_MATRICES 4

struct WindowMatrix {
    const uint8_t *weights; // [n_out, n_in] in blocks
    float *out;             // [n_rows, n_out]
    uint32_t n_out;
    uint32_t first_block; // of the grid
};
SIZE_OF(WindowMatrix, 24);

struct WindowProductsArgs {
    const uint8_t *input; // [n_rows, n_in] in the format of the type
    uint64_t row_bytes;   // of a row of weights
    uint32_t n_in;
    uint32_t n_rows;
    uint32_t n_matrices;
    uint32_t warp_groups; // groups of weight rows that a warp multiplies
    uint32_t accumulate;  // 1: added to `out`
    uint32_t unused;
    WindowMatrix matrices[WINDOW_MATRICES];
};
SIZE_OF(WindowProductsArgs, 40 + WINDOW_MATRICES * 24);

template <class Q> DEVICE uint64_t quantised_row_bytes(uint32_t n) {
    return activation_row_bytes(Q::LEN == Q8_0_BLOCK ? ROWS_Q8_0 : ROWS_Q8_K, n);
}

template <class Q> DEVICE void window_products(const WindowProductsArgs &args) {
    SHARED Four stages[PRODUCT_WARPS * 2 * Stage<Q>::BYTES / 16];
    SHARED uint32_t book[Codes<Q>::BOOK + 1];
    SHARED const uint8_t *rows[WINDOW_ROWS];
    if (threadIdx.x < args.n_rows)
        rows[threadIdx.x] = args.input + threadIdx.x * quantised_row_bytes<Q>(args.n_in);
    load_book<Q>(book);
    uint32_t at = 0;
    while (at + 1 < args.n_matrices && args.matrices[at + 1].first_block <= blockIdx.x)
        at++;
    const WindowMatrix matrix = args.matrices[at];
    uint32_t warp = threadIdx.x / WARP;
    WarpRows task = {matrix.weights, args.row_bytes, matrix.n_out, args.n_in, 0, PRODUCT_WARPS, args.warp_groups};
    task.first_group = (blockIdx.x - matrix.first_block) * PRODUCT_WARPS * args.warp_groups + warp;
    uint8_t *own = (uint8_t *)stages + warp * 2 * Stage<Q>::BYTES;
    bool accumulate = args.accumulate;
    auto store = [&](uint32_t output, uint32_t row, float product) {
        float *out = matrix.out + (uint64_t)row * matrix.n_out + output;
        *out = accumulate ? *out + product : product;
    };
    if (args.n_rows == 1)
        multiply_rows<Q, 1>(task, rows, 1, 1, own, book, store);
    else
        multiply_rows<Q, WINDOW_ROWS>(task, rows, args.n_rows, args.n_rows, own, book, store);
}

// window_products_<type>   grid: (sum over matrices of groups / (PRODUCT_WARPS * warp_groups), rounded up), block: PRODUCT_BLOCK
#define WINDOW_PRODUCTS(name, Type)                                                                                                        \
    KERNEL(window_products_##name, WindowProductsArgs) { window_products<Type>(args); }
FOR_EVERY_QUANT_TYPE(WINDOW_PRODUCTS)
