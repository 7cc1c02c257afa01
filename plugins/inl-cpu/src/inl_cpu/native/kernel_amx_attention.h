/* Attention of many tokens in AMX tiles: 16 queries meet 16 keys.
 *
 * A cache tile of keys is a tile of weights as it lies; of values, whose pairs are
 * eight, half of one. Otherwise this is kernel_attention.h.
 */

constexpr int64_t TOKEN_BLOCK = 16;

bool attends_in_tiles(const inl_instruction &i) {
    return i.flags & INL_ANY_BITS && i.flags & INL_KV_BF16 &&
           i.dims[0] >= FEWEST_ROWS && i.dims[3] % 64 == 0;
}

/* Tiles 0 to 3 hold sums, 4 weights of 16 keys, 5 their values, 6 queries, 7 keys. */
struct AttentionSetting : TileSetting {
    AttentionSetting() {
        row_bytes[4] = 32;
        rows[5] = 8;
    }
};

/* Scores of 16 queries and the keys of one tile. */
inline void score_keys(const uint32_t *words, int64_t width, const char *keys,
                       float *scores) {
    _tile_zero(0);
    for (int64_t step = 0; step < width / STEP_COLUMNS; step++) {
        _tile_loadd(6, words + step * 16, width * 2);
        _tile_loadd(7, keys + step * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, scores, 64);
}

void score_in_tiles(const Attention &a, const Queries &q, int64_t head,
                    const AttentionScratch &s) {
    alignas(64) float scores[256];
    const F hidden = set(-3.4e38f), scale = set(a.i.reals[0]);
    float *out = s.scores;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), out += 16) {
        const int64_t end = tile_end(a, key);
        score_keys(s.words, a.width, key_tile(a, 3, q, head, key), scores);
        for (int r = 0; r < q.count; r++) {
            const int64_t from = q.first[r] - key,
                          to = (q.end[r] < end ? q.end[r] : end) - key;
            const F value = capped(mul(load(scores + 16 * r), scale), a.i.reals[1]);
            store(out + r * a.longest(), between(value,
                                                 int(from < 0    ? 0
                                                     : from < 16 ? from
                                                                 : 16),
                                                 int(to < 0 ? 0 : to), hidden));
        }
    }
}

/* 64 columns of a tile of values, with zeros for keys that nobody wrote. */
void clean_values(const char *tile, int64_t padded, int keys, uint32_t *clean) {
    for (int pair = 0; pair < 8; pair++) {
        const int left = keys - 2 * pair;
        const I kept = set_int(left >= 2 ? -1 : left == 1 ? 0xffff : 0);
        for (int d = 0; d < 4; d++) {
            const I value =
                both_bits(load_ints(tile + (pair * padded + 16 * d) * 4), kept);
            _mm512_storeu_si512(clean + pair * 64 + 16 * d, value);
        }
    }
}

/* Adds the weights [16][16] times 64 columns of values to tiles 0 to 3. */
inline void mix_values(const uint16_t *weights, int64_t stride, const char *values,
                       int64_t value_bytes) {
    _tile_loadd(4, weights, stride * 2);
    _tile_loadd(5, values, value_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, values + 64, value_bytes);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(5, values + 128, value_bytes);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(5, values + 192, value_bytes);
    _tile_dpbf16ps(3, 4, 5);
}

void put_values(const Attention &a, const Queries &q, const float *totals,
                int64_t column) {
    alignas(64) float sums[4][256];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int r = 0; r < q.count; r++) {
        float *y = data<float>(a.i, 5) + (q.token[r] * a.heads + q.head[r]) * a.width;
        for (int d = 0; d < 4; d++)
            store(y + column + 16 * d,
                  quotient(load(sums[d] + 16 * r), set(totals[r])));
    }
}

void mix_in_tiles(const Attention &a, const Queries &q, int64_t head,
                  const AttentionScratch &s, const float *totals, int64_t column) {
    alignas(64) uint32_t clean[512];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t *weights = s.narrow;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), weights += 16) {
        const int64_t end = tile_end(a, key) < q.to ? tile_end(a, key) : q.to;
        const char *tile = key_tile(a, 4, q, head, key) + column * 4;
        int64_t bytes = a.shape.padded() * 4;
        if (end - key < 16) {
            clean_values(tile, a.shape.padded(), int(end - key), clean);
            tile = reinterpret_cast<const char *>(clean);
            bytes = 256;
        }
        mix_values(weights, a.longest(), tile, bytes);
    }
    put_values(a, q, totals, column);
}

void attend_in_tiles(const Attention &a, const Queries &q, int64_t head,
                     const AttentionScratch &s) {
    query_words(a, q, s);
    std::memset(s.words + q.count * (a.width / 2), 0,
                size_t(16 - q.count) * a.width * 2);
    score_in_tiles(a, q, head, s);
    int64_t count = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key))
        count += 16;
    float totals[16];
    for (int r = 0; r < q.count; r++) {
        const float *sinks = data<float>(a.i, 16);
        float *scores = s.scores + r * a.longest();
        totals[r] =
            weigh(scores, count, sinks == nullptr ? nullptr : sinks + q.head[r]);
        narrow_weights(scores, count, s.narrow + r * a.longest());
    }
    for (int64_t column = 0; column < a.width; column += 64)
        mix_in_tiles(a, q, head, s, totals, column);
}

int64_t amx_attention_chunks(const inl_instruction &i) {
    if (!attends_in_tiles(i)) return attention_chunks(i);
    return over(i.dims[0], TOKEN_BLOCK) * i.dims[2];
}

void amx_attention_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    if (!attends_in_tiles(i)) return attention_body(i, chunk, worker);
    const Attention a(i);
    const AttentionScratch scratch(a, worker.own, 16);
    const int64_t blocks = over(i.dims[0], TOKEN_BLOCK);
    const Span tokens(blocks - 1 - chunk / a.kv_heads, TOKEN_BLOCK, i.dims[0]);
    const AttentionSetting setting;
    _tile_loadconfig(&setting);
    attend_tokens(a, tokens, chunk % a.kv_heads, scratch, 16, attend_in_tiles);
    _tile_release();
}

Scratch amx_attention_scratch(const inl_instruction &i) {
    if (!attends_in_tiles(i)) return attention_scratch(i);
    return {0, AttentionScratch::bytes(Attention(i), 16)};
}
