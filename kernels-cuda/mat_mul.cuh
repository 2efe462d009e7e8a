// Op::MatMul: rows of activations times a weight matrix, and the two ways of multiplying that experts share with it.
//
// Every result is one chain of fused additions, in an order that depends on the number of columns alone.
#pragma once
#include "activations.cuh"
#include "quant.cuh"

// Most rows of a window, as backend::WINDOW_ROWS_MAX.
#define WINDOW_ROWS 8

// A window's block: threads that share an output, and outputs.
#define WINDOW_LANES 32
#define WINDOW_OUTPUTS 8
#define WINDOW_BLOCK (WINDOW_LANES * WINDOW_OUTPUTS)

// Rows of a window: where each lies.
struct WindowRows {
    const uint8_t *at[WINDOW_ROWS];
    uint32_t count;
};

// The dot products of one weight row with each row of a window: the sums of this thread's columns, which are groups of eight, one of
// every WINDOW_LANES. The weights are read once, however many rows there are.
template <class Q>
DEVICE void window_sums(const uint8_t *weights, uint32_t n_in, const WindowRows &rows, uint32_t format, uint32_t lane,
                        float (&sums)[WINDOW_ROWS]) {
    UNROLL
    for (int row = 0; row < WINDOW_ROWS; row++)
        sums[row] = 0.0f;
    for (uint32_t k = 8 * lane; k < n_in; k += 8 * WINDOW_LANES) {
        float w[8];
        load_weights8<Q>(weights, k, n_in, w);
        UNROLL
        for (int row = 0; row < WINDOW_ROWS; row++) {
            if (row < (int)rows.count) {
                float x[8];
                load_activations8(rows.at[row], format, k, n_in, x);
                UNROLL
                for (int i = 0; i < 8; i++)
                    sums[row] = fmaf(w[i], x[i], sums[row]);
            }
        }
    }
}

// The block's products, [output of the block][row of the window] from `first_output` on: thread t < WINDOW_OUTPUTS * WINDOW_ROWS has that
// of output t / WINDOW_ROWS and row t % WINDOW_ROWS, the others have 0. Every thread of the block calls it.
template <class Q>
DEVICE float window_products(const uint8_t *weights, uint64_t row_bytes, uint32_t first_output, uint32_t n_out, uint32_t n_in,
                             const WindowRows &rows, uint32_t format) {
    SHARED float parts[WINDOW_ROWS][WINDOW_OUTPUTS][WINDOW_LANES + 1];
    uint32_t lane = threadIdx.x % WINDOW_LANES, of_block = threadIdx.x / WINDOW_LANES, output = first_output + of_block;
    float sums[WINDOW_ROWS];
    window_sums<Q>(weights + output * row_bytes, output < n_out ? n_in : 0, rows, format, lane, sums);
    SYNC();
    UNROLL
    for (int row = 0; row < WINDOW_ROWS; row++)
        parts[row][of_block][lane] = sums[row];
    SYNC();
    if (threadIdx.x >= WINDOW_OUTPUTS * WINDOW_ROWS)
        return 0.0f;
    const float *mine = parts[threadIdx.x % WINDOW_ROWS][threadIdx.x / WINDOW_ROWS];
    float sum = 0.0f;
    for (int at = 0; at < WINDOW_LANES; at++)
        sum += mine[at];
    return sum;
}

// A prompt's tile: outputs, rows and the columns taken at a time; a thread has 4 outputs of 4 rows.
#define TILE_OUTPUTS 64
#define TILE_ROWS 64
#define TILE_COLUMNS 32
#define TILE_BLOCK 256
// Floats of a line of the shared tiles: fours stay whole, and lines begin in different banks.
#define TILE_LINE 68

