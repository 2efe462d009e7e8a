// Op::Router: the experts of each row, with their shares.
#pragma once
#include "activations.cuh"

struct RouterArgs {
    const float *logits; // [n_rows, n_expert]
    uint32_t *ids;       // [n_rows, n_used]
    float *weights;      // [n_rows, n_used]
    uint32_t n_expert;   // at most ROUTER_EXPERTS
    uint32_t n_used;
    float scale;
    uint32_t unused;
};
SIZE_OF(RouterArgs, 40);

#define ROUTER_EXPERTS 2048

// What the sum of the chosen probabilities counts as at least: the smallest normal half float, as models were trained.
#define ROUTER_SUM_MIN (1.0f / 16384.0f)

// A NaN counts as never chosen before a number.
DEVICE float router_exp(float logit, float largest) {
    return logit != logit ? 0.0f : expf(logit - largest);
}

// An expert's rank is the number of experts before it: by probability, ties to the lower number. Those of the first ranks are chosen.
// grid: (n_rows), block: BLOCK
KERNEL(router, RouterArgs) {
    SHARED Four weights[ROUTER_EXPERTS / 4];
    SHARED float largest_of[BLOCK];
    SHARED uint32_t chosen[ROUTER_EXPERTS], ordered[ROUTER_EXPERTS];
    uint32_t n = args.n_expert, n_fours = (n + 3) / 4;
    float *weight = (float *)weights;
    const float *logits = args.logits + (uint64_t)blockIdx.x * n;
    uint32_t *ids = args.ids + (uint64_t)blockIdx.x * args.n_used;
    float *shares = args.weights + (uint64_t)blockIdx.x * args.n_used;

    float largest = -INFINITY;
    for (uint32_t expert = threadIdx.x; expert < n; expert += blockDim.x)
        largest = fmaxf(largest, logits[expert]);
    largest_of[threadIdx.x] = largest;
    SYNC();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            largest_of[threadIdx.x] = fmaxf(largest_of[threadIdx.x], largest_of[threadIdx.x + half]);
        SYNC();
    }
    largest = largest_of[0];
    double sum = 0.0;
    for (uint32_t expert = threadIdx.x; expert < n; expert += blockDim.x)
        sum += (double)router_exp(logits[expert], largest);
    double total = block_sum(sum);
    for (uint32_t expert = threadIdx.x; expert < 4 * n_fours; expert += blockDim.x) {
        float probability = expert < n ? (float)((double)router_exp(logits[expert], largest) / total) : -2.0f;
        weight[expert] = expert < n && !(probability >= 0.0f) ? -1.0f : probability;
    }
    SYNC();
    for (uint32_t expert = threadIdx.x; expert < n; expert += blockDim.x) {
        float mine = weight[expert];
        uint32_t rank = 0;
        for (uint32_t four = 0; four < n_fours; four++) {
            Four others = weights[four];
            UNROLL
            for (uint32_t i = 0; i < 4; i++)
                rank += others.at[i] > mine || (others.at[i] == mine && 4 * four + i < expert);
        }
        if (rank < args.n_used)
            chosen[rank] = expert;
    }
    SYNC();
    for (uint32_t rank = threadIdx.x; rank < args.n_used; rank += blockDim.x) {
        // Its place among the chosen, which ascend by number.
        uint32_t place = 0;
        for (uint32_t other = 0; other < args.n_used; other++)
            place += chosen[other] < chosen[rank];
        ordered[place] = chosen[rank];
    }
    SYNC();
    for (uint32_t place = threadIdx.x; place < args.n_used; place += blockDim.x) {
        float together = 0.0f;
        for (uint32_t at = 0; at < args.n_used; at++)
            together += weight[ordered[at]];
        ids[place] = ordered[place];
        shares[place] = weight[ordered[place]] / fmaxf(together, ROUTER_SUM_MIN) * args.scale;
    }
}
