/* Sixteen lanes in plain C++: for any machine, and the definition of the operations. */
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/numbers.h"

namespace inl {
namespace {

constexpr int MAX_TILE_ROWS =
    2; /* rows of x multiplied with a tile of weights at a time */
constexpr int ATTENTION_ROWS = 2; /* queries multiplied with a tile of keys at a time */
constexpr int64_t PANEL_ROWS = 0; /* panels of weights: never */

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};

#define LANES for (int l = 0; l < 16; l++)

inline F load(const float *p) {
    F x;
    LANES x.v[l] = p[l];
    return x;
}
inline F load_first(const float *p, int n) {
    F x;
    LANES x.v[l] = l < n ? p[l] : 0;
    return x;
}
inline void store(float *p, F x) { LANES p[l] = x.v[l]; }
inline void store_first(float *p, F x, int n) {
    for (int l = 0; l < n; l++) p[l] = x.v[l];
}
inline F set(float a) {
    F x;
    LANES x.v[l] = a;
    return x;
}
#define EACH(name, type, expression)                                                   \
    inline type name(type a, type b) {                                                 \
        type x;                                                                        \
        LANES x.v[l] = expression;                                                     \
        return x;                                                                      \
    }
EACH(add, F, a.v[l] + b.v[l])
EACH(sub, F, a.v[l] - b.v[l])
EACH(mul, F, a.v[l] * b.v[l])
EACH(quotient, F, a.v[l] / b.v[l])
EACH(larger, F, a.v[l] > b.v[l] ? a.v[l] : b.v[l])
EACH(smaller, F, a.v[l] < b.v[l] ? a.v[l] : b.v[l])
EACH(add, I, int32_t(uint32_t(a.v[l]) + uint32_t(b.v[l])))
EACH(bit_and, I, a.v[l] & b.v[l])
EACH(bit_or, I, a.v[l] | b.v[l])
#undef EACH

/* a * b + c; the vector versions round once. */
inline F fma(F a, F b, F c) {
    LANES c.v[l] = a.v[l] * b.v[l] + c.v[l];
    return c;
}
inline F magnitude(F a) {
    LANES a.v[l] = float_of(bits_of(a.v[l]) & 0x7fffffff);
    return a;
}
/* a where x is below the bound, else b. */
inline F where_below(F x, F bound, F a, F b) {
    LANES a.v[l] = x.v[l] < bound.v[l] ? a.v[l] : b.v[l];
    return a;
}
/* Lanes from .. to - 1 of x; the other lanes of other. */
inline F between(F x, int from, int to, F other) {
    LANES x.v[l] = l >= from && l < to ? x.v[l] : other.v[l];
    return x;
}
inline float sum(F x) {
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) x.v[l] += x.v[l + half];
    return x.v[0];
}
inline float largest(F x) {
    float most = x.v[0];
    LANES most = x.v[l] > most ? x.v[l] : most;
    return most;
}

inline I zeros() { return I{}; }
inline I set_int(int32_t a) {
    I x;
    LANES x.v[l] = a;
    return x;
}
inline I load_ints(const void *p) {
    I x;
    std::memcpy(x.v, p, 64);
    return x;
}
/* Sixteen signed bytes. */
inline I load_bytes(const void *p) {
    I x;
    LANES x.v[l] = static_cast<const int8_t *>(p)[l];
    return x;
}
/* The bytes of a table, of which each 16 are equal, at indices below 16. */
inline I look_up(I table, I indices) {
    uint8_t values[64], bytes[64];
    std::memcpy(values, table.v, 64);
    std::memcpy(bytes, indices.v, 64);
    for (int at = 0; at < 64; at++) bytes[at] = values[bytes[at] & 15];
    return load_ints(bytes);
}
inline I shift_left(I x, int bits) {
    LANES x.v[l] = int32_t(uint32_t(x.v[l]) << bits);
    return x;
}
inline I shift_right(I x, int bits) {
    LANES x.v[l] = int32_t(uint32_t(x.v[l]) >> bits);
    return x;
}
/* Round to the nearest integer, ties to even; |a| < 2^22. */
inline I nearest(F a) {
    constexpr float MAGIC = 12582912.0f; /* 1.5 * 2^23: the last bit has the value 1 */
    I x;
    LANES x.v[l] = int32_t(bits_of(a.v[l] + MAGIC)) - int32_t(bits_of(MAGIC));
    return x;
}
inline F to_float(I a) {
    F x;
    LANES x.v[l] = float(a.v[l]);
    return x;
}
inline F as_float(I a) {
    F x;
    std::memcpy(x.v, a.v, 64);
    return x;
}
inline void store_bytes(int8_t *p, I x) { LANES p[l] = int8_t(x.v[l]); }

