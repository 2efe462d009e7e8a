// Op::Attention of windows on matrix units, for caches of F16: a stretch of the keys for a block, as in attention.cuh, whose own kernels are
// for caches of f32 and for other heads.
//
// There is little to compute and much to read, so keys and values go from memory straight to the registers that they are multiplied from, as
// much at once as registers hold. Warps take slices of sixteen keys in turn, for sixteen queries, each with a softmax of its own (two warps for
// heads of 256, which have half of the columns each); at the end their results are joined. So a query's numbers depend on the stretch alone.
//
// What a thread reads at once is eight neighbouring numbers of a row, which are not those that it has of a tile otherwise: the numbers of a
// product are taken in another order, the same for queries and keys, and so are the columns of the values.
#pragma once
#include "attention_tiles.cuh"

#define WINDOW_WARPS 4
#define WINDOW_THREADS (WINDOW_WARPS * WARP)
#define WINDOW_QUERIES 16
#define SLICE_KEYS 16
// Columns of values that are joined at a time.
#define JOINED 64

// Eight numbers of a row in the cache, from number d on, as halves.
struct Eight {
    uint32_t at[4];
};

DEVICE Eight load_eight(const uint8_t *row, uint32_t d) {
    const Four four = *(const Four *)(row + 2 * d);
    Eight eight;
    UNROLL for (int i = 0; i < 4; i++)
        eight.at[i] = bits_of_float(four.at[i]);
    return eight;
}

#ifdef __CUDACC__

// Sixteen keys as right tiles: numbers 32 j + 8 (lane % 4) and on are this thread's of step 2 j, four, and of the next, four.
template <int HEAD_DIM> struct KeySlice {
    RightTile at[2][HEAD_DIM / 16];

    HERE void load(const uint8_t *cache, uint64_t key_bytes, uint32_t first_key, uint32_t end_key) {
        UNROLL for (int tile = 0; tile < 2; tile++) {
            const uint32_t key = first_key + 8 * tile + lane_of_warp() / 4;
            UNROLL for (int j = 0; j < HEAD_DIM / 32; j++) {
                Eight eight = {{0, 0, 0, 0}};
                if (key < end_key)
                    eight = load_eight(cache + key * key_bytes, 32 * j + lane_of_warp() % 4 * 8);
                UNROLL for (int i = 0; i < 2; i++) {
                    at[tile][2 * j + i].at[0] = eight.at[2 * i];
                    at[tile][2 * j + i].at[1] = eight.at[2 * i + 1];
                }
            }
        }
    }
};

// COLUMNS columns of sixteen keys' values: of keys 2 (lane % 4), the next, and both plus eight, columns 64 h + 8 (lane / 4) and on.
template <int COLUMNS> struct ValueSlice {
    Eight at[COLUMNS / 64][4];

    static HERE uint32_t key_of(int which) { return lane_of_warp() % 4 * 2 + which % 2 + which / 2 * 8; }

    HERE void load(const uint8_t *cache, uint64_t key_bytes, uint32_t first_key, uint32_t end_key) {
        UNROLL for (int which = 0; which < 4; which++) {
            const uint32_t key = first_key + key_of(which);
            UNROLL for (int h = 0; h < COLUMNS / 64; h++) {
                at[h][which] = {{0, 0, 0, 0}};
                if (key < end_key)
                    at[h][which] = load_eight(cache + key * key_bytes, 64 * h + lane_of_warp() / 4 * 8);
            }
        }
    }

    // Columns 64 h + 8 n + i as a right tile's rows n.
    HERE RightTile right(int h, int i) const {
        const int order = i % 2 ? 0x7632 : 0x5410;
        return {{__byte_perm(at[h][0].at[i / 2], at[h][1].at[i / 2], order), __byte_perm(at[h][2].at[i / 2], at[h][3].at[i / 2], order)}};
    }

    // As take_out in attention_tiles.cuh, to a line of this thread's own or of threads that find the same.
    HERE void take_out(uint32_t first_key, uint32_t *met_from) {
        UNROLL for (int h = 0; h < COLUMNS / 64; h++)
            UNROLL for (int which = 0; which < 4; which++)
                UNROLL for (int i = 0; i < 8; i++) {
                    uint32_t &two = at[h][which].at[i / 2];
                    const uint32_t exponent = 0x7c00u << 16 * (i % 2), column = 64 * h + lane_of_warp() / 4 * 8 + i;
                    if ((two & exponent) != exponent)
                        continue;
                    two &= i % 2 ? 0xffffu : 0xffff0000u;
                    if (first_key + key_of(which) < met_from[column])
                        met_from[column] = first_key + key_of(which);
                }
    }
};

