/* Causal attention over the paged cache, one segment of keys at a time.
 *
 * A chunk has a few tokens and one kv head. Each segment of 256 keys has an ordinary
 * softmax over exact scores; segments are accumulated in the order of their keys. So
 * the result of a query does not depend on the other queries: keys that only they
 * attend to have weight 0. With few tokens and long sequences, a chunk is one segment,
 * and another phase accumulates the segments in the same order, with the same result.
 */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/attention_plan.h"
#include "kernels/values.h"

namespace inl {
namespace {

/* The part of a segment that some of the queries attend to. */
Segment visible_segment(const Attention &a, const Queries &q, int64_t head,
                        int64_t number) {
    int64_t from = a.tile_of(q.from), to = a.tile_of(q.to - 1) + 1;
    const int64_t begin = number * SEGMENT_TILES, end = begin + SEGMENT_TILES;
    if (from < begin) from = begin;
    if (to > end) to = end;
    return Segment(a, q.row, head, from, to);
}

/* Attention of some tokens and one kv head. */
struct HeadAttention {
    const Plan &p;
    const Attention &a;
    const int64_t head;
    AttentionScratch s;
    int groups = 0;

    HeadAttention(const Plan &p, int64_t head, char *own)
        : p(p), a(p.a), head(head), s(p, own) {}

    /* Encode the queries, while the first of their keys from segment ``number`` on are
     * prefetched. */
    void prepare(const Span &tokens, int64_t number) {
        const int64_t group_words = p.words() * ATTENTION_ROWS;
        each_queries(a, tokens, head, ATTENTION_ROWS, [&](const Queries &q) {
            if (groups == 0) {
                const int64_t own = Plan::segment_of(a, q.from);
                const int64_t first = own > number ? own : number;
                prefetch_keys(a, visible_segment(a, q, head, first), 0, TILES_AHEAD);
            }
            s.queries[groups] = q;
            s.encoded[groups].words = s.words + groups * group_words;
            query_words(a, q, s.query, s.encoded[groups]);
            for (int r = 0; r < q.count; r++) {
                float *mixed = s.accumulated + index(groups, r) * a.shape.padded();
                state(groups, r) = {mixed, 0, 0};
            }
            groups++;
        });
    }
    int64_t index(int group, int r) const { return group * ATTENTION_ROWS + r; }
    PartialSoftmax &state(int group, int r) { return s.states[index(group, r)]; }

