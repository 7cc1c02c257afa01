/* The kernels for AVX-512 with VNNI and BF16. */

#include "isa/isa.h"

#if defined(__x86_64__)

/* A pragma instead of a compiler flag, because one command compiles all files. */
/* clang-format off */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl," \
                          "avx512vnni,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC target("avx512vnni,avx512bf16,avx2,fma,f16c")
#endif
/* clang-format on */

#define INL_ISA_AVX512
#include "kernels/avx512.h"

namespace inl {

const Operation *avx512_operations() { return AVX512_TABLE.operations; }

} // namespace inl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace inl {

const Operation *avx512_operations() { return nullptr; }

} // namespace inl

#endif
