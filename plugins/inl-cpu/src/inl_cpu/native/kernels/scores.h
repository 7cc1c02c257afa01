/* Scores of a few queries over a segment of keys. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/heads.h"
#include "kernels/queries.h"
#include "kernels/span.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Tiles of a segment. The keys of a row are always divided at the same positions, so
 * that the result of a query depends neither on the other queries nor on the
 * threads. */
constexpr int SEGMENT_TILES = 16;
constexpr int SEGMENT_KEYS = SEGMENT_TILES * INL_LANES;
constexpr float MASKED = -3.4e38f;

/* Tiles of one row and kv head. If the block size is not a multiple of 16, the last
 * tile of a block has fewer keys. */
struct Segment {
    int tiles = 0;
    int64_t first[SEGMENT_TILES]; /* keys */
    int keys[SEGMENT_TILES];
    const char *k[SEGMENT_TILES], *v[SEGMENT_TILES];

    Segment(const Attention &a, int64_t row, int64_t head, int64_t from, int64_t to) {
        const int64_t each = a.shape.tiles(), size = a.shape.tile_bytes();
        int64_t block = from / each, part = from % each;
        for (int64_t tile = from; tile < to; tile++, tiles++) {
            const int64_t cache_block = a.op.blocks()[row * a.table_width + block];
            const int64_t offset =
                ((cache_block * a.kv_heads + head) * each + part) * size;
            k[tiles] = a.op.k_cache() + offset;
            v[tiles] = a.op.v_cache() + offset;
            first[tiles] = block * a.shape.block_size + part * INL_LANES;
            keys[tiles] = lanes_left(part * INL_LANES, a.shape.block_size);
            if (++part == each) part = 0, block++;
        }
    }
    /* Keys of a tile that some query attends to. */
    int visible(int tile, const Queries &q) const {
        const int64_t left = q.to - first[tile];
        return left < keys[tile] ? int(left) : keys[tile];
    }
};

/* Scratch for R queries and a segment: scores, which become weights, and the weights
 * encoded for the products with values. */
struct Weights {
    float *scores; /* [R][SEGMENT_KEYS] */
    uint16_t *narrow; /* [R][SEGMENT_KEYS] bfloat16, or two planes of bytes */
    float top[ATTENTION_ROWS], total[ATTENTION_ROWS], scale[ATTENTION_ROWS];
    int32_t upper[ATTENTION_ROWS], lower[ATTENTION_ROWS];

    int8_t *uppers() const { return reinterpret_cast<int8_t *>(narrow); }
    int8_t *lowers() const { return uppers() + ATTENTION_ROWS * SEGMENT_KEYS; }
};

/* In decoding each key and value is read once, and tiles are too far apart for the
 * hardware prefetcher. Keys and values have as many lines: with each line that is
 * computed with, one of the tile that is needed next is prefetched. Forced inlining,
 * because GCC removes calls of functions that only prefetch. */
__attribute__((always_inline)) inline void prefetch_line(const char *line) {
    __builtin_prefetch(line, 0, 2);
}

/* Sums of products of codes of int8. biased_sums: 128 times the sum of the other
 * factors, which codes that are not centered add. */
inline F byte_sums(I sums, int32_t biased_sums) {
    return to_float(ByteDot::CENTERED ? sums : add(sums, set_int(-biased_sums)));
}

/* Scores of tiles of int8 keys, each with a scale. */
template <int R, int L>
inline void score_bytes(const char *const *tiles, const char *const *next,
                        int64_t width, const QueryWords &x, F (*sums)[R]) {
    I planes[2][L][R];
#pragma GCC unroll 2
    for (int first = 0; first < 2; first += BYTE_PLANES) {
        for (int plane = first; plane < first + BYTE_PLANES; plane++)
            for (int l = 0; l < L; l++)
                for (int r = 0; r < R; r++) planes[plane][l][r] = zeros();
        const uint32_t *words = x.words;
        for (int64_t at = 0; at < width; at += 4, words += 2 * R)
            for (int l = 0; l < L; l++) {
                if (first == 0) prefetch_line(next[l] + 16 * at);
                const I codes = load_ints(tiles[l] + 16 * at);
                for (int r = 0; r < R; r++)
                    for (int plane = first; plane < first + BYTE_PLANES; plane++)
                        planes[plane][l][r] =
                            ByteDot::step(planes[plane][l][r], codes,
                                          int32_t(words[plane * R + r]));
            }
    }
    const int64_t scales_at = 16 * ceil_div(width, INL_LANES) * INL_LANES;
    for (int l = 0; l < L; l++) {
        prefetch_line(next[l] + scales_at);
        const F scales = load(reinterpret_cast<const float *>(tiles[l] + scales_at));
        for (int r = 0; r < R; r++) {
            const F high = byte_sums(planes[0][l][r], x.upper[r]);
            const F low = byte_sums(planes[1][l][r], x.lower[r]);
            sums[l][r] = mul(mul(fma(high, set(256.0f), low), set(x.scale[r])), scales);
        }
    }
}

/* Load 16 numbers from number ``at`` of a tile on; those of FLOAT8 times
 * FLOAT8_FACTOR. */
template <CacheKind KIND>
inline F load_numbers(const char *tile, int64_t at) {
    if constexpr (KIND == FLOAT8) return load_float8(tile + at);
    return load(reinterpret_cast<const float *>(tile) + at);
}

