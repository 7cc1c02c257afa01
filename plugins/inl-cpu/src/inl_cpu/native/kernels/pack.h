/* Packing of source weights into tiles, and unpacking of rows for the embedding. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/codes.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "runtime/quant.h"
#include "simd/simd.h"

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

/* Write the codes of a lane of a run to a plane: bits shift .. of each code. */
void pack_plane(const uint8_t *codes, int bits, int shift, char *plane, int lane) {
    const int steps = 8 / bits; /* of a register */
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
    for (int first = 0; first < RUN / 4; first += steps, plane += 64) {
        uint32_t packed = 0;
        for (int step = 0; step < steps; step++) {
            uint32_t four;
            std::memcpy(&four, codes + 4 * (first + step), 4);
            packed |= (four >> shift & mask) << step * bits;
        }
        std::memcpy(plane + 4 * lane, &packed, 4);
    }
}

/* Write the scales of 6 bits of a lane. scales: minus 32, as bytes. */
void pack_sixes(const uint8_t *scales, char *lane) {
    for (int at = 0; at < 8; at++)
        lane[at * INL_LANES] =
            char(((scales[at] + 32) & 15) | ((scales[at + 8] + 32) & 15) << 4);
    for (int at = 0; at < 4; at++) {
        int high = 0;
        for (int part = 0; part < 4; part++)
            high |= ((scales[at + 4 * part] + 32) >> 4 & 3) << 2 * part;
        lane[SIX_LOW + at * INL_LANES] = char(high);
    }
}

void pack_block(const inl_matrix &m, const BlockShape &shape, const Decoded &d,
                char *block, int lane) {
    const CodeBits bits = code_bits(m.format);
    const int groups = int(RUN / m.group);
    if (shape.halves) std::memcpy(block + 2 * lane, &d.scale, 2);
    if (m.offsets) std::memcpy(block + 2 * (INL_LANES + lane), &d.offset, 2);
    if (m.scale == INL_SCALE_SIX) pack_sixes(d.scales, block + shape.halves + lane);
    char *run = block + shape.head;
    for (int at = 0; at < shape.columns / RUN; at++, run += shape.run) {
        const uint8_t *codes = d.codes + at * RUN;
        pack_plane(codes, bits.low, 0, run, lane);
        char *second = run + 64 * bits.low;
        if (bits.high) pack_plane(codes, bits.high, bits.low, second, lane);
        char *scales = run + shape.codes + lane, *offsets = scales + shape.scales;
        for (int group = 0; group < groups; group++) {
            if (shape.scales)
                scales[INL_LANES * group] = char(d.scales[at * groups + group]);
            if (shape.offsets)
                offsets[INL_LANES * group] = char(d.offsets[at * groups + group]);
        }
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
    const BlockShape shape(m);
    for (int64_t at = 0; at < m.columns; at += kind.block, source += kind.bytes) {
        Decoded decoded;
        decoded.codebook = reinterpret_cast<const uint8_t *>(op.codebook());
        kind.decode(source, decoded);
        pack_block(m, shape, decoded, tile, lane);
        tile += shape.bytes;
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

/* The code of a column of a run. */
int code_at(const inl_matrix &m, const char *run, int column, int lane) {
    int code = 0, shift = 0;
    const CodeBits planes = code_bits(m.format);
    for (int plane = 0; plane < 2; plane++) {
        const int bits = plane ? planes.high : planes.low;
        if (bits == 0) break;
        const int step = column / 4, steps = 8 / bits;
        const uint8_t byte = uint8_t(run[step / steps * 64 + 4 * lane + column % 4]);
        code |= (byte >> step % steps * bits & ((1 << bits) - 1)) << shift;
        run += 64 * bits;
        shift += bits;
    }
    return has_table(m) ? table_of(m)[code] : code;
}

/* Rounds as the reference decoder does: one product, then one sum. */
void unpack_quantized(const inl_matrix &m, const char *tile, int lane, float *y) {
    const int group_size = int(m.group);
    for_each_run(m, tile, [&](const char *run, const BlockScales<> &s) {
        float scales[16], offsets[16];
        for (int at = 0; at < RUN; at++, y++) {
            if (at % group_size == 0) {
                store(scales, s.scale_of(run, at / group_size));
                store(offsets, s.offset_of(run, at / group_size));
            }
            const int code = code_at(m, run, at, lane) - m.zero;
            const float product = scales[lane] * float(code);
            *y = m.offsets ? product + offsets[lane] : product;
        }
    });
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
