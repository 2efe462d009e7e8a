// Products of a prompt's rows as halves on matrix units: rows are scaled to fit, weights are unpacked to halves first, a stripe of a matrix
// or a group of experts at a time.
//
// A line is what one row, of activations or of weights, becomes: its numbers as halves, then zeros up to a whole chunk. A row of
// activations has a head of one chunk before its line, with its scale: a power of two that makes its largest number lie in [1, 2), so that
// none overflows and the smallest keep their bits.
#pragma once
#include "activations.cuh"
#include "matrix_units.cuh"
#include "quant.cuh"

// Threads of a block that rounds, unpacks or adds.
#define HALVES_BLOCK 256
// Threads of a block that multiplies, its outputs, and the columns it takes at a time.
#define HALVES_PRODUCT_BLOCK 128
#define HALVES_OUTPUTS 128
#define HALVES_CHUNKS 4
// Steps of columns that are in shared memory at once: one is multiplied, the others are on their way.
#define HALVES_STAGES 3
// Rows of the largest tile.
#define HALVES_ROWS_MAX 128

struct alignas(16) SixteenBytes {
    uint32_t at[4];
};

DEVICE uint32_t chunks_of(uint32_t n) { return (n + CHUNK - 1) / CHUNK; }

struct QuantiseHalvesArgs {
    const float *x; // [n_rows, n_cols]
    uint8_t *out;   // [n_rows] heads and lines
    uint32_t n_cols;
    uint32_t unused;
};
SIZE_OF(QuantiseHalvesArgs, 24);

// Reciprocal of the power of two below a magnitude; 1 for zero and for what is no number, which the halves then show.
DEVICE float scale_to_unit(uint32_t magnitude) {
    uint32_t exponent = magnitude >> 23;
    if (magnitude == 0 || exponent == 255)
        return 1.0f;
    // Twice the largest exponent at most, so that the reciprocal is a number, too.
    uint32_t reciprocal = exponent < 1 ? 253 : 254 - exponent;
    return float_of_bits((reciprocal < 1 ? 1 : reciprocal) << 23);
}

