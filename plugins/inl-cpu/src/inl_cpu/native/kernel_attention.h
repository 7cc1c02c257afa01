/* Causal attention over the paged cache, in two passes over exact scores.
 *
 * A chunk has a few tokens and one kv head. Its queries (tokens times the heads of a
 * group) meet tiles of 16 keys a few rows at a time; their scores stay in scratch, so
 * the softmax is the plain one. A query's bits do not depend on its neighbors: keys that
 * only they see have the weight 0.
 */

/* Tokens of a chunk; fewer where there is little to share out. */
inline int64_t token_span(const inl_instruction &i) { return i.dims[0] >= 64 ? 8 : 1; }

struct Attention {
    const inl_instruction &i;
    int64_t heads, kv_heads, width, rows, table, window, group;
    CacheShape shape;

    explicit Attention(const inl_instruction &i)
        : i(i), heads(i.dims[1]), kv_heads(i.dims[2]), width(i.dims[3]), rows(i.dims[5]),
          table(i.dims[6]), window(i.dims[7]), group(heads / kv_heads),
          shape{i.dims[4], kv_heads, width, (i.flags & INL_KV_BF16) != 0} {}

    int32_t ints(int index, int64_t at) const { return data<int32_t>(i, index)[at]; }
    int64_t longest() const { return table * shape.tiles() * INL_LANES; }
};

/* Scratch of a thread for a number of queries at once. */
struct AttentionScratch {
    float *query;     /* [queries][padded width], rotated */
    uint32_t *words;  /* [queries][width] or, in pairs, half of that */
    float *scores;    /* [queries][longest] */
    uint16_t *narrow; /* [queries][longest] weights in bfloat16 */
    float *key;       /* [padded width] */

    AttentionScratch(const Attention &a, char *own, int64_t queries) {
        const int64_t wide = a.shape.padded() * queries, keys = a.longest() * queries;
        query = reinterpret_cast<float *>(own);
        words = reinterpret_cast<uint32_t *>(query + wide);
        key = reinterpret_cast<float *>(words + wide);
        scores = key + a.shape.padded();
        narrow = reinterpret_cast<uint16_t *>(scores + keys);
    }
    static int64_t bytes(const Attention &a, int64_t queries) {
        const int64_t wide = a.shape.padded() * (2 * queries + 1);
        return aligned(4 * wide + 6 * a.longest() * queries);
    }
};

Scratch attention_scratch(const inl_instruction &i) {
    return {0, AttentionScratch::bytes(Attention(i), ATTENTION_ROWS)};
}

/* A head of q or k, normalized and rotated where that is asked for. */
void prepare_head(const Attention &a, const float *x, int norm, int64_t token, float *y) {
    const inl_instruction &i = a.i;
    if (i.data[norm] != nullptr)
        normalize(x, data<float>(i, norm), y, a.width, i.reals[2], i.flags & INL_PLUS_ONE);
    else
        std::memcpy(y, x, size_t(a.width) * 4);
    const int64_t at = token * (a.width / 2);
    if (i.data[12] != nullptr)
        rotate(y, data<float>(i, 12) + at, data<float>(i, 13) + at, y, a.width);
}

void cache_token(const Attention &a, int64_t token, int64_t head, float *key) {
    const inl_instruction &i = a.i;
    const int64_t at = token * i.dims[9] + head * a.width;
    prepare_head(a, data<float>(i, 1) + at, 15, token, key);
    put_cell(a.shape, data<char>(i, 3), data<char>(i, 4), a.ints(11, token), head, key,
             data<float>(i, 2) + at);
}

int64_t cache_tokens_chunks(const inl_instruction &i) {
    return i.data[1] == nullptr || i.flags & INL_ONE_EACH ? 0 : i.dims[0];
}

void cache_tokens_body(const inl_instruction &i, int64_t token, Worker &worker) {
    const Attention a(i);
    float *key = reinterpret_cast<float *>(worker.own);
    for (int64_t head = 0; head < a.kv_heads; head++) cache_token(a, token, head, key);
}

/* A few queries of one sequence, and the keys that any of them sees. */
struct Queries {
    int limit, count = 0;
    int64_t row = 0, from = 0, to = 0;
    int64_t token[16], head[16];
    int64_t first[16], end[16]; /* keys that each sees */

    explicit Queries(int limit) : limit(limit) {}
};

