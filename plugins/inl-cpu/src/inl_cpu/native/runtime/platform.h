/* Operating system and processor functions of the thread pool. */
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_WIN32)
#include <malloc.h>
#else
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "runtime/operation.h"

namespace inl {

/* Hint that the thread is spinning. */
inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Process id; 0 on Windows, which has no fork. */
inline long process_id() {
#if defined(_WIN32)
    return 0;
#else
    return getpid();
#endif
}

/* Memory aligned to cache lines; throws std::bad_alloc. */
inline char *allocate(int64_t bytes) {
#if defined(_WIN32)
    void *memory = _aligned_malloc(bytes, 64);
#else
    void *memory = std::aligned_alloc(64, aligned(bytes));
#endif
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<char *>(memory);
}

inline void release(char *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

/* Replace a buffer by a larger one if it is too small; contents are lost. */
inline void grow(char *&memory, int64_t &bytes, int64_t needed) {
    if (needed <= bytes) return;
    char *larger = allocate(needed);
    release(memory);
    memory = larger;
    bytes = needed;
}

} // namespace inl
