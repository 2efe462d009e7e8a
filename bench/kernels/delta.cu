// Times the gated delta net's operations on a card, of the 35B shape, and holds some heads against f64.
// nvcc -O3 -std=c++17 -fmad=false -arch=sm_90 -cudart static -I kernels-cuda -o delta bench/kernels/delta.cu
#include "delta.cuh"

#include "measure.h"

static const DeltaShape SHAPE = {16, 32, 128, 4};
static const uint32_t N_CHANNELS = (2 * 16 + 32) * 128;

__global__ void fill(float *out, uint64_t n, uint32_t seed, float low, float high) {
    for (uint64_t at = first_element(); at < n; at += element_stride())
        out[at] = low + (high - low) * (0.5f + 0.5f * noise(at, seed));
}

static float *filled(uint64_t n, uint32_t seed, float low, float high) {
    float *memory = device_memory<float>(n);
    fill<<<4096, 256>>>(memory, n, seed, low, high);
    CHECK(cudaDeviceSynchronize());
    return memory;
}

struct Net {
    float *x, *history, *taps, *qkv, *beta, *decay, *state, *out;
    uint32_t n_rows;

    explicit Net(uint32_t n_rows) : n_rows(n_rows) {
        x = filled((uint64_t)n_rows * N_CHANNELS, 1, -2.0f, 2.0f);
        history = filled(3ull * N_CHANNELS, 2, -2.0f, 2.0f);
        taps = filled(4ull * N_CHANNELS, 3, -1.0f, 1.0f);
        beta = filled((uint64_t)n_rows * 32, 4, 0.0f, 1.0f);
        decay = filled((uint64_t)n_rows * 32, 5, -0.3f, 0.0f);
        state = device_memory<float>(32ull * 128 * 128);
        CHECK(cudaMemset(state, 0, 32ull * 128 * 128 * 4));
        qkv = device_memory<float>((uint64_t)n_rows * N_CHANNELS);
        out = device_memory<float>((uint64_t)n_rows * 32 * 128);
    }

    ~Net() {
        for (float *memory : {x, history, taps, qkv, beta, decay, state, out})
            CHECK(cudaFree(memory));
    }

    DeltaConvArgs conv() const { return {x, history, taps, qkv, SHAPE, 1e-6f, n_rows}; }
    DeltaRuleArgs rule(uint32_t rows, bool writes) const { return {qkv, beta, decay, state, out, SHAPE, rows, writes}; }

    // Error of a value head over all rows, from an empty state.
    double error(uint32_t head) const {
        std::vector<float> rows = from_device(qkv, (uint64_t)n_rows * N_CHANNELS), results = from_device(out, (uint64_t)n_rows * 32 * 128);
        std::vector<float> betas = from_device(beta, (uint64_t)n_rows * 32), decays = from_device(decay, (uint64_t)n_rows * 32);
        std::vector<double> s(128 * 128, 0.0);
        Error error;
        for (uint64_t row = 0; row < n_rows; row++) {
            const float *q = &rows[row * N_CHANNELS + head % 16 * 128], *k = q + 16 * 128, *v = &rows[row * N_CHANNELS + (32 + head) * 128];
            double keep = exp((double)decays[row * 32 + head]);
            for (int d = 0; d < 128; d++) {
                double known = 0.0, result = 0.0;
                for (int i = 0; i < 128; i++)
                    known += (s[d * 128 + i] *= keep) * k[i];
                double r = betas[row * 32 + head] * (v[d] - known);
                for (int i = 0; i < 128; i++)
                    result += (s[d * 128 + i] += r * k[i]) * q[i];
                error.add(results[(row * 32 + head) * 128 + d], result);
            }
        }
        return error.value();
    }
};

KERNEL(try_two_rows, DeltaRuleArgs) { delta_rule_wide<2>(args); }

int main() {
    {
        Net net(1024);
        delta_conv<<<1024 * 64, 64>>>(net.conv());
        delta_rule<<<dim3(32, 8), 64>>>(net.rule(1024, false));
        CHECK(cudaDeviceSynchronize());
        double step = net.error(17);
        delta_rule_128<<<dim3(32, 4), 256>>>(net.rule(1024, false));
        CHECK(cudaDeviceSynchronize());
        printf("errors over 1,024 rows: delta_rule %.1e, delta_rule_128 %.1e\n", step, net.error(17));
    }
    for (uint32_t n_rows : {1024u, 30720u}) {
        Net net(n_rows);
        double bytes = 4.0 * n_rows * N_CHANNELS;
        double us = median_us(7, [&](int) { delta_conv<<<n_rows * 64, 64>>>(net.conv()); });
        printf("delta_conv      %5u rows: %9.1f us, %5.0f GB/s\n", n_rows, us, 2 * bytes / us / 1e3);
        us = median_us(7, [&](int) { delta_conv_4<<<dim3(16, n_rows / 16), 128>>>(net.conv()); });
        printf("delta_conv_4    %5u rows: %9.1f us, %5.0f GB/s\n", n_rows, us, 2 * bytes / us / 1e3);
        us = median_us(7, [&](int) { delta_gates<<<(n_rows * 32 + 255) / 256, 256>>>({net.beta, net.decay, net.taps, net.taps, n_rows * 32ull, 32, 0}); });
        printf("delta_gates     %5u rows: %9.1f us\n", n_rows, us);
        CHECK(cudaMemset(net.decay, 0, n_rows * 32ull * 4));
        CHECK(cudaMemset(net.beta, 0, n_rows * 32ull * 4));
        us = median_us(7, [&](int) { delta_rule_128<<<dim3(32, 4), 256>>>(net.rule(n_rows, true)); });
        double two = median_us(7, [&](int) { try_two_rows<<<dim3(32, 4), 128>>>(net.rule(n_rows, true)); });
        printf("try_two_rows    %5u rows: %9.1f us, %6.1f ns a row\n", n_rows, two, 1e3 * two / n_rows);
        printf("delta_rule_128  %5u rows: %9.1f us, %6.1f ns a row\n", n_rows, us, 1e3 * us / n_rows);
    }
    Net net(8);
    for (uint32_t n_rows : {1u, 4u, 8u}) {
        double us = median_us(20, [&](int) { delta_rule<<<dim3(32, 8), 64>>>(net.rule(n_rows, false)); });
        double wide = median_us(20, [&](int) { delta_rule_128<<<dim3(32, 4), 256>>>(net.rule(n_rows, false)); });
        double conv = median_us(20, [&](int) { delta_conv<<<n_rows * 64, 64>>>(net.conv()); });
        printf("window of %u rows: delta_rule %.1f us, delta_rule_128 %.1f us, delta_conv %.1f us (each with its launch)\n", n_rows, us, wide, conv);
        conv = median_us(20, [&](int) { delta_conv_4<<<dim3(16, 1), 128>>>({net.x, net.history, net.taps, net.qkv, SHAPE, 1e-6f, n_rows}); });
        printf("window of %u rows: delta_conv_4 %.1f us\n", n_rows, conv);
    }
    return 0;
}
