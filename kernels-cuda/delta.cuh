// The gated delta net: Op::DeltaConv, DeltaHistory, DeltaGates, DeltaPrompt, DeltaWindow, DeltaCommit.
#pragma once
#include "activations.cuh"
#include "matrix_units.cuh"

struct DeltaShape {
    uint32_t n_head_k;
    uint32_t n_head_v;
    uint32_t head_dim;
    uint32_t n_taps;
};
SIZE_OF(DeltaShape, 16);

DEVICE uint32_t delta_heads(DeltaShape shape) {
    return 2 * shape.n_head_k + shape.n_head_v;
}

// Sums over LANES neighbouring threads, a power of two, which all of them get. Every thread of the block calls it.
template <int LANES, int COUNT> DEVICE void sum_over(float (&values)[COUNT]) {
#ifdef __CUDACC__
    UNROLL for (int step = 1; step < LANES; step *= 2)
        UNROLL for (int at = 0; at < COUNT; at++)
            values[at] += __shfl_xor_sync(0xffffffffu, values[at], step);
#else
    SHARED float parts[BLOCK][COUNT];
    SYNC();
    for (int at = 0; at < COUNT; at++)
        parts[threadIdx.x][at] = values[at];
    SYNC();
    for (int at = 0; at < COUNT; at++) {
        // The same pairs, whose order does not matter.
        float sums[LANES];
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] = parts[threadIdx.x / LANES * LANES + lane][at];
        for (int n = LANES / 2; n > 0; n /= 2)
            for (int lane = 0; lane < n; lane++)
                sums[lane] = sums[2 * lane] + sums[2 * lane + 1];
        values[at] = sums[0];
    }
#endif
}

// Four neighbours in memory, at once where their address allows it.
DEVICE Four load_four(const float *from) {
    if (((uint64_t)from & 15) == 0)
        return *(const Four *)from;
    return {{from[0], from[1], from[2], from[3]}};
}

DEVICE void store_four(float *to, const Four &four) {
    if (((uint64_t)to & 15) == 0) {
        *(Four *)to = four;
        return;
    }
    UNROLL for (int i = 0; i < 4; i++)
        to[i] = four.at[i];
}

struct DeltaConvArgs {
    const float *x;       // [n_rows, n_channels]
    const float *history; // [n_taps - 1, n_channels], oldest row first
    const float *taps;    // [n_channels, n_taps], the present row's last
    float *out;           // as x
    DeltaShape shape;
    float eps;
    uint32_t n_rows;
};
SIZE_OF(DeltaConvArgs, 56);

// grid: (n_rows * heads, queries before keys before values), block: 64
KERNEL(delta_conv, DeltaConvArgs) {
    uint32_t n_heads = delta_heads(args.shape), head_dim = args.shape.head_dim, n_taps = args.shape.n_taps;
    uint64_t n_channels = (uint64_t)n_heads * head_dim;
    uint32_t row = blockIdx.x / n_heads, head = blockIdx.x % n_heads;
    float *out = args.out + (uint64_t)row * n_channels;
    double squares = 0.0;
    for (uint32_t at = threadIdx.x; at < head_dim; at += blockDim.x) {
        uint64_t channel = (uint64_t)head * head_dim + at;
        float sum = 0.0f;
        for (uint32_t tap = 0; tap < n_taps; tap++) {
            // Rows of the history and of x in one order.
            uint64_t source = (uint64_t)row + tap, n_before = n_taps - 1;
            float value = source < n_before ? args.history[source * n_channels + channel] : args.x[(source - n_before) * n_channels + channel];
            sum += value * args.taps[channel * n_taps + tap];
        }
        sum = silu(sum);
        out[channel] = sum;
        squares += (double)sum * (double)sum;
    }
    // The same for all threads of the block.
    if (head >= 2 * args.shape.n_head_k)
        return;
    double scale = head < args.shape.n_head_k ? 1.0 / sqrt((double)head_dim) : 1.0;
    float factor = (float)(scale / sqrt(block_sum(squares) + (double)args.eps));
    for (uint32_t at = threadIdx.x; at < head_dim; at += blockDim.x)
        out[(uint64_t)head * head_dim + at] *= factor;
}

// The same for four taps and heads of at most 128 numbers: a warp has a head, and goes through CONV_ROWS rows with the last three in registers.
#define CONV_TAPS 4
#define CONV_HEAD_MAX 128
#define CONV_ROWS 16
#define CONV_BLOCK 128

