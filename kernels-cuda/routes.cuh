// Op::SortRoutes: the rows of a prompt by expert. A block has an expert to itself, and places its rows in ascending order.
#pragma once
#include "portable.cuh"

struct SortRoutesArgs {
    const uint32_t *ids;  // [n_rows, n_used], ascending in a row
    const float *weights; // [n_rows, n_used]
    uint32_t *counts;     // [n_expert]
    uint32_t *rows;       // [n_rows * n_used]
    float *row_weights;   // [n_rows * n_used]
    uint32_t *entries;    // [n_rows, n_used]
    uint32_t n_rows;
    uint32_t n_expert;
    uint32_t n_used;
    uint32_t unused;
};
SIZE_OF(SortRoutesArgs, 64);

// The sum of one number of every thread of the block.
DEVICE uint32_t routes_sum(uint32_t value) {
    SHARED uint32_t sums[BLOCK];
    SYNC();
    sums[threadIdx.x] = value;
    SYNC();
    for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        SYNC();
    }
    return sums[0];
}

// grid: (n_expert), block: BLOCK
KERNEL(count_routes, SortRoutesArgs) {
    uint32_t count = 0;
    uint64_t n = (uint64_t)args.n_rows * args.n_used;
    for (uint64_t at = threadIdx.x; at < n; at += BLOCK)
        count += args.ids[at] == blockIdx.x;
    count = routes_sum(count);
    if (threadIdx.x == 0)
        args.counts[blockIdx.x] = count;
}

// Sixteen sums of sixteen numbers each, then sums of those: two meetings of the block instead of eight.
#define ROUTES_GROUP 16

// grid: (n_expert), block: BLOCK
KERNEL(place_routes, SortRoutesArgs) {
    SHARED uint32_t flags[BLOCK], sums[BLOCK / ROUTES_GROUP];
    uint32_t before = 0;
    for (uint32_t expert = threadIdx.x; expert < blockIdx.x; expert += BLOCK)
        before += args.counts[expert];
    uint32_t next = routes_sum(before);
    for (uint64_t first = 0; first < args.n_rows; first += BLOCK) {
        uint64_t row = first + threadIdx.x, route = row * args.n_used;
        uint32_t used = args.n_used;
        if (row < args.n_rows) {
            // The last one that is not behind the expert; at most one is it.
            while (used > 0 && args.ids[route + used - 1] > blockIdx.x)
                used--;
        }
        bool is_mine = row < args.n_rows && used > 0 && args.ids[route + used - 1] == blockIdx.x;
        SYNC();
        flags[threadIdx.x] = is_mine;
        SYNC();
        if (threadIdx.x < BLOCK / ROUTES_GROUP) {
            uint32_t sum = 0;
            for (uint32_t at = 0; at < ROUTES_GROUP; at++)
                sum += flags[threadIdx.x * ROUTES_GROUP + at];
            sums[threadIdx.x] = sum;
        }
        SYNC();
        uint32_t place = next, group = threadIdx.x / ROUTES_GROUP;
        for (uint32_t at = 0; at < BLOCK / ROUTES_GROUP; at++) {
            place += at < group ? sums[at] : 0;
            next += sums[at];
        }
        if (is_mine) {
            for (uint32_t at = group * ROUTES_GROUP; at < threadIdx.x; at++)
                place += flags[at];
            args.rows[place] = (uint32_t)row;
            args.row_weights[place] = args.weights[route + used - 1];
            args.entries[route + used - 1] = place;
        }
    }
}
