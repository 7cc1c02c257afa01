/* Products of many rows with weights requantized to 8 bits, in AVX-512 with VNNI.
 *
 * A scale for each group of 32 columns takes three instructions for eight that multiply.
 * With REQUANTIZE, weights are decoded once for many rows, to int8 with a scale for each
 * 256 columns, and rows of x are encoded likewise: a row then takes three for 64.
 *
 * Outliers of x would make a scale of 256 columns coarse. It is that of OUTLIER_SIZE times
 * the median magnitude of its runs of 32 columns at most; runs with larger numbers have a
 * second plane, 128 times as coarse, which is multiplied for these runs and rows alone.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "kernels/codes.h"
#include "kernels/encode.h"
#include "kernels/linear.h"
#include "kernels/span.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/quant.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t MIN_REQUANTIZED_ROWS = 64; /* fewer do not amortize the decoding */
constexpr int64_t BLOCK_COLUMNS = 256, BLOCK_RUNS = BLOCK_COLUMNS / RUN;
constexpr float OUTLIER_SIZE = 2.0f;

bool requantizes(args::Linear op) {
    return op.flags() & INL_REQUANTIZE && op.rows() >= MIN_REQUANTIZED_ROWS &&
           (op.flags() & INL_X_MASK) == INL_X_INT8 && is_quantized(op.matrix());
}

/* Runs of a block of BLOCK_COLUMNS; the last one may have fewer. */
inline int block_runs(int64_t columns, int64_t block) {
    const int64_t left = columns / RUN - block * BLOCK_RUNS;
    return left < BLOCK_RUNS ? int(left) : int(BLOCK_RUNS);
}

/* Sizes of an encoded row: two planes of codes, and three numbers for each block. */
struct BlockRowShape {
    int64_t columns, blocks;

    explicit BlockRowShape(const inl_matrix &m)
        : columns(m.columns), blocks(ceil_div(m.columns, BLOCK_COLUMNS)) {}
    int64_t bytes() const { return aligned(2 * columns + 12 * blocks); }
};

/* Arrays of a tile of rows: codes [plane][run][rows][32], and [block][rows] of scales, of
 * what the sums begin with, and of the runs that have a second plane, as bits. */
struct BlockRowView {
    char *base;
    const BlockRowShape &shape;
    int rows;

    int8_t *codes(int plane, int64_t run) const {
        return reinterpret_cast<int8_t *>(base) +
               (plane * shape.columns + run * RUN) * rows;
    }
    float *scales(int64_t block) const {
        return reinterpret_cast<float *>(base + 2 * shape.columns * rows) +
               block * rows;
    }
    int32_t *starts(int64_t block) const {
        return reinterpret_cast<int32_t *>(scales(shape.blocks + block));
    }
    int32_t *outliers(int64_t block) const {
        return reinterpret_cast<int32_t *>(scales(2 * shape.blocks + block));
    }
};

/* The median of up to BLOCK_RUNS numbers; of an even count, the larger one. */
inline float median(const float *numbers, int count) {
    float sorted[BLOCK_RUNS];
    for (int at = 0; at < count; at++) {
        int place = at;
        for (; place > 0 && sorted[place - 1] > numbers[at]; place--)
            sorted[place] = sorted[place - 1];
        sorted[place] = numbers[at];
    }
    return sorted[count / 2];
}

/* Encode a block of row x as row ``at`` of the tile. */
void encode_block(const float *x, const BlockRowView &view, int at, int64_t block) {
    const int runs = block_runs(view.shape.columns, block);
    float sizes[BLOCK_RUNS], size = 0.0f;
    for (int run = 0; run < runs; run++) {
        sizes[run] = group_magnitude<RUN>(x + run * RUN);
        size = sizes[run] > size ? sizes[run] : size;
    }
    float &scale = view.scales(block)[at];
    int32_t &start = view.starts(block)[at], &outliers = view.outliers(block)[at];
    start = outliers = 0;
    const auto codes = [&](int plane, int run) {
        return view.codes(plane, block * BLOCK_RUNS + run) + at * RUN;
    };
    if (!(size < INFINITY)) { /* or NaN: zero times it is NaN */
        scale = INFINITY;
        for (int run = 0; run < runs; run++) std::memset(codes(0, run), 0, RUN);
        return;
    }
    const float lift = size < 1e-30f ? 0x1p100f : 1.0f; /* as for groups */
    float top = OUTLIER_SIZE * median(sizes, runs);
    top = top > size / 127.0f ? top : size / 127.0f;
    top = top < size && lift == 1.0f ? top : size;
    const float inverse = size > 0.0f ? 127.0f / (top * lift) : 0.0f;
    scale = top / 127.0f;
    float sums = 0.0f;
    for (int run = 0; run < runs; run++, x += RUN) {
        if (sizes[run] > top) {
            const CodeSums both = encode_group<true, RUN>(
                x, codes(1, run), codes(0, run), inverse / 128.0f, lift);
            sums += 128.0f * both.upper + both.lower;
            outliers |= 1 << run;
        } else {
            sums += encode_group<false, RUN>(x, codes(0, run), nullptr, inverse, lift)
                        .upper;
        }
    }
    start = -128 * int32_t(sums);
}

