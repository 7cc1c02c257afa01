/* Tiles of weights decoded once for many rows of x.
 *
 * Instructions that decode codes and scales are more than those that multiply, where a
 * product of four bytes takes several. A panel holds a tile as [run]: its codes as bytes
 * [8][16 rows][4 columns], or as PanelRun says, scales float32 [groups of a run][16
 * rows], and offsets as scales if the matrix has them. Results are those of
 * multiply_tile bit for bit.
 */
#pragma once

#include <cstdint>

#include "kernels/codes.h"
#include "kernels/encode.h"
#include "kernels/tiles.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "simd/simd.h"

namespace inl {
namespace {

constexpr int64_t VECTOR = 4 * INL_LANES;

/* The codes of a run in a panel. SIGNED: their magnitudes and signs, with int32
 * [groups of the run][16 rows] behind them, the sums with which rows of x begin. */
template <int LARGEST>
struct PanelRun {
    static constexpr bool SIGNED = Dot<LARGEST>::CENTERED;
    static constexpr int64_t STEP = VECTOR * (SIGNED ? 2 : 1), CODES = RUN / 4 * STEP;

    /* Bytes with as many groups. */
    static constexpr int64_t bytes(int64_t groups, bool offsets) {
        return CODES + VECTOR * groups * (1 + SIGNED + offsets);
    }
};

/* Bytes of a run in a panel, and of a panel. */
inline int64_t panel_run(const inl_matrix &m) {
    const int64_t groups = RUN / m.group;
    if (m.format == INL_U8 || has_table(m))
        return PanelRun<255>::bytes(groups, m.offsets);
    return PanelRun<1>::bytes(groups, m.offsets);
}
inline int64_t panel_bytes(const inl_matrix &m) {
    return m.columns / RUN * panel_run(m);
}

/* Whether rows are multiplied with panels. Codes of 8 bits need no decoding, so that
 * panels save less. */
inline bool uses_panels(const inl_matrix &m, int32_t flags, int64_t rows) {
    if (PANEL_ROWS == 0 || !is_quantized(m) || (flags & INL_X_MASK) != INL_X_INT8)
        return false;
    return rows >= (m.format == INL_U8 ? 2 : 1) * PANEL_ROWS;
}

inline char *store_vector(char *panel, F x) {
    store(reinterpret_cast<float *>(panel), x);
    return panel + VECTOR;
}
inline char *store_vector(char *panel, I x) { return store_vector(panel, as_float(x)); }

/* Store the codes of a run; returns the end. */
template <class C>
char *store_codes(const C &codes, const char *run, int64_t groups, char *panel) {
    using D = Dot<C::LARGEST>;
    if constexpr (D::CENTERED) {
        I sums[RUN / 16] = {zeros(), zeros()};
        for (int step = 0; step < RUN / 4; step++) {
            const auto w = D::signs(codes.step(run, step));
            panel = store_vector(store_vector(panel, w.sizes), w.negative);
            I &sum = sums[step * groups / (RUN / 4)];
            sum = D::add_negative(sum, w);
        }
        for (int64_t group = 0; group < groups; group++)
            panel = store_vector(panel, sums[group]);
    } else {
        for (int step = 0; step < RUN / 4; step++)
            panel = store_vector(panel, codes.step(run, step));
    }
    return panel;
}

template <class C>
void decode_codes(const C &codes, const inl_matrix &m, const char *tile, char *panel) {
    const int64_t groups = RUN / m.group;
    for_each_run(m, tile, [&](const char *run, const auto &scales) {
        panel = store_codes(codes, run, groups, panel);
        for (int part = 0; part < groups; part++)
            panel = store_vector(panel, scales.scale_of(run, part));
        if (!m.offsets) return;
        for (int part = 0; part < groups; part++)
            panel = store_vector(panel, scales.offset_of(run, part));
    });
}

inline void decode_panel(const inl_matrix &m, const char *tile, char *panel) {
    with_codes(m, [&](const auto &codes) { decode_codes(codes, m, tile, panel); });
}

/* Codes of a panel. */
template <int MOST>
struct PanelCodes {
    static constexpr int LARGEST = MOST;
    static constexpr bool DECODED = true;
    explicit PanelCodes(const inl_matrix &) {}
    auto step(const char *run, int step) const {
        const char *at = run + PanelRun<MOST>::STEP * step;
        if constexpr (PanelRun<MOST>::SIGNED)
            return decltype(Dot<MOST>::signs(zeros())){load_ints(at),
                                                       load_ints(at + VECTOR)};
        else
            return load_ints(at);
    }
    /* Initial sums of a group for rows of x whose own is ``start``. */
    template <int GROUP>
    I begin(const char *run, int first, int32_t start) const {
        if constexpr (PanelRun<MOST>::SIGNED)
            return load_ints(run + PanelRun<MOST>::CODES + first * 4 / GROUP * VECTOR);
        else
            return set_int(start);
    }
};

/* A function of its own, whose loop has all registers. */
template <int LARGEST, int GROUP, int R>
__attribute__((noinline)) void panel_tile(const inl_matrix &m, const char *panel,
                                          const TileView<R> &x, F *sums) {
    constexpr int PARTS = RUN / GROUP;
    IntegerSums<PanelCodes<LARGEST>, R, GROUP, 1> found(m, x);
    const int64_t runs = m.columns / RUN, bytes = panel_run(m);
    constexpr int64_t HEAD = PanelRun<LARGEST>::bytes(PARTS, false) - PARTS * VECTOR;
    int64_t g = 0;
    for (int64_t at = 0; at < runs; at++, panel += bytes) {
        const float *scales = reinterpret_cast<const float *>(panel + HEAD);
        const float *offsets = scales + (m.offsets ? PARTS * INL_LANES : 0);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++, g++)
            found.add_group(panel, part * GROUP / 4, g, load(scales + INL_LANES * part),
                            load(offsets + INL_LANES * part));
    }
    for (int r = 0; r < R; r++) sums[r] = found.totals[r];
}

template <int R>
void any_panel(const inl_matrix &m, const char *panel, const TileView<R> &x, F *sums) {
    switch (m.format) {
    case INL_U2: return panel_tile<3, 16>(m, panel, x, sums);
    case INL_U3: return panel_tile<7, 16>(m, panel, x, sums);
    case INL_U4: return panel_tile<15, 32>(m, panel, x, sums);
    case INL_U5: return panel_tile<31, 32>(m, panel, x, sums);
    case INL_U6: return panel_tile<63, 16>(m, panel, x, sums);
    case INL_IQ1:
    case INL_IQ2:
        if (m.group == 16) return panel_tile<255, 16>(m, panel, x, sums);
        return panel_tile<255, 32>(m, panel, x, sums);
    default: return panel_tile<255, 32>(m, panel, x, sums);
    }
}

/* Multiply a panel with as many rows as tile_rows returns. */
inline void multiply_panel(const inl_matrix &m, const char *panel, const TileView<> &x,
                           F *sums) {
    if (x.rows == 4) return any_panel<4>(m, panel, {x.base, x.shape, 4}, sums);
    if (x.rows == 2) return any_panel<2>(m, panel, {x.base, x.shape, 2}, sums);
    any_panel<1>(m, panel, {x.base, x.shape, 1}, sums);
}

/* The panels of a unit: of a tile, or of one of gate and one of up. */
struct UnitPanels {
    const inl_matrix &m;
    const int64_t tiles, bytes; /* of a tile of weights */
    char *const first, *const second;
    const char *next; /* weights of the next unit */

    UnitPanels(const inl_matrix &m, int64_t tiles, const char *weights, char *scratch)
        : m(m), tiles(tiles), bytes(tile_bytes(m)), first(scratch),
          second(scratch + panel_bytes(m)), next(weights + tiles * bytes) {
        decode_panel(m, weights, first);
        if (tiles == 2) decode_panel(m, weights + bytes, second);
    }
    /* Multiply with a tile of ``rows`` rows, and prefetch a share of the next unit. */
    void multiply(const TileView<> &x, int64_t rows, F *sums, F *up) {
        const int64_t share = aligned(tiles * bytes * x.rows / rows);
        prefetch_lines(next, share);
        next += share;
        multiply_panel(m, first, x, sums);
        if (tiles == 2) multiply_panel(m, second, x, up);
    }
};

} // namespace
} // namespace inl
