/* Products of many rows in the tile registers of AMX, in bfloat16.
 *
 * Weights are decoded to bfloat16 once for BLOCK rows of x: 16 rows of 32 columns are
 * one tile register, in the layout of INL_BF16. Two tiles of weights meet two of x.
 */

constexpr int64_t FEWEST_ROWS = 32; /* fewer do not pay for decoding */
constexpr int64_t STEP_COLUMNS = 32;
constexpr int64_t TILE_BLOCK = 512; /* rows of x in a chunk */
constexpr int64_t TILE_BYTES = 1024;

bool uses_tiles(const inl_instruction &i) {
    return i.flags & INL_ANY_BITS && i.dims[0] >= FEWEST_ROWS &&
           (i.flags & INL_X_MASK) != INL_X_EXACT && matrix(i, 1).format != INL_F32;
}

int64_t tile_steps(const inl_matrix &m) { return over(m.columns, STEP_COLUMNS); }

int64_t tile_row_bytes(const inl_matrix &m) { return tile_steps(m) * STEP_COLUMNS * 2; }

struct alignas(64) TileSetting {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileSetting() {
        for (int tile = 0; tile < 8; tile++) {
            row_bytes[tile] = 64;
            rows[tile] = 16;
        }
    }
};

inline void put_pair(F even, F odd, char *place) {
    /* The conversion puts all even numbers before all odd ones. */
    const __m512i places =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(place, _mm512_permutexvar_epi16(places, pairs));
}

/* One group of weights as pairs of bfloat16, 64 bytes a pair of columns. */
template <bool NARROW>
void decode_group(const inl_matrix &m, const char *tile, const Codes &codes,
                  char *place) {
    constexpr int STEP = NARROW ? 8 : 4;
    const char *scales = tile + code_bytes(m);
    const F scale = scale_at(m, scales);
    const F offset = m.offsets ? scale_at(m, offset_at(m, scales)) : set(0.0f);
    for (int64_t step = 0; step < m.group / STEP; step++) {
        const I w = load_ints(tile + 64 * step);
        for (int k = 0; k < STEP; k += 2, place += 64) {
            F pair[2];
            for (int half = 0; half < 2; half++) {
                const int at = k + half,
                          shift = NARROW ? at % 4 * 8 + at / 4 * 4 : at * 8;
                const F code = NARROW ? codes.nibble(w, shift) : codes.byte(w, shift);
                pair[half] = fma(code, scale, offset);
            }
            put_pair(pair[0], pair[1], place);
        }
    }
}

/* A tile of weights as steps of TILE_BYTES; columns beyond the last are zeros. */
void decode_tile(const inl_matrix &m, const char *tile, char *place) {
    const int64_t bytes = tile_steps(m) * TILE_BYTES;
    if (m.format == INL_BF16) {
        std::memcpy(place, tile, size_t(tile_bytes(m)));
        std::memset(place + tile_bytes(m), 0, size_t(bytes - tile_bytes(m)));
        return;
    }
    const Codes codes(m.zero);
    const int64_t stride = m.group * INL_LANES * 2;
    for (int64_t group = 0; group < groups_of(m); group++, tile += group_bytes(m)) {
        if (m.format == INL_U4)
            decode_group<true>(m, tile, codes, place + group * stride);
        else
            decode_group<false>(m, tile, codes, place + group * stride);
    }
    const int64_t done = groups_of(m) * stride;
    std::memset(place + done, 0, size_t(bytes - done));
}

void encode_wide(const float *x, int64_t columns, char *place, int64_t bytes) {
    for (int64_t at = 0; at < bytes / 2; at += 16) {
        const int n = at < columns ? lanes_left(at, columns) : 0;
        const __m256i narrow =
            (__m256i)_mm512_cvtneps_pbh(load_first(x + (n ? at : 0), n));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(place + 2 * at), narrow);
    }
}

