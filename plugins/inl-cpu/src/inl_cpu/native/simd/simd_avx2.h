/* Sixteen lanes in two registers of AVX2 with FMA and F16C, optionally AVX-VNNI. */
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "runtime/numbers.h"

namespace inl {
namespace {

constexpr int MAX_TILE_ROWS = 4;
constexpr int ATTENTION_ROWS = 4;
/* Fewest rows for which weights are decoded once for all of them; 0: never. */
#if defined(INL_ISA_AVX_VNNI)
constexpr int64_t PANEL_ROWS = 0;
#else
constexpr int64_t PANEL_ROWS = 12;
#endif

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

inline __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_numbers());
}
inline __m256 blend(__m256 no, __m256 yes, __m256i mask) {
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
}

inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load_first(const float *p, int n) {
    const __m256 a = _mm256_maskload_ps(p, below(n));
    return {a, n > 8 ? _mm256_maskload_ps(p + 8, below(n - 8)) : _mm256_setzero_ps()};
}
inline void store(float *p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline void store_first(float *p, F x, int n) {
    _mm256_maskstore_ps(p, below(n), x.a);
    if (n > 8) _mm256_maskstore_ps(p + 8, below(n - 8), x.b);
}
inline F set(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
#define EACH(name, type, intrinsic)                                                    \
    inline type name(type x, type y) {                                                 \
        return {intrinsic(x.a, y.a), intrinsic(x.b, y.b)};                             \
    }
EACH(add, F, _mm256_add_ps)
EACH(sub, F, _mm256_sub_ps)
EACH(mul, F, _mm256_mul_ps)
EACH(quotient, F, _mm256_div_ps)
EACH(larger, F, _mm256_max_ps)
EACH(smaller, F, _mm256_min_ps)
EACH(add, I, _mm256_add_epi32)
EACH(bit_and, I, _mm256_and_si256)
EACH(bit_or, I, _mm256_or_si256)
#undef EACH
inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F magnitude(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F where_below(F x, F bound, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ))};
}
inline F between(F x, int from, int to, F other) {
    const __m256i a = _mm256_andnot_si256(below(from), below(to));
    const __m256i b = _mm256_andnot_si256(below(from - 8), below(to - 8));
    return {blend(other.a, x.a, a), blend(other.b, x.b, b)};
}
inline float sum(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four =
        _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four =
        _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline I zeros() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I set_int(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline I load_ints(const void *p) {
    const __m256i *q = static_cast<const __m256i *>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I load_bytes(const void *p) {
    const __m128i *q = static_cast<const __m128i *>(p);
    const __m128i bytes = _mm_loadu_si128(q);
    return {_mm256_cvtepi8_epi32(bytes),
            _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline I look_up(I table, I indices) {
    return {_mm256_shuffle_epi8(table.a, indices.a),
            _mm256_shuffle_epi8(table.b, indices.b)};
}
inline I shift_left(I x, int n) {
    return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
inline I shift_right(I x, int n) {
    return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
inline I nearest(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline void store_bytes(int8_t *p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i low = _mm256_castsi256_si128(words);
    const __m128i high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(low, high));
}
inline F load_half(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)),
            _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
/* Sixteen float8 times FLOAT8_FACTOR: the same fields in float16. */
inline F load_float8(const void *p) {
    const __m256i wide =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    const __m256i nan = _mm256_set1_epi16(0x7f), size = _mm256_and_si256(wide, nan);
    const __m256i half = _mm256_or_si256(
        _mm256_or_si256(_mm256_slli_epi16(size, 7), _mm256_cmpeq_epi16(size, nan)),
        _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000))));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
}

struct Codes {
    I zero;
    explicit Codes(int zero) : zero(set_int(zero)) {}
    F masked(I words, int shift, int mask) const {
        const I codes = bit_and(shift_right(words, shift), set_int(mask));
        return {_mm256_cvtepi32_ps(_mm256_sub_epi32(codes.a, zero.a)),
                _mm256_cvtepi32_ps(_mm256_sub_epi32(codes.b, zero.b))};
    }
    F nibble(I words, int shift) const { return masked(words, shift, 15); }
    F byte(I words, int shift) const { return masked(words, shift, 255); }
};

/* Keeps the compiler from computing the terms of a sum before it adds any of them, for
 * which there are too few registers. */
inline __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

/* Without VNNI, for codes whose sums of two products fit in 16 bits. */
inline __m256i dot4_half(__m256i sums, __m256i w, __m256i x) {
#if defined(INL_ISA_AVX_VNNI)
    return _mm256_dpbusd_avx_epi32(sums, w, x);
#else
    const __m256i products = _mm256_maddubs_epi16(w, x);
    return in_order(
        _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1))));
#endif
}
inline I dot4(I sums, I w, int32_t x) {
    const __m256i four = _mm256_set1_epi32(x);
    return {dot4_half(sums.a, w.a, four), dot4_half(sums.b, w.b, four)};
}
/* The same relative to code 128: of magnitudes of at most 128 two products fit in 16
 * bits, and x takes the signs. */
