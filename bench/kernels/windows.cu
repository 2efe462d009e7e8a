// Times the products of a window: matrices of every fast type from device memory and from pinned host memory, the experts of both model
// shapes with all, half and none of them on the device, the head, and a window's products of all layers as one graph.
//
//     nvcc -O3 -std=c++17 -fmad=false -arch=sm_90 -cudart static -o target/bench-windows bench/kernels/windows.cu
//
// Every product is compared with an f64 sum over the weights as quant.cuh reads them.
#define FOR_EVERY_QUANT_TYPE(X)                                                                                                            \
    X(q8_0, Q8_0) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K) X(iq3_xxs, IQ3_XXS) X(iq4_xs, IQ4_XS) X(mxfp4, MXFP4) X(iq2_s, IQ2_S)
#include "../../kernels-cuda/window_experts.cuh"
#include "../../kernels-cuda/window_quantise.cuh"
#include "common.cuh"

#include <cstring>

// The f64 sum of one output and row; grid: (n_out / 128, rounded up, n_rows), block: 128
template <class Q>
__global__ void reference(const uint8_t *weights, const uint8_t *input, double *out, uint32_t n_out, uint32_t n_in, uint64_t row_bytes) {
    uint32_t output = blockIdx.x * 128 + threadIdx.x, format = Q::LEN == 32 ? ROWS_Q8_0 : ROWS_Q8_K;
    if (output >= n_out)
        return;
    const uint8_t *row = input + blockIdx.y * activation_row_bytes(format, n_in);
    double sum = 0;
    for (uint32_t k = 0; k < n_in; k += 8) {
        float w[8], x[8];
        load_weights8<Q>(weights + output * row_bytes, k, n_in, w);
        load_activations8(row, format, k, n_in, x);
        for (int i = 0; i < 8; i++)
            sum += (double)w[i] * x[i];
    }
    out[(uint64_t)blockIdx.y * n_out + output] = sum;
}

struct Type {
    const char *name;
    uint32_t len, bytes, format;
    std::vector<uint32_t> halves; // offsets of scales in a block
    void (*products[2])(WindowProductsArgs); // several rows, one row
    void (*gate_up[2])(WindowGateUpArgs); // several rows, one row
    void (*down[2])(WindowDownArgs); // several rows, one row
    void (*check)(const uint8_t *, const uint8_t *, double *, uint32_t, uint32_t, uint64_t);
    uint64_t row_bytes(uint32_t n) const { return (uint64_t)n / len * bytes; }
};

#define TYPE(name, Q, ...)                                                                                                                 \
    Type {                                                                                                                                 \
        #Q, Q::LEN, Q::BYTES, Q::LEN == 32 ? ROWS_Q8_0 : ROWS_Q8_K, {__VA_ARGS__}, {window_products_##name, window_products_one_##name}, {window_gate_up_##name, window_gate_up_one_##name},          \
            {window_down_##name, window_down_one_##name}, reference<Q>                                                                                               \
    }
static const Type TYPES[] = {TYPE(q8_0, Q8_0, 0), TYPE(q4_k, Q4_K, 0, 2), TYPE(q5_k, Q5_K, 0, 2), TYPE(q6_k, Q6_K, 208),
                             TYPE(iq3_xxs, IQ3_XXS, 0), TYPE(iq4_xs, IQ4_XS, 0), TYPE(mxfp4, MXFP4), TYPE(iq2_s, IQ2_S, 0)};
static const Type &type(const char *name) {
    for (const Type &type : TYPES)
        if (!strcmp(type.name, name))
            return type;
    std::exit(1);
}

static std::vector<uint8_t> random_weights(const Type &type, size_t n, unsigned seed) {
    size_t n_blocks = n / type.len;
    std::vector<uint8_t> bytes(n_blocks * type.bytes);
    std::mt19937_64 generator(seed);
    for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
        uint64_t word = generator();
        memcpy(&bytes[at], &word, 8);
    }
    for (size_t block = 0; block < n_blocks; block++) {
        uint8_t *at = &bytes[block * type.bytes];
        for (uint32_t half : type.halves)
            at[half + 1] = 0x20 | (at[half + 1] & 3); // between 2^-7 and 2^-6
        if (type.halves.empty())
            at[0] = 118 + at[0] % 4;
    }
    return bytes;
}

