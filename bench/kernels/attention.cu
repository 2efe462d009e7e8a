// Times Op::Attention on a card, prompts in chunks and windows, and holds a sample of the results against f64.
// nvcc -O3 -std=c++17 -fmad=false -arch=sm_90 -cudart static -I kernels-cuda -o attention bench/kernels/attention.cu
#include "attention_window_q8_0.cuh"

#include "measure.h"

#include <cstring>

static const float WIDTH = 1.73f; // standard deviation 1

__global__ void fill_floats(float *out, uint64_t n, uint32_t seed) {
    for (uint64_t at = first_element(); at < n; at += element_stride())
        out[at] = WIDTH * noise(at, seed);
}

__global__ void fill_cache(uint8_t *cache, uint64_t n, uint32_t seed, bool is_q8_0) {
    for (uint64_t at = first_element(); at < n; at += element_stride()) {
        if (!is_q8_0) {
            ((uint16_t *)cache)[at] = float_to_half(WIDTH * noise(at, seed));
            continue;
        }
        uint8_t *block = cache + at / KV_BLOCK * KV_BLOCK_BYTES;
        if (at % KV_BLOCK == 0)
            *(uint16_t *)block = float_to_half(WIDTH / 127.0f);
        block[2 + at % KV_BLOCK] = (uint8_t)(int8_t)roundf(127.0f * noise(at, seed));
    }
}

