// Op::KvStore: rows into the cache of keys or values.
#pragma once
#include "portable.cuh"

// Numbers of `KvFormat`.
#define KV_F32 0
#define KV_F16 1
#define KV_Q8_0 2

// Numbers and bytes of a block of Q8_0: an f16 scale, then 32 signed bytes.
#define KV_BLOCK 32
#define KV_BLOCK_BYTES 34

struct KvStoreArgs {
    const float *rows;        // [n_rows, row_len]
    uint8_t *cache;           // [n_ctx, row_len] in the format
    const int32_t *positions; // [n_rows]
    const int32_t *first_row; // [1]
    uint64_t n;               // units of all rows: numbers, or blocks of Q8_0
    uint32_t row_units;       // units of a row
    uint32_t n_ctx;
    uint32_t format;
    uint32_t unused;
};
SIZE_OF(KvStoreArgs, 56);

DEVICE void store_block(const float *values, uint8_t *out) {
    float largest = 0.0f;
    for (int at = 0; at < KV_BLOCK; at++)
        largest = fmaxf(largest, fabsf(values[at]));
    float scale = largest / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    *(uint16_t *)out = float_to_half(scale);
    for (int at = 0; at < KV_BLOCK; at++)
        out[2 + at] = (uint8_t)(int8_t)roundf(values[at] * inverse);
}

// Stores unit `unit` of `rows` as unit `target` of the cache.
DEVICE void store_unit(const float *rows, uint64_t unit, uint8_t *cache, uint64_t target, uint32_t format) {
    if (format == KV_F32)
        ((float *)cache)[target] = rows[unit];
    else if (format == KV_F16)
        ((uint16_t *)cache)[target] = float_to_half(rows[unit]);
    else
        store_block(rows + unit * KV_BLOCK, cache + target * KV_BLOCK_BYTES);
}

// grid: (blocks that cover the units), block: BLOCK
KERNEL(kv_store, KvStoreArgs) {
    for (uint64_t unit = first_element(); unit < args.n; unit += element_stride()) {
        uint64_t row = unit / args.row_units, of_row = unit % args.row_units;
        // A position outside of the cache is a mistake of the caller's, which must not become a write to somewhere else.
        int64_t cache_row = (int64_t)args.first_row[0] + args.positions[row];
        if (cache_row < 0 || cache_row >= args.n_ctx)
            continue;
        store_unit(args.rows, unit, args.cache, (uint64_t)cache_row * args.row_units + of_row, args.format);
    }
}
