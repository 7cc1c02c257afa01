/* Choosing tokens: ops/sample.py says what each sampler means. */

constexpr int64_t SEGMENT = 8192;
constexpr int64_t PARAMETERS =
    7; /* temperature, top-k, top-p, min-p, three penalties */

struct Best {
    float value;
    int32_t id;
};

int64_t segments(const inl_instruction &i) { return over(i.dims[1], SEGMENT); }

int64_t best_chunks(const inl_instruction &i) { return i.dims[0] * segments(i); }

/* The highest of a segment, ties to the lowest id. */
Best best_of(const float *logits, const Span &span) {
    F most = set(-INFINITY);
    for (int64_t at = span.from; at < span.to; at += 16) {
        const int n = lanes_left(at, span.to);
        most = larger(most, between(load_first(logits + at, n), 0, n, set(-INFINITY)));
    }
    const float value = largest(most);
    for (int64_t at = span.from; at < span.to; at++)
        if (logits[at] == value) return {value, int32_t(at)};
    return {-INFINITY, int32_t(span.from)};
}

void best_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const float *logits = data<float>(i, 0) + chunk / segments(i) * i.dims[2];
    const Span span(chunk % segments(i), SEGMENT, i.dims[1]);
    reinterpret_cast<Best *>(worker.shared)[chunk] = best_of(logits, span);
}

Best best_of_segments(const inl_instruction &i, int64_t sample, const Worker &worker) {
    const Best *found =
        reinterpret_cast<const Best *>(worker.shared) + sample * segments(i);
    Best best = found[0];
    for (int64_t at = 1; at < segments(i); at++)
        if (found[at].value > best.value) best = found[at];
    return best;
}

Scratch choose_scratch(const inl_instruction &i) {
    const int64_t wide = aligned(4 * over(i.dims[1], 16) * 16);
    const bool draws = i.flags & INL_SAMPLE_MASK;
    return {int64_t(sizeof(Best)) * best_chunks(i),
            draws ? 2 * wide + filter_bytes(i.dims[1]) : 0};
}

/* scaled = (logits - top) / temperature and its exponential. */
void scale_logits(const float *logits, int64_t count, float top, float temperature,
                  float *scaled, float *mass) {
    for (int64_t at = 0; at < count; at += 16) {
        const int n = lanes_left(at, count);
        const F value =
            quotient(sub(load_first(logits + at, n), set(top)), set(temperature));
        store(scaled + at, value);
        store(mass + at, between(exponential(value), 0, n, set(0.0f)));
    }
}

/* The first id whose cumulative mass exceeds a share of all. */
int32_t drawn(const float *mass, int64_t count, float share) {
    double total = 0;
    for (int64_t at = 0; at < count; at += 16) total += double(sum(load(mass + at)));
    const double wanted = double(share) * total;
    double before = 0;
    int64_t at = 0;
    for (; at + 16 < count; at += 16) {
        const double next = before + double(sum(load(mass + at)));
        if (next > wanted) break;
        before = next;
    }
    for (; at < count; at++) {
        before += double(mass[at]);
        if (before > wanted) return int32_t(at);
    }
    /* One by one they may add up to less: the last of those that may be drawn. */
    for (at = count - 1; at > 0 && !(mass[at] > 0);) at--;
    return int32_t(at);
}

int32_t sampled(const inl_instruction &i, int64_t sample, Best best, Worker &worker) {
    const int64_t slot = data<int32_t>(i, 2)[sample / i.dims[3]], count = i.dims[1];
    const float *parameter = data<float>(i, 4) + slot * PARAMETERS;
    if (!(parameter[0] > 0)) return best.id;
    float *scaled = reinterpret_cast<float *>(worker.own);
    float *mass = scaled + over(count, 16) * 16;
    char *rest = worker.own + 2 * aligned(4 * over(count, 16) * 16);
    scale_logits(data<float>(i, 0) + sample * i.dims[2], count, best.value,
                 parameter[0], scaled, mass);
    if (i.flags & INL_SAMPLE_FULL)
        keep_likeliest(scaled, mass, count, {parameter[1], parameter[2], parameter[3]},
                       rest);
    return drawn(mass, count, data<float>(i, 5)[sample]);
}

/* Whether no later row has this row's slot: padding rows all have the slot 0. */
bool is_last_of_slot(const inl_instruction &i, int64_t row) {
    const int32_t *slots = data<int32_t>(i, 2);
    for (int64_t later = row + 1; later < i.dims[0] / i.dims[3]; later++)
        if (slots[later] == slots[row]) return false;
    return true;
}

int64_t sample_chunks(const inl_instruction &i) { return i.dims[0]; }

void choose_body(const inl_instruction &i, int64_t sample, Worker &worker) {
    const Best best = best_of_segments(i, sample, worker);
    const bool draws = i.flags & INL_SAMPLE_MASK;
    const int32_t token = draws ? sampled(i, sample, best, worker) : best.id;
    data<int32_t>(i, 1)[sample] = token;
    const int64_t row = sample / i.dims[3];
    if (i.data[3] == nullptr || sample % i.dims[3] != i.dims[3] - 1) return;
    if (is_last_of_slot(i, row)) data<int32_t>(i, 3)[data<int32_t>(i, 2)[row]] = token;
}

int64_t penalize_chunks(const inl_instruction &i) { return i.dims[0]; }

void penalize_body(const inl_instruction &i, int64_t row, Worker &) {
    const int64_t slot = data<int32_t>(i, 1)[row], vocabulary = i.dims[1];
    const float *parameter = data<float>(i, 2) + slot * PARAMETERS;
    const float repetition = parameter[4], presence = parameter[5],
                frequency = parameter[6];
    int32_t *counts = data<int32_t>(i, 3) + slot * vocabulary;
    const float *bias = data<float>(i, 4) + slot * vocabulary;
    float *logits = data<float>(i, 0) + row * i.dims[2];
    const int32_t fed = data<int32_t>(i, 5)[row];
    if (row < i.dims[3] && fed >= 0 && fed < vocabulary) counts[fed] += 2;
    for (int64_t t = 0; t < vocabulary; t++) {
        const float factor = counts[t] > 0 && repetition > 0 ? repetition : 1.0f;
        const float answered = float(counts[t] >> 1);
        const float logit = logits[t] > 0 ? logits[t] / factor : logits[t] * factor;
        logits[t] =
            logit - frequency * answered - (answered > 0 ? presence : 0.0f) + bias[t];
    }
}
