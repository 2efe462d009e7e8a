// Operations number by number, and those that move rows around them: Op::SplitGates, JoinRows, SigmoidGate, SwiGlu, AddGated.
//
// grid of all: (blocks that cover the numbers, any number of them), block: BLOCK
#pragma once
#include "portable.cuh"

struct SplitGatesArgs {
    const float *joined; // [n_rows, n_head, 2, head_dim]
    float *values;       // [n_rows, n_head, head_dim]
    float *gates;        // as values
    uint64_t n;          // numbers of values
    uint32_t head_dim;
    uint32_t unused;
};
SIZE_OF(SplitGatesArgs, 40);

KERNEL(split_gates, SplitGatesArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride()) {
        uint64_t head = at / args.head_dim, source = at + head * args.head_dim;
        args.values[at] = args.joined[source];
        args.gates[at] = args.joined[source + args.head_dim];
    }
}

struct JoinRowsArgs {
    const float *left;  // [n_rows, n_cols]
    const float *right; // as left
    float *out;         // [n_rows, 2, n_cols]
    uint64_t n;         // numbers of left
    uint32_t n_cols;
    uint32_t unused;
};
SIZE_OF(JoinRowsArgs, 40);

KERNEL(join_rows, JoinRowsArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride()) {
        uint64_t row = at / args.n_cols, target = at + row * args.n_cols;
        args.out[target] = args.left[at];
        args.out[target + args.n_cols] = args.right[at];
    }
}

struct SigmoidGateArgs {
    float *x;
    const float *gates;
    uint64_t n;
};
SIZE_OF(SigmoidGateArgs, 24);

KERNEL(sigmoid_gate, SigmoidGateArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride())
        args.x[at] *= sigmoid(args.gates[at]);
}

struct SwiGluArgs {
    float *gate;
    const float *up;
    uint64_t n;
};
SIZE_OF(SwiGluArgs, 24);

KERNEL(swiglu, SwiGluArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride())
        args.gate[at] = silu(args.gate[at]) * args.up[at];
}

struct AddGatedArgs {
    float *sum;        // [n_rows, n_cols]
    const float *x;    // [n_rows, n_cols]
    const float *gate; // [n_rows]
    uint64_t n;
    uint32_t n_cols;
    uint32_t unused;
};
SIZE_OF(AddGatedArgs, 40);

KERNEL(add_gated, AddGatedArgs) {
    for (uint64_t at = first_element(); at < args.n; at += element_stride())
        args.sum[at] += sigmoid(args.gate[at / args.n_cols]) * args.x[at];
}
