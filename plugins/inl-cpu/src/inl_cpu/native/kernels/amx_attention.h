/* Attention of many tokens in AMX tiles: products of 16 queries and 16 keys.
 *
 * A cache tile of keys has the layout of a weight tile; a tile of values, with eight
 * pairs, is half of one. Everything else is as in kernels/attention.h.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "kernels/amx_linear.h"
#include "kernels/attention.h"
#include "kernels/weights.h"
#include "runtime/instructions.h"
#include "runtime/operation.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t TOKEN_BLOCK = 16;

bool uses_amx(args::Attention op) {
    return op.flags() & INL_BATCH_VARIANT && op.flags() & INL_KV_BF16 &&
           op.tokens() >= MIN_AMX_ROWS && op.head_width() % 64 == 0;
}

/* Tiles 0 to 3 are sums, 4 weights of 16 keys, 5 their values, 6 queries, 7 keys. */
struct AttentionTileConfig : TileConfig {
    AttentionTileConfig() {
        row_bytes[4] = 32;
        rows[5] = 8;
    }
};

/* The cache tile that contains a key; cache is that of k or of v. */
inline const char *cache_tile(const Attention &a, const char *cache, const Queries &q,
                              int64_t head, int64_t key) {
    const int64_t block =
        a.op.blocks()[q.row * a.table_width + key / a.shape.block_size];
    return cache + a.shape.tile_offset(block, head, key % a.shape.block_size);
}

/* First key of the next tile; the last tile of a block may be partial. */
inline int64_t tile_end(const Attention &a, int64_t key) {
    const int64_t offset = key % a.shape.block_size, block = key - offset;
    const int64_t next = (offset / INL_LANES + 1) * INL_LANES;
    return block + (next < a.shape.block_size ? next : a.shape.block_size);
}

inline int64_t tile_start(const Attention &a, int64_t key) {
    const int64_t offset = key % a.shape.block_size;
    return key - offset % INL_LANES;
}

/* The longest context, in keys. */
inline int64_t max_keys(const Attention &a) {
    return a.table_width * a.shape.tiles() * INL_LANES;
}

/* Scratch of a thread for 16 queries. */
struct AmxScratch {
    float *query;     /* [padded width], rotated */
    uint32_t *words;  /* [queries][width / 2] pairs of bfloat16 */
    float *scores;    /* [queries][max_keys] */
    uint16_t *narrow; /* [queries][max_keys] weights in bfloat16 */

    AmxScratch(const Attention &a, char *own) {
        query = reinterpret_cast<float *>(own);
        words = reinterpret_cast<uint32_t *>(query + a.shape.padded());
        scores = reinterpret_cast<float *>(words + 16 * (a.width / 2));
        narrow = reinterpret_cast<uint16_t *>(scores + 16 * max_keys(a));
    }
    static int64_t bytes(const Attention &a) {
        return aligned(4 * (a.shape.padded() + 8 * a.width) + 6 * 16 * max_keys(a));
    }
};

/* Encode queries as rows of pairs, padded with zero rows. */
void tile_words(const Attention &a, const Queries &q, const AmxScratch &s) {
    const int64_t pairs = a.width / 2;
    std::memset(s.words, 0, size_t(16 * pairs) * 4);
    for (int r = 0; r < q.count; r++) {
        prepare_head(a, a.query(q.token[r], q.head[r]), a.op.q_norm(), q.token[r],
                     s.query);
        query_pairs(a, s.query, s.words + r * pairs, 1);
    }
}

/* Dot products of 16 queries and the keys of one tile. */
inline void score_keys(const uint32_t *words, int64_t width, const char *keys,
                       float *scores) {
    _tile_zero(0);
    for (int64_t step = 0; step < width / STEP_COLUMNS; step++) {
        _tile_loadd(6, words + step * 16, width * 2);
        _tile_loadd(7, keys + step * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, scores, 64);
}

void score_amx(const Attention &a, const Queries &q, int64_t head,
               const AmxScratch &s) {
    alignas(64) float scores[256];
    const F scale = set(a.op.scale());
    float *out = s.scores;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), out += 16) {
        const int keys = int(tile_end(a, key) - key);
        score_keys(s.words, a.width, cache_tile(a, a.op.k_cache(), q, head, key),
                   scores);
        for (int r = 0; r < q.count; r++) {
            const F value = capped(mul(load(scores + 16 * r), scale), a.op.cap());
            store(out + r * max_keys(a), masked(q, r, key, keys, value));
        }
    }
}

