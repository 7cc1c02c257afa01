/* Recurrent layers: short convolutions, the gated delta rule and the scan of Mamba-2, over
 * per-slot state.
 *
 * The tokens of a row are computed one after the other with the same operations,
 * however a text is divided into steps: results do not depend on the chunks.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/norm_rope.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Tokens of a row and its slot. */
struct RecurrentRow {
    int64_t slot, start, stop;
    bool continued; /* whether the slot has state of this sequence */

    template <class Op>
    RecurrentRow(Op op, int64_t row)
        : slot(op.row_slots()[row]), start(op.starts()[row]), stop(op.starts()[row + 1]),
          continued(false) {
        const bool valid = slot >= 0 && slot < op.slots() && start >= 0 &&
                           start < stop && stop <= op.tokens();
        if (valid)
            continued = op.positions()[start] != 0;
        else
            stop = start;
    }
    int64_t count() const { return stop - start; }
};

template <class Op>
int64_t used_rows(Op op) {
    const int64_t used = op.used_counts()[1];
    return used < 0 ? 0 : used < op.rows() ? used : op.rows();
}

/* First token of padding, whose results are zeros. */
template <class Op>
int64_t first_padding(Op op) {
    const int64_t end = op.starts()[used_rows(op)];
    return end < 0 ? 0 : end < op.tokens() ? end : op.tokens();
}

/* Channels of a chunk: about SPAN products, but whole cache lines. */
int64_t conv_lanes(args::CausalConv op) {
    const int64_t products = op.tokens() * op.taps();
    const int64_t lanes = SPAN / (products ? products : 1) / 16 * 16;
    return lanes > 64 ? lanes : 64;
}

int64_t causal_conv_chunks(args::CausalConv op) {
    return ceil_div(op.channels(), conv_lanes(op));
}

/* The last taps - 1 inputs of a row, of which the oldest may be those of before. */
void keep_inputs(args::CausalConv op, const RecurrentRow &row, float *inputs,
                 Span lanes) {
    const int64_t before = op.taps() - 1;
    const size_t bytes = size_t(lanes.count()) * 4;
    for (int64_t at = 0; at < before; at++) {
        float *target = inputs + at * op.channels() + lanes.from;
        const int64_t source = at + row.count(), token = source - before;
        if (token >= 0)
            std::memcpy(target, op.x() + (row.start + token) * op.x_stride() + lanes.from,
                        bytes);
        else if (row.continued)
            std::memcpy(target, inputs + source * op.channels() + lanes.from, bytes);
        else
            std::memset(target, 0, bytes);
    }
}

void causal_conv_body(args::CausalConv op, int64_t chunk, Worker &) {
    const Span lanes(chunk, conv_lanes(op), op.channels());
    const int64_t channels = op.channels(), before = op.taps() - 1;
    const size_t bytes = size_t(lanes.count()) * 4;
    for (int64_t at = 0; at < before; at++)
        std::memset(op.table() + at * channels + lanes.from, 0, bytes);
    for (int64_t number = 0; number < used_rows(op); number++) {
        const RecurrentRow row(op, number);
        if (!row.count()) continue;
        float *inputs = op.table() + row.slot * before * channels;
        for (int64_t token = row.start; token < row.stop; token++) {
            /* Inputs of before that this token reads. */
            const int64_t missing = before - (token - row.start);
            const int64_t kept = missing > 0 ? missing : 0;
            const float *x = op.x() + (token - before) * op.x_stride();
            float *y = op.y() + token * channels;
            for (int64_t at = lanes.from; at < lanes.to; at += 16) {
                const int n = lanes_left(at, lanes.to);
                F total = set(0.0f);
                const auto tap = [&](const float *input, int64_t number) {
                    const F factor = load_first(op.weight() + number * channels + at, n);
                    total = fma(load_first(input + at, n), factor, total);
                };
                if (row.continued)
                    for (int64_t i = 0; i < kept; i++)
                        tap(inputs + (before - kept + i) * channels, i);
                for (int64_t i = kept; i <= before; i++) tap(x + i * op.x_stride(), i);
                store_first(y + at, total, n);
            }
        }
        keep_inputs(op, row, inputs, lanes);
    }
    for (int64_t token = first_padding(op); token < op.tokens(); token++)
        std::memset(op.y() + token * channels + lanes.from, 0, bytes);
}