inline F load_half(const uint16_t *p) {
    F x;
    LANES x.v[l] = half_to_float(p[l]);
    return x;
}
/* Sixteen float8 times FLOAT8_FACTOR. */
inline F load_float8(const void *p) {
    F x;
    LANES x.v[l] = float8_to_float(static_cast<const uint8_t *>(p)[l]);
    return x;
}
/* Codes in bits shift .. of each word, minus zero, as float32. */
struct Codes {
    int zero;
    explicit Codes(int zero) : zero(zero) {}
    F nibble(I words, int shift) const {
        F x;
        LANES x.v[l] = float((words.v[l] >> shift & 15) - zero);
        return x;
    }
    F byte(I words, int shift) const {
        F x;
        LANES x.v[l] = float((words.v[l] >> shift & 255) - zero);
        return x;
    }
};

/* Dot product of the four unsigned bytes in each lane of w and the signed bytes of x.
 * SMALL: codes are at most 15. */
template <bool SMALL>
inline I dot4(I sums, I w, int32_t x) {
    const int8_t a = int8_t(x), b = int8_t(x >> 8), c = int8_t(x >> 16),
                 d = int8_t(x >> 24);
    LANES {
        const uint32_t u = uint32_t(w.v[l]);
        sums.v[l] += int(u & 255) * a + int(u >> 8 & 255) * b + int(u >> 16 & 255) * c +
                     int(u >> 24) * d;
    }
    return sums;
}
/* Dot products of codes that are at most LARGEST, of up to STEPS steps. */
/* Products of codes of a cache of int8 and of other bytes; CENTERED: relative to 128. */
struct ByteDot {
    static constexpr bool CENTERED = false;
    static I step(I sums, I w, int32_t x) { return dot4<false>(sums, w, x); }
};
template <int LARGEST>
struct Dot {
    static constexpr int STEPS = 8;
    static constexpr bool CENTERED = false;
    static I begin(I sums) { return sums; }
    static I step(I part, I w, int32_t x) {
        return dot4<LARGEST<128>(part, w, x);
    }
    static I end(I, I part) { return part; }
};
/* Dot product of the bfloat16 pairs in each lane with the pair x, in float32. */
inline F dot2(F sums, I pairs, uint32_t x) {
    const float a = float_of(x << 16), b = float_of(x & 0xffff0000);
    LANES {
        const uint32_t u = uint32_t(pairs.v[l]);
        sums.v[l] += float_of(u << 16) * a + float_of(u & 0xffff0000) * b;
    }
    return sums;
}
#undef LANES

/* Tuning of attention: accumulators that fit in the registers, and whether dot2 is one
 * instruction. */
constexpr int ATTENTION_SUMS = 2, SCORE_SUMS = 1;
constexpr int BYTE_PLANES = 2; /* of weights or queries, summed at once */
constexpr bool HAS_PAIR_DOT = false;

inline void store_bf16(uint16_t *p, F x) {
    float lanes[16];
    store(lanes, x);
    for (int lane = 0; lane < 16; lane++) p[lane] = float_to_bf16(lanes[lane]);
}

} // namespace
} // namespace inl
