/* Decoding of the GGUF block formats into codes, scales and offsets. */
#pragma once

#include "runtime/matrix.h"

namespace inl {

/* A decoded block of 32 or 256 numbers, see inl_matrix: the codes, the scales and
 * offsets of groups if they are bytes, and the float16 numbers. */
struct Decoded {
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

/* Codes of 4 bits that are indices: values plus 128, four times for a register. */
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

constexpr CodeTable IQ4_TABLE = code_table(IQ4_VALUES);
constexpr CodeTable E2M1_TABLE = code_table(E2M1_DOUBLED);

inline const uint8_t *table_of(const inl_matrix &m) {
    return m.format == INL_M4 ? E2M1_TABLE.values : IQ4_TABLE.values;
}

/* A kind by number; NULL if unknown. */
const Kind *kind_of(int64_t kind);

} // namespace inl
