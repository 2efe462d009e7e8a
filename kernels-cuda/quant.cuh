// Weights of every element type as floats, eight neighbours at a time.
//
// A type is a struct with the weights (LEN) and bytes (BYTES) of a block, the bytes that blocks are aligned to (ALIGN; a matrix begins at a
// multiple of four), and `decode8(block, first, w)`: weights first .. first + 8 of a block, `first` a multiple of eight. Each weight is the
// format's formula rounded once, as src/quant's dequantisation has it: products of scale and quant are exact, so contracting the
// subtraction of a minimum changes no bit. Layouts are drawn in src/quant. Float types count as blocks of eight, and a row may end inside.
#pragma once

#include "portable.cuh"
#include "quant_tables.cuh"

DEVICE uint32_t u16_at(const uint8_t *p) { return *reinterpret_cast<const uint16_t *>(p); }

// The 32 bits at an address that is a multiple of ALIGN.
template <int ALIGN> DEVICE uint32_t u32_at(const uint8_t *p) {
    if (ALIGN % 4 == 0) {
        return *reinterpret_cast<const uint32_t *>(p);
    }
    if (ALIGN % 2 == 0) {
        return u16_at(p) | u16_at(p + 2) << 16;
    }
    return p[0] | (uint32_t)(p[1]) << 8 | (uint32_t)(p[2]) << 16 | (uint32_t)(p[3]) << 24;
}

DEVICE float half_at(const uint8_t *p) { return half_to_float((uint16_t)u16_at(p)); }

// Nibble `index` of a field, counted from the low nibble of its first byte.
DEVICE uint32_t nibble_at(const uint8_t *p, uint32_t index) { return (p[index / 2] >> (4 * (index % 2))) & 15; }

// Eight codes of BITS bits, one in each of eight bytes, from bit `shift` on.
template <int BITS, int ALIGN> DEVICE void codes8(const uint8_t *p, uint32_t shift, int (&q)[8]) {
    const uint32_t low = u32_at<ALIGN>(p) >> shift, high = u32_at<ALIGN>(p + 4) >> shift;
    UNROLL
    for (int i = 0; i < 4; i++) {
        q[i] = (low >> (8 * i)) & ((1 << BITS) - 1);
        q[i + 4] = (high >> (8 * i)) & ((1 << BITS) - 1);
    }
}

// Adds `value` to each of eight codes whose bit `plane` is set in its byte.
template <int ALIGN> DEVICE void add_bits8(const uint8_t *p, uint32_t plane, int value, int (&q)[8]) {
    int bits[8];
    codes8<1, ALIGN>(p, plane, bits);
    UNROLL
    for (int i = 0; i < 8; i++) {
        q[i] += bits[i] * value;
    }
}

DEVICE void scaled8(const int (&q)[8], float scale, float min, float (&w)[8]) {
    UNROLL
    for (int i = 0; i < 8; i++) {
        w[i] = scale * float(q[i]) - min;
    }
}

struct F32 {
    enum { LEN = 8, BYTES = 32, ALIGN = 4, IS_FLOAT = 1 };
    DEVICE float one(const uint8_t *row, uint32_t k) { return reinterpret_cast<const float *>(row)[k]; }
};

struct F16 {
    enum { LEN = 8, BYTES = 16, ALIGN = 2, IS_FLOAT = 1 };
    DEVICE float one(const uint8_t *row, uint32_t k) { return half_at(row + 2 * (uint64_t)(k)); }
};

struct BF16 {
    enum { LEN = 8, BYTES = 16, ALIGN = 2, IS_FLOAT = 1 };
    DEVICE float one(const uint8_t *row, uint32_t k) { return bfloat_to_float((uint16_t)u16_at(row + 2 * (uint64_t)(k))); }
};

// The 4-bit part of types with blocks of 32: byte j holds weight j in its low and weight j + 16 in its high nibble.
template <int ALIGN> DEVICE void nibbles8(const uint8_t *p, uint32_t first, int (&q)[8]) {
    codes8<4, ALIGN>(p + first % 16, first / 16 * 4, q);
}

DEVICE void add_fifth_bits8(uint32_t bits, uint32_t first, int (&q)[8]) {
    UNROLL
    for (int i = 0; i < 8; i++) {
        q[i] += ((bits >> (first + i)) & 1) * 16;
    }
}

