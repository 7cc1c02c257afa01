/* Products of many rows with weights requantized to 8 bits, in AVX-512 with VNNI.
 *
 * A scale for each group of 32 columns takes three instructions for eight that multiply.
 * With REQUANTIZE, weights are decoded once for many rows, to int8 with a scale for each
 * 64 columns, and rows of x are encoded with a scale for each 256: a row then takes two
 * for 16.
 *
 * Outliers of x would make a scale of 256 columns coarse. It is that of OUTLIER_SIZE times
 * the median magnitude of its runs of 32 columns at most; larger numbers stay float32 in
 * a list of the row, and are multiplied one by one.
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
/* Columns that share a scale of the weights. */
constexpr int64_t PART_COLUMNS = 64, PART_RUNS = PART_COLUMNS / RUN,
                  BLOCK_PARTS = BLOCK_COLUMNS / PART_COLUMNS;
constexpr float OUTLIER_SIZE = 2.0f;
constexpr int BLOCK_OUTLIERS = 16; /* most of a block */

bool requantizes(args::Linear op) {
    return op.flags() & INL_REQUANTIZE && op.rows() >= MIN_REQUANTIZED_ROWS &&
           (op.flags() & INL_X_MASK) == INL_X_INT8 && is_quantized(op.matrix());
}

/* Runs of a block of BLOCK_COLUMNS; the last one may have fewer. */
inline int block_runs(int64_t columns, int64_t block) {
    const int64_t left = columns / RUN - block * BLOCK_RUNS;
    return left < BLOCK_RUNS ? int(left) : int(BLOCK_RUNS);
}

/* A number of x in a list. */
struct Outlier {
    int32_t column;
    float number;
};

/* Sizes of an encoded row: codes, scales of blocks, a number for each part of a block,
 * and a list of outliers with its length. */
struct BlockRowShape {
    int64_t columns, blocks, parts, outliers;

    explicit BlockRowShape(const inl_matrix &m)
        : columns(m.columns), blocks(ceil_div(m.columns, BLOCK_COLUMNS)),
          parts(ceil_div(m.columns, PART_COLUMNS)), outliers(blocks * BLOCK_OUTLIERS) {}
    int64_t bytes() const {
        return aligned(columns + 4 * (blocks + parts + 1) +
                       int64_t(sizeof(Outlier)) * outliers);
    }
};

/* Arrays of a tile of rows: codes [run][rows][32], scales [block][rows], what the sums
 * begin with [part][rows], and numbers of outliers and their lists [rows]. */
struct BlockRowView {
    char *base;
    const BlockRowShape &shape;
    int rows;

    int8_t *codes(int64_t run) const {
        return reinterpret_cast<int8_t *>(base) + run * RUN * rows;
    }
    float *scales(int64_t block) const {
        return reinterpret_cast<float *>(base + shape.columns * rows) + block * rows;
    }
    int32_t *starts(int64_t part) const {
        return reinterpret_cast<int32_t *>(scales(shape.blocks + part));
    }
    int32_t &count(int row) const { return starts(shape.parts)[row]; }
    Outlier *outliers(int row) const {
        return reinterpret_cast<Outlier *>(scales(shape.blocks + shape.parts + 1)) +
               row * shape.outliers;
    }
};

/* The median of up to eight numbers, none negative; of an even count, the larger one.
 * A sorting network, as branches would be mispredicted. */
