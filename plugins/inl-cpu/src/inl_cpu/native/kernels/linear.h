/* Linear layer: y = norm(x + delta) times a matrix, then bias or a gated activation. */
#pragma once

#include <cstdint>

#include "kernels/elementary.h"
#include "kernels/encode.h"
#include "kernels/norm_rope.h"
#include "kernels/panel.h"
#include "kernels/span.h"
#include "kernels/tiles.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Up to this many rows, each thread encodes x for itself, which saves a barrier. */
constexpr int64_t PRIVATE_ROWS = 4;
/* Most rows of a chunk, and its weight bytes: all rows reuse weights from the L2
 * cache. */
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t BLOCK_BYTES = 49152;
constexpr int64_t MIN_CHUNKS = 12;
/* A few rows read weights from memory, and starting at a new address is slow: nobody
 * has prefetched the first lines of a chunk, and the last lines that were prefetched are
 * those of another thread's chunk. So chunks are up to this long, if threads can share
 * as many as these. */
constexpr int64_t LONG_BYTES = 393216;
constexpr int64_t MANY_CHUNKS = 48;

/* Units of a chunk, of ``units`` with weights of ``bytes`` for each of ``blocks`` of
 * rows. few: whether blocks have a few rows. */
int64_t chunk_units(int64_t units, int64_t bytes, int64_t blocks, bool few) {
    int64_t most = BLOCK_BYTES;
    if (few) {
        const int64_t part = units * bytes * blocks / MANY_CHUNKS;
        if (part > most) most = part < LONG_BYTES ? part : LONG_BYTES;
    }
    int64_t size = most / bytes;
    const int64_t share = units * blocks / MIN_CHUNKS;
    if (size > share) size = share;
    if (size < 1) size = 1;
    while (ceil_div(units, size) * blocks > MAX_CHUNKS) size *= 2;
    return size;
}

/* Rows of a chunk: about as many in the last one, which decodes weights as well. */
int64_t block_rows(int64_t rows) {
    if (rows <= BLOCK_ROWS) return BLOCK_ROWS;
    const int64_t blocks = ceil_div(rows, BLOCK_ROWS);
    return ceil_div(ceil_div(rows, blocks), MAX_TILE_ROWS) * MAX_TILE_ROWS;
}

int64_t block_count(int64_t rows) { return ceil_div(rows, block_rows(rows)); }

bool encodes_privately(args::Linear op) { return op.rows() <= PRIVATE_ROWS; }

/* Tiles of a unit: with a gate, one of gate and one of up. */
int64_t unit_tiles(args::Linear op) { return op.flags() & INL_GATE_MASK ? 2 : 1; }

int64_t unit_count(args::Linear op) { return tiles_of(op.matrix()) / unit_tiles(op); }

int64_t units_per_chunk(args::Linear op) {
    return chunk_units(unit_count(op), tile_bytes(op.matrix()) * unit_tiles(op),
                       block_count(op.rows()), op.rows() <= PRIVATE_ROWS);
}

int64_t linear_chunks(args::Linear op) {
    return ceil_div(unit_count(op), units_per_chunk(op)) * block_count(op.rows());
}

/* Parts of the columns for encoding: with few rows a thread would have no work. */
int64_t encode_parts(args::Linear op) { return op.rows() <= 4 * MAX_TILE_ROWS ? 2 : 1; }

int64_t encode_chunks(args::Linear op) {
    if (encodes_privately(op)) return 0;
    return ceil_div(op.rows(), MAX_TILE_ROWS) * encode_parts(op);
}

/* Bytes of the panels of a unit, 0 without. */
int64_t unit_panels(args::Linear op) {
    if (!uses_panels(op.matrix(), op.flags(), op.rows())) return 0;
    return unit_tiles(op) * panel_bytes(op.matrix());
}

Scratch linear_scratch(args::Linear op) {
    const int64_t rows = op.rows() * RowShape(op.matrix(), op.flags()).bytes();
    const int64_t row = aligned(4 * op.matrix().columns);
    if (encodes_privately(op)) return {0, rows + row};
    const int64_t panels = unit_panels(op);
    return {rows, panels > row ? panels : row};
}

/* Row ``at`` of the left operand: a row of x, or its normalization in ``buffer``.
 * store_sum: also write x + delta to sum. */
const float *prepare_row(args::Linear op, int64_t at, float *buffer, bool store_sum) {
    const int64_t columns = op.matrix().columns;
    const float *x = op.x() + at * op.x_stride();
    if (op.delta() != nullptr) {
        float *total = store_sum ? op.sum() + at * op.x_stride() : buffer;
        add_rows(x, op.delta() + at * op.x_stride(), total, columns);
        x = total;
    }
    if (op.norm_weight() == nullptr) return x;
    normalize(x, op.norm_weight(), buffer, columns, op.eps(),
              op.flags() & INL_PLUS_ONE);
    return buffer;
}

/* Encode some columns of some rows. */
void encode_rows(args::Linear op, Span rows, Span columns, char *encoded, float *buffer,
                 bool store_sum) {
    const inl_matrix &m = op.matrix();
    const RowShape shape(m, op.flags());
    for (int64_t at = rows.from; at < rows.to; at++) {
        const float *x = prepare_row(op, at, buffer, store_sum);
        const RowTile tile = tile_with(at, op.rows());
        const TileView<> view{encoded + tile.start * shape.bytes(), shape, tile.rows};
        encode(x, view, int(at - tile.start), m.zero, columns);
    }
}

void encode_body(args::Linear op, int64_t chunk, Worker &worker) {
    const int64_t columns = op.matrix().columns, parts = encode_parts(op),
                  part = chunk % parts,
                  width = ceil_div(columns, ENCODE_COLUMNS * parts) * ENCODE_COLUMNS;
    encode_rows(op, Span(chunk / parts, MAX_TILE_ROWS, op.rows()),
                Span(part, width, columns), worker.shared,
                reinterpret_cast<float *>(worker.own), part == 0);
}