inline __m256i centered_dot4(__m256i sums, __m256i w, __m256i x) {
    const __m256i code = _mm256_xor_si256(w, _mm256_set1_epi8(char(128)));
    return dot4_half(sums, _mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
}
/* Codes relative to 128 as magnitudes and all ones where they are negative: products
 * with (x ^ negative) are too small by the sum of negative magnitudes, the same for every
 * x, which takes fewer instructions than signs of x. */
struct SignedCodes {
    I sizes, negative;
};
inline I bit_xor(I x, I y) {
    return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
/* Without VNNI, products of small codes are added in 16 bits: STEPS pairs of products,
 * of at most LARGEST * 127 each, fit. CENTERED: codes are taken relative to 128, the
 * zero of all formats of such large codes. */
#if defined(INL_ISA_AVX_VNNI)
constexpr bool HAS_DOT4 = true;
#else
constexpr bool HAS_DOT4 = false;
#endif
template <int LARGEST>
struct Dot {
    static constexpr int MOST = 32767 / (2 * 127 * LARGEST);
    static constexpr bool NARROW = !HAS_DOT4 && MOST >= 2;
    static constexpr int STEPS = !NARROW || MOST >= 8 ? 8 : MOST >= 4 ? 4 : 2;
    static constexpr bool CENTERED = !HAS_DOT4 && LARGEST > 128;
    static I begin(I sums) { return NARROW ? zeros() : sums; }
    static I step(I part, I w, int32_t x) {
        const __m256i four = _mm256_set1_epi32(x);
        if (CENTERED)
            return {centered_dot4(part.a, w.a, four), centered_dot4(part.b, w.b, four)};
        if (!NARROW) return dot4(part, w, x);
        const I sums = {_mm256_add_epi16(part.a, _mm256_maddubs_epi16(w.a, four)),
                        _mm256_add_epi16(part.b, _mm256_maddubs_epi16(w.b, four))};
        return STEPS == 2 ? sums : I{in_order(sums.a), in_order(sums.b)};
    }
    static I step(I part, const SignedCodes &w, int32_t x) {
        const I four = bit_xor(w.negative, set_int(x));
        return {dot4_half(part.a, w.sizes.a, four.a),
                dot4_half(part.b, w.sizes.b, four.b)};
    }
    static SignedCodes signs(I w) {
        const I code = bit_xor(w, set_int(int(0x80808080)));
        const __m256i zero = _mm256_setzero_si256();
        return {{_mm256_abs_epi8(code.a), _mm256_abs_epi8(code.b)},
                {_mm256_cmpgt_epi8(zero, code.a), _mm256_cmpgt_epi8(zero, code.b)}};
    }
    /* Add the magnitudes of negative codes. */
    static I add_negative(I sums, const SignedCodes &w) {
        return dot4(sums, bit_and(w.sizes, w.negative), 0x01010101);
    }
    static I end(I sums, I part) {
        if (!NARROW) return part;
        const __m256i ones = _mm256_set1_epi16(1);
        return add(sums, {_mm256_madd_epi16(part.a, ones),
                          _mm256_madd_epi16(part.b, ones)});
    }
};
/* Products of codes of a cache of int8 and of other bytes. CENTERED: relative to 128;
 * the codes are at most 127, and the other bytes may be -128, so here the codes take the
 * signs. */
inline __m256i signed_dot4(__m256i sums, __m256i w, __m256i x) {
    const __m256i code = _mm256_xor_si256(w, _mm256_set1_epi8(char(128)));
    return dot4_half(sums, _mm256_abs_epi8(x), _mm256_sign_epi8(code, x));
}
struct ByteDot {
    static constexpr bool CENTERED = !HAS_DOT4;
    static I step(I sums, I w, int32_t x) {
        if (HAS_DOT4) return dot4(sums, w, x);
        const __m256i four = _mm256_set1_epi32(x);
        return {signed_dot4(sums.a, w.a, four), signed_dot4(sums.b, w.b, four)};
    }
};
inline F dot2(F sums, I pairs, uint32_t x) {
    const F low = as_float(shift_left(pairs, 16));
    const F high = as_float(bit_and(pairs, set_int(int(0xffff0000))));
    sums = fma(low, set(float_of(x << 16)), sums);
    return fma(high, set(float_of(x & 0xffff0000)), sums);
}

/* Tuning of attention: accumulators that fit in the registers, and whether dot2 is one
 * instruction. */
constexpr int ATTENTION_SUMS = 6, SCORE_SUMS = 4;
constexpr int BYTE_PLANES = 1; /* of weights or queries, summed at once */
constexpr bool HAS_PAIR_DOT = false;

inline void store_bf16(uint16_t *p, F x) {
    float lanes[16];
    store(lanes, x);
    for (int lane = 0; lane < 16; lane++) p[lane] = float_to_bf16(lanes[lane]);
}

} // namespace
} // namespace inl
