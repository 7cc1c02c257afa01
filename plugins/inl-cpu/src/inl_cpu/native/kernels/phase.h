/* Adapts typed kernels to the untyped function pointers of runtime/operation.h.
 *
 * A kernel takes the view of its instruction (inl::args), which the adapters construct.
 */
#pragma once

#include <cstdint>

#include "runtime/operation.h"

namespace inl {
namespace {

template <class Op>
Op op_of_body(void (*)(Op, int64_t, Worker &));
template <class Op>
Op op_of_scratch(Scratch (*)(Op));

template <auto CHUNKS, auto BODY>
struct TypedPhase {
    using Op = decltype(op_of_body(BODY));
    static int64_t chunks(const inl_instruction &i) { return CHUNKS(Op(i)); }
    static void body(const inl_instruction &i, int64_t chunk, Worker &worker) {
        BODY(Op(i), chunk, worker);
    }
};

template <auto CHUNKS, auto BODY>
constexpr Phase phase() {
    return {TypedPhase<CHUNKS, BODY>::chunks, TypedPhase<CHUNKS, BODY>::body};
}

template <auto SCRATCH>
struct TypedScratch {
    using Op = decltype(op_of_scratch(SCRATCH));
    static Scratch bytes(const inl_instruction &i) { return SCRATCH(Op(i)); }
};

template <auto SCRATCH>
constexpr auto scratch() {
    return TypedScratch<SCRATCH>::bytes;
}

} // namespace
} // namespace inl