// grid: (heads / (CONV_BLOCK / WARP), rounded up, n_rows / CONV_ROWS, rounded up), block: CONV_BLOCK
KERNEL(delta_conv_4, DeltaConvArgs) {
    const uint32_t n_heads = delta_heads(args.shape), head_dim = args.shape.head_dim, n_before = CONV_TAPS - 1;
    const uint64_t n_channels = (uint64_t)n_heads * head_dim;
    const uint32_t head = blockIdx.x * (CONV_BLOCK / WARP) + threadIdx.x / WARP, first = blockIdx.y * CONV_ROWS, at = 4 * lane_of_warp();
    const uint32_t end = args.n_rows - first < CONV_ROWS ? args.n_rows : first + CONV_ROWS;
    const bool is_there = head < n_heads && at < head_dim;
    const uint64_t channel = is_there ? (uint64_t)head * head_dim + at : 0;
    Four taps[CONV_TAPS], rows[CONV_TAPS];
    UNROLL for (int i = 0; i < 4; i++) {
        // Four channels' taps, turned.
        const Four of_channel = load_four(args.taps + (channel + i) * CONV_TAPS);
        UNROLL for (int tap = 0; tap < CONV_TAPS; tap++)
            taps[tap].at[i] = of_channel.at[tap];
    }
    UNROLL for (uint32_t tap = 0; tap < n_before; tap++) {
        // Rows of the history and of x in one order.
        const uint32_t source = first + tap;
        const float *from = source < n_before ? args.history + source * n_channels : args.x + (source - n_before) * n_channels;
        rows[tap] = load_four(from + channel);
    }
    const float scale = head < args.shape.n_head_k ? 1.0f / sqrtf((float)head_dim) : 1.0f;
    UNROLL_BY(4)
    for (uint32_t row = first; row < end; row++) {
        rows[n_before] = load_four(args.x + row * n_channels + channel);
        Four out;
        float squares[1] = {0.0f};
        UNROLL for (int i = 0; i < 4; i++) {
            float sum = 0.0f;
            UNROLL for (int tap = 0; tap < CONV_TAPS; tap++)
                sum = fmaf(rows[tap].at[i], taps[tap].at[i], sum);
            out.at[i] = is_there ? silu(sum) : 0.0f;
            squares[0] = fmaf(out.at[i], out.at[i], squares[0]);
        }
        sum_over<WARP>(squares);
        if (head < 2 * args.shape.n_head_k) {
            const float factor = scale / sqrtf(squares[0] + args.eps);
            UNROLL for (int i = 0; i < 4; i++)
                out.at[i] *= factor;
        }
        if (is_there)
            store_four(args.out + row * n_channels + channel, out);
        UNROLL for (uint32_t tap = 0; tap < n_before; tap++)
            rows[tap] = rows[tap + 1];
    }
}

struct DeltaHistoryArgs {
    const float *x; // [n_rows, n_channels]
    float *history; // [n_taps - 1, n_channels]
    uint32_t n_rows;
    uint32_t n_channels;
    uint32_t n_before; // n_taps - 1
    uint32_t unused;
};
SIZE_OF(DeltaHistoryArgs, 32);

// grid: (blocks that cover the channels), block: BLOCK
KERNEL(delta_history, DeltaHistoryArgs) {
    for (uint64_t channel = first_element(); channel < args.n_channels; channel += element_stride())
        // Upwards: a row is read before it is overwritten.
        for (uint64_t at = 0; at < args.n_before; at++) {
            uint64_t source = at + args.n_rows;
            args.history[at * args.n_channels + channel] = source < args.n_before
                                                               ? args.history[source * args.n_channels + channel]
                                                               : args.x[(source - args.n_before) * args.n_channels + channel];
        }
}

struct DeltaGatesArgs {
    float *beta;          // [n_rows, n_head]
    float *decay;         // [n_rows, n_head]
    const float *dt_bias; // [n_head]
    const float *a;       // [n_head]
    uint64_t n;
    uint32_t n_head;
    uint32_t unused;
};
SIZE_OF(DeltaGatesArgs, 48);

