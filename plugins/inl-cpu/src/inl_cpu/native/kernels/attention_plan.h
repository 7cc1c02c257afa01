/* Division of attention into chunks, and the scratch memory that it needs. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/heads.h"
#include "kernels/queries.h"
#include "kernels/scores.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t FEW_TOKENS = 32;    /* up to here, a chunk may be one segment */
constexpr int64_t CHUNK_QUERIES = 24; /* queries of a chunk, with many tokens */
/* Segments of a chunk of few tokens, if there are enough chunks for many threads:
 * keys of all but the first are prefetched while others are computed with. */
constexpr int64_t MOST_SEGMENTS = 8, ENOUGH_CHUNKS = 32;

/* Chunks of an instruction. */
struct Plan {
    const Attention a;
    int64_t span, spans;      /* tokens of a chunk, and number of such spans */
    int64_t max_segments = 1; /* segments of a row, if chunks have only some of them */
    int64_t chunk_segments = 1;

    explicit Plan(args::Attention op) : a(op) {
        const int64_t queries = op.tokens() >= 64 ? CHUNK_QUERIES : ATTENTION_ROWS;
        span = ceil_div(queries, a.group);
        spans = ceil_div(op.tokens(), span);
        if (op.tokens() > FEW_TOKENS) return;
        int64_t all = 0;
        for (int64_t at = 0; at < spans; at++) {
            const Span range = segments(at);
            if (range.to > max_segments) max_segments = range.to;
            all += range.count() * a.kv_heads;
        }
        chunk_segments = all / ENOUGH_CHUNKS;
        if (chunk_segments < 1) chunk_segments = 1;
        if (chunk_segments > MOST_SEGMENTS) chunk_segments = MOST_SEGMENTS;
    }
    /* Chunks of a span and kv head. */
    int64_t chunks(int64_t at) const {
        return ceil_div(segments(at).count(), chunk_segments);
    }
    Span tokens(int64_t at) const { return Span(at, span, a.op.tokens()); }
    static int64_t segment_of(const Attention &a, int64_t key) {
        return a.tile_of(key) / SEGMENT_TILES;
    }
    /* Segments that any token of a span attends to; the first one if all are
     * padding. */
    Span segments(int64_t at) const {
        const Span chunk = tokens(at);
        Span range(0, 1, 1);
        bool any = false;
        for (int64_t token = chunk.from; token < chunk.to; token++) {
            if (a.is_padding(token)) continue;
            const int64_t first = segment_of(a, a.first_key(token));
            const int64_t end = segment_of(a, a.position(token)) + 1;
            range.from = any && range.from < first ? range.from : first;
            range.to = any && range.to > end ? range.to : end;
            any = true;
        }
        return range;
    }
    /* Groups of queries in a chunk, at most. */
    int64_t groups() const { return span * ceil_div(a.group, ATTENTION_ROWS); }
    /* Words of an encoded query, for any cache. */
    int64_t words() const { return a.shape.padded(); }
};

/* Softmax-weighted sum over the segments so far: mixed values [padded], the largest
 * score and the total of the weights, which is 0 before any visible key. */
struct PartialSoftmax {
    float *mixed;
    float top, total;

    void accumulate(const float *other, float other_top, float other_total,
                    int64_t padded) {
        if (other_total == 0) return;
        if (total == 0) {
            if (other != mixed) std::memcpy(mixed, other, size_t(padded) * 4);
            top = other_top, total = other_total;
            return;
        }
        const float both = other_top > top ? other_top : top;
        const F rescale = exponential(set(top - both));
        const F other_rescale = exponential(set(other_top - both));
        for (int64_t at = 0; at < padded; at += 16)
            store(mixed + at,
                  fma(load(other + at), other_rescale, mul(load(mixed + at), rescale)));
        total = total * largest(rescale) + other_total * largest(other_rescale);
        top = both;
    }
    /* Divide by the total, to which a sink adds its weight. */
    void finish(const Attention &a, int64_t head, float *y) const {
        F factor = set(1.0f);
        float sum = total;
        if (const float *sinks = a.op.sinks()) {
            const float both = sinks[head] > top ? sinks[head] : top;
            factor = exponential(set(top - both));
            sum = total * largest(factor) + std::exp(sinks[head] - both);
        }
        factor = mul(quotient(factor, set(sum)), set(a.value_factor()));
        for (int64_t at = 0; at < a.width; at += 16)
            store_first(y + at, mul(load(mixed + at), factor), lanes_left(at, a.width));
    }
};

/* Scratch of a thread. */
struct AttentionScratch {
    float *query, *mixed, *accumulated;
    uint32_t *words;
    Queries *queries;
    QueryWords *encoded;
    PartialSoftmax *states;
    Weights weights;

    AttentionScratch(const Plan &p, char *own) {
        const int64_t padded = p.a.shape.padded(), rows = p.groups() * ATTENTION_ROWS;
        char *free = own;
        take(free, query, padded);
        take(free, mixed, padded * ATTENTION_ROWS);
        take(free, accumulated, padded * rows);
        take(free, words, p.words() * rows);
        take(free, weights.scores, SEGMENT_KEYS * ATTENTION_ROWS);
        take(free, weights.narrow, SEGMENT_KEYS * ATTENTION_ROWS);
        take(free, queries, p.groups());
        take(free, encoded, p.groups());
        take(free, states, rows);
        bytes = free - own;
    }
    int64_t bytes;

  private:
    template <class T>
    static void take(char *&free, T *&part, int64_t count) {
        part = reinterpret_cast<T *>(free);
        free += aligned(count * int64_t(sizeof(T)));
    }
};

/* Result of one segment for one query, passed between two phases. */
struct SegmentResult {
    float *top, *total, *mixed;

    SegmentResult(const Plan &p, char *shared, int64_t token, int64_t head,
                  int64_t segment) {
        const int64_t index = (token * p.a.heads + head) * p.max_segments + segment;
        top = reinterpret_cast<float *>(shared) + index * floats(p);
        total = top + 1;
        mixed = top + 16;
    }
    static int64_t floats(const Plan &p) { return p.a.shape.padded() + 16; }
};

Scratch attention_scratch(args::Attention op) {
    const Plan p(op);
    const int64_t results =
        p.max_segments > 1 ? op.tokens() * p.a.heads * p.max_segments : 0;
    return {4 * results * SegmentResult::floats(p), AttentionScratch(p, nullptr).bytes};
}

} // namespace
} // namespace inl
