// Op::Attention of prompts on matrix units, for caches of F16 and Q8_0 and heads of 64, 128 and 256 numbers.
//
// A block has 128 queries (a row's query heads on one key head lie side by side) and goes through the keys they see in tiles,
// counted from position 0; the next tile is copied while one is multiplied. Queries stay in registers as halves, scores and their shares
// never leave registers, and what is summed is summed in f32. So a query's numbers depend on its own tiles alone: a tile that it does not
// see leaves all of its bits, whatever the block's other queries need.
//
// Queries become halves as they are: they are normed as the keys are, which the cache keeps as halves, too. The scale meets the products.
#pragma once
#include "attention.cuh"
#include "matrix_units.cuh"

// A score that no real one is below, with which the softmax begins.
#define NO_SCORE (-1e30f)
#define LOG2_E 1.44269504088896341f

#ifdef __CUDACC__

// Two signed bytes, in the low or the high half of a word, as halves times a half.
DEVICE uint32_t scaled_pair(uint32_t word, int is_high, uint32_t scale) {
    // A byte plus 128 as the last bits of 1,024 is that sum as a half.
    uint32_t pair = __byte_perm(word ^ 0x80808080u, 0x64646464u, is_high ? 0x4342 : 0x4140);
    asm("sub.rn.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(0x64806480u));
    asm("mul.rn.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(scale | scale << 16));
    return pair;
}

DEVICE float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(x));
    return power;
}

#else

DEVICE uint32_t scaled_pair(uint32_t word, int is_high, uint32_t scale) {
    uint32_t pair = is_high ? word >> 16 : word;
    float factor = half_to_float((uint16_t)scale);
    return halves_of(factor * (float)(int8_t)pair, factor * (float)(int8_t)(pair >> 8));
}

DEVICE float power_of_two(float x) { return exp2f(x); }

#endif

// Tiles of KEYS keys as halves in shared memory. Two of them: one is copied while the other is multiplied.
template <int HEAD_DIM, int KEYS> struct TilesF16 {
    alignas(16) uint16_t keys[2][KEYS * HEAD_DIM];
    alignas(16) uint16_t values[2][KEYS * HEAD_DIM];

    // Begins to copy tile `tile`, of whose keys those from `n_keys` on become zeros.
    template <int THREADS> HERE void begin(uint32_t tile, const uint8_t *k, const uint8_t *v, uint64_t key_bytes, uint32_t n_keys) {
        const uint32_t chunks = HEAD_DIM / CHUNK;
        UNROLL for (uint32_t round = 0; round < KEYS * chunks / THREADS; round++) {
            uint32_t at = round * THREADS + threadIdx.x, line = at / chunks, chunk = at % chunks;
            bool is_key = tile * KEYS + line < n_keys;
            uint64_t from = is_key ? (tile * KEYS + line) * key_bytes + chunk * 16 : 0;
            uint32_t to = chunk_at<chunks>(line, chunk);
            copy_chunk(keys[tile % 2] + to, (const uint16_t *)(k + from), is_key);
            copy_chunk(values[tile % 2] + to, (const uint16_t *)(v + from), is_key);
        }
        end_copies();
    }

    // Waits for the tile, whose keys and values are then at(tile). Every thread of the block calls it.
    template <int THREADS> HERE void arrive(uint32_t) {
        wait_for_copies<0>();
        SYNC();
    }

    HERE uint32_t at(uint32_t tile) { return tile % 2; }
};

// Two neighbouring blocks of Q8_0, which begin at a multiple of four, as eight chunks of line `line` of a tile, from `first_chunk` on.
template <int CHUNKS> DEVICE void decode_blocks(const uint8_t *blocks, uint16_t *tile, uint32_t line, uint32_t first_chunk) {
    struct alignas(16) Halves {
        uint32_t at[4];
    };
    uint32_t words[17];
    UNROLL for (int at = 0; at < 17; at++)
        words[at] = ((const uint32_t *)blocks)[at];
    UNROLL for (uint32_t chunk = 0; chunk < 8; chunk++) {
        const uint32_t scale = chunk < 4 ? words[0] & 0xffff : words[8] >> 16;
        Halves halves;
        UNROLL for (uint32_t i = 0; i < 4; i++) {
            // Pairs of bytes lie behind one scale, or two.
            const uint32_t at = 1 + chunk / 4 + 4 * chunk + i;
            halves.at[i] = scaled_pair(words[at / 2], at % 2, scale);
        }
        *(Halves *)(tile + chunk_at<CHUNKS>(line, first_chunk + chunk)) = halves;
    }
}

