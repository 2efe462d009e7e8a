// Op::Attention: causal attention over the cache of keys and values.
//
// Keys come in tiles of 64 positions, counted from position 0, and the softmax is carried from tile to tile: largest score, sum of shares,
// weighted values. A query's numbers depend on its own tiles alone. The query heads of a key head share its tiles.
#pragma once
#include "activations.cuh"
#include "kv_store.cuh"

#define KEY_TILE 64
// Numbers of a head that are multiplied, or weighted, at a time.
#define SCORE_COLUMNS 32
#define VALUE_COLUMNS 64
// Most numbers of a head.
#define HEAD_DIM_MAX 256
#define VALUE_PARTS (HEAD_DIM_MAX / VALUE_COLUMNS)
#define ATTENTION_BLOCK 256
// Queries of a block where a thread has one; sixteen threads share a query.
#define QUERY_GROUPS 16

#ifdef __CUDACC__
#define HERE __device__ __forceinline__
#else
#define HERE inline
#endif

struct AttentionArgs {
    const float *q; // [n_rows, n_head, head_dim]
    const uint8_t *k_cache;
    const uint8_t *v_cache;
    const int32_t *positions; // [n_rows], ascending
    const int32_t *first_row; // [1]
    float *out;               // [n_rows, n_head, head_dim]
    float *partial;           // windows: [n_rows, n_head, n_stretches, head_dim + 2]
    uint64_t head_bytes;      // of a head's row in a cache
    uint32_t n_rows;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t head_dim;
    uint32_t n_ctx;
    uint32_t n_stretches;
    float scale;
    uint32_t unused;
};
SIZE_OF(AttentionArgs, 96);

// Numbers d .. d + 8 of a head's row in the cache; zeros behind its end.
struct KvF32 {
    DEVICE void load8(const uint8_t *head, uint32_t d, uint32_t n, float (&x)[8]) { load_floats8((const float *)head, d, n, x); }
};

struct KvF16 {
    DEVICE void load8(const uint8_t *head, uint32_t d, uint32_t n, float (&x)[8]) {
        const uint16_t *from = (const uint16_t *)head + d;
        if (d + 8 <= n && ((uint64_t)from & 15) == 0) {
            Four halves = *(const Four *)from;
            UNROLL
            for (int i = 0; i < 4; i++) {
                uint32_t two = bits_of_float(halves.at[i]);
                x[2 * i] = half_to_float((uint16_t)two);
                x[2 * i + 1] = half_to_float((uint16_t)(two >> 16));
            }
            return;
        }
        UNROLL
        for (uint32_t i = 0; i < 8; i++)
            x[i] = d + i < n ? half_to_float(from[i]) : 0.0f;
    }
};

struct KvQ8_0 {
    DEVICE void load8(const uint8_t *head, uint32_t d, uint32_t n, float (&x)[8]) {
        const uint8_t *block = head + d / KV_BLOCK * KV_BLOCK_BYTES;
        float scale = d < n ? half_to_float(*(const uint16_t *)block) : 0.0f;
        UNROLL
        for (uint32_t i = 0; i < 8; i += 2) {
            uint32_t two = d < n ? *(const uint16_t *)(block + 2 + d % KV_BLOCK + i) : 0;
            x[i] = scale * (float)(int8_t)two;
            x[i + 1] = scale * (float)(int8_t)(two >> 8);
        }
    }
};

// The key head of a block, and its queries: query i is that of row i / group and of query head i % group of those on the key head.
struct Queries {
    uint32_t head_kv, group, first, count;
};

DEVICE uint32_t row_of(const Queries &queries, uint32_t at) {
    return (queries.first + at) / queries.group;
}

// Of a query's head: number of it among all rows' heads.
DEVICE uint64_t head_of(const AttentionArgs &args, const Queries &queries, uint32_t at) {
    return (uint64_t)row_of(queries, at) * args.n_head + queries.head_kv * queries.group + (queries.first + at) % queries.group;
}

// Keys that a row sees. A position outside of the cache is a mistake of the caller's, which must not become a read from elsewhere.
DEVICE uint32_t keys_seen(const AttentionArgs &args, uint32_t row) {
    int64_t first = args.first_row[0], end = first + args.positions[row] + 1;
    if (first < 0 || end <= first)
        return 0;
    return (uint32_t)((end < args.n_ctx ? end : args.n_ctx) - first);
}

