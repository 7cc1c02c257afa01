/* The instruction sets of this library. */
#pragma once

#include <cstdint>

#include "runtime/operation.h"

namespace inl {

/* The operations of an instruction set, or NULL if this build left it out, or is for
 * another architecture. */
const Operation *compiled_operations(int32_t isa);

/* The same, or NULL if the processor lacks the instruction set. */
const Operation *operations_of(int32_t isa);

/* The best that can run; INL_SCALAR if none can. */
int32_t best_isa();

} // namespace inl
