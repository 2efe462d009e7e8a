// Integer dot products of quantised weights with quantised activation rows, a slice of 32 weights at a time.
//
// `Codes<Q>` says how the slices of a type's block are taken apart: 32 codes as packed signed bytes, in two halves of 16 neighbours, with
// what the sums of products of each half are multiplied by. Sums of products are exact integers; what is left to f32 is one scale of the
// weights, one of the activations, and the chain of additions over slices. Layouts are drawn in src/quant.
#pragma once
#include "activations.cuh"
#include "quant.cuh"

#ifdef __CUDACC__

// sum + the products of four signed bytes.
DEVICE int dot4(uint32_t a, uint32_t b, int sum) { return __dp4a((int)a, (int)b, sum); }

// Bytes of b:a (a has numbers 0 to 3), one for each of the four low nibbles of `select`, which are below eight.
DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) { return __byte_perm(a, b, select); }

// The low word of high:low moved right by `bits`, below 32.
DEVICE uint32_t moved_right(uint32_t low, uint32_t high, uint32_t bits) { return __funnelshift_r(low, high, bits); }

DEVICE uint32_t bit_count(uint32_t word) { return __popc(word); }

DEVICE float float_of_half(uint32_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
    return value;
}

#else

DEVICE int dot4(uint32_t a, uint32_t b, int sum) {
    for (int i = 0; i < 4; i++)
        sum += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
    return sum;
}

DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t select) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t picked = 0;
    for (int i = 0; i < 4; i++)
        picked |= (uint32_t)(both >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
    return picked;
}

DEVICE uint32_t moved_right(uint32_t low, uint32_t high, uint32_t bits) { return (uint32_t)(((uint64_t)high << 32 | low) >> bits); }

DEVICE uint32_t bit_count(uint32_t word) { return (uint32_t)__builtin_popcount(word); }

DEVICE float float_of_half(uint32_t half) { return half_to_float((uint16_t)half); }

#endif

// Weights of a slice, and numbers of an activation row beside them.
#define SLICE 32

// 32 weights: value i of a half is d * scales[half] * (code i - OFFSET) - dmin * mins[half].
struct Slice {
    uint32_t codes[8];
    int scales[2];
    int mins[2];
    float d;
    float dmin;
};

// The numbers of an activation row that a slice meets.
struct RowSlice {
    uint32_t quants[8];
    float scale;
    int sums[2]; // of each half; of both together in rows of Q8_0
};

// N words from byte `at` on of memory that begins at a whole word, of which one word more is there. Blocks begin at multiples of ALIGN.
template <int ALIGN, int N> DEVICE void words_at(const uint8_t *memory, uint32_t at, uint32_t (&words)[N]) {
    const uint32_t *from = (const uint32_t *)memory + at / 4;
    if (ALIGN % 4 == 0) {
        UNROLL
        for (int i = 0; i < N; i++)
            words[i] = from[i];
        return;
    }
    uint32_t bits = at % 4 * 8, low = from[0];
    UNROLL
    for (int i = 0; i < N; i++) {
        uint32_t high = from[i + 1];
        words[i] = moved_right(low, high, bits);
        low = high;
    }
}

template <int ALIGN> DEVICE uint32_t word_at(const uint8_t *memory, uint32_t at) {
    uint32_t word[1];
    words_at<ALIGN, 1>(memory, at, word);
    return word[0];
}

DEVICE float half_value(const uint8_t *memory, uint32_t at) { return float_of_half(u16_at(memory + at)); }

// Four low bits as the lowest bits of four bytes.
DEVICE uint32_t bits_to_bytes(uint32_t bits) { return ((bits & 15) * 0x00204081u) & 0x01010101u; }

// Four magnitudes, none of them zero, negative where their sign bit is set.
DEVICE uint32_t with_signs(uint32_t magnitudes, uint32_t signs) {
    uint32_t ones = bits_to_bytes(signs);
    return (magnitudes ^ (ones * 255)) + ones;
}

