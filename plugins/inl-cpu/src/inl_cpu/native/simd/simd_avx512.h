/* Sixteen lanes in one register of AVX-512 (F, BW, DQ, VL, VNNI, BF16). */
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace inl {
namespace {

constexpr int MAX_TILE_ROWS = 12;
constexpr int ATTENTION_ROWS = 8;
constexpr int64_t PANEL_ROWS = 0; /* panels of weights: never */

using F = __m512;
using I = __m512i;

inline __mmask16 mask_first(int n) { return __mmask16((1u << n) - 1); }

inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline F load_first(const float *p, int n) {
    return _mm512_maskz_loadu_ps(mask_first(n), p);
}
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline void store_first(float *p, F x, int n) {
    _mm512_mask_storeu_ps(p, mask_first(n), x);
}
inline F set(float a) { return _mm512_set1_ps(a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F quotient(F a, F b) { return _mm512_div_ps(a, b); }
inline F larger(F a, F b) { return _mm512_max_ps(a, b); }
inline F smaller(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F magnitude(F a) { return _mm512_abs_ps(a); }
inline F where_below(F x, F bound, F a, F b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
}
inline F between(F x, int from, int to, F other) {
    const __mmask16 inside = mask_first(to) & __mmask16(~mask_first(from));
    return _mm512_mask_blend_ps(inside, other, x);
}
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest(F x) { return _mm512_reduce_max_ps(x); }

inline I zeros() { return _mm512_setzero_si512(); }
inline I set_int(int32_t a) { return _mm512_set1_epi32(a); }
inline I load_ints(const void *p) { return _mm512_loadu_si512(p); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
inline I load_bytes(const void *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}
inline I look_up(I table, I indices) { return _mm512_shuffle_epi8(table, indices); }
inline I shift_left(I x, int bits) { return _mm512_slli_epi32(x, bits); }
inline I shift_right(I x, int bits) { return _mm512_srli_epi32(x, bits); }
inline I nearest(F a) { return _mm512_cvtps_epi32(a); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline void store_bytes(int8_t *p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(x));
}
inline F load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
/* Sixteen float8 times FLOAT8_FACTOR: the same fields in float16. */
inline F load_float8(const void *p) {
    const __m256i wide =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
    const __m256i nan = _mm256_set1_epi16(0x7f), size = _mm256_and_si256(wide, nan);
    const __m256i half = _mm256_or_si256(
        _mm256_slli_epi16(size, 7),
        _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000))));
    return _mm512_cvtph_ps(_mm256_or_si256(half, _mm256_cmpeq_epi16(size, nan)));
}

/* Permutations use only the lowest 4 bits of a lane: a lookup in a table of 16
 * floats. */
struct Codes {
    F table, magic;
    explicit Codes(int zero)
        : table(_mm512_sub_ps(
              _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
              _mm512_set1_ps(float(zero)))),
          magic(_mm512_set1_ps(8388608.0f + float(zero))) {}
    F nibble(I words, int shift) const {
        return _mm512_permutexvar_ps(shift ? _mm512_srli_epi32(words, shift) : words,
                                     table);
    }
    F byte(I words, int shift) const {
        /* (w & 255) | bits of 2^23 is the float 2^23 + byte; subtract 2^23. */
        const I byte = shift ? _mm512_srli_epi32(words, shift) : words;
        const I bits = _mm512_ternarylogic_epi32(byte, _mm512_set1_epi32(255),
                                                 _mm512_set1_epi32(0x4b000000), 0xea);
        return _mm512_sub_ps(_mm512_castsi512_ps(bits), magic);
    }
};

template <bool SMALL>
inline I dot4(I sums, I w, int32_t x) {
    return _mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(x));
}
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
inline F dot2(F sums, I pairs, uint32_t x) {
    return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(x)));
}

/* Tuning of attention: accumulators that fit in the registers, those that suffice for
 * keys from memory, and whether dot2 is one instruction. */
constexpr int ATTENTION_SUMS = 24, SCORE_SUMS = 16;
constexpr int BYTE_PLANES = 2; /* of weights or queries, summed at once */
constexpr bool HAS_PAIR_DOT = true;

inline void store_bf16(uint16_t *p, F x) {
    const __m256bh half = _mm512_cvtneps_pbh(x);
    std::memcpy(p, &half, 32);
}

} // namespace
} // namespace inl