// grid: (blocks that cover the numbers), block: BLOCK
KERNEL(delta_gates, DeltaGatesArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride()) {
        uint32_t head = (uint32_t)(at % args.n_head);
        double x = (double)(args.decay[at] + args.dt_bias[head]);
        // ln(1 + e^x), without overflow.
        float softplus = (float)(fmax(x, 0.0) + log1p(exp(-fabs(x))));
        args.decay[at] = args.a[head] * softplus;
        args.beta[at] = sigmoid(args.beta[at]);
    }
}

// Of the three operations on the state. A row of it (one value number, all key numbers) meets nothing of the other rows, so four threads
// carry one of them through all rows of the call, in registers, each every fourth number; whether it is written back is all that tells the
// operations apart.
struct DeltaRuleArgs {
    const float *qkv;   // [n_rows, n_channels]
    const float *beta;  // [n_rows, n_head_v]
    const float *decay; // [n_rows, n_head_v]
    float *state;       // [n_head_v, head_dim (value), head_dim (key)]
    float *out;         // [n_rows, n_head_v, head_dim], or null
    DeltaShape shape;
    uint32_t n_rows;
    uint32_t writes_state;
};
SIZE_OF(DeltaRuleArgs, 64);

// Largest head.
#define DELTA_HEAD_MAX 256
// Threads of a row of the state: partial sums of its products.
#define DELTA_LANES 4
// Rows of the state that a block has; heads are whole numbers of them.
#define DELTA_ROWS 16
#define DELTA_BLOCK (DELTA_ROWS * DELTA_LANES)

// The sum over the threads of a row of the state. Every thread of the block calls it.
DEVICE float delta_sum(float part, float *parts) {
    parts[threadIdx.x] = part;
    SYNC();
    const float *row = parts + threadIdx.x / DELTA_LANES * DELTA_LANES;
    return (row[0] + row[1]) + (row[2] + row[3]);
}

// A head of at most DELTA_HEAD_MAX numbers: loops are unrolled all the same, so that no number leaves its register, as local memory would be
// taken for every thread that the device can hold. The order of all sums is that of the numbers.
//
// One kernel for the three operations, so that a commit has the bits of its window, and a prompt those of any cut: between two calls of a
// block the state is that behind the last row, and the rows of an open step need not be kept.
// grid: (n_head_v, head_dim / DELTA_ROWS), block: DELTA_BLOCK
KERNEL(delta_rule, DeltaRuleArgs) {
    SHARED float known_parts[DELTA_BLOCK], result_parts[DELTA_BLOCK];
    const uint32_t most = DELTA_HEAD_MAX / DELTA_LANES, head_dim = args.shape.head_dim, n = head_dim / DELTA_LANES;
    const uint32_t n_head_k = args.shape.n_head_k, n_head_v = args.shape.n_head_v;
    const uint32_t head = blockIdx.x, head_k = head % n_head_k, lane = threadIdx.x % DELTA_LANES;
    const uint32_t value_row = blockIdx.y * DELTA_ROWS + threadIdx.x / DELTA_LANES;
    const uint64_t n_channels = (uint64_t)delta_heads(args.shape) * head_dim;
    float *state = args.state + ((uint64_t)head * head_dim + value_row) * head_dim + lane;
    float kept[most];
    UNROLL for (uint32_t at = 0; at < most; at++)
        kept[at] = at < n ? state[at * DELTA_LANES] : 0.0f;
    for (uint32_t row = 0; row < args.n_rows; row++) {
        const float *qkv = args.qkv + row * n_channels;
        const float *query = qkv + head_k * head_dim + lane, *key = qkv + (n_head_k + head_k) * head_dim + lane;
        const float *values = qkv + (2 * n_head_k + head) * head_dim;
        uint64_t gate = (uint64_t)row * n_head_v + head;
        float keep = expf(args.decay[gate]), known = 0.0f, result = 0.0f;
        UNROLL for (uint32_t at = 0; at < most; at++) {
            if (at < n) {
                kept[at] *= keep;
                known = fmaf(kept[at], key[at * DELTA_LANES], known);
            }
        }
        // Two places in turn: nobody writes one before all have read it and met at the other's barrier.
        float correction = args.beta[gate] * (values[value_row] - delta_sum(known, known_parts));
        UNROLL for (uint32_t at = 0; at < most; at++) {
            if (at < n) {
                kept[at] = fmaf(correction, key[at * DELTA_LANES], kept[at]);
                result = fmaf(kept[at], query[at * DELTA_LANES], result);
            }
        }
        result = delta_sum(result, result_parts);
        if (args.out && lane == 0)
            args.out[gate * head_dim + value_row] = result;
    }
    if (args.writes_state) {
        UNROLL for (uint32_t at = 0; at < most; at++) {
            if (at < n)
                state[at * DELTA_LANES] = kept[at];
        }
    }
}