// Sign bits of eight weights from a code of seven: the eighth makes the number of minus signs even.
DEVICE uint32_t eight_signs(uint32_t code) {
    code &= 127;
    return code | (bit_count(code) & 1) << 7;
}

// 16 bytes of nibbles: the low ones are the first half, the high ones the second.
template <int ALIGN> DEVICE void nibble_codes(const uint8_t *memory, uint32_t at, uint32_t (&codes)[8]) {
    uint32_t words[4];
    words_at<ALIGN, 4>(memory, at, words);
    UNROLL
    for (int i = 0; i < 4; i++) {
        codes[i] = words[i] & 0x0f0f0f0fu;
        codes[i + 4] = words[i] >> 4 & 0x0f0f0f0fu;
    }
}

DEVICE void add_fifth_bits(uint32_t bits, uint32_t (&codes)[8]) {
    UNROLL
    for (int i = 0; i < 8; i++)
        codes[i] |= bits_to_bytes(bits >> (4 * i)) << 4;
}

// 16 bytes of nibbles that number the bytes of a table of four words.
template <int ALIGN>
DEVICE void looked_up_codes(const uint8_t *memory, uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&codes)[8]) {
    uint32_t words[4];
    words_at<ALIGN, 4>(memory, at, words);
    UNROLL
    for (int i = 0; i < 4; i++) {
        // Values of nibbles 0 to 3 and 4 to 7 of the word, in their order; the fourth bit of a nibble chooses between halves of the table.
        uint32_t select = words[i] & 0x77777777u, upper = words[i] >> 1 & 0x44444444u;
        uint32_t first = pick_bytes(pick_bytes(a, b, select), pick_bytes(c, d, select), 0x3210u + (upper & 0xffffu));
        uint32_t second = pick_bytes(pick_bytes(a, b, select >> 16), pick_bytes(c, d, select >> 16), 0x3210u + (upper >> 16));
        codes[i] = pick_bytes(first, second, 0x6420u);
        codes[i + 4] = pick_bytes(first, second, 0x7531u);
    }
}

// What most types share: slices of neighbours, no offset, no minimum, no code book.
struct PlainCodes {
    enum { OFFSET = 0, MINS = 0, BOOK = 0, SECOND = 16 };
    // The first weight of a slice within its block; the second half begins SECOND behind it.
    DEVICE uint32_t first(uint32_t slice) { return slice * SLICE; }
    // Word i of the code book (BOOK words), which a block of threads keeps in shared memory.
    DEVICE uint32_t book(uint32_t) { return 0; }
    DEVICE void one_scale(Slice &out, int scale) { out.scales[0] = out.scales[1] = scale; }
};

// Takes slice `slice` of the block at byte `at` of `memory` apart.
template <class Q> struct Codes;

template <> struct Codes<Q4_0> : PlainCodes {
    enum { OFFSET = 8 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        nibble_codes<2>(memory, at + 2, out.codes);
        out.d = half_value(memory, at);
    }
};

template <> struct Codes<Q4_1> : PlainCodes {
    enum { MINS = 1 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        nibble_codes<4>(memory, at + 4, out.codes);
        out.d = half_value(memory, at);
        out.dmin = -half_value(memory, at + 2);
    }
};

template <> struct Codes<Q5_0> : PlainCodes {
    enum { OFFSET = 16 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        nibble_codes<2>(memory, at + 6, out.codes);
        add_fifth_bits(word_at<2>(memory, at + 2), out.codes);
        out.d = half_value(memory, at);
    }
};

template <> struct Codes<Q5_1> : PlainCodes {
    enum { MINS = 1 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        nibble_codes<4>(memory, at + 8, out.codes);
        add_fifth_bits(word_at<4>(memory, at + 4), out.codes);
        out.d = half_value(memory, at);
        out.dmin = -half_value(memory, at + 2);
    }
};

