// Op::Attention of windows on matrix units, for caches of Q8_0: a stretch of the keys for a block, as in attention.cuh. Blocks of 34 bytes are
// too small to go to registers one by one, as halves do in attention_window.cuh: tiles are copied to shared memory as they lie.
//
// All of a block's queries share a tile of keys. Four warps have the scores of sixteen keys each, then a quarter of every value's numbers, and
// meet in shared memory. The largest score of a tile is that of all its keys, so a query's numbers depend on its own tiles alone.
#pragma once
#include "attention_window.cuh"


// A tile of KEYS keys as halves, each of its two parts copied while the other is multiplied.
template <int HEAD_DIM, int KEYS> struct WindowTile {
    enum { BYTES = HEAD_DIM / KV_BLOCK * KV_BLOCK_BYTES, UNIT = BYTES % 8 ? 4 : 8, UNITS = BYTES / UNIT, CHUNKS = HEAD_DIM / CHUNK };
    alignas(16) uint16_t halves[2][KEYS * HEAD_DIM]; // keys and values
    alignas(16) uint8_t stored[KEYS * BYTES];

    // Begins to copy keys or values first_key and on, of which those from `end_key` on become zeros; nothing is copied behind the last tile.
    HERE void begin(const uint8_t *cache, uint64_t key_bytes, uint32_t first_key, uint32_t end_key) {
        if (first_key < end_key) {
            UNROLL for (uint32_t at = threadIdx.x; at < KEYS * UNITS; at += WINDOW_THREADS) {
                const uint32_t line = at / UNITS, unit = at % UNITS;
                const bool is_key = first_key + line < end_key;
                copy_bytes<UNIT>(stored + at * UNIT, cache + (is_key ? (first_key + line) * key_bytes + unit * UNIT : 0), is_key);
            }
        }
        end_copies();
    }

    // What was copied becomes halves of keys (0) or values (1). Every thread of the block calls it.
    HERE void arrive(int part) {
        const uint32_t pairs = HEAD_DIM / 64;
        wait_for_copies<0>();
        SYNC();
        UNROLL for (uint32_t at = threadIdx.x; at < KEYS * pairs; at += WINDOW_THREADS)
            decode_blocks<CHUNKS>(stored + at * 68, halves[part], at / pairs, at % pairs * 8);
        SYNC();
    }
};

