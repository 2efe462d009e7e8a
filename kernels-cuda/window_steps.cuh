// Small steps of a window that are one kernel instead of several: Op::NormQuantise and Op::StoreHeads.
#pragma once
#include "heads.cuh"
#include "kv_store.cuh"
#include "window_quantise.cuh"

// Forms that a normed row is stored in beside its floats.
#define NORM_TARGETS 2

struct NormQuantiseArgs {
    const float *x;      // [n_rows, n_cols]
    const float *weight; // [n_cols]
    float *out;          // [n_rows, n_cols]
    uint8_t *quantised[NORM_TARGETS]; // [n_rows, n_cols] in the formats
    uint32_t formats[NORM_TARGETS];
    uint32_t n_targets;
    uint32_t n_cols;
    float eps;
    uint32_t unused;
};
SIZE_OF(NormQuantiseArgs, 64);

// grid: (n_rows), block: BLOCK
KERNEL(norm_quantise, NormQuantiseArgs) {
    uint32_t n = args.n_cols;
    const float *x = args.x + (uint64_t)blockIdx.x * n;
    float *out = args.out + (uint64_t)blockIdx.x * n;
    double squares = 0.0;
    float values[8], weight[8];
    for (uint32_t k = 8 * threadIdx.x; k < n; k += 8 * BLOCK) {
        load_floats8(x, k, n, values);
        UNROLL
        for (int i = 0; i < 8; i++)
            squares += (double)values[i] * (double)values[i];
    }
    bool held = n <= 8 * BLOCK;
    if (held) {
        if (8 * threadIdx.x >= n)
            load_floats8(x, n, n, values);
        load_floats8(args.weight, 8 * threadIdx.x, n, weight);
    }
    float factor = norm_factor(sum_over_block(squares), n, args.eps);
    for (uint32_t first = 0; first < n; first += 8 * BLOCK) {
        uint32_t k = first + 8 * threadIdx.x;
        if (!held) {
            load_floats8(x, k, n, values);
            load_floats8(args.weight, k, n, weight);
        }
        UNROLL
        for (int i = 0; i < 8; i++)
            values[i] = values[i] * factor * weight[i];
        store_activations8((uint8_t *)out, ROWS_F32, k, n, values);
        for (uint32_t target = 0; target < args.n_targets; target++) {
            uint32_t format = args.formats[target];
            store_activations8(args.quantised[target] + blockIdx.x * activation_row_bytes(format, n), format, k, n, values);
        }
    }
}

struct StoreHeadsArgs {
    float *q;                      // [n_rows, n_head, head_dim]
    float *k;                      // [n_rows, n_head_kv, head_dim]
    const float *v;                // as k
    const float *q_weight;         // [head_dim]
    const float *k_weight;         // [head_dim]
    const int32_t *rope_positions; // [n_rows]
    uint8_t *k_cache;              // [n_ctx, n_head_kv, head_dim] in the format
    uint8_t *v_cache;
    const int32_t *positions; // [n_rows]
    const int32_t *first_row; // [1]
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t head_dim;
    uint32_t head_units; // units of a head in the cache: numbers, or blocks of Q8_0
    uint32_t n_rot;
    uint32_t n_ctx;
    uint32_t format;
    float freq_base;
    float eps;
    uint32_t unused;
};
SIZE_OF(StoreHeadsArgs, 120);

// A block has a head: of the queries, the keys or the values.
// grid: (n_head + 2 * n_head_kv, n_rows), block: 64
KERNEL(store_heads, StoreHeadsArgs) {
    uint32_t head = blockIdx.x, row = blockIdx.y;
    if (head < args.n_head) {
        float *x = args.q + ((uint64_t)row * args.n_head + head) * args.head_dim;
        norm_and_turn(x, args.q_weight, args.rope_positions[row], args.head_dim, args.n_rot, args.freq_base, args.eps);
        return;
    }
    head -= args.n_head;
    bool is_key = head < args.n_head_kv;
    head -= is_key ? 0 : args.n_head_kv;
    uint64_t of_rows = (uint64_t)row * args.n_head_kv + head;
    const float *x = args.v + of_rows * args.head_dim;
    if (is_key) {
        float *keys = args.k + of_rows * args.head_dim;
        norm_and_turn(keys, args.k_weight, args.rope_positions[row], args.head_dim, args.n_rot, args.freq_base, args.eps);
        SYNC();
        x = keys;
    }
    int64_t cache_row = (int64_t)args.first_row[0] + args.positions[row];
    if (cache_row < 0 || cache_row >= args.n_ctx)
        return;
    uint64_t target = ((uint64_t)cache_row * args.n_head_kv + head) * args.head_units;
    for (uint32_t unit = threadIdx.x; unit < args.head_units; unit += blockDim.x)
        store_unit(x, unit, is_key ? args.k_cache : args.v_cache, target + unit, args.format);
}
