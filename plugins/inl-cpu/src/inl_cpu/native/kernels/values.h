/* Attention over one segment: scores, weights, and the weighted sums of values. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/queries.h"
#include "kernels/scores.h"
#include "kernels/weights.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

template <int D>
inline void add_value_pair(const I *values, const Weights &w, int index, F *sums) {
    if constexpr (HAS_PAIR_DOT) {
        uint32_t pair;
        std::memcpy(&pair, w.narrow + index, 4);
        for (int d = 0; d < D; d++) sums[d] = dot2(sums[d], values[d], pair);
    } else {
        const F even = set(w.scores[index]), odd = set(w.scores[index + 1]);
        const I high = set_int(int(0xffff0000));
        for (int d = 0; d < D; d++) {
            sums[d] = fma(as_float(shift_left(values[d], 16)), even, sums[d]);
            sums[d] = fma(as_float(bit_and(values[d], high)), odd, sums[d]);
        }
    }
}

/* Add the weighted values of one tile: R queries and D vectors of 16 columns. */
template <CacheKind KIND, int R, int D>
inline void add_value_tile(const char *tile, const char *next, int64_t padded, int keys,
                           const Weights &w, int index, F (*sums)[D]) {
    if constexpr (KIND == FLOATS || KIND == FLOAT8) {
        constexpr int64_t bytes = KIND == FLOAT8 ? 1 : 4;
        for (int key = 0; key < keys; key++)
            for (int d = 0; d < D; d++) {
                const int64_t at = key * padded + 16 * d;
                if (KIND == FLOATS || d % 4 == 0) prefetch_line(next + bytes * at);
                const F value = load_numbers<KIND>(tile, at);
                for (int r = 0; r < R; r++)
                    sums[r][d] =
                        fma(value, set(w.scores[r * SEGMENT_KEYS + index + key]),
                            sums[r][d]);
            }
    } else {
        for (int key = 0; key < keys; key += 2) {
            I values[D];
            for (int d = 0; d < D; d++) {
                const int64_t at = 4 * (key / 2 * padded + 16 * d);
                prefetch_line(next + at);
                values[d] = load_ints(tile + at);
                /* The partner of an odd last key may be NaN, also times 0. */
                if (key + 1 == keys) values[d] = bit_and(values[d], set_int(0xffff));
            }
            for (int r = 0; r < R; r++)
                add_value_pair<D>(values, w, r * SEGMENT_KEYS + index + key, sums[r]);
        }
    }
}

/* Compute D vectors of 16 columns of mixed [R][padded]. next: tiles to prefetch. */
template <CacheKind KIND, int R, int D>
void sum_columns(const Segment &segment, const char *const *next, const Queries &q,
            int64_t padded,
                 const Weights &w, int64_t column, float *mixed) {
    F sums[R][D];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) sums[r][d] = set(0.0f);
    for (int tile = 0; tile < segment.tiles; tile++) {
        const int keys = segment.visible(tile, q);
        const int64_t start = column * (KIND == FLOAT8 ? 1 : 4);
        const char *values = segment.v[tile] + start;
        const char *ahead = next[tile] + start;
        if (keys == 16)
            add_value_tile<KIND, R, D>(values, ahead, padded, 16, w, 16 * tile, sums);
        else
            add_value_tile<KIND, R, D>(values, ahead, padded, keys, w, 16 * tile, sums);
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++)
            store(mixed + r * padded + column + 16 * d, sums[r][d]);
}

template <int R, int D>
void sum_byte_columns(const Segment &segment, const char *const *next, const Queries &q,
            int64_t padded,
                      const Weights &w, int64_t column, float *mixed) {
    I planes[2][R][D];
    const int8_t *const weights[] = {w.uppers(), w.lowers()};
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += BYTE_PLANES) {
        for (int plane = first; plane < first + BYTE_PLANES; plane++)
            for (int r = 0; r < R; r++)
                for (int d = 0; d < D; d++) planes[plane][r][d] = zeros();
        for (int tile = 0; tile < segment.tiles; tile++)
            for (int key = 0; key < segment.visible(tile, q); key += 4) {
                const int64_t at = 4 * (key / 4 * padded + column);
                const int index = 16 * tile + key;
                for (int d = 0; d < D; d++) {
                    if (first == 0) prefetch_line(next[tile] + at + 64 * d);
                    const I codes = load_ints(segment.v[tile] + at + 64 * d);
                    for (int r = 0; r < R; r++)
                        for (int plane = first; plane < first + BYTE_PLANES; plane++) {
                            int32_t word;
                            std::memcpy(&word,
                                        weights[plane] + r * SEGMENT_KEYS + index, 4);
                            planes[plane][r][d] =
                                ByteDot::step(planes[plane][r][d], codes, word);
                        }
                }
            }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) {
            const F high = byte_sums(planes[0][r][d], w.upper[r]);
            const F low = byte_sums(planes[1][r][d], w.lower[r]);
            store(mixed + r * padded + column + 16 * d,
                  mul(fma(high, set(256.0f), low), set(w.scale[r])));
        }
}

