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

inline const char *key_tile(const Attention &a, int cache, const Queries &q,
                            int64_t head, int64_t key) {
    const int64_t block = a.ints(10, q.row * a.table + key / a.shape.block_size);
    return data<char>(a.i, cache) +
           a.shape.place(block, head, key % a.shape.block_size);
}

/* Next key that begins a tile: blocks may end amid one. */
inline int64_t tile_end(const Attention &a, int64_t key) {
    const int64_t offset = key % a.shape.block_size, block = key - offset;
    const int64_t next = (offset / INL_LANES + 1) * INL_LANES;
    return block + (next < a.shape.block_size ? next : a.shape.block_size);
}

inline int64_t tile_start(const Attention &a, int64_t key) {
    const int64_t offset = key % a.shape.block_size;
    return key - offset % INL_LANES;
}

inline int64_t longest(const Attention &a) {
    return a.table * a.shape.tiles() * INL_LANES;
}

/* Scratch of a thread for 16 queries. */
struct AmxScratch {
    float *query;     /* [padded width], rotated */
    uint32_t *words;  /* [queries][width / 2] pairs of bfloat16 */
    float *scores;    /* [queries][longest] */
    uint16_t *narrow; /* [queries][longest] weights in bfloat16 */

    AmxScratch(const Attention &a, char *own) {
        query = reinterpret_cast<float *>(own);
        words = reinterpret_cast<uint32_t *>(query + a.shape.padded());
        scores = reinterpret_cast<float *>(words + 16 * (a.width / 2));
        narrow = reinterpret_cast<uint16_t *>(scores + 16 * longest(a));
    }
    static int64_t bytes(const Attention &a) {
        return aligned(4 * (a.shape.padded() + 8 * a.width) + 6 * 16 * longest(a));
    }
};

/* Queries as rows of pairs, zeros below the last. */
void tile_words(const Attention &a, const Queries &q, const AmxScratch &s) {
    const int64_t pairs = a.width / 2;
    std::memset(s.words, 0, size_t(16 * pairs) * 4);
    for (int r = 0; r < q.count; r++) {
        prepare_head(
            a, data<float>(a.i, 0) + q.token[r] * a.i.dims[8] + q.head[r] * a.width, 14,
            q.token[r], s.query);
        query_pairs(a, s.query, s.words + r * pairs, 1);
    }
}

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
                    const AmxScratch &s) {
    alignas(64) float scores[256];
    const F scale = set(a.i.reals[0]);
    float *out = s.scores;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), out += 16) {
        const int keys = int(tile_end(a, key) - key);
        score_keys(s.words, a.width, key_tile(a, 3, q, head, key), scores);
        for (int r = 0; r < q.count; r++) {
            const F value = capped(mul(load(scores + 16 * r), scale), a.i.reals[1]);
            store(out + r * longest(a), shown(q, r, key, keys, value));
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
                  const AmxScratch &s, const float *totals, int64_t column) {
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
        mix_values(weights, longest(a), tile, bytes);
    }
    put_values(a, q, totals, column);
}

/* Weights of a query, and their sum with a sink's. */
float weigh_all(const Attention &a, const Queries &q, int r, float *scores,
                int64_t count) {
    float top, total;
    weigh<PAIRS>(scores, int(count), top, total);
    if (const float *sinks = data<float>(a.i, 16)) {
        const float sink = sinks[q.head[r]];
        const float both = sink > top ? sink : top;
        const F factor = exponential(set(top - both));
        for (int64_t at = 0; at < count; at += 16)
            store(scores + at, mul(load(scores + at), factor));
        return total * largest(factor) + std::exp(sink - both);
    }
    return total;
}

void attend_in_tiles(const Attention &a, const Queries &q, int64_t head,
                     const AmxScratch &s) {
    tile_words(a, q, s);
    score_in_tiles(a, q, head, s);
    int64_t count = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key))
        count += 16;
    float totals[16];
    for (int r = 0; r < q.count; r++) {
        float *scores = s.scores + r * longest(a);
        totals[r] = weigh_all(a, q, r, scores, count);
        narrow_weights(scores, int(count), s.narrow + r * longest(a));
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
    const AmxScratch scratch(a, worker.own);
    const int64_t blocks = over(i.dims[0], TOKEN_BLOCK), head = chunk % a.kv_heads;
    const Span tokens(blocks - 1 - chunk / a.kv_heads, TOKEN_BLOCK, i.dims[0]);
    const AttentionSetting setting;
    _tile_loadconfig(&setting);
    zero_padding(a, tokens, head);
    each_queries(a, tokens, head, 16, [&](const Queries &q) {
        attend_in_tiles(a, q, head, scratch);
    });
    _tile_release();
}

Scratch amx_attention_scratch(const inl_instruction &i) {
    if (!attends_in_tiles(i)) return attention_scratch(i);
    return {0, AmxScratch::bytes(Attention(i))};
}

int64_t amx_gather_chunks(const inl_instruction &i) {
    return attends_in_tiles(i) ? 0 : gather_chunks(i);
}