struct Q4_0 {
    enum { LEN = 32, BYTES = 18, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 2, first, q);
        UNROLL
        for (int i = 0; i < 8; i++) {
            q[i] -= 8;
        }
        scaled8(q, half_at(block), 0.0f, w);
    }
};

struct Q4_1 {
    enum { LEN = 32, BYTES = 20, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 4, first, q);
        scaled8(q, half_at(block), -half_at(block + 2), w);
    }
};

struct Q5_0 {
    enum { LEN = 32, BYTES = 22, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 6, first, q);
        add_fifth_bits8(u32_at<ALIGN>(block + 2), first, q);
        UNROLL
        for (int i = 0; i < 8; i++) {
            q[i] -= 16;
        }
        scaled8(q, half_at(block), 0.0f, w);
    }
};

struct Q5_1 {
    enum { LEN = 32, BYTES = 24, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 8, first, q);
        add_fifth_bits8(u32_at<ALIGN>(block + 4), first, q);
        scaled8(q, half_at(block), -half_at(block + 2), w);
    }
};

// Eight signed bytes.
template <int ALIGN> DEVICE void bytes8(const uint8_t *p, int (&q)[8]) {
    codes8<8, ALIGN>(p, 0, q);
    UNROLL
    for (int i = 0; i < 8; i++) {
        q[i] = int8_t(q[i]);
    }
}

struct Q8_0 {
    enum { LEN = 32, BYTES = 34, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        bytes8<ALIGN>(block + 2 + first, q);
        scaled8(q, half_at(block), 0.0f, w);
    }
};

DEVICE void values8(const int8_t (&values)[16], int (&q)[8]) {
    UNROLL
    for (int i = 0; i < 8; i++) {
        q[i] = values[q[i]];
    }
}

struct IQ4_NL {
    enum { LEN = 32, BYTES = 18, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 2, first, q);
        values8(IQ4_VALUES, q);
        scaled8(q, half_at(block), 0.0f, w);
    }
};

struct MXFP4 {
    enum { LEN = 32, BYTES = 17, ALIGN = 1, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        nibbles8<ALIGN>(block + 1, first, q);
        values8(MXFP4_VALUES, q);
        // Half of 2^(exponent - 127), as the values are doubled; the two smallest are subnormal.
        const uint32_t exponent = block[0];
        scaled8(q, float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23), 0.0f, w);
    }
};

// 2-bit codes of a block of 256: two runs of 32 bytes, each of four planes of 32 weights.
template <int ALIGN> DEVICE void two_bits8(const uint8_t *p, uint32_t first, int (&q)[8]) {
    codes8<2, ALIGN>(p + first / 128 * 32 + first % 32, first / 32 % 4 * 2, q);
}

struct Q2_K {
    enum { LEN = 256, BYTES = 84, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        two_bits8<ALIGN>(block + 16, first, q);
        const uint32_t scales = block[first / 16];
        scaled8(q, half_at(block + 80) * float(scales & 15), half_at(block + 82) * float(scales >> 4), w);
    }
};

struct Q3_K {
    enum { LEN = 256, BYTES = 110, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        two_bits8<ALIGN>(block + 32, first, q);
        add_bits8<ALIGN>(block + first % 32, first / 32, 4, q);
        UNROLL
        for (int i = 0; i < 8; i++) {
            q[i] -= 4;
        }
        const uint32_t group = first / 16;
        const uint32_t low = (block[96 + group % 8] >> (4 * (group / 8))) & 15, high = (block[104 + group % 4] >> (2 * (group / 4))) & 3;
        scaled8(q, half_at(block + 108) * float(int(low | high << 4) - 32), 0.0f, w);
    }
};

// The scale and the minimum of group `s` of 32 weights, 6 bits each, which Q4_K and Q5_K share.
struct ScaleAndMin {
    uint32_t scale, min;
};

DEVICE ScaleAndMin scale_and_min(const uint8_t *p, uint32_t s) {
    if (s < 4) {
        return {p[s] & 63u, p[s + 4] & 63u};
    }
    const uint32_t rest = p[s + 4];
    return {(rest & 15) | (p[s - 4] >> 6) << 4, rest >> 4 | (p[s] >> 6) << 4};
}

struct Q4_K {
    enum { LEN = 256, BYTES = 144, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        codes8<4, ALIGN>(block + 16 + first / 64 * 32 + first % 32, first / 32 % 2 * 4, q);
        const ScaleAndMin group = scale_and_min(block + 4, first / 32);
        scaled8(q, half_at(block) * float(group.scale), half_at(block + 2) * float(group.min), w);
    }
};