inline const char *key_tile(const Attention &a, int cache, const Queries &q, int64_t head,
                            int64_t key) {
    const int64_t block = a.ints(10, q.row * a.table + key / a.shape.block_size);
    return data<char>(a.i, cache) + a.shape.place(block, head, key % a.shape.block_size);
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

template <bool NARROW, int R>
inline void score_tile(const char *tile, const uint32_t *words, int64_t stride, F *scores) {
    for (int r = 0; r < R; r++) scores[r] = set(0.0f);
    for (int64_t at = 0; at < stride; at++) {
        if (NARROW) {
            const I pair = load_ints(tile + 64 * at);
            for (int r = 0; r < R; r++)
                scores[r] = dot2(scores[r], pair, words[r * stride + at]);
        } else {
            const F key = load(reinterpret_cast<const float *>(tile + 64 * at));
            for (int r = 0; r < R; r++)
                scores[r] = fma(key, set(float_of(words[r * stride + at])), scores[r]);
        }
    }
}

inline F capped(F x, float cap) {
    if (cap == 0) return x;
    return mul(set(cap), hyperbolic_tangent(quotient(x, set(cap))));
}

/* Scores of the keys, at the place of their tile: tiles of a block that ends amid one
 * are as long as the others here. Hidden keys get the lowest number. */
template <bool NARROW, int R>
void score(const Attention &a, const Queries &q, int64_t head, const AttentionScratch &s) {
    const int64_t stride = NARROW ? a.width / 2 : a.width;
    const F hidden = set(-3.4e38f), scale = set(a.i.reals[0]);
    float *out = s.scores;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key), out += 16) {
        const int64_t end = tile_end(a, key);
        F scores[R];
        score_tile<NARROW, R>(key_tile(a, 3, q, head, key), s.words, stride, scores);
        for (int r = 0; r < R; r++) {
            const int64_t from = q.first[r] - key, to = (q.end[r] < end ? q.end[r] : end) - key;
            const F value = capped(mul(scores[r], scale), a.i.reals[1]);
            store(out + r * a.longest(), between(value, int(from < 0 ? 0 : from < 16 ? from : 16),
                                                 int(to < 0 ? 0 : to), hidden));
        }
    }
}

/* Scores become weights that are not divided by their sum yet, which is returned. */
float weigh(float *scores, int64_t count, const float *sink) {
    F most = set(-3.4e38f);
    for (int64_t at = 0; at < count; at += 16) most = larger(most, load(scores + at));
    float top = largest(most);
    if (sink != nullptr && *sink > top) top = *sink;
    F total = set(0.0f);
    for (int64_t at = 0; at < count; at += 16) {
        const F weight = exponential(sub(load(scores + at), set(top)));
        store(scores + at, weight);
        total = add(total, weight);
    }
    return sum(total) + (sink == nullptr ? 0 : std::exp(*sink - top));
}

void narrow_weights(const float *weights, int64_t count, uint16_t *narrow) {
    for (int64_t at = 0; at < count; at++) narrow[at] = narrowed(weights[at]);
}

/* R queries and D times 16 numbers of the values, over the keys of one tile. */
template <bool NARROW, int R, int D>
inline void mix_tile(const char *tile, int64_t padded, int keys, const float *weights,
                     const uint16_t *narrow, int64_t stride, F (*sums)[D]) {
    if (!NARROW) {
        for (int key = 0; key < keys; key++)
            for (int d = 0; d < D; d++) {
                const F value = load(reinterpret_cast<const float *>(tile) + key * padded + 16 * d);
                for (int r = 0; r < R; r++)
                    sums[r][d] = fma(value, set(weights[r * stride + key]), sums[r][d]);
            }
        return;
    }
    for (int key = 0; key < keys; key += 2)
        for (int d = 0; d < D; d++) {
            I value = load_ints(tile + (key / 2 * padded + 16 * d) * 4);
            /* The last key's partner may hold anything, and 0 times that may be NaN. */
            if (key + 1 == keys) value = both_bits(value, set_int(0xffff));
            for (int r = 0; r < R; r++) {
                uint32_t pair;
                std::memcpy(&pair, narrow + r * stride + key, 4);
                sums[r][d] = dot2(sums[r][d], value, pair);
            }
        }
}

template <bool NARROW, int R, int D>
void mix(const Attention &a, const Queries &q, int64_t head, const AttentionScratch &s,
         const float *totals, int64_t column) {
    F sums[R][D];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) sums[r][d] = set(0.0f);
    int64_t at = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key), at += 16) {
        const int64_t end = tile_end(a, key) < q.to ? tile_end(a, key) : q.to;
        const char *tile = key_tile(a, 4, q, head, key) + column * 4;
        mix_tile<NARROW, R, D>(tile, a.shape.padded(), int(end - key), s.scores + at,
                               s.narrow + at, a.longest(), sums);
    }
    for (int r = 0; r < R; r++) {
        float *y = data<float>(a.i, 5) + (q.token[r] * a.heads + q.head[r]) * a.width;
        for (int d = 0; d < D; d++) {
            const int64_t first = column + 16 * d;
            store_first(y + first, quotient(sums[r][d], set(totals[r])),
                        lanes_left(first, a.width));
        }
    }
}

