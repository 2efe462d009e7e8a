// Op::RmsNorm: root-mean-square norm of rows.
#pragma once
#include "portable.cuh"

struct RmsNormArgs {
    const float *x;      // [n_rows, n_cols]
    const float *weight; // [n_cols]
    float *out;          // [n_rows, n_cols]
    uint32_t n_cols;
    float eps;
};
SIZE_OF(RmsNormArgs, 32);

// What every number of a row is multiplied by.
DEVICE float norm_factor(double sum_of_squares, uint32_t n, float eps) {
    return (float)(1.0 / sqrt(sum_of_squares / (double)n + (double)eps));
}

// grid: (n_rows), block: BLOCK
KERNEL(rms_norm, RmsNormArgs) {
    const float *x = args.x + (uint64_t)blockIdx.x * args.n_cols;
    float *out = args.out + (uint64_t)blockIdx.x * args.n_cols;
    float factor = norm_factor(block_sum_of_squares(x, args.n_cols), args.n_cols, args.eps);
    for (uint32_t at = threadIdx.x; at < args.n_cols; at += blockDim.x)
        out[at] = x[at] * factor * args.weight[at];
}