template <> struct Codes<Q8_0> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        words_at<2, 8>(memory, at + 2, out.codes);
        out.d = half_value(memory, at);
    }
};

template <> struct Codes<IQ4_NL> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        looked_up_codes<2>(memory, at + 2, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, out.codes);
        out.d = half_value(memory, at);
    }
};

template <> struct Codes<MXFP4> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t, const uint32_t *, Slice &out) {
        looked_up_codes<1>(memory, at + 1, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, out.codes);
        uint32_t exponent = memory[at];
        out.d = float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
};

template <> struct Codes<Q2_K> : PlainCodes {
    enum { MINS = 1 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        words_at<4, 8>(memory, at + 16 + slice / 4 * 32, out.codes);
        UNROLL
        for (int i = 0; i < 8; i++)
            out.codes[i] = out.codes[i] >> (slice % 4 * 2) & 0x03030303u;
        UNROLL
        for (int half = 0; half < 2; half++) {
            uint32_t scale = memory[at + 2 * slice + half];
            out.scales[half] = scale & 15;
            out.mins[half] = scale >> 4;
        }
        out.d = half_value(memory, at + 80);
        out.dmin = half_value(memory, at + 82);
    }
};

template <> struct Codes<Q3_K> : PlainCodes {
    enum { OFFSET = 4 };
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        uint32_t high[8];
        words_at<2, 8>(memory, at + 32 + slice / 4 * 32, out.codes);
        words_at<2, 8>(memory, at, high);
        UNROLL
        for (int i = 0; i < 8; i++)
            out.codes[i] = (out.codes[i] >> (slice % 4 * 2) & 0x03030303u) | (high[i] >> slice & 0x01010101u) << 2;
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t group = 2 * slice + half;
            uint32_t low = memory[at + 96 + group % 8] >> (4 * (group / 8)) & 15;
            out.scales[half] = (int)(low | (memory[at + 104 + group % 4] >> (2 * (group / 4)) & 3) << 4) - 32;
        }
        out.d = half_value(memory, at + 108);
    }
};

// A slice of these two is 16 bytes of nibbles: half of a group of 32 and half of the next one.
struct TwoGroups : PlainCodes {
    enum { MINS = 1, SECOND = 32 };
    DEVICE uint32_t first(uint32_t slice) { return slice / 2 * 64 + slice % 2 * 16; }
    // Scales and minima of both groups, 6 bits each.
    DEVICE void take_scales(const uint8_t *memory, uint32_t at, uint32_t slice, Slice &out) {
        uint32_t words[3];
        words_at<4, 3>(memory, at + 4, words);
        uint32_t bits = slice / 2 % 2 * 16, low = words[0] >> bits, middle = words[1] >> bits, rest = words[2] >> bits;
        bool upper = slice >= 4;
        uint32_t scales = upper ? (rest & 0x0f0fu) | (low >> 2 & 0x3030u) : low & 0x3f3fu;
        uint32_t mins = upper ? (rest >> 4 & 0x0f0fu) | (middle >> 2 & 0x3030u) : middle & 0x3f3fu;
        out.scales[0] = scales & 255;
        out.scales[1] = scales >> 8;
        out.mins[0] = mins & 255;
        out.mins[1] = mins >> 8;
        out.d = half_value(memory, at);
        out.dmin = half_value(memory, at + 2);
    }
};

template <> struct Codes<Q4_K> : TwoGroups {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        nibble_codes<4>(memory, at + 16 + slice * 16, out.codes);
        take_scales(memory, at, slice, out);
    }
};

template <> struct Codes<Q5_K> : TwoGroups {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        uint32_t high[4];
        words_at<4, 4>(memory, at + 16 + slice % 2 * 16, high);
        nibble_codes<4>(memory, at + 48 + slice * 16, out.codes);
        UNROLL
        for (int i = 0; i < 4; i++) {
            out.codes[i] |= (high[i] >> (slice / 2 * 2) & 0x01010101u) << 4;
            out.codes[i + 4] |= (high[i] >> (slice / 2 * 2 + 1) & 0x01010101u) << 4;
        }
        take_scales(memory, at, slice, out);
    }
};

