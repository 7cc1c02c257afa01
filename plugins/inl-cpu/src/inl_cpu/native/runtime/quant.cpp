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

/* Base 3: a byte holds five digits as the fraction byte / 256. */
void ternary_digits(const uint8_t *p, int count, int digits, uint8_t *codes) {
    uint8_t power = 1;
    for (int digit = 0; digit < digits; digit++, power = uint8_t(power * 3))
        for (int i = 0; i < count; i++, codes++)
            *codes = uint8_t(uint8_t(p[i] * power) * 3 >> 8);
}

void tq1_0(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p + 52);
    ternary_digits(p, 32, 5, d.codes);
    ternary_digits(p + 32, 16, 5, d.codes + 160);
    ternary_digits(p + 48, 4, 4, d.codes + 240);
}

void tq2_0(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p + 64);
    two_bits(p, d.codes);
}

/* A codebook lists COUNT codes for each index. Bits of signs are those of the codes in
 * order, and become the bit at PLACE. */
template <int COUNT, int PLACE>
void entry(const uint8_t *codebook, int index, int signs, uint8_t *codes) {
    for (int i = 0; i < COUNT; i++)
        codes[i] =
            uint8_t(codebook[index * COUNT + i] | (signs >> i & 1) << PLACE);
}

/* Signs of eight codes in 7 bits: an even number of them is negative. */
int even_signs(uint32_t bits) {
    return int(bits | uint32_t(__builtin_parity(bits)) << 7);
}

uint32_t word_at(const uint8_t *p) {
    return p[0] | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
}

/* 2 * s + 1 for scales s of 4 bits, of groups of 16. */
void odd_nibbles(const uint8_t *p, uint8_t *scales) {
    for (int g = 0; g < 16; g++)
        scales[g] = uint8_t(2 * (p[g / 2] >> (g % 2 * 4) & 15) + 1);
}

void iq2_xxs(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    uint8_t *codes = d.codes;
    for (int g = 0; g < 8; g++) {
        const uint8_t *indices = p + 2 + 8 * g;
        const uint32_t rest = word_at(indices + 4);
        d.scales[g] = uint8_t(2 * (rest >> 28) + 1);
        for (int i = 0; i < 4; i++, codes += 8)
            entry<8, 2>(d.codebook, indices[i], even_signs(rest >> 7 * i & 127), codes);
    }
}

void iq2_xs(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    odd_nibbles(p + 66, d.scales);
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = half_at(p + 2 + 2 * i);
        entry<8, 2>(d.codebook, int(bits & 511), even_signs(bits >> 9),
                    d.codes + 8 * i);
    }
}

void iq2_s(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    odd_nibbles(p + 74, d.scales);
    for (int i = 0; i < 32; i++) {
        const int high = p[66 + i / 4] >> i % 4 * 2 & 3;
        entry<8, 2>(d.codebook, p[2 + i] | high << 8, p[34 + i], d.codes + 8 * i);
    }
}

/* Scales are eighths of the float16, so 4 * s + 2 are the (2 * s + 1) / 4 of a group. */
void iq3_xxs(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    uint8_t *codes = d.codes;
    for (int g = 0; g < 8; g++) {
        const uint8_t *indices = p + 2 + 8 * g;
        const uint32_t rest = word_at(p + 66 + 4 * g);
        d.scales[g] = uint8_t(4 * (rest >> 28) + 2);
        for (int i = 0; i < 8; i++, codes += 4) {
            const int signs = even_signs(rest >> i / 2 * 7 & 127);
            entry<4, 3>(d.codebook, indices[i], signs >> i % 2 * 4, codes);
        }
    }
}

/* The table is doubled, so 4 * (2 * s + 1) eighths are the 2 * s + 1 of a group. */
void iq3_s(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    for (int g = 0; g < 8; g++)
        d.scales[g] = uint8_t(8 * (p[106 + g / 2] >> (g % 2 * 4) & 15) + 4);
    for (int i = 0; i < 64; i++) {
        const int high = p[66 + i / 8] >> i % 8 & 1;
        entry<4, 3>(d.codebook, p[2 + i] | high << 8, p[74 + i / 2] >> i % 2 * 4,
                    d.codes + 4 * i);
    }
}

/* All eight codes share the sign of their eighth. */
void iq1_entry(const uint8_t *codebook, int index, bool negative, uint8_t *codes) {
    entry<8, 2>(codebook, index, negative ? 255 : 0, codes);
}

void iq1_s(const uint8_t *p, Decoded &d) {
    d.scale = half_at(p);
    for (int g = 0; g < 8; g++) {
        const int high = half_at(p + 34 + 2 * g);
        d.scales[g] = uint8_t(2 * (high >> 12 & 7) + 1);
        for (int i = 0; i < 4; i++)
            iq1_entry(d.codebook, p[2 + 4 * g + i] | (high >> 3 * i & 7) << 8,
                      high >> 15, d.codes + 32 * g + 8 * i);
    }
}

void iq1_m(const uint8_t *p, Decoded &d) {
    uint32_t scale = 0;
    for (int i = 0; i < 4; i++)
        scale |= uint32_t(half_at(p + 48 + 2 * i) >> 12) << 4 * i;
    d.scale = uint16_t(scale);
    for (int g = 0; g < 16; g++)
        d.scales[g] = uint8_t(2 * (half_at(p + 48 + g / 4 * 2) >> g % 4 * 3 & 7) + 1);
    for (int i = 0; i < 32; i++) {
        const int high = p[32 + i / 2] >> i % 2 * 4;
        iq1_entry(d.codebook, p[i] | (high & 7) << 8, high & 8, d.codes + 8 * i);
    }
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
    {256, 54, INL_U2, 16, 1, INL_SCALE_WIDE, 0, 1, tq1_0},
    {256, 66, INL_U2, 16, 1, INL_SCALE_WIDE, 0, 1, tq2_0},
    {256, 50, INL_IQ1, 32, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq1_s},
    {256, 56, INL_IQ1, 16, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq1_m},
    {256, 66, INL_IQ2, 32, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq2_xxs},
    {256, 74, INL_IQ2, 16, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq2_xs},
    {256, 82, INL_IQ2, 16, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq2_s},
    {256, 98, INL_IQ3_XXS, 32, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq3_xxs},
    {256, 110, INL_IQ3_S, 32, TABLE_ZERO, INL_SCALE_EIGHTHS, 0, TABLE_ZERO, iq3_s},
};

} // namespace

const Kind *kind_of(int64_t kind) {
    return kind < 0 || kind >= INL_KINDS ? nullptr : &KINDS[kind];
}

} // namespace inl
