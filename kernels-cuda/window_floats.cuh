// Products of one to eight rows of floats with a matrix of floats, as a router's. A block has an output to itself, so that the few outputs
// of a router are spread over many processors.
#pragma once
#include "mat_mul.cuh"
#include "window_quantise.cuh"

#define FLOATS_BLOCK 128

// 16 bytes of weights.
struct alignas(16) Sixteen {
    uint32_t at[4];
};

DEVICE float half_of(F16, uint32_t bits) { return half_to_float((uint16_t)bits); }
DEVICE float half_of(BF16, uint32_t bits) { return bfloat_to_float((uint16_t)bits); }

// Weights k .. k + 8 of a row of n; zeros behind its end.
DEVICE void float_weights8(F32, const uint8_t *row, uint32_t k, uint32_t n, float (&w)[8]) { load_floats8((const float *)row, k, n, w); }

template <class Q> DEVICE void float_weights8(Q type, const uint8_t *row, uint32_t k, uint32_t n, float (&w)[8]) {
    const uint8_t *from = row + 2 * (uint64_t)k;
    if (k + 8 > n || ((uint64_t)from & 15) != 0) {
        load_weights8<Q>(row, k, n, w);
        return;
    }
    Sixteen words = *(const Sixteen *)from;
    UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = half_of(type, words.at[i / 2] >> (16 * (i % 2)));
}

template <class Q, int ROWS> DEVICE void float_products(const MatMulArgs &args) {
    SHARED float parts[FLOATS_BLOCK / WARP][ROWS];
    uint32_t output = blockIdx.x;
    const uint8_t *weights = args.weights + output * args.row_bytes;
    float sums[ROWS];
    UNROLL
    for (int row = 0; row < ROWS; row++)
        sums[row] = 0.0f;
    _Pragma("unroll 2") for (uint32_t k = 8 * threadIdx.x; k < args.n_in; k += 8 * FLOATS_BLOCK) {
        float w[8];
        float_weights8(Q(), weights, k, args.n_in, w);
        UNROLL
        for (int row = 0; row < ROWS; row++) {
            if (row < (int)args.n_rows) {
                float x[8];
                load_floats8((const float *)args.input + (uint64_t)row * args.n_in, k, args.n_in, x);
                UNROLL
                for (int i = 0; i < 8; i++)
                    sums[row] = fmaf(w[i], x[i], sums[row]);
            }
        }
    }
    UNROLL
    for (int row = 0; row < ROWS; row++) {
        float sum = sum_over_lanes(sums[row], WARP);
        if (lane_of_warp() == 0)
            parts[threadIdx.x / WARP][row] = sum;
    }
    SYNC();
    if (threadIdx.x >= args.n_rows)
        return;
    float sum = 0.0f;
    for (int warp = 0; warp < FLOATS_BLOCK / WARP; warp++)
        sum += parts[warp][threadIdx.x];
    store_product(args, threadIdx.x, output, sum);
}

// window_floats_<type>   grid: (n_out), block: FLOATS_BLOCK
#define WINDOW_FLOATS(name, Type)                                                                                                          \
    KERNEL(window_floats_##name, MatMulArgs) {                                                                                             \
        if (args.n_rows == 1)                                                                                                              \
            float_products<Type, 1>(args);                                                                                                 \
        else                                                                                                                               \
            float_products<Type, WINDOW_ROWS>(args);                                                                                       \
    }
WINDOW_FLOATS(f32, F32)
WINDOW_FLOATS(f16, F16)
WINDOW_FLOATS(bf16, BF16)
