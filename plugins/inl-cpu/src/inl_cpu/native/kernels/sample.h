/* Token sampling; the op ``sample`` in inl/ops/sample.py defines the samplers. */
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/token_filter.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Tokens of a chunk. */
constexpr int64_t ARGMAX_SPAN = 8192;

/* Order of the float32 parameters of a slot. */
enum Parameter {
    TEMPERATURE,
    TOP_K,
    TOP_P,
    MIN_P,
    REPETITION_PENALTY,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    PARAMETERS
};

/* The highest logit and its first id. The value is infinite if the logits are invalid:
 * +inf if any is NaN or +inf, -inf if all are -inf. */
struct Best {
    float value;
    int32_t id;

    bool is_valid() const { return value > -INFINITY && value < INFINITY; }
};

/* The token of a row with invalid logits, and what is stored as its slot's last. */
constexpr int32_t NO_TOKEN = -1, LAST_OF_NO_TOKEN = 0;

int64_t argmax_spans(args::Sample op) { return ceil_div(op.vocabulary(), ARGMAX_SPAN); }

int64_t argmax_chunks(args::Sample op) { return op.samples() * argmax_spans(op); }

/* Maximum instructions drop NaN on some processors; no comparison with it holds. */
inline F nan_as_infinite(F x) {
    const F infinite = set(INFINITY);
    return where_below(x, infinite, x, infinite);
}

/* Highest logit of a span, with NaN counted as +inf. */
float highest_of(const float *logits, const Span &span) {
    const F lowest = set(-INFINITY);
    F highest = lowest;
    int64_t at = span.from;
    for (; at + 16 <= span.to; at += 16)
        highest = larger(highest, nan_as_infinite(load(logits + at)));
    const int n = int(span.to - at);
    const F rest = between(load_first(logits + at, n), 0, n, lowest);
    return largest(larger(highest, nan_as_infinite(rest)));
}

/* Highest logit of a span, ties to the lowest id. */
Best best_of(const float *logits, const Span &span) {
    Best best{highest_of(logits, span), int32_t(span.from)};
    if (best.is_valid())
        while (logits[best.id] != best.value) best.id++;
    return best;
}

void argmax_body(args::Sample op, int64_t chunk, Worker &worker) {
    const float *logits = op.logits() + chunk / argmax_spans(op) * op.logits_stride();
    const Span span(chunk % argmax_spans(op), ARGMAX_SPAN, op.vocabulary());
    reinterpret_cast<Best *>(worker.shared)[chunk] = best_of(logits, span);
}

Best best_of_spans(args::Sample op, int64_t sample, const Worker &worker) {
    const Best *spans =
        reinterpret_cast<const Best *>(worker.shared) + sample * argmax_spans(op);
    Best best = spans[0];
    for (int64_t at = 1; at < argmax_spans(op); at++)
        if (spans[at].value > best.value) best = spans[at];
    return best;
}

/* Bytes of an array of the vocabulary, with whole vectors. */
int64_t vocabulary_bytes(args::Sample op) {
    return aligned(4 * ceil_div(op.vocabulary(), 16) * 16);
}

Scratch sample_scratch(args::Sample op) {
    const bool random = op.flags() & INL_SAMPLE_MASK;
    return {int64_t(sizeof(Best)) * argmax_chunks(op),
            random ? 2 * vocabulary_bytes(op) + filter_bytes(op.vocabulary()) : 0};
}

/* scaled = (logits - top) / temperature; mass = its exponential. */
void scale_logits(const float *logits, int64_t count, float top, float temperature,
                  float *scaled, float *mass) {
    for (int64_t at = 0; at < count; at += 16) {
        const int n = lanes_left(at, count);
        const F value =
            quotient(sub(load_first(logits + at, n), set(top)), set(temperature));
        store(scaled + at, value);
        store(mass + at, between(exponential(value), 0, n, set(0.0f)));
    }
}

/* The first id whose cumulative mass exceeds uniform times the total. */
int32_t sample_mass(const float *mass, int64_t count, float uniform) {
    double total = 0;
    for (int64_t at = 0; at < count; at += 16) total += double(sum(load(mass + at)));
    const double target = double(uniform) * total;
    double before = 0;
    int64_t at = 0;
    for (; at + 16 < count; at += 16) {
        const double next = before + double(sum(load(mass + at)));
        if (next > target) break;
        before = next;
    }
    for (; at < count; at++) {
        before += double(mass[at]);
        if (before > target) return int32_t(at);
    }
    /* Summed one by one, masses may add up to less: return the last possible token. */
    for (at = count - 1; at > 0 && !(mass[at] > 0);) at--;
    return int32_t(at);
}

