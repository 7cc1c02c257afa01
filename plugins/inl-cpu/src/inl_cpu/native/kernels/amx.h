/* What AMX computes other than AVX-512: products and attention of many rows. */
#pragma once

#include "kernels/amx_attention.h"
#include "kernels/amx_linear.h"
#include "kernels/phase.h"
#include "runtime/operation.h"

namespace inl {
namespace {

constexpr Operation AMX_LINEAR = {phase<amx_encode_chunks, amx_encode_body>(),
                                  phase<amx_linear_chunks, amx_linear_body>(),
                                  scratch<amx_linear_scratch>()};

/* Without the first phase, which is that of AVX-512. */
constexpr Operation AMX_ATTENTION = {{},
                                     phase<amx_attention_chunks, amx_attention_body>(),
                                     scratch<amx_attention_scratch>(),
                                     phase<amx_reduce_chunks, amx_reduce_body>()};

} // namespace
} // namespace inl
