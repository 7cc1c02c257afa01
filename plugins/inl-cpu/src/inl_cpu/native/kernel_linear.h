/* y = norm(x + delta) times a matrix, then bias or a gated activation. */

/* With so few rows each thread encodes x for itself, which spares a barrier. */
constexpr int64_t PRIVATE_ROWS = 4;
/* Rows that a chunk takes, and the bytes of weights that it takes at most. */
constexpr int64_t BLOCK_ROWS = 96;
constexpr int64_t BLOCK_BYTES = 49152;
/* Chunks are as long as this leaves them: memory is slow to begin with a new place. */
constexpr int64_t ENOUGH_CHUNKS = 12;

bool encodes_privately(const inl_instruction &i) { return i.dims[0] <= PRIVATE_ROWS; }

/* Tiles that belong together: with a gate, two. */
int64_t unit_of(const inl_instruction &i) { return i.flags & INL_GATE_MASK ? 2 : 1; }

/* Units of tiles in a chunk. */
int64_t linear_units(const inl_instruction &i) {
    const inl_matrix &m = matrix(i, 1);
    const int64_t units = tiles_of(m) / unit_of(i),
                  blocks = over(i.dims[0], BLOCK_ROWS);
    int64_t size = BLOCK_BYTES / (tile_bytes(m) * unit_of(i));
    const int64_t share = units * blocks / ENOUGH_CHUNKS;
    if (size > share) size = share;
    if (size < 1) size = 1;
    while (over(units, size) * blocks > MOST_CHUNKS) size *= 2;
    return size;
}

int64_t linear_chunks(const inl_instruction &i) {
    const int64_t units = tiles_of(matrix(i, 1)) / unit_of(i);
    return over(units, linear_units(i)) * over(i.dims[0], BLOCK_ROWS);
}

/* Parts that the columns are cut into: few rows would leave a thread without any. */
int64_t encode_parts(const inl_instruction &i) {
    return i.dims[0] <= 4 * MOST_ROWS ? 2 : 1;
}

int64_t encode_chunks(const inl_instruction &i) {
    return encodes_privately(i) ? 0 : over(i.dims[0], MOST_ROWS) * encode_parts(i);
}

Scratch linear_scratch(const inl_instruction &i) {
    const int64_t rows = i.dims[0] * RowShape(matrix(i, 1), i.flags).bytes();
    const int64_t row = aligned(4 * matrix(i, 1).columns);
    return encodes_privately(i) ? Scratch{0, rows + row} : Scratch{rows, row};
}

/* A row as the product takes it: itself, or normalized in ``row``. */
const float *prepare_row(const inl_instruction &i, int64_t at, float *row, bool keep) {
    const int64_t columns = matrix(i, 1).columns;
    const float *x = data<float>(i, 0) + at * i.dims[1];
    if (i.data[4] != nullptr) {
        float *total = keep ? data<float>(i, 6) + at * i.dims[1] : row;
        add_rows(x, data<float>(i, 4) + at * i.dims[1], total, columns);
        x = total;
    }
    if (i.data[5] == nullptr) return x;
    normalize(x, data<float>(i, 5), row, columns, i.reals[0], i.flags & INL_PLUS_ONE);
    return row;
}

/* Encode these columns of some rows; keep: write the rows' sums with delta too. */
void encode_rows(const inl_instruction &i, Span span, Span columns, char *encoded,
                 float *row, bool keep) {
    const inl_matrix &m = matrix(i, 1);
    const RowShape shape(m, i.flags);
    for (int64_t at = span.from; at < span.to; at++) {
        const float *x = prepare_row(i, at, row, keep);
        const RowTile tile = tile_with(at, i.dims[0]);
        const TileView<> view{encoded + tile.start * shape.bytes(), shape, tile.rows};
        encode(x, view, int(at - tile.start), m.zero, columns);
    }
}

