#include "runtime/sets.h"

#include "runtime/cpu.h"

namespace inl {

/* build_native.py defines INL_WITHOUT_* for the instruction sets that it leaves out. */
const Operation *compiled_operations(int32_t isa) {
    switch (isa) {
#if !defined(INL_WITHOUT_SCALAR)
    case INL_SCALAR: return scalar_operations();
#endif
#if !defined(INL_WITHOUT_AVX2)
    case INL_AVX2: return avx2_operations();
#endif
#if !defined(INL_WITHOUT_AVX_VNNI)
    case INL_AVX_VNNI: return avx_vnni_operations();
#endif
#if !defined(INL_WITHOUT_AVX512)
    case INL_AVX512: return avx512_operations();
#endif
#if !defined(INL_WITHOUT_AMX)
    case INL_AMX: return amx_operations();
#endif
#if !defined(INL_WITHOUT_NEON)
    case INL_NEON: return neon_operations();
#endif
    default: return nullptr;
    }
}

const Operation *operations_of(int32_t isa) {
    return processor_has(isa) ? compiled_operations(isa) : nullptr;
}

int32_t best_isa() {
    for (int32_t isa : BEST_FIRST)
        if (operations_of(isa) != nullptr) return isa;
    return INL_SCALAR;
}

} // namespace inl
