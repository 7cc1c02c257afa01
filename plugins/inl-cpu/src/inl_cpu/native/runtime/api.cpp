/* The exported C functions. */

#include <exception>
#include <new>
#include <string>

#include "runtime/checks.h"
#include "runtime/matrix.h"
#include "runtime/pool.h"
#include "runtime/quant.h"
#include "runtime/sets.h"

struct inl_pool {
    inl_pool(int threads, int32_t isa, const inl::Operation *operations)
        : pool(threads, operations), isa(isa) {}
    inl::Pool pool;
    int32_t isa;
};

namespace {
constexpr int32_t MAX_THREADS = 4096;

/* Of the calling thread: others may run programs at the same time. */
thread_local std::string last_refusal;
}

extern "C" {

int32_t inl_can_run(int32_t isa) { return inl::operations_of(isa) != nullptr; }

int32_t inl_best_isa(void) { return inl::best_isa(); }

inl_pool *inl_open(int32_t threads, int32_t isa) {
    const inl::Operation *operations = inl::operations_of(isa);
    if (operations == nullptr || threads < 1 || threads > MAX_THREADS) return nullptr;
    try {
        return new inl_pool(threads, isa, operations);
    } catch (const std::exception &) {
        return nullptr;
    }
}

void inl_close(inl_pool *pool) {
    /* A forked child has no threads to join, and destroying a condition variable with
     * waiters would block: the pool is left to the end of the process. */
    if (pool == nullptr || pool->pool.forked()) return;
    delete pool;
}

int32_t inl_threads(const inl_pool *pool) { return pool->pool.threads(); }

int32_t inl_isa(const inl_pool *pool) { return pool->isa; }

int64_t inl_run(inl_pool *pool, const inl_instruction *program, int64_t count) {
    return pool->pool.run(program, count, last_refusal);
}

const char *inl_refusal(const inl_pool *) { return last_refusal.c_str(); }

int32_t inl_packing(int32_t kind, inl_matrix *matrix) {
    const inl::Kind *source = inl::kind_of(kind);
    if (source == nullptr) return -1;
    matrix->format = source->format;
    matrix->group = source->group;
    matrix->zero = source->zero;
    matrix->scale = source->scale;
    matrix->offsets = source->offsets;
    matrix->middle = source->middle;
    return 0;
}

int64_t inl_matrix_bytes(const inl_matrix *m) {
    inl_matrix any = *m;
    any.data = &any;
    if (inl::matrix_refusal(any) != nullptr) return -1;
    return inl::tiles_of(*m) * inl::tile_bytes(*m);
}

int64_t inl_source_bytes(int32_t kind, int64_t columns) {
    const inl::Kind *source = inl::kind_of(kind);
    if (source == nullptr || columns < 1 || columns % source->block) return -1;
    return columns / source->block * source->bytes;
}

int64_t inl_cache_bytes(int64_t blocks, int64_t block_size, int64_t kv_heads,
                        int64_t width, int32_t flags) {
    if (blocks < 1 || block_size < 1 || kv_heads < 1 || width < 2 || width % 2)
        return -1;
    const inl::CacheShape shape{block_size, kv_heads, width, inl::cache_kind(flags)};
    return blocks * shape.block_bytes();
}

} // extern "C"