// A slice is 16 bytes of nibbles: the low ones belong 64 weights before the high ones.
template <> struct Codes<Q6_K> : PlainCodes {
    enum { OFFSET = 32, SECOND = 64 };
    DEVICE uint32_t first(uint32_t slice) { return slice / 4 * 128 + slice % 4 * 16; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        uint32_t high[4], plane = slice / 2 % 2 * 2;
        words_at<2, 4>(memory, at + 128 + slice / 4 * 32 + slice % 2 * 16, high);
        nibble_codes<2>(memory, at + slice * 16, out.codes);
        UNROLL
        for (int i = 0; i < 4; i++) {
            out.codes[i] |= (high[i] >> plane & 0x03030303u) << 4;
            out.codes[i + 4] |= (high[i] >> (plane + 4) & 0x03030303u) << 4;
        }
        uint32_t group = at + 192 + slice / 4 * 8 + slice % 4;
        out.scales[0] = (int8_t)memory[group];
        out.scales[1] = (int8_t)memory[group + 4];
        out.d = half_value(memory, at + 208);
    }
};

DEVICE int odd(uint32_t scale) { return (int)(2 * scale + 1); }

// Both scales of a slice in the nibbles of a byte.
DEVICE void nibble_scales(uint32_t byte, Slice &out) {
    out.scales[0] = odd(byte & 15);
    out.scales[1] = odd(byte >> 4);
}

// Eight weights of a book of 64-bit entries.
DEVICE void book_codes(const uint32_t *book, uint32_t entry, uint32_t signs, uint32_t &low, uint32_t &high) {
    low = with_signs(book[2 * entry], signs);
    high = with_signs(book[2 * entry + 1], signs >> 4);
}

template <> struct Codes<IQ2_XXS> : PlainCodes {
    enum { BOOK = 512 };
    DEVICE uint32_t book(uint32_t i) { return ((const uint32_t *)IQ2_XXS_GRID)[i]; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *book, Slice &out) {
        uint32_t pair[2];
        words_at<2, 2>(memory, at + 2 + slice * 8, pair);
        UNROLL
        for (int i = 0; i < 4; i++)
            book_codes(book, pair[0] >> (8 * i) & 255, eight_signs(pair[1] >> (7 * i)), out.codes[2 * i], out.codes[2 * i + 1]);
        one_scale(out, odd(pair[1] >> 28));
        out.d = half_value(memory, at) * 0.125f;
    }
};

template <> struct Codes<IQ2_XS> : PlainCodes {
    enum { BOOK = 1024 };
    DEVICE uint32_t book(uint32_t i) { return ((const uint32_t *)IQ2_XS_GRID)[i]; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *book, Slice &out) {
        uint32_t pairs[2];
        words_at<2, 2>(memory, at + 2 + slice * 8, pairs);
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t code = pairs[i / 2] >> (16 * (i % 2)) & 0xffffu;
            book_codes(book, code & 511, eight_signs(code >> 9), out.codes[2 * i], out.codes[2 * i + 1]);
        }
        nibble_scales(memory[at + 66 + slice], out);
        out.d = half_value(memory, at) * 0.125f;
    }
};

template <> struct Codes<IQ2_S> : PlainCodes {
    enum { BOOK = 2048 };
    DEVICE uint32_t book(uint32_t i) { return ((const uint32_t *)IQ2_S_GRID)[i]; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *book, Slice &out) {
        uint32_t entries = word_at<2>(memory, at + 2 + slice * 4), signs = word_at<2>(memory, at + 34 + slice * 4);
        uint32_t high = memory[at + 66 + slice];
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t entry = (entries >> (8 * i) & 255) | (high >> (2 * i) & 3) << 8;
            book_codes(book, entry, signs >> (8 * i), out.codes[2 * i], out.codes[2 * i + 1]);
        }
        nibble_scales(memory[at + 74 + slice], out);
        out.d = half_value(memory, at) * 0.125f;
    }
};

