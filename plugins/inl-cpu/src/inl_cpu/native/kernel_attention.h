/* Causal attention over the paged cache, in two passes over exact scores.
 *
 * A chunk has a few tokens and one kv head. Its queries (tokens times the heads of a
 * group) meet tiles of 16 keys a few rows at a time; their scores stay in scratch, so
 * the softmax is the plain one. A query's bits do not depend on its neighbors: keys
 * that only they see have the weight 0.
 */

/* Tokens of a chunk; fewer where there is little to share out. */
inline int64_t token_span(const inl_instruction &i) { return i.dims[0] >= 64 ? 8 : 1; }

/* Queries as words: float32, or pairs of bfloat16. */
void query_words(const Attention &a, const Queries &q, const AttentionScratch &s) {
    for (int r = 0; r < q.count; r++) {
        float *query = s.query + r * a.shape.padded();
        prepare_head(
            a, data<float>(a.i, 0) + q.token[r] * a.i.dims[8] + q.head[r] * a.width, 14,
            q.token[r], query);
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
void attend(const Attention &a, const Queries &q, int64_t head,
            const AttentionScratch &s) {
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
    const int64_t first =
        a.window && position >= a.window ? position - a.window + 1 : 0;
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
