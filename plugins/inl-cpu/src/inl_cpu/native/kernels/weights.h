/* Softmax weights of a segment, and their encodings for the products with values. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/queries.h"
#include "kernels/scores.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Replace the scores of a query by weights exp(score - top), and set top and the total
 * of the weights, which is 0 if all keys of the segment are masked. */
template <CacheKind KIND>
inline void exponentiate(float *scores, int count, float &top, float &total) {
    F most = set(MASKED);
    for (int at = 0; at < count; at += 16) most = larger(most, load(scores + at));
    top = largest(most);
    if (top == MASKED) {
        std::memset(scores, 0, size_t(count) * 4);
        total = 0;
        return;
    }
    F sums = set(0.0f);
    for (int at = 0; at < count; at += 16) {
        const F score = sub(load(scores + at), set(top));
        const F weight = KIND == FLOATS || KIND == FLOAT8 ? exponential(score)
                                                          : rough_exponential(score);
        store(scores + at, weight);
        sums = add(sums, weight);
    }
    total = sum(sums);
}

inline void weights_to_bf16(const float *weights, int count, uint16_t *narrow) {
    for (int at = 0; at < count; at += 16) store_bf16(narrow + at, load(weights + at));
}

/* Encode weights times the scales of int8 values in two planes of bytes, with one scale
 * per query. */
inline void weights_to_bytes(const Segment &segment, int64_t padded, Weights &w,
                             int r) {
    float *weights = w.scores + r * SEGMENT_KEYS;
    F most = set(0.0f), nan = set(0.0f); /* nan propagates NaN to the scale */
    for (int tile = 0; tile < segment.tiles; tile++) {
        const F weight = load(weights + 16 * tile);
        const F scale =
            load(reinterpret_cast<const float *>(segment.v[tile] + 16 * padded));
        /* The scale of an unwritten key is arbitrary. */
        const F scaled = where_below(set(0.0f), weight, mul(weight, scale), set(0.0f));
        store(weights + 16 * tile, scaled);
        most = larger(most, scaled);
        nan = fma(scaled, set(0.0f), nan);
    }
    const float top = largest(most);
    const F factor = set(top > 0 ? MAX_CODE / top : 0);
    w.scale[r] = top / MAX_CODE + sum(nan);
    I uppers = zeros(), lowers = zeros();
    for (int at = 0; at < 16 * segment.tiles; at += 16) {
        const F code = to_float(nearest(mul(load(weights + at), factor)));
        const I upper = upper_bytes(code), lower = lower_bytes(code, upper);
        store_bytes(w.uppers() + r * SEGMENT_KEYS + at, upper);
        store_bytes(w.lowers() + r * SEGMENT_KEYS + at, lower);
        uppers = add(uppers, upper);
        lowers = add(lowers, lower);
    }
    w.upper[r] = 128 * int32_t(sum(to_float(uppers)));
    w.lower[r] = 128 * int32_t(sum(to_float(lowers)));
}

} // namespace
} // namespace inl
