/* The kernels for NEON with dot products (ARMv8.2). */

#include "isa/isa.h"

#if defined(__aarch64__)

/* A pragma instead of a compiler flag, because one command compiles all files. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define INL_ISA_NEON
#include "kernels/table.h"

namespace inl {

const Operation *neon_operations() { return TABLE.operations; }

} // namespace inl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace inl {

const Operation *neon_operations() { return nullptr; }

} // namespace inl

#endif