// A tile of keys, values or columns: fours stay whole, and lines begin in different banks.
struct KeyTile {
    Four at[KEY_TILE][KEY_TILE / 4 + 1];
};

// What the threads of a block share; QUERIES of them a thread.
template <int QUERIES> struct Softmax {
    enum { COUNT = QUERIES * QUERY_GROUPS, LANES = ATTENTION_BLOCK / COUNT };
    Four shares[KEY_TILE][COUNT / 4 + 1]; // scores of a tile, then their shares
    float lanes[2][ATTENTION_BLOCK];
    uint32_t seen[COUNT]; // keys that a query sees
    float largest[COUNT]; // score so far
    float sums[COUNT];    // of shares so far
    float keeps[COUNT];   // what the results so far shrink by

    HERE float &share(uint32_t key, uint32_t query) { return shares[key][query / 4].at[query % 4]; }

    // Keys of the tile from `first_key` on that a query sees.
    HERE uint32_t seen_in_tile(uint32_t query, uint32_t first_key) {
        uint32_t n = seen[query] > first_key ? seen[query] - first_key : 0;
        return n < KEY_TILE ? n : KEY_TILE;
    }

    // Turns a tile's scores into shares relative to the largest score so far. Every thread of the block calls it.
    HERE void take_in(uint32_t first_key) {
        uint32_t query = threadIdx.x / LANES, lane = threadIdx.x % LANES, n_seen = seen_in_tile(query, first_key);
        float before = largest[query], most = before;
        for (uint32_t key = lane; key < n_seen; key += LANES)
            most = fmaxf(most, share(key, query));
        lanes[0][threadIdx.x] = most;
        SYNC();
        for (uint32_t at = 0; at < LANES; at++)
            most = fmaxf(most, lanes[0][query * LANES + at]);
        float sum = 0.0f;
        for (uint32_t key = lane; key < KEY_TILE; key += LANES) {
            float own = key < n_seen ? expf(share(key, query) - most) : 0.0f;
            share(key, query) = own;
            sum += own;
        }
        lanes[1][threadIdx.x] = sum;
        SYNC();
        if (lane == 0) {
            sum = 0.0f;
            for (uint32_t at = 0; at < LANES; at++)
                sum += lanes[1][query * LANES + at];
            // A query that sees nothing of the tile, or no larger score, keeps its bits.
            keeps[query] = before == most ? 1.0f : expf(before - most);
            sums[query] = fmaf(sums[query], keeps[query], sum);
            largest[query] = most;
        }
        SYNC();
    }
};

// Keys 4 (t % 16) + i and queries QUERIES (t / 16) + j are thread t's.
DEVICE uint32_t of_sixteen() {
    return threadIdx.x % 16;
}

DEVICE uint32_t query_group() {
    return threadIdx.x / 16;
}

template <class Kv>
DEVICE void load_head8(const AttentionArgs &args, const uint8_t *cache, uint32_t head_kv, uint32_t key, uint32_t d, bool is_key, float (&x)[8]) {
    const uint8_t *head = cache + (((uint64_t)args.first_row[0] + key) * args.n_head_kv + head_kv) * args.head_bytes;
    Kv::load8(head, d, is_key ? args.head_dim : 0, x);
}