/* Numbers of a token that all columns of the matrices share: for each key head the
 * factors of its query and its key, and the product of the two; for each head, what is
 * kept of its matrix, and the strength of its change. */
struct DeltaFactors {
    float *query, *key, *product, *keep, *strength;

    static int64_t size(args::DeltaRule op) { return 3 * op.key_heads() + 2 * op.heads(); }
    DeltaFactors(args::DeltaRule op, const Worker &worker, int64_t token) {
        query = reinterpret_cast<float *>(worker.shared) + token * size(op);
        key = query + op.key_heads();
        product = key + op.key_heads();
        keep = product + op.key_heads();
        strength = keep + op.heads();
    }
};

int64_t delta_factors_tokens(args::DeltaRule op) {
    return rows_per_chunk(2 * op.key_heads() * op.key_width() + 32 * op.heads());
}

int64_t delta_factors_chunks(args::DeltaRule op) {
    return ceil_div(op.tokens(), delta_factors_tokens(op));
}

float dot_product(const float *a, const float *b, int64_t count) {
    F total = set(0.0f);
    for (int64_t at = 0; at < count; at += 16) {
        const int n = lanes_left(at, count);
        total = fma(load_first(a + at, n), load_first(b + at, n), total);
    }
    return sum(total);
}

void delta_factors_body(args::DeltaRule op, int64_t chunk, Worker &worker) {
    const Span tokens(chunk, delta_factors_tokens(op), op.tokens());
    const int64_t width = op.key_width(), heads = op.heads();
    const float scale = 1.0f / std::sqrt(float(width));
    const F zero = set(0.0f), fastest = set(3e38f);
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        const DeltaFactors to(op, worker, token);
        for (int64_t head = 0; head < op.key_heads(); head++) {
            const int64_t at = token * op.key_stride() + head * width;
            const float *q = op.q() + at, *k = op.k() + at;
            to.query[head] = scale / std::sqrt(sum_of_squares(q, width) + op.eps());
            to.key[head] = 1.0f / std::sqrt(sum_of_squares(k, width) + op.eps());
            to.product[head] =
                dot_product(q, k, width) * to.query[head] * to.key[head];
        }
        const float *a = op.a() + token * heads, *b = op.b() + token * heads;
        for (int64_t at = 0; at < heads; at += 16) {
            const int n = lanes_left(at, heads);
            const F rate = smaller(fastest, exponential(load_first(op.rate() + at, n)));
            const F time =
                softplus(add(load_first(a + at, n), load_first(op.shift() + at, n)));
            store_first(to.keep + at, exponential(sub(zero, mul(rate, time))), n);
            store_first(to.strength + at, sigmoid(load_first(b + at, n)), n);
        }
    }
}

/* Columns of a head's matrix that a chunk computes: they stay in the nearest cache. */
constexpr int64_t DELTA_VECTORS = 2, DELTA_COLUMNS = 16 * DELTA_VECTORS;

/* Rows of a matrix between two prefetches. */
constexpr int64_t DELTA_PREFETCH = 16;

struct DeltaStrip {
    float *matrix; /* first column of the strip */
    int64_t stride, rows;
    int lanes[DELTA_VECTORS];
};

/* What a token adds to the matrix: keep * S + outer(key, change). */
struct DeltaChange {
    const float *key;
    F keep, change[DELTA_VECTORS];
};

struct DeltaSums {
    F key[DELTA_VECTORS], query[DELTA_VECTORS];
};

/* Applies the change of the token before, and multiplies the key and the query of this
 * one with the result, in one pass over the strip. FULL: all lanes are in use. */
