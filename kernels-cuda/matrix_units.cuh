// Products of small tiles of halves, summed in f32, and what goes with them: tiles in shared memory, copies into them that are waited for
// later, and exchange within a quad of threads.
//
// A warp multiplies a left tile of 16 rows with a right tile of 8 rows, 16 numbers of each: sums[i][j] += left[i] . right[j]. Every thread
// holds four of the sums: with lane = thread % 32, those of left row lane / 4 and right rows 2 (lane % 4) and the next, then those of left
// row lane / 4 + 8 and the same right rows. On a card that is one instruction of its matrix units; elsewhere, each thread multiplies the
// rows that its own sums need. A sum is a chain over groups of 16 numbers in ascending order, whatever tile it lies in.
//
// Every thread of a warp calls all of these together; those that exchange numbers, every thread of the block.
#pragma once
#include "portable.cuh"

#define WARP 32
// Halves that are copied, and swizzled, together: 16 bytes.
#define CHUNK 8

#ifdef __CUDACC__
struct LeftTile {
    uint32_t at[4];
};
struct RightTile {
    uint32_t at[2];
};
#else
struct LeftTile {
    float rows[2][16]; // lane / 4 and lane / 4 + 8
};
struct RightTile {
    float rows[2][16]; // 2 (lane % 4) and the next
};
#endif

DEVICE uint32_t lane_of_warp() { return threadIdx.x % WARP; }

// Where a chunk of a line lies in a tile whose lines have CHUNKS chunks: lines that are read together begin in different banks.
template <int CHUNKS> DEVICE uint32_t chunk_at(uint32_t line, uint32_t chunk) {
    static_assert(CHUNKS == 4 || CHUNKS % 8 == 0, "lines of 64 bytes or of whole 128");
    uint32_t swizzle = CHUNKS == 4 ? line / 2 % 4 : line % 8;
    return (line * CHUNKS + (chunk ^ swizzle)) * CHUNK;
}

#ifdef __CUDACC__

DEVICE uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }

// Begins to copy 16 bytes to shared memory; zeros where `is_there` is false. Both addresses are multiples of 16.
DEVICE void copy_chunk(uint16_t *to, const uint16_t *from, bool is_there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0));
#else
    *(uint4 *)to = is_there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
#endif
}

// The same for 4, 8 or 16 bytes at multiples of as many.
template <int BYTES> DEVICE void copy_bytes(void *to, const void *from, bool is_there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(is_there ? BYTES : 0));
#else
    UNROLL for (int at = 0; at < BYTES / 4; at++)
        ((uint32_t *)to)[at] = is_there ? ((const uint32_t *)from)[at] : 0;
#endif
}

// Ends a batch of copies.
DEVICE void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\n");
#endif
}

// Waits for all batches of this thread's copies but the last AHEAD; others see them after the next SYNC().
template <int AHEAD> DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;\n" ::"n"(AHEAD));
#endif
}

// Lines first .. first + 16, chunks `chunk` and the next.
template <int CHUNKS> DEVICE void load_left(LeftTile &left, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    uint32_t lane = lane_of_warp();
    const uint16_t *at = tile + chunk_at<CHUNKS>(first + lane % 16, chunk + lane / 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(left.at[0]), "=r"(left.at[1]), "=r"(left.at[2]), "=r"(left.at[3])
                 : "r"(shared_address(at)));
}

// Lines first .. first + 16 as two tiles of eight, chunks `chunk` and the next.
template <int CHUNKS> DEVICE void load_rights(RightTile &low, RightTile &high, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    uint32_t lane = lane_of_warp();
    const uint16_t *at = tile + chunk_at<CHUNKS>(first + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(low.at[0]), "=r"(low.at[1]), "=r"(high.at[0]), "=r"(high.at[1])
                 : "r"(shared_address(at)));
}

// The same of a tile turned round: its lines are the 16 numbers of each row, and chunks `chunk` and the next its two times eight rows.
template <int CHUNKS> DEVICE void load_rights_turned(RightTile &low, RightTile &high, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    uint32_t lane = lane_of_warp();
    const uint16_t *at = tile + chunk_at<CHUNKS>(first + lane % 16, chunk + lane / 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(low.at[0]), "=r"(low.at[1]), "=r"(high.at[0]), "=r"(high.at[1])
                 : "r"(shared_address(at)));
}

DEVICE void multiply_add(float (&sums)[4], const LeftTile &left, const RightTile &right) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(right.at[0]), "r"(right.at[1]));
#else
    UNROLL for (int half = 0; half < 2; half++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(left.at[2 * half]), "r"(left.at[2 * half + 1]), "r"(right.at[half]));
#endif
}

// Two floats as halves, to the nearest; the first in the low bits.
DEVICE uint32_t halves_of(float low, float high) {
    uint32_t halves;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(halves) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 low, high; cvt.rn.f16.f32 low, %2; cvt.rn.f16.f32 high, %1; mov.b32 %0, {low, high};}\n"
        : "=r"(halves)
        : "f"(high), "f"(low));
