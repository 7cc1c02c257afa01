/* Arithmetic of the layouts of matrices and caches. */
#pragma once

#include "operation.h"

namespace inl {

inline bool is_quantized(const inl_matrix &m) { return m.format >= INL_U4; }

inline int64_t tiles_of(const inl_matrix &m) { return over(m.rows, INL_LANES); }

inline int64_t groups_of(const inl_matrix &m) { return m.columns / m.group; }

inline int64_t scale_bytes(const inl_matrix &m) {
    const int64_t one = INL_LANES * (m.scale == INL_F16 ? 2 : 4);
    return m.offsets ? 2 * one : one;
}

inline int64_t code_bytes(const inl_matrix &m) {
    return INL_LANES * m.group * (m.format == INL_U4 ? 4 : 8) / 8;
}

/* Bytes of a group of a tile, scales included. */
inline int64_t group_bytes(const inl_matrix &m) {
    return code_bytes(m) + scale_bytes(m);
}

inline int64_t tile_bytes(const inl_matrix &m) {
    if (m.format == INL_F32) return m.columns * INL_LANES * 4;
    if (m.format == INL_BF16) return over(m.columns, 2) * INL_LANES * 4;
    return groups_of(m) * group_bytes(m);
}

/* Place of a code in its group: byte and, in U4, which half. */
inline int64_t code_place(const inl_matrix &m, int lane, int64_t column, int &shift) {
    const int step = m.format == INL_U4 ? 8 : 4;
    const int64_t inside = column % step;
    shift = inside >= 4 ? 4 : 0;
    return column / step * 64 + lane * 4 + inside % 4;
}

/* How the numbers of a cache are held. */
enum CacheKind { FLOATS, PAIRS, BYTES };

inline CacheKind cache_kind(int32_t flags) {
    if (flags & INL_KV_INT8) return BYTES;
    return flags & INL_KV_BF16 ? PAIRS : FLOATS;
}

/* A cache of one layer: for each block and head, tiles of 16 keys, of
 *   FLOATS: k [width][16 keys], v [16 keys][width], float32;
 *   PAIRS:  k [width / 2][16 keys][2 of width], v [8][width][2 keys], bfloat16;
 *   BYTES:  k [width / 4][16 keys][4 of width], v [4][width][4 keys], int8 plus 128,
 *           and then a float32 scale for each of the 16 keys.
 * Widths are padded to 16. */
struct CacheShape {
    int64_t block_size, kv_heads, width;
    CacheKind kind;

    int64_t padded() const { return over(width, INL_LANES) * INL_LANES; }
    int64_t tiles() const { return over(block_size, INL_LANES); }
    /* Bytes of one tile, of k or of v. */
    int64_t tile_bytes() const {
        if (kind == BYTES) return padded() * INL_LANES + 4 * INL_LANES;
        return padded() * INL_LANES * (kind == PAIRS ? 2 : 4);
    }
    int64_t block_bytes() const { return kv_heads * tiles() * tile_bytes(); }
    /* Where a key's tile begins. */
    int64_t place(int64_t block, int64_t head, int64_t offset) const {
        return ((block * kv_heads + head) * tiles() + offset / INL_LANES) *
               tile_bytes();
    }
};

} // namespace inl
