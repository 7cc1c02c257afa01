/* Groups of queries that attend together, encoded for the dot products with keys. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/heads.h"
#include "kernels/span.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* A few queries of one sequence, and the range of keys that any of them attends to. */
struct Queries {
    int limit, count = 0;
    int64_t row = 0, from = 0, to = 0; /* keys */
    int64_t token[16], head[16];
    int64_t first[16], end[16]; /* keys that each attends to */

    explicit Queries(int limit) : limit(limit) {}

    /* Add a query; false if the group is full or of another sequence. */
    bool join(const Attention &a, int64_t new_token, int64_t new_head) {
        const int64_t new_row = a.row_of(new_token), begin = a.first_key(new_token);
        if (count == limit || (count && row != new_row)) return false;
        row = new_row;
        token[count] = new_token;
        head[count] = new_head;
        first[count] = begin;
        end[count] = a.position(new_token) + 1;
        from = count && from < begin ? from : begin;
        to = count && to > end[count] ? to : end[count];
        count++;
        return true;
    }
    float *out(const Attention &a, int index) const {
        return a.out(token[index], head[index]);
    }
};

/* Call visit(Queries) for the queries of some tokens and one kv head, padding excepted,
 * in the largest possible groups of one sequence. */
template <class Visit>
void each_queries(const Attention &a, const Span &tokens, int64_t head, int limit,
                  Visit visit) {
    Queries q(limit);
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        if (a.is_padding(token)) continue;
        for (int64_t each = head * a.group; each < (head + 1) * a.group; each++) {
            if (q.join(a, token, each)) continue;
            visit(q);
            q.count = 0;
            q.join(a, token, each);
        }
    }
    if (q.count) visit(q);
}

/* Queries encoded as words that are broadcast to 16 keys: word w of query r is words[w
 * * R + r].
 *   FLOATS, FLOAT8: float32;
 *   PAIRS:  two bfloat16 if there is a dot product instruction for them, else float32;
 *   BYTES:  for each 4 numbers their upper bytes, then their lower bytes: 15 bits with
 *           one scale per query. */
struct QueryWords {
    uint32_t *words;
    float scale[ATTENTION_ROWS];
    int32_t upper[ATTENTION_ROWS], lower[ATTENTION_ROWS]; /* 128 times their sums */
};

/* The largest 15-bit code: 127 * 256 + 127, whose upper byte is at magnitude 127. */
constexpr float MAX_CODE = 32639.0f;

/* Upper bytes of integers, biased by a quarter so that lower bytes are -128 .. 127. */
inline I upper_bytes(F code) {
    return nearest(fma(code, set(1.0f / 256), set(0.25f / 256)));
}

inline I lower_bytes(F code, I upper) {
    return nearest(fma(to_float(upper), set(-256.0f), code));
}

/* The template size R for a number of queries; the group is padded with zeros. */
inline int padded_count(int count) { return count > 4 ? ceil_div(count, 2) * 2 : count; }

inline void query_pairs(const Attention &a, const float *query, uint32_t *words,
                        int rows) {
    for (int64_t from = 0; from < a.width; from += 16) {
        uint16_t narrow[16]; /* the head is padded to whole vectors */
        store_bf16(narrow, load(query + from));
        for (int at = 0; at < lanes_left(from, a.width); at += 2)
            std::memcpy(words + (from + at) / 2 * rows, narrow + at, 4);
    }
}

inline void query_bytes(const Attention &a, const float *query, QueryWords &x, int r,
                        int rows) {
    F most = set(0.0f), nan = set(0.0f); /* nan propagates NaN to the scale */
    for (int64_t from = 0; from < a.width; from += 16) {
        const int count = lanes_left(from, a.width);
        const F number = between(load(query + from), 0, count, set(0.0f));
        most = larger(magnitude(number), most);
        nan = fma(number, set(0.0f), nan);
    }
    const float top = largest(most);
    const float factor = top > 0 ? MAX_CODE / top : 0;
    x.scale[r] = top / MAX_CODE + sum(nan);
    int32_t uppers = 0, lowers = 0;
    for (int64_t from = 0; from < a.width; from += 16) {
        const int count = lanes_left(from, a.width);
        const F number = between(load(query + from), 0, count, set(0.0f));
        const F code = to_float(nearest(mul(number, set(factor))));
        const I upper = upper_bytes(code), lower = lower_bytes(code, upper);
        int8_t planes[2][16];
        store_bytes(planes[0], upper);
        store_bytes(planes[1], lower);
        uppers += int32_t(sum(to_float(upper)));
        lowers += int32_t(sum(to_float(lower)));
        for (int at = 0; at < count; at += 4)
            for (int plane = 0; plane < 2; plane++)
                std::memcpy(x.words + ((from + at) / 2 + plane) * rows + r,
                            planes[plane] + at, 4);
    }
    x.upper[r] = 128 * uppers;
    x.lower[r] = 128 * lowers;
}

/* Normalize, rotate and encode queries; query is a buffer for one head. */
void query_words(const Attention &a, const Queries &q, float *query, QueryWords &x) {
    const int rows = padded_count(q.count);
    for (int r = 0; r < rows; r++) {
        if (r < q.count)
            prepare_head(a, a.query(q.token[r], q.head[r]), a.op.q_norm(), q.token[r],
                         query);
        else
            std::memset(query, 0, size_t(a.width) * 4);
        if (a.shape.kind == BYTES)
            query_bytes(a, query, x, r, rows);
        else if (a.shape.kind == PAIRS && HAS_PAIR_DOT)
            query_pairs(a, query, x.words + r, rows);
        else
            for (int64_t at = 0; at < a.width; at++)
                std::memcpy(x.words + at * rows + r, query + at, 4);
    }
}

} // namespace
} // namespace inl