    /* Call take(group, r, mixed, top, total) for all queries that attend to a segment.
     * more: this chunk continues with the next segment. */
    template <class Take>
    void attend(int64_t number, bool more, Take take) {
        for (int group = 0; group < groups; group++) {
            const Queries &q = s.queries[group];
            const Segment segment = visible_segment(a, q, head, number);
            if (segment.tiles < 1) continue;
            const char *next[SEGMENT_TILES];
            std::memcpy(next, segment.v, sizeof next); /* of no effect */
            if (more && groups == 1) {
                const Segment later = visible_segment(a, q, head, number + 1);
                if (later.tiles > 0)
                    std::memcpy(next, later.k, size_t(later.tiles) * sizeof *next);
            }
            attend_segment(a, q, segment, s.encoded[group], s.weights, s.mixed,
                           {fresh, next});
            fresh = false;
            for (int r = 0; r < q.count; r++)
                take(group, r, s.mixed + r * a.shape.padded(), s.weights.top[r],
                     s.weights.total[r]);
        }
    }
    bool fresh = true; /* before the first segment */
};

void zero_padding(const Attention &a, const Span &tokens, int64_t head) {
    for (int64_t token = tokens.from; token < tokens.to; token++)
        if (a.is_padding(token))
            std::memset(a.out(token, head * a.group), 0, size_t(a.group * a.width) * 4);
}

/* With INL_ONE_TOKEN_ROWS only the token itself attends to its key, so the chunk that
 * reads the key also writes it. segments: those of the chunk. */
void cache_own_tokens(const Attention &a, const Span &tokens, int64_t head,
                      const Span &segments, float *key) {
    if (a.op.k() == nullptr || !(a.op.flags() & INL_ONE_TOKEN_ROWS)) return;
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        const int64_t own = Plan::segment_of(a, a.position(token));
        if (segments.from <= own && own < segments.to) cache_token(a, token, head, key);
    }
}

/* A chunk with all segments of its tokens. */
void attend_all_segments(const Plan &p, const Span &tokens, int64_t head,
                         Worker &worker) {
    HeadAttention work(p, head, worker.own);
    cache_own_tokens(p.a, tokens, head, Span(0, INT64_MAX, INT64_MAX), work.s.query);
    zero_padding(p.a, tokens, head);
    work.prepare(tokens, 0);
    int64_t from = INT64_MAX, to = 0;
    for (int group = 0; group < work.groups; group++) {
        const Queries &q = work.s.queries[group];
        const int64_t first = Plan::segment_of(p.a, q.from),
                      last = Plan::segment_of(p.a, q.to - 1);
        if (first < from) from = first;
        if (last >= to) to = last + 1;
    }
    for (int64_t number = from; number < to; number++)
        work.attend(number, number + 1 < to,
                    [&](int group, int r, const float *mixed, float top, float total) {
                        work.state(group, r).accumulate(mixed, top, total,
                                                        p.a.shape.padded());
                    });
    for (int group = 0; group < work.groups; group++) {
        const Queries &q = work.s.queries[group];
        for (int r = 0; r < q.count; r++)
            work.state(group, r).finish(p.a, q.head[r], q.out(p.a, r));
    }
}

/* A chunk with some segments; stores the result of each for the third phase. */
void attend_some_segments(const Plan &p, const Span &tokens, int64_t head,
                          const Span &segments, Worker &worker) {
    HeadAttention work(p, head, worker.own);
    cache_own_tokens(p.a, tokens, head, segments, work.s.query);
    work.prepare(tokens, segments.from);
    for (int64_t number = segments.from; number < segments.to; number++)
        work.attend(number, number + 1 < segments.to,
                    [&](int group, int r, const float *mixed, float top, float total) {
                        const Queries &q = work.s.queries[group];
                        const SegmentResult result(p, worker.shared, q.token[r],
                                                   q.head[r], number);
                        *result.top = top;
                        *result.total = total;
                        std::memcpy(result.mixed, mixed,
                                    size_t(p.a.shape.padded()) * 4);
                    });
}

int64_t attention_chunks(args::Attention op) {
    const Plan p(op);
    if (p.max_segments == 1) return p.spans * p.a.kv_heads;
    int64_t chunks = 0;
    for (int64_t at = 0; at < p.spans; at++) chunks += p.chunks(at);
    return chunks * p.a.kv_heads;
}

void attention_body(args::Attention op, int64_t chunk, Worker &worker) {
    const Plan p(op);
    const int64_t head = chunk % p.a.kv_heads;
    int64_t number = chunk / p.a.kv_heads;
    /* The last tokens attend to the most keys: the longest chunks come first. */
    if (p.max_segments == 1)
        return attend_all_segments(p, p.tokens(p.spans - 1 - number), head, worker);
    int64_t at = p.spans - 1;
    for (; number >= p.chunks(at); at--) number -= p.chunks(at);
    const Span all = p.segments(at);
    Span some(number, p.chunk_segments, all.count());
    some.from += all.from;
    some.to += all.from;
    attend_some_segments(p, p.tokens(at), head, some, worker);
}

/* The third phase accumulates segments; a chunk is one token and kv head. */
int64_t reduce_chunks(args::Attention op) {
    const Plan p(op);
    return p.max_segments == 1 ? 0 : op.tokens() * p.a.kv_heads;
}

void reduce_body(args::Attention op, int64_t chunk, Worker &worker) {
    const Plan p(op);
    const int64_t token = chunk / p.a.kv_heads, kv_head = chunk % p.a.kv_heads;
    zero_padding(p.a, Span(token, 1, op.tokens()), kv_head);
    if (p.a.is_padding(token)) return;
    const int64_t from = Plan::segment_of(p.a, p.a.first_key(token)),
                  to = Plan::segment_of(p.a, p.a.position(token)) + 1;
    for (int64_t head = kv_head * p.a.group; head < (kv_head + 1) * p.a.group; head++) {
        PartialSoftmax state{reinterpret_cast<float *>(worker.own), 0, 0};
        for (int64_t number = from; number < to; number++) {
            const SegmentResult result(p, worker.shared, token, head, number);
            state.accumulate(result.mixed, *result.top, *result.total,
                             p.a.shape.padded());
        }
        state.finish(p.a, head, p.a.out(token, head));
    }
}

} // namespace
} // namespace inl
