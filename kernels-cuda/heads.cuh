// Norms of heads: Op::HeadNormRope and Op::GatedHeadNorm. A block has a head of a row to itself.
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

// grid: (n_rows * n_head), block: 64
KERNEL(head_norm_rope, HeadNormRopeArgs) {
    float *x = args.x + (uint64_t)blockIdx.x * args.head_dim;
    norm_and_turn(x, args.weight, args.positions[blockIdx.x / args.n_head], args.head_dim, args.n_rot, args.freq_base, args.eps);
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
