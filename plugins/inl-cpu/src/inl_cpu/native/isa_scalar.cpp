/* The kernels in plain C++, for any machine. */

#include "isa.h"

namespace inl {
namespace {

#include "simd_scalar.h"

#include "kernels.h"

} // namespace

const Operation *scalar_operations() { return OPERATIONS; }

} // namespace inl
