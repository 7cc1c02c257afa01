/* Rows of x as the linear kernels take them.
 *
 * Rows are cut into tiles of MOST_ROWS, 8, 4, 2 or 1. In a tile of R rows, a kernel
 * broadcasts 4-byte words from one pointer: a float32 of one column or two bfloat16 of
 * two, as [step][R], or int8 as [group][R][columns of a group]. Behind them, for
 * quantized weights, lie as many float32 or int32 [group][R] as the mode needs.
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
    /* Codes of all rows in a group. */
    int8_t *codes(int plane, int64_t group) const {
        return reinterpret_cast<int8_t *>(words(plane)) + group * shape.group * count();
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
template <int GROUP>
inline float group_size(const float *x) {
    const F infinite = set(INFINITY);
    F most = set(0.0f);
    for (int k = 0; k < GROUP; k += 16) {
        const F size = magnitude(load(x + k));
        most = larger(most, where_below(size, infinite, size, infinite));
    }
    return largest(most);
}

/* Sums of the codes of a group, in each plane. */
struct CodeSums {
    float upper, lower;
};

/* Codes of a group in 15 bits, or in 8 and nothing to the lower plane. */
template <bool PLANES, int GROUP>
inline CodeSums encode_group(const float *x, int8_t *upper, int8_t *lower, float scale,
                             float lift) {
    I uppers = zeros();
    F lowers = set(0.0f);
    for (int k = 0; k < GROUP; k += 16) {
        const F value = mul(mul(load(x + k), set(lift)), set(scale));
        I high;
        if (PLANES) {
            const F whole = to_float(nearest(mul(value, set(128.0f))));
            high = nearest(mul(whole, set(1.0f / 128)));
            const F rest = fma(to_float(high), set(-128.0f), whole);
            store_bytes(lower + k, nearest(rest));
            lowers = add(lowers, rest);
        } else {
            high = nearest(value);
        }
        store_bytes(upper + k, high);
        uppers = add(uppers, high);
    }
    return {sum(to_float(uppers)), PLANES ? sum(lowers) : 0.0f};
}

/* Groups of a row that hold much more than others do would lose most of what eight
 * bits lose: so many times the row's root mean square has a second plane. */
constexpr float OUTLIER = 8.0f;

/* One row's part of a tile: each pointer at the first of its columns. */
struct RowView {
    int64_t rows;
    int8_t *upper, *lower;
    float *scales, *shifts;
    int32_t *starts, *seconds, *flags; /* flags: of the whole tile */

    RowView(const TileView<> &view, int at, int64_t group)
        : rows(view.rows), upper(view.codes(0, group) + at * view.shape.group),
          lower(view.codes(1, group) + at * view.shape.group),
          scales(view.extra(0) + group * rows + at),
          shifts(view.extra(2) + group * rows + at),
          starts(reinterpret_cast<int32_t *>(view.extra(1)) + group * rows + at),
          seconds(reinterpret_cast<int32_t *>(view.extra(3)) + group * rows + at),
          flags(reinterpret_cast<int32_t *>(view.extra(4)) + group * rows) {}
};

/* Only those groups of a tile have a lower plane that some row has outliers in: it is
 * zeros for the other rows. */
template <int GROUP>
void begin_lower(const RowView &row, int at) {
    *row.flags = 1;
    std::memset(row.lower - at * GROUP, 0, size_t(GROUP * row.rows));
    std::memset(row.seconds - at, 0, size_t(4 * row.rows));
}

template <bool SECOND, int GROUP>
void encode_integer(const float *x, const TileView<> &view, int at, int zero,
                    Span columns) {
    const float large =
        SECOND ? 0.0f
               : OUTLIER * std::sqrt(sum_of_squares(x, view.shape.columns) /
                                     float(view.shape.columns));
    RowView row(view, at, columns.from / GROUP);
    const int64_t rows = row.rows;
    for (int64_t k = columns.from; k < columns.to; k += GROUP) {
        const float size = group_size<GROUP>(x + k);
        /* Codes of tiny numbers: their reciprocal would be infinite. */
        const float lift = size < 1e-30f ? 0x1p100f : 1.0f;
        const float inverse = size > 0 ? 127.0f / (size * lift) : 0.0f;
        /* What is no number has an infinite size, and codes of any sum. */
        const int sign = size < INFINITY ? -zero : 0;
        if (!SECOND && at == 0) *row.flags = 0;
        if (SECOND || size > large) {
            if (!SECOND && *row.flags == 0) begin_lower<GROUP>(row, at);
            const CodeSums sums =
                encode_group<true, GROUP>(x + k, row.upper, row.lower, inverse, lift);
            const float both = sums.upper + sums.lower * (1.0f / 128);
            *row.scales = size / (SECOND ? 127.0f * 128 : 127.0f);
            *row.starts = sign * int32_t(SECOND ? 128 * both : sums.upper);
            if (!SECOND) *row.seconds = sign * int32_t(sums.lower);
            *row.shifts = size / 127.0f * both;
        } else {
            const CodeSums sums =
                encode_group<false, GROUP>(x + k, row.upper, row.lower, inverse, lift);
            *row.scales = size / 127.0f;
            *row.starts = sign * int32_t(sums.upper);
            *row.shifts = size / 127.0f * sums.upper;
        }
        row.upper += GROUP * rows, row.lower += GROUP * rows;
        row.scales += rows, row.shifts += rows;
        row.starts += rows, row.seconds += rows, row.flags += rows;
    }
}

template <bool SECOND>
void encode_groups(const float *x, const TileView<> &view, int at, int zero,
                   Span columns) {
    if (view.shape.group == 16)
        return encode_integer<SECOND, 16>(x, view, at, zero, columns);
    encode_integer<SECOND, 32>(x, view, at, zero, columns);
}

/* Columns of row x, at place ``at`` of the tile. */
void encode(const float *x, const TileView<> &view, int at, int zero, Span columns) {
    switch (view.shape.mode) {
    case INL_X_EXACT: return encode_exact(x, view, at, columns);
    case INL_X_BF16: return encode_bf16(x, view, at, columns);
    case INL_X_INT8: return encode_groups<false>(x, view, at, zero, columns);
    default: return encode_groups<true>(x, view, at, zero, columns);
    }
}
