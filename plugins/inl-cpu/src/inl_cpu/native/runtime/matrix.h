/* Layout arithmetic of matrices and caches. */
#pragma once

#include "runtime/operation.h"

namespace inl {

static inline bool is_quantized(const inl_matrix &m) { return m.format >= INL_U2; }

/* Whether codes are indices of a table. */
static inline bool has_table(const inl_matrix &m) { return m.format >= INL_N4; }

static inline int64_t tiles_of(const inl_matrix &m) { return ceil_div(m.rows, INL_LANES); }

/* Bits of a code in its first plane, and in its second one. */
struct CodeBits {
    int low, high;
    constexpr int all() const { return low + high; }
};

static constexpr CodeBits code_bits(int32_t format) {
    switch (format) {
    case INL_U2: return {2, 0};
    case INL_U3:
    case INL_IQ1:
    case INL_IQ2: return {2, 1};
    case INL_U5: return {4, 1};
    case INL_U6: return {4, 2};
    case INL_U8: return {8, 0};
    default: return {4, 0};
    }
}

/* Columns whose codes are stored together. */
constexpr int64_t RUN = 32;
/* Columns of a block with two levels of scales. */
constexpr int64_t WIDE_BLOCK = 256;
/* Bytes of the low bits of scales of 6 bits in a block, and of their high bits. */
constexpr int64_t SIX_LOW = WIDE_BLOCK / 16 / 2 * INL_LANES;
constexpr int64_t SIX_HIGH = SIX_LOW / 2;

/* Sizes in bytes of a block of a quantized tile, see inl_matrix. */
struct BlockShape {
    int64_t columns; /* number of columns */
    int64_t halves;  /* the float16 numbers, before the runs */
    int64_t head;    /* all before the runs */
    int64_t codes;   /* the codes of a run */
    int64_t scales;  /* after the codes of a run: scales of bytes of its groups */
    int64_t offsets; /* and offsets of bytes */
    int64_t run, bytes;

    /* Inlined, as the functions above are static: objects of several instruction sets
       must share no function. */
    __attribute__((always_inline)) explicit BlockShape(const inl_matrix &m) {
        const bool six = m.scale == INL_SCALE_SIX;
        const bool narrow =
            m.scale == INL_SCALE_HALF || m.scale == INL_SCALE_EXPONENT;
        const bool none = six || m.scale == INL_SCALE_HALF || m.scale == INL_SCALE_WIDE;
        columns = narrow ? RUN : WIDE_BLOCK;
        halves = m.scale == INL_SCALE_EXPONENT ? 0 : (m.offsets ? 4 : 2) * INL_LANES;
        head = halves + (six ? SIX_LOW + SIX_HIGH : 0);
        codes = RUN * INL_LANES * code_bits(m.format).all() / 8;
        scales = none ? 0 : RUN / m.group * INL_LANES;
        offsets = m.scale == INL_SCALE_BYTE && m.offsets ? scales : 0;
        run = codes + scales + offsets;
        bytes = head + columns / RUN * run;
    }
};

static inline int64_t tile_bytes(const inl_matrix &m) {
    if (m.format == INL_F32) return m.columns * INL_LANES * 4;
    if (m.format == INL_BF16) return ceil_div(m.columns, 2) * INL_LANES * 4;
    const BlockShape block(m);
    return m.columns / block.columns * block.bytes;
}

/* Number format of a cache: float32, pairs of bfloat16, int8, or float8 (e4m3). */
enum CacheKind { FLOATS, PAIRS, BYTES, FLOAT8 };

static inline CacheKind cache_kind(int32_t flags) {
    if (flags & INL_KV_INT8) return BYTES;
    if (flags & INL_KV_FLOAT8) return FLOAT8;
    return flags & INL_KV_BF16 ? PAIRS : FLOATS;
}

/* Cache of one layer: for each block and head, tiles of 16 keys:
 *   FLOATS: k [width][16 keys], v [16 keys][width], float32;
 *   PAIRS:  k [width / 2][16 keys][2 of width], v [8][width][2 keys], bfloat16;
 *   BYTES:  k [width / 4][16 keys][4 of width], v [4][width][4 keys], int8 plus 128,
 *           followed by a float32 scale for each of the 16 keys;
 *   FLOAT8: as FLOATS, of bytes.
 * Widths are padded to 16. */
struct CacheShape {
    int64_t block_size, kv_heads, width;
    CacheKind kind;
    const float *scales = nullptr; /* of FLOAT8: of keys, of values; NULL is 1 */

    float k_scale() const { return scales ? scales[0] : 1; }
    float v_scale() const { return scales ? scales[1] : 1; }
    int64_t padded() const { return ceil_div(width, INL_LANES) * INL_LANES; }
    int64_t tiles() const { return ceil_div(block_size, INL_LANES); }
    /* Bytes of one tile, of k or of v. */
    __attribute__((always_inline)) int64_t tile_bytes() const {
        if (kind == BYTES) return padded() * INL_LANES + 4 * INL_LANES;
        if (kind == FLOAT8) return padded() * INL_LANES;
        return padded() * INL_LANES * (kind == PAIRS ? 2 : 4);
    }
    int64_t block_bytes() const { return kv_heads * tiles() * tile_bytes(); }
    /* Byte offset of the tile of a key. */
    __attribute__((always_inline)) int64_t tile_offset(int64_t block, int64_t head,
                                                       int64_t offset) const {
        return ((block * kv_heads + head) * tiles() + offset / INL_LANES) *
               tile_bytes();
    }
};

} // namespace inl
