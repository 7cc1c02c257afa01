/* Products of many rows in AMX tile registers, in bfloat16.
 *
 * Weights are decoded to bfloat16 once for TILE_BLOCK rows of x: 16 rows of 32 columns
 * fill one tile register, in the layout of INL_BF16. Two tiles of weights are
 * multiplied with two tiles of x.
 */
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "kernels/codes.h"
#include "kernels/linear.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/operation.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t MIN_AMX_ROWS = 32; /* fewer rows do not amortize the decoding */
constexpr int64_t STEP_COLUMNS = 32;
constexpr int64_t TILE_BLOCK = 512; /* rows of x in a chunk */
constexpr int64_t TILE_BYTES = 1024;

bool uses_amx(args::Linear op) {
    return op.flags() & INL_BATCH_VARIANT && op.rows() >= MIN_AMX_ROWS &&
           (op.flags() & INL_X_MASK) != INL_X_EXACT && op.matrix().format != INL_F32;
}

/* How AVX-512 computes what takes no tiles: compiled once for both. */
inline const Operation &without_tiles(int32_t opcode) {
    return avx512_operations()[opcode];
}

int64_t tile_steps(const inl_matrix &m) { return ceil_div(m.columns, STEP_COLUMNS); }

int64_t tile_row_bytes(const inl_matrix &m) { return tile_steps(m) * STEP_COLUMNS * 2; }

/* Tile configuration of 16 rows of 64 bytes. */
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileConfig() {
        for (int tile = 0; tile < 8; tile++) {
            row_bytes[tile] = 64;
            rows[tile] = 16;
        }
    }
};

/* Store two columns as 16 pairs of bfloat16. */
inline void store_pair(F even, F odd, char *out) {
    /* The conversion puts all even numbers before all odd ones. */
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, pairs));
}

/* Decode the groups of a quantized tile to pairs of bfloat16, 64 bytes per pair of
 * columns. */
template <class C>
char *decode_groups(const C &coded, const inl_matrix &m, const char *tile, char *out) {
    const Codes numbers(m.zero);
    for_each_run(m, tile, [&](const char *run, const BlockScales<> &s) {
        for (int64_t at = 0; at < RUN; at += C::WORD) {
            const F scale = s.scale_of(run, int(at / m.group));
            const F offset = s.offset_of(run, int(at / m.group));
            const I word = coded.word(run, int(at));
            for (int k = 0; k < C::WORD; k += 2, out += 64)
                store_pair(fma(C::number(numbers, word, k), scale, offset),
                           fma(C::number(numbers, word, k + 1), scale, offset), out);
        }
    });
    return out;
}

char *decode_quantized(const inl_matrix &m, const char *tile, char *out) {
    with_codes(m, [&](const auto &coded) { out = decode_groups(coded, m, tile, out); });
    return out;
}

/* Decode a tile of weights to steps of TILE_BYTES, padded with zero columns. */
void decode_tile(const inl_matrix &m, const char *tile, char *out) {
    const int64_t bytes = tile_steps(m) * TILE_BYTES;
    if (m.format == INL_BF16) {
        std::memcpy(out, tile, size_t(tile_bytes(m)));
        std::memset(out + tile_bytes(m), 0, size_t(bytes - tile_bytes(m)));
        return;
    }
    char *end = decode_quantized(m, tile, out);
    std::memset(end, 0, size_t(out + bytes - end));
}

/* Convert a row to bfloat16, padded with zeros. */
void encode_wide(const float *x, int64_t columns, char *out, int64_t bytes) {
    for (int64_t at = 0; at < bytes / 2; at += 16) {
        const int n = at < columns ? lanes_left(at, columns) : 0;
        const __m256i narrow =
            (__m256i)_mm512_cvtneps_pbh(load_first(x + (n ? at : 0), n));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + 2 * at), narrow);
    }
}

int64_t padded_rows(args::Linear op) { return ceil_div(op.rows(), 32) * 32; }