/* Copy 64 columns of a tile of values, with zeros for unwritten keys. */
void clean_values(const char *tile, int64_t padded, int keys, uint32_t *clean) {
    for (int pair = 0; pair < 8; pair++) {
        const int left = keys - 2 * pair;
        const I mask = set_int(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
        for (int d = 0; d < 4; d++) {
            const I value =
                bit_and(load_ints(tile + (pair * padded + 16 * d) * 4), mask);
            _mm512_storeu_si512(clean + pair * 64 + 16 * d, value);
        }
    }
}

/* Add weights [16][16] times 64 columns of values to tiles 0 to 3. */
inline void add_values(const uint16_t *weights, int64_t stride, const char *values,
                       int64_t value_bytes) {
    _tile_loadd(4, weights, stride * 2);
    _tile_loadd(5, values, value_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, values + 64, value_bytes);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(5, values + 128, value_bytes);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(5, values + 192, value_bytes);
    _tile_dpbf16ps(3, 4, 5);
}

/* Store 64 columns of y, divided by the totals. */
void store_values(const Attention &a, const Queries &q, const float *totals,
                  int64_t column) {
    alignas(64) float sums[4][256];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int r = 0; r < q.count; r++) {
        float *y = q.out(a, r);
        for (int d = 0; d < 4; d++)
            store(y + column + 16 * d,
                  quotient(load(sums[d] + 16 * r), set(totals[r])));
    }
}

void sum_values_amx(const Attention &a, const Queries &q, int64_t head,
                    const AmxScratch &s, const float *totals, int64_t column) {
    alignas(64) uint32_t clean[512];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t *weights = s.narrow;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), weights += 16) {
        const int64_t end = tile_end(a, key) < q.to ? tile_end(a, key) : q.to;
        const char *tile = cache_tile(a, a.op.v_cache(), q, head, key) + column * 4;
        int64_t bytes = a.shape.padded() * 4;
        if (end - key < 16) {
            clean_values(tile, a.shape.padded(), int(end - key), clean);
            tile = reinterpret_cast<const char *>(clean);
            bytes = 256;
        }
        add_values(weights, max_keys(a), tile, bytes);
    }
    store_values(a, q, totals, column);
}

/* Replace the scores of a query by weights; returns their total with that of the
 * sink. */
float exponentiate_all(const Attention &a, const Queries &q, int r, float *scores,
                       int64_t count) {
    float top, total;
    exponentiate<PAIRS>(scores, int(count), top, total);
    if (const float *sinks = a.op.sinks()) {
        const float sink = sinks[q.head[r]];
        const float both = sink > top ? sink : top;
        const F factor = exponential(set(top - both));
        for (int64_t at = 0; at < count; at += 16)
            store(scores + at, mul(load(scores + at), factor));
        return total * largest(factor) + std::exp(sink - both);
    }
    return total;
}

void attend_amx(const Attention &a, const Queries &q, int64_t head,
                const AmxScratch &s) {
    tile_words(a, q, s);
    score_amx(a, q, head, s);
    int64_t count = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key))
        count += 16;
    float totals[16];
    for (int r = 0; r < q.count; r++) {
        float *scores = s.scores + r * max_keys(a);
        totals[r] = exponentiate_all(a, q, r, scores, count);
        weights_to_bf16(scores, int(count), s.narrow + r * max_keys(a));
    }
    for (int64_t column = 0; column < a.width; column += 64)
        sum_values_amx(a, q, head, s, totals, column);
}

int64_t amx_attention_chunks(args::Attention op) {
    if (!uses_amx(op)) return without_tiles(INL_ATTENTION).second.chunks(*op.raw);
    return ceil_div(op.tokens(), TOKEN_BLOCK) * op.kv_heads();
}

void amx_attention_body(args::Attention op, int64_t chunk, Worker &worker) {
    if (!uses_amx(op))
        return without_tiles(INL_ATTENTION).second.body(*op.raw, chunk, worker);
    const Attention a(op);
    const AmxScratch scratch(a, worker.own);
    const int64_t blocks = ceil_div(op.tokens(), TOKEN_BLOCK),
                  head = chunk % a.kv_heads;
    const Span tokens(blocks - 1 - chunk / a.kv_heads, TOKEN_BLOCK, op.tokens());
    const AttentionTileConfig config;
    _tile_loadconfig(&config);
    zero_padding(a, tokens, head);
    each_queries(a, tokens, head, 16,
                 [&](const Queries &q) { attend_amx(a, q, head, scratch); });
    _tile_release();
}

Scratch amx_attention_scratch(args::Attention op) {
    if (!uses_amx(op)) return without_tiles(INL_ATTENTION).scratch(*op.raw);
    return {0, AmxScratch::bytes(Attention(op))};
}

int64_t amx_reduce_chunks(args::Attention op) {
    return uses_amx(op) ? 0 : without_tiles(INL_ATTENTION).third.chunks(*op.raw);
}

void amx_reduce_body(args::Attention op, int64_t chunk, Worker &worker) {
    without_tiles(INL_ATTENTION).third.body(*op.raw, chunk, worker);
}

} // namespace
} // namespace inl
