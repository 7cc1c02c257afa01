/* Attention within whole sequences, in both directions, without a cache.
 *
 * A chunk has some tokens and one kv head. The keys and values of a sequence are packed
 * 256 at a time, and the softmax is rescaled after each of these parts, which begin at
 * the first token of the sequence. So a query has the same result in any batch.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t FULL_QUERIES = 64; /* tokens of a chunk */
constexpr int64_t FULL_KEYS = 256;   /* keys that are packed at a time */
constexpr float HIDDEN = -1e30f;     /* the score of a key that is not attended to */

/* Floats of a thread's scratch, each part in whole cache lines. */
struct FullSizes {
    int64_t padded; /* lanes of a head, rounded up */
    int64_t keys, values, weights, mixed, states, bias;
    explicit FullSizes(const args::FullAttention &op)
        : padded(ceil_div(op.head_width(), 16) * 16), keys(FULL_KEYS * op.head_width()),
          values(FULL_KEYS * padded), weights(ATTENTION_ROWS * FULL_KEYS),
          mixed(queries(op) * padded), states(ceil_div(queries(op), 16) * 16),
          bias(ceil_div(2 * op.distances() + 1, 16) * 16) {}
    static int64_t queries(const args::FullAttention &op) {
        return FULL_QUERIES * (op.heads() / op.kv_heads());
    }
    int64_t all() const {
        return keys + values + weights + mixed + 2 * states + bias;
    }
};

/* The queries of one sequence in a chunk. */
class FullAttention {
  public:
    FullAttention(const args::FullAttention &op, int64_t kv_head, float *own)
        : op(op), kv_head(kv_head), group(op.heads() / op.kv_heads()),
          width(op.head_width()), sizes(op), keys(own), values(keys + sizes.keys),
          weights(values + sizes.values), mixed(weights + sizes.weights),
          top(mixed + sizes.mixed), total(top + sizes.states),
          bias(total + sizes.states) {}

    /* Attend from tokens first .. last - 1 of the sequence start .. stop - 1. */
    void attend(int64_t start, int64_t stop, int64_t first, int64_t last) {
        begin = start;
        from = first - start;
        to = last - start;
        const int64_t count = (to - from) * group, length = stop - start;
        std::memset(mixed, 0, size_t(count * sizes.padded) * 4);
        for (int64_t at = 0; at < count; at++) {
            top[at] = HIDDEN;
            total[at] = 0;
        }
        for (int64_t part = 0; part < length; part += FULL_KEYS) {
            const int64_t end = part + FULL_KEYS < length ? part + FULL_KEYS : length;
            if (end <= first_key(from) || part >= last_key(to - 1)) continue;
            pack(part, end);
            for (int64_t head = 0; head < group; head++) attend_part(head, part, end);
        }
        for (int64_t at = 0; at < count; at++) finish(at);
    }

  private:
    /* The keys that a query sees, before bounds of the sequence. */
    int64_t first_key(int64_t query) const {
        return op.window() ? query - (op.window() - 1) : 0;
    }
    int64_t last_key(int64_t query) const {
        return op.window() ? query + op.window() : INT64_MAX;
    }
    const float *row(const float *x, int64_t stride, int64_t at, int64_t head) const {
        return x + (begin + at) * stride + head * width;
    }

    /* Keys as tiles [width, 16], the last filled with zeros, and values in rows. */
    void pack(int64_t part, int64_t end) {
        const int64_t count = end - part;
        for (int64_t at = 0; at < ceil_div(count, 16) * 16; at++) {
            float *tile = keys + at / 16 * 16 * width + at % 16;
            float *value = values + at * sizes.padded;
            if (at >= count) {
                for (int64_t i = 0; i < width; i++) tile[i * 16] = 0;
                std::memset(value, 0, size_t(sizes.padded) * 4);
                continue;
            }
            const float *key = row(op.k(), op.k_stride(), part + at, kv_head);
            for (int64_t i = 0; i < width; i++) tile[i * 16] = key[i];
            const float *source = row(op.v(), op.v_stride(), part + at, kv_head);
            for (int64_t i = 0; i < width; i += 16)
                store(value + i, load_first(source + i, lanes_left(i, width)));
        }
    }

    void attend_part(int64_t head, int64_t part, int64_t end) {
        if (op.bias() != nullptr) copy_bias(kv_head * group + head);
        for (int64_t query = from; query < to; query += ATTENTION_ROWS) {
            const int64_t left = to - query;
            const int rows = left < ATTENTION_ROWS ? int(left) : ATTENTION_ROWS;
            int64_t low = first_key(query), high = last_key(query + rows - 1);
            low = low > part ? (low - part) / 16 * 16 : 0;
            high = high < end ? high - part : end - part;
            if (low >= high) continue;
            score(head, query, rows, part, low, high);
            for (int r = 0; r < rows; r++)
                soften(r, head * (to - from) + query + r - from, low, high);
            mix(head * (to - from) + query - from, rows, low, high);
        }
    }

    /* The bias of a head by distance, for loads of adjacent keys. */
    void copy_bias(int64_t head) {
        for (int64_t at = 0; at < 2 * op.distances() + 1; at++)
            bias[at] = op.bias()[at * op.heads() + head];
    }
    F biases(int64_t distance) const {
        const int64_t most = op.distances();
        if (distance >= -most && distance + 15 <= most)
            return load(bias + distance + most);
        float lanes[16];
        for (int64_t lane = 0; lane < 16; lane++) {
            int64_t at = distance + lane + most;
            at = at < 0 ? 0 : at > 2 * most ? 2 * most : at;
            lanes[lane] = bias[at];
        }
        return load(lanes);
    }

