/* Low-rank adapters of a linear layer: each row reads the matrices of its own only. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/span.h"
#include "runtime/instructions.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* First column of the adapter that a row selects, -1 without one. */
inline int64_t lora_column(args::Lora op, int64_t row) {
    const float *selected = op.selected() + row * op.columns();
    for (int64_t at = 0; at < op.columns(); at += op.rank())
        if (selected[at] != 0.0f) return at;
    return -1;
}

inline F lora_dot(const float *a, const float *b, int64_t count) {
    F total = set(0.0f);
    for (int64_t at = 0; at < count; at += 16) {
        const int n = lanes_left(at, count);
        total = fma(load_first(a + at, n), load_first(b + at, n), total);
    }
    return total;
}

int64_t lora_inner_chunks(args::Lora op) { return op.rows(); }

Scratch lora_scratch(args::Lora op) { return {op.rows() * op.rank() * 4, 0}; }

/* A x of one row, to the common scratch. */
void lora_inner_body(args::Lora op, int64_t row, Worker &worker) {
    const int64_t column = lora_column(op, row);
    if (column < 0) return;
    const float *x = op.x() + row * op.x_stride();
    float *inner = reinterpret_cast<float *>(worker.shared) + row * op.rank();
    for (int64_t at = 0; at < op.rank(); at++)
        inner[at] =
            sum(lora_dot(op.a() + (column + at) * op.inner(), x, op.inner()));
}

void lora_body(args::Lora op, int64_t chunk, Worker &worker) {
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const float *base = op.base() + row * op.base_stride();
        float *y = op.y() + row * op.width();
        const int64_t column = lora_column(op, row);
        if (column < 0) {
            std::memcpy(y, base, size_t(op.width()) * 4);
            continue;
        }
        const float *inner =
            reinterpret_cast<const float *>(worker.shared) + row * op.rank();
        const float *b = op.b() + column;
        for (int64_t at = 0; at < op.width(); at++)
            y[at] =
                base[at] + sum(lora_dot(b + at * op.columns(), inner, op.rank()));
    }
}

} // namespace
} // namespace inl
