/* Writes to and conversions of paged caches; runtime/matrix.h defines the layout. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"

namespace inl {
namespace {

/* Access to a cache tile: stores and loads the key and value of one lane. */
template <CacheKind KIND>
struct CacheTile;

template <>
struct CacheTile<FLOATS> {
    const int64_t padded;

    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        float *keys = reinterpret_cast<float *>(k_tile) + lane;
        for (int64_t at = 0; at < width; at++) keys[at * INL_LANES] = k[at];
        std::memcpy(reinterpret_cast<float *>(v_tile) + lane * padded, v,
                    size_t(width) * 4);
    }
    float key(const char *tile, int lane, int64_t at) const {
        return reinterpret_cast<const float *>(tile)[at * INL_LANES + lane];
    }
    float value(const char *tile, int lane, int64_t at) const {
        return reinterpret_cast<const float *>(tile)[lane * padded + at];
    }
};

template <>
struct CacheTile<PAIRS> {
    const int64_t padded;

    /* Converts 64 numbers at a time, so that the compiler vectorizes the loop. */
    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        uint16_t narrow[64];
        for (int64_t from = 0; from < width; from += 64) {
            const int64_t count = width - from < 64 ? width - from : 64;
            char *keys = k_tile + (from / 2 * INL_LANES + lane) * 4;
            for (int64_t at = 0; at < count; at++)
                narrow[at] = float_to_bf16(k[from + at]);
            for (int64_t at = 0; at < count; at += 2)
                std::memcpy(keys + at * INL_LANES * 2, narrow + at, 4);
            uint16_t *values =
                reinterpret_cast<uint16_t *>(v_tile) + value_offset(lane, from);
            for (int64_t at = 0; at < count; at++)
                narrow[at] = float_to_bf16(v[from + at]);
            for (int64_t at = 0; at < count; at++) values[2 * at] = narrow[at];
        }
    }
    int64_t value_offset(int lane, int64_t at) const {
        return (lane / 2 * padded + at) * 2 + lane % 2;
    }
    float key(const char *tile, int lane, int64_t at) const {
        return bf16_to_float(reinterpret_cast<const uint16_t *>(
            tile)[(at / 2 * INL_LANES + lane) * 2 + at % 2]);
    }
    float value(const char *tile, int lane, int64_t at) const {
        return bf16_to_float(
            reinterpret_cast<const uint16_t *>(tile)[value_offset(lane, at)]);
    }
};

template <>
struct CacheTile<BYTES> {
    const int64_t padded;

    float *scales(char *tile) const {
        return reinterpret_cast<float *>(tile + padded * INL_LANES);
    }
    int64_t key_offset(int lane, int64_t at) const {
        return (at / 4 * INL_LANES + lane) * 4 + at % 4;
    }
    int64_t value_offset(int lane, int64_t at) const {
        return (lane / 4 * padded + at) * 4 + lane % 4;
    }
    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        const float k_factor = set_scale(k, width, scales(k_tile) + lane);
        const float v_factor = set_scale(v, width, scales(v_tile) + lane);
        for (int64_t at = 0; at < width; at++) {
            k_tile[key_offset(lane, at)] = code(k[at] * k_factor);
            v_tile[value_offset(lane, at)] = code(v[at] * v_factor);
        }
    }
    /* Sets the scale and returns its inverse: the largest magnitude gets code 127. NaN
     * propagates to the scale. */
    static float set_scale(const float *x, int64_t width, float *scale) {
        float magnitude = 0, nan = 0;
        for (int64_t at = 0; at < width; at++) {
            magnitude = std::fabs(x[at]) > magnitude ? std::fabs(x[at]) : magnitude;
            nan += x[at] * 0;
        }
        *scale = magnitude / 127 + nan;
        return magnitude > 0 ? 127 / magnitude : 0;
    }
    static char code(float x) {
        const float bounded = x > -127 ? (x < 127 ? x : 127) : -127;
        return char(uint8_t(std::nearbyint(bounded) + 128));
    }
    float number(const char *tile, int64_t offset, int lane) const {
        const float *scale = scales(const_cast<char *>(tile)) + lane;
        return *scale * float(int(uint8_t(tile[offset])) - 128);
    }
    float key(const char *tile, int lane, int64_t at) const {
        return number(tile, key_offset(lane, at), lane);
    }
    float value(const char *tile, int lane, int64_t at) const {
        return number(tile, value_offset(lane, at), lane);
    }
};

