/* Runs the same instructions with the scalar and the NEON kernels and compares.
 *
 * The Python tests compare the scalar kernels with float64; this program avoids a Python
 * for the other architecture. Prints a line for each case; exits with 1 if a case differs
 * by more than its bound.
 */

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "runtime/instructions.h"

namespace {

using Floats = std::vector<float>;

uint64_t state = 88172645463325252ull;

uint32_t random_bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return uint32_t(state >> 16);
}

Floats random_floats(size_t count) {
    Floats x(count);
    for (float &one : x) one = float(int32_t(random_bits())) / 2147483648.0f;
    return x;
}

inl_pool *pools[2];
bool failed = false;

void run(int which, inl_instruction one) {
    if (inl_run(pools[which], &one, 1) == 0) return;
    std::printf("refused: %s\n", inl_refusal(pools[which]));
    std::exit(1);
}

void compare(const char *name, const Floats &scalar, const Floats &neon, float bound) {
    float worst = 0, size = 0;
    for (size_t at = 0; at < scalar.size(); at++) {
        const float off = std::fabs(scalar[at] - neon[at]);
        worst = off > worst || off != off ? off : worst;
        size = std::fmax(size, std::fabs(scalar[at]));
    }
    const bool right = worst <= bound * size && size > 0;
    failed |= !right;
    std::printf("%-24s %s %.2g of %.3g\n", name, right ? "ok" : "WRONG", worst, size);
}

struct Packed {
    inl_matrix matrix{};
    char *memory;

    Packed(int kind, int64_t rows, int64_t columns) {
        inl_packing(kind, &matrix);
        matrix.rows = rows;
        matrix.columns = columns;
        const int64_t size = inl_matrix_bytes(&matrix);
        memory =
            static_cast<char *>(std::aligned_alloc(64, size_t(size + 63) / 64 * 64));
        for (int64_t at = 0; at < size; at++) memory[at] = 0;
        matrix.data = memory;
        std::vector<uint8_t> source(size_t(rows * inl_source_bytes(kind, columns)));
        /* Bytes below 64 give small, finite scales. */
        for (uint8_t &byte : source) byte = random_bits() % 64;
        if (kind == INL_KIND_F32) {
            const Floats plain = random_floats(size_t(rows * columns));
            for (size_t at = 0; at < source.size(); at++)
                source[at] = reinterpret_cast<const uint8_t *>(plain.data())[at];
        }
        std::vector<uint8_t> codebook(2048 * 8);
        for (uint8_t &code : codebook) code = random_bits() % 3;
        run(0, {INL_PACK,
                0,
                {rows, columns, 0, kind},
                {source.data(), &matrix, codebook.data()},
                {}});
    }
    ~Packed() { std::free(memory); }
};

void linear(const char *name, int kind, int mode, float bound) {
    const int64_t rows = 7, columns = 512, outputs = 37;
    Packed packed(kind, outputs, columns);
    Floats x = random_floats(rows * columns), y[2];
    for (int which = 0; which < 2; which++) {
        y[which].resize(rows * outputs);
        run(which, {INL_LINEAR,
                    mode,
                    {rows, columns, outputs},
                    {x.data(), &packed.matrix, nullptr, y[which].data()},
                    {}});
    }
    compare(name, y[0], y[1], bound);
}

void attention(const char *name, int flags, float bound) {
    const int64_t tokens = 21, heads = 6, kv_heads = 2, width = 40, size = 16;
    Floats q = random_floats(tokens * heads * width), y[2];
    Floats k = random_floats(tokens * kv_heads * width), v = random_floats(k.size());
    std::vector<int32_t> positions(tokens), rows(tokens), writes(tokens);
    std::vector<int32_t> starts = {0, int32_t(tokens)}, lengths = {int32_t(tokens)};
    std::vector<int32_t> blocks = {2, 1};
    for (int32_t at = 0; at < tokens; at++) {
        positions[at] = at;
        writes[at] = blocks[at / size] * int32_t(size) + at % int32_t(size);
    }
    const int64_t bytes = inl_cache_bytes(3, size, kv_heads, width, flags);
    for (int which = 0; which < 2; which++) {
        std::vector<char> k_cache(bytes, -1), v_cache(bytes, -1);
        y[which].resize(q.size());
        run(which, {INL_ATTENTION,
                    flags,
                    {tokens, heads, kv_heads, width, size, 1, 2, 9, heads * width,
                     kv_heads * width},
                    {q.data(), k.data(), v.data(), k_cache.data(), v_cache.data(),
                     y[which].data(), positions.data(), rows.data(), starts.data(),
                     lengths.data(), blocks.data(), writes.data()},
                    {0.2f, 3.0f}});
    }
    compare(name, y[0], y[1], bound);
}

void rows_of(const char *name, int opcode, int flags, std::vector<int64_t> dims) {
    const size_t count = 5 * 333;
    Floats a = random_floats(count), b = random_floats(count), y[2];
    for (int which = 0; which < 2; which++) {
        y[which].resize(count);
        inl_instruction one = {
            opcode, flags, {}, {a.data(), b.data(), y[which].data()}, {1e-5f}};
        for (size_t at = 0; at < dims.size(); at++) one.dims[at] = dims[at];
        run(which, one);
    }
    compare(name, y[0], y[1], 1e-6f);
}

} // namespace

int main() {
    pools[0] = inl_open(2, INL_SCALAR);
    pools[1] = inl_open(2, INL_NEON);
    if (pools[1] == nullptr) return std::puts("no NEON with dot products"), 1;
    rows_of("rms_norm", INL_RMS_NORM, 0, {5, 1, 333, 333, 333});
    rows_of("silu", INL_GATED, INL_GATE_SILU, {5, 333, 333, 333, 333});
    rows_of("gelu_tanh", INL_GATED, INL_GATE_GELU, {5, 333, 333, 333, 333});
    linear("float32", INL_KIND_F32, INL_X_EXACT, 1e-5f);
    linear("bfloat16", INL_KIND_BF16, INL_X_BF16, 1e-5f);
    linear("q4_1 exact", INL_KIND_Q4_1, INL_X_EXACT, 1e-5f);
    linear("q4_1 int8", INL_KIND_Q4_1, INL_X_INT8, 1e-5f);
    linear("q4_k int16", INL_KIND_Q4_K, INL_X_INT16, 1e-5f);
    linear("q8_0 exact", INL_KIND_Q8_0, INL_X_EXACT, 1e-5f);
    linear("q8_0 int8", INL_KIND_Q8_0, INL_X_INT8, 1e-5f);
    linear("q3_k int8", INL_KIND_Q3_K, INL_X_INT8, 1e-5f);
    linear("tq2_0 int16", INL_KIND_TQ2_0, INL_X_INT16, 1e-5f);
    linear("iq2_xxs int8", INL_KIND_IQ2_XXS, INL_X_INT8, 1e-5f);
    linear("iq2_s exact", INL_KIND_IQ2_S, INL_X_EXACT, 1e-5f);
    linear("iq3_s int8", INL_KIND_IQ3_S, INL_X_INT8, 1e-5f);
    linear("q6_k int16", INL_KIND_Q6_K, INL_X_INT16, 1e-5f);
    attention("attention", 0, 1e-5f);
    attention("attention, bfloat16", INL_KV_BF16, 1e-2f);
    attention("attention, float8", INL_KV_FLOAT8, 1e-5f);
    inl_close(pools[0]);
    inl_close(pools[1]);
    return failed;
}
