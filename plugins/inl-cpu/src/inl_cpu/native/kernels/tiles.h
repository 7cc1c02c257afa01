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

#include "kernels/codes.h"
#include "kernels/encode.h"
#include "runtime/cpu.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Prefetch lines into the L2 cache, or with LOCALITY 3 into the L1 cache. */
template <int LOCALITY = 2>
__attribute__((always_inline)) inline void prefetch_lines(const char *p, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, LOCALITY);
}

/* Prefetch weights that R rows will be multiplied with. GROUP: columns of a group of
 * quantized weights, 0 for others. Every line into the L2 cache, as decoding takes the
 * time in which the hardware prefetcher would need the next read; where READS_AHEAD, one
 * line for few rows, and every line of quantized weights into the L1 cache for many. Not
 * a call, which would seem to have no effect. */
template <int R, int GROUP>
__attribute__((always_inline)) inline void prefetch(const char *p, int64_t bytes) {
    constexpr int64_t AHEAD = R <= 4 ? 6144 : 8192, NEAR = 2048;
    constexpr bool WIDE = GROUP != 16, FEW = R <= (WIDE ? 4 : 1),
                   MANY = GROUP > 0 && R > (WIDE ? 4 : 8);
    if (FEW && READS_AHEAD) return prefetch_lines(p + NEAR, 1);
    if (MANY && READS_AHEAD) return prefetch_lines<3>(p + NEAR, bytes);
    prefetch_lines(p + AHEAD, bytes);
}

/* The same address, without the compiler knowing it: what was computed from it before
 * is computed again instead of being kept in memory. */
inline const char *hidden(const char *p) {
    __asm__("" : "+r"(p));
    return p;
}

/* Add the dot products of a group of a run, of columns 4 * first .., to the sums. */
template <class C, int R, int GROUP>
__attribute__((always_inline)) inline void
add_products(const C &codes, const char *run, int first, const int8_t *x, I *sums) {
    using D = Dot<C::LARGEST>;
    constexpr int STEPS = GROUP / 4, PART = D::STEPS < STEPS ? D::STEPS : STEPS;
    for (int from = 0; from < STEPS; from += PART) {
        I part[R];
        for (int r = 0; r < R; r++) part[r] = D::begin(sums[r]);
#pragma GCC unroll 8
        for (int step = from; step < from + PART; step++) {
            const auto w = codes.step(run, first + step);
            for (int r = 0; r < R; r++) {
                int32_t word;
                std::memcpy(&word, x + r * GROUP + 4 * step, 4);
                part[r] = D::step(part[r], w, word);
            }
        }
        for (int r = 0; r < R; r++) sums[r] = D::end(sums[r], part[r]);
    }
}

/* The same. Decoding takes registers, so that the compiler chooses what is a call. */
template <class C, int R, int GROUP>
inline void integer_group(const C &codes, const char *run, int first, const int8_t *x,
                          I *sums) {
    add_products<C, R, GROUP>(codes, run, first, x, sums);
}

/* The rows of x of a tile as integers, and the sums of their products with a tile of
 * weights. PLANES: 2, or 1 with a second plane for groups with outliers. A row whose
 * second plane is zero gets the same result as with one plane: division by 128 is
 * exact. */
template <class C, int R, int GROUP, int PLANES>
struct IntegerSums {
    const bool offsets;
    const C codes;
    const int8_t *const upper, *const lower;
    const float *const scales, *const shifts;
    const int32_t *const starts, *seconds = nullptr, *flags = nullptr;
    F totals[R];