static double half_value(uint16_t half) {
    double magnitude = (half & 0x7c00) ? ldexp(1024 + (half & 0x3ff), ((half >> 10) & 31) - 25) : ldexp(half & 0x3ff, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

struct Shape {
    const char *model;
    uint32_t n_head, n_head_kv, head_dim, n_ctx;
    bool is_q8_0;
};

struct Variant {
    const char *name;
    void (*kernel)(AttentionArgs);
    uint32_t head_dim, threads, queries;
    bool is_q8_0;
};

struct Bench {
    Shape shape;
    AttentionArgs args;
    std::vector<uint8_t> k, v;
    float *q, *out;
    uint32_t offset = 0; // row of position 0

    explicit Bench(Shape shape, uint32_t n_rows) : shape(shape) {
        uint64_t head_bytes = shape.is_q8_0 ? shape.head_dim / 32 * 34 : shape.head_dim * 2;
        uint64_t numbers = (uint64_t)shape.n_ctx * shape.n_head_kv * shape.head_dim, bytes = (uint64_t)shape.n_ctx * shape.n_head_kv * head_bytes;
        uint8_t *caches[2] = {device_memory<uint8_t>(bytes), device_memory<uint8_t>(bytes)};
        for (int at = 0; at < 2; at++)
            fill_cache<<<4096, 256>>>(caches[at], numbers, 1 + at, shape.is_q8_0);
        uint64_t n_q = (uint64_t)n_rows * shape.n_head * shape.head_dim;
        q = device_memory<float>(n_q);
        out = device_memory<float>(n_q);
        fill_floats<<<4096, 256>>>(q, n_q, 3);
        std::vector<int32_t> positions(shape.n_ctx);
        for (uint32_t at = 0; at < shape.n_ctx; at++)
            positions[at] = (int32_t)at;
        args = {q, caches[0], caches[1], on_device(positions), on_device(std::vector<int32_t>{0}), out, nullptr, head_bytes,
                n_rows, shape.n_head, shape.n_head_kv, shape.head_dim, shape.n_ctx, 0, 1.0f / sqrtf((float)shape.head_dim), 0};
        CHECK(cudaDeviceSynchronize());
        k = from_device(caches[0], bytes);
        v = from_device(caches[1], bytes);
    }

    ~Bench() {
        for (const void *memory : {(const void *)args.q, (const void *)args.k_cache, (const void *)args.v_cache, (const void *)args.positions,
                                   (const void *)args.first_row, (const void *)args.out})
            CHECK(cudaFree((void *)memory));
    }

    double number(const std::vector<uint8_t> &cache, uint64_t key, uint32_t head, uint32_t d) const {
        const uint8_t *row = cache.data() + (key * shape.n_head_kv + head) * args.head_bytes;
        if (!shape.is_q8_0)
            return half_value(((const uint16_t *)row)[d]);
        const uint8_t *block = row + d / KV_BLOCK * KV_BLOCK_BYTES;
        return half_value(*(const uint16_t *)block) * (int8_t)block[2 + d % KV_BLOCK];
    }

    // Of row `row` at `position` and query head `head`.
    void check(Error &error, uint32_t row, uint32_t position, uint32_t head) const {
        uint32_t head_dim = shape.head_dim, head_kv = head / (shape.n_head / shape.n_head_kv);
        uint64_t first = ((uint64_t)row * shape.n_head + head) * head_dim;
        std::vector<float> result(head_dim);
        CHECK(cudaMemcpy(result.data(), out + first, 4 * head_dim, cudaMemcpyDeviceToHost));
        std::vector<double> sum(head_dim, 0.0);
        double total = 0.0;
        for (uint32_t key = 0; key <= position; key++) {
            double score = 0.0;
            for (uint32_t d = 0; d < head_dim; d++)
                score += (double)(WIDTH * noise(first + d, 3)) * number(k, offset + key, head_kv, d);
            double share = exp(score * args.scale);
            total += share;
            for (uint32_t d = 0; d < head_dim; d++)
                sum[d] += share * number(v, offset + key, head_kv, d);
        }
        for (uint32_t d = 0; d < head_dim; d++)
            error.add(result[d], sum[d] / total);
    }
};

static void prompt(Bench &bench, const Variant &variant, uint32_t n, uint32_t chunk) {
    const Shape &shape = bench.shape;
    if (variant.head_dim != shape.head_dim || variant.is_q8_0 != shape.is_q8_0)
        return;
    uint32_t group = shape.n_head / shape.n_head_kv;
    uint64_t row = (uint64_t)shape.n_head * shape.head_dim;
    double us = median_us(n > 10000 ? 5 : 11, [&](int) {
        for (uint32_t at = 0; at < n; at += chunk) {
            AttentionArgs args = bench.args;
            args.q += at * row;
            args.out += at * row;
            args.positions += at;
            args.n_rows = chunk;
            variant.kernel<<<dim3((chunk * group + variant.queries - 1) / variant.queries, shape.n_head_kv), variant.threads>>>(args);
        }
    });
    Error error;
    for (uint32_t at : {0u, 1u, 77u, n / 3, n - 1})
        bench.check(error, at, at, at * 7 % shape.n_head);
    double flop = 4.0 * shape.head_dim * shape.n_head * (0.5 * n * (n + 1.0));
    printf("%-28s %s %5u tokens, chunk %5u: %9.0f us, %6.1f us a token over 48 layers, %5.1f TFLOP/s, error %.1e\n", variant.name, shape.model, n,
           chunk, us, us * 48 / n, flop / us / 1e6, error.value());
}

struct WindowVariant {
    const char *name;
    void (*kernel)(AttentionArgs);
    uint32_t head_dim, threads, queries;
    bool is_q8_0;
};

// As `n_stretches` in backends/cuda/attention.rs.
static uint32_t stretches_of(uint32_t n_ctx) {
    uint32_t stretch = 1;
    auto begin = [](uint32_t at) { return at < 16 ? at * 64ull : (uint64_t)(16 + at % 16) * 64 << (at / 16 - 1); };
    while (begin(stretch) < n_ctx)
        stretch++;
    return stretch;
}

// A graph of windows, each on a cache of its own, so that none finds its keys in the second-level cache.
static void window(const Shape &shape, const WindowVariant &variant, uint32_t depth, uint32_t n_rows) {
    if (variant.head_dim != shape.head_dim || variant.is_q8_0 != shape.is_q8_0)
        return;
    const uint32_t copies = depth > 10000 ? 4 : 12, group = shape.n_head / shape.n_head_kv;
    Shape all = shape;
    all.n_ctx = copies * depth;
    Bench bench(all, 8);
    std::vector<int32_t> firsts;
    for (uint32_t at = 0; at < copies; at++)
        firsts.push_back((int32_t)(at * depth));
    int32_t *first_rows = on_device(firsts);
    AttentionArgs args = bench.args;
    args.n_stretches = stretches_of(depth);
    args.n_rows = n_rows;
    args.positions += depth - n_rows;
    args.partial = device_memory<float>(8ull * shape.n_head * args.n_stretches * (shape.head_dim + 2));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t at = 0; at < copies; at++) {
        args.first_row = first_rows + at;
        variant.kernel<<<dim3(args.n_stretches, shape.n_head_kv, (n_rows * group + variant.queries - 1) / variant.queries), variant.threads, 0,
                         stream>>>(args);
        attention_window_join<<<n_rows * shape.n_head, HEAD_DIM_MAX, 0, stream>>>(args);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&runnable, graph, 0));
    double us = median_us(20, [&](int) {
                    CHECK(cudaGraphLaunch(runnable, 0));
                }) / copies;
    std::vector<float> result = from_device(args.out, (uint64_t)n_rows * shape.n_head * shape.head_dim);
    Error error;
    // The last copy's keys begin at its first row.
    bench.offset = (copies - 1) * depth;
    for (uint32_t head : {0u, shape.n_head - 1})
        bench.check(error, n_rows - 1, depth - 1, head);
    double bytes = 2.0 * depth * shape.n_head_kv * bench.args.head_bytes;
    printf("%-28s %s depth %5u, %u rows: %6.1f us, %6.0f GB/s, error %.1e\n", variant.name, shape.model, depth, n_rows, us, bytes / us / 1e3,
           error.value());
    CHECK(cudaGraphExecDestroy(runnable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(args.partial));
    CHECK(cudaFree(first_rows));
}

int main(int n, char **words) {
    const bool windows_only = n > 1 && !strcmp(words[1], "windows"), prompts_only = n > 1 && !strcmp(words[1], "prompts");
    const WindowVariant windows[] = {
        {"attention_window_f16_64", attention_window_f16_64, 64, 128, 16, false},
        {"attention_window_f16_128", attention_window_f16_128, 128, 128, 16, false},
        {"attention_window_f16_256", attention_window_f16_256, 256, 128, 16, false},
        {"attention_window_q8_0_64", attention_window_q8_0_64, 64, 128, 32, true},
        {"attention_window_q8_0_128", attention_window_q8_0_128, 128, 128, 32, true},
        {"attention_window_q8_0_256", attention_window_q8_0_256, 256, 128, 16, true},
    };
    const Variant variants[] = {
        {"attention_tiles_f16_64", attention_tiles_f16_64, 64, 128, 128, false},
        {"attention_tiles_f16_128", attention_tiles_f16_128, 128, 128, 128, false},
        {"attention_tiles_f16_256", attention_tiles_f16_256, 256, 256, 128, false},
        {"attention_tiles_q8_0_64", attention_tiles_q8_0_64, 64, 128, 128, true},
        {"attention_tiles_q8_0_128", attention_tiles_q8_0_128, 128, 128, 128, true},
        {"attention_tiles_q8_0_256", attention_tiles_q8_0_256, 256, 256, 128, true},
    };
    for (Shape shape : {Shape{"30B f16 ", 32, 4, 128, 30720, false}, Shape{"30B q8_0", 32, 4, 128, 30720, true}, Shape{"35B f16 ", 16, 2, 256, 30720, false},
                        Shape{"35B q8_0", 16, 2, 256, 30720, true}, Shape{"64 f16  ", 16, 4, 64, 8192, false}, Shape{"64 q8_0 ", 16, 4, 64, 8192, true}}) {
        if (!prompts_only)
            for (const WindowVariant &variant : windows)
                for (uint32_t depth : {1024u, 8192u, 30720u})
                    for (uint32_t n_rows : {1u, 4u, 8u})
                        window(shape, variant, depth, n_rows);
        if (windows_only)
            continue;
        Bench bench(shape, shape.n_ctx);
        for (const Variant &variant : variants) {
            for (uint32_t chunk : {1024u, 8192u})
                prompt(bench, variant, 8192, chunk);
            if (shape.n_ctx > 8192)
                prompt(bench, variant, 30720, 1024);
        }
    }
    return 0;
}
