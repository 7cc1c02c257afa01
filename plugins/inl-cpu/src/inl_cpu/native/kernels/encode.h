/* Encoding of rows of x for the product kernels.
 *
 * Rows are divided into tiles of MAX_TILE_ROWS, 8, 4, 2 or 1. In a tile of R rows, a
 * kernel broadcasts 4-byte words from one pointer: a float32 of one column or two
 * bfloat16 of two, as [step][R], or int8 as [group][R][columns of a group]. For
 * quantized weights they are followed by arrays float32 or int32 [group][R], depending
 * on the mode.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/norm_rope.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "simd/simd.h"

namespace inl {
namespace {

struct RowTile {
    int64_t start;
    int rows;
};

inline int tile_rows(int64_t left) {
    if (left >= MAX_TILE_ROWS) return MAX_TILE_ROWS;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* The tile that contains a row. */
RowTile tile_with(int64_t row, int64_t rows) {
    int64_t start = row / MAX_TILE_ROWS * MAX_TILE_ROWS;
    if (start + MAX_TILE_ROWS <= rows) return {start, MAX_TILE_ROWS};
    while (start + tile_rows(rows - start) <= row) start += tile_rows(rows - start);
    return {start, tile_rows(rows - start)};
}

/* Sizes of the parts of an encoded row. */
struct RowShape {
    int mode, planes;
    int64_t columns, group, groups, words; /* words of one plane */

    RowShape(const inl_matrix &m, int32_t flags)
        : mode(flags & INL_X_MASK),
          planes(mode == INL_X_INT8 || mode == INL_X_INT16 ? 2 : 1), columns(m.columns),
          group(is_quantized(m) ? m.group : 0), groups(group ? columns / group : 0) {
        words = mode == INL_X_EXACT ? columns
                                    : ceil_div(columns, mode == INL_X_BF16 ? 2 : 4);
    }
    bool is_integer() const { return mode == INL_X_INT8 || mode == INL_X_INT16; }
    /* Arrays of a group: scale, initial accumulator and sum; in exact mode the float32
     * sum only. int8 adds the initial accumulator of the second plane, and whether the
     * tile has that plane. */
    int64_t extras() const {
        return mode == INL_X_INT8 ? 5 : is_integer() ? 3 : groups ? 1 : 0;
    }
    int64_t bytes() const { return aligned(4 * (planes * words + extras() * groups)); }
};

/* Arrays of an encoded tile at ``base``; FIXED is its number of rows, if known. */
template <int FIXED = 0>
struct TileView {
    char *base;
    const RowShape &shape;
    int rows;

    int count() const { return FIXED ? FIXED : rows; }
    uint32_t *words(int plane) const {
        return reinterpret_cast<uint32_t *>(base) + plane * shape.words * count();
    }
    /* Codes of all rows of a group. */
    int8_t *codes(int plane, int64_t group) const {
        return reinterpret_cast<int8_t *>(words(plane)) + group * shape.group * count();
    }
    float *extra(int index) const {
        return reinterpret_cast<float *>(base) +
               (shape.planes * shape.words + index * shape.groups) * count();
    }
};

/* Ranges of columns begin at multiples of this. */
constexpr int64_t ENCODE_COLUMNS = 32;

void encode_exact(const float *x, const TileView<> &view, int at, Span columns) {
    const RowShape &shape = view.shape;
    float *words = reinterpret_cast<float *>(view.words(0));
    for (int64_t k = columns.from; k < columns.to; k++)
        words[k * view.rows + at] = x[k];
    if (shape.groups == 0) return;
    for (int64_t g = columns.from / shape.group; g * shape.group < columns.to; g++) {
        F total = load(x + g * shape.group);
        if (shape.group == 32) total = add(total, load(x + g * 32 + 16));
        view.extra(0)[g * view.rows + at] = sum(total);
    }
}

void encode_bf16(const float *x, const TileView<> &view, int at, Span columns) {
    uint32_t *words = view.words(0);
    const int64_t last = columns.to - 1;
    for (int64_t k = columns.from; k < last; k += 2)
        words[k / 2 * view.rows + at] =
            float_to_bf16(x[k]) | uint32_t(float_to_bf16(x[k + 1])) << 16;
    if (last >= columns.from && last % 2 == 0)
        words[last / 2 * view.rows + at] = float_to_bf16(x[last]);
}

/* The largest magnitude of a group; infinite if it contains a NaN. */
template <int GROUP>
inline float group_magnitude(const float *x) {
    const F infinite = set(INFINITY);
    F most = set(0.0f);
    for (int k = 0; k < GROUP; k += 16) {
        const F size = magnitude(load(x + k));
        most = larger(most, where_below(size, infinite, size, infinite));
    }
    return largest(most);
}

/* Sums of the codes of a group, in each plane. */
struct CodeSums {
    float upper, lower;
};

