// Speed and error of a prompt's products as halves: dense, experts, and the steps around them.
#include "common.cuh"
#include "../../kernels-cuda/halves.cuh"

static uint32_t up(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

// Random rows as heads and lines, and what they stand for.
struct Rows {
    DeviceBuffer<float> floats;
    DeviceBuffer<uint8_t> halves;
    uint32_t n_rows, n_in;
    Rows(uint32_t n_rows, uint32_t n_in, unsigned seed)
        : floats(random_floats((size_t)n_rows * n_in, 3.0f, seed)), halves((size_t)n_rows * (16 + 2 * (size_t)n_in)), n_rows(n_rows), n_in(n_in) {
        quantise();
        CHECK(cudaDeviceSynchronize());
    }
    void quantise() { quantise_halves<<<n_rows, HALVES_BLOCK>>>({floats.at, halves.at, n_in, 0}); }
};

static std::vector<uint16_t> random_halves(size_t n, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<uint16_t> values(n);
    for (uint16_t &value : values)
        value = (uint16_t)((generator() & 0x8fff) | 0x2000);
    return values;
}

static double product(const std::vector<float> &x, size_t row, const std::vector<uint16_t> &w, size_t line, uint32_t n_in) {
    double sum = 0;
    for (uint32_t k = 0; k < n_in; k++)
        sum += (double)x[row * n_in + k] * half_value(w[line * n_in + k]);
    return sum;
}

static void dense(uint32_t n_rows, uint32_t n_out, uint32_t n_in) {
    Rows rows(n_rows, n_in, 1);
    std::vector<uint16_t> w = random_halves((size_t)n_out * n_in, 2);
    DeviceBuffer<uint16_t> weights(w);
    DeviceBuffer<float> out((size_t)n_rows * n_out);
    MatMulHalvesArgs args = {rows.halves.at, weights.at, out.at, n_rows, n_out, n_in, n_out, 0, 0};
    auto run = [&](int) { mat_mul_halves_128<<<dim3(up(n_out, HALVES_OUTPUTS), up(n_rows, 128)), HALVES_PRODUCT_BLOCK>>>(args); };
    double seconds = median_seconds(run);
    std::vector<float> x = rows.floats.values(), found = out.values();
    SquaredError error;
    std::mt19937 generator(3);
    for (int at = 0; at < 300; at++) {
        size_t row = generator() % n_rows, output = generator() % n_out;
        error.add(found[row * n_out + output], product(x, row, w, output, n_in));
    }
    double quantise_s = median_seconds([&](int) { rows.quantise(); });
    std::printf("dense %u x %u x %u: %.1f us, %.0f TFLOP/s, error %.1e; rows to halves %.1f us\n", n_rows, n_out, n_in, seconds * 1e6,
                2.0 * n_rows * n_out * n_in / seconds * 1e-12, error.normalised(), quantise_s * 1e6);
}

static void experts(uint32_t n_pieces, uint32_t each, uint32_t n_embd, uint32_t n_ff) {
    uint32_t n_pairs = n_pieces * each, n_rows = 8192;
    Rows input(n_rows, n_embd, 4);
    std::mt19937 generator(5);
    std::vector<uint32_t> list(n_pairs);
    for (uint32_t &row : list)
        row = generator() % n_rows;
    DeviceBuffer<uint32_t> rows(list);
    std::vector<uint16_t> w = random_halves((size_t)2 * n_pieces * n_ff * n_embd, 6);
    DeviceBuffer<uint16_t> weights(w);
    DeviceBuffer<float> activated((size_t)n_pairs * n_ff), results((size_t)n_pairs * n_embd);
    DeviceBuffer<uint8_t> activated_rows((size_t)n_pairs * (16 + 2 * n_ff));
    ExpertsHalvesArgs args = {input.halves.at, rows.at, weights.at, activated.at, n_ff, n_embd, n_pieces, 0, {}};
    for (uint32_t at = 0; at < n_pieces; at++)
        args.pieces[at] = {at * each, each, at * each, at * up(each, 128)};
    uint32_t tiles = n_pieces * up(each, 128);
    double gated_s = median_seconds([&](int) { experts_gated_128<<<dim3(up(n_ff, HALVES_OUTPUTS / 2), tiles), HALVES_PRODUCT_BLOCK>>>(args); });
    std::vector<float> x = input.floats.values(), found = activated.values();
    SquaredError error;
    for (int at = 0; at < 300; at++) {
        size_t pair = generator() % n_pairs, output = generator() % n_ff, piece = pair / each;
        double gate = product(x, list[pair], w, piece * n_ff + output, n_embd) ;
        double up_ = product(x, list[pair], w, (n_pieces + piece) * n_ff + output, n_embd);
        error.add(found[pair * n_ff + output], gate / (1 + std::exp(-gate)) * up_);
    }
    double quantise_s = median_seconds([&](int) { quantise_halves<<<n_pairs, HALVES_BLOCK>>>({activated.at, activated_rows.at, n_ff, 0}); });
    ExpertsHalvesArgs down = args;
    down.input = activated_rows.at, down.rows = nullptr, down.out = results.at, down.n_out = n_embd, down.n_in = n_ff;
    double down_s = median_seconds([&](int) { experts_halves_128<<<dim3(up(n_embd, HALVES_OUTPUTS), tiles), HALVES_PRODUCT_BLOCK>>>(down); });
    double flop = 2.0 * n_pairs * n_embd * n_ff;
    std::printf("experts %u x %u rows, %u x %u: gated %.1f us, %.0f TFLOP/s, error %.1e; rows to halves %.1f us; down %.1f us, %.0f TFLOP/s\n",
                n_pieces, each, n_embd, n_ff, gated_s * 1e6, 2 * flop / gated_s * 1e-12, error.normalised(), quantise_s * 1e6, down_s * 1e6,
                flop / down_s * 1e-12);
    // The addition, as if these were the experts of the middle of 128.
    std::vector<uint32_t> entries((size_t)n_rows * 8);
    std::vector<std::vector<uint32_t>> of_row(n_rows);
    for (uint32_t at = 0; at < n_pairs; at++)
        of_row[list[at]].push_back(1000 + at);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t at = 0; at < 8; at++)
            entries[row * 8 + at] = at < of_row[row].size() ? of_row[row][at] : 1u << 30;
    DeviceBuffer<uint32_t> entries_at(entries);
    DeviceBuffer<float> row_weights(random_floats(1000 + n_pairs, 1.0f, 7)), residual((size_t)n_rows * n_embd);
    ExpertsAddArgs add = {results.at, entries_at.at, row_weights.at, residual.at, n_rows, 8, n_embd, 1000, 1000 + n_pairs, 0};
    double add_s = median_seconds([&](int) { experts_add<<<up(n_rows, 8), HALVES_BLOCK>>>(add); });
    std::printf("  added to the residual in %.1f us\n", add_s * 1e6);
}

