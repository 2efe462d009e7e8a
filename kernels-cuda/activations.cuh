// Activation rows as products read them; their layouts are drawn at `ActivationFormat` in src/quant/activation.rs.
#pragma once
#include "portable.cuh"

// Numbers of `ActivationFormat`.
#define ROWS_F32 0
#define ROWS_Q8_0 1
#define ROWS_Q8_K 2

// Numbers of a row that share a scale, and a stored sum.
#define Q8_0_BLOCK 32
#define Q8_0_SUM 32
#define Q8_K_BLOCK 256
#define Q8_K_SUM 16

// Four neighbours in memory, read and written at once.
struct alignas(16) Four {
    float at[4];
};

// Numbers k .. k + 8 of a row of n floats; zeros behind its end.
DEVICE void load_floats8(const float *row, uint32_t k, uint32_t n, float (&x)[8]) {
    const float *from = row + k;
    if (k + 8 <= n && ((uint64_t)from & 15) == 0) {
        Four low = ((const Four *)from)[0], high = ((const Four *)from)[1];
        UNROLL
        for (int i = 0; i < 4; i++) {
            x[i] = low.at[i];
            x[i + 4] = high.at[i];
        }
        return;
    }
    UNROLL
    for (uint32_t i = 0; i < 8; i++)
        x[i] = k + i < n ? from[i] : 0.0f;
}

DEVICE uint64_t activation_row_bytes(uint32_t format, uint32_t n) {
    if (format == ROWS_F32)
        return (uint64_t)n * 4;
    if (format == ROWS_Q8_0)
        return (uint64_t)n + n / 32 * 4 + (n / 32 * 2 + 3) / 4 * 4;
    return (uint64_t)n + n / 256 * 4 + n / 16 * 2;
}

// Numbers k .. k + 8 of a row of n; zeros behind its end. k is a multiple of eight, and quantised rows end at one.
DEVICE void load_activations8(const uint8_t *row, uint32_t format, uint32_t k, uint32_t n, float (&x)[8]) {
    if (format == ROWS_F32) {
        load_floats8((const float *)row, k, n, x);
        return;
    }
    if (k >= n) {
        UNROLL
        for (int i = 0; i < 8; i++)
            x[i] = 0.0f;
        return;
    }
    uint32_t low = *(const uint32_t *)(row + k), high = *(const uint32_t *)(row + k + 4);
    float scale = ((const float *)(row + n))[k / (format == ROWS_Q8_0 ? Q8_0_BLOCK : Q8_K_BLOCK)];
    UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = scale * (float)(int8_t)(low >> (8 * i));
        x[i + 4] = scale * (float)(int8_t)(high >> (8 * i));
    }
}
