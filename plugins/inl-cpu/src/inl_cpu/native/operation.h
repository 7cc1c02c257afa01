/* How an opcode is run: up to three phases, each cut into chunks that any thread takes.
 *
 * Chunks follow from the instruction alone, never from the number of threads, and
 * each result is written by one chunk: hence equal bits for any number of threads.
 */
#pragma once

#include "inl.h"

namespace inl {

/* What one thread brings to a chunk. */
struct Worker {
    char *own;    /* scratch of this thread */
    char *shared; /* scratch of the instruction, common to all threads */
    bool fresh;   /* whether this is the thread's first chunk of the phase */
};

using Body = void (*)(const inl_instruction &, int64_t chunk, Worker &);

struct Phase {
    int64_t (*chunks)(const inl_instruction &); /* NULL: there is no such phase */
    Body body;
};

/* Bytes that an instruction needs for itself and for each thread. */
struct Scratch {
    int64_t shared = 0;
    int64_t own = 0;
};

struct Operation {
    Phase first;
    Phase second;
    Scratch (*scratch)(const inl_instruction &); /* NULL: none */
    Phase third = {nullptr, nullptr};
};

constexpr int64_t MOST_CHUNKS = (1 << 20) - 1;

inline int64_t over(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline int64_t aligned(int64_t bytes) { return over(bytes, 64) * 64; }

template <class T>
T *data(const inl_instruction &i, int index) {
    return static_cast<T *>(i.data[index]);
}

inline const inl_matrix &matrix(const inl_instruction &i, int index) {
    return *static_cast<const inl_matrix *>(i.data[index]);
}

/* One table of operations for each instruction set; NULL where it was not compiled. */
const Operation *scalar_operations();
const Operation *avx2_operations();
const Operation *avx_vnni_operations();
const Operation *avx512_operations();
const Operation *amx_operations();
const Operation *neon_operations();

/* Why an instruction cannot run, or NULL. */
const char *refusal(const inl_instruction &instruction);

} // namespace inl