/* Rows that a thread encodes: as many as fill whole cache lines of codes. */
constexpr int64_t ENCODE_ROWS = 4;

int64_t block_encode_chunks(args::Linear op) {
    return requantizes(op) ? ceil_div(op.rows(), ENCODE_ROWS) : encode_chunks(op);
}

void block_encode_body(args::Linear op, int64_t chunk, Worker &worker) {
    if (!requantizes(op)) return encode_body(op, chunk, worker);
    const BlockRowShape shape(op.matrix());
    const Span rows(chunk, ENCODE_ROWS, op.rows());
    for (int64_t at = rows.from; at < rows.to; at++) {
        const float *x =
            prepare_row(op, at, reinterpret_cast<float *>(worker.own), true);
        const RowTile tile = tile_with(at, op.rows());
        const BlockRowView view{worker.shared + tile.start * shape.bytes(), shape, tile.rows};
        for (int64_t block = 0; block < shape.blocks; block++)
            encode_block(x + block * BLOCK_COLUMNS, view, int(at - tile.start), block);
    }
}

/* A pair of decoded tiles, by blocks: codes plus 128 [run][8][tile][16 rows][4], and
 * float32 scales [tile][16 rows]. */
constexpr int64_t PAIR_STEP = 8 * INL_LANES, PAIR_RUN = RUN / 4 * PAIR_STEP,
                  PAIR_SCALES = BLOCK_RUNS * PAIR_RUN,
                  PAIR_BLOCK = PAIR_SCALES + 8 * INL_LANES;

/* The numbers that are stored for codes 0 and the largest one: those of a table are
 * relative to ``zero``. */
struct CodeRange {
    float from, to;

    CodeRange(const inl_matrix &m, int largest) : from(0.0f), to(float(largest)) {
        if (!has_table(m)) return;
        const uint8_t *table = table_of(m);
        uint8_t least = table[0], most = table[0];
        for (int at = 1; at < 16; at++) {
            least = table[at] < least ? table[at] : least;
            most = table[at] > most ? table[at] : most;
        }
        from = float(least), to = float(most);
    }
};

/* The runs of a block, with the scales and offsets of their groups. */
struct BlockGroups {
    const char *runs[BLOCK_RUNS];
    F scales[2 * BLOCK_RUNS], offsets[2 * BLOCK_RUNS];
    int count = 0; /* of runs */
};

/* x as an integer, in both halves of each lane. */
inline I both_halves(F x) {
    const I whole = nearest(x);
    return bit_or(bit_and(whole, set_int(0xffff)), shift_left(whole, 16));
}

/* Codes of 4 columns times ``factor`` plus ``shift``, both with 8 binary places. */
inline I rescale(I codes, I factor, I shift) {
    const I bytes = set_int(0x00ff00ff);
    const auto scaled = [&](I halves) {
        return _mm512_add_epi16(_mm512_mullo_epi16(halves, factor), shift);
    };
    const I even = scaled(bit_and(codes, bytes));
    const I odd = scaled(bit_and(shift_right(codes, 8), bytes));
    return bit_or(bit_and(shift_right(even, 8), bytes),
                  bit_and(odd, set_int(int32_t(0xff00ff00))));
}

