/* The kernels for AMX (tiles of bfloat16), and those of AVX-512. */

#include "isa/isa.h"

#if defined(__x86_64__)

/* A pragma instead of a compiler flag, because one command compiles all files. */
/* clang-format off */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl," \
                          "avx512vnni,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC target("avx512vnni,avx512bf16,avx2,fma,f16c")
#endif
/* clang-format on */

#define INL_ISA_AMX
#include "kernels/amx.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace inl {
namespace {

struct Table {
    Operation operations[INL_OPCODES];

    Table() {
        std::memcpy(operations, avx512_operations(), sizeof(operations));
        operations[INL_LINEAR] = AMX_LINEAR;
        const Phase first = operations[INL_ATTENTION].first;
        operations[INL_ATTENTION] = AMX_ATTENTION;
        operations[INL_ATTENTION].first = first;
    }
};

} // namespace

const Operation *amx_operations() {
    static const Table TABLE;
    return TABLE.operations;
}

} // namespace inl

#else

namespace inl {

const Operation *amx_operations() { return nullptr; }

} // namespace inl

#endif
