#include "runtime/quant.h"

#include <cmath>
#include <cstring>

#include "runtime/numbers.h"

namespace inl {
namespace {

/* Values of the codes of iq4_nl and iq4_xs. */
constexpr int8_t FOUR_BIT_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};
/* Values of the 4-bit floats e2m1 (sign, 2 exponent bits, 1 mantissa bit), doubled. */
constexpr int8_t E2M1_DOUBLED[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                     0, -1, -2, -3, -4, -6, -8, -12};
constexpr int MIDDLE = 128; /* code of 0 for codes that were signed bytes */

float half_at(const uint8_t *p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

void nibbles(const uint8_t *p, int half, uint8_t *codes) {
    for (int i = 0; i < half; i++) {
        codes[i] = p[i] & 15;
        codes[half + i] = p[i] >> 4;
    }
}

void fifth_bits(const uint8_t *p, uint8_t *codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

void look_up(const int8_t *table, uint8_t *codes, int count) {
    for (int i = 0; i < count; i++) codes[i] = uint8_t(table[codes[i]] + MIDDLE);
}

void q4_0(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    nibbles(p + 2, 16, d.codes);
}

void q4_1(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    d.offsets[0] = half_at(p + 2);
    nibbles(p + 4, 16, d.codes);
}

void q5_0(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    nibbles(p + 6, 16, d.codes);
    fifth_bits(p + 2, d.codes);
}

void q5_1(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    d.offsets[0] = half_at(p + 2);
    nibbles(p + 8, 16, d.codes);
    fifth_bits(p + 4, d.codes);
}

void q8_0(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    for (int i = 0; i < 32; i++) d.codes[i] = uint8_t(p[2 + i] + MIDDLE);
}

/* 2-bit codes, stored in 32 bytes for each half of the block. */
void two_bits(const uint8_t *p, uint8_t *codes) {
    for (int i = 0; i < 256; i++)
        codes[i] = p[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

void q2_k(const uint8_t *p, Decoded &d) {
    const float scale = half_at(p + 80), offset = half_at(p + 82);
    for (int g = 0; g < 16; g++) {
        d.scales[g] = scale * float(p[g] & 15);
        d.offsets[g] = -(offset * float(p[g] >> 4));
    }
    two_bits(p + 16, d.codes);
}

void q3_k(const uint8_t *p, Decoded &d) {
    const float scale = half_at(p + 108);
    const uint8_t *packed = p + 96;
    for (int g = 0; g < 16; g++) {
        const int low = packed[g % 8] >> (g / 8 * 4) & 15;
        const int high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
        d.scales[g] = scale * float((low | high << 4) - 32);
    }
    two_bits(p + 32, d.codes);
    for (int i = 0; i < 256; i++) d.codes[i] |= (p[i % 32] >> (i / 32) & 1) << 2;
}

/* 8 scales and offsets of 6 bits in 12 bytes: the first four of each are the low 6 bits
 * of bytes 0 to 7; the others have 4 bits in bytes 8 to 11 and 2 in the high bits of
 * bytes 0 to 7. */
void six_bits(const uint8_t *p, Decoded &d) {
    const float scale = half_at(p), offset = half_at(p + 2);
    const uint8_t *first = p + 4, *second = p + 8, *rest = p + 12;
    for (int g = 0; g < 4; g++) {
        d.scales[g] = scale * float(first[g] & 63);
        d.offsets[g] = -(offset * float(second[g] & 63));
        d.scales[4 + g] = scale * float((rest[g] & 15) | first[g] >> 6 << 4);
        d.offsets[4 + g] = -(offset * float(rest[g] >> 4 | second[g] >> 6 << 4));
    }
}

void q4_k(const uint8_t *p, Decoded &d) {
    six_bits(p, d);
    for (int pair = 0; pair < 4; pair++)
        nibbles(p + 16 + 32 * pair, 32, d.codes + 64 * pair);
}

void q5_k(const uint8_t *p, Decoded &d) {
    six_bits(p, d);
    for (int pair = 0; pair < 4; pair++)
        nibbles(p + 48 + 32 * pair, 32, d.codes + 64 * pair);
    for (int i = 0; i < 256; i++) d.codes[i] |= (p[16 + i % 32] >> (i / 32) & 1) << 4;
}

void q6_k(const uint8_t *p, Decoded &d) {
    const float scale = half_at(p + 208);
    for (int g = 0; g < 16; g++) d.scales[g] = scale * float(int8_t(p[192 + g]));
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const int low = p[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        const int high = p[128 + half * 32 + at] >> (quarter * 2) & 3;
        d.codes[i] = uint8_t(low | high << 4);
    }
}

void iq4_nl(const uint8_t *p, Decoded &d) {
    d.scales[0] = half_at(p);
    nibbles(p + 2, 16, d.codes);
    look_up(FOUR_BIT_VALUES, d.codes, 32);
}

void iq4_xs(const uint8_t *p, Decoded &d) {
    const float scale = half_at(p);
    const int high = p[2] | p[3] << 8;
    for (int g = 0; g < 8; g++) {
        const int low = p[4 + g / 2] >> (g % 2 * 4) & 15;
        d.scales[g] = scale * float((low | (high >> 2 * g & 3) << 4) - 32);
        nibbles(p + 8 + 16 * g, 16, d.codes + 32 * g);
    }
    look_up(FOUR_BIT_VALUES, d.codes, 256);
}

void mxfp4(const uint8_t *p, Decoded &d) {
    d.scales[0] = std::ldexp(1.0f, p[0] - 128);
    nibbles(p + 1, 16, d.codes);
    look_up(E2M1_DOUBLED, d.codes, 32);
}

constexpr Kind KINDS[INL_KINDS] = {
    {1, 4, INL_F32, 0, 0, INL_F32, 0, 0, nullptr},
    {1, 2, INL_F32, 0, 0, INL_F32, 0, 0, nullptr},
    {1, 2, INL_BF16, 0, 0, INL_F32, 0, 0, nullptr},
    {32, 18, INL_U4, 32, 8, INL_F16, 0, 8, q4_0},
    {32, 20, INL_U4, 32, 0, INL_F16, 1, 8, q4_1},
    {32, 22, INL_U8, 32, 16, INL_F16, 0, 16, q5_0},
    {32, 24, INL_U8, 32, 0, INL_F16, 1, 16, q5_1},
    {32, 34, INL_U8, 32, MIDDLE, INL_F16, 0, MIDDLE, q8_0},
    {256, 84, INL_U4, 16, 0, INL_F32, 1, 2, q2_k},
    {256, 110, INL_U4, 16, 4, INL_F32, 0, 4, q3_k},
    {256, 144, INL_U4, 32, 0, INL_F32, 1, 8, q4_k},
    {256, 176, INL_U8, 32, 0, INL_F32, 1, 16, q5_k},
    {256, 210, INL_U8, 16, 32, INL_F32, 0, 32, q6_k},
    {32, 18, INL_U8, 32, MIDDLE, INL_F16, 0, MIDDLE, iq4_nl},
    {256, 136, INL_U8, 32, MIDDLE, INL_F32, 0, MIDDLE, iq4_xs},
    {32, 17, INL_U8, 32, MIDDLE, INL_F32, 0, MIDDLE, mxfp4},
};

} // namespace

const Kind *kind_of(int64_t kind) {
    return kind < 0 || kind >= INL_KINDS ? nullptr : &KINDS[kind];
}

} // namespace inl