// The same of Q8_0: one tile as halves, and the next as it lies in the cache.
template <int HEAD_DIM, int KEYS> struct TilesQ8_0 {
    enum { BYTES = HEAD_DIM / KV_BLOCK * KV_BLOCK_BYTES, UNIT = BYTES % 8 ? 4 : 8, UNITS = BYTES / UNIT };
    alignas(16) uint16_t keys[1][KEYS * HEAD_DIM];
    alignas(16) uint16_t values[1][KEYS * HEAD_DIM];
    alignas(16) uint8_t stored[2][KEYS * BYTES];

    template <int THREADS> HERE void begin(uint32_t tile, const uint8_t *k, const uint8_t *v, uint64_t key_bytes, uint32_t n_keys) {
        for (uint32_t at = threadIdx.x; at < KEYS * UNITS; at += THREADS) {
            uint32_t line = at / UNITS, unit = at % UNITS;
            bool is_key = tile * KEYS + line < n_keys;
            uint64_t from = is_key ? (tile * KEYS + line) * key_bytes + unit * UNIT : 0;
            copy_bytes<UNIT>(stored[0] + at * UNIT, k + from, is_key);
            copy_bytes<UNIT>(stored[1] + at * UNIT, v + from, is_key);
        }
        end_copies();
    }

    template <int THREADS> HERE void arrive(uint32_t) {
        const uint32_t chunks = HEAD_DIM / CHUNK;
        wait_for_copies<0>();
        SYNC();
        const uint32_t pairs = HEAD_DIM / 64;
        UNROLL for (uint32_t at = threadIdx.x; at < 2 * KEYS * pairs; at += THREADS) {
            uint32_t of_part = at % (KEYS * pairs);
            bool is_key = at < KEYS * pairs;
            decode_blocks<chunks>(stored[!is_key] + of_part * 68, is_key ? keys[0] : values[0], of_part / pairs, of_part % pairs * 8);
        }
        SYNC();
    }

    HERE uint32_t at(uint32_t) { return 0; }
};

// Shares are powers of two, of scores times this. Queries take the scale's sign, and become zeros where it is zero.
DEVICE float scale_of_powers(const AttentionArgs &args) {
    return (args.scale == 0.0f ? 1.0f : fabsf(args.scale)) * LOG2_E;
}

DEVICE float sign_of_scale(const AttentionArgs &args) {
    return args.scale < 0.0f ? -1.0f : args.scale > 0.0f ? 1.0f : 0.0f;
}

// A query's row of halves, from sixteen numbers of it on: this thread's part of a left tile. Zeros where there is no query.
DEVICE LeftTile load_query(const float *low_row, const float *high_row, uint32_t column, float sign) {
    uint32_t at = column + lane_of_warp() % 4 * 2;
    float low[4], high[4];
    UNROLL for (int i = 0; i < 2; i++) {
        low[i] = low_row ? sign * low_row[at + i] : 0.0f;
        low[2 + i] = high_row ? sign * high_row[at + i] : 0.0f;
        high[i] = low_row ? sign * low_row[at + 8 + i] : 0.0f;
        high[2 + i] = high_row ? sign * high_row[at + 8 + i] : 0.0f;
    }
    return left_of_sums(low, high);
}

// Takes numbers that are not finite out of the tile of values, and keeps for each column the first key with one: only those queries are to
// meet them that see them, though a share of zero is multiplied for all others.
template <int THREADS, int HEAD_DIM, int KEYS> DEVICE void take_out(uint16_t *values, uint32_t first_key, uint32_t *met_from) {
    for (uint32_t d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        for (uint32_t key = 0; key < KEYS; key++) {
            uint16_t *value = values + chunk_at<HEAD_DIM / CHUNK>(key, d / CHUNK) + d % CHUNK;
            if ((*value & 0x7c00) != 0x7c00)
                continue;
            *value = 0;
            if (first_key + key < met_from[d])
                met_from[d] = first_key + key;
        }
    }
}

