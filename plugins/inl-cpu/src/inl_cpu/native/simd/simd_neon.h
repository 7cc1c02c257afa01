/* Sixteen lanes in four registers of NEON, with the dot products of ARMv8.2. */
#pragma once

#include <cstdint>
#include <cstring>

#include <arm_neon.h>

#include "runtime/numbers.h"

namespace inl {
namespace {

constexpr int MAX_TILE_ROWS = 2;
constexpr int ATTENTION_ROWS = 3;
constexpr int64_t PANEL_ROWS = 0; /* panels of weights: never */

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};

#define PARTS for (int part = 0; part < 4; part++)

inline F load(const float *p) {
    F x;
    PARTS x.v[part] = vld1q_f32(p + 4 * part);
    return x;
}
inline void store(float *p, F x) { PARTS vst1q_f32(p + 4 * part, x.v[part]); }
inline F load_first(const float *p, int n) {
    if (n >= 16) return load(p);
    float all[16] = {};
    std::memcpy(all, p, size_t(n) * 4);
    return load(all);
}
inline void store_first(float *p, F x, int n) {
    if (n >= 16) return store(p, x);
    float all[16];
    store(all, x);
    std::memcpy(p, all, size_t(n) * 4);
}
inline F set(float a) {
    F x;
    PARTS x.v[part] = vdupq_n_f32(a);
    return x;
}
#define EACH(name, type, intrinsic)                                                    \
    inline type name(type x, type y) {                                                 \
        PARTS x.v[part] = intrinsic(x.v[part], y.v[part]);                             \
        return x;                                                                      \
    }
EACH(add, F, vaddq_f32)
EACH(sub, F, vsubq_f32)
EACH(mul, F, vmulq_f32)
EACH(quotient, F, vdivq_f32)
EACH(larger, F, vmaxq_f32)
EACH(smaller, F, vminq_f32)
EACH(add, I, vaddq_s32)
EACH(bit_and, I, vandq_s32)
EACH(bit_or, I, vorrq_s32)
#undef EACH
inline F fma(F x, F y, F z) {
    PARTS z.v[part] = vfmaq_f32(z.v[part], x.v[part], y.v[part]);
    return z;
}
inline F magnitude(F x) {
    PARTS x.v[part] = vabsq_f32(x.v[part]);
    return x;
}
inline F where_below(F x, F bound, F yes, F no) {
    PARTS no.v[part] =
        vbslq_f32(vcltq_f32(x.v[part], bound.v[part]), yes.v[part], no.v[part]);
    return no;
}
inline F between(F x, int from, int to, F other) {
    const int32x4_t first = {0, 1, 2, 3};
    PARTS {
        const int32x4_t lane = vaddq_s32(first, vdupq_n_s32(4 * part));
        const uint32x4_t inside = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)),
                                            vcltq_s32(lane, vdupq_n_s32(to)));
        other.v[part] = vbslq_f32(inside, x.v[part], other.v[part]);
    }
    return other;
}
inline float sum(F x) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[1]), vaddq_f32(x.v[2], x.v[3])));
}
inline float largest(F x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}

