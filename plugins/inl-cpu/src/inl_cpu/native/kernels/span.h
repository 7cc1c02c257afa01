/* Division of rows and elements into chunks. */
#pragma once

#include <cstdint>

#include "runtime/operation.h"

namespace inl {
namespace {

/* Elements of a chunk of an elementwise operation. */
constexpr int64_t SPAN = 8192;

/* The range of chunk number ``chunk``, of chunks of ``size`` out of ``count``. */
struct Span {
    int64_t from, to;
    Span(int64_t chunk, int64_t size, int64_t count)
        : from(chunk * size), to(from + size < count ? from + size : count) {}
    int64_t count() const { return to - from; }
};

/* Lanes in use of the vector that begins at ``at``. */
inline int lanes_left(int64_t at, int64_t end) {
    return end - at < 16 ? int(end - at) : 16;
}

/* Rows of a chunk, so that it has about SPAN elements. */
inline int64_t rows_per_chunk(int64_t width) {
    return width < SPAN ? SPAN / (width ? width : 1) : 1;
}

template <class Op>
int64_t span_chunks(Op op) {
    return ceil_div(op.count(), SPAN);
}

template <class Op>
int64_t row_chunks(Op op) {
    return ceil_div(op.rows(), rows_per_chunk(op.width()));
}

template <class Op>
int64_t head_chunks(Op op) {
    return ceil_div(op.rows(), rows_per_chunk(op.heads() * op.head_width()));
}

template <class Op>
Span row_span(Op op, int64_t chunk) {
    return Span(chunk, rows_per_chunk(op.width()), op.rows());
}

template <class Op>
Span head_span(Op op, int64_t chunk) {
    return Span(chunk, rows_per_chunk(op.heads() * op.head_width()), op.rows());
}

} // namespace
} // namespace inl