int64_t padded_rows(const inl_instruction &i) { return over(i.dims[0], 32) * 32; }

int64_t amx_encode_chunks(const inl_instruction &i) {
    return uses_tiles(i) ? padded_rows(i) / 16 : encode_chunks(i);
}

void amx_encode_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    if (!uses_tiles(i)) return encode_body(i, chunk, worker);
    const inl_matrix &m = matrix(i, 1);
    const int64_t bytes = tile_row_bytes(m);
    for (int64_t at = chunk * 16; at < chunk * 16 + 16; at++) {
        char *place = worker.shared + at * bytes;
        if (at >= i.dims[0]) {
            std::memset(place, 0, size_t(bytes));
            continue;
        }
        float *row = reinterpret_cast<float *>(worker.own);
        encode_wide(prepare_row(i, at, row, true), m.columns, place, bytes);
    }
}

int64_t pairs_of(const inl_instruction &i) { return over(tiles_of(matrix(i, 1)), 2); }

int64_t amx_linear_chunks(const inl_instruction &i) {
    if (!uses_tiles(i)) return linear_chunks(i);
    return pairs_of(i) * over(i.dims[0], TILE_BLOCK);
}

/* 32 rows of x times a pair of decoded tiles: four tiles of sums [16][16]. */
void multiply_tiles(const char *x, int64_t x_bytes, const char *weights, int64_t steps,
                    float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char *more = weights + steps * TILE_BYTES;
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(4, x + 64 * step, x_bytes);
        _tile_loadd(6, weights + TILE_BYTES * step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, more + TILE_BYTES * step, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 16 * x_bytes + 64 * step, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* Sums of 16 rows and a pair of tiles to y. */
void put_pair_of_tiles(const inl_instruction &i, int64_t pair, int64_t row,
                       const float *sums) {
    const int64_t left = i.dims[0] - row;
    if (left <= 0) return;
    const RowTile rows{row, left < 16 ? int(left) : 16};
    F first[16], second[16];
    for (int r = 0; r < 16; r++) {
        first[r] = load(sums + 16 * r);
        second[r] = load(sums + 256 + 16 * r);
    }
    if (i.flags & INL_GATE_MASK) return put_gated(i, pair, rows, first, second);
    put_sums(i, 2 * pair, rows, first);
    if (2 * pair + 1 < tiles_of(matrix(i, 1))) put_sums(i, 2 * pair + 1, rows, second);
}

void amx_linear_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    if (!uses_tiles(i)) return linear_body(i, chunk, worker);
    const inl_matrix &m = matrix(i, 1);
    const int64_t pair = chunk % pairs_of(i), steps = tile_steps(m);
    const int64_t x_bytes = tile_row_bytes(m);
    float *sums = reinterpret_cast<float *>(worker.own);
    char *weights = worker.own + 4 * TILE_BYTES;
    for (int64_t tile = 2 * pair; tile < 2 * pair + 2 && tile < tiles_of(m); tile++)
        decode_tile(m, static_cast<const char *>(m.data) + tile * tile_bytes(m),
                    weights + tile % 2 * steps * TILE_BYTES);
    const TileSetting setting;
    _tile_loadconfig(&setting);
    const Span rows(chunk / pairs_of(i), TILE_BLOCK, i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row += 32) {
        multiply_tiles(worker.shared + row * x_bytes, x_bytes, weights, steps, sums);
        put_pair_of_tiles(i, pair, row, sums);
        put_pair_of_tiles(i, pair, row + 16, sums + 512);
    }
    _tile_release();
}

Scratch amx_linear_scratch(const inl_instruction &i) {
    if (!uses_tiles(i)) return linear_scratch(i);
    const inl_matrix &m = matrix(i, 1);
    const int64_t weights = (4 + 2 * tile_steps(m)) * TILE_BYTES;
    const int64_t row = aligned(4 * m.columns);
    return {padded_rows(i) * tile_row_bytes(m), weights > row ? weights : row};
}
