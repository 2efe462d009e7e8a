// Op::Router: the experts of each row, with their shares.
#pragma once
#include "portable.cuh"

struct RouterArgs {
    const float *logits; // [n_rows, n_expert]
    uint32_t *ids;       // [n_rows, n_used]
    float *weights;      // [n_rows, n_used]
    uint32_t n_expert;
    uint32_t n_used;
    float scale;
    uint32_t unused;
};
SIZE_OF(RouterArgs, 40);

// What the sum of the chosen probabilities counts as at least: the smallest normal half float, as models were trained.
#define ROUTER_SUM_MIN (1.0f / 16384.0f)

// True where the first expert comes before the second: by probability, ties to the lower number. No two experts are equal.
DEVICE bool router_before(float weight, uint32_t expert, float other_weight, uint32_t other_expert) {
    return weight > other_weight || (weight == other_weight && expert < other_expert);
}

// A NaN counts as never chosen before a number.
DEVICE float router_exp(float logit, float largest) {
    return logit != logit ? 0.0f : expf(logit - largest);
}

// grid: (n_rows), block: BLOCK
KERNEL(router, RouterArgs) {
    SHARED float best_weights[BLOCK];
    SHARED uint32_t best_experts[BLOCK];
    const float *logits = args.logits + (uint64_t)blockIdx.x * args.n_expert;
    uint32_t *ids = args.ids + (uint64_t)blockIdx.x * args.n_used;
    float *weights = args.weights + (uint64_t)blockIdx.x * args.n_used;

    float largest = -INFINITY;
    for (uint32_t expert = threadIdx.x; expert < args.n_expert; expert += blockDim.x)
        largest = fmaxf(largest, logits[expert]);
    best_weights[threadIdx.x] = largest;
    SYNC();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            best_weights[threadIdx.x] = fmaxf(best_weights[threadIdx.x], best_weights[threadIdx.x + half]);
        SYNC();
    }
    largest = best_weights[0];
    double sum = 0.0;
    for (uint32_t expert = threadIdx.x; expert < args.n_expert; expert += blockDim.x)
        sum += (double)router_exp(logits[expert], largest);
    double total = block_sum(sum);

    // One expert a turn: the first of those that come behind the one before.
    float last_weight = INFINITY;
    uint32_t last_expert = 0;
    for (uint32_t used = 0; used < args.n_used; used++) {
        float best = -2.0f;
        uint32_t best_expert = args.n_expert;
        for (uint32_t expert = threadIdx.x; expert < args.n_expert; expert += blockDim.x) {
            float weight = (float)((double)router_exp(logits[expert], largest) / total);
            if (!(weight >= 0.0f))
                weight = -1.0f;
            bool behind = used == 0 || router_before(last_weight, last_expert, weight, expert);
            if (behind && router_before(weight, expert, best, best_expert)) {
                best = weight;
                best_expert = expert;
            }
        }
        best_weights[threadIdx.x] = best;
        best_experts[threadIdx.x] = best_expert;
        SYNC();
        for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
            unsigned other = threadIdx.x + half;
            if (threadIdx.x < half &&
                router_before(best_weights[other], best_experts[other], best_weights[threadIdx.x], best_experts[threadIdx.x])) {
                best_weights[threadIdx.x] = best_weights[other];
                best_experts[threadIdx.x] = best_experts[other];
            }
            SYNC();
        }
        last_weight = best_weights[0];
        last_expert = best_experts[0];
        // All have read it before the next turn writes.
        SYNC();
        if (threadIdx.x == 0) {
            // Into its place among the experts so far, which ascend by number.
            uint32_t at = used;
            for (; at > 0 && ids[at - 1] > last_expert; at--) {
                ids[at] = ids[at - 1];
                weights[at] = weights[at - 1];
            }
            ids[at] = last_expert;
            weights[at] = last_weight;
        }
    }
    if (threadIdx.x == 0) {
        float chosen = 0.0f;
        for (uint32_t at = 0; at < args.n_used; at++)
            chosen += weights[at];
        chosen = fmaxf(chosen, ROUTER_SUM_MIN);
        for (uint32_t at = 0; at < args.n_used; at++)
            weights[at] = weights[at] / chosen * args.scale;
    }
}