// One tile of products: sums[i][j] is that of output 4 * (thread % 16) + i and row 4 * (thread / 16) + j of the tile. `rows_at` are the
// tile's activation rows, null behind the last; outputs from `n_outputs` on are zeros. Every thread of the block calls it.
template <class Q>
DEVICE void tile_products(const uint8_t *weights, uint64_t row_bytes, uint32_t n_outputs, uint32_t n_in, const uint8_t *const *rows_at,
                          uint32_t format, float (&sums)[4][4]) {
    SHARED Four weight_tile[TILE_COLUMNS][TILE_LINE / 4], row_tile[TILE_COLUMNS][TILE_LINE / 4];
    // What this thread loads: eight columns of one line of either tile.
    uint32_t line = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
    const uint8_t *my_weights = weights + line * row_bytes, *my_row = rows_at[line];
    uint32_t of_outputs = threadIdx.x % 16, of_rows = threadIdx.x / 16;
    UNROLL
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int j = 0; j < 4; j++)
            sums[i][j] = 0.0f;
    }
    for (uint32_t first = 0; first < n_in; first += TILE_COLUMNS) {
        float w[8], x[8];
        load_weights8<Q>(my_weights, first + column, line < n_outputs ? n_in : 0, w);
        load_activations8(my_row, format, first + column, my_row ? n_in : 0, x);
        SYNC();
        UNROLL
        for (int i = 0; i < 8; i++) {
            weight_tile[column + i][line / 4].at[line % 4] = w[i];
            row_tile[column + i][line / 4].at[line % 4] = x[i];
        }
        SYNC();
        UNROLL
        for (int k = 0; k < TILE_COLUMNS; k++) {
            Four left = weight_tile[k][of_outputs], right = row_tile[k][of_rows];
            UNROLL
            for (int i = 0; i < 4; i++) {
                UNROLL
                for (int j = 0; j < 4; j++)
                    sums[i][j] = fmaf(left.at[i], right.at[j], sums[i][j]);
            }
        }
    }
}

struct MatMulArgs {
    const uint8_t *weights; // [n_out, n_in] in blocks
    const uint8_t *input;   // [n_rows, n_in] in the format
    float *out;             // [n_rows, n_out]
    uint64_t row_bytes;     // of a row of weights
    uint32_t n_out;
    uint32_t n_in;
    uint32_t n_rows;
    uint32_t format;
    uint32_t accumulate; // 1: added to `out`
    uint32_t unused;
};
SIZE_OF(MatMulArgs, 56);

DEVICE void store_product(const MatMulArgs &args, uint32_t row, uint32_t output, float product) {
    float *out = args.out + (uint64_t)row * args.n_out + output;
    *out = args.accumulate ? *out + product : product;
}

template <class Q> DEVICE void mat_mul_window(const MatMulArgs &args) {
    WindowRows rows;
    rows.count = args.n_rows;
    uint64_t input_bytes = activation_row_bytes(args.format, args.n_in);
    UNROLL
    for (int row = 0; row < WINDOW_ROWS; row++)
        rows.at[row] = args.input + row * input_bytes;
    uint32_t first = blockIdx.x * WINDOW_OUTPUTS;
    float product = window_products<Q>(args.weights, args.row_bytes, first, args.n_out, args.n_in, rows, args.format);
    uint32_t row = threadIdx.x % WINDOW_ROWS, output = first + threadIdx.x / WINDOW_ROWS;
    if (threadIdx.x < WINDOW_OUTPUTS * WINDOW_ROWS && row < args.n_rows && output < args.n_out)
        store_product(args, row, output, product);
}

template <class Q> DEVICE void mat_mul_prompt(const MatMulArgs &args) {
    SHARED const uint8_t *rows_at[TILE_ROWS];
    uint32_t first_output = blockIdx.x * TILE_OUTPUTS, first_row = blockIdx.y * TILE_ROWS;
    if (threadIdx.x < TILE_ROWS) {
        uint32_t row = first_row + threadIdx.x;
        rows_at[threadIdx.x] = row < args.n_rows ? args.input + row * activation_row_bytes(args.format, args.n_in) : 0;
    }
    SYNC();
    float sums[4][4];
    tile_products<Q>(args.weights + first_output * args.row_bytes, args.row_bytes, args.n_out - first_output, args.n_in, rows_at,
                     args.format, sums);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = first_row + threadIdx.x / 16 * 4 + j, output = first_output + threadIdx.x % 16 * 4 + i;
            if (row < args.n_rows && output < args.n_out)
                store_product(args, row, output, sums[i][j]);
        }
    }
}

// mat_mul_window_<type>   grid: (n_out / WINDOW_OUTPUTS, rounded up), block: WINDOW_BLOCK
// mat_mul_prompt_<type>   grid: (n_out / TILE_OUTPUTS, n_rows / TILE_ROWS, both rounded up), block: TILE_BLOCK
#define MAT_MUL(name, Type)                                                                                                                \
    KERNEL(mat_mul_window_##name, MatMulArgs) { mat_mul_window<Type>(args); }                                                              \
    KERNEL(mat_mul_prompt_##name, MatMulArgs) { mat_mul_prompt<Type>(args); }
FOR_EVERY_TYPE(MAT_MUL)
