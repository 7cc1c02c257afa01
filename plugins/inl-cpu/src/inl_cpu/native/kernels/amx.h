/* Dispatch table for AMX: that of AVX-512 with other products and attention. */
#pragma once

#include "kernels/amx_attention.h"
#include "kernels/amx_linear.h"
#include "kernels/phase.h"
#include "kernels/table.h"

namespace inl {
namespace {

struct AmxTable : Table {
    constexpr AmxTable() {
        operations[INL_LINEAR] = {phase<amx_encode_chunks, amx_encode_body>(),
                                  phase<amx_linear_chunks, amx_linear_body>(),
                                  scratch<amx_linear_scratch>()};
        operations[INL_ATTENTION] = {phase<cache_tokens_chunks, cache_tokens_body>(),
                                     phase<amx_attention_chunks, amx_attention_body>(),
                                     scratch<amx_attention_scratch>(),
                                     phase<amx_reduce_chunks, reduce_body>()};
    }
};

constexpr AmxTable AMX_TABLE;

} // namespace
} // namespace inl
