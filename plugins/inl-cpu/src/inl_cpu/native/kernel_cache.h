/* Writing and converting paged caches; matrix.h has their layout. */

/* One tile of 16 keys: where a number lies. */
template <bool NARROW>
struct CacheTile;

template <>
struct CacheTile<false> {
    static void put_key(char *tile, int64_t, int key, int64_t at, float x) {
        reinterpret_cast<float *>(tile)[at * INL_LANES + key] = x;
    }
    static void put_value(char *tile, int64_t padded, int key, int64_t at, float x) {
        reinterpret_cast<float *>(tile)[key * padded + at] = x;
    }
    static float key(const char *tile, int64_t, int key, int64_t at) {
        return reinterpret_cast<const float *>(tile)[at * INL_LANES + key];
    }
    static float value(const char *tile, int64_t padded, int key, int64_t at) {
        return reinterpret_cast<const float *>(tile)[key * padded + at];
    }
};

template <>
struct CacheTile<true> {
    static int64_t key_place(int key, int64_t at) {
        return (at / 2 * INL_LANES + key) * 2 + at % 2;
    }
    static int64_t value_place(int64_t padded, int key, int64_t at) {
        return (key / 2 * padded + at) * 2 + key % 2;
    }
    static void put_key(char *tile, int64_t, int key, int64_t at, float x) {
        reinterpret_cast<uint16_t *>(tile)[key_place(key, at)] = narrowed(x);
    }
    static void put_value(char *tile, int64_t padded, int key, int64_t at, float x) {
        reinterpret_cast<uint16_t *>(tile)[value_place(padded, key, at)] = narrowed(x);
    }
    static float key(const char *tile, int64_t, int key, int64_t at) {
        return widened(reinterpret_cast<const uint16_t *>(tile)[key_place(key, at)]);
    }
    static float value(const char *tile, int64_t padded, int key, int64_t at) {
        return widened(
            reinterpret_cast<const uint16_t *>(tile)[value_place(padded, key, at)]);
    }
};

/* One head's key and value into a cell. */
template <bool NARROW>
void put_cell(const CacheShape &shape, char *k_cache, char *v_cache, int64_t cell,
              int64_t head, const float *k, const float *v) {
    const int64_t offset = cell % shape.block_size;
    const int64_t place = shape.place(cell / shape.block_size, head, offset);
    const int lane = int(offset % INL_LANES);
    for (int64_t at = 0; at < shape.width; at++) {
        CacheTile<NARROW>::put_key(k_cache + place, shape.padded(), lane, at, k[at]);
        CacheTile<NARROW>::put_value(v_cache + place, shape.padded(), lane, at, v[at]);
    }
}

inline void put_cell(const CacheShape &shape, char *k_cache, char *v_cache,
                     int64_t cell, int64_t head, const float *k, const float *v) {
    if (shape.narrow) return put_cell<true>(shape, k_cache, v_cache, cell, head, k, v);
    put_cell<false>(shape, k_cache, v_cache, cell, head, k, v);
}

void write_kv_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t heads = i.dims[1], width = i.dims[2];
    const CacheShape shape{i.dims[3], heads, width, (i.flags & INL_KV_BF16) != 0};
    const Span rows(chunk, rows_of_chunk(heads * width), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = row * i.dims[4] + head * width;
            put_cell(shape, data<char>(i, 2), data<char>(i, 3),
                     data<int32_t>(i, 4)[row], head, data<float>(i, 0) + at,
                     data<float>(i, 1) + at);
        }
}

CacheShape cache_shape(const inl_instruction &i) {
    return {i.dims[1], i.dims[2], i.dims[3], (i.flags & INL_KV_BF16) != 0};
}

int64_t block_chunks(const inl_instruction &i) { return i.dims[0]; }

void fill_cache_body(const inl_instruction &i, int64_t block, Worker &) {
    const CacheShape shape = cache_shape(i);
    for (int64_t at = 0; at < shape.block_size * shape.kv_heads; at++) {
        const int64_t row = block * shape.block_size * shape.kv_heads + at;
        put_cell(shape, data<char>(i, 0), data<char>(i, 1),
                 block * shape.block_size + at / shape.kv_heads, at % shape.kv_heads,
                 data<float>(i, 2) + row * shape.width,
                 data<float>(i, 3) + row * shape.width);
    }
}

template <bool NARROW>
void read_block(const inl_instruction &i, int64_t block) {
    const CacheShape shape = cache_shape(i);
    for (int64_t at = 0; at < shape.block_size * shape.kv_heads; at++) {
        const int64_t offset = at / shape.kv_heads;
        const int64_t place = shape.place(block, at % shape.kv_heads, offset);
        const int lane = int(offset % INL_LANES);
        const int64_t row =
            (block * shape.block_size * shape.kv_heads + at) * shape.width;
        for (int64_t d = 0; d < shape.width; d++) {
            data<float>(i, 2)[row + d] = CacheTile<NARROW>::key(
                data<char>(i, 0) + place, shape.padded(), lane, d);
            data<float>(i, 3)[row + d] = CacheTile<NARROW>::value(
                data<char>(i, 1) + place, shape.padded(), lane, d);
        }
    }
}

void read_cache_body(const inl_instruction &i, int64_t block, Worker &) {
    i.flags &INL_KV_BF16 ? read_block<true>(i, block) : read_block<false>(i, block);
}

int64_t copy_chunks(const inl_instruction &i) { return i.dims[4]; }

void copy_blocks_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t bytes = cache_shape(i).block_bytes();
    const int64_t from = data<int32_t>(i, 2)[chunk], to = data<int32_t>(i, 3)[chunk];
    for (int cache = 0; cache < 2; cache++)
        std::memmove(data<char>(i, cache) + to * bytes,
                     data<char>(i, cache) + from * bytes, size_t(bytes));
}