    /* Scores of some queries with keys low .. high - 1 of a part. */
    void score(int64_t head, int64_t query, int rows, int64_t part, int64_t low,
               int64_t high) {
        const float *q[ATTENTION_ROWS];
        for (int r = 0; r < ATTENTION_ROWS; r++)
            q[r] = row(op.q(), op.q_stride(), query + (r < rows ? r : 0),
                       kv_head * group + head);
        const F scale = set(op.scale()), hidden = set(HIDDEN);
        for (int64_t at = low; at < high; at += 16) {
            const float *tile = keys + at * width;
            F sums[ATTENTION_ROWS];
            for (int r = 0; r < ATTENTION_ROWS; r++) sums[r] = set(0.0f);
            for (int64_t i = 0; i < width; i++) {
                const F key = load(tile + 16 * i);
                for (int r = 0; r < ATTENTION_ROWS; r++)
                    sums[r] = fma(set(q[r][i]), key, sums[r]);
            }
            for (int r = 0; r < rows; r++) {
                const int64_t key = part + at, own = query + r;
                F x = mul(sums[r], scale);
                if (op.bias() != nullptr) x = add(x, biases(key - own));
                const int64_t first = first_key(own) - key, last = last_key(own) - key;
                int most = lanes_left(at, high), least = first > 0 ? int(first) : 0;
                if (last < most) most = last < 0 ? 0 : int(last);
                if (least > most) least = most;
                store(weights + r * FULL_KEYS + at, between(x, least, most, hidden));
            }
        }
    }

    /* Exponentials of a query's scores, and its earlier sums to the same scale. */
    void soften(int r, int64_t state, int64_t low, int64_t high) {
        float *scores = weights + r * FULL_KEYS;
        F most = set(top[state]);
        for (int64_t at = low; at < high; at += 16)
            most = larger(most, load(scores + at));
        const float largest_score = largest(most);
        const F shift = set(largest_score);
        F sums = set(0.0f);
        for (int64_t at = low; at < high; at += 16) {
            const F weight = exponential(sub(load(scores + at), shift));
            store(scores + at, weight);
            sums = add(sums, weight);
        }
        const float factor = std::exp(top[state] - largest_score);
        float *sum_of = mixed + state * sizes.padded;
        if (factor != 1)
            for (int64_t i = 0; i < sizes.padded; i += 16)
                store(sum_of + i, mul(load(sum_of + i), set(factor)));
        total[state] = total[state] * factor + sum(sums);
        top[state] = largest_score;
    }

    /* Add the weighted values of some queries. */
    void mix(int64_t state, int rows, int64_t low, int64_t high) {
        for (int64_t i = 0; i < sizes.padded; i += 16) {
            F sums[ATTENTION_ROWS];
            for (int r = 0; r < ATTENTION_ROWS; r++)
                sums[r] = load(mixed + (state + (r < rows ? r : 0)) * sizes.padded + i);
            for (int64_t key = low; key < high; key++) {
                const F value = load(values + key * sizes.padded + i);
                for (int r = 0; r < ATTENTION_ROWS; r++)
                    sums[r] = fma(set(weights[r * FULL_KEYS + key]), value, sums[r]);
            }
            for (int r = 0; r < rows; r++)
                store(mixed + (state + r) * sizes.padded + i, sums[r]);
        }
    }

    void finish(int64_t at) {
        const int64_t head = kv_head * group + at / (to - from);
        const int64_t token = begin + from + at % (to - from);
        float *y = op.y() + (token * op.heads() + head) * width;
        const F whole = set(total[at]);
        for (int64_t i = 0; i < width; i += 16)
            store_first(y + i, quotient(load(mixed + at * sizes.padded + i), whole),
                        lanes_left(i, width));
    }

    const args::FullAttention &op;
    const int64_t kv_head, group, width;
    const FullSizes sizes;
    float *const keys, *const values, *const weights, *const mixed;
    float *const top, *const total, *const bias; /* by query: head, then token */
    int64_t begin = 0, from = 0, to = 0;
};

int64_t full_attention_chunks(args::FullAttention op) {
    return ceil_div(op.tokens(), FULL_QUERIES) * op.kv_heads();
}

Scratch full_attention_scratch(args::FullAttention op) {
    return {0, FullSizes(op).all() * 4};
}

void full_attention_body(args::FullAttention op, int64_t chunk, Worker &worker) {
    const int64_t kv_head = chunk % op.kv_heads();
    const Span tokens(chunk / op.kv_heads(), FULL_QUERIES, op.tokens());
    FullAttention work(op, kv_head, reinterpret_cast<float *>(worker.own));
    int64_t done = tokens.from;
    for (int64_t n = 0; n < op.sequences() && done < tokens.to; n++) {
        const int64_t start = op.starts()[n], stop = op.starts()[n + 1];
        const int64_t last = stop < tokens.to ? stop : tokens.to;
        if (start > done || last <= done) continue;
        work.attend(start, stop, done, last);
        done = last;
    }
    const int64_t heads = op.heads() / op.kv_heads() * op.head_width();
    for (; done < tokens.to; done++)
        std::memset(op.y() + (done * op.kv_heads() + kv_head) * heads, 0,
                    size_t(heads) * 4);
}

} // namespace
} // namespace inl
