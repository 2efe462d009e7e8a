// Products of quantised weights with one to eight quantised activation rows: Op::MatMul of a window, and the machinery that the experts of
// a window share with it (window_experts.cuh).
//
// A warp takes a step after another: the bytes of some neighbouring weight rows, or of a piece of one, which lie together in memory. It
// copies them to shared memory in whole lines of 64 bytes, so that memory on either side of the link is read once, at its full speed, and
// with many reads under way; then it takes them apart there, slice by slice. LANES threads share a weight row, and have the numbers of the
// activation rows that it meets in registers. A result is the sum over them of chains over their slices: an order that depends on the
// number of columns alone.
#pragma once
#include "matrix_units.cuh"
#include "window_dot.cuh"

// Most rows of a window, as backend::WINDOW_ROWS_MAX, and those whose numbers a thread has in registers at a time.
#define WINDOW_ROWS 8
#define HELD_ROWS 4
// Weights of a row that a step takes at most, and slices that a thread has of them.
#define STEP_WEIGHTS 2048
#define STEP_SLICES (STEP_WEIGHTS / SLICE)
#define THREAD_SLICES (STEP_SLICES / WARP)
// Warps of a block that multiplies.
#define PRODUCT_WARPS 4
#define PRODUCT_BLOCK (PRODUCT_WARPS * WARP)
// Memory of the host is read in lines of so many bytes.
#define LINE 64
// Bytes of shared memory that a step is copied to: they begin within its first LINE, and a word behind them is read, not used.
#define PRODUCT_STAGE 4544

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
    SYNC();
    values[threadIdx.x] = value;
    SYNC();
    // The same tree, of which every thread computes the part that it needs.
    float sums[WARP];
    for (uint32_t lane = 0; lane < WARP; lane++)
        sums[lane] = values[threadIdx.x / WARP * WARP + lane];
    for (uint32_t apart = lanes / 2; apart > 0; apart /= 2) {
        for (uint32_t lane = 0; lane < WARP; lane++) {
            if ((lane & apart) == 0)
                sums[lane] = sums[lane | apart] = sums[lane] + sums[lane | apart];
        }
    }
    return sums[lane_of_warp()];
}

#endif