    IntegerSums(const inl_matrix &m, const TileView<R> &x)
        : offsets(m.offsets), codes(m), upper(x.codes(0, 0)), lower(x.codes(1, 0)),
          scales(x.extra(0)), shifts(x.extra(2)),
          starts(reinterpret_cast<const int32_t *>(x.extra(1))) {
        for (int r = 0; r < R; r++) totals[r] = set(0.0f);
        if (PLANES == 2) return;
        seconds = reinterpret_cast<const int32_t *>(x.extra(3));
        flags = reinterpret_cast<const int32_t *>(x.extra(4));
    }
    /* Initial accumulators of a group: -zero times the sum of the codes of x. */
    I start(const char *run, int first, int32_t sum) const {
        if constexpr (C::DECODED) return codes.template begin<GROUP>(run, first, sum);
        return Dot<C::LARGEST>::CENTERED ? zeros() : set_int(sum);
    }
    __attribute__((always_inline)) inline void
    products(const char *run, int first, const int8_t *x, I *sums) const {
        if constexpr (C::DECODED || R == 1)
            add_products<C, R, GROUP>(codes, run, first, x, sums);
        else
            integer_group<C, R, GROUP>(codes, run, first, x, sums);
    }
    /* Add group g of x, which is the group at column 4 * first of a run. */
    inline void add_group(const char *run, int first, int64_t g, F scale, F offset) {
        I group[R];
        for (int r = 0; r < R; r++)
            group[r] = PLANES == 2 ? zeros() : start(run, first, starts[g * R + r]);
        products(run, first, upper + g * GROUP * R, group);
        if (PLANES == 2 || flags[g * R] != 0) {
            const int32_t *begin = PLANES == 2 ? starts : seconds;
            for (int r = 0; r < R; r++)
                group[r] = add(shift_left(group[r], 7),
                               start(run, first, begin[g * R + r]));
            products(PLANES == 1 ? hidden(run) : run, first, lower + g * GROUP * R,
                     group);
            if (PLANES == 1) scale = mul(scale, set(1.0f / 128));
        }
        for (int r = 0; r < R; r++)
            totals[r] =
                fma(to_float(group[r]), mul(scale, set(scales[g * R + r])), totals[r]);
        if (!offsets) return;
        for (int r = 0; r < R; r++)
            totals[r] = fma(offset, set(shifts[g * R + r]), totals[r]);
    }
};

/* The same with x in float32. Codes are taken relative to their middle, because offsets
 * are usually near -middle * scale: two sums that cancel would lose digits. */
template <class C, int R, int GROUP>
struct ExactSums {
    const inl_matrix &m;
    const C codes;
    const int middle;
    const Codes numbers;
    const float *const words, *const group_sums;
    F totals[R];

    ExactSums(const inl_matrix &m, const TileView<R> &x)
        : m(m), codes(m), middle(m.offsets ? m.middle : m.zero), numbers(middle),
          words(reinterpret_cast<const float *>(x.words(0))), group_sums(x.extra(0)) {
        for (int r = 0; r < R; r++) totals[r] = set(0.0f);
    }
    inline void add_group(const char *run, int first, int64_t g, F scale, F offset) {
        const float *x = words + g * GROUP * R;
        F group[R];
        for (int r = 0; r < R; r++) group[r] = set(0.0f);
        for (int at = 0; at < GROUP; at += C::WORD) {
            const I word = codes.word(run, 4 * first + at);
            for (int k = 0; k < C::WORD; k++) {
                const F value = C::number(numbers, word, k);
                for (int r = 0; r < R; r++)
                    group[r] = fma(value, set(x[(at + k) * R + r]), group[r]);
            }
        }
        for (int r = 0; r < R; r++) totals[r] = fma(group[r], scale, totals[r]);
        if (!m.offsets) return;
        offset = fma(set(float(middle - m.zero)), scale, offset);
        for (int r = 0; r < R; r++)
            totals[r] = fma(offset, set(group_sums[g * R + r]), totals[r]);
    }
};

template <class Sums, int R, int GROUP, int SCALE = ANY_SCALE>
void coded_tile(const inl_matrix &m, const char *tile, const TileView<R> &x, F *sums) {
    Sums found(m, x);
    const int64_t bytes = BlockShape(m).run;
    int64_t g = 0;
    for_each_run<SCALE>(m, tile, [&](const char *run, const auto &scales) {
        prefetch<R, GROUP>(run, bytes);
#pragma GCC unroll 2
        for (int part = 0; part < RUN / GROUP; part++, g++)
            found.add_group(run, part * GROUP / 4, g, scales.scale_of(run, part),
                            scales.offset_of(run, part));
    });
    for (int r = 0; r < R; r++) sums[r] = found.totals[r];
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
        prefetch<R, 0>(tile + 64 * step, 64 * RUN);
        for (; step < end; step++)
            Step::template multiply_add<R>(tile + 64 * step,
                                           words + step * Step::COLUMNS * R, part);
        for (int r = 0; r < R; r++) totals[r] = add(totals[r], part[r]);
    }
    if (x.shape.words % Step::COLUMNS)
        odd_column<R>(tile + 64 * steps, words + (x.shape.words - 1) * R, totals);
    for (int r = 0; r < R; r++) sums[r] = totals[r];
}