struct Q5_K {
    enum { LEN = 256, BYTES = 176, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        codes8<4, ALIGN>(block + 48 + first / 64 * 32 + first % 32, first / 32 % 2 * 4, q);
        add_bits8<ALIGN>(block + 16 + first % 32, first / 32, 16, q);
        const ScaleAndMin group = scale_and_min(block + 4, first / 32);
        scaled8(q, half_at(block) * float(group.scale), half_at(block + 2) * float(group.min), w);
    }
};

struct Q6_K {
    enum { LEN = 256, BYTES = 210, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8], high[8];
        codes8<4, ALIGN>(block + first / 128 * 64 + first % 64, first / 64 % 2 * 4, q);
        two_bits8<ALIGN>(block + 128, first, high);
        UNROLL
        for (int i = 0; i < 8; i++) {
            q[i] += high[i] * 16 - 32;
        }
        scaled8(q, half_at(block + 208) * float(int8_t(block[192 + first / 16])), 0.0f, w);
    }
};

// Eight magnitudes of a code book entry with their signs: bit i set makes weight i negative.
DEVICE void signed8(uint32_t low, uint32_t high, uint32_t signs, int (&q)[8]) {
    UNROLL
    for (int i = 0; i < 8; i++) {
        const int magnitude = ((i < 4 ? low : high) >> (8 * (i % 4))) & 255;
        q[i] = (signs >> i) & 1 ? -magnitude : magnitude;
    }
}

DEVICE void signed8(uint64_t entry, uint32_t signs, int (&q)[8]) { signed8(uint32_t(entry), uint32_t(entry >> 32), signs, q); }

// The sign bits of a 7-bit code: the eighth makes the number of minus signs even.
DEVICE uint32_t even_signs(uint32_t code) {
    code &= 127;
    uint32_t parity = code ^ code >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return code | (parity & 1) << 7;
}

DEVICE float odd_scale(uint32_t s) { return float(2 * s + 1); }

struct IQ2_XXS {
    enum { LEN = 256, BYTES = 66, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint8_t *pair = block + 2 + first / 32 * 8;
        const uint32_t lane = first / 8 % 4, signs_and_scale = u32_at<ALIGN>(pair + 4);
        signed8(IQ2_XXS_GRID[pair[lane]], even_signs(signs_and_scale >> (7 * lane)), q);
        scaled8(q, half_at(block) * 0.125f * odd_scale(signs_and_scale >> 28), 0.0f, w);
    }
};

struct IQ2_XS {
    enum { LEN = 256, BYTES = 74, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t code = u16_at(block + 2 + first / 8 * 2);
        signed8(IQ2_XS_GRID[code & 511], even_signs(code >> 9), q);
        scaled8(q, half_at(block) * 0.125f * odd_scale(nibble_at(block + 66, first / 16)), 0.0f, w);
    }
};

struct IQ2_S {
    enum { LEN = 256, BYTES = 82, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t lane = first / 8, high = (block[66 + lane / 4] >> (2 * (lane % 4))) & 3;
        signed8(IQ2_S_GRID[block[2 + lane] | high << 8], block[34 + lane], q);
        scaled8(q, half_at(block) * 0.125f * odd_scale(nibble_at(block + 74, first / 16)), 0.0f, w);
    }
};

struct IQ3_XXS {
    enum { LEN = 256, BYTES = 98, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t lane = first / 8 % 4, signs_and_scale = u32_at<ALIGN>(block + 66 + first / 32 * 4);
        const uint32_t indices = u16_at(block + 2 + first / 8 * 2);
        signed8(IQ3_XXS_GRID[indices & 255], IQ3_XXS_GRID[indices >> 8], even_signs(signs_and_scale >> (7 * lane)), q);
        scaled8(q, half_at(block) * 0.25f * odd_scale(signs_and_scale >> 28), 0.0f, w);
    }
};

struct IQ3_S {
    enum { LEN = 256, BYTES = 110, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t lane = first / 8, indices = u16_at(block + 2 + lane * 2);
        const uint32_t ninth = block[66 + lane / 4] >> (lane % 4 * 2);
        const uint32_t low = IQ3_S_GRID[(indices & 255) | (ninth & 1) << 8], high = IQ3_S_GRID[indices >> 8 | (ninth >> 1 & 1) << 8];
        signed8(low, high, block[74 + lane], q);
        scaled8(q, half_at(block) * odd_scale(nibble_at(block + 106, first / 32)), 0.0f, w);
    }
};

