/* Products with the experts that tokens chose, and the weighted sums of their results.
 *
 * The choices (slots) are sorted by expert and divided into blocks of rows of one expert.
 * A chunk is a block and a part of its expert's tiles: weights of an expert that nobody
 * chose are not read, and those of others once for each block. The number of chunks
 * must not depend on the choices, so chunks are made for the most blocks that there may
 * be; those beyond the last block do nothing.
 */
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/elementary.h"
#include "kernels/encode.h"
#include "kernels/linear.h"
#include "kernels/span.h"
#include "kernels/tiles.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

int64_t expert_blocks(args::ExpertLinear op) {
    const int64_t most = op.experts() + 1 + op.slots() / BLOCK_ROWS;
    return op.slots() < most ? op.slots() : most;
}

/* Rows of one expert; ids out of range count as expert number ``experts``. */
struct ExpertBlock {
    int32_t expert, start, rows; /* start: place of its first slot in the order */
};

/* Slots sorted by expert, in the scratch of a thread: each thread sorts for itself,
 * which is faster than waiting for another one. */
struct ExpertPlan {
    args::ExpertLinear op;
    ExpertBlock *const blocks;
    int32_t *const order, *const ends;

    ExpertPlan(args::ExpertLinear op, Worker &worker)
        : op(op), blocks(reinterpret_cast<ExpertBlock *>(worker.own)),
          order(reinterpret_cast<int32_t *>(blocks + expert_blocks(op))),
          ends(order + op.slots()) {
        if (worker.fresh) fill();
    }
    static int64_t bytes(args::ExpertLinear op) {
        return expert_blocks(op) * int64_t(sizeof(ExpertBlock)) +
               4 * (op.slots() + op.experts() + 2);
    }
    int64_t expert_of(int64_t slot) const {
        const int64_t id = op.ids()[slot];
        return id < 0 || id >= op.experts() ? op.experts() : id;
    }
    void fill() {
        const int64_t experts = op.experts() + 1;
        std::memset(ends, 0, size_t(4 * (experts + 1)));
        for (int64_t slot = 0; slot < op.slots(); slot++) ends[expert_of(slot) + 1]++;
        ExpertBlock *next = blocks;
        for (int64_t expert = 0; expert < experts; expert++) {
            const int32_t start = ends[expert], stop = start + ends[expert + 1];
            for (int32_t row = start; row < stop; row += int32_t(BLOCK_ROWS))
                *next++ = {int32_t(expert), row,
                           int32_t(stop - row < BLOCK_ROWS ? stop - row : BLOCK_ROWS)};
            ends[expert + 1] = stop;
        }
        while (next < blocks + expert_blocks(op)) *next++ = {0, 0, 0};
        for (int64_t slot = 0; slot < op.slots(); slot++)
            order[ends[expert_of(slot)]++] = int32_t(slot);
    }
    bool exists(const ExpertBlock &block) const { return block.expert < op.experts(); }
};

int64_t expert_unit_tiles(args::ExpertLinear op) {
    return op.flags() & INL_GATE_MASK ? 2 : 1;
}

/* Units of one expert: tiles, or pairs of a tile of gate and one of up. */
int64_t expert_units(args::ExpertLinear op) {
    return tiles_of(op.matrix()) / op.experts() / expert_unit_tiles(op);
}

int64_t expert_units_per_chunk(args::ExpertLinear op) {
    const int64_t blocks = expert_blocks(op);
    return chunk_units(expert_units(op),
                       tile_bytes(op.matrix()) * expert_unit_tiles(op), blocks,
                       op.slots() <= PRIVATE_ROWS * blocks);
}

int64_t expert_linear_chunks(args::ExpertLinear op) {
    return ceil_div(expert_units(op), expert_units_per_chunk(op)) * expert_blocks(op);
}

/* Bytes of the panels of a unit, 0 if no expert can have as many rows. */
int64_t expert_panels(args::ExpertLinear op) {
    const int64_t rows = op.slots() < BLOCK_ROWS ? op.slots() : BLOCK_ROWS;
    if (!uses_panels(op.matrix(), op.flags(), rows)) return 0;
    return expert_unit_tiles(op) * panel_bytes(op.matrix());
}

Scratch expert_linear_scratch(args::ExpertLinear op) {
    const int64_t row = RowShape(op.matrix(), op.flags()).bytes(),
                  plan = aligned(ExpertPlan::bytes(op));
    return {op.slots() * row, plan + expert_panels(op)};
}

/* The encoded tile of a block that contains a row. */
inline TileView<> expert_view(const ExpertBlock &block, const RowTile &tile,
                              const RowShape &shape, char *encoded) {
    return {encoded + (block.start + tile.start) * shape.bytes(), shape, tile.rows};
}

