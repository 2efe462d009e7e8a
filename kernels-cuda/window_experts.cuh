// Op::ExpertsWindow where weights and rows are quantised: gate and up, the activated rows (window_activate), then down with the addition.
// Where an expert lies, in device memory or in pinned memory of the host, is the table's business; either is read in place, once.
#pragma once
#include "window_products.cuh"

// The matrices of an expert, as the expert table holds them: gate, up, down.
#ifndef EXPERT_PARTS
#define EXPERT_PARTS 3
#endif
// Pairs of a row and one of its experts that a window has at most.
#define WINDOW_PAIRS 128
#define NO_PAIR 0xffffu

struct WindowGateUpArgs {
    const uint8_t *input;  // [n_rows, n_in] in the format of the type
    const int32_t *ids;    // [n_rows, n_used], ascending in a row
    const uint64_t *table; // [n_expert, EXPERT_PARTS] addresses
    float *out;            // [parts of the grid, n_pairs, n_out]
    uint64_t row_bytes;    // of a row of weights
    uint32_t n_out;
    uint32_t n_in;
    uint32_t n_rows;
    uint32_t n_used;
    uint32_t first_part; // of the expert's matrices: the one that blocks with z = 0 multiply
    uint32_t set_rows; // as in WindowProductsArgs
    uint32_t warp_sets;
    uint32_t unused;
};
SIZE_OF(WindowGateUpArgs, 72);

// The block of an expert's first pair multiplies for all rows that chose it, so that its weights are read once; those of its other pairs
// have nothing to do.
template <class Q, int ROWS> DEVICE void window_gate_up(const WindowGateUpArgs &args) {
    SHARED Four stages[PRODUCT_WARPS * 2 * PRODUCT_STAGE / 16];
    SHARED uint32_t book[Codes<Q>::BOOK + 1];
    SHARED uint32_t pair_of_row[WINDOW_ROWS], pairs[WINDOW_ROWS];
    SHARED const uint8_t *rows[WINDOW_ROWS];
    uint32_t n_pairs = args.n_rows * args.n_used, n_chosen = 1;
    int32_t expert = args.ids[blockIdx.y];
    if (ROWS > 1) {
        if (threadIdx.x < WINDOW_ROWS)
            pair_of_row[threadIdx.x] = NO_PAIR;
        SYNC();
        for (uint32_t pair = threadIdx.x; pair < n_pairs; pair += PRODUCT_BLOCK) {
            if (args.ids[pair] == expert)
                pair_of_row[pair / args.n_used] = pair;
        }
        SYNC();
        n_chosen = 0;
        uint32_t first = NO_PAIR;
        for (uint32_t row = 0; row < args.n_rows; row++) {
            uint32_t pair = pair_of_row[row];
            if (pair == NO_PAIR)
                continue;
            first = first == NO_PAIR ? pair : first;
            if (threadIdx.x == 0) {
                pairs[n_chosen] = pair;
                rows[n_chosen] = args.input + row * quantised_row_bytes<Q>(args.n_in);
            }
            n_chosen++;
        }
        if (first != blockIdx.y)
            return;
    } else if (threadIdx.x == 0) {
        pairs[0] = blockIdx.y;
        rows[0] = args.input;
    }
    load_book<Q>(book);
    const uint8_t *weights = (const uint8_t *)args.table[(uint64_t)expert * EXPERT_PARTS + args.first_part + blockIdx.z];
    uint32_t warp = threadIdx.x / WARP;
    WarpRows task = {weights, args.row_bytes, args.n_out, args.n_in, args.set_rows, 0, PRODUCT_WARPS, args.warp_sets};
    task.first_set = blockIdx.x * PRODUCT_WARPS * args.warp_sets + warp;
    float *out = args.out + (uint64_t)blockIdx.z * n_pairs * args.n_out;
    auto store = [&](uint32_t output, uint32_t row, float product) { out[(uint64_t)pairs[row] * args.n_out + output] = product; };
    uint8_t *own = (uint8_t *)stages + warp * 2 * PRODUCT_STAGE;
    multiply_rows<Q, ROWS, 2, PRODUCT_STAGE>(task, rows, n_chosen, n_chosen, own, book, store);
}

