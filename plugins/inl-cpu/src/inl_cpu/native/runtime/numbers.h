/* Scalar conversions of number formats. Must be included before any target pragma. */
#pragma once

#include <cstdint>
#include <cstring>

namespace inl {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float bf16_to_float(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

/* To bfloat16, round to nearest even; NaN stays NaN. */
inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* To float8 (e4m3), round to nearest even, magnitudes to 448 at most; NaN stays NaN. */
inline uint8_t float_to_float8(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80;
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7f;
    const float size = float_of(bits & 0x7fffffff);
    const float limited = size < 448 ? size : 448;
    const uint32_t kept = bits_of(limited);
    /* Below 2^-6 numbers are 2^-9 apart, as those of float32 are from 2^14 on. */
    const uint32_t small = bits_of(limited + 16384.0f) & 15;
    const uint32_t normal = ((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - 960;
    return uint8_t(sign | (limited < 0x1p-6f ? small : normal));
}

/* From float16, exactly. */
inline float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t size = bits & 0x7fff;
    if (size >= 0x7c00) return float_of(sign | 0x7f800000 | (size & 0x3ff) << 13);
    /* The same fields in float32 are 2^112 times too small, subnormals included. */
    return float_of(sign | bits_of(float_of(size << 13) * 0x1p112f));
}

/* From float8 (e4m3), times FLOAT8_FACTOR: the same fields in float16. */
constexpr float FLOAT8_FACTOR = 0x1p-8f;

inline float float8_to_float(uint8_t code) {
    if ((code & 0x7f) == 0x7f) return float_of(0x7fc00000);
    return half_to_float(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7));
}

} // namespace inl
