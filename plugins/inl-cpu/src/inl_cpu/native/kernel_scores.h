/* Scores of a few queries, their weights, and the values that these mix. */

/* A few queries of one sequence, and the keys that any of them sees. */
struct Queries {
    int limit, count = 0;
    int64_t row = 0, from = 0, to = 0;
    int64_t token[16], head[16];
    int64_t first[16], end[16]; /* keys that each sees */

    explicit Queries(int limit) : limit(limit) {}
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

template <bool NARROW, int R>
inline void score_tile(const char *tile, const uint32_t *words, int64_t stride,
                       F *scores) {
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
void score(const Attention &a, const Queries &q, int64_t head,
           const AttentionScratch &s) {
    const int64_t stride = NARROW ? a.width / 2 : a.width;
    const F hidden = set(-3.4e38f), scale = set(a.i.reals[0]);
    float *out = s.scores;
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), out += 16) {
        const int64_t end = tile_end(a, key);
        F scores[R];
        score_tile<NARROW, R>(key_tile(a, 3, q, head, key), s.words, stride, scores);
        for (int r = 0; r < R; r++) {
            const int64_t from = q.first[r] - key,
                          to = (q.end[r] < end ? q.end[r] : end) - key;
            const F value = capped(mul(scores[r], scale), a.i.reals[1]);
            store(out + r * a.longest(), between(value,
                                                 int(from < 0    ? 0
                                                     : from < 16 ? from
                                                                 : 16),
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
                const F value =
                    load(reinterpret_cast<const float *>(tile) + key * padded + 16 * d);
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
    for (int64_t key = tile_start(a, q.from); key < q.to;
         key = tile_end(a, key), at += 16) {
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
void attend(const Attention &a, const Queries &q, int64_t head,
            const AttentionScratch &s) {
    score<NARROW, R>(a, q, head, s);
    int64_t count = 0;
    for (int64_t key = tile_start(a, q.from); key < q.to; key = tile_end(a, key))
        count += 16;
    float totals[R];
    for (int r = 0; r < R; r++) {
        const float *sinks = data<float>(a.i, 16);
        totals[r] = weigh(s.scores + r * a.longest(), count,
                          sinks == nullptr ? nullptr : sinks + q.head[r]);
        if (NARROW)
            narrow_weights(s.scores + r * a.longest(), count,
                           s.narrow + r * a.longest());
    }
    int64_t column = 0;
    for (; column + 48 < a.shape.padded(); column += 64)
        mix<NARROW, R, 4>(a, q, head, s, totals, column);
    for (; column < a.shape.padded(); column += 16)
        mix<NARROW, R, 1>(a, q, head, s, totals, column);
}
