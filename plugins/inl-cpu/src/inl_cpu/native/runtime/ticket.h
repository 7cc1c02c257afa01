/* Tickets of the thread pool: which chunk of which task is next.
 *
 * A ticket has the epoch of its task in the upper 24 bits, then 20 bits each for the
 * number of chunks and for the next chunk. Epochs wrap around; a ticket that was read a
 * whole cycle ago and still compares equal names an available chunk, so claiming it is
 * correct.
 */
#pragma once

#include <cstdint>

#include "runtime/operation.h"

namespace inl {

constexpr int TICKET_FIELD = 20;
constexpr uint32_t EPOCHS = 1u << 24;

inline uint64_t ticket_of(uint32_t epoch, int64_t chunks) {
    return uint64_t(epoch % EPOCHS) << (2 * TICKET_FIELD) | uint64_t(chunks)
                                                                << TICKET_FIELD;
}

inline uint32_t epoch_of(uint64_t ticket) {
    return uint32_t(ticket >> (2 * TICKET_FIELD));
}

inline int64_t chunks_of(uint64_t ticket) {
    return (ticket >> TICKET_FIELD) & MAX_CHUNKS;
}

inline int64_t next_of(uint64_t ticket) { return ticket & MAX_CHUNKS; }

} // namespace inl