void encode_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const int64_t columns = matrix(i, 1).columns, parts = encode_parts(i),
                  part = chunk % parts,
                  width = over(columns, ENCODE_COLUMNS * parts) * ENCODE_COLUMNS;
    encode_rows(i, Span(chunk / parts, MOST_ROWS, i.dims[0]),
                Span(part, width, columns), worker.shared,
                reinterpret_cast<float *>(worker.own), part == 0);
}

/* 16 columns of y from ``tile`` on for the rows of x. */
void put_sums(const inl_instruction &i, int64_t tile, const RowTile &rows,
              const F *sums) {
    const int64_t first = tile * INL_LANES;
    const int n = lanes_left(first, matrix(i, 1).rows);
    const float *bias = data<float>(i, 2);
    const F shift = bias == nullptr ? set(0.0f) : load_first(bias + first, n);
    for (int r = 0; r < rows.rows; r++) {
        float *y = data<float>(i, 3) + (rows.start + r) * i.dims[2] + first;
        store_first(y, bias == nullptr ? sums[r] : add(sums[r], shift), n);
    }
}

void put_gated(const inl_instruction &i, int64_t unit, const RowTile &rows,
               const F *gate, const F *up) {
    const int64_t first = unit * INL_LANES;
    if (first >= i.dims[3]) return;
    const int n = lanes_left(first, i.dims[3]);
    for (int r = 0; r < rows.rows; r++) {
        float *y = data<float>(i, 3) + (rows.start + r) * i.dims[2] + first;
        store_first(y, mul(activated(gate[r], i.flags), up[r]), n);
    }
}

/* Bring the lines that the sums go to: a store that has to wait for its line stops the
 * core once there are many. */
void prefetch_sums(const inl_instruction &i, int64_t unit, const RowTile &rows) {
    for (int r = 0; r < rows.rows; r++)
        __builtin_prefetch(
            data<float>(i, 3) + (rows.start + r) * i.dims[2] + unit * INL_LANES, 1);
}

void multiply_unit(const inl_instruction &i, int64_t unit, const RowTile &rows,
                   const TileView<> &x) {
    const inl_matrix &m = matrix(i, 1);
    const char *weights = static_cast<const char *>(m.data);
    F sums[MOST_ROWS], more[MOST_ROWS];
    prefetch_sums(i, unit, rows);
    if (i.flags & INL_GATE_MASK) {
        multiply_tile(m, weights + 2 * unit * tile_bytes(m), x, sums);
        multiply_tile(m, weights + (2 * unit + 1) * tile_bytes(m), x, more);
        put_gated(i, unit, rows, sums, more);
    } else {
        multiply_tile(m, weights + unit * tile_bytes(m), x, sums);
        put_sums(i, unit, rows, sums);
    }
}

/* Which units and rows a chunk has: those of one block of rows lie together. */
struct LinearChunk {
    Span units, rows;

    LinearChunk(const inl_instruction &i, int64_t chunk)
        : units(chunk % columns(i), linear_units(i),
                tiles_of(matrix(i, 1)) / unit_of(i)),
          rows(chunk / columns(i), BLOCK_ROWS, i.dims[0]) {}

    static int64_t columns(const inl_instruction &i) {
        return over(tiles_of(matrix(i, 1)) / unit_of(i), linear_units(i));
    }
};

void linear_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const RowShape shape(matrix(i, 1), i.flags);
    char *encoded = worker.shared;
    if (encodes_privately(i)) {
        encoded = worker.own;
        char *row = worker.own + i.dims[0] * shape.bytes();
        const Span all(0, shape.columns, shape.columns);
        if (worker.fresh)
            encode_rows(i, Span(0, PRIVATE_ROWS, i.dims[0]), all, encoded,
                        reinterpret_cast<float *>(row), chunk == 0);
    }
    const LinearChunk work(i, chunk);
    for (int64_t row = work.rows.from; row < work.rows.to;) {
        const RowTile rows = tile_with(row, i.dims[0]);
        const TileView<> x{encoded + rows.start * shape.bytes(), shape, rows.rows};
        for (int64_t unit = work.units.from; unit < work.units.to; unit++)
            multiply_unit(i, unit, rows, x);
        row = rows.start + rows.rows;
    }
}