// The block's scores with a tile of keys, of which those from `n_keys` on are zeros. Every thread of the block calls it.
template <class Kv, int QUERIES>
DEVICE void score_tile(const AttentionArgs &args, const Queries &queries, uint32_t first_key, uint32_t n_keys, KeyTile &tile,
                       Softmax<QUERIES> &softmax) {
    uint32_t line = threadIdx.x / 4, column = threadIdx.x % 4 * 8, first_query = QUERIES * query_group();
    bool is_query = line < queries.count;
    const float *my_query = args.q + head_of(args, queries, is_query ? line : 0) * args.head_dim;
    float scores[4][QUERIES];
    UNROLL
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int j = 0; j < QUERIES; j++)
            scores[i][j] = 0.0f;
    }
    // The upper half of the tile has columns of keys, the lower those of queries.
    for (uint32_t first = 0; first < args.head_dim; first += SCORE_COLUMNS) {
        float k[8], q[8];
        load_head8<Kv>(args, args.k_cache, queries.head_kv, first_key + line, first + column, line < n_keys, k);
        load_floats8(my_query, first + column, is_query ? args.head_dim : 0, q);
        SYNC();
        UNROLL
        for (int i = 0; i < 8; i++) {
            tile.at[column + i][line / 4].at[line % 4] = k[i];
            tile.at[SCORE_COLUMNS + column + i][line / 4].at[line % 4] = q[i];
        }
        SYNC();
        UNROLL
        for (int d = 0; d < SCORE_COLUMNS; d++) {
            Four left = tile.at[d][of_sixteen()];
            UNROLL
            for (int j = 0; j < QUERIES; j++) {
                float right = tile.at[SCORE_COLUMNS + d][(first_query + j) / 4].at[(first_query + j) % 4];
                UNROLL
                for (int i = 0; i < 4; i++)
                    scores[i][j] = fmaf(left.at[i], right, scores[i][j]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int j = 0; j < QUERIES; j++)
            softmax.share(4 * of_sixteen() + i, first_query + j) = scores[i][j] * args.scale;
    }
    SYNC();
}

// Carries the block's queries over the keys from `first_key`, a multiple of KEY_TILE, to `end_key`: thread t has the weighted values
// VALUE_COLUMNS part + 4 (t % 16) + i of queries QUERIES (t / 16) + j. Every thread of the block calls it.
template <class Kv, int QUERIES>
DEVICE void attend(const AttentionArgs &args, const Queries &queries, uint32_t first_key, uint32_t end_key, Softmax<QUERIES> &softmax,
                   float (&values)[VALUE_PARTS][4][QUERIES]) {
    SHARED KeyTile tile;
    uint32_t line = threadIdx.x / 4, column = threadIdx.x % 4 * 16, first_query = QUERIES * query_group();
    if (threadIdx.x < softmax.COUNT) {
        softmax.seen[threadIdx.x] = threadIdx.x < queries.count ? keys_seen(args, row_of(queries, threadIdx.x)) : 0;
        softmax.largest[threadIdx.x] = -INFINITY;
        softmax.sums[threadIdx.x] = 0.0f;
    }
    UNROLL
    for (int part = 0; part < VALUE_PARTS; part++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            UNROLL
            for (int j = 0; j < QUERIES; j++)
                values[part][i][j] = 0.0f;
        }
    }
    for (; first_key < end_key; first_key += KEY_TILE) {
        uint32_t n_keys = end_key - first_key;
        score_tile<Kv>(args, queries, first_key, n_keys, tile, softmax);
        softmax.take_in(first_key);
        uint32_t n_seen[QUERIES];
        bool sees_all = true;
        UNROLL
        for (int j = 0; j < QUERIES; j++) {
            n_seen[j] = softmax.seen_in_tile(first_query + j, first_key);
            sees_all = sees_all && n_seen[j] == KEY_TILE;
        }
        UNROLL
        for (int part = 0; part < VALUE_PARTS; part++) {
            if (part * VALUE_COLUMNS >= (int)args.head_dim)
                continue;
            UNROLL
            for (int j = 0; j < QUERIES; j++) {
                UNROLL
                for (int i = 0; i < 4; i++)
                    values[part][i][j] *= softmax.keeps[first_query + j];
            }
            float low[8], high[8];
            uint32_t d = part * VALUE_COLUMNS + column;
            load_head8<Kv>(args, args.v_cache, queries.head_kv, first_key + line, d, line < n_keys, low);
            load_head8<Kv>(args, args.v_cache, queries.head_kv, first_key + line, d + 8, line < n_keys, high);
            SYNC();
            UNROLL
            for (int i = 0; i < 8; i++) {
                tile.at[line][column / 4 + i / 4].at[i % 4] = low[i];
                tile.at[line][column / 4 + 2 + i / 4].at[i % 4] = high[i];
            }
            SYNC();
            // A query must not even meet the value of a key that it does not see, which may be anything.
            for (uint32_t key = 0; key < KEY_TILE; key++) {
                Four value = tile.at[key][of_sixteen()];
                UNROLL
                for (int j = 0; j < QUERIES; j++) {
                    if (sees_all || key < n_seen[j]) {
                        UNROLL
                        for (int i = 0; i < 4; i++)
                            values[part][i][j] = fmaf(softmax.share(key, first_query + j), value.at[i], values[part][i][j]);
                    }
                }
            }
        }
    }
    SYNC();
}