template <bool UPDATE, bool READ, bool FULL>
inline DeltaSums delta_pass(const DeltaStrip &strip, const DeltaChange &before,
                            const float *key, const float *query) {
    DeltaSums sums;
    F change[DELTA_VECTORS];
    for (int part = 0; part < DELTA_VECTORS; part++) {
        sums.key[part] = sums.query[part] = set(0.0f);
        if (UPDATE) change[part] = before.change[part];
    }
    const F keep = UPDATE ? before.keep : set(1.0f);
    const float *last = UPDATE ? before.key : nullptr;
    const int64_t rows = strip.rows, stride = strip.stride;
    float *place = strip.matrix;
    for (int64_t i = 0; i < rows; i++, place += stride) {
        /* The first pass over a matrix reads it from memory. */
        if (!UPDATE)
            for (int part = 0; part < DELTA_VECTORS; part++)
                __builtin_prefetch(place + DELTA_PREFETCH * stride + 16 * part, 1);
        const F added = set(UPDATE ? last[i] : 0.0f);
        const F k = set(READ ? key[i] : 0.0f), q = set(READ ? query[i] : 0.0f);
        for (int part = 0; part < DELTA_VECTORS; part++) {
            float *at = place + 16 * part;
            F s = FULL ? load(at) : load_first(at, strip.lanes[part]);
            if (UPDATE) {
                s = fma(added, change[part], mul(keep, s));
                if (FULL)
                    store(at, s);
                else
                    store_first(at, s, strip.lanes[part]);
            }
            if (READ) {
                sums.key[part] = fma(k, s, sums.key[part]);
                sums.query[part] = fma(q, s, sums.query[part]);
            }
        }
    }
    return sums;
}

int64_t delta_strips(args::DeltaRule op) { return ceil_div(op.width(), DELTA_COLUMNS); }

int64_t delta_rule_chunks(args::DeltaRule op) {
    return op.rows() * op.heads() * delta_strips(op);
}

Scratch delta_rule_scratch(args::DeltaRule op) {
    return {op.tokens() * DeltaFactors::size(op) * 4, 3 * op.key_width() * 4};
}

void scale_row(const float *x, float factor, float *y, int64_t width) {
    const F scale = set(factor);
    for (int64_t at = 0; at < width; at += 16) {
        const int n = lanes_left(at, width);
        store_first(y + at, mul(load_first(x + at, n), scale), n);
    }
}

template <bool FULL>
void delta_row(args::DeltaRule op, const DeltaStrip &strip, const RecurrentRow &row,
               int64_t head, int64_t column, Worker &worker) {
    const int64_t width = op.key_width(), key_heads = op.key_heads();
    const int64_t key_head =
        op.tiled() ? head % key_heads : head / (op.heads() / key_heads);
    float *keys[2] = {reinterpret_cast<float *>(worker.own)};
    keys[1] = keys[0] + width;
    float *query = keys[1] + width;
    DeltaChange last;
    for (int64_t token = row.start; token < row.stop; token++) {
        const DeltaFactors factors(op, worker, token);
        const int64_t at = token * op.key_stride() + key_head * width;
        float *key = keys[token & 1];
        scale_row(op.k() + at, factors.key[key_head], key, width);
        scale_row(op.q() + at, factors.query[key_head], query, width);
        const DeltaSums sums =
            token == row.start ? delta_pass<false, true, FULL>(strip, last, key, query)
                               : delta_pass<true, true, FULL>(strip, last, key, query);
        const float *v = op.v() + token * op.v_stride() + head * op.width() + column;
        float *y = op.y() + (token * op.heads() + head) * op.width() + column;
        last.key = key;
        last.keep = set(factors.keep[head]);
        for (int part = 0; part < DELTA_VECTORS; part++) {
            const int n = strip.lanes[part];
            const F kept = mul(last.keep, sums.key[part]);
            last.change[part] = mul(set(factors.strength[head]),
                                    sub(load_first(v + 16 * part, n), kept));
            store_first(y + 16 * part,
                        fma(set(factors.product[key_head]), last.change[part],
                            mul(last.keep, sums.query[part])),
                        n);
        }
    }
    delta_pass<true, false, FULL>(strip, last, nullptr, nullptr);
}

/* Whether one strip of a slot's matrix is zeros: slot 0 mostly is, and reading it is
 * faster than writing it. */
bool is_clear(const DeltaStrip &strip) {
    F total = set(0.0f);
    for (int64_t i = 0; i < strip.rows; i++)
        for (int part = 0; part < DELTA_VECTORS; part++)
            total = add(total, magnitude(load_first(
                                   strip.matrix + i * strip.stride + 16 * part,
                                   strip.lanes[part])));
    return sum(total) == 0.0f;
}

/* Zeros in one strip of a slot's matrix. */
void clear_strip(const DeltaStrip &strip) {
    for (int64_t i = 0; i < strip.rows; i++)
        for (int part = 0; part < DELTA_VECTORS; part++)
            store_first(strip.matrix + i * strip.stride + 16 * part, set(0.0f),
                        strip.lanes[part]);
}