// grid: (n_rows), block: HALVES_BLOCK
KERNEL(quantise_halves, QuantiseHalvesArgs) {
    SHARED uint32_t magnitudes[HALVES_BLOCK];
    const float *x = args.x + (uint64_t)blockIdx.x * args.n_cols;
    uint32_t n_chunks = chunks_of(args.n_cols), largest = 0;
    SixteenBytes *out = (SixteenBytes *)args.out + (uint64_t)blockIdx.x * (1 + n_chunks);
    for (uint32_t at = threadIdx.x; at < args.n_cols; at += HALVES_BLOCK) {
        uint32_t magnitude = bits_of_float(x[at]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    magnitudes[threadIdx.x] = largest;
    SYNC();
    for (uint32_t half = HALVES_BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && magnitudes[threadIdx.x + half] > magnitudes[threadIdx.x])
            magnitudes[threadIdx.x] = magnitudes[threadIdx.x + half];
        SYNC();
    }
    float to_unit = scale_to_unit(magnitudes[0]);
    if (threadIdx.x == 0)
        out[0] = {{bits_of_float(1.0f / to_unit), 0, 0, 0}};
    for (uint32_t chunk = threadIdx.x; chunk < n_chunks; chunk += HALVES_BLOCK) {
        float numbers[8];
        load_floats8(x, chunk * CHUNK, args.n_cols, numbers);
        SixteenBytes halves;
        UNROLL
        for (int i = 0; i < 4; i++)
            halves.at[i] = halves_of(numbers[2 * i] * to_unit, numbers[2 * i + 1] * to_unit);
        out[1 + chunk] = halves;
    }
}

// Matrices that a launch unpacks: its arguments must fit the 4 KiB that every device takes.
#define UNPACKED_MAX 128

struct UnpackArgs {
    uint8_t *out;       // [n_sources, n_rows] lines
    uint64_t row_bytes; // of a row of weights
    uint32_t n_rows;    // of each source
    uint32_t n_cols;
    uint64_t sources[UNPACKED_MAX]; // addresses of weights
};
SIZE_OF(UnpackArgs, 24 + UNPACKED_MAX * 8);

// grid: (blocks that cover the chunks of a source, n_sources), block: HALVES_BLOCK
template <class Q> DEVICE void unpack(const UnpackArgs &args) {
    uint64_t n_chunks = chunks_of(args.n_cols), n = n_chunks * args.n_rows;
    const uint8_t *source = (const uint8_t *)args.sources[blockIdx.y];
    SixteenBytes *out = (SixteenBytes *)args.out + blockIdx.y * n;
    for (uint64_t at = first_element(); at < n; at += element_stride()) {
        float w[8];
        load_weights8<Q>(source + at / n_chunks * args.row_bytes, (uint32_t)(at % n_chunks) * CHUNK, args.n_cols, w);
        SixteenBytes halves;
        UNROLL
        for (int i = 0; i < 4; i++)
            halves.at[i] = halves_of(w[2 * i], w[2 * i + 1]);
        out[at] = halves;
    }
}

#define UNPACK(name, Type) \
    KERNEL(unpack_##name, UnpackArgs) { unpack<Type>(args); }
FOR_EVERY_TYPE(UNPACK)

// How the warps of a block share a tile of ROWS rows and HALVES_OUTPUTS outputs.
template <int ROWS> struct HalvesTile {
    enum {
        WARP_ROWS = ROWS == 32 ? 32 : ROWS / 2,
        WARPS_OF_ROWS = ROWS / WARP_ROWS,
        WARP_OUTPUTS = HALVES_OUTPUTS / (HALVES_PRODUCT_BLOCK / WARP / WARPS_OF_ROWS),
        LEFTS = WARP_ROWS / 16,
        RIGHTS = WARP_OUTPUTS / 8,
    };
    DEVICE uint32_t warp() { return threadIdx.x / WARP; }
    // The tile's row of this thread's sums [left][..][i], and its output of sums [..][right][i].
    DEVICE uint32_t row(uint32_t left, uint32_t i) {
        return warp() % WARPS_OF_ROWS * WARP_ROWS + left * 16 + i / 2 * 8 + lane_of_warp() / 4;
    }
    DEVICE uint32_t output(uint32_t right, uint32_t i) {
        return warp() / WARPS_OF_ROWS * WARP_OUTPUTS + right * 8 + lane_of_warp() % 4 * 2 + i % 2;
    }
};

// One tile of products. `left_line(row)` and `right_line(output)` are where lines of n_chunks chunks lie, null where there is none. Every
// thread of the block calls it.
template <int ROWS, class Left, class Right>
DEVICE void halves_products(const Left &left_line, const Right &right_line, uint32_t n_chunks,
                            float (&sums)[HalvesTile<ROWS>::LEFTS][HalvesTile<ROWS>::RIGHTS][4]) {
    typedef HalvesTile<ROWS> Tile;
    const int LINE = HALVES_CHUNKS * CHUNK, COPIED = HALVES_PRODUCT_BLOCK / HALVES_CHUNKS;
    const int ROW_COPIES = (ROWS + COPIED - 1) / COPIED, OUTPUT_COPIES = HALVES_OUTPUTS / COPIED;
    alignas(16) SHARED uint16_t rows[HALVES_STAGES][ROWS * LINE], outputs[HALVES_STAGES][HALVES_OUTPUTS * LINE];
    // What this thread copies: one chunk of some lines of either tile.
    const uint32_t line = threadIdx.x / HALVES_CHUNKS, chunk = threadIdx.x % HALVES_CHUNKS;
    const uint16_t *row_lines[ROW_COPIES], *output_lines[OUTPUT_COPIES];
    UNROLL
    for (int at = 0; at < ROW_COPIES; at++)
        row_lines[at] = line + at * COPIED < ROWS ? left_line(line + at * COPIED) : 0;
    UNROLL
    for (int at = 0; at < OUTPUT_COPIES; at++)
        output_lines[at] = right_line(line + at * COPIED);
    UNROLL
    for (int left = 0; left < Tile::LEFTS; left++) {
        UNROLL
        for (int right = 0; right < Tile::RIGHTS; right++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                sums[left][right][i] = 0.0f;
        }
    }
    const uint32_t n_steps = (n_chunks + HALVES_CHUNKS - 1) / HALVES_CHUNKS;
    const uint32_t first_row = Tile::warp() % Tile::WARPS_OF_ROWS * Tile::WARP_ROWS;
    const uint32_t first_output = Tile::warp() / Tile::WARPS_OF_ROWS * Tile::WARP_OUTPUTS;
    for (uint32_t step = 0; step < n_steps + HALVES_STAGES - 1; step++) {
        // Step by step: what was sent for HALVES_STAGES - 1 steps ago has arrived, and nobody reads the stage that is filled next.
        if (step >= HALVES_STAGES - 1) {
            wait_for_copies<HALVES_STAGES - 2>();
            SYNC();
        }
        if (step < n_steps) {
            const uint32_t stage = step % HALVES_STAGES, from = step * HALVES_CHUNKS + chunk;
            UNROLL
            for (int at = 0; at < ROW_COPIES; at++) {
                if (ROWS % COPIED == 0 || line < ROWS)
                    copy_chunk(rows[stage] + chunk_at<HALVES_CHUNKS>(line + at * COPIED, chunk), row_lines[at] + from * CHUNK,
                               row_lines[at] && from < n_chunks);
            }
            UNROLL
            for (int at = 0; at < OUTPUT_COPIES; at++)
                copy_chunk(outputs[stage] + chunk_at<HALVES_CHUNKS>(line + at * COPIED, chunk), output_lines[at] + from * CHUNK,
                           output_lines[at] && from < n_chunks);
        }
        end_copies();
        if (step < HALVES_STAGES - 1)
            continue;
        const uint32_t stage = (step - (HALVES_STAGES - 1)) % HALVES_STAGES;
        UNROLL
        for (int half = 0; half < HALVES_CHUNKS; half += 2) {
            LeftTile lefts[Tile::LEFTS];
            RightTile rights[Tile::RIGHTS];
            UNROLL
            for (int left = 0; left < Tile::LEFTS; left++)
                load_left<HALVES_CHUNKS>(lefts[left], rows[stage], first_row + left * 16, half);
            UNROLL
            for (int right = 0; right < Tile::RIGHTS; right += 2)
                load_rights<HALVES_CHUNKS>(rights[right], rights[right + 1], outputs[stage], first_output + right * 8, half);
            UNROLL
            for (int left = 0; left < Tile::LEFTS; left++) {
                UNROLL
                for (int right = 0; right < Tile::RIGHTS; right++)
                    multiply_add(sums[left][right], lefts[left], rights[right]);
            }
        }
    }
    wait_for_copies<0>();
}

struct MatMulHalvesArgs {
    const uint8_t *input;    // [n_rows] heads and lines
    const uint16_t *weights; // [n_out] lines
    float *out;              // [n_rows, out_stride], from the stripe's first output on
    uint32_t n_rows;
    uint32_t n_out;
    uint32_t n_in;
    uint32_t out_stride;
    uint32_t accumulate; // 1: added to `out`
    uint32_t unused;
};
SIZE_OF(MatMulHalvesArgs, 48);

// Head and line of a row.
DEVICE const uint16_t *halves_row(const uint8_t *rows, uint64_t row, uint32_t n_in) {
    return (const uint16_t *)rows + row * (1 + chunks_of(n_in)) * CHUNK;
}

DEVICE float halves_scale(const uint16_t *row) { return *(const float *)row; }

template <int ROWS> DEVICE void mat_mul_halves(const MatMulHalvesArgs &args) {
    typedef HalvesTile<ROWS> Tile;
    const uint32_t first_output = blockIdx.x * HALVES_OUTPUTS, first_row = blockIdx.y * ROWS, n_chunks = chunks_of(args.n_in);
    float sums[Tile::LEFTS][Tile::RIGHTS][4];
    halves_products<ROWS>(
        [&](uint32_t row) { return first_row + row < args.n_rows ? halves_row(args.input, first_row + row, args.n_in) + CHUNK : 0; },
        [&](uint32_t output) {
            return first_output + output < args.n_out ? args.weights + (uint64_t)(first_output + output) * n_chunks * CHUNK : 0;
        },
        n_chunks, sums);
    UNROLL
    for (int left = 0; left < Tile::LEFTS; left++) {
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = first_row + Tile::row(left, 2 * half);
            if (row >= args.n_rows)
                continue;
            float scale = halves_scale(halves_row(args.input, row, args.n_in));
            UNROLL
            for (int right = 0; right < Tile::RIGHTS; right++) {
                UNROLL
                for (uint32_t i = 2 * half; i < 2 * half + 2; i++) {
                    uint32_t output = first_output + Tile::output(right, i);
                    float *out = args.out + (uint64_t)row * args.out_stride + output;
                    if (output < args.n_out)
                        *out = args.accumulate ? *out + scale * sums[left][right][i] : scale * sums[left][right][i];
                }
            }
        }
    }
}

// grid: (n_out / HALVES_OUTPUTS, n_rows / rows of the tile, both rounded up), block: HALVES_PRODUCT_BLOCK
KERNEL(mat_mul_halves_128, MatMulHalvesArgs) { mat_mul_halves<128>(args); }
KERNEL(mat_mul_halves_64, MatMulHalvesArgs) { mat_mul_halves<64>(args); }
KERNEL(mat_mul_halves_32, MatMulHalvesArgs) { mat_mul_halves<32>(args); }

// Pieces that a launch takes: its arguments must fit the 4 KiB that every device takes.
#define HALVES_PIECES_MAX 64

// Pairs of one expert that a launch multiplies.
struct HalvesPiece {
    uint32_t first; // entry of the row list
    uint32_t count;
    uint32_t first_pair; // row of activated rows and results
    uint32_t first_tile; // block of the grid in y
};
SIZE_OF(HalvesPiece, 16);

struct ExpertsHalvesArgs {
    const uint8_t *input;    // rows of n_in, heads and lines
    const uint32_t *rows;    // the row list: which row of the input an entry multiplies; null: a pair multiplies that of its own number
    const uint16_t *weights; // [n_pieces, n_out] lines; of gate and up, [n_pieces] gates, then [n_pieces] ups
    float *out;              // [n_pairs, n_out]
    uint32_t n_out;
    uint32_t n_in;
    uint32_t n_pieces;
    uint32_t unused;
    HalvesPiece pieces[HALVES_PIECES_MAX];
};
SIZE_OF(ExpertsHalvesArgs, 48 + HALVES_PIECES_MAX * 16);

DEVICE uint32_t piece_of_tile(const ExpertsHalvesArgs &args, uint32_t tile) {
    uint32_t at = 0;
    while (at + 1 < args.n_pieces && args.pieces[at + 1].first_tile <= tile)
        at++;
    return at;
}

// With GATED, a tile has half as many outputs: lines of gate and of up take turns, eight by eight, so that a thread has both of an output.
template <int ROWS, bool GATED> DEVICE void experts_halves(const ExpertsHalvesArgs &args) {
    typedef HalvesTile<ROWS> Tile;
    const uint32_t of_tile = GATED ? HALVES_OUTPUTS / 2 : HALVES_OUTPUTS;
    const uint32_t at = piece_of_tile(args, blockIdx.y), n_chunks = chunks_of(args.n_in);
    const HalvesPiece piece = args.pieces[at];
    const uint32_t first_output = blockIdx.x * of_tile, first_row = (blockIdx.y - piece.first_tile) * ROWS;
    auto row_at = [&](uint32_t row) {
        uint32_t of_input = args.rows ? args.rows[piece.first + first_row + row] : piece.first_pair + first_row + row;
        return halves_row(args.input, of_input, args.n_in);
    };
    float sums[Tile::LEFTS][Tile::RIGHTS][4];
    halves_products<ROWS>(
        [&](uint32_t row) { return first_row + row < piece.count ? row_at(row) + CHUNK : 0; },
        [&](uint32_t line) {
            uint32_t output = first_output + (GATED ? line / 16 * 8 + line % 8 : line), matrix = GATED && line / 8 % 2 ? args.n_pieces + at : at;
            return output < args.n_out ? args.weights + ((uint64_t)matrix * args.n_out + output) * n_chunks * CHUNK : 0;
        },
        n_chunks, sums);
    UNROLL
    for (int left = 0; left < Tile::LEFTS; left++) {
        UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = Tile::row(left, 2 * half);
            if (first_row + row >= piece.count)
                continue;
            float scale = halves_scale(row_at(row));
            float *out = args.out + (uint64_t)(piece.first_pair + first_row + row) * args.n_out;
            UNROLL
            for (int right = 0; right < Tile::RIGHTS; right += GATED ? 2 : 1) {
                UNROLL
                for (uint32_t i = 2 * half; i < 2 * half + 2; i++) {
                    uint32_t line = Tile::output(right, i), output = first_output + (GATED ? line / 16 * 8 + line % 8 : line);
                    float product = scale * sums[left][right][i];
                    if (output < args.n_out)
                        out[output] = GATED ? silu(product) * (scale * sums[left][right + 1][i]) : product;
                }
            }
        }
    }
}