template <>
struct CacheTile<FLOAT8> {
    const int64_t padded;
    const float k_scale, v_scale;

    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        for (int64_t at = 0; at < width; at++) {
            k_tile[at * INL_LANES + lane] = char(float_to_float8(k[at] / k_scale));
            v_tile[lane * padded + at] = char(float_to_float8(v[at] / v_scale));
        }
    }
    float key(const char *tile, int lane, int64_t at) const {
        return number(tile[at * INL_LANES + lane]) * k_scale;
    }
    float value(const char *tile, int lane, int64_t at) const {
        return number(tile[lane * padded + at]) * v_scale;
    }
    static float number(char code) {
        return float8_to_float(uint8_t(code)) / FLOAT8_FACTOR;
    }
};

template <CacheKind KIND>
CacheTile<KIND> cache_tile(const CacheShape &shape) {
    if constexpr (KIND == FLOAT8)
        return {shape.padded(), shape.k_scale(), shape.v_scale()};
    else
        return {shape.padded()};
}

/* Store the key and value of one head at a cache position. */
template <CacheKind KIND>
void put_position(const CacheShape &shape, char *k_cache, char *v_cache,
                  int64_t position, int64_t head, const float *k, const float *v) {
    const int64_t offset = position % shape.block_size;
    const int64_t place = shape.tile_offset(position / shape.block_size, head, offset);
    const CacheTile<KIND> tile = cache_tile<KIND>(shape);
    tile.put(k_cache + place, v_cache + place, int(offset % INL_LANES), shape.width, k,
             v);
}

inline void put_position(const CacheShape &shape, char *k_cache, char *v_cache,
                         int64_t position, int64_t head, const float *k,
                         const float *v) {
    switch (shape.kind) {
    case FLOATS:
        return put_position<FLOATS>(shape, k_cache, v_cache, position, head, k, v);
    case PAIRS:
        return put_position<PAIRS>(shape, k_cache, v_cache, position, head, k, v);
    case BYTES:
        return put_position<BYTES>(shape, k_cache, v_cache, position, head, k, v);
    case FLOAT8:
        return put_position<FLOAT8>(shape, k_cache, v_cache, position, head, k, v);
    }
}

void write_kv_body(args::WriteKv op, int64_t chunk, Worker &) {
    const CacheShape shape{op.block_size(), op.heads(), op.head_width(),
                           cache_kind(op.flags()), op.scales()};
    const Span rows = head_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < op.heads(); head++) {
            const int64_t at = row * op.kv_stride() + head * op.head_width();
            put_position(shape, op.k_cache(), op.v_cache(), op.writes()[row], head,
                         op.k() + at, op.v() + at);
        }
}

int64_t read_cache_chunks(args::ReadCache op) { return op.blocks(); }

template <CacheKind KIND>
void read_block(args::ReadCache op, int64_t block) {
    const CacheShape shape{op.block_size(), op.kv_heads(), op.head_width(), KIND,
                           op.scales()};
    const CacheTile<KIND> tile = cache_tile<KIND>(shape);
    for (int64_t at = 0; at < shape.block_size * shape.kv_heads; at++) {
        const int64_t offset = at / shape.kv_heads;
        const int64_t begin = shape.tile_offset(block, at % shape.kv_heads, offset);
        const int lane = int(offset % INL_LANES);
        const int64_t row =
            (block * shape.block_size * shape.kv_heads + at) * shape.width;
        for (int64_t d = 0; d < shape.width; d++) {
            op.k()[row + d] = tile.key(op.k_cache() + begin, lane, d);
            op.v()[row + d] = tile.value(op.v_cache() + begin, lane, d);
        }
    }
}

void read_cache_body(args::ReadCache op, int64_t block, Worker &) {
    switch (cache_kind(op.flags())) {
    case FLOATS: return read_block<FLOATS>(op, block);
    case PAIRS: return read_block<PAIRS>(op, block);
    case BYTES: return read_block<BYTES>(op, block);
    case FLOAT8: return read_block<FLOAT8>(op, block);
    }
}

} // namespace
} // namespace inl
