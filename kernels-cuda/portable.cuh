// What kernels are written in, so that one source is compiled by nvcc for a card and by a C++ compiler for the look-alike driver of
// tests/fake-gpu/, where the threads of a block are fibers.
//
// A kernel is `KERNEL(name, NameArgs) { ... args.x ... }`: it takes one struct by value, whose fields have fixed widths and whose
// pointers are 64 bits wide. backends/cuda/args.rs has the same struct; SIZE_OF holds both to the same size. Its name is that of the
// operation, with the element type behind it where there is one kernel a type (`mat_mul_window_q4_k`).
//
// Rules for all kernels:
// - Every thread of a block reaches every SYNC(), or none does; shared memory is what threads of a block exchange numbers by.
// - Nothing is fused that is not written as fmaf (both compilers are told so), so that a result depends on this source alone.
// - A row's result depends on that row alone: not on the rows beside it, nor on how many blocks there are. No atomics in sums.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define CONSTANT static __device__ const
#define SHARED __shared__
#define SYNC() __syncthreads()
#define KERNEL(name, Args) extern "C" __global__ void name(const Args args)
#define UNROLL _Pragma("unroll")
#define PRAGMA(words) _Pragma(#words)
#define UNROLL_BY(times) PRAGMA(unroll times)
#else
#include "look_alike.h"
#define UNROLL_BY(times)
#endif

#define SIZE_OF(Args, bytes) static_assert(sizeof(Args) == (bytes), "backends/cuda/args.rs has another size for " #Args)

// Threads of a block wherever a kernel names no other number; block_sum takes any power of two up to it.
#define BLOCK 256

DEVICE float float_of_bits(uint32_t bits) {
    union {
        uint32_t bits;
        float value;
    } number;
    number.bits = bits;
    return number.value;
}

DEVICE uint32_t bits_of_float(float value) {
    union {
        uint32_t bits;
        float value;
    } number;
    number.value = value;
    return number.bits;
}

// Exact, for subnormal halves too: the product only moves the exponent.
DEVICE float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float magnitude = (half & 0x7c00) == 0x7c00 ? float_of_bits(bits | 0x7f800000u) : float_of_bits(bits) * float_of_bits(0x77800000u);
    return float_of_bits(bits_of_float(magnitude) | (uint32_t)(half & 0x8000) << 16);
}

// To the nearest, ties to even.
DEVICE uint16_t float_to_half(float value) {
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal: adding 1/2 in f32 leaves the half's bits at the end, rounded as f32 rounds.
        return (uint16_t)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

DEVICE float bfloat_to_float(uint16_t bits) {
    return float_of_bits((uint32_t)bits << 16);
}

DEVICE float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

DEVICE float silu(float x) {
    return x * sigmoid(x);
}

// The first of this thread's elements where a grid in x covers many elements, and how far apart they lie.
DEVICE uint64_t first_element() {
    return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

DEVICE uint64_t element_stride() {
    return (uint64_t)gridDim.x * blockDim.x;
}

// The sum of one number of every thread of the block, always in the same order. blockDim.x is a power of two, at most BLOCK.
DEVICE double block_sum(double value) {
    SHARED double sums[BLOCK];
    SYNC();
    sums[threadIdx.x] = value;
    SYNC();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        SYNC();
    }
    return sums[0];
}

// The sum of one number of every thread of a warp, in the order of block_sum: halves of the threads that are left meet. Every thread of the
// block calls it.
#ifdef __CUDACC__
DEVICE double warp_sum(double value) {
    UNROLL
    for (int half = 16; half > 0; half /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, half);
    return value;
}
#else
DEVICE double warp_sum(double value) {
    SHARED double values[BLOCK];
    SYNC();
    values[threadIdx.x] = value;
    SYNC();
    double sums[32];
    for (int at = 0; at < 32; at++)
        sums[at] = values[threadIdx.x / 32 * 32 + at];
    for (int half = 16; half > 0; half /= 2)
        for (int at = 0; at < half; at++)
            sums[at] += sums[at + half];
    return sums[0];
}
#endif

// The sum of squares of `n` numbers, each thread of the block taking every blockDim.x-th. In f64: exact products, and no overflow.
DEVICE double block_sum_of_squares(const float *x, uint32_t n) {
    double sum = 0.0;
    for (uint32_t at = threadIdx.x; at < n; at += blockDim.x)
        sum += (double)x[at] * (double)x[at];
    return block_sum(sum);
}
