/* Detection of the instruction sets of this machine. */
#pragma once

#include "runtime/operation.h"

namespace inl {

/* The operations of an instruction set, or NULL if the processor, the operating system
 * or this build lacks it. AVX2 includes AVX-VNNI on processors that have it. */
const Operation *operations_of(int32_t isa);

int32_t best_isa();

/* Whether the processor itself prefetches a stream at the speed of memory, and slows
 * down where every line is prefetched by an instruction. */
extern const bool READS_AHEAD;

} // namespace inl