inline float median(const float *numbers, int count) {
    static_assert(BLOCK_RUNS == 8, "the network sorts eight numbers");
    constexpr int PAIRS[][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6},
                                {5, 7}, {1, 2}, {5, 6}, {0, 4}, {1, 5}, {2, 6}, {3, 7},
                                {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
    float sorted[BLOCK_RUNS];
    for (int at = 0; at < BLOCK_RUNS; at++)
        sorted[at] = at < count             ? numbers[at]
                     : at < 4 + (count + 1) / 2 ? -1.0f
                                            : INFINITY;
#pragma GCC unroll 19
    for (const auto &pair : PAIRS) {
        const float a = sorted[pair[0]], b = sorted[pair[1]];
        sorted[pair[0]] = a < b ? a : b;
        sorted[pair[1]] = a < b ? b : a;
    }
    return sorted[4];
}

/* The numbers of a run whose magnitude exceeds a bound, as bits. */
inline uint32_t beyond(const float *x, float bound) {
    const F most = set(bound);
    const auto bits = [&](const float *half) {
        return uint32_t(_mm512_cmp_ps_mask(magnitude(load(half)), most, _CMP_GT_OQ));
    };
    return bits(x) | bits(x + INL_LANES) << INL_LANES;
}

/* Encode a run, with zeros for the numbers ``left_out``, and add the codes to ``total``. */
inline void encode_run(const float *x, int8_t *codes, float scale, float lift,
                       uint32_t left_out, I &total) {
    for (int half = 0; half < 2; half++) {
        const F value = mul(mul(load(x + INL_LANES * half), set(lift)), set(scale));
        const I code = _mm512_maskz_cvtps_epi32(
            __mmask16(~(left_out >> INL_LANES * half)), value);
        store_bytes(codes + INL_LANES * half, code);
        total = add(total, code);
    }
}

/* The magnitude of a run; infinite if it contains a NaN. As integers, magnitudes are in
 * the same order, and those of NaN are the largest. */
inline float run_magnitude(const float *x) {
    const I signs = set_int(0x7fffffff);
    const I most = _mm512_max_epi32(bit_and(load_ints(x), signs),
                                    bit_and(load_ints(x + INL_LANES), signs));
    constexpr int32_t INFINITE = 0x7f800000;
    const int32_t found = _mm512_reduce_max_epi32(most),
                  bits = found < INFINITE ? found : INFINITE;
    float size;
    std::memcpy(&size, &bits, 4);
    return size;
}

/* The magnitudes of the runs of a block. */
struct RunSizes {
    float sizes[BLOCK_RUNS], largest = 0.0f;
    const int count;

    RunSizes(const float *x, int count) : count(count) {
        for (int run = 0; run < count; run++) {
            sizes[run] = run_magnitude(x + run * RUN);
            largest = sizes[run] > largest ? sizes[run] : largest;
        }
    }
    /* The magnitude that a scale of the block represents. */
    float bound(const float *x) const {
        float top = OUTLIER_SIZE * median(sizes, count);
        top = top > largest / 127.0f ? top : largest / 127.0f;
        for (; top < largest; top *= 1.5f) {
            int outliers = 0;
            for (int run = 0; run < count; run++)
                if (sizes[run] > top)
                    outliers += __builtin_popcount(beyond(x + run * RUN, top));
            if (outliers <= BLOCK_OUTLIERS) return top;
        }
        return largest;
    }
};

/* Encode a block of row x as row ``at`` of the tile. */
void encode_block(const float *x, const BlockRowView &view, int at, int64_t block) {
    const RunSizes runs(x, block_runs(view.shape.columns, block));
    int32_t *starts = view.starts(block * BLOCK_PARTS) + at, &count = view.count(at);
    if (block == 0) count = 0;
    const auto codes = [&](int run) {
        return view.codes(block * BLOCK_RUNS + run) + at * RUN;
    };
    if (!(runs.largest < INFINITY)) { /* or NaN: zero times it is NaN */
        view.scales(block)[at] = INFINITY;
        for (int run = 0; run < runs.count; run++) {
            std::memset(codes(run), 0, RUN);
            starts[run / PART_RUNS * view.rows] = 0;
        }
        return;
    }
    const float lift = runs.largest < 1e-30f ? 0x1p100f : 1.0f; /* as for groups */
    const float top = lift == 1.0f ? runs.bound(x) : runs.largest;
    const float inverse = top > 0.0f ? 127.0f / (top * lift) : 0.0f;
    view.scales(block)[at] = top / 127.0f;
    I total = zeros();
    for (int run = 0; run < runs.count; run++, x += RUN) {
        const uint32_t outliers = runs.sizes[run] > top ? beyond(x, top) : 0;
        for (uint32_t left = outliers; left; left &= left - 1) {
            const int column = __builtin_ctz(left);
            view.outliers(at)[count++] = {
                int32_t(block * BLOCK_COLUMNS + run * RUN + column), x[column]};
        }
        if (run % PART_RUNS == 0) total = zeros();
        encode_run(x, codes(run), inverse, lift, outliers, total);
        if ((run + 1) % PART_RUNS == 0 || run + 1 == runs.count)
            starts[run / PART_RUNS * view.rows] = -128 * _mm512_reduce_add_epi32(total);
    }
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

/* A pair of decoded tiles, by parts of blocks: codes plus 128 [run][8][tile][16 rows][4],
 * and float32 scales [tile][16 rows]. */
constexpr int64_t PAIR_STEP = 8 * INL_LANES, PAIR_RUN = RUN / 4 * PAIR_STEP,
                  PAIR_SCALES = PART_RUNS * PAIR_RUN,
                  PAIR_PART = PAIR_SCALES + 8 * INL_LANES;

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

/* The runs of a part, with the scales and offsets of their groups. */
struct PartGroups {
    const char *runs[PART_RUNS];
    F scales[2 * PART_RUNS], offsets[2 * PART_RUNS];
    int count = 0; /* of runs */
};

/* x as an integer, in both halves of each lane. */
inline I both_halves(F x) {
    const I whole = nearest(x);
    return bit_or(bit_and(whole, set_int(0xffff)), shift_left(whole, 16));
}

/* Codes of 4 columns times ``factor`` plus ``shift``, both with 8 binary places. */
inline I rescale(I codes, I factor, I shift) {
    const I odd_bytes = set_int(int32_t(0xff00ff00));
    const auto scaled = [&](I halves) {
        return _mm512_add_epi16(_mm512_mullo_epi16(halves, factor), shift);
    };
    const I even = scaled(_mm512_andnot_si512(odd_bytes, codes));
    const I odd = scaled(_mm512_srli_epi16(codes, 8));
    return bit_or(_mm512_srli_epi16(even, 8), bit_and(odd, odd_bytes));
}

/* Round the runs of a part to 8 bits. */
template <class C>
void requantize(const C &coded, const inl_matrix &m, const CodeRange &range,
                const PartGroups &from, char *out, float *scales) {
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
        PartGroups groups;
        for_each_run(m, tile, [&](const char *run, const BlockScales<> &s) {
            for (int64_t part = 0; part < parts; part++) {
                groups.scales[groups.count * parts + part] = s.scale_of(run, int(part));
                groups.offsets[groups.count * parts + part] =
                    s.offset_of(run, int(part));
            }
            groups.runs[groups.count++] = run;
            if (++at % PART_RUNS && at < runs) return;
            float *scales = reinterpret_cast<float *>(out + PAIR_SCALES);
            requantize(coded, m, range, groups, out + 4 * INL_LANES * index,
                       scales + INL_LANES * index);
            groups.count = 0;
            out += PAIR_PART;
        });
    });
}

