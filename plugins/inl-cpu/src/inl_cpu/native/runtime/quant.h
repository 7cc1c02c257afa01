/* Decoding of the GGUF block formats into codes, scales and offsets. */
#pragma once

#include "runtime/matrix.h"

namespace inl {

/* A decoded block of 32 or 256 numbers, see inl_matrix: the codes, the scales and
 * offsets of groups if they are bytes, and the float16 numbers. */
struct Decoded {
    const uint8_t *codebook = nullptr; /* of the kind, if it has one: see quant.cpp */
    uint8_t codes[256];
    uint8_t scales[16];
    uint8_t offsets[16];
    uint16_t scale, offset;
};

struct Kind {
    int block;      /* numbers of a block */
    int bytes;      /* bytes of a block */
    int32_t format; /* packing, as in inl_matrix */
    int32_t group, zero, scale, offsets, middle;
    void (*decode)(const uint8_t *, Decoded &); /* NULL for plain numbers */
};

/* Codes that are indices: values plus 128, four times for a register. */
struct CodeTable {
    uint8_t values[64];
};

constexpr int TABLE_ZERO = 128;
constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
/* The 4-bit floats e2m1 (sign, 2 exponent bits, 1 mantissa bit), doubled. */
constexpr int8_t E2M1_DOUBLED[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                     0, -1, -2, -3, -4, -6, -8, -12};

constexpr CodeTable code_table(const int8_t (&values)[16]) {
    CodeTable table{};
    for (int at = 0; at < 64; at++)
        table.values[at] = uint8_t(values[at % 16] + TABLE_ZERO);
    return table;
}

/* 8 * (v + d) for the three values v of iq1 and d of an eighth, positive or negative. */
constexpr int8_t IQ1_TIMES_8[16] = {-7, 1, 9, 0, -9, -1, 7, 0,
                                    -7, 1, 9, 0, -9, -1, 7, 0};
constexpr int8_t IQ2_VALUES[16] = {8, 25, 43, 0, -8, -25, -43, 0,
                                   8, 25, 43, 0, -8, -25, -43, 0};
constexpr int8_t IQ3_XXS_VALUES[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                       -4, -12, -20, -28, -36, -44, -52, -62};
constexpr int8_t IQ3_S_DOUBLED[16] = {2,  6,  10,  14,  18,  22,  26,  30,
                                      -2, -6, -10, -14, -18, -22, -26, -30};

constexpr CodeTable IQ4_TABLE = code_table(IQ4_VALUES);
constexpr CodeTable E2M1_TABLE = code_table(E2M1_DOUBLED);
constexpr CodeTable IQ1_TABLE = code_table(IQ1_TIMES_8);
constexpr CodeTable IQ2_TABLE = code_table(IQ2_VALUES);
constexpr CodeTable IQ3_XXS_TABLE = code_table(IQ3_XXS_VALUES);
constexpr CodeTable IQ3_S_TABLE = code_table(IQ3_S_DOUBLED);

inline const uint8_t *table_of(const inl_matrix &m) {
    switch (m.format) {
    case INL_M4: return E2M1_TABLE.values;
    case INL_IQ1: return IQ1_TABLE.values;
    case INL_IQ2: return IQ2_TABLE.values;
    case INL_IQ3_XXS: return IQ3_XXS_TABLE.values;
    case INL_IQ3_S: return IQ3_S_TABLE.values;
    default: return IQ4_TABLE.values;
    }
}

/* A kind by number; NULL if unknown. */
const Kind *kind_of(int64_t kind);

} // namespace inl