// The same for heads of 128 numbers: eight threads carry a row of the state, or two. Rows of the call come by batches,
// the next of which is copied meanwhile; what all rows of the state need of a row (its gates, the product of key and query) is computed once.
//
// With S the state before a row: known = S k, asked = S q, r = beta (v - e^decay known), out = e^decay asked + r (k . q), S = e^decay S + r k^T.
#define WIDE_HEAD 128
#define WIDE_LANES 8
#define WIDE_FOURS (WIDE_HEAD / WIDE_LANES / 4)
#define WIDE_ROWS 32
#define WIDE_BATCH 16

struct WideBatch {
    Four keys[WIDE_BATCH][WIDE_HEAD / 4];
    Four queries[WIDE_BATCH][WIDE_HEAD / 4];
    Four values[WIDE_BATCH][WIDE_ROWS / 4];
};

// Begins to copy `n` floats, a multiple of four, of each row of a batch.
template <int THREADS> DEVICE void copy_rows(Four *to, uint32_t n, const float *from, uint64_t stride, uint32_t n_rows) {
    const bool is_aligned = ((uint64_t)from & 15) == 0;
    const uint32_t fours = n / 4;
    UNROLL for (uint32_t at = threadIdx.x; at < WIDE_BATCH * fours; at += THREADS) {
        uint32_t row = at / fours;
        bool is_row = row < n_rows;
        const float *four = from + (is_row ? row * stride + at % fours * 4 : 0);
        if (is_aligned) {
            copy_bytes<16>(to + at, four, is_row);
        } else {
            UNROLL for (int i = 0; i < 4; i++)
                copy_bytes<4>(to[at].at + i, four + i, is_row);
        }
    }
}

template <int THREADS> DEVICE void copy_batch(const DeltaRuleArgs &args, WideBatch &batch, uint32_t first) {
    const uint64_t n_channels = (uint64_t)delta_heads(args.shape) * WIDE_HEAD;
    const uint32_t head_k = blockIdx.x % args.shape.n_head_k, n_head_k = args.shape.n_head_k, n_rows = args.n_rows - first;
    const float *rows = args.qkv + first * n_channels;
    copy_rows<THREADS>(batch.queries[0], WIDE_HEAD, rows + head_k * WIDE_HEAD, n_channels, n_rows);
    copy_rows<THREADS>(batch.keys[0], WIDE_HEAD, rows + (n_head_k + head_k) * WIDE_HEAD, n_channels, n_rows);
    copy_rows<THREADS>(batch.values[0], WIDE_ROWS, rows + (2 * n_head_k + blockIdx.x) * WIDE_HEAD + blockIdx.y * WIDE_ROWS, n_channels, n_rows);
    end_copies();
}

DEVICE void load_gates(const DeltaRuleArgs &args, uint32_t row, float &decay, float &beta) {
    if (row >= args.n_rows)
        return;
    const uint64_t gate = (uint64_t)row * args.shape.n_head_v + blockIdx.x;
    decay = args.decay[gate];
    beta = args.beta[gate];
}

