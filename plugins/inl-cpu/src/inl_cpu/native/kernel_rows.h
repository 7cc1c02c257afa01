/* Elementwise operations, copies of rows, norms and rotations. */

/* Numbers of a chunk of an elementwise operation. */
constexpr int64_t SPAN = 8192;

struct Span {
    int64_t from, to;
    Span(int64_t chunk, int64_t size, int64_t count)
        : from(chunk * size), to(from + size < count ? from + size : count) {}
    int64_t count() const { return to - from; }
};

inline int lanes_left(int64_t at, int64_t end) {
    return end - at < 16 ? int(end - at) : 16;
}

int64_t span_chunks(const inl_instruction &i) { return over(i.dims[0], SPAN); }

/* Rows of which a chunk has about SPAN numbers. */
int64_t rows_of_chunk(int64_t width) {
    return width < SPAN ? SPAN / (width ? width : 1) : 1;
}

template <int WIDTHS>
int64_t row_chunks(const inl_instruction &i) {
    int64_t width = 1;
    for (int index = 1; index <= WIDTHS; index++) width *= i.dims[index];
    return over(i.dims[0], rows_of_chunk(width));
}

void zero_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, i.dims[0]);
    std::memset(data<float>(i, 0) + span.from, 0, size_t(span.to - span.from) * 4);
}

template <class Combine>
void elementwise(const inl_instruction &i, int64_t chunk, Combine combine) {
    const Span span(chunk, SPAN, i.dims[0]);
    const float *a = data<float>(i, 0), *b = data<float>(i, 1);
    float *y = data<float>(i, 2);
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        store_first(y + at, combine(load_first(a + at, n), load_first(b + at, n)), n);
    }
}

struct Sum {
    F operator()(F a, F b) const { return add(a, b); }
};
struct Difference {
    F operator()(F a, F b) const { return sub(a, b); }
};
struct Product {
    F operator()(F a, F b) const { return mul(a, b); }
};

template <class Combine>
void combine_body(const inl_instruction &i, int64_t chunk, Worker &) {
    elementwise(i, chunk, Combine());
}

void scale_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const Span span(chunk, SPAN, i.dims[0]);
    const float *x = data<float>(i, 0);
    float *y = data<float>(i, 1);
    const F factor = set(i.reals[0]), shift = set(i.reals[1]);
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        store_first(y + at, add(mul(load_first(x + at, n), factor), shift), n);
    }
}

void copy_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const Span rows(chunk, rows_of_chunk(i.dims[1]), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++)
        std::memmove(data<float>(i, 1) + row * i.dims[3],
                     data<float>(i, 0) + row * i.dims[2], size_t(i.dims[1]) * 4);
}

void take_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const Span rows(chunk, rows_of_chunk(i.dims[1]), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const int64_t from = data<int32_t>(i, 1)[row];
        float *y = data<float>(i, 2) + row * i.dims[1];
        if (from < 0 || from >= i.dims[3])
            std::memset(y, 0, size_t(i.dims[1]) * 4);
        else
            std::memcpy(y, data<float>(i, 0) + from * i.dims[2], size_t(i.dims[1]) * 4);
    }
}

/* In four sums, each of which waits for itself alone. */
float sum_of_squares(const float *x, int64_t width) {
    F sums[4] = {set(0.0f), set(0.0f), set(0.0f), set(0.0f)};
    int64_t at = 0;
    for (; at + 64 <= width; at += 64)
        for (int part = 0; part < 4; part++) {
            const F some = load(x + at + 16 * part);
            sums[part] = fma(some, some, sums[part]);
        }
    for (; at < width; at += 16) {
        const F some = load_first(x + at, lanes_left(at, width));
        sums[0] = fma(some, some, sums[0]);
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

/* 1 / sqrt(mean of squares + eps). */
float norm_factor(const float *x, int64_t width, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
}

/* weight may be NULL. */
void normalize(const float *x, const float *weight, float *y, int64_t width, float eps,
               bool plus_one) {
    const F factor = set(norm_factor(x, width, eps)),
            more = set(plus_one ? 1.0f : 0.0f);
    for (int64_t at = 0; at < width; at += 16) {
        const int n = lanes_left(at, width);
        F value = mul(load_first(x + at, n), factor);
        if (weight != nullptr)
            value = mul(value, add(load_first(weight + at, n), more));
        store_first(y + at, value, n);
    }
}

void add_rows(const float *a, const float *b, float *y, int64_t width) {
    for (int64_t at = 0; at < width; at += 16) {
        const int n = lanes_left(at, width);
        store_first(y + at, add(load_first(a + at, n), load_first(b + at, n)), n);
    }
}

void rms_norm_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t heads = i.dims[1], width = i.dims[2];
    const Span rows(chunk, rows_of_chunk(heads * width), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < heads; head++)
            normalize(data<float>(i, 0) + row * i.dims[3] + head * width,
                      data<float>(i, 1),
                      data<float>(i, 2) + row * i.dims[4] + head * width, width,
                      i.reals[0], i.flags & INL_PLUS_ONE);
}

void add_norm_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t width = i.dims[1];
    const Span rows(chunk, rows_of_chunk(width), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const int64_t at = row * width;
        float *total = data<float>(i, 3) + at;
        add_rows(data<float>(i, 0) + at, data<float>(i, 1) + at, total, width);
        normalize(total, data<float>(i, 2), data<float>(i, 4) + at, width, i.reals[0],
                  i.flags & INL_PLUS_ONE);
    }
}