/* Encode a group in 15 bits, or in 8 bits without the lower plane. */
template <bool PLANES, int GROUP>
inline CodeSums encode_group(const float *x, int8_t *upper, int8_t *lower, float scale,
                             float lift) {
    I uppers = zeros();
    F lowers = set(0.0f);
    for (int k = 0; k < GROUP; k += 16) {
        const F value = mul(mul(load(x + k), set(lift)), set(scale));
        I high;
        if (PLANES) {
            const F whole = to_float(nearest(mul(value, set(128.0f))));
            high = nearest(mul(whole, set(1.0f / 128)));
            const F rest = fma(to_float(high), set(-128.0f), whole);
            store_bytes(lower + k, nearest(rest));
            lowers = add(lowers, rest);
        } else {
            high = nearest(value);
        }
        store_bytes(upper + k, high);
        uppers = add(uppers, high);
    }
    return {sum(to_float(uppers)), PLANES ? sum(lowers) : 0.0f};
}

/* Groups with outliers account for most of the error of 8-bit codes: a group whose
 * magnitude exceeds this multiple of the row's root mean square has a second plane. */
constexpr float OUTLIER = 8.0f;

/* Pointers to one row of a tile, at its first column. */
struct RowView {
    int64_t rows;
    int8_t *upper, *lower;
    float *scales, *shifts;
    int32_t *starts, *seconds, *flags; /* flags are per tile */

    RowView(const TileView<> &view, int at, int64_t group)
        : rows(view.rows), upper(view.codes(0, group) + at * view.shape.group),
          lower(view.codes(1, group) + at * view.shape.group),
          scales(view.extra(0) + group * rows + at),
          shifts(view.extra(2) + group * rows + at),
          starts(reinterpret_cast<int32_t *>(view.extra(1)) + group * rows + at),
          seconds(reinterpret_cast<int32_t *>(view.extra(3)) + group * rows + at),
          flags(reinterpret_cast<int32_t *>(view.extra(4)) + group * rows) {}
};

/* Initialize the lower plane of a group: only groups in which some row has outliers
 * have one; it is zero for the other rows. */
template <int GROUP>
void begin_lower(const RowView &row, int at) {
    *row.flags = 1;
    std::memset(row.lower - at * GROUP, 0, size_t(GROUP * row.rows));
    std::memset(row.seconds - at, 0, size_t(4 * row.rows));
}

template <bool SECOND, int GROUP>
void encode_integer(const float *x, const TileView<> &view, int at, int zero,
                    Span columns) {
    const float outlier =
        SECOND ? 0.0f
               : OUTLIER * std::sqrt(sum_of_squares(x, view.shape.columns) /
                                     float(view.shape.columns));
    RowView row(view, at, columns.from / GROUP);
    const int64_t rows = row.rows;
    for (int64_t k = columns.from; k < columns.to; k += GROUP) {
        const float size = group_magnitude<GROUP>(x + k);
        /* Scale up tiny numbers, whose reciprocal would be infinite. */
        const float lift = size < 1e-30f ? 0x1p100f : 1.0f;
        const float inverse = size > 0 ? 127.0f / (size * lift) : 0.0f;
        /* NaN and infinity give an infinite magnitude and codes with arbitrary sums. */
        const int sign = size < INFINITY ? -zero : 0;
        if (!SECOND && at == 0) *row.flags = 0;
        if (SECOND || size > outlier) {
            if (!SECOND && *row.flags == 0) begin_lower<GROUP>(row, at);
            const CodeSums sums =
                encode_group<true, GROUP>(x + k, row.upper, row.lower, inverse, lift);
            const float both = sums.upper + sums.lower * (1.0f / 128);
            *row.scales = size / (SECOND ? 127.0f * 128 : 127.0f);
            *row.starts = sign * int32_t(SECOND ? 128 * both : sums.upper);
            if (!SECOND) *row.seconds = sign * int32_t(sums.lower);
            *row.shifts = size / 127.0f * both;
        } else {
            const CodeSums sums =
                encode_group<false, GROUP>(x + k, row.upper, row.lower, inverse, lift);
            *row.scales = size / 127.0f;
            *row.starts = sign * int32_t(sums.upper);
            *row.shifts = size / 127.0f * sums.upper;
        }
        row.upper += GROUP * rows, row.lower += GROUP * rows;
        row.scales += rows, row.shifts += rows;
        row.starts += rows, row.seconds += rows, row.flags += rows;
    }
}

template <bool SECOND>
void encode_groups(const float *x, const TileView<> &view, int at, int zero,
                   Span columns) {
    if (view.shape.group == 16)
        return encode_integer<SECOND, 16>(x, view, at, zero, columns);
    encode_integer<SECOND, 32>(x, view, at, zero, columns);
}

/* Encode columns of row x as row ``at`` of the tile. */
void encode(const float *x, const TileView<> &view, int at, int zero, Span columns) {
    switch (view.shape.mode) {
    case INL_X_EXACT: return encode_exact(x, view, at, columns);
    case INL_X_BF16: return encode_bf16(x, view, at, columns);
    case INL_X_INT8: return encode_groups<false>(x, view, at, zero, columns);
    default: return encode_groups<true>(x, view, at, zero, columns);
    }
}

} // namespace
} // namespace inl