#else

DEVICE float half_of_row(const uint8_t *row, uint32_t d) { return half_to_float(((const uint16_t *)row)[d]); }

template <int HEAD_DIM> struct KeySlice {
    RightTile at[2][HEAD_DIM / 16];

    void load(const uint8_t *cache, uint64_t key_bytes, uint32_t first_key, uint32_t end_key) {
        for (uint32_t tile = 0; tile < 2; tile++)
            for (uint32_t step = 0; step < HEAD_DIM / 16; step++)
                for (uint32_t row = 0; row < 2; row++)
                    for (uint32_t number = 0; number < 16; number++) {
                        uint32_t key = first_key + 8 * tile + lane_of_warp() % 4 * 2 + row;
                        uint32_t d = step / 2 * 32 + number % 8 / 2 * 8 + step % 2 * 4 + number / 8 * 2 + number % 2;
                        at[tile][step].rows[row][number] = key < end_key ? half_of_row(cache + key * key_bytes, d) : 0.0f;
                    }
    }
};

template <int COLUMNS> struct ValueSlice {
    RightTile at[COLUMNS / 64][8];

    static uint32_t column(uint32_t h, uint32_t i, uint32_t row) { return 64 * h + 8 * (lane_of_warp() % 4 * 2 + row) + i; }

    void load(const uint8_t *cache, uint64_t key_bytes, uint32_t first_key, uint32_t end_key) {
        for (uint32_t h = 0; h < COLUMNS / 64; h++)
            for (uint32_t i = 0; i < 8; i++)
                for (uint32_t row = 0; row < 2; row++)
                    for (uint32_t number = 0; number < 16; number++) {
                        uint32_t key = first_key + number;
                        const uint8_t *from = cache + key * key_bytes;
                        at[h][i].rows[row][number] = key < end_key ? half_of_row(from, column(h, i, row)) : 0.0f;
                    }
    }

    RightTile right(int h, int i) const { return at[h][i]; }

    void take_out(uint32_t first_key, uint32_t *met_from) {
        for (uint32_t h = 0; h < COLUMNS / 64; h++)
            for (uint32_t i = 0; i < 8; i++)
                for (uint32_t row = 0; row < 2; row++)
                    for (uint32_t number = 0; number < 16; number++) {
                        float &value = at[h][i].rows[row][number];
                        uint32_t &from = met_from[column(h, i, row)];
                        if (value - value == 0.0f)
                            continue;
                        value = 0.0f;
                        from = from < first_key + number ? from : first_key + number;
                    }
    }
};

#endif

// A query's row in the order of KeySlice: this thread's part of the left tile of a step.
DEVICE LeftTile load_query_in_order(const float *low_row, const float *high_row, uint32_t step, float sign) {
    const uint32_t at = step / 2 * 32 + lane_of_warp() % 4 * 8 + step % 2 * 4;
    float low[4], high[4];
    UNROLL for (int i = 0; i < 2; i++) {
        low[i] = low_row ? sign * low_row[at + i] : 0.0f;
        low[2 + i] = high_row ? sign * high_row[at + i] : 0.0f;
        high[i] = low_row ? sign * low_row[at + 2 + i] : 0.0f;
        high[2 + i] = high_row ? sign * high_row[at + 2 + i] : 0.0f;
    }
    return left_of_sums(low, high);
}

