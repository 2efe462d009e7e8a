// The gated delta net: Op::DeltaConv, DeltaHistory, DeltaGates, DeltaPrompt, DeltaWindow, DeltaCommit.
#pragma once
#include "portable.cuh"

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

struct DeltaConvArgs {
    const float *x;       // [n_rows, n_channels]
    const float *history; // [n_taps - 1, n_channels], oldest row first
    const float *taps;    // [n_channels, n_taps], the present row's last
    float *out;           // as x
    DeltaShape shape;
    float eps;
    uint32_t unused;
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

// A head of HEAD_DIM numbers, or of at most DELTA_HEAD_MAX where HEAD_DIM is 0: loops are unrolled all the same, so that no number leaves its
// register, as local memory would be taken for every thread that the device can hold. The order of all sums is that of the numbers.
template <uint32_t HEAD_DIM>
DEVICE void delta_rule(const DeltaRuleArgs &args) {
    SHARED float known_parts[DELTA_BLOCK], result_parts[DELTA_BLOCK];
    const uint32_t most = (HEAD_DIM ? HEAD_DIM : DELTA_HEAD_MAX) / DELTA_LANES;
    const uint32_t head_dim = HEAD_DIM ? HEAD_DIM : args.shape.head_dim, n = head_dim / DELTA_LANES;
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

// One kernel for the three operations, so that a commit has the bits of its window, and a prompt those of any cut: between two calls of a
// block the state is that behind the last row, and the rows of an open step need not be kept.
// grid: (n_head_v, head_dim / DELTA_ROWS), block: DELTA_BLOCK
KERNEL(delta_rule, DeltaRuleArgs) {
    if (args.shape.head_dim == 128)
        delta_rule<128>(args);
    else
        delta_rule<0>(args);
}
