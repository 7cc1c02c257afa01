/* Rows of x as the linear kernels take them.
 *
 * Rows are cut into tiles of MOST_ROWS, 8, 4, 2 or 1. In a tile of R rows, 4-byte words
 * lie as [step][R], so that a kernel broadcasts them from one pointer: a float32 of one
 * column, two bfloat16 of two, or four int8 of four. Behind them, for quantized
 * weights, lie as many float32 or int32 [group][R] as the mode needs.
 */

struct RowTile {
    int64_t start;
    int rows;
};

inline int tile_rows(int64_t left) {
    if (left >= MOST_ROWS) return MOST_ROWS;
    return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

RowTile tile_with(int64_t row, int64_t rows) {
    int64_t start = row / MOST_ROWS * MOST_ROWS;
    if (start + MOST_ROWS <= rows) return {start, MOST_ROWS};
    while (start + tile_rows(rows - start) <= row) start += tile_rows(rows - start);
    return {start, tile_rows(rows - start)};
}

/* Sizes of a row's parts. */
struct RowShape {
    int mode, planes;
    int64_t columns, group, groups, words; /* words: of one plane */

    RowShape(const inl_matrix &m, int32_t flags)
        : mode(flags & INL_X_MASK), planes(mode == INL_X_INT8 || mode == INL_X_INT16 ? 2 : 1),
          columns(m.columns), group(is_quantized(m) ? m.group : 0),
          groups(group ? columns / group : 0) {
        words =
            mode == INL_X_EXACT ? columns : over(columns, mode == INL_X_BF16 ? 2 : 4);
    }
    bool integer() const { return mode == INL_X_INT8 || mode == INL_X_INT16; }
    /* Scale, start of the sum, and sum of a group; a float32 sum alone when exact. With
     * int8 also the start of the second sum, and whether the tile needs that. */
    int64_t extras() const {
        return mode == INL_X_INT8 ? 5 : integer() ? 3 : groups ? 1 : 0;
    }
    int64_t bytes() const { return aligned(4 * (planes * words + extras() * groups)); }
};

/* Where a row's parts go: its place in a tile at ``base``. */
template <int FIXED = 0>
struct TileView {
    char *base;
    const RowShape &shape;
    int rows;

    int count() const { return FIXED ? FIXED : rows; }
    uint32_t *words(int plane) const {
        return reinterpret_cast<uint32_t *>(base) + plane * shape.words * count();
    }
    float *extra(int index) const {
        return reinterpret_cast<float *>(base) +
               (shape.planes * shape.words + index * shape.groups) * count();
    }
};

/* Columns from .. to - 1, which are whole runs of ENCODE_COLUMNS or the last. */
constexpr int64_t ENCODE_COLUMNS = 32;

void encode_exact(const float *x, const TileView<> &view, int at, Span columns) {
    const RowShape &shape = view.shape;
    float *words = reinterpret_cast<float *>(view.words(0));
    for (int64_t k = columns.from; k < columns.to; k++)
        words[k * view.rows + at] = x[k];
    if (shape.groups == 0) return;
    for (int64_t g = columns.from / shape.group; g * shape.group < columns.to; g++) {
        F total = load(x + g * shape.group);
        if (shape.group == 32) total = add(total, load(x + g * 32 + 16));
        view.extra(0)[g * view.rows + at] = sum(total);
    }
}

void encode_bf16(const float *x, const TileView<> &view, int at, Span columns) {
    uint32_t *words = view.words(0);
    const int64_t last = columns.to - 1;
    for (int64_t k = columns.from; k < last; k += 2)
        words[k / 2 * view.rows + at] = narrowed(x[k]) | uint32_t(narrowed(x[k + 1]))
                                                             << 16;
    if (last >= columns.from && last % 2 == 0)
        words[last / 2 * view.rows + at] = narrowed(x[last]);
}

/* The largest magnitude of a group; infinite where it holds a NaN. */
inline float group_size(const float *x, int64_t group) {
    const F infinite = set(INFINITY);
    F most = set(0.0f);
    for (int64_t k = 0; k < group; k += 16) {
        const F size = magnitude(load(x + k));
        most = larger(most, where_below(size, infinite, size, infinite));
    }
    return largest(most);
}

inline void put_words(const int8_t *bytes, int64_t group, uint32_t *words, int rows) {
    for (int64_t step = 0; step < group / 4; step++)
        std::memcpy(words + step * rows, bytes + 4 * step, 4);
}

struct CodeSums {
    float upper, lower;
};

/* Codes of a group in 15 bits, or in 8 with a lower plane of zeros; their sums. */
template <bool PLANES>
CodeSums encode_group(const float *x, const TileView<> &view, int at, int64_t first,
                      float scale, float lift) {
    const int64_t group = view.shape.group;
    int8_t upper[32], lower[32] = {};
    F uppers = set(0.0f), lowers = set(0.0f);
    for (int64_t k = 0; k < group; k += 16) {
        const F value = mul(mul(load(x + k), set(lift)), set(scale));
        if (PLANES) {
            const F whole = to_float(nearest(mul(value, set(128.0f))));
            const I high = nearest(mul(whole, set(1.0f / 128)));
            const F rest = fma(to_float(high), set(-128.0f), whole);
            store_bytes(upper + k, high);
            store_bytes(lower + k, nearest(rest));
            uppers = add(uppers, to_float(high));
            lowers = add(lowers, rest);
        } else {
            const I high = nearest(value);
            store_bytes(upper + k, high);
            uppers = add(uppers, to_float(high));
        }
    }
    put_words(upper, group, view.words(0) + first * view.rows + at, view.rows);
    put_words(lower, group, view.words(1) + first * view.rows + at, view.rows);
    return {sum(uppers), PLANES ? sum(lowers) : 0.0f};
}

/* Groups of a row that hold much more than others do would lose most of what eight
 * bits lose: so many times the row's root mean square has a second plane. */
constexpr float OUTLIER = 8.0f;

inline float root_mean_square(const float *x, int64_t columns) {
    F total = set(0.0f);
    for (int64_t k = 0; k < columns; k += 16) {
        const F part = load(x + k);
        total = fma(part, part, total);
    }
    return std::sqrt(sum(total) / float(columns));
}

template <bool SECOND>
void encode_integer(const float *x, const TileView<> &view, int at, int zero,
                    Span columns) {
    const RowShape &shape = view.shape;
    int32_t *starts = reinterpret_cast<int32_t *>(view.extra(1)),
            *seconds = SECOND ? nullptr : reinterpret_cast<int32_t *>(view.extra(3)),
            *flags = SECOND ? nullptr : reinterpret_cast<int32_t *>(view.extra(4));
    const float large = SECOND ? 0 : OUTLIER * root_mean_square(x, shape.columns);
    for (int64_t g = columns.from / shape.group; g * shape.group < columns.to; g++) {
        const float *part = x + g * shape.group;
        const float size = group_size(part, shape.group);
        /* Codes of tiny numbers: their reciprocal would be infinite. */
        const float lift = size < 1e-30f ? 0x1p100f : 1.0f;
        const float inverse = size > 0 ? 127.0f / (size * lift) : 0.0f;
        const bool second = SECOND || size > large;
        const int64_t first = g * shape.group / 4, place = g * view.rows + at;
        const CodeSums sums =
            second ? encode_group<true>(part, view, at, first, inverse, lift)
                   : encode_group<false>(part, view, at, first, inverse, lift);
        /* What is no number has an infinite size, and codes of any sum. */
        const int sign = std::isfinite(size) ? -zero : 0;
        const float both = sums.upper + sums.lower * (1.0f / 128);
        if (SECOND) {
            view.extra(0)[place] = size / (127.0f * 128);
            starts[place] = sign * int32_t(128 * both);
        } else {
            view.extra(0)[place] = size / 127.0f;
            starts[place] = sign * int32_t(sums.upper);
            seconds[place] = sign * int32_t(sums.lower);
            int32_t &flag = flags[g * view.rows];
            flag = (at > 0 ? flag : 0) | int32_t(second);
        }
        view.extra(2)[place] = size / 127.0f * both;
    }
}

/* Columns of row x, at place ``at`` of the tile. */
void encode(const float *x, const TileView<> &view, int at, int zero, Span columns) {
    switch (view.shape.mode) {
    case INL_X_EXACT: return encode_exact(x, view, at, columns);
    case INL_X_BF16: return encode_bf16(x, view, at, columns);
    case INL_X_INT8: return encode_integer<false>(x, view, at, zero, columns);
    default: return encode_integer<true>(x, view, at, zero, columns);
    }
}