/* Add the products of four bytes in each lane, of x in all of them. The intrinsic returns
 * another register, and the compiler would move sums between registers and memory. */
inline void add_dot4(I &sums, I w, const int8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(w), "m"(*reinterpret_cast<const char(*)[4]>(x)));
}

/* Add the products of a block with a tile of a pair. A function, so that its loop has
 * all registers. */
template <int R>
__attribute__((noinline)) void add_block(const char *tile, const BlockRowView &view,
                                         int64_t block, F *totals) {
    constexpr int64_t AHEAD = 4096; /* rows may be in the L3 cache */
    const int32_t *starts = view.starts(block * BLOCK_PARTS);
    const int8_t *codes = view.codes(block * BLOCK_RUNS);
    F sums[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) sums[r] = set(0.0f);
    for (int left = block_runs(view.shape.columns, block); left > 0;
         left -= PART_RUNS, tile += PAIR_PART, starts += R) {
        I part[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) part[r] = set_int(starts[r]);
        const char *w = tile;
        for (int runs = left < PART_RUNS ? left : PART_RUNS; runs > 0;
             runs--, codes += R * RUN)
#pragma GCC unroll 8
            for (int step = 0; step < RUN / 4; step++, w += PAIR_STEP) {
                if (64 * step < R * RUN) __builtin_prefetch(codes + AHEAD + 64 * step, 0, 2);
                const I four = load_ints(w);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    add_dot4(part[r], four, codes + r * RUN + 4 * step);
            }
        const F scale = load(reinterpret_cast<const float *>(tile + PAIR_SCALES));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) sums[r] = fma(to_float(part[r]), scale, sums[r]);
    }
    const float *factors = view.scales(block);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) totals[r] = fma(sums[r], set(factors[r]), totals[r]);
}

/* Add the products of the outliers of a row to its sums of both tiles. */
inline void add_outliers(const char *pair, const Outlier *outliers, int count, F &first,
                         F &second) {
    for (const Outlier *each = outliers; each < outliers + count; each++) {
        const char *part = pair + each->column / PART_COLUMNS * PAIR_PART,
                   *w = part + each->column % PART_COLUMNS / 4 * PAIR_STEP;
        const float *scales = reinterpret_cast<const float *>(part + PAIR_SCALES);
        const int32_t chosen = 1 << 8 * (each->column % 4);
        const auto product = [&](int tile, F sum) {
            const I code = dot4<false>(set_int(-128),
                                       load_ints(w + 4 * INL_LANES * tile), chosen);
            const F scale = mul(load(scales + INL_LANES * tile), set(each->number));
            return fma(to_float(code), scale, sum);
        };
        first = product(0, first), second = product(1, second);
    }
}

/* Multiply R rows with a pair of decoded tiles. */
template <int R>
void multiply_pair(const char *pair, const BlockRowView &x, F *first, F *second) {
    for (int r = 0; r < R; r++) first[r] = second[r] = set(0.0f);
    for (int64_t block = 0; block < x.shape.blocks; block++) {
        const char *weights = pair + block * BLOCK_PARTS * PAIR_PART;
        add_block<R>(weights, x, block, first);
        add_block<R>(weights + 4 * INL_LANES, x, block, second);
    }
    for (int r = 0; r < R; r++)
        add_outliers(pair, x.outliers(r), x.count(r), first[r], second[r]);
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
    const int64_t pair = shape.parts * PAIR_PART, row = aligned(4 * shape.columns);
    return {op.rows() * shape.bytes(), pair > row ? pair : row};
}

} // namespace
} // namespace inl
