/* How an opcode runs: up to three phases, each divided into chunks for any thread.
 *
 * Chunks depend on the instruction only, never on the number of threads, and each
 * result is written by one chunk; hence results are equal for any number of threads.
 */
#pragma once

#include <cstdint>

#include "runtime/instructions.h"

namespace inl {

/* State of the thread that runs a chunk. */
struct Worker {
    char *own;    /* scratch of this thread */
    char *shared; /* scratch of the instruction, common to all threads */
    bool fresh;   /* whether this is the thread's first chunk of the phase */
};

using Body = void (*)(const inl_instruction &, int64_t chunk, Worker &);

struct Phase {
    int64_t (*chunks)(const inl_instruction &) = nullptr; /* NULL: no such phase */
    Body body = nullptr;
};

/* Scratch bytes of an instruction: common, and for each thread. */
struct Scratch {
    int64_t shared = 0;
    int64_t own = 0;
};

struct Operation {
    Phase first{};
    Phase second{};
    Scratch (*scratch)(const inl_instruction &) = nullptr; /* NULL: none */
    Phase third{};
};

constexpr int64_t MAX_CHUNKS = (1 << 20) - 1;

/* Division rounded up. */
static inline int64_t ceil_div(int64_t count, int64_t size) {
    return (count + size - 1) / size;
}

/* Bytes rounded up to cache lines. */
static inline int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

/* The operations of each instruction set by opcode; NULL if it was not compiled. */
const Operation *scalar_operations();
const Operation *avx2_operations();
const Operation *avx_vnni_operations();
const Operation *avx512_operations();
const Operation *amx_operations();
const Operation *neon_operations();

} // namespace inl
