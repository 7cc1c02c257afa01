/* Dispatch table for AVX-512 with VNNI: other products of many rows. */
#pragma once

#include "kernels/avx512_linear.h"
#include "kernels/phase.h"
#include "kernels/table.h"

namespace inl {
namespace {

struct Avx512Table : Table {
    constexpr Avx512Table() {
        operations[INL_LINEAR] = {phase<block_encode_chunks, block_encode_body>(),
                                  phase<block_linear_chunks, block_linear_body>(),
                                  scratch<block_linear_scratch>()};
    }
};

constexpr Avx512Table AVX512_TABLE;

} // namespace
} // namespace inl