// How a weight row of `n` numbers is cut; depends on that number alone.
struct Cut {
    uint32_t slices;   // of a row
    uint32_t lanes;    // threads that share it
    uint32_t rows;     // that a warp multiplies at a time: a group
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

// Weight rows that one warp multiplies: sets of groups, a step each, or several where a row is cut.
struct WarpRows {
    const uint8_t *weights; // of the matrix
    uint64_t row_bytes;
    uint32_t n_out;
    uint32_t n_in;
    uint32_t set_rows; // rows of a set; where rows are cut, those of a group
    uint32_t first_set;
    uint32_t set_stride;
    uint32_t n_sets; // the same for all warps of a block; those that lie behind the end are left out
};

// Begins to copy `bytes` bytes from `from` on into `stage`, with what lies beside them in the first and the last line.
DEVICE void copy_step(uint8_t *stage, const uint8_t *from, uint32_t bytes) {
    uint32_t skip = (uint32_t)((uint64_t)from & (LINE - 1)), end = (skip + bytes + LINE - 1) / LINE * LINE, at = 16 * lane_of_warp();
    const uint8_t *begin = from - skip;
    UNROLL
    for (int i = 0; i < 4; i++, at += 16 * WARP) {
        if (at < end)
            copy_chunk((uint16_t *)(stage + at), (const uint16_t *)(begin + at), true);
    }
    for (; at < end; at += 16 * WARP)
        copy_chunk((uint16_t *)(stage + at), (const uint16_t *)(begin + at), true);
}

// Loads the code book of a type; the block's threads see it after their next SYNC().
template <class Q> DEVICE void load_book(uint32_t *book) {
    if constexpr (Codes<Q>::BOOK > 0) {
        for (uint32_t at = threadIdx.x; at < Codes<Q>::BOOK; at += blockDim.x)
            book[at] = Codes<Q>::book(at);
    }
}

// Multiplies weight rows with `n_rows` activation rows, `rows[0]` to `rows[n_rows - 1]`, at most ROWS: `store(output, row, product)` is
// called by one thread for each product. `stages` are STAGES pieces of STAGE bytes of this warp, `max_rows` is `n_rows` or more and the
// same in all warps of the block, whose threads all call this together. What they have put into shared memory before is seen by all.
template <class Q, int ROWS, int STAGES, int STAGE, class Store>
DEVICE void multiply_rows(const WarpRows &task, const uint8_t *const *rows, uint32_t n_rows, uint32_t max_rows, uint8_t *stages,
                          const uint32_t *book, Store store) {
    const uint32_t block_slices = Q::LEN / SLICE, segment_bytes = STEP_WEIGHTS / Q::LEN * Q::BYTES;
    const int held = ROWS < HELD_ROWS ? ROWS : HELD_ROWS, n_turns = ROWS / held;
    Cut cut = cut_row(task.n_in);
    uint32_t lane = lane_of_warp() % cut.lanes, of_group = lane_of_warp() / cut.lanes;
    uint32_t n_steps = task.n_sets * cut.segments, row_bytes = (uint32_t)task.row_bytes;

    // Where a step's bytes begin, and how many rows of its set there are.
    auto step_at = [&](uint32_t set, uint32_t segment, uint32_t &count) {
        uint32_t first = (task.first_set + set * task.set_stride) * task.set_rows;
        uint32_t left = first < task.n_out && n_rows > 0 ? task.n_out - first : 0;
        count = left < task.set_rows ? left : task.set_rows;
        return task.weights + first * task.row_bytes + segment * segment_bytes;
    };
    auto begin_step = [&](uint32_t set, uint32_t segment, uint8_t *stage) {
        uint32_t count;
        const uint8_t *from = step_at(set, segment, count);
        uint32_t rest = cut.slices - segment * STEP_SLICES;
        uint32_t bytes = (rest < STEP_SLICES ? rest : STEP_SLICES) / block_slices * Q::BYTES;
        if (count > 0)
            copy_step(stage, from, cut.segments == 1 ? count * row_bytes : bytes);
        end_copies();
    };

    float sums[n_turns][held];
    RowSlice own[held][THREAD_SLICES];
    begin_step(0, 0, stages);
    SYNC();
    for (uint32_t step = 0, set = 0, segment = 0; step < n_steps; step++) {
        uint32_t next_set = set, next_segment = segment + 1;
        if (next_segment == cut.segments) {
            next_set++;
            next_segment = 0;
        }
        if (STAGES > 1) {
            if (step + 1 < n_steps)
                begin_step(next_set, next_segment, stages + (step + 1) % STAGES * STAGE);
            else
                end_copies();
        }
        uint32_t count, first_slice = segment * STEP_SLICES, first_output = (task.first_set + set * task.set_stride) * task.set_rows;
        const uint8_t *from = step_at(set, segment, count), *stage = stages + step % STAGES * STAGE;
        uint32_t skip = (uint32_t)((uint64_t)from & (LINE - 1));
        UNROLL
        for (int turn = 0; turn < n_turns; turn++) {
            if (turn * held >= (int)max_rows)
                break;
            // These are on their way while the weights are.
            if (step == 0 || cut.segments > 1 || max_rows > held) {
                UNROLL
                for (int row = 0; row < held; row++) {
                    UNROLL
                    for (int k = 0; k < THREAD_SLICES; k++) {
                        uint32_t slice = first_slice + lane + k * cut.lanes;
                        if (turn * held + row < (int)n_rows && slice < cut.slices)
                            take_row_slice<Q>(rows[turn * held + row], task.n_in, slice, own[row][k]);
                    }
                }
            }
            if (turn == 0) {
                wait_for_copies<STAGES - 1>();
                sync_warp();
            }
            for (uint32_t of_set = 0; of_set < task.set_rows; of_set += cut.rows) {
                uint32_t row_of_set = of_set + of_group;
                if (segment == 0) {
                    UNROLL
                    for (int row = 0; row < held; row++)
                        sums[turn][row] = 0.0f;
                }
                if (row_of_set < count) {
                    uint32_t begin = skip + row_of_set * row_bytes;
                    UNROLL
                    for (int k = 0; k < THREAD_SLICES; k++) {
                        uint32_t of_step = lane + k * cut.lanes;
                        if (first_slice + of_step < cut.slices) {
                            Slice weights;
                            Codes<Q>::take(stage, begin + of_step / block_slices * Q::BYTES, of_step % block_slices, book, weights);
                            UNROLL
                            for (int row = 0; row < held; row++) {
                                if (turn * held + row < (int)n_rows)
                                    sums[turn][row] = add_slice<Q>(weights, own[row][k], sums[turn][row]);
                            }
                        }
                    }
                }
                if (next_segment == 0) {
                    float mine = 0.0f;
                    UNROLL
                    for (int row = 0; row < held; row++) {
                        if (turn * held + row < (int)max_rows) {
                            float sum = sum_over_lanes(sums[turn][row], cut.lanes);
                            mine = (int)lane == row ? sum : mine;
                        }
                    }
                    if (lane < held && turn * held + lane < n_rows && row_of_set < count)
                        store(first_output + row_of_set, turn * held + lane, mine);
                }
            }
        }
        // The stage is written again.
        sync_warp();
        if (STAGES == 1 && step + 1 < n_steps)
            begin_step(next_set, next_segment, stages);
        set = next_set;
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
    uint32_t set_rows;   // neighbouring weight rows that a warp takes at a time
    uint32_t warp_sets;  // sets that a warp takes one after another
    uint32_t accumulate; // 1: added to `out`
    WindowMatrix matrices[WINDOW_MATRICES];
};
SIZE_OF(WindowProductsArgs, 40 + WINDOW_MATRICES * 24);

template <class Q> DEVICE uint64_t quantised_row_bytes(uint32_t n) {
    return activation_row_bytes(Q::LEN == Q8_0_BLOCK ? ROWS_Q8_0 : ROWS_Q8_K, n);
}

template <class Q, int ROWS> DEVICE void window_products(const WindowProductsArgs &args) {
    SHARED Four stages[PRODUCT_WARPS * 2 * PRODUCT_STAGE / 16];
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
    WarpRows task = {matrix.weights, args.row_bytes, matrix.n_out, args.n_in, args.set_rows, 0, PRODUCT_WARPS, args.warp_sets};
    task.first_set = (blockIdx.x - matrix.first_block) * PRODUCT_WARPS * args.warp_sets + warp;
    uint8_t *own = (uint8_t *)stages + warp * 2 * PRODUCT_STAGE;
    bool accumulate = args.accumulate;
    auto store = [&](uint32_t output, uint32_t row, float product) {
        float *out = matrix.out + (uint64_t)row * matrix.n_out + output;
        *out = accumulate ? *out + product : product;
    };
    uint32_t n_rows = ROWS == 1 ? 1 : args.n_rows;
    multiply_rows<Q, ROWS, 2, PRODUCT_STAGE>(task, rows, n_rows, n_rows, own, book, store);
}

// window_products_<type>, and window_products_one_<type> for a single row, which takes fewer registers
// grid: (sum over matrices of sets / (PRODUCT_WARPS * warp_sets), rounded up), block: PRODUCT_BLOCK
#define WINDOW_PRODUCTS(name, Type)                                                                                                        \
    KERNEL(window_products_##name, WindowProductsArgs) { window_products<Type, WINDOW_ROWS>(args); }                                       \
    KERNEL(window_products_one_##name, WindowProductsArgs) { window_products<Type, 1>(args); }
FOR_EVERY_QUANT_TYPE(WINDOW_PRODUCTS)
