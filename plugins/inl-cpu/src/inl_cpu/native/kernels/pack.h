/* Packing of source weights into tiles, and unpacking of rows for the embedding. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/span.h"
#include "kernels/tiles.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "runtime/quant.h"

namespace inl {
namespace {

/* Rows of a chunk. */
constexpr int64_t PACK_ROWS = 16;

int64_t pack_chunks(args::Pack op) { return ceil_div(op.rows(), PACK_ROWS); }

inline float plain_number(const uint8_t *row, int64_t kind, int64_t at) {
    uint16_t half;
    if (kind != INL_KIND_F32) std::memcpy(&half, row + 2 * at, 2);
    if (kind == INL_KIND_F16) return half_to_float(half);
    if (kind == INL_KIND_BF16) return bf16_to_float(half);
    float number;
    std::memcpy(&number, row + 4 * at, 4);
    return number;
}

void pack_plain(const inl_matrix &m, const uint8_t *row, int64_t kind, char *tile,
                int lane) {
    for (int64_t at = 0; at < m.columns; at++) {
        const float x = plain_number(row, kind, at);
        if (m.format == INL_F32)
            reinterpret_cast<float *>(tile)[at * INL_LANES + lane] = x;
        else
            reinterpret_cast<uint16_t *>(
                tile)[(at / 2 * INL_LANES + lane) * 2 + at % 2] = float_to_bf16(x);
    }
}

/* float16 scales are copied from the source; blocks of every such kind begin with
 * them. */
void pack_scales(const inl_matrix &m, const uint8_t *block, const Decoded &d, int group,
                 char *scales, int lane) {
    if (m.scale == INL_F16) {
        std::memcpy(scales + 2 * lane, block, 2);
        if (m.offsets) std::memcpy(scales + 32 + 2 * lane, block + 2, 2);
        return;
    }
    std::memcpy(scales + 4 * lane, &d.scales[group], 4);
    if (m.offsets) std::memcpy(scales + 64 + 4 * lane, &d.offsets[group], 4);
}

void pack_block(const inl_matrix &m, const uint8_t *block, const Decoded &d, int groups,
                char *out, int lane) {
    for (int group = 0; group < groups; group++, out += group_bytes(m)) {
        for (int64_t at = 0; at < m.group; at++) {
            int shift;
            char &byte = out[code_offset(m, lane, at, shift)];
            const int code = d.codes[group * m.group + at];
            byte = m.format == INL_U8 ? char(code) : char(byte | code << shift);
        }
        pack_scales(m, block, d, group, out + code_bytes(m), lane);
    }
}

void pack_row(args::Pack op, int64_t row, int64_t target) {
    const inl_matrix &m = op.matrix();
    const Kind &kind = *kind_of(op.kind());
    const uint8_t *source = reinterpret_cast<const uint8_t *>(op.source()) +
                            row * (m.columns / kind.block) * kind.bytes;
    char *tile = static_cast<char *>(m.data) + target / INL_LANES * tile_bytes(m);
    const int lane = int(target % INL_LANES);
    if (kind.decode == nullptr) return pack_plain(m, source, op.kind(), tile, lane);
    const int groups = kind.block / int(m.group);
    for (int64_t at = 0; at < m.columns; at += kind.block, source += kind.bytes) {
        Decoded decoded;
        kind.decode(source, decoded);
        pack_block(m, source, decoded, groups, tile + at / m.group * group_bytes(m),
                   lane);
    }
}

void pack_body(args::Pack op, int64_t chunk, Worker &) {
    const Span rows(chunk, PACK_ROWS, op.rows());
    for (int64_t row = rows.from; row < rows.to; row++) {
        const int64_t interleaved = row / INL_LANES * 2 * INL_LANES + row % INL_LANES;
        pack_row(op, row,
                 op.first() + (op.flags() & INL_INTERLEAVE ? interleaved : row));
    }
}

inline float scale_of(const inl_matrix &m, const char *scales, int lane) {
    if (m.scale == INL_F32) return reinterpret_cast<const float *>(scales)[lane];
    return half_to_float(reinterpret_cast<const uint16_t *>(scales)[lane]);
}

/* Rounds as the reference decoder does: one product, then one sum. */
void unpack_quantized(const inl_matrix &m, const char *tile, int lane, float *y) {
    for (int64_t group = 0; group < groups_of(m); group++, tile += group_bytes(m)) {
        const char *scales = tile + code_bytes(m);
        const float scale = scale_of(m, scales, lane);
        const float offset = m.offsets ? scale_of(m, offset_at(m, scales), lane) : 0.0f;
        for (int64_t at = 0; at < m.group; at++) {
            int shift;
            const int byte = uint8_t(tile[code_offset(m, lane, at, shift)]);
            const int code = m.format == INL_U8 ? byte : byte >> shift & 15;
            const float product = scale * float(code - m.zero);
            y[group * m.group + at] = m.offsets ? product + offset : product;
        }
    }
}

void unpack_row(const inl_matrix &m, int64_t row, float *y) {
    const char *tile =
        static_cast<const char *>(m.data) + row / INL_LANES * tile_bytes(m);
    const int lane = int(row % INL_LANES);
    if (is_quantized(m)) return unpack_quantized(m, tile, lane, y);
    for (int64_t at = 0; at < m.columns; at++)
        y[at] = m.format == INL_F32
                    ? reinterpret_cast<const float *>(tile)[at * INL_LANES + lane]
                    : bf16_to_float(reinterpret_cast<const uint16_t *>(
                          tile)[(at / 2 * INL_LANES + lane) * 2 + at % 2]);
}

int64_t embedding_chunks(args::Embedding op) { return op.tokens(); }

void embedding_body(args::Embedding op, int64_t token, Worker &) {
    const inl_matrix &m = op.matrix();
    const int64_t row = op.ids()[token];
    float *y = op.y() + token * op.y_stride();
    if (row < 0 || row >= m.rows) {
        std::memset(y, 0, size_t(m.columns) * 4);
        return;
    }
    unpack_row(m, row, y);
    if (op.factor() == 1.0f) return;
    for (int64_t at = 0; at < m.columns; at++) y[at] *= op.factor();
}

} // namespace
} // namespace inl