void encode_experts_body(args::ExpertLinear op, int64_t chunk, Worker &worker) {
    const ExpertPlan plan(op, worker);
    const ExpertBlock &block = plan.blocks[chunk];
    if (!plan.exists(block)) return;
    const RowShape shape(op.matrix(), op.flags());
    for (int64_t at = 0; at < block.rows; at++) {
        const RowTile tile = tile_with(at, block.rows);
        const int64_t row = plan.order[block.start + at] / op.sharing();
        encode(op.x() + row * op.x_stride(),
               expert_view(block, tile, shape, worker.shared), int(at - tile.start),
               op.matrix().zero, Span(0, shape.columns, shape.columns));
    }
}

/* Store 16 columns of y for the slots of a tile. */
void store_expert_unit(args::ExpertLinear op, int64_t unit, const int32_t *slots,
                       int rows, const F *sums, const F *up) {
    const int64_t first = unit * INL_LANES;
    const bool gated = op.flags() & INL_GATE_MASK;
    const int n = lanes_left(first, op.width());
    for (int r = 0; r < rows; r++) {
        float *y = op.y() + slots[r] * op.width() + first;
        store_first(y, gated ? mul(activation(sums[r], op.flags()), up[r]) : sums[r],
                    n);
    }
}

void multiply_expert_unit(args::ExpertLinear op, const char *weights, int64_t unit,
                          const int32_t *slots, const TileView<> &x) {
    const inl_matrix &m = op.matrix();
    F sums[MAX_TILE_ROWS], up[MAX_TILE_ROWS];
    multiply_tile(m, weights, x, sums);
    if (expert_unit_tiles(op) == 2) multiply_tile(m, weights + tile_bytes(m), x, up);
    store_expert_unit(op, unit, slots, x.rows, sums, up);
}

/* The same for the many rows of a block, with panels. */
void multiply_expert_with_panels(args::ExpertLinear op, const char *weights,
                                 int64_t unit, const int32_t *slots,
                                 const ExpertBlock &block, const RowShape &shape,
                                 Worker &worker) {
    UnitPanels panels(op.matrix(), expert_unit_tiles(op), weights,
                      worker.own + aligned(ExpertPlan::bytes(op)));
    F sums[MAX_TILE_ROWS], up[MAX_TILE_ROWS];
    for (int64_t row = 0; row < block.rows;) {
        const RowTile tile = tile_with(row, block.rows);
        panels.multiply(expert_view(block, tile, shape, worker.shared), block.rows, sums,
                        up);
        store_expert_unit(op, unit, slots + tile.start, tile.rows, sums, up);
        row = tile.start + tile.rows;
    }
}

void expert_linear_body(args::ExpertLinear op, int64_t chunk, Worker &worker) {
    const ExpertPlan plan(op, worker);
    const int64_t size = expert_units_per_chunk(op), count = expert_units(op),
                  parts = ceil_div(count, size);
    const ExpertBlock &block = plan.blocks[chunk / parts];
    const int32_t *slots = plan.order + block.start;
    const Span units(chunk % parts, size, count);
    if (!plan.exists(block)) {
        if (units.from == 0)
            for (int row = 0; row < block.rows; row++)
                std::memset(op.y() + slots[row] * op.width(), 0,
                            size_t(op.width()) * 4);
        return;
    }
    const inl_matrix &m = op.matrix();
    const RowShape shape(m, op.flags());
    const char *weights = static_cast<const char *>(m.data) +
                          block.expert * (tiles_of(m) / op.experts()) * tile_bytes(m);
    const int64_t bytes = expert_unit_tiles(op) * tile_bytes(m),
                  last = ceil_div(op.width(), INL_LANES),
                  end = units.to < last ? units.to : last;
    if constexpr (PANEL_ROWS > 0)
        if (uses_panels(m, op.flags(), block.rows)) {
            for (int64_t unit = units.from; unit < end; unit++)
                multiply_expert_with_panels(op, weights + unit * bytes, unit, slots,
                                            block, shape, worker);
            return;
        }
    for (int64_t row = 0; row < block.rows;) {
        const RowTile tile = tile_with(row, block.rows);
        const TileView<> x = expert_view(block, tile, shape, worker.shared);
        for (int64_t unit = units.from; unit < end; unit++)
            multiply_expert_unit(op, weights + unit * bytes, unit, slots + tile.start,
                                 x);
        row = tile.start + tile.rows;
    }
}

void combine_experts_body(args::CombineExperts op, int64_t chunk, Worker &) {
    const Span rows = row_span(op, chunk);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const float *y = op.y() + row * op.slots() * op.width();
        const float *weights = op.weights() + row * op.slots();
        float *out = op.out() + row * op.width();
        for (int64_t at = 0; at < op.width(); at += 16) {
            const int n = lanes_left(at, op.width());
            F total = set(0.0f);
            for (int64_t slot = 0; slot < op.slots(); slot++)
                total = fma(load_first(y + slot * op.width() + at, n),
                            set(weights[slot]), total);
            store_first(out + at, total, n);
        }
    }
}

} // namespace
} // namespace inl
