/* Product of a weight tile and a row tile: sums[r] gets 16 columns of row r of y.
 *
 * One template for every number of rows, so that results of a row do not depend on it.
 * Sums run over a group, or over 32 columns, before they are added to the total: the
 * dependency chains of groups are independent, which hides latency, and rounding errors
 * grow more slowly.
 */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/encode.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "simd/simd.h"

namespace inl {
namespace {

inline F scale_at(const inl_matrix &m, const char *p) {
    if (m.scale == INL_F16) return load_half(reinterpret_cast<const uint16_t *>(p));
    return load(reinterpret_cast<const float *>(p));
}

inline const char *offset_at(const inl_matrix &m, const char *scales) {
    return scales + (m.scale == INL_F16 ? 32 : 64);
}

/* Prefetch weights ahead of those that R rows are multiplied with, into the L2 cache.
 * With few rows memory bandwidth is the limit and the hardware prefetcher suffices,
 * except at page boundaries: more prefetches would fill its queue. With many rows the
 * core reads too slowly for the hardware prefetcher, so every line is prefetched. */
template <int R>
inline void prefetch(const char *p, int64_t bytes) {
    constexpr int64_t AHEAD = R <= 4 ? 3072 : 8192, STEP = R <= 4 ? 512 : 64;
    for (int64_t at = 0; at < bytes; at += STEP)
        __builtin_prefetch(p + AHEAD + at, 0, 2);
}

template <bool NARROW, int R, int GROUP>
inline void integer_group(const char *codes, const int8_t *x, I *sums) {
    const I low_half = set_int(0x0f0f0f0f);
    const auto four = [x](int row, int step) {
        int32_t word;
        std::memcpy(&word, x + row * GROUP + 4 * step, 4);
        return word;
    };
#pragma GCC unroll 8
    for (int step = 0; step < GROUP / (NARROW ? 8 : 4); step++) {
        const I w = load_ints(codes + 64 * step);
        if (NARROW) {
            const I low = bit_and(w, low_half);
            const I high = bit_and(shift_right(w, 4), low_half);
            for (int r = 0; r < R; r++)
                sums[r] = dot4<true>(sums[r], low, four(r, 2 * step));
            for (int r = 0; r < R; r++)
                sums[r] = dot4<true>(sums[r], high, four(r, 2 * step + 1));
        } else {
            for (int r = 0; r < R; r++)
                sums[r] = dot4<false>(sums[r], w, four(r, step));
        }
    }
}

/* PLANES: 2, or 1 with a second plane for groups with outliers. A row whose second
 * plane is zero gets the same result as with one plane: division by 128 is exact. */
template <bool NARROW, int R, int GROUP, int PLANES>
void integer_tile(const inl_matrix &m, const char *tile, const TileView<R> &x,
                  F *sums) {
    F totals[R];
    for (int r = 0; r < R; r++) totals[r] = set(0.0f);
    const int64_t codes = code_bytes(m), stride = group_bytes(m);
    const float *scales = x.extra(0), *shifts = x.extra(2);
    const int32_t *starts = reinterpret_cast<const int32_t *>(x.extra(1));
    const int32_t *seconds = nullptr, *flags = nullptr;
    if (PLANES == 1) {
        seconds = reinterpret_cast<const int32_t *>(x.extra(3));
        flags = reinterpret_cast<const int32_t *>(x.extra(4));
    }
    for (int64_t g = 0; g < x.shape.groups; g++, tile += stride) {
        prefetch<R>(tile, stride);
        I group[R];
        for (int r = 0; r < R; r++)
            group[r] = PLANES == 2 ? zeros() : set_int(starts[g * R + r]);
        integer_group<NARROW, R, GROUP>(tile, x.codes(0, g), group);
        F scale = scale_at(m, tile + codes);
        const F offset = m.offsets ? scale_at(m, offset_at(m, tile + codes)) : scale;
        if (PLANES == 2 || flags[g * R] != 0) {
            const int32_t *begin = PLANES == 2 ? starts : seconds;
            for (int r = 0; r < R; r++)
                group[r] = add(shift_left(group[r], 7), set_int(begin[g * R + r]));
            integer_group<NARROW, R, GROUP>(tile, x.codes(1, g), group);
            if (PLANES == 1) scale = mul(scale, set(1.0f / 128));
        }
        for (int r = 0; r < R; r++)
            totals[r] =
                fma(to_float(group[r]), mul(scale, set(scales[g * R + r])), totals[r]);
        if (!m.offsets) continue;
        for (int r = 0; r < R; r++)
            totals[r] = fma(offset, set(shifts[g * R + r]), totals[r]);
    }
    for (int r = 0; r < R; r++) sums[r] = totals[r];
}

template <bool NARROW, int R, int GROUP>
inline void exact_group(const char *tile, const Codes &codes, const float *x, F *sums) {
    constexpr int STEP = NARROW ? 8 : 4, BITS = NARROW ? 4 : 8;
    for (int step = 0; step < GROUP / STEP; step++) {
        const I w = load_ints(tile + 64 * step);
        for (int k = 0; k < STEP; k++) {
            /* Byte j of a narrow step has column j in its low half, 4 + j in its high
             * half. */
            const int shift = NARROW ? k % 4 * 8 + k / 4 * BITS : k * BITS;
            const F value = NARROW ? codes.nibble(w, shift) : codes.byte(w, shift);
            for (int r = 0; r < R; r++)
                sums[r] = fma(value, set(x[(step * STEP + k) * R + r]), sums[r]);
        }
    }
}

/* Codes are taken relative to their middle, because offsets are usually near -middle *
 * scale: two sums that cancel would lose digits. */
template <bool NARROW, int R, int GROUP>
void exact_tile(const inl_matrix &m, const char *tile, const TileView<R> &x, F *sums) {
    const int middle = m.offsets ? m.middle : m.zero;
    const Codes codes(middle);
    F totals[R];
    for (int r = 0; r < R; r++) totals[r] = set(0.0f);
    const int64_t size = code_bytes(m), stride = group_bytes(m);
    const float *words = reinterpret_cast<const float *>(x.words(0)),
                *group_sums = x.extra(0);
    for (int64_t g = 0; g < x.shape.groups; g++, tile += stride) {
        prefetch<R>(tile, stride);
        F group[R];
        for (int r = 0; r < R; r++) group[r] = set(0.0f);
        exact_group<NARROW, R, GROUP>(tile, codes, words + g * GROUP * R, group);
        const F scale = scale_at(m, tile + size);
        for (int r = 0; r < R; r++) totals[r] = fma(group[r], scale, totals[r]);
        if (!m.offsets) continue;
        const F offset = fma(set(float(middle - m.zero)), scale,
                             scale_at(m, offset_at(m, tile + size)));
        for (int r = 0; r < R; r++)
            totals[r] = fma(offset, set(group_sums[g * R + r]), totals[r]);
    }
    for (int r = 0; r < R; r++) sums[r] = totals[r];
}

/* One step of plain weights: a column of float32 or two of bfloat16. multiply_add adds
 * the products with the words x of R rows to the sums. */
struct Single {
    static constexpr int COLUMNS = 1;
    template <int R>
    static void multiply_add(const char *p, const uint32_t *x, F *sums) {
        const F w = load(reinterpret_cast<const float *>(p));
        for (int r = 0; r < R; r++) sums[r] = fma(w, set(float_of(x[r])), sums[r]);
    }
};

struct ExactPair {
    static constexpr int COLUMNS = 2;
    template <int R>
    static void multiply_add(const char *p, const uint32_t *x, F *sums) {
        const I pair = load_ints(p);
        const F first = as_float(shift_left(pair, 16));
        const F second = as_float(bit_and(pair, set_int(int(0xffff0000))));
        for (int r = 0; r < R; r++) sums[r] = fma(first, set(float_of(x[r])), sums[r]);
        for (int r = 0; r < R; r++)
            sums[r] = fma(second, set(float_of(x[R + r])), sums[r]);
    }
};

struct NarrowPair {
    static constexpr int COLUMNS = 1; /* words of x, of two columns each */
    template <int R>
    static void multiply_add(const char *p, const uint32_t *x, F *sums) {
        const I pair = load_ints(p);
        for (int r = 0; r < R; r++) sums[r] = dot2(sums[r], pair, x[r]);
    }
};

/* An odd last column of bfloat16: its pair in the matrix is zero, and x has none. */
template <int R>
void odd_column(const char *p, const uint32_t *x, F *sums) {
    const F w = as_float(shift_left(load_ints(p), 16));
    for (int r = 0; r < R; r++) sums[r] = fma(w, set(float_of(x[r])), sums[r]);
}

template <class Step, int R>
void plain_tile(const inl_matrix &, const char *tile, const TileView<R> &x, F *sums) {
    constexpr int64_t RUN = 32 / Step::COLUMNS;
    const int64_t steps = x.shape.words / Step::COLUMNS;
    const uint32_t *words = x.words(0);
    F totals[R];
    for (int r = 0; r < R; r++) totals[r] = set(0.0f);
    for (int64_t step = 0; step < steps;) {
        F part[R];
        for (int r = 0; r < R; r++) part[r] = set(0.0f);
        const int64_t end = step + RUN < steps ? step + RUN : steps;
        prefetch<R>(tile + 64 * step, 64 * RUN);
        for (; step < end; step++)
            Step::template multiply_add<R>(tile + 64 * step,
                                           words + step * Step::COLUMNS * R, part);
        for (int r = 0; r < R; r++) totals[r] = add(totals[r], part[r]);
    }
    if (x.shape.words % Step::COLUMNS)
        odd_column<R>(tile + 64 * steps, words + (x.shape.words - 1) * R, totals);
    for (int r = 0; r < R; r++) sums[r] = totals[r];
}

template <bool NARROW, int R, int GROUP>
void quantized_tile(const inl_matrix &m, const char *tile, const TileView<R> &x,
                    F *sums) {
    switch (x.shape.mode) {
    case INL_X_INT8: return integer_tile<NARROW, R, GROUP, 1>(m, tile, x, sums);
    case INL_X_INT16: return integer_tile<NARROW, R, GROUP, 2>(m, tile, x, sums);
    default: return exact_tile<NARROW, R, GROUP>(m, tile, x, sums);
    }
}

template <int R>
void any_tile(const inl_matrix &m, const char *tile, const TileView<R> &x, F *sums) {
    const bool small = m.group == 16;
    switch (m.format) {
    case INL_F32: return plain_tile<Single, R>(m, tile, x, sums);
    case INL_BF16:
        if (x.shape.mode == INL_X_BF16)
            return plain_tile<NarrowPair, R>(m, tile, x, sums);
        return plain_tile<ExactPair, R>(m, tile, x, sums);
    case INL_U4:
        if (small) return quantized_tile<true, R, 16>(m, tile, x, sums);
        return quantized_tile<true, R, 32>(m, tile, x, sums);
    default:
        if (small) return quantized_tile<false, R, 16>(m, tile, x, sums);
        return quantized_tile<false, R, 32>(m, tile, x, sums);
    }
}

/* Multiply a tile with as many rows as tile_rows returns. */
void multiply_tile(const inl_matrix &m, const char *tile, const TileView<> &x,
                   F *sums) {
    if constexpr (MAX_TILE_ROWS > 8)
        if (x.rows == MAX_TILE_ROWS)
            return any_tile<MAX_TILE_ROWS>(m, tile, {x.base, x.shape, MAX_TILE_ROWS},
                                           sums);
    if constexpr (MAX_TILE_ROWS >= 8)
        if (x.rows == 8) return any_tile<8>(m, tile, {x.base, x.shape, 8}, sums);
    if constexpr (MAX_TILE_ROWS >= 4)
        if (x.rows == 4) return any_tile<4>(m, tile, {x.base, x.shape, 4}, sums);
    if (x.rows == 2) return any_tile<2>(m, tile, {x.base, x.shape, 2}, sums);
    any_tile<1>(m, tile, {x.base, x.shape, 1}, sums);
}

} // namespace
} // namespace inl
