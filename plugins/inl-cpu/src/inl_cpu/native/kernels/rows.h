/* Elementwise operations, row copies and the memory bandwidth probe. */
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

void zero_body(args::Zero op, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, op.count());
    std::memset(op.y() + span.from, 0, size_t(span.count()) * 4);
}

struct Sum {
    F operator()(F a, F b) const { return add(a, b); }
};
struct Difference {
    F operator()(F a, F b) const { return sub(a, b); }
};
struct Product {
    F operator()(F a, F b) const { return mul(a, b); }
};

template <class Op, class Combine>
void combine_body(Op op, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, op.count());
    const float *a = op.a(), *b = op.b();
    float *y = op.y();
    const Combine combine;
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        store_first(y + at, combine(load_first(a + at, n), load_first(b + at, n)), n);
    }
}

void scale_body(args::Scale op, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, op.count());
    const float *x = op.x();
    float *y = op.y();
    const F factor = set(op.factor()), offset = set(op.offset());
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        store_first(y + at, add(mul(load_first(x + at, n), factor), offset), n);
    }
}

/* x times the normal distribution function, accurate to 2.4e-7 absolute and 6e-7
 * relative for |x| < 4. The tail below -|x| is e^(-x^2 / 2) times a polynomial of
 * t = 1 / (1 + 0.2475 |x|), fitted to the scaled complementary error function. */
inline F gelu(F x) {
    const F near = smaller(set(20.0f), larger(set(-20.0f), x)); /* no 0 * infinity */
    const F size = magnitude(near), one = set(1.0f), zero = set(0.0f);
    const F t = quotient(one, fma(set(0.247487373f), size, one));
    F p = set(0.0203045476f);
    p = fma(p, t, set(-0.0855869874f));
    p = fma(p, t, set(0.105460778f));
    p = fma(p, t, set(-0.0339909233f));
    p = fma(p, t, set(0.0607172176f));
    p = fma(p, t, set(0.0635095164f));
    p = fma(p, t, set(0.0789873004f));
    p = fma(p, t, set(0.0931985527f));
    p = fma(p, t, set(0.0986631364f));
    p = fma(p, t, set(0.0987368673f));
    const F tail = mul(mul(p, t), exponential(mul(mul(near, near), set(-0.5f))));
    const F far = mul(near, tail);
    return where_below(x, zero, far, sub(x, far));
}

/* The kinds of the op ``activate``, in its order; larger() returns its second argument
 * where one is NaN. */
inline F activated(F x, int64_t kind) {
    switch (kind) {
    case 0: return silu(x);
    case 1: return gelu_tanh(x);
    case 2: return gelu(x);
    case 3: return mul(x, sigmoid(mul(set(1.702f), x)));
    case 4: return larger(set(0.0f), x);
    case 5: return mul(x, larger(set(0.0f), x));
    case 6: return sigmoid(x);
    default: return hyperbolic_tangent(x);
    }
}

void activate_body(args::Activate op, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, op.count());
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        store_first(op.y() + at, activated(load_first(op.x() + at, n), op.kind()), n);
    }
}

void copy_body(args::Copy op, int64_t chunk, Worker &) {
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++)
        std::memmove(op.y() + row * op.y_stride(), op.x() + row * op.x_stride(),
                     size_t(op.width()) * 4);
}

void take_rows_body(args::TakeRows op, int64_t chunk, Worker &) {
    const Span rows = row_span(op, chunk);
    const size_t bytes = size_t(op.width()) * 4;
    for (int64_t row = rows.from; row < rows.to; row++) {
        const int64_t source = op.index()[row];
        float *y = op.y() + row * op.width();
        if (source < 0 || source >= op.x_rows())
            std::memset(y, 0, bytes);
        else
            std::memcpy(y, op.x() + source * op.x_stride(), bytes);
    }
}

void gated_body(args::Gated op, int64_t chunk, Worker &) {
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const float *gate = op.gate() + row * op.gate_stride();
        const float *up = op.up() + row * op.up_stride();
        float *y = op.y() + row * op.y_stride();
        for (int64_t at = 0; at < op.width(); at += 16) {
            const int n = lanes_left(at, op.width());
            const F value = activation(load_first(gate + at, n), op.flags());
            store_first(y + at, mul(value, load_first(up + at, n)), n);
        }
    }
}

/* 64-bit words of a chunk of INL_READ. */
constexpr int64_t READ_WORDS = 1 << 17;

int64_t read_chunks(args::Read op) { return ceil_div(op.bytes() / 8, READ_WORDS); }

Scratch read_scratch(args::Read op) { return {read_chunks(op) * 8, 0}; }

void read_body(args::Read op, int64_t chunk, Worker &worker) {
    const Span words(chunk, READ_WORDS, op.bytes() / 8);
    I total = zeros();
    for (int64_t at = words.from; at < words.to; at += 8)
        total = add(total, load_ints(op.x() + at * 8));
    int32_t lanes[16];
    std::memcpy(lanes, &total, 64);
    uint64_t sum = 0;
    for (int lane = 0; lane < 16; lane++) sum += uint32_t(lanes[lane]);
    reinterpret_cast<uint64_t *>(worker.shared)[chunk] = sum;
}

int64_t read_total_chunks(args::Read) { return 1; }

void read_total_body(args::Read op, int64_t, Worker &worker) {
    uint64_t total = 0;
    for (int64_t chunk = 0; chunk < read_chunks(op); chunk++)
        total += reinterpret_cast<uint64_t *>(worker.shared)[chunk];
    *op.y() = total;
}

} // namespace
} // namespace inl
