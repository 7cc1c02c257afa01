/* Choice of experts from their logits, as the op ``route``. */
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/elementary.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Kinds of weights: a softmax over all experts, one over the chosen, a sigmoid. */
enum RouteKind { SOFTMAX_TOPK, TOPK_SOFTMAX, SIGMOID };

/* Lower bound of the sum that weights are divided by. */
constexpr float LEAST_SUM = 1e-20f;

int64_t route_chunks(args::Route op) { return op.rows(); }

/* Ranks of the experts; an expert that was chosen is no longer found. */
Scratch route_scratch(args::Route op) { return {0, aligned(5 * op.experts())}; }

/* The expert with the largest rank among those that are left, the first of equals. */
inline int64_t best_expert(const float *ranks, const bool *chosen, int64_t experts) {
    int64_t best = -1;
    for (int64_t at = 0; at < experts; at++)
        if (!chosen[at] && (best < 0 || ranks[at] > ranks[best])) best = at;
    return best;
}

inline float exponential_of(float x) { return largest(exponential(set(x))); }

/* In float64: small results would have few correct digits. */
inline float sigmoid_of(float x) { return float(0.5 + 0.5 * std::tanh(0.5 * x)); }

/* Sum of e^(x - top) of all experts. */
inline float total_share(const float *ranks, int64_t experts, float top) {
    F total = set(0.0f);
    for (int64_t at = 0; at < experts; at += 16) {
        const int n = lanes_left(at, experts);
        float shares[16];
        store(shares, exponential(sub(load_first(ranks + at, n), set(top))));
        total = add(total, load_first(shares, n));
    }
    return sum(total);
}

void route_body(args::Route op, int64_t row, Worker &worker) {
    const float *logits = op.logits() + row * op.x_stride();
    const int64_t experts = op.experts(), k = op.k();
    int32_t *ids = op.ids() + row * k;
    float *weights = op.weights() + row * k;
    float *ranks = reinterpret_cast<float *>(worker.own);
    bool *chosen = reinterpret_cast<bool *>(ranks + experts);
    bool invalid = false;
    for (int64_t at = 0; at < experts; at++) {
        const bool nan = !(logits[at] == logits[at]);
        ranks[at] = nan ? -INFINITY : logits[at];
        invalid = invalid || nan;
        chosen[at] = false;
    }
    for (int64_t slot = 0; slot < k; slot++) {
        const int64_t best = best_expert(ranks, chosen, experts);
        chosen[best] = true;
        ids[slot] = int32_t(best);
    }
    const float top = ranks[ids[0]];
    /* A softmax subtracts the largest logit: infinity from itself. */
    invalid = invalid || (op.kind() != SIGMOID && !(top - top == 0.0f));
    float total = 0.0f;
    for (int64_t slot = 0; slot < k; slot++) {
        const float rank = ranks[ids[slot]];
        weights[slot] =
            op.kind() == SIGMOID ? sigmoid_of(rank) : exponential_of(rank - top);
        total += weights[slot];
    }
    float divisor = total > LEAST_SUM ? total : LEAST_SUM;
    if (!op.renormalize() && op.kind() != TOPK_SOFTMAX)
        divisor = op.kind() == SIGMOID ? 1.0f : total_share(ranks, experts, top);
    for (int64_t slot = 0; slot < k; slot++)
        weights[slot] = invalid ? NAN : weights[slot] / divisor;
}

void sigmoid_gate_body(args::SigmoidGate op, int64_t chunk, Worker &) {
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const F factor = set(sigmoid_of(op.gate()[row * op.gate_stride()]));
        const float *x = op.x() + row * op.x_stride();
        float *y = op.y() + row * op.width();
        for (int64_t at = 0; at < op.width(); at += 16) {
            const int n = lanes_left(at, op.width());
            store_first(y + at, mul(load_first(x + at, n), factor), n);
        }
    }
}

} // namespace
} // namespace inl
