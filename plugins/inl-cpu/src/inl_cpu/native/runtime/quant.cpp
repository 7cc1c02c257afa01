#include "runtime/quant.h"

#include <cstring>

namespace inl {
namespace {

constexpr int MIDDLE = 128; /* code of 0 for codes that were signed bytes */

uint16_t half_at(const uint8_t *p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return bits;
}

/* Of a kind that subtracts its offsets. */
uint16_t negated_half_at(const uint8_t *p) { return half_at(p) ^ 0x8000; }

void nibbles(const uint8_t *p, int half, uint8_t *codes) {
    for (int i = 0; i < half; i++) {
        codes[i] = p[i] & 15;
        codes[half + i] = p[i] >> 4;
    }
}

void fifth_bits(const uint8_t *p, uint8_t *codes) {
    for (int byte = 0; byte < 4; byte++)
        for (int bit = 0; bit < 8; bit++)
            codes[8 * byte + bit] |= (p[byte] >> bit & 1) << 4;
}

void q4_0(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    nibbles(p + 2, 16, d.codes);
}

void q4_1(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    d.offset = half_at(p + 2);
    nibbles(p + 4, 16, d.codes);
}

void q5_0(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    nibbles(p + 6, 16, d.codes);
    fifth_bits(p + 2, d.codes);
}

void q5_1(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    d.offset = half_at(p + 2);
    nibbles(p + 8, 16, d.codes);
    fifth_bits(p + 4, d.codes);
}

void q8_0(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    for (int i = 0; i < 32; i++) d.codes[i] = uint8_t(p[2 + i] + MIDDLE);
}

/* 2-bit codes, stored in 32 bytes for each half of the block. Decoders of the K kinds
 * loop over 32 bytes with a constant shift, which compilers turn into vectors. */
void two_bits(const uint8_t *p, uint8_t *codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++, codes += 32)
            for (int i = 0; i < 32; i++)
                codes[i] = p[half * 32 + i] >> 2 * quarter & 3;
}

/* Or one bit of each code, stored in 32 bytes: bit n of byte i is of code 32 * n + i. */
void single_bits(const uint8_t *p, int place, uint8_t *codes) {
    for (int run = 0; run < 8; run++, codes += 32)
        for (int i = 0; i < 32; i++)
            codes[i] |= uint8_t((p[i] >> run & 1) << place);
}

void q2_k(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p + 80);
    d.offset = negated_half_at(p + 82);
    std::memcpy(d.scales, p, 16);
    two_bits(p + 16, d.codes);
}

void q3_k(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p + 108);
    const uint8_t *packed = p + 96;
    for (int g = 0; g < 16; g++) {
        const int low = packed[g % 8] >> (g / 8 * 4) & 15;
        const int high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
        d.scales[g] = uint8_t((low | high << 4) - 32);
    }
    two_bits(p + 32, d.codes);
    single_bits(p, 2, d.codes);
}

/* 8 scales and offsets of 6 bits in 12 bytes: the first four of each are the low 6 bits
 * of bytes 0 to 7; the others have 4 bits in bytes 8 to 11 and 2 in the high bits of
 * bytes 0 to 7. */
void six_bits(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    d.offset = negated_half_at(p + 2);
    const uint8_t *first = p + 4, *second = p + 8, *rest = p + 12;
    for (int g = 0; g < 4; g++) {
        d.scales[g] = first[g] & 63;
        d.offsets[g] = second[g] & 63;
        d.scales[4 + g] = uint8_t((rest[g] & 15) | first[g] >> 6 << 4);
        d.offsets[4 + g] = uint8_t(rest[g] >> 4 | second[g] >> 6 << 4);
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
    single_bits(p + 16, 4, d.codes);
}

void q6_k(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p + 208);
    std::memcpy(d.scales, p + 192, 16);
    uint8_t *codes = d.codes;
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++, codes += 32) {
            const uint8_t *lows = p + half * 64 + quarter % 2 * 32;
            const uint8_t *highs = p + 128 + half * 32;
            for (int i = 0; i < 32; i++)
                codes[i] = uint8_t((lows[i] >> quarter / 2 * 4 & 15) |
                                   (highs[i] >> 2 * quarter & 3) << 4);
        }
}

void iq4_nl(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    nibbles(p + 2, 16, d.codes);
}

void iq4_xs(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    const int high = p[2] | p[3] << 8;
    for (int g = 0; g < 8; g++) {
        const int low = p[4 + g / 2] >> (g % 2 * 4) & 15;
        d.scales[g] = uint8_t((low | (high >> 2 * g & 3) << 4) - 32);
        nibbles(p + 8 + 16 * g, 16, d.codes + 32 * g);
    }
}

void mxfp4(const uint8_t *p, Decoded &d) {
    d.scales[0] = p[0];
    nibbles(p + 1, 16, d.codes);
}

/* Block, bytes, format, group, zero, scale, offsets, middle, decoder. */
constexpr Kind KINDS[INL_KINDS] = {
    {1, 4, INL_F32, 0, 0, 0, 0, 0, nullptr},
    {1, 2, INL_F32, 0, 0, 0, 0, 0, nullptr},
    {1, 2, INL_BF16, 0, 0, 0, 0, 0, nullptr},
    {32, 18, INL_U4, 32, 8, INL_SCALE_HALF, 0, 8, q4_0},
    {32, 20, INL_U4, 32, 0, INL_SCALE_HALF, 1, 8, q4_1},
    {32, 22, INL_U5, 32, 16, INL_SCALE_HALF, 0, 16, q5_0},
    {32, 24, INL_U5, 32, 0, INL_SCALE_HALF, 1, 16, q5_1},
    {32, 34, INL_U8, 32, MIDDLE, INL_SCALE_HALF, 0, MIDDLE, q8_0},
    {256, 84, INL_U2, 16, 0, INL_SCALE_NIBBLE, 1, 2, q2_k},
    {256, 110, INL_U3, 16, 4, INL_SCALE_SIX, 0, 4, q3_k},
    {256, 144, INL_U4, 32, 0, INL_SCALE_BYTE, 1, 8, q4_k},
    {256, 176, INL_U5, 32, 0, INL_SCALE_BYTE, 1, 16, q5_k},
    {256, 210, INL_U6, 16, 32, INL_SCALE_BYTE, 0, 32, q6_k},
    {32, 18, INL_N4, 32, TABLE_ZERO, INL_SCALE_HALF, 0, TABLE_ZERO, iq4_nl},
    {256, 136, INL_N4, 32, TABLE_ZERO, INL_SCALE_BYTE, 0, TABLE_ZERO, iq4_xs},
    {32, 17, INL_M4, 32, TABLE_ZERO, INL_SCALE_EXPONENT, 0, TABLE_ZERO, mxfp4},
};

} // namespace

const Kind *kind_of(int64_t kind) {
    return kind < 0 || kind >= INL_KINDS ? nullptr : &KINDS[kind];
}

} // namespace inl
