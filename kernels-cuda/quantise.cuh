// Op::Quantise: rows of f32 to activation rows, with the bytes that the host writes.
#pragma once
#include "activations.cuh"

// Columns of a row that a block of as many threads stores.
#define QUANTISE_BLOCK 256

struct QuantiseArgs {
    const float *x; // [n_rows, n_cols]
    uint8_t *out;   // [n_rows, n_cols] in the format
    uint32_t n_cols;
    uint32_t format;
};
SIZE_OF(QuantiseArgs, 24);

// Halves away from zero; a NaN gives zero.
DEVICE int round_to_quant(float value) {
    if (!(value == value))
        return 0;
    float clamped = fminf(fmaxf(value, -127.0f), 127.0f);
    int whole = (int)clamped;
    float rest = clamped - (float)whole;
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

// Stores number k of a row of n; thread t of the block has number t of the block's 256, of which some may lie behind the end. Every thread
// of the block calls it.
DEVICE void store_activation(uint8_t *row, uint32_t format, uint32_t k, uint32_t n, float value) {
    if (format == ROWS_F32) {
        if (k < n)
            ((float *)row)[k] = value;
        return;
    }
    SHARED uint32_t magnitudes[QUANTISE_BLOCK];
    SHARED int quants[QUANTISE_BLOCK];
    uint32_t t = threadIdx.x, block_len = format == ROWS_Q8_0 ? Q8_0_BLOCK : Q8_K_BLOCK;
    // The bits of magnitudes are ordered as integers.
    magnitudes[t] = k < n ? bits_of_float(value) & 0x7fffffffu : 0;
    SYNC();
    for (uint32_t half = block_len / 2; half > 0; half /= 2) {
        if (t % block_len < half && magnitudes[t + half] > magnitudes[t])
            magnitudes[t] = magnitudes[t + half];
        SYNC();
    }
    float scale = float_of_bits(magnitudes[t / block_len * block_len]) / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    int quant = round_to_quant(value * inverse);
    quants[t] = quant;
    SYNC();
    if (k >= n)
        return;
    ((int8_t *)row)[k] = (int8_t)quant;
    if (t % block_len == 0)
        ((float *)(row + n))[k / block_len] = scale;
    uint32_t sum_len = format == ROWS_Q8_0 ? Q8_0_SUM : Q8_K_SUM, n_sums = n / sum_len;
    if (t % sum_len == 0) {
        int sum = 0;
        for (uint32_t at = t; at < t + sum_len; at++)
            sum += quants[at];
        int16_t *sums = (int16_t *)(row + n + n / block_len * 4);
        sums[k / sum_len] = (int16_t)sum;
        // Rows end at a multiple of four bytes.
        if (k / sum_len + 1 == n_sums && n_sums % 2 == 1)
            sums[n_sums] = 0;
    }
}

// grid: (n_rows, n_cols / QUANTISE_BLOCK, rounded up), block: QUANTISE_BLOCK
KERNEL(quantise, QuantiseArgs) {
    uint64_t row = blockIdx.x;
    uint32_t k = blockIdx.y * QUANTISE_BLOCK + threadIdx.x;
    float value = k < args.n_cols ? args.x[row * args.n_cols + k] : 0.0f;
    store_activation(args.out + row * activation_row_bytes(args.format, args.n_cols), args.format, k, args.n_cols, value);
}