#endif
    return halves;
}

// Sums with two neighbouring right tiles become a left tile, whose 16 numbers are those right rows.
DEVICE LeftTile left_of_sums(const float (&low)[4], const float (&high)[4]) {
    return {{halves_of(low[0], low[1]), halves_of(low[2], low[3]), halves_of(high[0], high[1]), halves_of(high[2], high[3])}};
}

// Over the four threads that hold sums of the same left rows.
DEVICE float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

DEVICE float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

#else

DEVICE void copy_chunk(uint16_t *to, const uint16_t *from, bool is_there) {
    for (int at = 0; at < CHUNK; at++)
        to[at] = is_there ? from[at] : 0;
}

template <int BYTES> DEVICE void copy_bytes(void *to, const void *from, bool is_there) {
    for (int at = 0; at < BYTES / 4; at++)
        ((uint32_t *)to)[at] = is_there ? ((const uint32_t *)from)[at] : 0;
}

DEVICE void end_copies() {}

template <int AHEAD> DEVICE void wait_for_copies() {}

template <int CHUNKS> DEVICE void load_row(float (&row)[16], const uint16_t *tile, uint32_t line, uint32_t chunk) {
    for (uint32_t at = 0; at < 16; at++)
        row[at] = half_to_float(tile[chunk_at<CHUNKS>(line, chunk + at / CHUNK) + at % CHUNK]);
}

template <int CHUNKS> DEVICE void load_left(LeftTile &left, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    for (uint32_t at = 0; at < 2; at++)
        load_row<CHUNKS>(left.rows[at], tile, first + lane_of_warp() / 4 + 8 * at, chunk);
}

template <int CHUNKS> DEVICE void load_rights(RightTile &low, RightTile &high, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    for (uint32_t at = 0; at < 2; at++) {
        load_row<CHUNKS>(low.rows[at], tile, first + lane_of_warp() % 4 * 2 + at, chunk);
        load_row<CHUNKS>(high.rows[at], tile, first + 8 + lane_of_warp() % 4 * 2 + at, chunk);
    }
}

template <int CHUNKS> DEVICE void load_rights_turned(RightTile &low, RightTile &high, const uint16_t *tile, uint32_t first, uint32_t chunk) {
    for (uint32_t at = 0; at < 2; at++) {
        uint32_t row = lane_of_warp() % 4 * 2 + at;
        for (uint32_t number = 0; number < 16; number++) {
            low.rows[at][number] = half_to_float(tile[chunk_at<CHUNKS>(first + number, chunk) + row]);
            high.rows[at][number] = half_to_float(tile[chunk_at<CHUNKS>(first + number, chunk + 1) + row]);
        }
    }
}

DEVICE void multiply_add(float (&sums)[4], const LeftTile &left, const RightTile &right) {
    for (int i = 0; i < 4; i++) {
        float sum = 0.0f;
        for (int at = 0; at < 16; at++)
            sum = fmaf(left.rows[i / 2][at], right.rows[i % 2][at], sum);
        sums[i] += sum;
    }
}

DEVICE uint32_t halves_of(float low, float high) { return float_to_half(low) | (uint32_t)float_to_half(high) << 16; }

// What threads of a block exchange here.
SHARED float exchanged[BLOCK][8];

DEVICE LeftTile left_of_sums(const float (&low)[4], const float (&high)[4]) {
    SYNC();
    for (int at = 0; at < 4; at++) {
        exchanged[threadIdx.x][at] = half_to_float(float_to_half(low[at]));
        exchanged[threadIdx.x][4 + at] = half_to_float(float_to_half(high[at]));
    }
    SYNC();
    LeftTile left;
    for (uint32_t row = 0; row < 2; row++)
        for (uint32_t at = 0; at < 16; at++)
            left.rows[row][at] = exchanged[threadIdx.x / 4 * 4 + at % 8 / 2][at / 8 * 4 + 2 * row + at % 2];
    return left;
}

DEVICE float quad_max(float value) {
    SYNC();
    exchanged[threadIdx.x][0] = value;
    SYNC();
    const float(*quad)[8] = exchanged + threadIdx.x / 4 * 4;
    return fmaxf(fmaxf(quad[0][0], quad[1][0]), fmaxf(quad[2][0], quad[3][0]));
}

DEVICE float quad_sum(float value) {
    SYNC();
    exchanged[threadIdx.x][0] = value;
    SYNC();
    const float(*quad)[8] = exchanged + threadIdx.x / 4 * 4;
    uint32_t own = threadIdx.x % 4;
    return (quad[own][0] + quad[own ^ 1][0]) + (quad[own ^ 2][0] + quad[own ^ 3][0]);
}

#endif