/* Round the runs of a block to 8 bits. */
template <class C>
void requantize(const C &coded, const inl_matrix &m, const CodeRange &range,
                const BlockGroups &from, char *out, float *scales) {
    const int parts = int(RUN / m.group), groups = from.count * parts;
    const F low = set(range.from - float(m.zero)), high = set(range.to - float(m.zero));
    F most = set(0.0f), rest = set(0.0f); /* rest propagates NaN and infinity */
    for (int g = 0; g < groups; g++) {
        const F a = fma(from.scales[g], low, from.offsets[g]);
        const F b = fma(from.scales[g], high, from.offsets[g]);
        most = larger(most, larger(magnitude(a), magnitude(b)));
        rest = fma(add(a, b), set(0.0f), rest);
    }
    store(scales, fma(most, set(1.0f / 127), rest));
    const F tiny = set(1e-30f);
    const F inverse =
        where_below(tiny, most, quotient(set(127.0f * 256), larger(most, tiny)), set(0.0f));
    for (int run = 0; run < from.count; run++)
        for (int part = 0; part < parts; part++) {
            const int g = run * parts + part;
            const I factor = nearest(mul(from.scales[g], inverse));
            /* 128, and a half for rounding */
            const F shift = fma(to_float(factor), set(-float(m.zero)),
                                fma(from.offsets[g], inverse, set(128.5f * 256)));
            const I factors = both_halves(to_float(factor)), shifts = both_halves(shift);
            for (int step = 0; step < m.group / 4; step++) {
                const int at = part * int(m.group / 4) + step;
                const I codes = rescale(coded.step(from.runs[run], at), factors, shifts);
                std::memcpy(out + run * PAIR_RUN + at * PAIR_STEP, &codes, 64);
            }
        }
}

/* Decode a tile of weights as tile ``index`` of a pair. */
void requantize_tile(const inl_matrix &m, const char *tile, int index, char *out) {
    with_codes(m, [&](const auto &coded) {
        const CodeRange range(m, coded.LARGEST);
        const int64_t runs = m.columns / RUN, parts = RUN / m.group;
        int64_t at = 0;
        BlockGroups groups;
        for_each_run(m, tile, [&](const char *run, const BlockScales<> &s) {
            for (int64_t part = 0; part < parts; part++) {
                groups.scales[groups.count * parts + part] = s.scale_of(run, int(part));
                groups.offsets[groups.count * parts + part] =
                    s.offset_of(run, int(part));
            }
            groups.runs[groups.count++] = run;
            if (++at % BLOCK_RUNS && at < runs) return;
            float *scales = reinterpret_cast<float *>(out + PAIR_SCALES);
            requantize(coded, m, range, groups, out + 4 * INL_LANES * index,
                       scales + INL_LANES * index);
            groups.count = 0;
            out += PAIR_BLOCK;
        });
    });
}

/* Scales of a block of both tiles. */
struct PairScales {
    F first, second;

    explicit PairScales(const char *pair)
        : first(load(reinterpret_cast<const float *>(pair + PAIR_SCALES))),
          second(load(reinterpret_cast<const float *>(pair + PAIR_SCALES) + INL_LANES)) {}
};

/* Add the products of the second planes of a block to the sums of both tiles. */
template <int R>
__attribute__((noinline)) void add_outliers(const char *pair, const BlockRowView &x,
                                            int64_t block, F *first, F *second) {
    const PairScales scales(pair);
    for (int r = 0; r < R; r++) {
        uint32_t left = uint32_t(x.outliers(block)[r]);
        if (left == 0) continue;
        I a = zeros(), b = zeros();
        for (; left; left &= left - 1) {
            const int run = __builtin_ctz(left);
            const int8_t *codes = x.codes(1, block * BLOCK_RUNS + run) + r * RUN;
            for (int step = 0; step < RUN / 4; step++) {
                const char *w = pair + run * PAIR_RUN + step * PAIR_STEP;
                int32_t word;
                std::memcpy(&word, codes + 4 * step, 4);
                a = dot4<false>(a, load_ints(w), word);
                b = dot4<false>(b, load_ints(w + 4 * INL_LANES), word);
            }
        }
        const F scale = set(128.0f * x.scales(block)[r]);
        first[r] = fma(to_float(a), mul(scales.first, scale), first[r]);
        second[r] = fma(to_float(b), mul(scales.second, scale), second[r]);
    }
}

/* Add the products of four bytes in each lane. The intrinsic returns another register,
 * and the compiler would move sums between registers and memory. */
inline void add_dot4(I &sums, I w, I x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
}