static uint64_t row_bytes(uint32_t format, uint32_t n) {
    return format == ROWS_Q8_0 ? n + n / 32 * 4 + (n / 32 * 2 + 3) / 4 * 4 : n + n / 256 * 4 + n / 16 * 2;
}

// Random activation rows.
struct Rows {
    DeviceBuffer<uint8_t> rows;
    Rows(uint32_t format, uint32_t n_rows, uint32_t n, unsigned seed) : rows(n_rows * row_bytes(format, n)) {
        DeviceBuffer<float> floats(random_floats((size_t)n_rows * n, 1.0f, seed));
        quantise<<<dim3(n_rows, (n + 255) / 256), 256>>>(QuantiseArgs{floats.at, rows.at, n, format});
        CHECK(cudaDeviceSynchronize());
    }
};

// Memory of the host that the device reads in place.
struct Pinned {
    uint8_t *at;
    explicit Pinned(size_t bytes) { CHECK(cudaHostAlloc((void **)&at, bytes, cudaHostAllocMapped)); }
    ~Pinned() { cudaFreeHost(at); }
};

// As backends/cuda/windows.rs chooses them.
static uint32_t set_rows(const Type &type, uint64_t n_out, uint32_t n_in, uint32_t stage) {
    uint32_t slices = n_in / 32, rows = slices <= 16 ? 4 : slices <= 32 ? 2 : 1;
    uint64_t fit = slices > 64 ? 1 : std::max<uint64_t>((stage - 67) / type.row_bytes(n_in) / rows, 1);
    return rows * (uint32_t)std::min(fit, std::max<uint64_t>(n_out / rows / 2048, 1));
}
static uint32_t warp_sets(uint64_t sets) { return (uint32_t)std::min<uint64_t>(std::max<uint64_t>(sets / 4096, 1), 3); }

static uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static void launch_products(const Type &type, const uint8_t *weights, const uint8_t *input, float *out, uint32_t n_out, uint32_t n_in,
                            uint32_t n_rows, cudaStream_t stream = 0) {
    WindowProductsArgs args = {};
    args.input = input, args.row_bytes = type.row_bytes(n_in), args.n_in = n_in, args.n_rows = n_rows, args.n_matrices = 1;
    args.set_rows = set_rows(type, n_out, n_in, PRODUCT_STAGE);
    uint32_t n_sets = ceil_div(n_out, args.set_rows);
    args.warp_sets = warp_sets(n_sets);
    args.matrices[0] = {weights, out, n_out, 0};
    type.products[n_rows == 1]<<<ceil_div(n_sets, PRODUCT_WARPS * args.warp_sets), PRODUCT_BLOCK, 0, stream>>>(args);
}

static double products_error(const Type &type, const uint8_t *weights, const uint8_t *input, const float *out, uint32_t n_out, uint32_t n_in,
                             uint32_t n_rows) {
    DeviceBuffer<double> expected((size_t)n_out * n_rows);
    type.check<<<dim3(ceil_div(n_out, 128), n_rows), 128>>>(weights, input, expected.at, n_out, n_in, type.row_bytes(n_in));
    CHECK(cudaDeviceSynchronize());
    std::vector<double> right = expected.values();
    std::vector<float> got(right.size());
    CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    SquaredError error;
    for (size_t at = 0; at < right.size(); at++)
        error.add(got[at], right[at]);
    return error.normalised();
}

// `copies` matrices in a row, each multiplied in turn; ten launches are timed together.
static void bench_products(const Type &type, uint32_t n_out, uint32_t n_in, uint32_t n_rows, bool pinned, size_t total_bytes) {
    size_t bytes = type.row_bytes(n_in) * n_out, copies = std::max<size_t>(1, total_bytes / bytes);
    std::vector<uint8_t> one = random_weights(type, (size_t)n_out * n_in, 1);
    DeviceBuffer<uint8_t> device(pinned ? 16 : bytes * copies);
    Pinned host(pinned ? bytes * copies : 16);
    uint8_t *weights = pinned ? host.at : device.at;
    for (size_t copy = 0; copy < copies; copy++)
        CHECK(cudaMemcpy(weights + copy * bytes, one.data(), bytes, cudaMemcpyDefault));
    Rows rows(type.format, n_rows, n_in, 2);
    DeviceBuffer<float> out((size_t)n_out * n_rows);
    int together = pinned ? 1 : 10;
    double seconds = median_seconds([&](int run) {
                         for (int at = 0; at < together; at++)
                             launch_products(type, weights + (run * together + at) % copies * bytes, rows.rows.at, out.at, n_out, n_in, n_rows);
                     }) /
                     together;
    double error = products_error(type, weights, rows.rows.at, out.at, n_out, n_in, n_rows);
    // A row alone must have the same bits.
    std::vector<float> all = out.values();
    launch_products(type, weights, rows.rows.at + (n_rows - 1) * row_bytes(type.format, n_in), out.at, n_out, n_in, 1);
    CHECK(cudaDeviceSynchronize());
    bool same = !memcmp(out.values().data(), all.data() + (size_t)(n_rows - 1) * n_out, n_out * 4);
    printf("products %-8s %6u x %u, %u rows, %s: %8.2f us %7.0f GB/s  error %.1e%s\n", type.name, n_out, n_in, n_rows,
           pinned ? "pinned host" : "device", seconds * 1e6, bytes / seconds * 1e-9, error, same ? "" : "  A ROW ALONE HAS OTHER BITS");
}

