/* Keyed checksums of cached weights. */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/span.h"
#include "runtime/instructions.h"

namespace inl {
namespace {

/* Bytes of a block, which has one sum, and blocks of a chunk. */
constexpr int64_t CHECKSUM_BYTES = 4096, CHECKSUM_BLOCKS = 64;

int64_t checksum_blocks(args::Checksum op) { return op.bytes() / CHECKSUM_BYTES; }

int64_t checksum_chunks(args::Checksum op) {
    return ceil_div(checksum_blocks(op), CHECKSUM_BLOCKS);
}

/* NH: the sum of products of neighboring words, each plus its word of the key. */
uint64_t checksum_of(const char *block, const uint32_t *key) {
    uint64_t sum = 0;
    for (int64_t word = 0; word < CHECKSUM_BYTES / 4; word += 2) {
        uint32_t pair[2];
        std::memcpy(pair, block + 4 * word, 8);
        sum += uint64_t(pair[0] + key[word]) * uint64_t(pair[1] + key[word + 1]);
    }
    return sum;
}

void checksum_body(args::Checksum op, int64_t chunk, Worker &) {
    const Span blocks(chunk, CHECKSUM_BLOCKS, checksum_blocks(op));
    for (int64_t block = blocks.from; block < blocks.to; block++)
        op.sums()[block] = checksum_of(op.x() + block * CHECKSUM_BYTES, op.key());
}

} // namespace
} // namespace inl
