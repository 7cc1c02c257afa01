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

/* From float16, exactly. */
inline float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t size = bits & 0x7fff;
    if (size >= 0x7c00) return float_of(sign | 0x7f800000 | (size & 0x3ff) << 13);
    /* The same fields in float32 are 2^112 times too small, subnormals included. */
    return float_of(sign | bits_of(float_of(size << 13) * 0x1p112f));
}

} // namespace inl