void delta_rule_body(args::DeltaRule op, int64_t chunk, Worker &worker) {
    const int64_t number = chunk / delta_strips(op), head = number % op.heads();
    const int64_t column = chunk % delta_strips(op) * DELTA_COLUMNS;
    const int64_t size = op.key_width() * op.width();
    DeltaStrip strip{op.table() + head * size + column, op.width(), op.key_width(), {}};
    for (int part = 0; part < DELTA_VECTORS; part++) {
        const int left = lanes_left(column + 16 * part, op.width());
        strip.lanes[part] = left > 0 ? left : 0;
    }
    if (number < op.heads()) { /* of the first row: slot 0 and padding are zeros */
        if (!is_clear(strip)) clear_strip(strip);
        for (int64_t token = first_padding(op); token < op.tokens(); token++)
            for (int part = 0; part < DELTA_VECTORS; part++)
                store_first(op.y() + (token * op.heads() + head) * op.width() + column +
                                16 * part,
                            set(0.0f), strip.lanes[part]);
    }
    if (number / op.heads() >= used_rows(op)) return;
    const RecurrentRow row(op, number / op.heads());
    if (!row.count()) return;
    strip.matrix += row.slot * op.heads() * size;
    if (!row.continued) clear_strip(strip);
    if (strip.lanes[DELTA_VECTORS - 1] == 16)
        delta_row<true>(op, strip, row, head, column, worker);
    else
        delta_row<false>(op, strip, row, head, column, worker);
}

/* Numbers of a token that all columns of the matrices share: for each head, what is kept
 * of its matrix, and the step of time. */
struct SsmFactors {
    float *keep, *time;

    static int64_t size(args::SsmScan op) { return 2 * op.heads(); }
    SsmFactors(args::SsmScan op, const Worker &worker, int64_t token) {
        keep = reinterpret_cast<float *>(worker.shared) + token * size(op);
        time = keep + op.heads();
    }
};

int64_t ssm_factors_tokens(args::SsmScan op) { return rows_per_chunk(32 * op.heads()); }

int64_t ssm_factors_chunks(args::SsmScan op) {
    return ceil_div(op.tokens(), ssm_factors_tokens(op));
}

void ssm_factors_body(args::SsmScan op, int64_t chunk, Worker &worker) {
    const Span tokens(chunk, ssm_factors_tokens(op), op.tokens());
    const int64_t heads = op.heads();
    const F zero = set(0.0f), fastest = set(3e38f);
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        const SsmFactors to(op, worker, token);
        const float *dt = op.dt() + token * op.dt_stride();
        for (int64_t at = 0; at < heads; at += 16) {
            const int n = lanes_left(at, heads);
            const F rate = smaller(fastest, exponential(load_first(op.rate() + at, n)));
            const F time =
                softplus(add(load_first(dt + at, n), load_first(op.shift() + at, n)));
            store_first(to.keep + at, exponential(sub(zero, mul(rate, time))), n);
            store_first(to.time + at, time, n);
        }
    }
}

int64_t ssm_strips(args::SsmScan op) { return ceil_div(op.width(), DELTA_COLUMNS); }

int64_t ssm_scan_chunks(args::SsmScan op) {
    return op.rows() * op.heads() * ssm_strips(op);
}

Scratch ssm_scan_scratch(args::SsmScan op) {
    return {op.tokens() * SsmFactors::size(op) * 4, 0};
}

/* Tokens of one pass over a strip of a matrix. */
constexpr int SSM_TOKENS = 4;

/* A strip, and where its row, its head and its columns are in the operands. */
struct SsmStrip {
    DeltaStrip matrix;
    int64_t head, column, key;
};

/* Multiplies what a token adds to the results, beside the matrix. */
inline F ssm_skipped(args::SsmScan op, const SsmStrip &strip, int64_t token, int part) {
    const float *x = op.x() + token * op.x_stride() + strip.head * op.width();
    return mul(set(op.skip()[strip.head]), load_first(x + strip.column + 16 * part,
                                                      strip.matrix.lanes[part]));
}

inline void ssm_store(args::SsmScan op, const SsmStrip &strip, int64_t token, int part,
                      F value) {
    float *y = op.y() + (token * op.heads() + strip.head) * op.width() + strip.column;
    store_first(y + 16 * part, value, strip.matrix.lanes[part]);
}

