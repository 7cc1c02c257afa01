/* Queries that attend together, in the form in which they meet keys. */

/* A few queries of one sequence, and the keys that any of them sees. */
struct Queries {
    int limit, count = 0;
    int64_t row = 0, from = 0, to = 0; /* keys */
    int64_t token[16], head[16];
    int64_t first[16], end[16]; /* keys that each sees */

    explicit Queries(int limit) : limit(limit) {}

    /* Add a query; false where it is full or belongs to another sequence. */
    bool join(const Attention &a, int64_t mine, int64_t of_head) {
        const int64_t of_row = a.ints(7, mine), begin = a.first_key(mine);
        if (count == limit || (count && row != of_row)) return false;
        row = of_row;
        token[count] = mine;
        head[count] = of_head;
        first[count] = begin;
        end[count] = a.ints(6, mine) + 1;
        from = count && from < begin ? from : begin;
        to = count && to > end[count] ? to : end[count];
        count++;
        return true;
    }
    float *out(const Attention &a, int index) const {
        return data<float>(a.i, 5) + (token[index] * a.heads + head[index]) * a.width;
    }
};

/* Calls visit(Queries) for all queries of some tokens and one kv head that are no
 * padding, as many of a sequence at once as may be. */
template <class Visit>
void each_queries(const Attention &a, const Span &tokens, int64_t head, int limit,
                  Visit visit) {
    Queries q(limit);
    for (int64_t token = tokens.from; token < tokens.to; token++) {
        if (a.is_padding(token)) continue;
        for (int64_t mine = head * a.group; mine < (head + 1) * a.group; mine++) {
            if (q.join(a, token, mine)) continue;
            visit(q);
            q.count = 0;
            q.join(a, token, mine);
        }
    }
    if (q.count) visit(q);
}

/* Queries as words that are broadcast to 16 keys: word w of query r is words[w * R + r].
 *   FLOATS: float32;
 *   PAIRS:  two of bfloat16 where there is a dot product of them, else float32;
 *   BYTES:  for each 4 numbers their upper bytes, then their lower ones: 15 bits with
 *           one step a query. */
struct QueryWords {
    uint32_t *words;
    float step[ATTENTION_ROWS];
    int32_t upper[ATTENTION_ROWS], lower[ATTENTION_ROWS]; /* 128 times their sums */
};

/* The codes of 15 bits: 127 * 256 + 127 is the largest whose upper byte is at most 127. */
constexpr float MOST_CODE = 32639.0f;

/* Upper bytes of whole numbers; a quarter more, so that lower ones are -128 .. 127. */
inline I upper_bytes(F code) {
    return nearest(fma(code, set(1.0f / 256), set(0.25f / 256)));
}

inline I lower_bytes(F code, I upper) {
    return nearest(fma(to_float(upper), set(-256.0f), code));
}

/* R as it is computed: counts between two sizes meet queries of zeros. */
inline int padded_count(int count) {
    return count > 4 ? ATTENTION_ROWS : count;
}

inline void query_pairs(const Attention &a, const float *query, uint32_t *words,
                        int rows) {
    for (int64_t from = 0; from < a.width; from += 16) {
        uint16_t narrow[16]; /* of a head with room for whole sixteens */
        store_narrow(narrow, load(query + from));
        for (int at = 0; at < lanes_left(from, a.width); at += 2)
            std::memcpy(words + (from + at) / 2 * rows, narrow + at, 4);
    }
}

inline void query_bytes(const Attention &a, const float *query, QueryWords &x, int r,
                        int rows) {
    float most = 0, odd = 0; /* NaN spreads to the step */
    for (int64_t at = 0; at < a.width; at++) {
        most = std::fabs(query[at]) > most ? std::fabs(query[at]) : most;
        odd += query[at] * 0;
    }
    const float factor = most > 0 ? MOST_CODE / most : 0;
    x.step[r] = most / MOST_CODE + odd;
    int32_t uppers = 0, lowers = 0;
    for (int64_t from = 0; from < a.width; from += 16) {
        const int count = lanes_left(from, a.width);
        const F number = between(load(query + from), 0, count, set(0.0f));
        const F code = to_float(nearest(mul(number, set(factor))));
        const I upper = upper_bytes(code), lower = lower_bytes(code, upper);
        int8_t planes[2][16];
        store_bytes(planes[0], upper);
        store_bytes(planes[1], lower);
        uppers += int32_t(sum(to_float(upper)));
        lowers += int32_t(sum(to_float(lower)));
        for (int at = 0; at < count; at += 4)
            for (int plane = 0; plane < 2; plane++)
                std::memcpy(x.words + ((from + at) / 2 + plane) * rows + r,
                            planes[plane] + at, 4);
    }
    x.upper[r] = 128 * uppers;
    x.lower[r] = 128 * lowers;
}

/* Queries normalized, rotated and written as words; query has room for a head. */
void query_words(const Attention &a, const Queries &q, float *query, QueryWords &x) {
    const int rows = padded_count(q.count);
    for (int r = 0; r < rows; r++) {
        if (r < q.count)
            prepare_head(
                a,
                data<float>(a.i, 0) + q.token[r] * a.i.dims[8] + q.head[r] * a.width,
                14, q.token[r], query);
        else
            std::memset(query, 0, size_t(a.width) * 4);
        if (a.shape.kind == BYTES)
            query_bytes(a, query, x, r, rows);
        else if (a.shape.kind == PAIRS && DOTS_OF_PAIRS)
            query_pairs(a, query, x.words + r, rows);
        else
            for (int64_t at = 0; at < a.width; at++)
                std::memcpy(x.words + at * rows + r, query + at, 4);
    }
}
