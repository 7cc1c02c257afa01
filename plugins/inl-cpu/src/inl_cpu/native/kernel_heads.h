/* What attention works on: its sizes, scratch, and heads of q and k. */

struct Attention {
    const inl_instruction &i;
    int64_t heads, kv_heads, width, rows, table, window, group;
    CacheShape shape;

    explicit Attention(const inl_instruction &i)
        : i(i), heads(i.dims[1]), kv_heads(i.dims[2]), width(i.dims[3]),
          rows(i.dims[5]), table(i.dims[6]), window(i.dims[7]), group(heads / kv_heads),
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
void prepare_head(const Attention &a, const float *x, int norm, int64_t token,
                  float *y) {
    const inl_instruction &i = a.i;
    if (i.data[norm] != nullptr)
        normalize(x, data<float>(i, norm), y, a.width, i.reals[2],
                  i.flags & INL_PLUS_ONE);
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