inline I set_int(int32_t a) {
    I x;
    PARTS x.v[part] = vdupq_n_s32(a);
    return x;
}
inline I zeros() { return set_int(0); }
inline I load_ints(const void *p) {
    I x;
    PARTS x.v[part] =
        vreinterpretq_s32_s8(vld1q_s8(static_cast<const int8_t *>(p) + 16 * part));
    return x;
}
inline I load_bytes(const void *p) {
    const int8x16_t bytes = vld1q_s8(static_cast<const int8_t *>(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
    const int16x8_t high = vmovl_s8(vget_high_s8(bytes));
    I x;
    x.v[0] = vmovl_s16(vget_low_s16(low));
    x.v[1] = vmovl_s16(vget_high_s16(low));
    x.v[2] = vmovl_s16(vget_low_s16(high));
    x.v[3] = vmovl_s16(vget_high_s16(high));
    return x;
}
inline I look_up(I table, I indices) {
    PARTS indices.v[part] = vreinterpretq_s32_s8(
        vqtbl1q_s8(vreinterpretq_s8_s32(table.v[part]),
                   vreinterpretq_u8_s32(indices.v[part])));
    return indices;
}
inline I shift_left(I x, int bits) {
    PARTS x.v[part] = vshlq_s32(x.v[part], vdupq_n_s32(bits));
    return x;
}
inline I shift_right(I x, int bits) {
    PARTS x.v[part] = vreinterpretq_s32_u32(
        vshlq_u32(vreinterpretq_u32_s32(x.v[part]), vdupq_n_s32(-bits)));
    return x;
}
inline I nearest(F a) {
    I x;
    PARTS x.v[part] = vcvtnq_s32_f32(a.v[part]);
    return x;
}
inline F to_float(I a) {
    F x;
    PARTS x.v[part] = vcvtq_f32_s32(a.v[part]);
    return x;
}
inline F as_float(I a) {
    F x;
    PARTS x.v[part] = vreinterpretq_f32_s32(a.v[part]);
    return x;
}
inline void store_bytes(int8_t *p, I x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
inline F load_half(const uint16_t *p) {
    F x;
    PARTS x.v[part] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * part)));
    return x;
}
/* Sixteen float8 times FLOAT8_FACTOR: the same fields in float16. */
inline F load_float8(const void *p) {
    const int8x16_t codes = vld1q_s8(static_cast<const int8_t *>(p));
    const uint16x8_t nan = vdupq_n_u16(0x7f);
    F x;
    for (int part = 0; part < 4; part += 2) {
        const uint16x8_t wide = vreinterpretq_u16_s16(
            vmovl_s8(part ? vget_high_s8(codes) : vget_low_s8(codes)));
        const uint16x8_t size = vandq_u16(wide, nan);
        const uint16x8_t half =
            vorrq_u16(vorrq_u16(vshlq_n_u16(size, 7), vceqq_u16(size, nan)),
                      vandq_u16(wide, vdupq_n_u16(0x8000)));
        x.v[part] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
        x.v[part + 1] = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half)));
    }
    return x;
}

struct Codes {
    I zero;
    explicit Codes(int zero) : zero(set_int(-zero)) {}
    F masked(I words, int shift, int mask) const {
        return to_float(add(bit_and(shift_right(words, shift), set_int(mask)), zero));
    }
    F nibble(I words, int shift) const { return masked(words, shift, 15); }
    F byte(I words, int shift) const { return masked(words, shift, 255); }
};

template <bool SMALL>
inline I dot4(I sums, I w, int32_t x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
    const int8x16_t middle = vdupq_n_s8(int8_t(0x80)), half = vdupq_n_s8(64);
    PARTS {
        int8x16_t bytes = vreinterpretq_s8_s32(w.v[part]);
        /* Codes above 127 are not signed bytes: subtract 128, and add 64 * x twice. */
        if (!SMALL) {
            bytes = veorq_s8(bytes, middle);
            sums.v[part] = vdotq_s32(vdotq_s32(sums.v[part], half, four), half, four);
        }
        sums.v[part] = vdotq_s32(sums.v[part], bytes, four);
    }
    return sums;
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
    const F low = as_float(shift_left(pairs, 16));
    const F high = as_float(bit_and(pairs, set_int(int(0xffff0000))));
    sums = fma(low, set(float_of(x << 16)), sums);
    return fma(high, set(float_of(x & 0xffff0000)), sums);
}
#undef PARTS

/* Tuning of attention: accumulators that fit in the registers, and whether dot2 is one
 * instruction. */
constexpr int ATTENTION_SUMS = 6, SCORE_SUMS = 3;
constexpr int BYTE_PLANES = 2; /* of weights or queries, summed at once */
constexpr bool HAS_PAIR_DOT = false;

inline void store_bf16(uint16_t *p, F x) {
    float lanes[16];
    store(lanes, x);
    for (int lane = 0; lane < 16; lane++) p[lane] = float_to_bf16(lanes[lane]);
}

} // namespace
} // namespace inl