int32_t sample_token(args::Sample op, int64_t sample, Best best, Worker &worker) {
    const int64_t slot = op.slots()[sample / op.row_samples()], count = op.vocabulary();
    const float *params = op.params() + slot * PARAMETERS;
    if (!(params[TEMPERATURE] > 0)) return best.id;
    float *scaled = reinterpret_cast<float *>(worker.own);
    float *mass = scaled + ceil_div(count, 16) * 16;
    char *rest = worker.own + 2 * vocabulary_bytes(op);
    scale_logits(op.logits() + sample * op.logits_stride(), count, best.value,
                 params[TEMPERATURE], scaled, mass);
    if (op.flags() & INL_SAMPLE_FILTERED)
        filter_tokens(scaled, mass, count,
                      {params[TOP_K], params[TOP_P], params[MIN_P]}, rest);
    return sample_mass(mass, count, op.uniforms()[sample]);
}

/* Whether no later row has the slot of this row: padding rows all have slot 0. */
bool is_last_of_slot(args::Sample op, int64_t row) {
    const int32_t *slots = op.slots();
    for (int64_t later = row + 1; later < op.samples() / op.row_samples(); later++)
        if (slots[later] == slots[row]) return false;
    return true;
}

int64_t sample_chunks(args::Sample op) { return op.samples(); }

void sample_body(args::Sample op, int64_t sample, Worker &worker) {
    const Best best = best_of_spans(op, sample, worker);
    const bool random = op.flags() & INL_SAMPLE_MASK;
    const int32_t token = !best.is_valid() ? NO_TOKEN
                          : random         ? sample_token(op, sample, best, worker)
                                           : best.id;
    op.tokens()[sample] = token;
    const int64_t row = sample / op.row_samples();
    if (op.last() == nullptr || sample % op.row_samples() != op.row_samples() - 1)
        return;
    if (is_last_of_slot(op, row))
        op.last()[op.slots()[row]] = token == NO_TOKEN ? LAST_OF_NO_TOKEN : token;
}

/* Penalties of one slot. */
struct Penalties {
    float repetition, presence, frequency;

    /* Sixteen logits after penalties and bias, limited to finite numbers. counts has
     * the number of generated tokens times 2, plus 1 for prompt tokens. */
    F apply(F logits, I counts, F bias) const {
        const F zero = set(0.0f), most = set(FLT_MAX);
        const F generated = to_float(shift_right(counts, 1));
        const F factor = where_below(zero, to_float(counts),
                                     set(repetition > 0 ? repetition : 1.0f), set(1.0f));
        F result = where_below(zero, logits, quotient(logits, factor),
                               mul(logits, factor));
        result = sub(result, mul(set(frequency), generated));
        result = sub(result, where_below(zero, generated, set(presence), zero));
        return larger(set(-FLT_MAX), smaller(most, add(result, bias)));
    }
};

int64_t penalize_chunks(args::Penalize op) { return op.rows(); }

/* SAMPLE judges from the results whether the logits are valid, so these must be valid
 * exactly if the model's logits are. */
void penalize_body(args::Penalize op, int64_t row, Worker &) {
    const int64_t slot = op.slots()[row], vocabulary = op.vocabulary();
    const float *params = op.params() + slot * PARAMETERS;
    const Penalties penalties{params[REPETITION_PENALTY], params[PRESENCE_PENALTY],
                              params[FREQUENCY_PENALTY]};
    int32_t *counts = op.counts() + slot * vocabulary;
    const float *bias = op.bias() + slot * vocabulary;
    float *logits = op.logits() + row * op.logits_stride();
    const int32_t fed = op.fed()[row];
    if (row < op.decode_rows() && fed >= 0 && fed < vocabulary) counts[fed] += 2;
    const Best best{highest_of(logits, Span(0, vocabulary, vocabulary)), 0};
    if (!best.is_valid()) {
        logits[0] = NAN;
        return;
    }
    for (int64_t at = 0; at < vocabulary; at += 16) {
        const int n = lanes_left(at, vocabulary);
        int32_t tail[16] = {};
        if (n < 16) std::memcpy(tail, counts + at, size_t(n) * 4);
        const I seen = load_ints(n < 16 ? tail : counts + at);
        const F value = penalties.apply(load_first(logits + at, n), seen,
                                        load_first(bias + at, n));
        store_first(logits + at, value, n);
    }
}

} // namespace
} // namespace inl
