/* The packed kinds of GGUF files: a block becomes codes, scales and offsets. */
#pragma once

#include "matrix.h"
#include "numbers.h"

namespace inl {

/* Numbers of a block as scale * (code - zero) + offset, by groups of the kind. */
struct Decoded {
    uint8_t codes[256];
    float scales[16];
    float offsets[16];
};

struct Kind {
    int block;      /* numbers */
    int bytes;      /* of a block */
    int32_t format; /* what it is packed into, and how, as in inl_matrix */
    int32_t group, zero, scale, offsets, middle;
    void (*decode)(const uint8_t *, Decoded &); /* NULL for plain numbers */
};

/* NULL for an unknown kind. */
const Kind *kind_of(int64_t kind);

} // namespace inl