template <class C>
constexpr bool IS_TABLE = false;
template <int LOW, int HIGH>
constexpr bool IS_TABLE<TableCodes<LOW, HIGH>> = true;

/* SCALE: the format of scales, if all matrices of these codes have the same. */
template <class C, int R, int GROUP, int SCALE = ANY_SCALE>
void quantized_tile(const inl_matrix &m, const char *tile, const TileView<R> &x,
                    F *sums) {
    using Bytes = IntegerSums<C, R, GROUP, 1>;
    constexpr int SECOND = GROUP == RUN      ? INL_SCALE_HALF
                           : C::LARGEST == 3 ? INL_SCALE_NIBBLE
                           : C::LARGEST == 7 ? INL_SCALE_SIX
                                             : ANY_SCALE;
    constexpr int THIRD = C::LARGEST == 3 ? INL_SCALE_WIDE
                          : IS_TABLE<C>   ? INL_SCALE_EXPONENT
                                          : ANY_SCALE;
    switch (x.shape.mode) {
    case INL_X_INT8: /* the default mode: kernels for the common scales */
        if constexpr (SCALE == ANY_SCALE) {
            if (m.scale == INL_SCALE_BYTE || m.scale == INL_SCALE_EIGHTHS)
                return coded_tile<Bytes, R, GROUP, INL_SCALE_BYTE>(m, tile, x, sums);
            if (m.scale == SECOND)
                return coded_tile<Bytes, R, GROUP, SECOND>(m, tile, x, sums);
            if (m.scale == THIRD)
                return coded_tile<Bytes, R, GROUP, THIRD>(m, tile, x, sums);
        }
        return coded_tile<Bytes, R, GROUP, SCALE>(m, tile, x, sums);
    case INL_X_INT16:
        return coded_tile<IntegerSums<C, R, GROUP, 2>, R, GROUP, SCALE>(m, tile, x,
                                                                        sums);
    default:
        return coded_tile<ExactSums<C, R, GROUP>, R, GROUP, SCALE>(m, tile, x, sums);
    }
}

template <int R>
void any_tile(const inl_matrix &m, const char *tile, const TileView<R> &x, F *sums) {
    switch (m.format) {
    case INL_F32: return plain_tile<Single, R>(m, tile, x, sums);
    case INL_BF16:
        if (x.shape.mode == INL_X_BF16)
            return plain_tile<NarrowPair, R>(m, tile, x, sums);
        return plain_tile<ExactPair, R>(m, tile, x, sums);
    case INL_U2: return quantized_tile<PlaneCodes<2, 0>, R, 16>(m, tile, x, sums);
    case INL_U3: return quantized_tile<PlaneCodes<2, 1>, R, 16>(m, tile, x, sums);
    case INL_U4: return quantized_tile<PlaneCodes<4, 0>, R, 32>(m, tile, x, sums);
    case INL_U5: return quantized_tile<PlaneCodes<4, 1>, R, 32>(m, tile, x, sums);
    case INL_U6: return quantized_tile<PlaneCodes<4, 2>, R, 16>(m, tile, x, sums);
    case INL_U8: return quantized_tile<PlaneCodes<8, 0>, R, 32>(m, tile, x, sums);
    case INL_IQ1:
    case INL_IQ2:
        if (m.group == 16)
            return quantized_tile<TableCodes<2, 1>, R, 16, INL_SCALE_BYTE>(m, tile, x,
                                                                           sums);
        return quantized_tile<TableCodes<2, 1>, R, 32, INL_SCALE_BYTE>(m, tile, x, sums);
    default: return quantized_tile<TableCodes<4, 0>, R, 32>(m, tile, x, sums);
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
