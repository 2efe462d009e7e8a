// Op::ExpertsWindow and Op::ExpertsPrompt. Both are a few kernels, one after another on a stream, over the op's scratch: gate and up
// [2][n_pairs][n_ff] f32; activated rows behind all floats of the scratch; results [n_pairs][n_embd] f32 over gate and up; the addition to
// the residual. A pair is a row and one of its experts.
#pragma once
#include "mat_mul.cuh"
#include "quantise.cuh"

// The matrices of an expert, as the expert table holds them: gate, up, down.
#define EXPERT_PARTS 3

struct ExpertsActivateArgs {
    const float *gate; // [n_pairs, n_ff]
    const float *up;   // [n_pairs, n_ff]
    uint8_t *out;      // [n_pairs, n_ff] in the format
    uint32_t n_ff;
    uint32_t format;
};
SIZE_OF(ExpertsActivateArgs, 32);

// grid: (n_pairs, n_ff / QUANTISE_BLOCK, rounded up), block: QUANTISE_BLOCK
KERNEL(experts_activate, ExpertsActivateArgs) {
    uint64_t pair = blockIdx.x;
    uint32_t k = blockIdx.y * QUANTISE_BLOCK + threadIdx.x;
    uint64_t at = pair * args.n_ff + k;
    float value = k < args.n_ff ? silu(args.gate[at]) * args.up[at] : 0.0f;
    store_activation(args.out + pair * activation_row_bytes(args.format, args.n_ff), args.format, k, args.n_ff, value);
}

struct ExpertsWindowArgs {
    const uint8_t *input;  // [n_rows, n_in], or [n_pairs, n_in] where by_pair, in the format
    const int32_t *ids;    // [n_rows, n_used], ascending in a row
    const uint64_t *table; // [n_expert, EXPERT_PARTS] addresses
    float *out;            // [parts of the grid, n_pairs, n_out]
    uint64_t row_bytes;    // of a row of weights
    uint32_t n_out;
    uint32_t n_in;
    uint32_t n_rows;
    uint32_t n_used;
    uint32_t format;
    uint32_t first_part; // of the expert's matrices: the one that blocks with z = 0 multiply
    uint32_t by_pair;
    uint32_t unused;
};
SIZE_OF(ExpertsWindowArgs, 72);

// The block of an expert's first pair multiplies for all rows that chose it, so that its weights are read once; those of its other pairs
// have nothing to do.
template <class Q> DEVICE void experts_window(const ExpertsWindowArgs &args) {
    SHARED uint32_t pair_of_row[WINDOW_ROWS], pairs[WINDOW_ROWS], n_chosen;
    const uint32_t none = 0xffffffffu;
    uint32_t n_pairs = args.n_rows * args.n_used;
    int32_t expert = args.ids[blockIdx.y];
    if (threadIdx.x < WINDOW_ROWS)
        pair_of_row[threadIdx.x] = none;
    SYNC();
    for (uint32_t pair = threadIdx.x; pair < n_pairs; pair += WINDOW_BLOCK) {
        if (args.ids[pair] == expert)
            pair_of_row[pair / args.n_used] = pair;
    }
    SYNC();
    if (threadIdx.x == 0) {
        n_chosen = 0;
        for (uint32_t row = 0; row < args.n_rows; row++) {
            if (pair_of_row[row] != none)
                pairs[n_chosen++] = pair_of_row[row];
        }
    }
    SYNC();
    if (pairs[0] != blockIdx.y)
        return;
    WindowRows rows;
    rows.count = n_chosen;
    uint64_t input_bytes = activation_row_bytes(args.format, args.n_in);
    UNROLL
    for (uint32_t at = 0; at < WINDOW_ROWS; at++) {
        uint32_t pair = at < n_chosen ? pairs[at] : 0;
        rows.at[at] = args.input + (args.by_pair ? pair : pair / args.n_used) * input_bytes;
    }
    uint32_t part = args.first_part + blockIdx.z, first = blockIdx.x * WINDOW_OUTPUTS;
    const uint8_t *weights = (const uint8_t *)args.table[(uint64_t)expert * EXPERT_PARTS + part];
    float product = window_products<Q>(weights, args.row_bytes, first, args.n_out, args.n_in, rows, args.format);
    uint32_t at = threadIdx.x % WINDOW_ROWS, output = first + threadIdx.x / WINDOW_ROWS;
    if (threadIdx.x < WINDOW_OUTPUTS * WINDOW_ROWS && at < n_chosen && output < args.n_out)
        args.out[((uint64_t)blockIdx.z * n_pairs + pairs[at]) * args.n_out + output] = product;
}