DEVICE Queries queries_of(const AttentionArgs &args, uint32_t head_kv, uint32_t block, uint32_t of_block) {
    uint32_t group = args.n_head / args.n_head_kv, first = block * of_block, left = args.n_rows * group - first;
    return {head_kv, group, first, left < of_block ? left : of_block};
}

// Four queries a thread.
template <class Kv> DEVICE void attention_prompt(const AttentionArgs &args) {
    SHARED Softmax<4> softmax;
    // Later rows see more keys: the longest blocks come first.
    Queries queries = queries_of(args, blockIdx.y, gridDim.x - 1 - blockIdx.x, softmax.COUNT);
    float values[VALUE_PARTS][4][4];
    attend<Kv>(args, queries, 0, keys_seen(args, row_of(queries, queries.count - 1)), softmax, values);
    UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t query = 4 * query_group() + j;
        if (query < queries.count) {
            float *out = args.out + head_of(args, queries, query) * args.head_dim;
            UNROLL
            for (uint32_t part = 0; part < VALUE_PARTS; part++) {
                UNROLL
                for (uint32_t i = 0; i < 4; i++) {
                    uint32_t d = part * VALUE_COLUMNS + 4 * of_sixteen() + i;
                    if (d < args.head_dim)
                        out[d] = values[part][i][j] / softmax.sums[query];
                }
            }
        }
    }
}

// Where the stretches begin that a window's keys are cut into: sixteen up to position 1,024, and sixteen more to every doubling, so that
// partial results take little memory. The cut depends on nothing else, so no result depends on the rows of a call.
DEVICE uint32_t stretch_begin(uint32_t stretch) {
    if (stretch < 16)
        return stretch * KEY_TILE;
    uint32_t doubling = stretch / 16 - 1;
    return (16 + stretch % 16) * KEY_TILE << doubling;
}

// One query a thread; the numbers of a stretch are stored as they are, the largest score and the sum of shares behind them.
template <class Kv> DEVICE void attention_window(const AttentionArgs &args) {
    SHARED Softmax<1> softmax;
    Queries queries = queries_of(args, blockIdx.y, blockIdx.z, softmax.COUNT);
    uint32_t begin = stretch_begin(blockIdx.x), end = stretch_begin(blockIdx.x + 1);
    uint32_t n_keys = keys_seen(args, row_of(queries, queries.count - 1));
    if (begin >= n_keys)
        return;
    float values[VALUE_PARTS][4][1];
    attend<Kv>(args, queries, begin, end < n_keys ? end : n_keys, softmax, values);
    uint32_t query = query_group();
    if (query >= queries.count)
        return;
    uint64_t record_len = args.head_dim + 2;
    float *record = args.partial + (head_of(args, queries, query) * args.n_stretches + blockIdx.x) * record_len;
    UNROLL
    for (uint32_t part = 0; part < VALUE_PARTS; part++) {
        UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t d = part * VALUE_COLUMNS + 4 * of_sixteen() + i;
            if (d < args.head_dim)
                record[d] = values[part][i][0];
        }
    }
    if (of_sixteen() == 0) {
        record[args.head_dim] = softmax.largest[query];
        record[args.head_dim + 1] = softmax.sums[query];
    }
}

// Stretches of which a query sees a key.
DEVICE uint32_t stretches_seen(uint32_t n_keys) {
    if (n_keys == 0)
        return 0;
    uint32_t last = n_keys - 1, doublings = 0;
    if (last < 16 * KEY_TILE)
        return last / KEY_TILE + 1;
    while (last >> doublings >= 32 * KEY_TILE)
        doublings++;
    return 16 * doublings + (last >> doublings) / KEY_TILE + 1;
}

// Most stretches of any context, and how many are read at once.
#define STRETCHES_MAX 512
#define JOINED_AT_ONCE 16