// WARPS warps of ROW_TILES times sixteen queries each, n_queries in all. Every thread holds, of each sixteen, queries lane / 4 and
// lane / 4 + 8.
template <class Tiles, int HEAD_DIM, int KEYS, int SUB, int WARPS, int ROW_TILES, int PARKED>
DEVICE void attention_tiles(const AttentionArgs &args, Tiles &tiles, LeftTile *parking) {
    const int threads = WARPS * WARP, chunks = HEAD_DIM / CHUNK, n_queries = WARPS * ROW_TILES * 16;
    // In shared memory, as all registers are taken.
    SHARED struct {
        uint64_t first_byte; // of the key head in a cache
        uint32_t n;          // keys that some query sees
        uint32_t n_of_all;   // keys that all queries see
    } keys;
    SHARED uint32_t seen[n_queries]; // keys that a query sees
    SHARED uint32_t met_from[HEAD_DIM];   // the first key whose value is not finite, among those of take_out
    // Later rows see more keys: the longest blocks come first.
    const Queries queries = queries_of(args, blockIdx.y, gridDim.x - 1 - blockIdx.x, n_queries);
    const uint64_t key_bytes = args.n_head_kv * args.head_bytes;
    if (threadIdx.x == 0) {
        keys.first_byte = ((uint64_t)args.first_row[0] * args.n_head_kv + queries.head_kv) * args.head_bytes;
        keys.n = keys_seen(args, row_of(queries, queries.count - 1));
        keys.n_of_all = keys_seen(args, row_of(queries, 0));
    }
    SYNC();
    if (keys.n > 0)
        tiles.template begin<threads>(0, args.k_cache + keys.first_byte, args.v_cache + keys.first_byte, key_bytes, keys.n);
    for (uint32_t at = threadIdx.x; at < n_queries; at += threads)
        seen[at] = at < queries.count ? keys_seen(args, row_of(queries, at)) : 0;
    for (uint32_t at = threadIdx.x; at < HEAD_DIM; at += threads)
        met_from[at] = 0xffffffffu;
    const uint32_t lane = lane_of_warp(), first_query = threadIdx.x / WARP * 16 * ROW_TILES + lane / 4;
    const int held = HEAD_DIM / 16 - PARKED;
    LeftTile q[ROW_TILES][held > 0 ? held : 1];
    float sums[ROW_TILES][HEAD_DIM / 8][4], largest[ROW_TILES][2], totals[ROW_TILES][2];
    UNROLL for (int tile = 0; tile < ROW_TILES; tile++) {
        const float *rows[2];
        UNROLL for (uint32_t half = 0; half < 2; half++) {
            uint32_t query = first_query + 16 * tile + 8 * half;
            rows[half] = query < queries.count ? args.q + head_of(args, queries, query) * HEAD_DIM : nullptr;
            largest[tile][half] = NO_SCORE;
            totals[tile][half] = 0.0f;
        }
        UNROLL for (int step = 0; step < HEAD_DIM / 16; step++) {
            const LeftTile left = load_query(rows[0], rows[1], 16 * step, sign_of_scale(args));
            if (step < held)
                q[tile][step] = left;
            else
                parking[((step - held) * ROW_TILES + tile) * threads + threadIdx.x] = left;
        }
        UNROLL for (int part = 0; part < HEAD_DIM / 8; part++)
            UNROLL for (int i = 0; i < 4; i++)
                sums[tile][part][i] = 0.0f;
    }
    const float scale = scale_of_powers(args);
    for (uint32_t tile = 0; tile * KEYS < keys.n; tile++) {
        tiles.template arrive<threads>(tile);
        if ((tile + 1) * KEYS < keys.n)
            tiles.template begin<threads>(tile + 1, args.k_cache + keys.first_byte, args.v_cache + keys.first_byte, key_bytes, keys.n);
        const bool is_cut = (tile + 1) * KEYS > keys.n_of_all;
        uint16_t *values = tiles.values[tiles.at(tile)];
        if (is_cut) {
            take_out<threads, HEAD_DIM, KEYS>(values, tile * KEYS, met_from);
            SYNC();
        }
        UNROLL_BY(1) for (uint32_t first = 0; first < KEYS; first += SUB) {
            float scores[ROW_TILES][SUB / 8][4];
            UNROLL for (int m = 0; m < ROW_TILES; m++)
                UNROLL for (int part = 0; part < SUB / 8; part++)
                    UNROLL for (int i = 0; i < 4; i++)
                        scores[m][part][i] = 0.0f;
            UNROLL for (int step = 0; step < HEAD_DIM / 16; step++)
                UNROLL for (int pair = 0; pair < SUB / 16; pair++) {
                    RightTile low, high;
                    load_rights<chunks>(low, high, tiles.keys[tiles.at(tile)], first + 16 * pair, 2 * step);
                    UNROLL for (int m = 0; m < ROW_TILES; m++) {
                        const LeftTile left = step < held ? q[m][step] : parking[((step - held) * ROW_TILES + m) * threads + threadIdx.x];
                        multiply_add(scores[m][2 * pair], left, low);
                        multiply_add(scores[m][2 * pair + 1], left, high);
                    }
                }
            LeftTile shares[ROW_TILES][SUB / 16];
            UNROLL for (int m = 0; m < ROW_TILES; m++) {
                if (is_cut) {
                    UNROLL for (int half = 0; half < 2; half++) {
                        uint32_t n_seen = seen[first_query + 16 * m + 8 * half], first_key = tile * KEYS + first + lane % 4 * 2;
                        UNROLL for (int part = 0; part < SUB / 8; part++)
                            UNROLL for (int i = 0; i < 2; i++)
                                if (first_key + 8 * part + i >= n_seen)
                                    scores[m][part][2 * half + i] = -INFINITY;
                    }
                }
                float keeps[2];
                UNROLL for (int half = 0; half < 2; half++) {
                    float most = largest[m][half];
                    UNROLL for (int part = 0; part < SUB / 8; part++)
                        most = fmaxf(most, fmaxf(scores[m][part][2 * half], scores[m][part][2 * half + 1]));
                    most = quad_max(most);
                    const float beside = most * scale;
                    // One where nothing larger came: no bit changes.
                    keeps[half] = power_of_two((largest[m][half] - most) * scale);
                    largest[m][half] = most;
                    float sum = 0.0f;
                    UNROLL for (int part = 0; part < SUB / 8; part++)
                        UNROLL for (int i = 0; i < 2; i++) {
                            float &score = scores[m][part][2 * half + i];
                            score = power_of_two(fmaf(score, scale, -beside));
                            sum += score;
                        }
                    totals[m][half] = fmaf(totals[m][half], keeps[half], sum);
                }
                if (keeps[0] != 1.0f || keeps[1] != 1.0f) {
                    UNROLL for (int part = 0; part < HEAD_DIM / 8; part++)
                        UNROLL for (int i = 0; i < 4; i++)
                            sums[m][part][i] *= keeps[i / 2];
                }
                UNROLL for (int pair = 0; pair < SUB / 16; pair++)
                    shares[m][pair] = left_of_sums(scores[m][2 * pair], scores[m][2 * pair + 1]);
            }
            UNROLL for (int pair = 0; pair < SUB / 16; pair++)
                UNROLL for (int part = 0; part < HEAD_DIM / 16; part++) {
                    RightTile low, high;
                    load_rights_turned<chunks>(low, high, values, first + 16 * pair, 2 * part);
                    UNROLL for (int m = 0; m < ROW_TILES; m++) {
                        multiply_add(sums[m][2 * part], shares[m][pair], low);
                        multiply_add(sums[m][2 * part + 1], shares[m][pair], high);
                    }
                }
        }
    }
    SYNC();
    UNROLL for (int m = 0; m < ROW_TILES; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            const uint32_t query = first_query + 16 * m + 8 * half;
            const float total = quad_sum(totals[m][half]);
            if (query >= queries.count)
                continue;
            float *out = args.out + head_of(args, queries, query) * HEAD_DIM + lane % 4 * 2;
            UNROLL for (int part = 0; part < HEAD_DIM / 8; part++)
                UNROLL for (int i = 0; i < 2; i++) {
                    bool meets = seen[query] > met_from[8 * part + lane % 4 * 2 + i];
                    out[8 * part + i] = meets ? NAN : sums[m][part][2 * half + i] / total;
                }
        }
}

