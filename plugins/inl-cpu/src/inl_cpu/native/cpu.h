/* What this machine can run. */
#pragma once

#include "operation.h"

namespace inl {

/* The operations of an instruction set, or NULL where the machine, the system or this
 * build lacks it. AVX2 stands for AVX-VNNI too, where there is that. */
const Operation *operations_of(int32_t isa);

int32_t best_isa();

} // namespace inl