template <> struct Codes<IQ3_XXS> : PlainCodes {
    enum { BOOK = 256 };
    DEVICE uint32_t book(uint32_t i) { return IQ3_XXS_GRID[i]; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *book, Slice &out) {
        uint32_t entries[2];
        words_at<2, 2>(memory, at + 2 + slice * 8, entries);
        uint32_t signs_and_scale = word_at<2>(memory, at + 66 + slice * 4);
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t signs = eight_signs(signs_and_scale >> (7 * i)), two = entries[i / 2] >> (16 * (i % 2));
            out.codes[2 * i] = with_signs(book[two & 255], signs);
            out.codes[2 * i + 1] = with_signs(book[two >> 8 & 255], signs >> 4);
        }
        one_scale(out, odd(signs_and_scale >> 28));
        out.d = half_value(memory, at) * 0.25f;
    }
};

template <> struct Codes<IQ3_S> : PlainCodes {
    enum { BOOK = 512 };
    DEVICE uint32_t book(uint32_t i) { return IQ3_S_GRID[i]; }
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *book, Slice &out) {
        uint32_t entries[2];
        words_at<2, 2>(memory, at + 2 + slice * 8, entries);
        uint32_t ninth = memory[at + 66 + slice], signs = word_at<2>(memory, at + 74 + slice * 4);
        UNROLL
        for (int i = 0; i < 8; i++) {
            uint32_t entry = (entries[i / 4] >> (8 * (i % 4)) & 255) | (ninth >> i & 1) << 8;
            out.codes[i] = with_signs(book[entry], signs >> (4 * i));
        }
        one_scale(out, odd(memory[at + 106 + slice / 2] >> (4 * (slice % 2)) & 15));
        out.d = half_value(memory, at);
    }
};

// Four signed bytes with another four added, each for itself.
DEVICE uint32_t bytes_plus(uint32_t a, uint32_t b) { return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u); }

// Eight weights of IQ1 in eighths, shifted by one eighth. The book is too large for shared memory.
DEVICE void shifted_codes(uint32_t entry, bool down, uint32_t &low, uint32_t &high) {
    uint32_t shift = down ? 0xffffffffu : 0x01010101u;
    const uint32_t *words = (const uint32_t *)(IQ1_GRID + entry);
    low = bytes_plus(words[0], shift);
    high = bytes_plus(words[1], shift);
}

template <> struct Codes<IQ1_S> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        uint32_t entries = word_at<2>(memory, at + 2 + slice * 4), high = u16_at(memory + at + 34 + slice * 2);
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t entry = (entries >> (8 * i) & 255) | (high >> (3 * i) & 7) << 8;
            shifted_codes(entry, high & 0x8000, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        one_scale(out, odd(high >> 12 & 7));
        out.d = half_value(memory, at) * 0.125f;
    }
};

template <> struct Codes<IQ1_M> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        uint32_t entries = word_at<4>(memory, at + slice * 4), highs = u16_at(memory + at + 32 + slice * 2), words[2];
        words_at<4, 2>(memory, at + 48, words);
        UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t high = highs >> (4 * i);
            shifted_codes((entries >> (8 * i) & 255) | (high & 7) << 8, high & 8, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        uint32_t d = (words[0] >> 12 & 15) | (words[0] >> 28) << 4 | (words[1] >> 12 & 15) << 8 | (words[1] >> 28) << 12;
        uint32_t scales = (slice < 4 ? words[0] : words[1]) >> (slice / 2 % 2 * 16) >> (slice % 2 * 6);
        out.scales[0] = odd(scales & 7);
        out.scales[1] = odd(scales >> 3 & 7);
        out.d = float_of_half(d) * 0.125f;
    }
};