// grid: (n_out / outputs of a tile, sum over pieces of count / rows of the tile, both rounded up), block: HALVES_PRODUCT_BLOCK
#define EXPERTS_HALVES(rows)                                                              \
    KERNEL(experts_gated_##rows, ExpertsHalvesArgs) { experts_halves<rows, true>(args); } \
    KERNEL(experts_halves_##rows, ExpertsHalvesArgs) { experts_halves<rows, false>(args); }
EXPERTS_HALVES(128)
EXPERTS_HALVES(64)
EXPERTS_HALVES(32)

struct ExpertsAddArgs {
    const float *results;     // [end_entry - first_entry, n_embd]
    const uint32_t *entries;  // [n_rows, n_used]: of each row, where it stands in the row lists, ascending
    const float *row_weights; // by entry
    float *residual;          // [n_rows, n_embd]
    uint32_t n_rows;
    uint32_t n_used;
    uint32_t n_embd;
    uint32_t first_entry;
    uint32_t end_entry;
    uint32_t unused;
};
SIZE_OF(ExpertsAddArgs, 56);

// A warp has a row, and adds its experts in ascending order. grid: (n_rows / 8, rounded up), block: HALVES_BLOCK
KERNEL(experts_add, ExpertsAddArgs) {
    uint64_t row = (uint64_t)blockIdx.x * (HALVES_BLOCK / WARP) + threadIdx.x / WARP;
    if (row >= args.n_rows)
        return;
    const uint32_t *entries = args.entries + row * args.n_used;
    uint32_t first = 0, end = args.n_used;
    while (first < end && entries[first] < args.first_entry)
        first++;
    while (first < end && entries[end - 1] >= args.end_entry)
        end--;
    if (first == end)
        return;
    float *residual = args.residual + row * args.n_embd;
    uint32_t column = 4 * lane_of_warp();
    if (args.n_embd % 4 == 0) {
        UNROLL_BY(4)
        for (; column < args.n_embd; column += 4 * WARP) {
            Four sum = *(const Four *)(residual + column);
            for (uint32_t at = first; at < end; at++) {
                Four result = *(const Four *)(args.results + (uint64_t)(entries[at] - args.first_entry) * args.n_embd + column);
                float weight = args.row_weights[entries[at]];
                UNROLL
                for (int i = 0; i < 4; i++)
                    sum.at[i] = fmaf(weight, result.at[i], sum.at[i]);
            }
            *(Four *)(residual + column) = sum;
        }
        return;
    }
    for (column = lane_of_warp(); column < args.n_embd; column += WARP) {
        float sum = residual[column];
        for (uint32_t at = first; at < end; at++)
            sum = fmaf(args.row_weights[entries[at]], args.results[(uint64_t)(entries[at] - args.first_entry) * args.n_embd + column], sum);
        residual[column] = sum;
    }
}
