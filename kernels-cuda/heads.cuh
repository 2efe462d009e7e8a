// Norms of heads: Op::HeadNormRope and Op::GatedHeadNorm.
#pragma once
#include "rms_norm.cuh"

struct HeadNormRopeArgs {
    float *x;                 // [n_rows, n_head, head_dim]
    const float *weight;      // [head_dim]
    const int32_t *positions; // [n_rows]
    uint32_t n_head;
    uint32_t head_dim;
    uint32_t n_rot;
    float freq_base;
    float eps;
    uint32_t unused;
};
SIZE_OF(HeadNormRopeArgs, 48);

// Norms and turns the head `x`. Every thread of the block calls it.
DEVICE void norm_and_turn(float *x, const float *weight, int32_t position, uint32_t head_dim, uint32_t n_rot, float freq_base, float eps) {
    float factor = norm_factor(block_sum_of_squares(x, head_dim), head_dim, eps);
    uint32_t half = n_rot / 2;
    for (uint32_t pair = threadIdx.x; pair < half; pair += blockDim.x) {
        // In f64: an f32 angle would be off by more with every thousand tokens.
        double angle = (double)position * pow((double)freq_base, -2.0 * (double)pair / (double)n_rot);
        float sine = (float)sin(angle), cosine = (float)cos(angle);
        float a = x[pair] * factor * weight[pair], b = x[pair + half] * factor * weight[pair + half];
        x[pair] = a * cosine - b * sine;
        x[pair + half] = a * sine + b * cosine;
    }
    for (uint32_t at = n_rot + threadIdx.x; at < head_dim; at += blockDim.x)
        x[at] = x[at] * factor * weight[at];
}

// Pairs of the largest head.
#define ROPE_PAIRS 128

// A warp has a head. The angles of a row are those of all its heads, and dear: consumer cards have few units for f64. The sum is that of
// norm_and_turn on 64 threads, number by number.
// grid: (n_rows), block: BLOCK
KERNEL(head_norm_rope, HeadNormRopeArgs) {
    SHARED float sines[ROPE_PAIRS], cosines[ROPE_PAIRS];
    const uint32_t half = args.n_rot / 2, head_dim = args.head_dim, lane = threadIdx.x % 32;
    for (uint32_t pair = threadIdx.x; pair < half; pair += BLOCK) {
        double angle = (double)args.positions[blockIdx.x] * pow((double)args.freq_base, -2.0 * (double)pair / (double)args.n_rot);
        sines[pair] = (float)sin(angle);
        cosines[pair] = (float)cos(angle);
    }
    SYNC();
    for (uint32_t first = 0; first < args.n_head; first += BLOCK / 32) {
        uint32_t head = first + threadIdx.x / 32;
        bool is_there = head < args.n_head;
        float *x = args.x + ((uint64_t)blockIdx.x * args.n_head + (is_there ? head : 0)) * head_dim;
        double low = 0.0, high = 0.0;
        for (uint32_t at = lane; is_there && at < head_dim; at += 64) {
            low += (double)x[at] * (double)x[at];
            if (at + 32 < head_dim)
                high += (double)x[at + 32] * (double)x[at + 32];
        }
        float factor = norm_factor(warp_sum(low + high), head_dim, args.eps);
        if (!is_there)
            continue;
        for (uint32_t pair = lane; pair < half; pair += 32) {
            float a = x[pair] * factor * args.weight[pair], b = x[pair + half] * factor * args.weight[pair + half];
            x[pair] = a * cosines[pair] - b * sines[pair];
            x[pair + half] = a * sines[pair] + b * cosines[pair];
        }
        for (uint32_t at = args.n_rot + lane; at < head_dim; at += 32)
            x[at] = x[at] * factor * args.weight[at];
    }
}

struct GatedHeadNormArgs {
    float *x;            // [n_rows, n_head, head_dim]
    const float *weight; // [head_dim]
    const float *gates;  // as x
    uint32_t head_dim;
    float eps;
};
SIZE_OF(GatedHeadNormArgs, 32);

// grid: (n_rows * n_head), block: 64
KERNEL(gated_head_norm, GatedHeadNormArgs) {
    uint64_t first = (uint64_t)blockIdx.x * args.head_dim;
    float *x = args.x + first;
    float factor = norm_factor(block_sum_of_squares(x, args.head_dim), args.head_dim, args.eps);
    for (uint32_t at = threadIdx.x; at < args.head_dim; at += blockDim.x)
        x[at] = x[at] * factor * args.weight[at] * silu(args.gates[first + at]);
}