/* Computes TOKENS tokens in one pass: each element of the matrix is read and written
 * once, with the operations of TOKENS passes. FULL: all lanes are in use. */
template <int TOKENS, bool FULL>
inline void ssm_pass(args::SsmScan op, const SsmStrip &strip, int64_t token,
                     Worker &worker) {
    F keep[TOKENS], change[TOKENS][DELTA_VECTORS], sums[TOKENS][DELTA_VECTORS];
    const float *keys[TOKENS], *queries[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        const SsmFactors factors(op, worker, token + t);
        const float *x = op.x() + (token + t) * op.x_stride() + strip.head * op.width();
        keep[t] = set(factors.keep[strip.head]);
        keys[t] = op.b() + (token + t) * op.key_stride() + strip.key;
        queries[t] = op.c() + (token + t) * op.key_stride() + strip.key;
        for (int part = 0; part < DELTA_VECTORS; part++) {
            change[t][part] = mul(set(factors.time[strip.head]),
                                  load_first(x + strip.column + 16 * part,
                                             strip.matrix.lanes[part]));
            sums[t][part] = set(0.0f);
        }
    }
    const int64_t rows = strip.matrix.rows, stride = strip.matrix.stride;
    float *place = strip.matrix.matrix;
    for (int64_t i = 0; i < rows; i++, place += stride)
        for (int part = 0; part < DELTA_VECTORS; part++) {
            float *at = place + 16 * part;
            const int lanes = strip.matrix.lanes[part];
            __builtin_prefetch(at + DELTA_PREFETCH * stride, 1);
            F s = FULL ? load(at) : load_first(at, lanes);
            for (int t = 0; t < TOKENS; t++) {
                s = fma(set(keys[t][i]), change[t][part], mul(keep[t], s));
                sums[t][part] = fma(set(queries[t][i]), s, sums[t][part]);
            }
            if (FULL)
                store(at, s);
            else
                store_first(at, s, lanes);
        }
    for (int t = 0; t < TOKENS; t++)
        for (int part = 0; part < DELTA_VECTORS; part++)
            ssm_store(op, strip, token + t, part,
                      add(sums[t][part], ssm_skipped(op, strip, token + t, part)));
}

template <bool FULL>
void ssm_row(args::SsmScan op, const SsmStrip &strip, const RecurrentRow &row,
             Worker &worker) {
    int64_t token = row.start;
    for (; token + SSM_TOKENS <= row.stop; token += SSM_TOKENS)
        ssm_pass<SSM_TOKENS, FULL>(op, strip, token, worker);
    for (; token < row.stop; token++) ssm_pass<1, FULL>(op, strip, token, worker);
}

void ssm_scan_body(args::SsmScan op, int64_t chunk, Worker &worker) {
    const int64_t number = chunk / ssm_strips(op), head = number % op.heads();
    const int64_t column = chunk % ssm_strips(op) * DELTA_COLUMNS;
    const int64_t size = op.key_width() * op.width();
    const int64_t group = head / (op.heads() / op.groups());
    SsmStrip strip{
        {op.table() + head * size + column, op.width(), op.key_width(), {}},
        head, column, group * op.key_width()};
    for (int part = 0; part < DELTA_VECTORS; part++) {
        const int left = lanes_left(column + 16 * part, op.width());
        strip.matrix.lanes[part] = left > 0 ? left : 0;
    }
    if (number < op.heads()) { /* of the first row: slot 0 and padding */
        if (!is_clear(strip.matrix)) clear_strip(strip.matrix);
        for (int64_t token = first_padding(op); token < op.tokens(); token++)
            for (int part = 0; part < DELTA_VECTORS; part++)
                ssm_store(op, strip, token, part, ssm_skipped(op, strip, token, part));
    }
    if (number / op.heads() >= used_rows(op)) return;
    const RecurrentRow row(op, number / op.heads());
    if (!row.count()) return;
    strip.matrix.matrix += row.slot * op.heads() * size;
    if (!row.continued) clear_strip(strip.matrix);
    if (strip.matrix.lanes[DELTA_VECTORS - 1] == 16)
        ssm_row<true>(op, strip, row, worker);
    else
        ssm_row<false>(op, strip, row, worker);
}

} // namespace
} // namespace inl