// attention_tiles_<format>_<head_dim>   grid: (n_rows * (n_head / n_head_kv) / n_queries, rounded up, n_head_kv),
//                                       block: 256 for heads of 256, else 128; caches at multiples of 16
#define ATTENTION_TILES(name, Tiles, head_dim, n_keys, sub, warps, row_tiles, n_parked)                                                     \
    KERNEL(name, AttentionArgs) {                                                                                                          \
        typedef Tiles<head_dim, n_keys> TilesOfHead;                                                                                       \
        SHARED TilesOfHead tiles;                                                                                                          \
        SHARED LeftTile parking[n_parked * row_tiles * warps * WARP + 1];                                                                  \
        attention_tiles<TilesOfHead, head_dim, n_keys, sub, warps, row_tiles, n_parked>(args, tiles, parking);                             \
    }
ATTENTION_TILES(attention_tiles_f16_64, TilesF16, 64, 32, 32, 4, 2, 0)
ATTENTION_TILES(attention_tiles_f16_128, TilesF16, 128, 32, 32, 4, 2, 2)
ATTENTION_TILES(attention_tiles_f16_256, TilesF16, 256, 16, 16, 8, 1, 0)
ATTENTION_TILES(attention_tiles_q8_0_64, TilesQ8_0, 64, 32, 32, 4, 2, 0)
ATTENTION_TILES(attention_tiles_q8_0_128, TilesQ8_0, 128, 32, 32, 4, 2, 3)
ATTENTION_TILES(attention_tiles_q8_0_256, TilesQ8_0, 256, 16, 16, 8, 1, 0)