// Warps of a block of window_down, each with an expert at a time, and the most outputs of a block.
#define DOWN_WARPS 8
#define DOWN_BLOCK (DOWN_WARPS * WARP)
#define DOWN_OUTPUTS 16
// Bytes of shared memory of each warp.
#define DOWN_STAGE 3584

struct WindowDownArgs {
    const uint8_t *activated; // [n_pairs, n_ff] in the format of the type
    const int32_t *ids;       // [n_rows, n_used], ascending in a row
    const float *weights;     // [n_rows, n_used]
    const uint64_t *table;    // [n_expert, EXPERT_PARTS] addresses
    float *residual;          // [n_rows, n_embd]
    uint64_t row_bytes;       // of a row of weights
    uint32_t n_embd;
    uint32_t n_ff;
    uint32_t n_rows;
    uint32_t n_used;
    uint32_t n_outputs; // of a block, at most DOWN_OUTPUTS
    uint32_t set_rows;  // as in WindowProductsArgs
};
SIZE_OF(WindowDownArgs, 72);

// The experts that a window's rows chose, each once, in ascending order.
struct ChosenExperts {
    int32_t ids[WINDOW_PAIRS];      // of all pairs
    int32_t experts[WINDOW_PAIRS];  // by place
    uint16_t pairs[WINDOW_PAIRS][WINDOW_ROWS]; // by place and row, or NO_PAIR
    uint8_t is_first[WINDOW_PAIRS]; // of the pairs with its expert
};

// Fills the list and gives the number of experts. Every thread of the block calls it.
DEVICE uint32_t choose_experts(ChosenExperts &chosen, const int32_t *ids, uint32_t n_rows, uint32_t n_used) {
    uint32_t n_pairs = n_rows * n_used;
    for (uint32_t pair = threadIdx.x; pair < n_pairs; pair += blockDim.x)
        chosen.ids[pair] = ids[pair];
    for (uint32_t at = threadIdx.x; at < n_pairs * WINDOW_ROWS; at += blockDim.x)
        chosen.pairs[at / WINDOW_ROWS][at % WINDOW_ROWS] = NO_PAIR;
    SYNC();
    for (uint32_t pair = threadIdx.x; pair < n_pairs; pair += blockDim.x) {
        uint32_t first = 0;
        while (chosen.ids[first] != chosen.ids[pair])
            first++;
        chosen.is_first[pair] = first == pair;
    }
    SYNC();
    uint32_t n_experts = 0;
    for (uint32_t pair = 0; pair < n_pairs; pair++)
        n_experts += chosen.is_first[pair];
    for (uint32_t pair = threadIdx.x; pair < n_pairs; pair += blockDim.x) {
        uint32_t place = 0;
        for (uint32_t other = 0; other < n_pairs; other++)
            place += chosen.is_first[other] && chosen.ids[other] < chosen.ids[pair];
        chosen.experts[place] = chosen.ids[pair];
        chosen.pairs[place][pair / n_used] = (uint16_t)pair;
    }
    SYNC();
    return n_experts;
}