/* Add the products of a block. A function, so that its loop has all registers. */
template <int R>
__attribute__((noinline)) void add_block(const char *pair, const BlockRowView &view,
                                         int64_t block, F *first, F *second) {
    constexpr int64_t AHEAD = 4096; /* rows may be in the L3 cache */
    const int32_t *starts = view.starts(block);
    const int8_t *codes = view.codes(0, block * BLOCK_RUNS);
    const char *w = pair;
    I a[R], b[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) a[r] = b[r] = set_int(starts[r]);
    for (int runs = block_runs(view.shape.columns, block); runs > 0;
         runs--, codes += R * RUN)
        for (int step = 0; step < RUN / 4; step++, w += PAIR_STEP) {
            if (64 * step < R * RUN) __builtin_prefetch(codes + AHEAD + 64 * step, 0, 2);
            const I w0 = load_ints(w), w1 = load_ints(w + 4 * INL_LANES);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                int32_t word;
                std::memcpy(&word, codes + r * RUN + 4 * step, 4);
                const I x = set_int(word);
                add_dot4(a[r], w0, x);
                add_dot4(b[r], w1, x);
            }
        }
    const PairScales scales(pair);
    const float *factors = view.scales(block);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const F factor = set(factors[r]);
        first[r] = fma(to_float(a[r]), mul(scales.first, factor), first[r]);
        second[r] = fma(to_float(b[r]), mul(scales.second, factor), second[r]);
    }
}

/* Multiply R rows with a pair of decoded tiles. */
template <int R>
void multiply_pair(const char *pair, const BlockRowView &x, F *first, F *second) {
    for (int r = 0; r < R; r++) first[r] = second[r] = set(0.0f);
    for (int64_t block = 0; block < x.shape.blocks; block++, pair += PAIR_BLOCK) {
        add_block<R>(pair, x, block, first, second);
        int32_t outliers = 0;
        for (int r = 0; r < R; r++) outliers |= x.outliers(block)[r];
        if (outliers) add_outliers<R>(pair, x, block, first, second);
    }
}

void multiply_pair_rows(const char *pair, const BlockRowView &x, F *first, F *second) {
    switch (x.rows) {
    case MAX_TILE_ROWS: return multiply_pair<MAX_TILE_ROWS>(pair, x, first, second);
    case 8: return multiply_pair<8>(pair, x, first, second);
    case 4: return multiply_pair<4>(pair, x, first, second);
    case 2: return multiply_pair<2>(pair, x, first, second);
    default: return multiply_pair<1>(pair, x, first, second);
    }
}

/* Rows of a chunk: many, as all decode the weights, but chunks for many threads. */
int64_t chunk_rows(args::Linear op) {
    constexpr int64_t MOST = 43 * MAX_TILE_ROWS, LEAST = 8 * MAX_TILE_ROWS, CHUNKS = 96;
    int64_t blocks = ceil_div(op.rows(), MOST);
    while (blocks * pairs_of(op) < CHUNKS && op.rows() / (blocks + 1) >= LEAST) blocks++;
    return ceil_div(ceil_div(op.rows(), blocks), MAX_TILE_ROWS) * MAX_TILE_ROWS;
}

int64_t block_linear_chunks(args::Linear op) {
    if (!requantizes(op)) return linear_chunks(op);
    return pairs_of(op) * ceil_div(op.rows(), chunk_rows(op));
}

void block_linear_body(args::Linear op, int64_t chunk, Worker &worker) {
    if (!requantizes(op)) return linear_body(op, chunk, worker);
    const inl_matrix &m = op.matrix();
    const BlockRowShape shape(m);
    const int64_t pair = chunk % pairs_of(op), last = tiles_of(m) - 1;
    for (int index = 0; index < 2; index++) {
        const int64_t tile = 2 * pair + index < last ? 2 * pair + index : last;
        requantize_tile(m, static_cast<const char *>(m.data) + tile * tile_bytes(m), index,
                    worker.own);
    }
    const Span span(chunk / pairs_of(op), chunk_rows(op), op.rows());
    F first[MAX_TILE_ROWS], second[MAX_TILE_ROWS];
    for (int64_t row = span.from; row < span.to;) {
        const RowTile rows = tile_with(row, op.rows());
        const BlockRowView x{worker.shared + rows.start * shape.bytes(), shape, rows.rows};
        prefetch_y(op, pair, rows);
        multiply_pair_rows(worker.own, x, first, second);
        store_pair(op, pair, rows, first, second);
        row = rows.start + rows.rows;
    }
}

Scratch block_linear_scratch(args::Linear op) {
    if (!requantizes(op)) return linear_scratch(op);
    const BlockRowShape shape(op.matrix());
    const int64_t pair = shape.blocks * PAIR_BLOCK, row = aligned(4 * shape.columns);
    return {op.rows() * shape.bytes(), pair > row ? pair : row};
}

} // namespace
} // namespace inl
