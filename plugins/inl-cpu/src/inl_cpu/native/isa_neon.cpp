/* The kernels for NEON with dot products (ARMv8.2). */

#include "isa.h"

#if defined(__aarch64__)

#include <arm_neon.h>

/* Set here and not by a flag: one command compiles all files. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace inl {
namespace {

#include "simd_neon.h"

#include "kernels.h"

} // namespace

const Operation *neon_operations() { return OPERATIONS; }

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
