/* Decoding of the GGUF block formats into codes, scales and offsets. */
#pragma once

#include "runtime/matrix.h"

namespace inl {

/* A decoded block: numbers are scale * (code - zero) + offset, with a scale and an
 * offset for each group. */
struct Decoded {
    uint8_t codes[256];
    float scales[16];
    float offsets[16];
};

struct Kind {
    int block;      /* numbers of a block */
    int bytes;      /* bytes of a block */
    int32_t format; /* packing, as in inl_matrix */
    int32_t group, zero, scale, offsets, middle;
    void (*decode)(const uint8_t *, Decoded &); /* NULL for plain numbers */
};

/* A kind by number; NULL if unknown. */
const Kind *kind_of(int64_t kind);

} // namespace inl