// A block has some outputs of all experts, so that it can add them in their order.
template <class Q, int ROWS> DEVICE void window_down(const WindowDownArgs &args) {
    SHARED Four stages[DOWN_WARPS * DOWN_STAGE / 16];
    SHARED uint32_t book[Codes<Q>::BOOK + 1];
    SHARED ChosenExperts chosen;
    SHARED float results[DOWN_WARPS][WINDOW_ROWS][DOWN_OUTPUTS];
    SHARED const uint8_t *rows[DOWN_WARPS][WINDOW_ROWS];
    SHARED uint8_t row_numbers[DOWN_WARPS][WINDOW_ROWS];
    load_book<Q>(book);
    uint32_t n_experts = choose_experts(chosen, args.ids, args.n_rows, args.n_used);
    uint32_t warp = threadIdx.x / WARP, first_output = blockIdx.x * args.n_outputs;
    uint32_t left = args.n_embd - first_output, n_outputs = left < args.n_outputs ? left : args.n_outputs;
    uint32_t n_sets = (n_outputs + args.set_rows - 1) / args.set_rows;
    uint8_t *own = (uint8_t *)stages + warp * DOWN_STAGE;
    auto store = [&](uint32_t output, uint32_t row, float product) { results[warp][row_numbers[warp][row]][output] = product; };
    // What this thread adds up, and whether it does.
    uint32_t my_row = threadIdx.x / DOWN_OUTPUTS, my_output = threadIdx.x % DOWN_OUTPUTS;
    bool adds = my_row < args.n_rows && my_output < n_outputs;
    float *residual = args.residual + (uint64_t)my_row * args.n_embd + first_output + my_output;
    float sum = adds ? *residual : 0.0f;
    for (uint32_t base = 0; base < n_experts; base += DOWN_WARPS) {
        // Rows of this warp's expert, and the most that an expert of this turn has.
        uint32_t n_chosen = 0, max_chosen = 0;
        for (uint32_t of_turn = 0; of_turn < DOWN_WARPS && base + of_turn < n_experts; of_turn++) {
            uint32_t count = 0;
            for (uint32_t row = 0; row < args.n_rows; row++) {
                uint32_t pair = chosen.pairs[base + of_turn][row];
                if (pair == NO_PAIR)
                    continue;
                if (of_turn == warp && lane_of_warp() == 0) {
                    rows[warp][count] = args.activated + pair * quantised_row_bytes<Q>(args.n_ff);
                    row_numbers[warp][count] = (uint8_t)row;
                }
                count++;
            }
            max_chosen = count > max_chosen ? count : max_chosen;
            n_chosen = of_turn == warp ? count : n_chosen;
        }
        const uint8_t *weights = 0;
        if (n_chosen > 0)
            weights = (const uint8_t *)args.table[(uint64_t)chosen.experts[base + warp] * EXPERT_PARTS + 2] + first_output * args.row_bytes;
        WarpRows task = {weights, args.row_bytes, n_outputs, args.n_ff, args.set_rows, 0, 1, n_sets};
        multiply_rows<Q, ROWS, 1, DOWN_STAGE>(task, rows[warp], n_chosen, max_chosen, own, book, store);
        SYNC();
        for (uint32_t of_turn = 0; adds && of_turn < DOWN_WARPS && base + of_turn < n_experts; of_turn++) {
            uint32_t pair = chosen.pairs[base + of_turn][my_row];
            if (pair != NO_PAIR)
                sum = fmaf(args.weights[pair], results[of_turn][my_row][my_output], sum);
        }
        SYNC();
    }
    if (adds)
        *residual = sum;
}

// window_gate_up_<type>   grid: (sets of weight rows / (PRODUCT_WARPS * warp_sets), rounded up, n_pairs, parts: 2 for gate and up of
//                         one type, else 1), block: PRODUCT_BLOCK
// window_down_<type>      grid: (n_embd / n_outputs, rounded up), block: DOWN_BLOCK
// Both for windows of a single row, with _one_ before the type.
#define WINDOW_EXPERTS(name, Type)                                                                                                         \
    KERNEL(window_gate_up_##name, WindowGateUpArgs) { window_gate_up<Type, WINDOW_ROWS>(args); }                                           \
    KERNEL(window_gate_up_one_##name, WindowGateUpArgs) { window_gate_up<Type, 1>(args); }                                                 \
    KERNEL(window_down_##name, WindowDownArgs) { window_down<Type, WINDOW_ROWS>(args); }                                                   \
    KERNEL(window_down_one_##name, WindowDownArgs) { window_down<Type, 1>(args); }
FOR_EVERY_QUANT_TYPE(WINDOW_EXPERTS)
