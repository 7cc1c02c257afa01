/* Normalization and rotary position embedding. */
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Uses four independent accumulators to hide latency. */
float sum_of_squares(const float *x, int64_t width) {
    F sums[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
    int64_t at = 0;
    for (; at + 64 <= width; at += 64)
        for (int part = 0; part < 4; part++) {
            const F value = load(x + at + 16 * part);
            sums[part] = fma(value, value, sums[part]);
        }
    for (; at < width; at += 16) {
        const F value = load_first(x + at, lanes_left(at, width));
        sums[0] = fma(value, value, sums[0]);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

/* 1 / sqrt(mean of squares + eps). */
float norm_factor(const float *x, int64_t width, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
}

/* weight may be NULL. */
void normalize(const float *x, const float *weight, float *y, int64_t width, float eps,
               bool plus_one) {
    const F factor = set(norm_factor(x, width, eps)),
            shift = set(plus_one ? 1.0f : 0.0f);
    for (int64_t at = 0; at < width; at += 16) {
        const int n = lanes_left(at, width);
        F value = mul(load_first(x + at, n), factor);
        if (weight != nullptr)
            value = mul(value, add(load_first(weight + at, n), shift));
        store_first(y + at, value, n);
    }
}

void add_rows(const float *a, const float *b, float *y, int64_t width) {
    for (int64_t at = 0; at < width; at += 16) {
        const int n = lanes_left(at, width);
        store_first(y + at, add(load_first(a + at, n), load_first(b + at, n)), n);
    }
}

void rms_norm_body(args::RmsNorm op, int64_t chunk, Worker &) {
    const int64_t width = op.head_width();
    const Span rows = head_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < op.heads(); head++)
            normalize(op.x() + row * op.x_stride() + head * width, op.weight(),
                      op.y() + row * op.y_stride() + head * width, width, op.eps(),
                      op.flags() & INL_PLUS_ONE);
}

void add_norm_body(args::AddNorm op, int64_t chunk, Worker &) {
    const int64_t width = op.width();
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const int64_t at = row * width;
        float *total = op.sum() + at;
        add_rows(op.residual() + at, op.delta() + at, total, width);
        normalize(total, op.weight(), op.y() + at, width, op.eps(),
                  op.flags() & INL_PLUS_ONE);
    }
}

/* The sum of one row, or of its squared distances from ``middle``. */
template <bool SQUARED>
float sum_of_row(const float *x, int64_t width, float middle) {
    const F center = set(middle);
    F sums[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
    int64_t at = 0;
    for (; at + 64 <= width; at += 64)
        for (int part = 0; part < 4; part++) {
            const F value = load(x + at + 16 * part), far = sub(value, center);
            sums[part] = SQUARED ? fma(far, far, sums[part]) : add(sums[part], value);
        }
    for (; at < width; at += 16) {
        const int n = lanes_left(at, width);
        const F value = load_first(x + at, n);
        const F far = between(sub(value, center), 0, n, set(0.0f));
        sums[0] = SQUARED ? fma(far, far, sums[0]) : add(sums[0], value);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

void layer_norm_body(args::LayerNorm op, int64_t chunk, Worker &) {
    const int64_t width = op.width();
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const float *x = op.x() + row * width;
        float *y = op.y() + row * width;
        if (op.delta() != nullptr) {
            add_rows(x, op.delta() + row * width, y, width);
            x = y;
        }
        const float mean = sum_of_row<false>(x, width, 0) / float(width);
        const float variance = sum_of_row<true>(x, width, mean) / float(width);
        const F factor = set(1.0f / std::sqrt(variance + op.eps())), center = set(mean);
        for (int64_t at = 0; at < width; at += 16) {
            const int n = lanes_left(at, width);
            F value = mul(sub(load_first(x + at, n), center), factor);
            value = mul(value, load_first(op.weight() + at, n));
            if (op.bias() != nullptr) value = add(value, load_first(op.bias() + at, n));
            store_first(y + at, value, n);
        }
    }
}

/* Rotate one head; y may be x. */
void rotate(const float *x, const float *cos, const float *sin, float *y,
            int64_t width) {
    const int64_t half = width / 2;
    for (int64_t at = 0; at < half; at += 16) {
        const int n = lanes_left(at, half);
        const F a = load_first(x + at, n), b = load_first(x + half + at, n);
        const F c = load_first(cos + at, n), s = load_first(sin + at, n);
        store_first(y + at, sub(mul(a, c), mul(b, s)), n);
        store_first(y + half + at, add(mul(b, c), mul(a, s)), n);
    }
}

void rope_body(args::Rope op, int64_t chunk, Worker &) {
    const int64_t width = op.head_width();
    const Span rows = head_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < op.heads(); head++)
            rotate(op.x() + row * op.x_stride() + head * width,
                   op.cos() + row * (width / 2), op.sin() + row * (width / 2),
                   op.y() + row * op.y_stride() + head * width, width);
}

/* Computing a cosine costs about as much as 32 elementwise operations. */
int64_t rope_table_rows(args::RopeTable op) {
    return ceil_div(rows_per_chunk(op.pairs()), 32);
}

int64_t rope_table_chunks(args::RopeTable op) {
    return ceil_div(op.tokens(), rope_table_rows(op));
}

void rope_table_body(args::RopeTable op, int64_t chunk, Worker &) {
    const int64_t count = op.pairs();
    const Span rows(chunk, rope_table_rows(op), op.tokens());
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t at = 0; at < count; at++) {
            const double angle = op.positions()[row] * op.rates()[at];
            const double factor = at < op.scaled_pairs() ? op.factor() : 1.0;
            op.cos()[row * count + at] = float(std::cos(angle) * factor);
            op.sin()[row * count + at] = float(std::sin(angle) * factor);
        }
}

} // namespace
} // namespace inl
