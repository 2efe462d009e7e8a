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

// Of the three operations on the state. A row of it (one value number, all key numbers) meets nothing of the other rows, so a thread
// carries one of them through all rows of the call, in registers; whether it is written back is all that tells the operations apart.
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
// Partial sums of a product of a state's row; heads are whole numbers of them.
#define DELTA_LANES 4

// Sizes known to the compiler keep the row in registers; 0 stands for a size known only at run time. The order of all sums is the same.
template <uint32_t HEAD_DIM>
DEVICE void delta_rule(const DeltaRuleArgs &args) {
    const uint32_t head_dim = HEAD_DIM ? HEAD_DIM : args.shape.head_dim;
    const uint32_t n_head_k = args.shape.n_head_k, n_head_v = args.shape.n_head_v;
    const uint32_t head = blockIdx.x, head_k = head % n_head_k, value_row = threadIdx.x;
    const uint64_t n_channels = (uint64_t)delta_heads(args.shape) * head_dim;
    float *state = args.state + ((uint64_t)head * head_dim + value_row) * head_dim;
    float kept[HEAD_DIM ? HEAD_DIM : DELTA_HEAD_MAX];
    UNROLL for (uint32_t at = 0; at < head_dim; at++)
        kept[at] = state[at];
    for (uint32_t row = 0; row < args.n_rows; row++) {
        const float *qkv = args.qkv + row * n_channels;
        const float *query = qkv + head_k * head_dim, *key = qkv + (n_head_k + head_k) * head_dim;
        const float *values = qkv + (2 * n_head_k + head) * head_dim;
        uint64_t gate = (uint64_t)row * n_head_v + head;
        float keep = expf(args.decay[gate]);
        float known[DELTA_LANES] = {0.0f, 0.0f, 0.0f, 0.0f}, result[DELTA_LANES] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (uint32_t at = 0; at < head_dim; at++) {
            kept[at] *= keep;
            known[at % DELTA_LANES] = fmaf(kept[at], key[at], known[at % DELTA_LANES]);
        }
        float correction = args.beta[gate] * (values[value_row] - ((known[0] + known[1]) + (known[2] + known[3])));
        UNROLL for (uint32_t at = 0; at < head_dim; at++) {
            kept[at] = fmaf(correction, key[at], kept[at]);
            result[at % DELTA_LANES] = fmaf(kept[at], query[at], result[at % DELTA_LANES]);
        }
        if (args.out)
            args.out[gate * head_dim + value_row] = (result[0] + result[1]) + (result[2] + result[3]);
    }
    if (args.writes_state)
        UNROLL for (uint32_t at = 0; at < head_dim; at++)
            state[at] = kept[at];
}

// One kernel for the three operations, so that a commit has the bits of its window, and a prompt those of any cut: between two calls of a
// block the state is that behind the last row, and the rows of an open step need not be kept.
// grid: (n_head_v), block: head_dim, at most DELTA_HEAD_MAX
KERNEL(delta_rule, DeltaRuleArgs) {
    if (args.shape.head_dim == 128)
        delta_rule<128>(args);
    else
        delta_rule<0>(args);
}