// The experts of one layer in device memory and in host memory, one after another, gate, up and down together.
struct Layer {
    const Type &type;
    uint32_t n_embd, n_ff, n_expert;
    size_t part, bytes;
    DeviceBuffer<uint8_t> device;
    Pinned host;
    Layer(const Type &type, uint32_t n_embd, uint32_t n_ff, uint32_t n_expert)
        : type(type), n_embd(n_embd), n_ff(n_ff), n_expert(n_expert), part(type.row_bytes(n_embd) * n_ff), bytes(3 * part),
          device(bytes * n_expert), host(bytes * n_expert) {
        for (uint32_t expert = 0; expert < n_expert; expert++) {
            std::vector<uint8_t> one = random_weights(type, (size_t)3 * n_embd * n_ff, expert % 5);
            memcpy(host.at + expert * bytes, one.data(), bytes);
        }
        CHECK(cudaMemcpy(device.at, host.at, bytes * n_expert, cudaMemcpyHostToDevice));
    }
};

struct Window {
    const Layer &layer;
    uint32_t n_rows, n_used, n_sets;
    DeviceBuffer<uint64_t> table;
    DeviceBuffer<int32_t> ids;
    DeviceBuffer<float> weights, residual, floats;
    DeviceBuffer<uint8_t> activated;
    Rows input;
    std::vector<int32_t> chosen;
    double mean_experts = 0;
    Window(const Layer &layer, uint32_t n_rows, uint32_t hits_of_four)
        : layer(layer), n_rows(n_rows), n_used(8), n_sets(23), table((size_t)layer.n_expert * 3), ids((size_t)n_sets * n_rows * 8),
          weights(std::vector<float>(n_rows * 8, 0.125f)), residual((size_t)n_rows * layer.n_embd),
          floats((size_t)n_rows * 8 * 2 * layer.n_ff), activated(n_rows * 8 * row_bytes(layer.type.format, layer.n_ff)),
          input(layer.type.format, n_rows, layer.n_embd, 3) {
        std::vector<uint64_t> addresses;
        for (uint32_t expert = 0; expert < layer.n_expert; expert++)
            for (int part = 0; part < 3; part++)
                addresses.push_back((uint64_t)((expert % 4 < hits_of_four ? layer.device.at : layer.host.at) + expert * layer.bytes + part * layer.part));
        CHECK(cudaMemcpy(table.at, addresses.data(), addresses.size() * 8, cudaMemcpyHostToDevice));
        std::mt19937 generator(7);
        for (uint32_t set = 0; set < n_sets; set++) {
            std::vector<bool> any(layer.n_expert);
            for (uint32_t row = 0; row < n_rows; row++) {
                std::vector<int32_t> all(layer.n_expert);
                for (uint32_t at = 0; at < layer.n_expert; at++)
                    all[at] = at;
                std::shuffle(all.begin(), all.end(), generator);
                std::sort(all.begin(), all.begin() + 8);
                chosen.insert(chosen.end(), all.begin(), all.begin() + 8);
                for (int at = 0; at < 8; at++)
                    any[all[at]] = true;
            }
            mean_experts += (double)std::count(any.begin(), any.end(), true) / n_sets;
        }
        CHECK(cudaMemcpy(ids.at, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(residual.at, 0, residual.n * 4));
    }
    void gate_up(int set, cudaStream_t stream) {
        WindowGateUpArgs args = {};
        args.input = input.rows.at, args.ids = ids.at + set * n_rows * 8, args.table = table.at, args.out = floats.at;
        args.row_bytes = layer.type.row_bytes(layer.n_embd), args.n_out = layer.n_ff, args.n_in = layer.n_embd;
        args.n_rows = n_rows, args.n_used = 8, args.first_part = 0;
        args.set_rows = set_rows(layer.type, (uint64_t)layer.n_ff * 2 * n_rows * 8, layer.n_embd, PRODUCT_STAGE);
        uint32_t n_sets = ceil_div(layer.n_ff, args.set_rows);
        args.warp_sets = 1;
        layer.type.gate_up[n_rows == 1]<<<dim3(ceil_div(n_sets, PRODUCT_WARPS * args.warp_sets), n_rows * 8, 2), PRODUCT_BLOCK, 0, stream>>>(args);
    }
    void activate(cudaStream_t stream) {
        WindowActivateArgs args = {floats.at, floats.at + (size_t)n_rows * 8 * layer.n_ff, activated.at, layer.n_ff, layer.type.format};
        window_activate<<<dim3(n_rows * 8, ceil_div(layer.n_ff, 256)), 32, 0, stream>>>(args);
    }
    void down(int set, cudaStream_t stream) {
        WindowDownArgs args = {};
        args.activated = activated.at, args.ids = ids.at + set * n_rows * 8, args.weights = weights.at, args.table = table.at;
        args.residual = residual.at, args.row_bytes = layer.type.row_bytes(layer.n_ff), args.n_embd = layer.n_embd, args.n_ff = layer.n_ff;
        args.n_rows = n_rows, args.n_used = 8, args.n_outputs = 8;
        args.set_rows = std::min(8u, set_rows(layer.type, ~0u, layer.n_ff, DOWN_STAGE));
        layer.type.down[n_rows == 1]<<<ceil_div(layer.n_embd, args.n_outputs), DOWN_BLOCK, 0, stream>>>(args);
    }
    void run(int set, cudaStream_t stream = 0) {
        gate_up(set, stream);
        activate(stream);
        down(set, stream);
    }
    // Of gate, and of what is added, over all rows of one window.
    double error() {
        CHECK(cudaMemset(residual.at, 0, residual.n * 4));
        run(0);
        CHECK(cudaDeviceSynchronize());
        std::vector<float> gates = floats.values(), sums = residual.values();
        SquaredError error;
        std::vector<double> added(sums.size());
        DeviceBuffer<double> expected((size_t)std::max(layer.n_ff, layer.n_embd));
        for (uint32_t pair = 0; pair < n_rows * 8; pair++) {
            const uint8_t *expert = layer.device.at + chosen[pair] * layer.bytes;
            layer.type.check<<<dim3(ceil_div(layer.n_ff, 128), 1), 128>>>(expert, input.rows.at + pair / 8 * row_bytes(layer.type.format, layer.n_embd),
                                                                        expected.at, layer.n_ff, layer.n_embd, layer.type.row_bytes(layer.n_embd));
            CHECK(cudaDeviceSynchronize());
            std::vector<double> right = expected.values();
            for (uint32_t at = 0; at < layer.n_ff; at++)
                error.add(gates[(size_t)pair * layer.n_ff + at], right[at]);
            layer.type.check<<<dim3(ceil_div(layer.n_embd, 128), 1), 128>>>(expert + 2 * layer.part, activated.at + pair * row_bytes(layer.type.format, layer.n_ff),
                                                                          expected.at, layer.n_embd, layer.n_ff, layer.type.row_bytes(layer.n_ff));
            CHECK(cudaDeviceSynchronize());
            right = expected.values();
            for (uint32_t at = 0; at < layer.n_embd; at++)
                added[(size_t)(pair / 8) * layer.n_embd + at] += 0.125 * right[at];
        }
        SquaredError of_sum;
        for (size_t at = 0; at < added.size(); at++)
            of_sum.add(sums[at], added[at]);
        return std::max(error.normalised(), of_sum.normalised());
    }
};

static void bench_experts(const char *model, const Layer &layer, uint32_t n_rows, uint32_t hits_of_four) {
    Window window(layer, n_rows, hits_of_four);
    double all = median_seconds([&](int run) { window.run(run % window.n_sets); }, 23);
    double gate_up = median_seconds([&](int run) { window.gate_up(run % window.n_sets, 0); }, 23);
    double activate = median_seconds([&](int) { window.activate(0); }, 23);
    double down = median_seconds([&](int run) { window.down(run % window.n_sets, 0); }, 23);
    double bytes = window.mean_experts * layer.bytes, missed = bytes * (4 - hits_of_four) / 4;
    printf("experts %s %s, %u rows, %.1f experts, %3u %% hits: %8.2f us (gate, up %.2f, activate %.2f, down %.2f) %7.1f GB/s, missed %6.1f GB/s  error %.1e\n",
           model, layer.type.name, n_rows, window.mean_experts, hits_of_four * 25, all * 1e6, gate_up * 1e6, activate * 1e6, down * 1e6,
           bytes / all * 1e-9, missed / all * 1e-9, window.error());
}

// All products of a window of one row, every layer's weights of its own, as one graph: what a token costs but for attention and norms.
static void bench_graph(const char *model, uint32_t n_layer, std::vector<std::pair<uint32_t, uint32_t>> dense, const Layer &layer) {
    const Type &q8_0 = type("Q8_0");
    size_t bytes = 0;
    for (auto [n_out, n_in] : dense)
        bytes += q8_0.row_bytes(n_in) * n_out;
    std::vector<uint8_t> one = random_weights(q8_0, bytes / 34 * 32, 4);
    DeviceBuffer<uint8_t> weights(bytes * n_layer);
    for (uint32_t at = 0; at < n_layer; at++)
        CHECK(cudaMemcpy(weights.at + at * bytes, one.data(), bytes, cudaMemcpyHostToDevice));
    Rows rows(ROWS_Q8_0, 1, 8192, 5);
    DeviceBuffer<float> out(16384);
    Window window(layer, 1, 4);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    auto timed = [&](bool with_dense, bool with_experts) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (uint32_t at = 0; at < n_layer; at++) {
            const uint8_t *matrix = weights.at + at * bytes;
            for (auto [n_out, n_in] : dense) {
                if (with_dense)
                    launch_products(q8_0, matrix, rows.rows.at, out.at, n_out, n_in, 1, stream);
                matrix += q8_0.row_bytes(n_in) * n_out;
            }
            if (with_experts)
                window.run(at % window.n_sets, stream);
        }
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        double seconds = median_seconds([&](int) {
            CHECK(cudaGraphLaunch(executable, stream));
            CHECK(cudaStreamSynchronize(stream));
        });
        CHECK(cudaGraphExecDestroy(executable));
        return seconds * 1e3;
    };
    printf("graph %s: %u layers, dense %.3f ms (%.2f GB, %zu nodes a layer), experts that hit %.3f ms, both %.3f ms\n", model, n_layer,
           timed(true, false), bytes * n_layer * 1e-9, dense.size(), timed(false, true), timed(true, true));
}