// ROW_TILES times sixteen queries. The record of a query has the weighted values of the stretch, the largest score and the sum of shares.
template <int HEAD_DIM, int KEYS, int ROW_TILES> DEVICE void attention_window_tiles(const AttentionArgs &args) {
    enum { QUERIES = 16 * ROW_TILES, CHUNKS = HEAD_DIM / CHUNK, PARTS = KEYS / 16, COLUMNS = HEAD_DIM / WINDOW_WARPS };
    typedef WindowTile<HEAD_DIM, KEYS> Tile;
    SHARED Tile tile;
    SHARED struct {
        alignas(16) uint16_t at[QUERIES * KEYS];
    } shares;
    SHARED float exchange[PARTS][QUERIES]; // largest scores of sixteen keys, later sums of their shares
    SHARED uint32_t met_from[HEAD_DIM];    // as in attention_tiles
    const Queries queries = queries_of(args, blockIdx.y, blockIdx.z, QUERIES);
    const uint32_t begin = stretch_begin(blockIdx.x), n_keys = keys_seen(args, row_of(queries, queries.count - 1));
    if (begin >= n_keys)
        return;
    const uint32_t stretch_end = stretch_begin(blockIdx.x + 1), end = stretch_end < n_keys ? stretch_end : n_keys;
    const uint32_t all_see = keys_seen(args, row_of(queries, 0));
    const uint64_t key_bytes = args.n_head_kv * args.head_bytes;
    const uint64_t first_byte = ((uint64_t)args.first_row[0] * args.n_head_kv + queries.head_kv) * args.head_bytes;
    const uint8_t *k = args.k_cache + first_byte, *v = args.v_cache + first_byte;
    tile.begin(k, key_bytes, begin, end);
    for (uint32_t at = threadIdx.x; at < HEAD_DIM; at += WINDOW_THREADS)
        met_from[at] = 0xffffffffu;
    const uint32_t lane = lane_of_warp(), warp = threadIdx.x / WARP, first_query = lane / 4;
    // Where a tile has fewer sixteens than there are warps, some warps compute the same.
    const uint32_t part = warp % PARTS;
    LeftTile q[ROW_TILES][HEAD_DIM / 16];
    float sums[ROW_TILES][COLUMNS / 8][4], largest[ROW_TILES][2], totals[ROW_TILES][2];
    uint32_t seen[ROW_TILES][2];
    UNROLL for (int m = 0; m < ROW_TILES; m++) {
        const float *rows[2];
        UNROLL for (uint32_t half = 0; half < 2; half++) {
            uint32_t query = first_query + 16 * m + 8 * half;
            bool is_query = query < queries.count;
            rows[half] = is_query ? args.q + head_of(args, queries, query) * HEAD_DIM : nullptr;
            seen[m][half] = is_query ? keys_seen(args, row_of(queries, query)) : 0;
            largest[m][half] = NO_SCORE;
            totals[m][half] = 0.0f;
        }
        UNROLL for (int step = 0; step < HEAD_DIM / 16; step++)
            q[m][step] = load_query(rows[0], rows[1], 16 * step, sign_of_scale(args));
        UNROLL for (int at = 0; at < COLUMNS / 8; at++)
            UNROLL for (int i = 0; i < 4; i++)
                sums[m][at][i] = 0.0f;
    }
    const float scale = scale_of_powers(args);
    for (uint32_t first_key = begin; first_key < end; first_key += KEYS) {
        tile.arrive(0);
        tile.begin(v, key_bytes, first_key, end);
        float scores[ROW_TILES][2][4];
        UNROLL for (int m = 0; m < ROW_TILES; m++)
            UNROLL for (int at = 0; at < 2; at++)
                UNROLL for (int i = 0; i < 4; i++)
                    scores[m][at][i] = 0.0f;
        UNROLL for (int step = 0; step < HEAD_DIM / 16; step++) {
            RightTile low, high;
            load_rights<CHUNKS>(low, high, tile.halves[0], 16 * part, 2 * step);
            UNROLL for (int m = 0; m < ROW_TILES; m++) {
                multiply_add(scores[m][0], q[m][step], low);
                multiply_add(scores[m][1], q[m][step], high);
            }
        }
        const uint32_t my_key = first_key + 16 * part + lane % 4 * 2;
        UNROLL for (int m = 0; m < ROW_TILES; m++)
            UNROLL for (int half = 0; half < 2; half++) {
                float most = NO_SCORE;
                UNROLL for (int at = 0; at < 2; at++)
                    UNROLL for (int i = 0; i < 2; i++) {
                        float &score = scores[m][at][2 * half + i];
                        score = my_key + 8 * at + i < seen[m][half] ? score : -INFINITY;
                        most = fmaxf(most, score);
                    }
                most = quad_max(most);
                if (lane % 4 == 0)
                    exchange[part][first_query + 16 * m + 8 * half] = most;
            }
        SYNC();
        UNROLL for (int m = 0; m < ROW_TILES; m++)
            UNROLL for (int half = 0; half < 2; half++) {
                const uint32_t query = first_query + 16 * m + 8 * half;
                float most = largest[m][half];
                UNROLL for (int at = 0; at < PARTS; at++)
                    most = fmaxf(most, exchange[at][query]);
                const float keeps = power_of_two((largest[m][half] - most) * scale), beside = most * scale;
                largest[m][half] = most;
                UNROLL for (int at = 0; at < COLUMNS / 8; at++)
                    UNROLL for (int i = 0; i < 2; i++)
                        sums[m][at][2 * half + i] *= keeps;
                float sum = 0.0f;
                UNROLL for (int at = 0; at < 2; at++) {
                    float own[2];
                    UNROLL for (int i = 0; i < 2; i++) {
                        own[i] = power_of_two(fmaf(scores[m][at][2 * half + i], scale, -beside));
                        sum += own[i];
                    }
                    uint32_t to = chunk_at<KEYS / CHUNK>(query, 2 * part + at) + lane % 4 * 2;
                    *(uint32_t *)(shares.at + to) = halves_of(own[0], own[1]);
                }
                totals[m][half] = fmaf(totals[m][half], keeps, sum);
            }
        tile.arrive(1);
        tile.begin(k, key_bytes, first_key + KEYS, end);
        if (first_key + KEYS > all_see) {
            take_out<WINDOW_THREADS, HEAD_DIM, KEYS>(tile.halves[1], first_key, met_from);
            SYNC();
        }
        UNROLL for (int step = 0; step < KEYS / 16; step++) {
            LeftTile left[ROW_TILES];
            UNROLL for (int m = 0; m < ROW_TILES; m++)
                load_left<KEYS / CHUNK>(left[m], shares.at, 16 * m, 2 * step);
            UNROLL for (int at = 0; at < COLUMNS / 16; at++) {
                RightTile low, high;
                load_rights_turned<CHUNKS>(low, high, tile.halves[1], 16 * step, warp * (COLUMNS / CHUNK) + 2 * at);
                UNROLL for (int m = 0; m < ROW_TILES; m++) {
                    multiply_add(sums[m][2 * at], left[m], low);
                    multiply_add(sums[m][2 * at + 1], left[m], high);
                }
            }
        }
        SYNC();
    }
    UNROLL for (int m = 0; m < ROW_TILES; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            const float sum = quad_sum(totals[m][half]);
            if (lane % 4 == 0)
                exchange[part][first_query + 16 * m + 8 * half] = sum;
        }
    SYNC();
    UNROLL for (int m = 0; m < ROW_TILES; m++)
        UNROLL for (int half = 0; half < 2; half++) {
            const uint32_t query = first_query + 16 * m + 8 * half;
            if (query >= queries.count)
                continue;
            float *record = args.partial + (head_of(args, queries, query) * args.n_stretches + blockIdx.x) * (HEAD_DIM + 2);
            UNROLL for (int at = 0; at < COLUMNS / 8; at++)
                UNROLL for (int i = 0; i < 2; i++) {
                    uint32_t d = warp * COLUMNS + 8 * at + lane % 4 * 2 + i;
                    record[d] = seen[m][half] > met_from[d] ? NAN : sums[m][at][2 * half + i];
                }
            if (threadIdx.x < WARP && lane % 4 == 0) {
                float sum = 0.0f;
                UNROLL for (int at = 0; at < PARTS; at++)
                    sum += exchange[at][query];
                record[HEAD_DIM] = largest[m][half] * (scale / LOG2_E);
                record[HEAD_DIM + 1] = sum;
            }
        }
}

// attention_window_q8_0_<head_dim>   grid: (n_stretches, n_head_kv, n_rows * (n_head / n_head_kv) / queries, rounded up), where a block has 16
//                                    queries of heads of 256, else 32; block: WINDOW_THREADS; caches at multiples of 16;
//                                    then attention_window_join
KERNEL(attention_window_q8_0_64, AttentionArgs) { attention_window_tiles<64, 64, 2>(args); }
KERNEL(attention_window_q8_0_128, AttentionArgs) { attention_window_tiles<128, 64, 2>(args); }
KERNEL(attention_window_q8_0_256, AttentionArgs) { attention_window_tiles<256, 32, 1>(args); }