template <> struct Codes<IQ4_XS> : PlainCodes {
    DEVICE void take(const uint8_t *memory, uint32_t at, uint32_t slice, const uint32_t *, Slice &out) {
        looked_up_codes<4>(memory, at + 8 + slice * 16, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, out.codes);
        uint32_t low = memory[at + 4 + slice / 2] >> (4 * (slice % 2)) & 15, high = u16_at(memory + at + 2) >> (2 * slice) & 3;
        one_scale(out, (int)(low | high << 4) - 32);
        out.d = half_value(memory, at);
    }
};

// Slice `slice` of a row of `n` activations that go with weights of a type. Rows begin at whole words.
template <class Q> DEVICE void take_row_slice(const uint8_t *row, uint32_t n, uint32_t slice, RowSlice &out) {
    typedef Codes<Q> C;
    uint32_t block = slice * SLICE / Q::LEN, first = block * Q::LEN + C::first(slice % (Q::LEN / SLICE));
    bool whole = ((uint64_t)row & 15) == 0;
    UNROLL
    for (int half = 0; half < 2; half++) {
        const uint8_t *from = row + first + half * C::SECOND;
        if (whole) {
            Four four = *(const Four *)from;
            UNROLL
            for (int i = 0; i < 4; i++)
                out.quants[4 * half + i] = bits_of_float(four.at[i]);
        } else {
            UNROLL
            for (int i = 0; i < 4; i++)
                out.quants[4 * half + i] = ((const uint32_t *)from)[i];
        }
    }
    out.scale = ((const float *)(row + n))[block];
    if (C::OFFSET == 0 && C::MINS == 0)
        return;
    const int16_t *sums = (const int16_t *)(row + n + n / Q::LEN * 4);
    if (Q::LEN == Q8_0_BLOCK) {
        out.sums[0] = sums[block];
    } else {
        out.sums[0] = sums[first / Q8_K_SUM];
        out.sums[1] = sums[(first + C::SECOND) / Q8_K_SUM];
    }
}

// sum + the product of a slice of weights with one of activations.
template <class Q> DEVICE float add_slice(const Slice &weights, const RowSlice &row, float sum) {
    typedef Codes<Q> C;
    int low = 0, high = 0;
    UNROLL
    for (int i = 0; i < 4; i++) {
        low = dot4(weights.codes[i], row.quants[i], low);
        high = dot4(weights.codes[i + 4], row.quants[i + 4], high);
    }
    float value;
    if (Q::LEN == Q8_0_BLOCK) {
        value = weights.d * (float)(low + high - C::OFFSET * (C::OFFSET ? row.sums[0] : 0));
        if (C::MINS)
            value -= weights.dmin * (float)row.sums[0];
    } else {
        if (C::OFFSET) {
            low -= C::OFFSET * row.sums[0];
            high -= C::OFFSET * row.sums[1];
        }
        value = weights.d * (float)(weights.scales[0] * low + weights.scales[1] * high);
        if (C::MINS)
            value -= weights.dmin * (float)(weights.mins[0] * row.sums[0] + weights.mins[1] * row.sums[1]);
    }
    return fmaf(row.scale, value, sum);
}

// Expands to X(name in kernel names, struct) for every quantised type; a program that needs fewer kernels brings a list of its own.
#ifndef FOR_EVERY_QUANT_TYPE
#define FOR_EVERY_QUANT_TYPE(X)                                                                                                            \
    X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q8_0, Q8_0)                                                                  \
    X(q2_k, Q2_K) X(q3_k, Q3_K) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K)                                                                  \
    X(iq2_xxs, IQ2_XXS) X(iq2_xs, IQ2_XS) X(iq2_s, IQ2_S) X(iq3_xxs, IQ3_XXS) X(iq3_s, IQ3_S)                                              \
    X(iq1_s, IQ1_S) X(iq1_m, IQ1_M) X(iq4_nl, IQ4_NL) X(iq4_xs, IQ4_XS) X(mxfp4, MXFP4)
#endif
