/* Codes, scales and offsets of a block of quantized weights, as vectors of 16 rows. */
#pragma once

#include <cstdint>

#include "runtime/matrix.h"
#include "runtime/quant.h"
#include "simd/simd.h"

namespace inl {
namespace {

/* Columns 4 * step to 4 * step + 3 of a plane of BITS, at bit SHIFT of each byte. */
template <int BITS, int SHIFT>
inline I plane_step(const char *run, int step) {
    constexpr int STEPS = 8 / BITS; /* of a register */
    const I w = load_ints(run + 64 * (step / STEPS));
    if (BITS == 8) return w;
    constexpr uint32_t MASK = ((1u << BITS) - 1) << SHIFT;
    const int shift = step % STEPS * BITS - SHIFT;
    const I moved =
        shift > 0 ? shift_right(w, shift) : shift < 0 ? shift_left(w, -shift) : w;
    return bit_and(moved, set_int(int32_t(MASK * 0x01010101u)));
}

/* The same of two planes, one after the other; HIGH may be 0. */
template <int LOW, int HIGH>
inline I plane_codes(const char *run, int step) {
    const I low = plane_step<LOW, 0>(run, step);
    if constexpr (HIGH == 0)
        return low;
    else
        return bit_or(low, plane_step<HIGH, LOW>(run + 64 * LOW, step));
}

/* Codes in planes of LOW and HIGH bits. LARGEST is the largest code, DECODED whether
 * they are stored as they are multiplied; step() returns the codes of 4 columns as bytes.
 * For codes as floats, word() returns those of WORD
 * columns from column ``at``, and number() one of them. */
template <int LOW, int HIGH>
struct PlaneCodes {
    static constexpr int LARGEST = (1 << (LOW + HIGH)) - 1;
    static constexpr bool DECODED = false;
    static constexpr int WORD = LOW == 4 && HIGH == 0 ? 8 : 4;

    explicit PlaneCodes(const inl_matrix &) {}
    I step(const char *run, int step) const {
        return plane_codes<LOW, HIGH>(run, step);
    }
    I word(const char *run, int at) const {
        return WORD == 8 ? load_ints(run + 8 * at) : step(run, at / 4);
    }
    static F number(const Codes &codes, I word, int k) {
        return WORD == 8 ? codes.nibble(word, k % 4 * 8 + k / 4 * 4)
                         : codes.byte(word, 8 * k);
    }
};

/* Codes that are indices of a table, in planes of LOW and HIGH bits. */
template <int LOW, int HIGH>
struct TableCodes {
    static constexpr int LARGEST = 255;
    static constexpr bool DECODED = false;
    static constexpr int WORD = 4;
    I table;

    explicit TableCodes(const inl_matrix &m) : table(load_ints(table_of(m))) {}
    I step(const char *run, int step) const {
        return look_up(table, plane_codes<LOW, HIGH>(run, step));
    }
    I word(const char *run, int at) const { return step(run, at / 4); }
    static F number(const Codes &codes, I word, int k) {
        return codes.byte(word, 8 * k);
    }
};

/* Calls visit with the codes of a quantized matrix. */
template <class Visit>
inline void with_codes(const inl_matrix &m, Visit visit) {
    switch (m.format) {
    case INL_U2: return visit(PlaneCodes<2, 0>(m));
    case INL_U3: return visit(PlaneCodes<2, 1>(m));
    case INL_U4: return visit(PlaneCodes<4, 0>(m));
    case INL_U5: return visit(PlaneCodes<4, 1>(m));
    case INL_U6: return visit(PlaneCodes<4, 2>(m));
    case INL_U8: return visit(PlaneCodes<8, 0>(m));
    case INL_IQ1:
    case INL_IQ2: return visit(TableCodes<2, 1>(m));
    default: return visit(TableCodes<4, 0>(m));
    }
}

/* 2^(e - 128) for bytes e, as a product of two normal numbers. */
inline F power_of_two(I bytes) {
    const I e = bit_and(bytes, set_int(255));
    const I first = add(shift_right(e, 1), set_int(63));
    const I second = add(shift_right(add(e, set_int(1)), 1), set_int(63));
    return mul(as_float(shift_left(first, 23)), as_float(shift_left(second, 23)));
}

/* Scale formats of a matrix that are known at compile time; ANY_SCALE is not. */
constexpr int ANY_SCALE = -1;

/* Scales and offsets of the groups of a block. */
template <int SCALE = ANY_SCALE>
struct BlockScales {
    const int kind;
    const bool has_offsets;
    const int64_t scales, offsets; /* places in a run */
    F scale, offset;               /* of the block */
    float sixes[64];               /* bytes: scales of 6 bits, of all groups */
    int64_t number = 0;            /* of the run in its block */

