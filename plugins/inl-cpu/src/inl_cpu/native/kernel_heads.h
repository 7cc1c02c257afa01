/* What attention works on: its sizes, and heads of q and k. */

struct Attention {
    const inl_instruction &i;
    int64_t heads, kv_heads, width, rows, table, window, group;
    CacheShape shape;

    explicit Attention(const inl_instruction &i)
        : i(i), heads(i.dims[1]), kv_heads(i.dims[2]), width(i.dims[3]),
          rows(i.dims[5]), table(i.dims[6]), window(i.dims[7]), group(heads / kv_heads),
          shape{i.dims[4], kv_heads, width, cache_kind(i.flags)} {}

    int32_t ints(int index, int64_t at) const { return data<int32_t>(i, index)[at]; }
    /* Number of a key's tile among those of its row. */
    int64_t tile_of(int64_t key) const {
        const uint32_t at = uint32_t(key), size = uint32_t(shape.block_size);
        return at / size * shape.tiles() + at % size / INL_LANES;
    }
    /* First key that a token sees. */
    int64_t first_key(int64_t token) const {
        const int64_t position = ints(6, token);
        return window && position >= window ? position - window + 1 : 0;
    }
    bool is_padding(int64_t token) const {
        return token >= ints(8, rows) || ints(9, ints(7, token)) == 0;
    }
};

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

/* Tokens whose keys and values a chunk writes. */
constexpr int64_t CACHED_TOKENS = 8;

int64_t cache_tokens_chunks(const inl_instruction &i) {
    const bool none = i.data[1] == nullptr || i.flags & INL_ONE_EACH;
    return none ? 0 : over(i.dims[0], CACHED_TOKENS);
}

void cache_tokens_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const Attention a(i);
    float *key = reinterpret_cast<float *>(worker.own);
    const Span tokens(chunk, CACHED_TOKENS, i.dims[0]);
    for (int64_t token = tokens.from; token < tokens.to; token++)
        for (int64_t head = 0; head < a.kv_heads; head++)
            cache_token(a, token, head, key);
}