int main() {
    const size_t much = (size_t)400 << 20;
    for (const Type &type : TYPES)
        for (uint32_t n_rows : {1u, 4u, 8u})
            bench_products(type, 16384, 2048, n_rows, false, much);
    for (uint32_t n_rows : {1u, 4u, 8u}) {
        bench_products(type("Q5_K"), 151936, 2048, n_rows, false, much);
        bench_products(type("Q5_K"), 248320, 2048, n_rows, false, much);
    }
    for (auto [n_out, n_in] : std::vector<std::pair<uint32_t, uint32_t>>{{4096, 2048}, {512, 2048}, {2048, 4096}, {8192, 2048}, {2048, 512}, {2500, 2560}})
        bench_products(type("Q8_0"), n_out, n_in, 1, false, much);
    for (const Type &type : TYPES)
        bench_products(type, 16384, 2048, 1, true, 1);
    Layer qwen3(type("IQ3_XXS"), 2048, 768, 128), qwen36(type("IQ3_XXS"), 2048, 512, 256);
    for (uint32_t n_rows : {1u, 4u, 8u})
        for (uint32_t hits : {4u, 2u, 0u}) {
            bench_experts("30B", qwen3, n_rows, hits);
            bench_experts("35B", qwen36, n_rows, hits);
        }
    bench_graph("30B", 48, {{4096, 2048}, {512, 2048}, {512, 2048}, {2048, 4096}}, qwen3);
    bench_graph("35B delta", 30, {{8192, 2048}, {4096, 2048}, {32, 2048}, {32, 2048}, {2048, 4096}, {512, 2048}, {512, 2048}, {2048, 512}}, qwen36);
    return 0;
}