template <class Q> static void unpacking(const char *name, void (*kernel)(const UnpackArgs), uint32_t n_sources, uint32_t n_rows, uint32_t n_cols) {
    size_t row_bytes = (size_t)n_cols / Q::LEN * Q::BYTES, bytes = row_bytes * n_rows * n_sources;
    DeviceBuffer<uint8_t> weights(random_bytes(bytes, 8));
    DeviceBuffer<uint16_t> out((size_t)n_sources * n_rows * n_cols);
    UnpackArgs args = {(uint8_t *)out.at, row_bytes, n_rows, n_cols, {}};
    for (uint32_t at = 0; at < n_sources; at++)
        args.sources[at] = (uint64_t)(weights.at + at * row_bytes * n_rows);
    uint32_t blocks = up(n_rows * n_cols / CHUNK, HALVES_BLOCK);
    double seconds = median_seconds([&](int) { kernel<<<dim3(blocks, n_sources), HALVES_BLOCK>>>(args); });
    std::printf("unpack %s %u x %u x %u: %.1f us, %.0f GB/s read and written\n", name, n_sources, n_rows, n_cols, seconds * 1e6,
                (bytes + 2.0 * n_sources * n_rows * n_cols) / seconds * 1e-9);
}

int main() {
    for (uint32_t n_rows : {1024, 8192})
        for (auto [n_out, n_in] : {std::pair<uint32_t, uint32_t>{4096, 2048}, {2048, 4096}, {512, 2048}})
            dense(n_rows, n_out, n_in);
    dense(8192, 8192, 8192);
    experts(8, 512, 2048, 768);
    experts(8, 1866, 2048, 768);
    experts(12, 256, 2048, 512);
    experts(12, 933, 2048, 512);
    unpacking<Q8_0>("q8_0", unpack_q8_0, 1, 4096, 2048);
    unpacking<IQ3_XXS>("iq3_xxs", unpack_iq3_xxs, 16, 768, 2048);
    unpacking<Q4_K>("q4_k", unpack_q4_k, 16, 768, 2048);
    unpacking<Q5_K>("q5_k", unpack_q5_k, 1, 8192, 2048);
}