// Joins the stretches of every query. Groups of threads have a number each, and every so manyth stretch.
// grid: (n_rows * n_head), block: HEAD_DIM_MAX
KERNEL(attention_window_join, AttentionArgs) {
    SHARED float largest_of[STRETCHES_MAX], sum_of[STRETCHES_MAX], values[HEAD_DIM_MAX];
    const uint32_t head_dim = args.head_dim, n_groups = HEAD_DIM_MAX / head_dim;
    const uint32_t group = threadIdx.x / head_dim, d = threadIdx.x % head_dim;
    const uint64_t record_len = head_dim + 2;
    const float *records = args.partial + (uint64_t)blockIdx.x * args.n_stretches * record_len;
    const uint32_t n_seen = stretches_seen(keys_seen(args, blockIdx.x / args.n_head));
    const uint32_t n_stretches = n_seen < args.n_stretches ? n_seen : args.n_stretches;
    // Whole turns: what is behind the last stretch has no share.
    const uint32_t n_padded = (n_stretches + JOINED_AT_ONCE - 1) / JOINED_AT_ONCE * JOINED_AT_ONCE;
    for (uint32_t stretch = threadIdx.x; stretch < n_padded; stretch += blockDim.x) {
        const bool is_there = stretch < n_stretches;
        largest_of[stretch] = is_there ? records[stretch * record_len + head_dim] : -INFINITY;
        sum_of[stretch] = is_there ? records[stretch * record_len + head_dim + 1] : 0.0f;
    }
    SYNC();
    float largest = -INFINITY, sum = 0.0f, value = 0.0f;
    for (uint32_t first = 0; first < n_padded; first += JOINED_AT_ONCE)
        UNROLL for (uint32_t at = 0; at < JOINED_AT_ONCE; at++)
            largest = fmaxf(largest, largest_of[first + at]);
    SYNC();
    for (uint32_t stretch = threadIdx.x; stretch < n_padded; stretch += blockDim.x)
        largest_of[stretch] = stretch < n_stretches ? expf(largest_of[stretch] - largest) : 0.0f;
    SYNC();
    for (uint32_t first = 0; first < n_padded; first += JOINED_AT_ONCE)
        UNROLL for (uint32_t at = 0; at < JOINED_AT_ONCE; at++)
            sum = fmaf(largest_of[first + at], sum_of[first + at], sum);
    if (group < n_groups) {
        for (uint32_t first = group; first < n_stretches; first += JOINED_AT_ONCE * n_groups) {
            float of[JOINED_AT_ONCE];
            UNROLL for (uint32_t at = 0; at < JOINED_AT_ONCE; at++) {
                const uint32_t stretch = first + at * n_groups;
                of[at] = stretch < n_stretches ? records[stretch * record_len + d] : 0.0f;
            }
            UNROLL for (uint32_t at = 0; at < JOINED_AT_ONCE; at++) {
                const uint32_t stretch = first + at * n_groups;
                value = fmaf(stretch < n_stretches ? largest_of[stretch] : 0.0f, of[at], value);
            }
        }
    }
    values[threadIdx.x] = value;
    SYNC();
    if (threadIdx.x >= head_dim)
        return;
    for (uint32_t other = 1; other < n_groups; other++)
        value += values[other * head_dim + d];
    args.out[(uint64_t)blockIdx.x * head_dim + d] = value / sum;
}

// attention_prompt_<format>   grid: (n_rows * (n_head / n_head_kv) / 64, rounded up, n_head_kv), block: ATTENTION_BLOCK
// attention_window_<format>   grid: (n_stretches, n_head_kv, n_rows * (n_head / n_head_kv) / 16, rounded up), block: ATTENTION_BLOCK;
//                             then attention_window_join
#define ATTENTION(name, Kv)                                                                                                                \
    KERNEL(attention_prompt_##name, AttentionArgs) { attention_prompt<Kv>(args); }                                                         \
    KERNEL(attention_window_##name, AttentionArgs) { attention_window<Kv>(args); }
ATTENTION(f32, KvF32)
ATTENTION(f16, KvF16)
ATTENTION(q8_0, KvQ8_0)