struct ExpertsWindowAddArgs {
    const float *results; // [n_rows, n_used, n_embd]
    const float *weights; // [n_rows, n_used]
    float *residual;      // [n_rows, n_embd]
    uint32_t n_embd;
    uint32_t n_used;
};
SIZE_OF(ExpertsWindowAddArgs, 32);

// grid: (n_embd / BLOCK, rounded up, n_rows), block: BLOCK
KERNEL(experts_window_add, ExpertsWindowAddArgs) {
    uint64_t row = blockIdx.y;
    uint32_t column = blockIdx.x * BLOCK + threadIdx.x;
    if (column >= args.n_embd)
        return;
    float *residual = args.residual + row * args.n_embd + column;
    float sum = *residual;
    for (uint64_t pair = row * args.n_used; pair < (row + 1) * args.n_used; pair++)
        sum = fmaf(args.weights[pair], args.results[pair * args.n_embd + column], sum);
    *residual = sum;
}

// Pieces that a launch takes: its arguments must fit the 4 KiB that every device takes.
#define PIECES_MAX 64

// Pairs of one expert that a launch multiplies.
struct ExpertPiece {
    uint64_t parts[EXPERT_PARTS]; // addresses of gate, up, down
    uint32_t first;               // entry of the row lists
    uint32_t count;
    uint32_t first_pair; // row of gate, up, activated rows and results
    uint32_t first_tile; // block of the grid in y
};
SIZE_OF(ExpertPiece, 40);

struct ExpertsPromptArgs {
    const uint8_t *input;  // rows of n_in in the format
    const uint32_t *rows;  // the row list: which row of the input a pair multiplies; unless by_pair
    float *out;            // [parts of the grid, n_pairs, n_out]
    uint64_t part_floats;  // from one part of `out` to the next
    uint64_t row_bytes;    // of a row of weights
    uint32_t n_out;
    uint32_t n_in;
    uint32_t format;
    uint32_t first_part; // of the expert's matrices: the one that blocks with z = 0 multiply
    uint32_t by_pair;    // 1: a pair multiplies the input row of its own number
    uint32_t n_pieces;
    ExpertPiece pieces[PIECES_MAX];
};
SIZE_OF(ExpertsPromptArgs, 64 + PIECES_MAX * 40);

template <class Q> DEVICE void experts_prompt(const ExpertsPromptArgs &args) {
    SHARED const uint8_t *rows_at[TILE_ROWS];
    uint32_t at = 0;
    while (at + 1 < args.n_pieces && args.pieces[at + 1].first_tile <= blockIdx.y)
        at++;
    const ExpertPiece &piece = args.pieces[at];
    uint32_t first_row = (blockIdx.y - piece.first_tile) * TILE_ROWS, first_output = blockIdx.x * TILE_OUTPUTS;
    if (threadIdx.x < TILE_ROWS) {
        uint32_t row = first_row + threadIdx.x;
        const uint8_t *row_at = 0;
        if (row < piece.count) {
            uint32_t of_input = args.by_pair ? piece.first_pair + row : args.rows[piece.first + row];
            row_at = args.input + of_input * activation_row_bytes(args.format, args.n_in);
        }
        rows_at[threadIdx.x] = row_at;
    }
    SYNC();
    const uint8_t *weights = (const uint8_t *)piece.parts[args.first_part + blockIdx.z] + first_output * args.row_bytes;
    float sums[4][4];
    tile_products<Q>(weights, args.row_bytes, args.n_out - first_output, args.n_in, rows_at, args.format, sums);
    float *out = args.out + blockIdx.z * args.part_floats + (uint64_t)piece.first_pair * args.n_out;
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = first_row + threadIdx.x / 16 * 4 + j, output = first_output + threadIdx.x % 16 * 4 + i;
            if (row < piece.count && output < args.n_out)
                out[(uint64_t)row * args.n_out + output] = sums[i][j];
        }
    }
}

// experts_window_<type>   grid: (n_out / WINDOW_OUTPUTS, rounded up, n_pairs, parts: 2 for gate and up of one type, else 1),
//                         block: WINDOW_BLOCK
// experts_prompt_<type>   grid: (n_out / TILE_OUTPUTS, rounded up, sum over pieces of count / TILE_ROWS, rounded up, parts),
//                         block: TILE_BLOCK
#define EXPERTS(name, Type)                                                                                                                \
    KERNEL(experts_window_##name, ExpertsWindowArgs) { experts_window<Type>(args); }                                                       \
    KERNEL(experts_prompt_##name, ExpertsPromptArgs) { experts_prompt<Type>(args); }
FOR_EVERY_TYPE(EXPERTS)