template <bool NARROW, int R>
void attend(const Attention &a, const Queries &q, int64_t head, const AttentionScratch &s) {
    score<NARROW, R>(a, q, head, s);
    int64_t count = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key)) count += 16;
    float totals[R];
    for (int r = 0; r < R; r++) {
        const float *sinks = data<float>(a.i, 16);
        totals[r] = weigh(s.scores + r * a.longest(), count,
                          sinks == nullptr ? nullptr : sinks + q.head[r]);
        if (NARROW)
            narrow_weights(s.scores + r * a.longest(), count, s.narrow + r * a.longest());
    }
    int64_t column = 0;
    for (; column + 48 < a.shape.padded(); column += 64)
        mix<NARROW, R, 4>(a, q, head, s, totals, column);
    for (; column < a.shape.padded(); column += 16)
        mix<NARROW, R, 1>(a, q, head, s, totals, column);
}

/* Queries as words: float32, or pairs of bfloat16. */
void query_words(const Attention &a, const Queries &q, const AttentionScratch &s) {
    for (int r = 0; r < q.count; r++) {
        float *query = s.query + r * a.shape.padded();
        prepare_head(a, data<float>(a.i, 0) + q.token[r] * a.i.dims[8] + q.head[r] * a.width,
                     14, q.token[r], query);
        if (!a.shape.narrow) {
            std::memcpy(s.words + r * a.width, query, size_t(a.width) * 4);
            continue;
        }
        for (int64_t at = 0; at < a.width / 2; at++)
            s.words[r * (a.width / 2) + at] =
                narrowed(query[2 * at]) | uint32_t(narrowed(query[2 * at + 1])) << 16;
    }
}

template <bool NARROW>
void attend(const Attention &a, const Queries &q, int64_t head, const AttentionScratch &s) {
    query_words(a, q, s);
    if constexpr (ATTENTION_ROWS == 4) {
        if (q.count == 4) return attend<NARROW, 4>(a, q, head, s);
        if (q.count == 3) return attend<NARROW, 3>(a, q, head, s);
    }
    if (q.count == 2) return attend<NARROW, 2>(a, q, head, s);
    attend<NARROW, 1>(a, q, head, s);
}

/* Add a query; false where it is full or belongs to another sequence. */
bool join(const Attention &a, Queries &q, int64_t token, int64_t head) {
    const int64_t row = a.ints(7, token), position = a.ints(6, token);
    if (q.count == q.limit || (q.count && row != q.row)) return false;
    const int64_t first = a.window && position >= a.window ? position - a.window + 1 : 0;
    q.row = row;
    q.token[q.count] = token;
    q.head[q.count] = head;
    q.first[q.count] = first;
    q.end[q.count] = position + 1;
    q.from = q.count && q.from < first ? q.from : first;
    q.to = q.count && q.to > position + 1 ? q.to : position + 1;
    q.count++;
    return true;
}

bool is_padding(const Attention &a, int64_t token) {
    return token >= a.ints(8, a.rows) || a.ints(9, a.ints(7, token)) == 0;
}

using Attend = void (*)(const Attention &, const Queries &, int64_t head,
                        const AttentionScratch &);

/* All queries of some tokens and one kv head, as many at once as may be. */
void attend_tokens(const Attention &a, const Span &tokens, int64_t head,
                   const AttentionScratch &scratch, int limit, Attend attend_some) {
    Queries q(limit);
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        if (a.i.data[1] != nullptr && a.i.flags & INL_ONE_EACH)
            cache_token(a, token, head, scratch.key);
        for (int64_t mine = head * a.group; mine < (head + 1) * a.group; mine++) {
            if (is_padding(a, token)) {
                float *y = data<float>(a.i, 5) + (token * a.heads + mine) * a.width;
                std::memset(y, 0, size_t(a.width) * 4);
            } else if (!join(a, q, token, mine)) {
                attend_some(a, q, head, scratch);
                q.count = 0;
                join(a, q, token, mine);
            }
        }
    }
    if (q.count) attend_some(a, q, head, scratch);
}

void attention_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const Attention a(i);
    const AttentionScratch scratch(a, worker.own, ATTENTION_ROWS);
    const int64_t spans = over(i.dims[0], token_span(i));
    /* The last tokens see most: first come those that take longest. */
    const Span tokens(spans - 1 - chunk / a.kv_heads, token_span(i), i.dims[0]);
    attend_tokens(a, tokens, chunk % a.kv_heads, scratch, ATTENTION_ROWS,
                  a.shape.narrow ? attend<true> : attend<false>);
}

int64_t attention_chunks(const inl_instruction &i) {
    return over(i.dims[0], token_span(i)) * i.dims[2];
}