template <CacheKind KIND, int R, int D>
void sum_some_columns(const Segment &segment, const char *const *next, const Queries &q,
            int64_t padded,
                      const Weights &w, int64_t column, float *mixed) {
    if constexpr (KIND == BYTES)
        sum_byte_columns<R, D>(segment, next, q, padded, w, column, mixed);
    else
        sum_columns<KIND, R, D>(segment, next, q, padded, w, column, mixed);
}

/* Set mixed [R][padded] to the weighted sums of the segment's values. */
template <CacheKind KIND, int R>
void sum_values(const Segment &segment, const char *const *next, const Queries &q,
                int64_t padded,
                const Weights &w, float *mixed) {
    constexpr int SUMS = KIND == BYTES ? ATTENTION_SUMS / BYTE_PLANES : ATTENTION_SUMS;
    constexpr int D = SUMS >= 4 * R ? 4 : SUMS >= 2 * R ? 2 : 1;
    int64_t column = 0;
    for (; column + 16 * D <= padded; column += 16 * D)
        sum_some_columns<KIND, R, D>(segment, next, q, padded, w, column, mixed);
    if constexpr (D > 1)
        for (; column < padded; column += 16)
            sum_some_columns<KIND, R, 1>(segment, next, q, padded, w, column, mixed);
}

/* Where attention is in the work of a chunk. */
struct Progress {
    bool first;              /* nothing has prefetched the keys of this segment */
    const char *const *next; /* tiles of keys after this segment, for prefetching */
};

/* Attention of R queries over one segment: sets w.top, w.total and mixed. */
template <CacheKind KIND, int R>
void attend_segment(const Attention &a, const Queries &q, const Segment &segment,
                    const QueryWords &x, Weights &w, float *mixed, Progress at) {
    score<KIND, R>(a, q, segment, x, w, at.first);
    const int count = 16 * segment.tiles;
    for (int r = 0; r < R; r++) {
        float *scores = w.scores + r * SEGMENT_KEYS;
        if (r >= q.count)
            std::memset(scores, 0, size_t(count) * 4);
        else
            exponentiate<KIND>(scores, count, w.top[r], w.total[r]);
        if (KIND == BYTES) weights_to_bytes(segment, a.shape.padded(), w, r);
        if (KIND == PAIRS && HAS_PAIR_DOT)
            weights_to_bf16(scores, count, w.narrow + r * SEGMENT_KEYS);
    }
    sum_values<KIND, R>(segment, at.next, q, a.shape.padded(), w, mixed);
}

template <CacheKind KIND>
void attend_segment(const Attention &a, const Queries &q, const Segment &segment,
                    const QueryWords &x, Weights &w, float *mixed, Progress at) {
    const int rows = padded_count(q.count);
    if constexpr (ATTENTION_ROWS >= 8)
        if (rows == 8) return attend_segment<KIND, 8>(a, q, segment, x, w, mixed, at);
    if constexpr (ATTENTION_ROWS >= 6)
        if (rows == 6) return attend_segment<KIND, 6>(a, q, segment, x, w, mixed, at);
    if constexpr (ATTENTION_ROWS >= 4)
        if (rows == 4) return attend_segment<KIND, 4>(a, q, segment, x, w, mixed, at);
    if constexpr (ATTENTION_ROWS >= 3)
        if (rows == 3) return attend_segment<KIND, 3>(a, q, segment, x, w, mixed, at);
    if (rows == 2) return attend_segment<KIND, 2>(a, q, segment, x, w, mixed, at);
    attend_segment<KIND, 1>(a, q, segment, x, w, mixed, at);
}

inline void attend_segment(const Attention &a, const Queries &q, const Segment &segment,
                           const QueryWords &x, Weights &w, float *mixed, Progress at) {
    switch (a.shape.kind) {
    case FLOATS: return attend_segment<FLOATS>(a, q, segment, x, w, mixed, at);
    case PAIRS: return attend_segment<PAIRS>(a, q, segment, x, w, mixed, at);
    case BYTES: return attend_segment<BYTES>(a, q, segment, x, w, mixed, at);
    case FLOAT8: return attend_segment<FLOAT8>(a, q, segment, x, w, mixed, at);
    }
}

} // namespace
} // namespace inl