int64_t amx_encode_chunks(args::Linear op) {
    if (!uses_amx(op)) return without_tiles(INL_LINEAR).first.chunks(*op.raw);
    return padded_rows(op) / 16;
}

void amx_encode_body(args::Linear op, int64_t chunk, Worker &worker) {
    if (!uses_amx(op))
        return without_tiles(INL_LINEAR).first.body(*op.raw, chunk, worker);
    const inl_matrix &m = op.matrix();
    const int64_t bytes = tile_row_bytes(m);
    for (int64_t at = chunk * 16; at < chunk * 16 + 16; at++) {
        char *out = worker.shared + at * bytes;
        if (at >= op.rows()) {
            std::memset(out, 0, size_t(bytes));
            continue;
        }
        float *row = reinterpret_cast<float *>(worker.own);
        encode_wide(prepare_row(op, at, row, true), m.columns, out, bytes);
    }
}

int64_t amx_linear_chunks(args::Linear op) {
    if (!uses_amx(op)) return without_tiles(INL_LINEAR).second.chunks(*op.raw);
    return pairs_of(op) * ceil_div(op.rows(), TILE_BLOCK);
}

/* Multiply 32 rows of x with a pair of decoded tiles: four tiles of sums [16][16]. */
void multiply_tiles(const char *x, int64_t x_bytes, const char *weights, int64_t steps,
                    float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char *second = weights + steps * TILE_BYTES;
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(4, x + 64 * step, x_bytes);
        _tile_loadd(6, weights + TILE_BYTES * step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second + TILE_BYTES * step, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 16 * x_bytes + 64 * step, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* Store the sums of 16 rows and a pair of tiles to y. */
void store_tile_pair(args::Linear op, int64_t pair, int64_t row, const float *sums) {
    const int64_t left = op.rows() - row;
    if (left <= 0) return;
    const RowTile rows{row, left < 16 ? int(left) : 16};
    F first[16], second[16];
    for (int r = 0; r < 16; r++) {
        first[r] = load(sums + 16 * r);
        second[r] = load(sums + 256 + 16 * r);
    }
    store_pair(op, pair, rows, first, second);
}

void amx_linear_body(args::Linear op, int64_t chunk, Worker &worker) {
    if (!uses_amx(op))
        return without_tiles(INL_LINEAR).second.body(*op.raw, chunk, worker);
    const inl_matrix &m = op.matrix();
    const int64_t pair = chunk % pairs_of(op), steps = tile_steps(m);
    const int64_t x_bytes = tile_row_bytes(m);
    float *sums = reinterpret_cast<float *>(worker.own);
    char *weights = worker.own + 4 * TILE_BYTES;
    for (int64_t tile = 2 * pair; tile < 2 * pair + 2 && tile < tiles_of(m); tile++)
        decode_tile(m, static_cast<const char *>(m.data) + tile * tile_bytes(m),
                    weights + tile % 2 * steps * TILE_BYTES);
    const TileConfig config;
    _tile_loadconfig(&config);
    const Span rows(chunk / pairs_of(op), TILE_BLOCK, op.rows());
    for (int64_t row = rows.from; row < rows.to; row += 32) {
        multiply_tiles(worker.shared + row * x_bytes, x_bytes, weights, steps, sums);
        store_tile_pair(op, pair, row, sums);
        store_tile_pair(op, pair, row + 16, sums + 512);
    }
    _tile_release();
}

Scratch amx_linear_scratch(args::Linear op) {
    if (!uses_amx(op)) return without_tiles(INL_LINEAR).scratch(*op.raw);
    const inl_matrix &m = op.matrix();
    const int64_t weights = (4 + 2 * tile_steps(m)) * TILE_BYTES;
    const int64_t row = aligned(4 * m.columns);
    return {padded_rows(op) * tile_row_bytes(m), weights > row ? weights : row};
}

} // namespace
} // namespace inl
