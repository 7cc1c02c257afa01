/* Sizes of an attention instruction, and preparation of the heads of q and k. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cache.h"
#include "kernels/norm_rope.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"

namespace inl {
namespace {

struct Attention {
    args::Attention op;
    int64_t heads, kv_heads, width, rows, table_width, window, group;
    CacheShape shape;

    explicit Attention(args::Attention op)
        : op(op), heads(op.heads()), kv_heads(op.kv_heads()), width(op.head_width()),
          rows(op.rows()), table_width(op.table_width()), window(op.window()),
          group(heads / kv_heads),
          shape{op.block_size(), kv_heads, width, cache_kind(op.flags()),
                op.scales()} {}

    /* Factors of the scores of loaded keys, and of sums of loaded values. */
    float score_factor() const {
        return op.scale() * (shape.kind == FLOAT8 ? shape.k_scale() / FLOAT8_FACTOR : 1);
    }
    float value_factor() const {
        return shape.kind == FLOAT8 ? shape.v_scale() / FLOAT8_FACTOR : 1;
    }

    int64_t position(int64_t token) const { return op.positions()[token]; }
    int64_t row_of(int64_t token) const { return op.token_rows()[token]; }
    /* Index of the tile of a key among those of its row. */
    int64_t tile_of(int64_t key) const {
        const uint32_t at = uint32_t(key), size = uint32_t(shape.block_size);
        return at / size * shape.tiles() + at % size / INL_LANES;
    }
    /* First key that a token attends to. */
    int64_t first_key(int64_t token) const {
        if (op.first_keys() != nullptr) return op.first_keys()[token];
        const int64_t at = position(token);
        return window && at >= window ? at - window + 1 : 0;
    }
    bool is_padding(int64_t token) const {
        return token >= op.starts()[rows] || op.lengths()[row_of(token)] == 0;
    }
    const float *query(int64_t token, int64_t head) const {
        return op.q() + token * op.q_stride() + head * width;
    }
    float *out(int64_t token, int64_t head) const {
        return op.y() + (token * heads + head) * width;
    }
};

/* Normalize (if norm is not NULL) and rotate (if cos is not NULL) a head of q or k. */
void prepare_head(const Attention &a, const float *x, const float *norm, int64_t token,
                  float *y) {
    if (norm != nullptr)
        normalize(x, norm, y, a.width, a.op.eps(), a.op.flags() & INL_PLUS_ONE);
    else
        std::memcpy(y, x, size_t(a.width) * 4);
    const int64_t at = token * (a.width / 2);
    if (a.op.cos() != nullptr) rotate(y, a.op.cos() + at, a.op.sin() + at, y, a.width);
}

/* Write the key and value of a token and head to the cache. key is a buffer. */
void cache_token(const Attention &a, int64_t token, int64_t head, float *key) {
    const int64_t at = token * a.op.kv_stride() + head * a.width;
    prepare_head(a, a.op.k() + at, a.op.k_norm(), token, key);
    put_position(a.shape, a.op.k_cache(), a.op.v_cache(), a.op.writes()[token], head,
                 key, a.op.v() + at);
}

/* Tokens whose keys and values one chunk writes. */
constexpr int64_t CACHED_TOKENS = 8;

int64_t cache_tokens_chunks(args::Attention op) {
    const bool none = op.k() == nullptr || op.flags() & INL_ONE_TOKEN_ROWS;
    return none ? 0 : ceil_div(op.tokens(), CACHED_TOKENS);
}

void cache_tokens_body(args::Attention op, int64_t chunk, Worker &worker) {
    const Attention a(op);
    float *key = reinterpret_cast<float *>(worker.own);
    const Span tokens(chunk, CACHED_TOKENS, op.tokens());
    for (int64_t token = tokens.from; token < tokens.to; token++)
        for (int64_t head = 0; head < a.kv_heads; head++)
            cache_token(a, token, head, key);
}

} // namespace
} // namespace inl
