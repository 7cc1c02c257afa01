/* The kernels for AVX2 with FMA, F16C and AVX-VNNI. */

#include "isa/isa.h"

#if defined(__x86_64__)

/* A pragma instead of a compiler flag, because one command compiles all files. */
/* clang-format off */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
/* clang-format on */

#define INL_ISA_AVX_VNNI
#include "kernels/table.h"

namespace inl {

const Operation *avx_vnni_operations() { return TABLE.operations; }

} // namespace inl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace inl {

const Operation *avx_vnni_operations() { return nullptr; }

} // namespace inl

#endif
