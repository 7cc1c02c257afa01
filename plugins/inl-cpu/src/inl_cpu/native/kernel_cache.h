/* Writing and converting paged caches; matrix.h has their layout. */

/* One tile of 16 keys: a head's key and value go to one lane, and come back. */
template <CacheKind KIND>
struct CacheTile;

template <>
struct CacheTile<FLOATS> {
    const int64_t padded;

    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        float *keys = reinterpret_cast<float *>(k_tile) + lane;
        for (int64_t at = 0; at < width; at++) keys[at * INL_LANES] = k[at];
        std::memcpy(reinterpret_cast<float *>(v_tile) + lane * padded, v,
                    size_t(width) * 4);
    }
    float key(const char *tile, int lane, int64_t at) const {
        return reinterpret_cast<const float *>(tile)[at * INL_LANES + lane];
    }
    float value(const char *tile, int lane, int64_t at) const {
        return reinterpret_cast<const float *>(tile)[lane * padded + at];
    }
};

template <>
struct CacheTile<PAIRS> {
    const int64_t padded;

    /* Narrowed 64 at a time, for the compiler to use wide registers. */
    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        uint16_t narrow[64];
        for (int64_t from = 0; from < width; from += 64) {
            const int64_t count = width - from < 64 ? width - from : 64;
            char *keys = k_tile + (from / 2 * INL_LANES + lane) * 4;
            for (int64_t at = 0; at < count; at++) narrow[at] = narrowed(k[from + at]);
            for (int64_t at = 0; at < count; at += 2)
                std::memcpy(keys + at * INL_LANES * 2, narrow + at, 4);
            uint16_t *values =
                reinterpret_cast<uint16_t *>(v_tile) + value_place(lane, from);
            for (int64_t at = 0; at < count; at++) narrow[at] = narrowed(v[from + at]);
            for (int64_t at = 0; at < count; at++) values[2 * at] = narrow[at];
        }
    }
    int64_t value_place(int lane, int64_t at) const {
        return (lane / 2 * padded + at) * 2 + lane % 2;
    }
    float key(const char *tile, int lane, int64_t at) const {
        return widened(reinterpret_cast<const uint16_t *>(
            tile)[(at / 2 * INL_LANES + lane) * 2 + at % 2]);
    }
    float value(const char *tile, int lane, int64_t at) const {
        return widened(reinterpret_cast<const uint16_t *>(tile)[value_place(lane, at)]);
    }
};

template <>
struct CacheTile<BYTES> {
    const int64_t padded;

    float *scales(char *tile) const {
        return reinterpret_cast<float *>(tile + padded * INL_LANES);
    }
    int64_t key_place(int lane, int64_t at) const {
        return (at / 4 * INL_LANES + lane) * 4 + at % 4;
    }
    int64_t value_place(int lane, int64_t at) const {
        return (lane / 4 * padded + at) * 4 + lane % 4;
    }
    void put(char *k_tile, char *v_tile, int lane, int64_t width, const float *k,
             const float *v) const {
        const float k_factor = scaled(k, width, scales(k_tile) + lane);
        const float v_factor = scaled(v, width, scales(v_tile) + lane);
        for (int64_t at = 0; at < width; at++) {
            k_tile[key_place(lane, at)] = code(k[at] * k_factor);
            v_tile[value_place(lane, at)] = code(v[at] * v_factor);
        }
    }
    /* The largest number gets the code 127. NaN spreads to the scale. */
    static float scaled(const float *x, int64_t width, float *scale) {
        float most = 0, odd = 0;
        for (int64_t at = 0; at < width; at++) {
            most = std::fabs(x[at]) > most ? std::fabs(x[at]) : most;
            odd += x[at] * 0;
        }
        *scale = most / 127 + odd;
        return most > 0 ? 127 / most : 0;
    }
    static char code(float x) {
        const float bounded = x > -127 ? (x < 127 ? x : 127) : -127;
        return char(uint8_t(std::nearbyint(bounded) + 128));
    }
    float number(const char *tile, int64_t place, int lane) const {
        const float *scale = scales(const_cast<char *>(tile)) + lane;
        return *scale * float(int(uint8_t(tile[place])) - 128);
    }
    float key(const char *tile, int lane, int64_t at) const {
        return number(tile, key_place(lane, at), lane);
    }
    float value(const char *tile, int lane, int64_t at) const {
        return number(tile, value_place(lane, at), lane);
    }
};

/* One head's key and value into a cell. */
template <CacheKind KIND>
void put_cell(const CacheShape &shape, char *k_cache, char *v_cache, int64_t cell,
              int64_t head, const float *k, const float *v) {
    const int64_t offset = cell % shape.block_size;
    const int64_t place = shape.place(cell / shape.block_size, head, offset);
    const CacheTile<KIND> tile{shape.padded()};
    tile.put(k_cache + place, v_cache + place, int(offset % INL_LANES), shape.width, k,
             v);
}

inline void put_cell(const CacheShape &shape, char *k_cache, char *v_cache,
                     int64_t cell, int64_t head, const float *k, const float *v) {
    switch (shape.kind) {
    case FLOATS: return put_cell<FLOATS>(shape, k_cache, v_cache, cell, head, k, v);
    case PAIRS: return put_cell<PAIRS>(shape, k_cache, v_cache, cell, head, k, v);
    case BYTES: return put_cell<BYTES>(shape, k_cache, v_cache, cell, head, k, v);
    }
}

void write_kv_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t heads = i.dims[1], width = i.dims[2];
    const CacheShape shape{i.dims[3], heads, width, cache_kind(i.flags)};
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
    return {i.dims[1], i.dims[2], i.dims[3], cache_kind(i.flags)};
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

template <CacheKind KIND>
void read_block(const inl_instruction &i, int64_t block) {
    const CacheShape shape = cache_shape(i);
    const CacheTile<KIND> tile{shape.padded()};
    for (int64_t at = 0; at < shape.block_size * shape.kv_heads; at++) {
        const int64_t offset = at / shape.kv_heads;
        const int64_t place = shape.place(block, at % shape.kv_heads, offset);
        const int lane = int(offset % INL_LANES);
        const int64_t row =
            (block * shape.block_size * shape.kv_heads + at) * shape.width;
        for (int64_t d = 0; d < shape.width; d++) {
            data<float>(i, 2)[row + d] = tile.key(data<char>(i, 0) + place, lane, d);
            data<float>(i, 3)[row + d] = tile.value(data<char>(i, 1) + place, lane, d);
        }
    }
}

void read_cache_body(const inl_instruction &i, int64_t block, Worker &) {
    switch (cache_kind(i.flags)) {
    case FLOATS: return read_block<FLOATS>(i, block);
    case PAIRS: return read_block<PAIRS>(i, block);
    case BYTES: return read_block<BYTES>(i, block);
    }
}

int64_t copy_chunks(const inl_instruction &i) { return i.dims[4]; }

void copy_blocks_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t bytes = cache_shape(i).block_bytes();
    const int64_t from = data<int32_t>(i, 2)[chunk], to = data<int32_t>(i, 3)[chunk];
    for (int cache = 0; cache < 2; cache++)
        std::memmove(data<char>(i, cache) + to * bytes,
                     data<char>(i, cache) + from * bytes, size_t(bytes));
}