void gated_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t width = i.dims[1];
    const Span rows(chunk, rows_of_chunk(width), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++) {
        const float *gate = data<float>(i, 0) + row * i.dims[2];
        const float *up = data<float>(i, 1) + row * i.dims[3];
        float *y = data<float>(i, 2) + row * i.dims[4];
        for (int64_t at = 0; at < width; at += 16) {
            const int n = lanes_left(at, width);
            const F value = activated(load_first(gate + at, n), i.flags);
            store_first(y + at, mul(value, load_first(up + at, n)), n);
        }
    }
}

/* One head; y may be x. */
void rotate(const float *x, const float *cos, const float *sin, float *y,
            int64_t width) {
    const int64_t half = width / 2;
    for (int64_t at = 0; at < half; at += 16) {
        const int n = lanes_left(at, half);
        const F a = load_first(x + at, n), b = load_first(x + half + at, n);
        const F c = load_first(cos + at, n), s = load_first(sin + at, n);
        store_first(y + at, sub(mul(a, c), mul(b, s)), n);
        store_first(y + half + at, add(mul(b, c), mul(a, s)), n);
    }
}

void rope_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t heads = i.dims[1], width = i.dims[2];
    const Span rows(chunk, rows_of_chunk(heads * width), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t head = 0; head < heads; head++)
            rotate(data<float>(i, 0) + row * i.dims[3] + head * width,
                   data<float>(i, 1) + row * (width / 2),
                   data<float>(i, 2) + row * (width / 2),
                   data<float>(i, 3) + row * i.dims[4] + head * width, width);
}

void rope_table_body(const inl_instruction &i, int64_t chunk, Worker &) {
    const int64_t count = i.dims[1];
    const Span rows(chunk, over(rows_of_chunk(count), 32), i.dims[0]);
    for (int64_t row = rows.from; row < rows.to; row++)
        for (int64_t at = 0; at < count; at++) {
            const double angle = data<int32_t>(i, 0)[row] * data<double>(i, 1)[at];
            const double length = at < i.dims[2] ? i.reals[0] : 1.0;
            data<float>(i, 2)[row * count + at] = float(std::cos(angle) * length);
            data<float>(i, 3)[row * count + at] = float(std::sin(angle) * length);
        }
}

int64_t rope_table_chunks(const inl_instruction &i) {
    return over(i.dims[0], over(rows_of_chunk(i.dims[1]), 32));
}

/* Words of a chunk of INL_READ. */
constexpr int64_t READ_WORDS = 1 << 17;

int64_t read_chunks(const inl_instruction &i) {
    return over(i.dims[0] / 8, READ_WORDS);
}

Scratch read_scratch(const inl_instruction &i) { return {read_chunks(i) * 8, 0}; }

void read_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const Span words(chunk, READ_WORDS, i.dims[0] / 8);
    const char *x = data<char>(i, 0);
    I total = zeros();
    for (int64_t at = words.from; at < words.to; at += 8)
        total = add(total, load_ints(x + at * 8));
    int32_t lanes[16];
    std::memcpy(lanes, &total, 64);
    uint64_t joined = 0;
    for (int lane = 0; lane < 16; lane++) joined += uint32_t(lanes[lane]);
    reinterpret_cast<uint64_t *>(worker.shared)[chunk] = joined;
}

int64_t one_chunk(const inl_instruction &) { return 1; }

void read_total_body(const inl_instruction &i, int64_t, Worker &worker) {
    uint64_t total = 0;
    for (int64_t chunk = 0; chunk < read_chunks(i); chunk++)
        total += reinterpret_cast<uint64_t *>(worker.shared)[chunk];
    *data<uint64_t>(i, 1) = total;
}