// Eight weights of IQ1 in eighths, shifted by one eighth.
DEVICE void shifted8(uint32_t index, bool down, int (&q)[8]) {
    const uint64_t entry = IQ1_GRID[index];
    UNROLL
    for (int i = 0; i < 8; i++) {
        q[i] = int8_t(entry >> (8 * i)) + (down ? -1 : 1);
    }
}

struct IQ1_S {
    enum { LEN = 256, BYTES = 50, ALIGN = 2, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t lane = first / 8, high = u16_at(block + 34 + first / 32 * 2);
        shifted8(block[2 + lane] | (high >> (3 * (lane % 4)) & 7) << 8, high & 0x8000, q);
        scaled8(q, half_at(block) * 0.125f * odd_scale(high >> 12 & 7), 0.0f, w);
    }
};

struct IQ1_M {
    enum { LEN = 256, BYTES = 56, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t lane = first / 8, high = nibble_at(block + 32, lane), group = first / 16;
        shifted8(block[lane] | (high & 7) << 8, high & 8, q);
        const uint32_t low_words = u32_at<ALIGN>(block + 48), high_words = u32_at<ALIGN>(block + 52);
        const uint32_t d = (low_words >> 12 & 15) | (low_words >> 28) << 4 | (high_words >> 12 & 15) << 8 | (high_words >> 28) << 12;
        const uint32_t scales = (group < 8 ? low_words : high_words) >> (group / 4 % 2 * 16);
        scaled8(q, half_to_float((uint16_t)d) * 0.125f * odd_scale(scales >> (3 * (group % 4)) & 7), 0.0f, w);
    }
};

struct IQ4_XS {
    enum { LEN = 256, BYTES = 136, ALIGN = 4, IS_FLOAT = 0 };
    DEVICE void decode8(const uint8_t *block, uint32_t first, float (&w)[8]) {
        int q[8];
        const uint32_t group = first / 32;
        nibbles8<ALIGN>(block + 8 + group * 16, first % 32, q);
        values8(IQ4_VALUES, q);
        const uint32_t high = u16_at(block + 2) >> (2 * group) & 3;
        scaled8(q, half_at(block) * float(int(nibble_at(block + 4, group) | high << 4) - 32), 0.0f, w);
    }
};

// Weights k .. k + 8 of a row of `n`; zeros behind its end. `k` is a multiple of eight.
template <class Q, int IS_FLOAT> struct Weights8 {
    DEVICE void load(const uint8_t *row, uint32_t k, uint32_t n, float (&w)[8]) {
        if (k < n) {
            Q::decode8(row + (uint64_t)(k / Q::LEN) * Q::BYTES, k % Q::LEN, w);
            return;
        }
        UNROLL
        for (int i = 0; i < 8; i++) {
            w[i] = 0.0f;
        }
    }
};

template <class Q> struct Weights8<Q, 1> {
    DEVICE void load(const uint8_t *row, uint32_t k, uint32_t n, float (&w)[8]) {
        UNROLL
        for (int i = 0; i < 8; i++) {
            w[i] = k + i < n ? Q::one(row, k + i) : 0.0f;
        }
    }
};

template <class Q> DEVICE void load_weights8(const uint8_t *row, uint32_t k, uint32_t n, float (&w)[8]) {
    Weights8<Q, Q::IS_FLOAT>::load(row, k, n, w);
}

// Expands to X(name in kernel names, struct) for every element type.
#define FOR_EVERY_TYPE(X)                                                                                                                  \
    X(f32, F32) X(f16, F16) X(bf16, BF16)                                                                                                  \
    X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q8_0, Q8_0)                                                                  \
    X(q2_k, Q2_K) X(q3_k, Q3_K) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K)                                                                  \
    X(iq2_xxs, IQ2_XXS) X(iq2_xs, IQ2_XS) X(iq2_s, IQ2_S) X(iq3_xxs, IQ3_XXS) X(iq3_s, IQ3_S)                                              \
    X(iq1_s, IQ1_S) X(iq1_m, IQ1_M) X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS) X(mxfp4, MXFP4)
