/* Log-probabilities of given and of the most likely tokens; the op ``score`` in
 * inl/ops/sample.py defines them. One pass over the logits of a row. */
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/elementary.h"
#include "kernels/sample.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Logits whose exponentials are added while they are in the L1 cache, and those of
 * which one maximum decides whether a most likely token is among them. */
constexpr int64_t SCORE_SPAN = 2048, CANDIDATES = 64;

/* The most likely tokens of a row, ties by id. Tokens are added in the order of ids. */
class TopTokens {
  public:
    TopTokens(float *values, int32_t *ids, int64_t count)
        : values_(values), ids_(ids), count_(count) {}

    bool accepts(float value) const {
        return size_ < count_ || value > values_[count_ - 1];
    }
    void add(const float *logits, const Span &span) {
        for (int64_t id = span.from; id < span.to; id++)
            if (accepts(logits[id])) insert(logits[id], int32_t(id));
    }

  private:
    void insert(float value, int32_t id) {
        int64_t at = size_ < count_ ? size_++ : count_ - 1;
        for (; at > 0 && value > values_[at - 1]; at--) {
            values_[at] = values_[at - 1];
            ids_[at] = ids_[at - 1];
        }
        values_[at] = value;
        ids_[at] = id;
    }

    float *const values_;
    int32_t *const ids_;
    const int64_t count_;
    int64_t size_ = 0;
};

/* The largest of the logits that were added, and the sum of their exponentials relative
 * to it. */
class ExponentialSum {
  public:
    /* highest: the largest logit of the span, finite or -inf. */
    void add(const float *logits, const Span &span, float highest) {
        if (highest == -INFINITY) return;
        if (highest > highest_) {
            sum_ *= std::exp(double(highest_) - double(highest));
            highest_ = highest;
        }
        const F top = set(highest_), none = set(0.0f);
        F sums = none;
        int64_t at = span.from;
        for (; at + INL_LANES <= span.to; at += INL_LANES)
            sums = inl::add(sums, exponential(sub(load(logits + at), top)));
        const int n = int(span.to - at);
        const F rest = exponential(sub(load_first(logits + at, n), top));
        sum_ += double(sum(inl::add(sums, between(rest, 0, n, none))));
    }
    bool is_empty() const { return highest_ == -INFINITY; }
    float highest() const { return highest_; }
    double logarithm() const { return std::log(sum_); }

  private:
    float highest_ = -INFINITY;
    double sum_ = 0;
};

int64_t score_chunks(args::Score op) { return op.rows(); }

/* Scores of a row with invalid logits: NaN, with ids that exist. */
void score_invalid(args::Score op, int64_t row) {
    const int64_t first = row * op.count();
    op.chosen()[row] = NAN;
    for (int64_t at = 0; at < op.count(); at++) {
        op.ids()[first + at] = int32_t(at);
        op.values()[first + at] = NAN;
    }
}

void score_body(args::Score op, int64_t row, Worker &) {
    const float *logits = op.logits() + row * op.logits_stride();
    float *values = op.values() + row * op.count();
    TopTokens top(values, op.ids() + row * op.count(), op.count());
    ExponentialSum all;
    for (int64_t at = 0; at < op.vocabulary(); at += SCORE_SPAN) {
        const Span span(at / SCORE_SPAN, SCORE_SPAN, op.vocabulary());
        float highest = -INFINITY;
        for (int64_t from = span.from; from < span.to; from += CANDIDATES) {
            const Span part(from / CANDIDATES, CANDIDATES, span.to);
            const float most = highest_of(logits, part);
            if (most == INFINITY) return score_invalid(op, row);
            if (most > highest) highest = most;
            if (top.accepts(most)) top.add(logits, part);
        }
        all.add(logits, span, highest);
    }
    if (all.is_empty()) return score_invalid(op, row);
    /* Not relative to their sum: large logits would lose the digits of the logarithm. */
    const double highest = double(all.highest()), rest = all.logarithm();
    const auto scored = [&](float logit) {
        return float(double(logit) - highest - rest);
    };
    for (int64_t at = 0; at < op.count(); at++) values[at] = scored(values[at]);
    const int32_t token = op.tokens()[row];
    const bool exists = token >= 0 && token < op.vocabulary();
    op.chosen()[row] = exists ? scored(logits[token]) : NAN;
}

} // namespace
} // namespace inl