template <int HALVES> DEVICE void delta_rule_wide(const DeltaRuleArgs &args) {
    const int threads = WIDE_ROWS / HALVES * WIDE_LANES;
    SHARED WideBatch batches[2];
    SHARED float keeps[WIDE_BATCH], betas[WIDE_BATCH], products[WIDE_BATCH], results[WIDE_BATCH][WIDE_ROWS];
    const uint32_t head = blockIdx.x, n_head_v = args.shape.n_head_v, lane = threadIdx.x % WIDE_LANES, own_row = threadIdx.x / WIDE_LANES;
    const uint32_t first_value = blockIdx.y * WIDE_ROWS;
    copy_batch<threads>(args, batches[0], 0);
    float *states[HALVES];
    Four kept[HALVES][WIDE_FOURS];
    UNROLL for (int half = 0; half < HALVES; half++) {
        states[half] = args.state + ((uint64_t)head * WIDE_HEAD + first_value + own_row + WIDE_ROWS / HALVES * half) * WIDE_HEAD + 4 * lane;
        UNROLL for (int at = 0; at < WIDE_FOURS; at++)
            kept[half][at] = load_four(states[half] + 4 * WIDE_LANES * at);
    }
    float decay = 0.0f, beta_of_row = 0.0f;
    if (threadIdx.x < WIDE_BATCH)
        load_gates(args, threadIdx.x, decay, beta_of_row);
    for (uint32_t first = 0, turn = 0; first < args.n_rows; first += WIDE_BATCH, turn ^= 1) {
        const WideBatch &batch = batches[turn];
        const uint32_t n_rows = args.n_rows - first < WIDE_BATCH ? args.n_rows - first : WIDE_BATCH;
        wait_for_copies<0>();
        SYNC();
        if (first + WIDE_BATCH < args.n_rows)
            copy_batch<threads>(args, batches[turn ^ 1], first + WIDE_BATCH);
        if (threadIdx.x < WIDE_BATCH) {
            keeps[threadIdx.x] = expf(decay);
            betas[threadIdx.x] = beta_of_row;
            // Those of the next batch, too, are on their way meanwhile.
            load_gates(args, first + WIDE_BATCH + threadIdx.x, decay, beta_of_row);
        }
        float product[1] = {0.0f};
        UNROLL for (int at = 0; at < WIDE_FOURS; at++) {
            const uint32_t row = own_row % WIDE_BATCH;
            const Four key = batch.keys[row][lane + WIDE_LANES * at], query = batch.queries[row][lane + WIDE_LANES * at];
            UNROLL for (int i = 0; i < 4; i++)
                product[0] = fmaf(key.at[i], query.at[i], product[0]);
        }
        sum_over<WIDE_LANES>(product);
        if (lane == 0 && own_row < WIDE_BATCH)
            products[own_row] = product[0];
        SYNC();
        UNROLL_BY(2)
        for (uint32_t row = 0; row < n_rows; row++) {
            Four key[WIDE_FOURS];
            // Of the rows of the state: known, then asked.
            float sums[2 * HALVES];
            UNROLL for (int at = 0; at < 2 * HALVES; at++)
                sums[at] = 0.0f;
            UNROLL for (int at = 0; at < WIDE_FOURS; at++) {
                key[at] = batch.keys[row][lane + WIDE_LANES * at];
                const Four query = batch.queries[row][lane + WIDE_LANES * at];
                UNROLL for (int i = 0; i < 4; i++)
                    UNROLL for (int half = 0; half < HALVES; half++) {
                        sums[half] = fmaf(kept[half][at].at[i], key[at].at[i], sums[half]);
                        sums[HALVES + half] = fmaf(kept[half][at].at[i], query.at[i], sums[HALVES + half]);
                    }
            }
            const float keep = keeps[row], beta = betas[row], product = products[row];
            sum_over<WIDE_LANES>(sums);
            UNROLL for (int half = 0; half < HALVES; half++) {
                const uint32_t value_row = own_row + WIDE_ROWS / HALVES * half;
                const float value = batch.values[row][value_row / 4].at[value_row % 4];
                const float correction = beta * fmaf(-keep, sums[half], value);
                UNROLL for (int at = 0; at < WIDE_FOURS; at++)
                    UNROLL for (int i = 0; i < 4; i++)
                        kept[half][at].at[i] = fmaf(correction, key[at].at[i], keep * kept[half][at].at[i]);
                if (lane == 0)
                    results[row][value_row] = fmaf(correction, product, keep * sums[HALVES + half]);
            }
        }
        SYNC();
        if (args.out) {
            for (uint32_t at = threadIdx.x; at < n_rows * WIDE_ROWS; at += threads) {
                uint64_t of_head = (uint64_t)(first + at / WIDE_ROWS) * n_head_v + head;
                args.out[of_head * WIDE_HEAD + first_value + at % WIDE_ROWS] = results[at / WIDE_ROWS][at % WIDE_ROWS];
            }
        }
    }
    if (args.writes_state) {
        UNROLL for (int half = 0; half < HALVES; half++)
            UNROLL for (int at = 0; at < WIDE_FOURS; at++)
                store_four(states[half] + 4 * WIDE_LANES * at, kept[half][at]);
    }
}

// grid: (n_head_v, WIDE_HEAD / WIDE_ROWS), block: WIDE_ROWS * WIDE_LANES
KERNEL(delta_rule_128, DeltaRuleArgs) { delta_rule_wide<1>(args); }