/* Store 16 columns of y, of matrix tile ``tile``, for each of the rows. */
void store_sums(args::Linear op, int64_t tile, const RowTile &rows, const F *sums) {
    const int64_t first = tile * INL_LANES;
    const int n = lanes_left(first, op.matrix().rows);
    const float *bias = op.bias();
    const F shift = bias == nullptr ? set(0.0f) : load_first(bias + first, n);
    for (int r = 0; r < rows.rows; r++) {
        float *y = op.y() + (rows.start + r) * op.y_stride() + first;
        store_first(y, bias == nullptr ? sums[r] : add(sums[r], shift), n);
    }
}

void store_gated(args::Linear op, int64_t unit, const RowTile &rows, const F *gate,
                 const F *up) {
    const int64_t first = unit * INL_LANES;
    if (first >= op.gated_columns()) return;
    const int n = lanes_left(first, op.gated_columns());
    for (int r = 0; r < rows.rows; r++) {
        float *y = op.y() + (rows.start + r) * op.y_stride() + first;
        store_first(y, mul(activation(gate[r], op.flags()), up[r]), n);
    }
}

/* Prefetch the cache lines of y: many stores that miss the cache stall the core. */
void prefetch_y(args::Linear op, int64_t unit, const RowTile &rows) {
    for (int r = 0; r < rows.rows; r++)
        __builtin_prefetch(op.y() + (rows.start + r) * op.y_stride() + unit * INL_LANES,
                           1);
}

void store_unit(args::Linear op, int64_t unit, const RowTile &rows, const F *sums,
                const F *up) {
    if (op.flags() & INL_GATE_MASK) return store_gated(op, unit, rows, sums, up);
    store_sums(op, unit, rows, sums);
}

/* Pairs of matrix tiles. */
inline int64_t pairs_of(args::Linear op) { return ceil_div(tiles_of(op.matrix()), 2); }

/* Store a pair of tiles: one of gate and one of up, or two of y. */
inline void store_pair(args::Linear op, int64_t pair, const RowTile &rows, const F *first,
                       const F *second) {
    if (op.flags() & INL_GATE_MASK) return store_gated(op, pair, rows, first, second);
    store_sums(op, 2 * pair, rows, first);
    if (2 * pair + 1 < tiles_of(op.matrix()))
        store_sums(op, 2 * pair + 1, rows, second);
}

const char *unit_weights(args::Linear op, int64_t unit) {
    return static_cast<const char *>(op.matrix().data) +
           unit * unit_tiles(op) * tile_bytes(op.matrix());
}

void multiply_unit(args::Linear op, int64_t unit, const RowTile &rows,
                   const TileView<> &x) {
    const inl_matrix &m = op.matrix();
    const char *weights = unit_weights(op, unit);
    F sums[MAX_TILE_ROWS], up[MAX_TILE_ROWS];
    prefetch_y(op, unit, rows);
    multiply_tile(m, weights, x, sums);
    if (unit_tiles(op) == 2) multiply_tile(m, weights + tile_bytes(m), x, up);
    store_unit(op, unit, rows, sums, up);
}

/* The same for many rows, with panels. */
void multiply_with_panels(args::Linear op, int64_t unit, const Span &span,
                          const RowShape &shape, Worker &worker) {
    UnitPanels panels(op.matrix(), unit_tiles(op), unit_weights(op, unit), worker.own);
    F sums[MAX_TILE_ROWS], up[MAX_TILE_ROWS];
    for (int64_t row = span.from; row < span.to;) {
        const RowTile rows = tile_with(row, op.rows());
        prefetch_y(op, unit, rows);
        panels.multiply({worker.shared + rows.start * shape.bytes(), shape, rows.rows},
                        span.count(), sums, up);
        store_unit(op, unit, rows, sums, up);
        row = rows.start + rows.rows;
    }
}

/* Units and rows of a chunk; consecutive chunks share a block of rows. */
struct LinearChunk {
    Span units, rows;

    LinearChunk(args::Linear op, int64_t chunk)
        : units(chunk % columns(op), units_per_chunk(op), unit_count(op)),
          rows(chunk / columns(op), block_rows(op.rows()), op.rows()) {}

    static int64_t columns(args::Linear op) {
        return ceil_div(unit_count(op), units_per_chunk(op));
    }
};

void linear_body(args::Linear op, int64_t chunk, Worker &worker) {
    const RowShape shape(op.matrix(), op.flags());
    char *encoded = worker.shared;
    if (encodes_privately(op)) {
        encoded = worker.own;
        char *buffer = worker.own + op.rows() * shape.bytes();
        const Span all(0, shape.columns, shape.columns);
        if (worker.fresh)
            encode_rows(op, Span(0, PRIVATE_ROWS, op.rows()), all, encoded,
                        reinterpret_cast<float *>(buffer), chunk == 0);
    }
    const LinearChunk work(op, chunk);
    if constexpr (PANEL_ROWS > 0)
        if (unit_panels(op) > 0) {
            for (int64_t unit = work.units.from; unit < work.units.to; unit++)
                multiply_with_panels(op, unit, work.rows, shape, worker);
            return;
        }
    for (int64_t row = work.rows.from; row < work.rows.to;) {
        const RowTile rows = tile_with(row, op.rows());
        const TileView<> x{encoded + rows.start * shape.bytes(), shape, rows.rows};
        for (int64_t unit = work.units.from; unit < work.units.to; unit++)
            multiply_unit(op, unit, rows, x);
        row = rows.start + rows.rows;
    }
}

} // namespace
} // namespace inl
