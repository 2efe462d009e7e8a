// Activation rows written by warps, 256 numbers at a time, with the bytes of Op::Quantise.
#pragma once
#include "activations.cuh"
#include "quantise.cuh"
#include "window_products.cuh"

#ifdef __CUDACC__

template <class T> DEVICE T from_lane_apart(T value, uint32_t apart) { return __shfl_xor_sync(0xffffffffu, value, apart); }

#else

template <class T> DEVICE T from_lane_apart(T value, uint32_t apart) {
    SHARED T values[1024];
    SYNC();
    values[threadIdx.x] = value;
    SYNC();
    return values[threadIdx.x ^ apart];
}

#endif

// The sum over the threads of a block of at most BLOCK, whole warps, always in the same order. Every thread of the block calls it.
DEVICE double sum_over_block(double value) {
    SHARED double sums[BLOCK / WARP];
    for (uint32_t apart = WARP / 2; apart > 0; apart /= 2)
        value += from_lane_apart(value, apart);
    if (lane_of_warp() == 0)
        sums[threadIdx.x / WARP] = value;
    SYNC();
    double sum = 0.0;
    for (uint32_t warp = 0; warp < blockDim.x / WARP; warp++)
        sum += sums[warp];
    SYNC();
    return sum;
}

// Stores numbers k .. k + 8 of a row of n in a format, k being eight times a thread's place among the 256 numbers of its warp, plus a
// multiple of 256. Every thread of the block calls it; those behind the row's end have zeros.
DEVICE void store_activations8(uint8_t *row, uint32_t format, uint32_t k, uint32_t n, const float (&values)[8]) {
    if (format == ROWS_F32) {
        UNROLL
        for (uint32_t i = 0; i < 8; i++) {
            if (k + i < n)
                ((float *)row)[k + i] = values[i];
        }
        return;
    }
    uint32_t largest = 0;
    UNROLL
    for (int i = 0; i < 8; i++) {
        uint32_t magnitude = bits_of_float(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t lanes = (format == ROWS_Q8_0 ? Q8_0_BLOCK : Q8_K_BLOCK) / 8, sum_lanes = (format == ROWS_Q8_0 ? Q8_0_SUM : Q8_K_SUM) / 8;
    UNROLL
    for (uint32_t apart = 1; apart < WARP; apart *= 2) {
        uint32_t other = from_lane_apart(largest, apart);
        if (apart < lanes && other > largest)
            largest = other;
    }
    float scale = float_of_bits(largest) / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    uint32_t words[2] = {0, 0};
    int sum = 0;
    UNROLL
    for (int i = 0; i < 8; i++) {
        int quant = round_to_quant(values[i] * inverse);
        sum += quant;
        words[i / 4] |= (uint32_t)(quant & 255) << (8 * (i % 4));
    }
    UNROLL
    for (uint32_t apart = 1; apart < Q8_0_SUM / 8; apart *= 2) {
        int other = from_lane_apart(sum, apart);
        if (apart < sum_lanes)
            sum += other;
    }
    if (k >= n)
        return;
    ((uint32_t *)(row + k))[0] = words[0];
    ((uint32_t *)(row + k))[1] = words[1];
    uint32_t block_len = 8 * lanes, sum_len = 8 * sum_lanes, n_sums = n / sum_len;
    if (k % block_len == 0)
        ((float *)(row + n))[k / block_len] = scale;
    if (k % sum_len == 0) {
        int16_t *sums = (int16_t *)(row + n + n / block_len * 4);
        sums[k / sum_len] = (int16_t)sum;
        // Rows end at a multiple of four bytes.
        if (k / sum_len + 1 == n_sums && n_sums % 2 == 1)
            sums[n_sums] = 0;
    }
}

struct WindowActivateArgs {
    const float *gate; // [n_rows, n_cols]
    const float *up;   // [n_rows, n_cols]
    uint8_t *out;      // [n_rows, n_cols] in the format
    uint32_t n_cols;
    uint32_t format;
};
SIZE_OF(WindowActivateArgs, 32);

// silu(gate) * up as activation rows.
// grid: (n_rows, n_cols / 256, rounded up), block: WARP
KERNEL(window_activate, WindowActivateArgs) {
    uint64_t first = blockIdx.x * (uint64_t)args.n_cols;
    uint32_t k = blockIdx.y * 256 + lane_of_warp() * 8;
    float gate[8], up[8];
    load_floats8(args.gate + first, k, args.n_cols, gate);
    load_floats8(args.up + first, k, args.n_cols, up);
    UNROLL
    for (int i = 0; i < 8; i++)
        gate[i] = silu(gate[i]) * up[i];
    store_activations8(args.out + blockIdx.x * activation_row_bytes(args.format, args.n_cols), args.format, k, args.n_cols, gate);
}