    BlockScales(const inl_matrix &m, const BlockShape &shape, const char *block)
        : kind(SCALE == ANY_SCALE ? (eighths(m) ? INL_SCALE_BYTE : m.scale) : SCALE),
          has_offsets(m.offsets),
          scales(shape.codes), offsets(scales + shape.scales), scale(set(1.0f)),
          offset(set(0.0f)) {
        if (kind == INL_SCALE_EXPONENT) return;
        const uint16_t *halves = reinterpret_cast<const uint16_t *>(block);
        scale = load_half(halves);
        if (has_offsets) offset = load_half(halves + INL_LANES);
        if (eighths(m)) scale = mul(scale, set(0.125f));
        if (kind == INL_SCALE_SIX) decode_sixes(block + shape.halves);
    }
    static bool eighths(const inl_matrix &m) { return m.scale == INL_SCALE_EIGHTHS; }
    /* Bytes of four groups in a step. */
    void decode_sixes(const char *packed) {
        const I high = load_ints(packed + SIX_LOW), mask = set_int(0x0f0f0f0f);
        for (int part = 0; part < 4; part++) {
            const I low = load_ints(packed + part % 2 * 64);
            const I lower = bit_and(shift_right(low, part / 2 * 4), mask);
            const I upper = bit_and(part < 2 ? shift_left(high, 4 - 2 * part)
                                             : shift_right(high, 2 * part - 4),
                                    set_int(0x30303030));
            store(sixes + 16 * part, as_float(bit_or(lower, upper)));
        }
    }
    /* Of a group of a run. */
    F scale_of(const char *run, int group) const {
        if (kind == INL_SCALE_HALF || kind == INL_SCALE_WIDE) return scale;
        if (kind == INL_SCALE_SIX) {
            const I code = load_bytes(sixes + (2 * number + group) * (INL_LANES / 4));
            return mul(scale, to_float(add(code, set_int(-32))));
        }
        const I bytes = load_bytes(run + scales + INL_LANES * group);
        if (kind == INL_SCALE_BYTE) return mul(scale, to_float(bytes));
        if (kind == INL_SCALE_EXPONENT) return power_of_two(bytes);
        return mul(scale, to_float(bit_and(bytes, set_int(15))));
    }
    /* Zeros if the matrix has no offsets. */
    F offset_of(const char *run, int group) const {
        if (kind == INL_SCALE_HALF || kind == INL_SCALE_WIDE || !has_offsets)
            return offset;
        if (kind == INL_SCALE_BYTE)
            return mul(offset, to_float(load_bytes(run + offsets + INL_LANES * group)));
        const I bytes = load_bytes(run + scales + INL_LANES * group);
        return mul(offset, to_float(bit_and(shift_right(bytes, 4), set_int(15))));
    }
};

/* Calls visit(run, scales) with each run of a tile and the scales of its block. */
template <int SCALE = ANY_SCALE, class Visit>
inline void for_each_run(const inl_matrix &m, const char *tile, Visit visit) {
    const BlockShape shape(m);
    const char *end = tile + m.columns / shape.columns * shape.bytes;
    while (tile < end) {
        BlockScales<SCALE> scales(m, shape, tile);
        const char *next = tile + shape.bytes;
        for (tile += shape.head; tile < next; tile += shape.run, scales.number++)
            visit(tile, scales);
    }
}

} // namespace
} // namespace inl