// The record of a query has the weighted values of the stretch, the largest score and the sum of shares.
template <int HEAD_DIM> DEVICE void attention_window_slices(const AttentionArgs &args) {
    enum {
        STEPS = HEAD_DIM / 16,
        SHARE = HEAD_DIM > 128 ? 2 : 1, // warps of a slice
        COLUMNS = HEAD_DIM / SHARE,
        PARTS = COLUMNS / 64,
        SLICES = WINDOW_WARPS / SHARE,
        TURN = SLICE_KEYS * SLICES,
    };
    SHARED LeftTile q[STEPS][WARP];
    SHARED float joined[WINDOW_WARPS][WINDOW_QUERIES][JOINED + 1], states[WINDOW_WARPS][2][WINDOW_QUERIES];
    SHARED uint32_t met_from[WINDOW_WARPS * 4][HEAD_DIM]; // as in attention_tiles
    const Queries queries = queries_of(args, blockIdx.y, blockIdx.z, WINDOW_QUERIES);
    const uint32_t begin = stretch_begin(blockIdx.x), n_keys = keys_seen(args, row_of(queries, queries.count - 1));
    if (begin >= n_keys)
        return;
    const uint32_t stretch_end = stretch_begin(blockIdx.x + 1), end = stretch_end < n_keys ? stretch_end : n_keys;
    const uint32_t all_see = keys_seen(args, row_of(queries, 0));
    const uint64_t key_bytes = args.n_head_kv * args.head_bytes;
    const uint64_t first_byte = ((uint64_t)args.first_row[0] * args.n_head_kv + queries.head_kv) * args.head_bytes;
    const uint32_t lane = lane_of_warp(), warp = threadIdx.x / WARP, slice = warp / SHARE, my_columns = warp % SHARE * COLUMNS;
    const uint8_t *k = args.k_cache + first_byte, *v = args.v_cache + first_byte + 2 * my_columns;
    KeySlice<HEAD_DIM> keys;
    ValueSlice<COLUMNS> values;
    keys.load(k, key_bytes, begin + SLICE_KEYS * slice, end);
    values.load(v, key_bytes, begin + SLICE_KEYS * slice, end);
    for (uint32_t at = threadIdx.x; at < WINDOW_WARPS * 4 * HEAD_DIM; at += WINDOW_THREADS)
        met_from[at / HEAD_DIM][at % HEAD_DIM] = 0xffffffffu;
    float sums[PARTS][8][4], largest[2], totals[2];
    uint32_t seen[2];
    const float *rows[2];
    UNROLL for (uint32_t half = 0; half < 2; half++) {
        const uint32_t query = lane / 4 + 8 * half;
        const bool is_query = query < queries.count;
        rows[half] = is_query ? args.q + head_of(args, queries, query) * HEAD_DIM : nullptr;
        seen[half] = is_query ? keys_seen(args, row_of(queries, query)) : 0;
        largest[half] = NO_SCORE;
        totals[half] = 0.0f;
    }
    // All warps multiply the same queries.
    UNROLL for (int at = 0; at < STEPS / WINDOW_WARPS; at++) {
        const uint32_t step = at * WINDOW_WARPS + warp;
        q[step][lane] = load_query_in_order(rows[0], rows[1], step, sign_of_scale(args));
    }
    UNROLL for (int h = 0; h < PARTS; h++)
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int at = 0; at < 4; at++)
                sums[h][i][at] = 0.0f;
    const float scale = scale_of_powers(args);
    SYNC();
    UNROLL_BY(1)
    for (uint32_t turn = begin; turn < end; turn += TURN) {
        const uint32_t first_key = turn + SLICE_KEYS * slice;
        float scores[2][4];
        UNROLL for (int tile = 0; tile < 2; tile++)
            UNROLL for (int i = 0; i < 4; i++)
                scores[tile][i] = 0.0f;
        UNROLL for (int step = 0; step < STEPS; step++) {
            const LeftTile left = q[step][lane];
            multiply_add(scores[0], left, keys.at[0][step]);
            multiply_add(scores[1], left, keys.at[1][step]);
        }
        if (turn + TURN < end)
            keys.load(k, key_bytes, first_key + TURN, end);
        float keeps[2];
        UNROLL for (int half = 0; half < 2; half++) {
            float most = largest[half];
            UNROLL for (int tile = 0; tile < 2; tile++)
                UNROLL for (int i = 0; i < 2; i++) {
                    float &score = scores[tile][2 * half + i];
                    score = first_key + 8 * tile + lane % 4 * 2 + i < seen[half] ? score : -INFINITY;
                    most = fmaxf(most, score);
                }
            most = quad_max(most);
            const float beside = most * scale;
            keeps[half] = power_of_two((largest[half] - most) * scale);
            largest[half] = most;
            float sum = 0.0f;
            UNROLL for (int tile = 0; tile < 2; tile++)
                UNROLL for (int i = 0; i < 2; i++) {
                    float &score = scores[tile][2 * half + i];
                    score = power_of_two(fmaf(score, scale, -beside));
                    sum += score;
                }
            totals[half] = fmaf(totals[half], keeps[half], sum);
        }
        UNROLL for (int h = 0; h < PARTS; h++)
            UNROLL for (int i = 0; i < 8; i++)
                UNROLL for (int at = 0; at < 4; at++)
                    sums[h][i][at] *= keeps[at / 2];
        const LeftTile shares = left_of_sums(scores[0], scores[1]);
        if (first_key + SLICE_KEYS > all_see)
            values.take_out(first_key, met_from[warp * 4 + lane % 4] + my_columns);
        UNROLL for (int h = 0; h < PARTS; h++)
            UNROLL for (int i = 0; i < 8; i++)
                multiply_add(sums[h][i], shares, values.right(h, i));
        if (turn + TURN < end)
            values.load(v, key_bytes, first_key + TURN, end);
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const float total = quad_sum(totals[half]);
        states[warp][0][lane / 4 + 8 * half] = largest[half];
        states[warp][1][lane / 4 + 8 * half] = total;
    }
    // Each thread joins columns of one query.
    const uint32_t query = threadIdx.x / (WINDOW_THREADS / WINDOW_QUERIES), first_column = threadIdx.x % (WINDOW_THREADS / WINDOW_QUERIES);
    const bool is_query = query < queries.count;
    float *record = args.partial + (head_of(args, queries, is_query ? query : 0) * args.n_stretches + blockIdx.x) * (HEAD_DIM + 2);
    float factors[SLICES], most = NO_SCORE, total = 0.0f;
    UNROLL for (int h = 0; h < PARTS; h++) {
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int at = 0; at < 4; at++)
                joined[warp][lane / 4 + at / 2 * 8][8 * (lane % 4 * 2 + at % 2) + i] = sums[h][i][at];
        SYNC();
        if (h == 0) {
            UNROLL for (int of = 0; of < SLICES; of++)
                most = fmaxf(most, states[of * SHARE][0][query]);
            UNROLL for (int of = 0; of < SLICES; of++) {
                factors[of] = power_of_two((states[of * SHARE][0][query] - most) * scale);
                total = fmaf(states[of * SHARE][1][query], factors[of], total);
            }
        }
        if (is_query) {
            const uint32_t n_seen = keys_seen(args, row_of(queries, query));
            UNROLL for (int share = 0; share < SHARE; share++)
                UNROLL for (uint32_t at = first_column; at < JOINED; at += WINDOW_THREADS / WINDOW_QUERIES) {
                    const uint32_t column = share * COLUMNS + 64 * h + at;
                    float sum = 0.0f;
                    UNROLL for (int of = 0; of < SLICES; of++)
                        sum = fmaf(joined[of * SHARE + share][query][at], factors[of], sum);
                    if (end > all_see) {
                        for (int line = 0; line < WINDOW_WARPS * 4; line++)
                            sum = n_seen > met_from[line][column] ? NAN : sum;
                    }
                    record[column] = sum;
                }
        }
        SYNC();
    }
    if (is_query && first_column == 0) {
        record[HEAD_DIM] = most * (scale / LOG2_E);
        record[HEAD_DIM + 1] = total;
    }
}

// attention_window_f16_<head_dim>   grid: (n_stretches, n_head_kv, n_rows * (n_head / n_head_kv) / WINDOW_QUERIES, rounded up),
//                                   block: WINDOW_THREADS; caches at multiples of 16; then attention_window_join
KERNEL(attention_window_f16_64, AttentionArgs) { attention_window_slices<64>(args); }
KERNEL(attention_window_f16_128, AttentionArgs) { attention_window_slices<128>(args); }
KERNEL(attention_window_f16_256, AttentionArgs) { attention_window_slices<256>(args); }