template <CacheKind KIND, int R, int L>
inline void score_tiles(const char *const *tiles, const char *const *next,
                        int64_t width, const QueryWords &x, F (*sums)[R]) {
    if constexpr (KIND == BYTES) return score_bytes<R, L>(tiles, next, width, x, sums);
    const uint32_t *words = x.words;
    for (int l = 0; l < L; l++)
        for (int r = 0; r < R; r++) sums[l][r] = set(0.0f);
    if constexpr (KIND == FLOATS || KIND == FLOAT8) {
        constexpr int64_t bytes = KIND == FLOAT8 ? 16 : 64;
        for (int64_t at = 0; at < width; at++, words += R)
            for (int l = 0; l < L; l++) {
                if (KIND == FLOATS || at % 4 == 0) prefetch_line(next[l] + bytes * at);
                const F key = load_numbers<KIND>(tiles[l], 16 * at);
                for (int r = 0; r < R; r++)
                    sums[l][r] = fma(key, set(float_of(words[r])), sums[l][r]);
            }
    } else if constexpr (KIND == PAIRS && HAS_PAIR_DOT) {
        for (int64_t at = 0; at < width / 2; at++, words += R)
            for (int l = 0; l < L; l++) {
                prefetch_line(next[l] + 64 * at);
                const I pairs = load_ints(tiles[l] + 64 * at);
                for (int r = 0; r < R; r++)
                    sums[l][r] = dot2(sums[l][r], pairs, words[r]);
            }
    } else if constexpr (KIND == PAIRS) {
        const I high = set_int(int(0xffff0000));
        for (int64_t at = 0; at < width / 2; at++, words += 2 * R)
            for (int l = 0; l < L; l++) {
                prefetch_line(next[l] + 64 * at);
                const I pairs = load_ints(tiles[l] + 64 * at);
                const F even = as_float(shift_left(pairs, 16));
                const F odd = as_float(bit_and(pairs, high));
                for (int r = 0; r < R; r++) {
                    sums[l][r] = fma(even, set(float_of(words[r])), sums[l][r]);
                    sums[l][r] = fma(odd, set(float_of(words[R + r])), sums[l][r]);
                }
            }
    }
}

inline F capped(F x, float cap) {
    if (cap == 0) return x;
    return mul(set(cap), hyperbolic_tangent(quotient(x, set(cap))));
}

/* Clamp a key, relative to a tile, to the lanes of the tile. */
inline int clamp_lane(int64_t key) { return int(key < 0 ? 0 : key > 16 ? 16 : key); }

/* Mask the scores of keys in a tile, from ``key`` on, that query r does not attend
 * to. */
inline F masked(const Queries &q, int r, int64_t key, int keys, F scores) {
    const int to = clamp_lane(q.end[r] - key);
    return between(scores, clamp_lane(q.first[r] - key), to < keys ? to : keys,
                   set(MASKED));
}

template <CacheKind KIND, int R, int L>
inline void score_some(const Attention &a, const Queries &q, const Segment &segment,
                       int tile, const QueryWords &x, const Weights &w) {
    F sums[L][R];
    score_tiles<KIND, R, L>(segment.k + tile, segment.v + tile, a.width, x, sums);
    const F scale = set(a.score_factor());
    for (int l = 0; l < L; l++)
        for (int r = 0; r < R && r < q.count; r++) {
            const F value = capped(mul(sums[l][r], scale), a.op.cap());
            float *scores = w.scores + r * SEGMENT_KEYS + 16 * (tile + l);
            const int64_t key = segment.first[tile + l];
            const int keys = segment.keys[tile + l];
            const bool whole = keys == 16 && q.first[r] <= key && key + 16 <= q.end[r];
            store(scores, whole ? value : masked(q, r, key, keys, value));
        }
}

/* Prefetch the first keys of a chunk, which nothing was computed before. */
constexpr int TILES_AHEAD = 8;

__attribute__((always_inline)) inline void
prefetch_keys(const Attention &a, const Segment &segment, int from, int to) {
    const int64_t bytes = a.shape.tile_bytes();
    for (int tile = from; tile < to && tile < segment.tiles; tile++)
        for (int64_t at = 0; at < bytes; at += 64) prefetch_line(segment.k[tile] + at);
}

/* Scores L tiles at a time, using half of the accumulators: keys come from memory.
 * first: these are the first keys of a chunk. */
template <CacheKind KIND, int R>
void score(const Attention &a, const Queries &q, const Segment &segment,
           const QueryWords &x, const Weights &w, bool first) {
    constexpr int SUMS = KIND == BYTES ? SCORE_SUMS / BYTE_PLANES : SCORE_SUMS;
    constexpr int L = SUMS >= 8 * R ? 8 : SUMS >= 4 * R ? 4 : SUMS >= 2 * R ? 2 : 1;
    int tile = 0;
    for (; tile + L <= segment.tiles; tile += L) {
        if (first) {
            const int ahead = tile + TILES_AHEAD;
            prefetch_keys(a, segment, ahead, ahead + L);
        }
        score_some<KIND, R, L>(a, q, segment, tile, x, w);
    }
    if constexpr (L > 1)
        for (; tile < segment.tiles; tile++)
            score_some<KIND, R, 1>(a, q, segment, tile, x, w);
}

} // namespace
} // namespace inl
