/* Layout arithmetic of matrices and caches. */
#pragma once

#include "runtime/operation.h"

namespace inl {

inline bool is_quantized(const inl_matrix &m) { return m.format >= INL_U4; }

inline int64_t tiles_of(const inl_matrix &m) { return ceil_div(m.rows, INL_LANES); }

inline int64_t groups_of(const inl_matrix &m) { return m.columns / m.group; }

inline int64_t scale_bytes(const inl_matrix &m) {
    const int64_t one = INL_LANES * (m.scale == INL_F16 ? 2 : 4);
    return m.offsets ? 2 * one : one;
}

inline int64_t code_bytes(const inl_matrix &m) {
    return INL_LANES * m.group * (m.format == INL_U4 ? 4 : 8) / 8;
}

/* Bytes of one group of a tile, including scales and offsets. */
inline int64_t group_bytes(const inl_matrix &m) {
    return code_bytes(m) + scale_bytes(m);
}

inline int64_t tile_bytes(const inl_matrix &m) {
    if (m.format == INL_F32) return m.columns * INL_LANES * 4;
    if (m.format == INL_BF16) return ceil_div(m.columns, 2) * INL_LANES * 4;
    return groups_of(m) * group_bytes(m);
}

/* Byte of a code in its group, and the shift of the code in the byte (0 or 4). */
inline int64_t code_offset(const inl_matrix &m, int lane, int64_t column, int &shift) {
    const int step = m.format == INL_U4 ? 8 : 4;
    const int64_t inside = column % step;
    shift = inside >= 4 ? 4 : 0;
    return column / step * 64 + lane * 4 + inside % 4;
}

/* Number format of a cache: float32, pairs of bfloat16, or int8. */
enum CacheKind { FLOATS, PAIRS, BYTES };

inline CacheKind cache_kind(int32_t flags) {
    if (flags & INL_KV_INT8) return BYTES;
    return flags & INL_KV_BF16 ? PAIRS : FLOATS;
}

/* Cache of one layer: for each block and head, tiles of 16 keys:
 *   FLOATS: k [width][16 keys], v [16 keys][width], float32;
 *   PAIRS:  k [width / 2][16 keys][2 of width], v [8][width][2 keys], bfloat16;
 *   BYTES:  k [width / 4][16 keys][4 of width], v [4][width][4 keys], int8 plus 128,
 *           followed by a float32 scale for each of the 16 keys.
 * Widths are padded to 16. */
struct CacheShape {
    int64_t block_size, kv_heads, width;
    CacheKind kind;

    int64_t padded() const { return ceil_div(width, INL_LANES) * INL_LANES; }
    int64_t tiles() const { return ceil_div(block_size, INL_LANES); }
    /* Bytes of one tile, of k or of v. */
    int64_t tile_bytes() const {
        if (kind == BYTES) return padded() * INL_LANES + 4 * INL_LANES;
        return padded() * INL_LANES * (kind == PAIRS ? 2 : 4);
    }
    int64_t block_bytes() const { return kv_heads * tiles() * tile_bytes(); }
    /* Byte offset of the tile of a key. */
    int64_t tile_offset(int64_t block, int64_t head, int64_t offset) const {
        return ((block * kv_heads + head) * tiles() + offset / INL_LANES) *
               tile_bytes();
    }
};

} // namespace inl
