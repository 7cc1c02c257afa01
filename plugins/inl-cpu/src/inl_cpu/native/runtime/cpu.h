/* Detection of the instruction sets of this processor. */
#pragma once

#include "runtime/inl.h"

namespace inl {

/* From the best to the one that every processor has. */
constexpr int32_t BEST_FIRST[] = {INL_AMX, INL_AVX512, INL_AVX_VNNI,
                                  INL_AVX2, INL_NEON, INL_SCALAR};

/* Whether the processor and the operating system have an instruction set. AVX2 includes
 * AVX-VNNI on processors that have it. */
bool processor_has(int32_t isa);

/* Whether the processor itself prefetches a stream at the speed of memory, and slows
 * down where every line is prefetched by an instruction. */
extern const bool READS_AHEAD;

} // namespace inl
