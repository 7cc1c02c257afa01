/* Causal attention over the paged cache, a segment of keys at a time.
 *
 * A chunk has a few tokens and one kv head. In each segment of 256 keys the softmax is
 * the plain one, over exact scores; segments are joined in the order of their keys. So
 * a query's bits do not depend on its neighbors: keys that only they see have the
 * weight 0. Where there are few tokens and long sequences, a chunk has one segment, and
 * a further phase joins them in the same order, with the same bits.
 */

constexpr int64_t FEW_TOKENS = 32; /* segments of so many may be chunks of their own */
constexpr int64_t SPAN_QUERIES = 24; /* of a chunk, where there are many tokens */

/* How the tokens of an instruction are shared out. */
struct Plan {
    const Attention a;
    int64_t span, spans; /* tokens of a chunk */
    int64_t most = 1;    /* segments of a row, where chunks have one of them */

    explicit Plan(const inl_instruction &i) : a(i) {
        const int64_t queries = i.dims[0] >= 64 ? SPAN_QUERIES : ATTENTION_ROWS;
        span = over(queries, a.group);
        spans = over(i.dims[0], span);
        if (i.dims[0] > FEW_TOKENS) return;
        for (int64_t at = 0; at < spans; at++) {
            const int64_t end = segments(at).to;
            if (end > most) most = end;
        }
    }
    Span tokens(int64_t at) const { return Span(at, span, a.i.dims[0]); }
    static int64_t segment_of(const Attention &a, int64_t key) {
        return a.tile_of(key) / SEGMENT_TILES;
    }
    /* That any token of a span sees; the first where all of it is padding. */
    Span segments(int64_t at) const {
        const Span some = tokens(at);
        Span found(0, 1, 1);
        bool any = false;
        for (int64_t token = some.from; token < some.to; token++) {
            if (a.is_padding(token)) continue;
            const int64_t first = segment_of(a, a.first_key(token));
            const int64_t end = segment_of(a, a.ints(6, token)) + 1;
            found.from = any && found.from < first ? found.from : first;
            found.to = any && found.to > end ? found.to : end;
            any = true;
        }
        return found;
    }
    int64_t groups() const { return span * over(a.group, ATTENTION_ROWS); }
    /* Words of a query, of any cache. */
    int64_t words() const { return a.shape.padded(); }
};

/* What a query has found so far: mixed values [padded], the largest score and the sum
 * of the weights, which is 0 while it has seen nothing. */
struct Found {
    float *mixed;
    float top, total;

    void join(const float *more, float more_top, float more_total, int64_t padded) {
        if (more_total == 0) return;
        if (total == 0) {
            if (more != mixed) std::memcpy(mixed, more, size_t(padded) * 4);
            top = more_top, total = more_total;
            return;
        }
        const float both = more_top > top ? more_top : top;
        const F mine = exponential(set(top - both));
        const F other = exponential(set(more_top - both));
        for (int64_t at = 0; at < padded; at += 16)
            store(mixed + at, fma(load(more + at), other, mul(load(mixed + at), mine)));
        total = total * largest(mine) + more_total * largest(other);
        top = both;
    }
    /* A sink takes its share and brings no value. */
    void finish(const Attention &a, int64_t head, float *y) const {
        F factor = set(1.0f);
        float sum = total;
        if (const float *sinks = data<float>(a.i, 16)) {
            const float both = sinks[head] > top ? sinks[head] : top;
            factor = exponential(set(top - both));
            sum = total * largest(factor) + std::exp(sinks[head] - both);
        }
        factor = quotient(factor, set(sum));
        for (int64_t at = 0; at < a.width; at += 16)
            store_first(y + at, mul(load(mixed + at), factor), lanes_left(at, a.width));
    }
};

/* Scratch of a thread. */
struct AttentionScratch {
    float *query, *mixed, *found;
    uint32_t *words;
    Queries *queries;
    QueryWords *written;
    Found *states;
    Weights weights;

    AttentionScratch(const Plan &p, char *own) {
        const int64_t padded = p.a.shape.padded(), rows = p.groups() * ATTENTION_ROWS;
        char *free = own;
        take(free, query, padded);
        take(free, mixed, padded * ATTENTION_ROWS);
        take(free, found, padded * rows);
        take(free, words, p.words() * rows);
        take(free, weights.scores, SEGMENT_KEYS * ATTENTION_ROWS);
        take(free, weights.narrow, SEGMENT_KEYS * ATTENTION_ROWS);
        take(free, queries, p.groups());
        take(free, written, p.groups());
        take(free, states, rows);
        bytes = free - own;
    }
    int64_t bytes;

  private:
    template <class T>
    static void take(char *&free, T *&part, int64_t count) {
        part = reinterpret_cast<T *>(free);
        free += aligned(count * int64_t(sizeof(T)));
    }
};

/* What one segment has found for a query, between two phases. */
struct Partial {
    float *top, *total, *mixed;

    Partial(const Plan &p, char *shared, int64_t token, int64_t head, int64_t segment) {
        const int64_t place = (token * p.a.heads + head) * p.most + segment;
        top = reinterpret_cast<float *>(shared) + place * floats(p);
        total = top + 1;
        mixed = top + 16;
    }
    static int64_t floats(const Plan &p) { return p.a.shape.padded() + 16; }
};

Scratch attention_scratch(const inl_instruction &i) {
    const Plan p(i);
    const int64_t partials = p.most > 1 ? i.dims[0] * p.a.heads * p.most : 0;
    return {4 * partials * Partial::floats(p), AttentionScratch(p, nullptr).bytes};
}

/* The part of a segment that some of the queries see. */
Segment segment_of(const Attention &a, const Queries &q, int64_t head, int64_t number) {
    int64_t from = a.tile_of(q.from), to = a.tile_of(q.to - 1) + 1;
    const int64_t begin = number * SEGMENT_TILES, end = begin + SEGMENT_TILES;
    if (from < begin) from = begin;
    if (to > end) to = end;
    return Segment(a, q.row, head, from, to);
}

/* One kv head of some tokens, ready to meet their keys. */
struct Attending {
    const Plan &p;
    const Attention &a;
    const int64_t head;
    AttentionScratch s;
    int groups = 0;

    Attending(const Plan &p, int64_t head, char *own)
        : p(p), a(p.a), head(head), s(p, own) {}

    void prepare(const Span &tokens) {
        const int64_t each = p.words() * ATTENTION_ROWS;
        each_queries(a, tokens, head, ATTENTION_ROWS, [&](const Queries &q) {
            s.queries[groups] = q;
            s.written[groups].words = s.words + groups * each;
            query_words(a, q, s.query, s.written[groups]);
            for (int r = 0; r < q.count; r++)
                state(groups, r) = {s.found + place(groups, r) * a.shape.padded(), 0, 0};
            groups++;
        });
    }
    int64_t place(int group, int r) const { return group * ATTENTION_ROWS + r; }
    Found &state(int group, int r) { return s.states[place(group, r)]; }

    /* Join what a segment holds for all that see it. */
    void meet(int64_t number) {
        for (int group = 0; group < groups; group++) {
            const Queries &q = s.queries[group];
            const Segment segment = segment_of(a, q, head, number);
            if (segment.tiles < 1) continue;
            const bool first = number == Plan::segment_of(a, q.from);
            Found *found = &state(group, 0);
            float *mixed = first ? found->mixed : s.mixed;
            attend(a, q, segment, s.written[group], s.weights, mixed);
            for (int r = 0; r < q.count; r++, mixed += a.shape.padded())
                found[r].join(mixed, s.weights.top[r], s.weights.total[r],
                              a.shape.padded());
        }
    }
};

void zero_padding(const Attention &a, const Span &tokens, int64_t head) {
    for (int64_t token = tokens.from; token < tokens.to; token++)
        if (a.is_padding(token))
            std::memset(data<float>(a.i, 5) +
                            (token * a.heads + head * a.group) * a.width,
                        0, size_t(a.group * a.width) * 4);
}

/* With INL_ONE_EACH nobody but the token itself sees its key. */
void cache_own(const Attention &a, const Span &tokens, int64_t head, int64_t segment,
               float *key) {
    if (a.i.data[1] == nullptr || !(a.i.flags & INL_ONE_EACH)) return;
    for (int64_t token = tokens.from; token < tokens.to; token++)
        if (segment < 0 || segment == Plan::segment_of(a, a.ints(6, token)))
            cache_token(a, token, head, key);
}

void attend_wholly(const Plan &p, const Span &tokens, int64_t head, Worker &worker) {
    Attending now(p, head, worker.own);
    cache_own(p.a, tokens, head, -1, now.s.query);
    zero_padding(p.a, tokens, head);
    now.prepare(tokens);
    int64_t from = INT64_MAX, to = 0;
    for (int group = 0; group < now.groups; group++) {
        const Queries &q = now.s.queries[group];
        const int64_t first = Plan::segment_of(p.a, q.from),
                      last = Plan::segment_of(p.a, q.to - 1);
        if (first < from) from = first;
        if (last >= to) to = last + 1;
    }
    for (int64_t number = from; number < to; number++) now.meet(number);
    for (int group = 0; group < now.groups; group++) {
        const Queries &q = now.s.queries[group];
        for (int r = 0; r < q.count; r++)
            now.state(group, r).finish(p.a, q.head[r], q.out(p.a, r));
    }
}

void attend_segment(const Plan &p, const Span &tokens, int64_t head, int64_t number,
                    Worker &worker) {
    Attending now(p, head, worker.own);
    cache_own(p.a, tokens, head, number, now.s.query);
    now.prepare(tokens);
    now.meet(number);
    for (int group = 0; group < now.groups; group++) {
        const Queries &q = now.s.queries[group];
        for (int r = 0; r < q.count; r++) {
            const Found &found = now.state(group, r);
            const Partial partial(p, worker.shared, q.token[r], q.head[r], number);
            *partial.top = found.top;
            *partial.total = found.total;
            if (found.total != 0)
                std::memcpy(partial.mixed, found.mixed, size_t(p.a.shape.padded()) * 4);
        }
    }
}

int64_t attention_chunks(const inl_instruction &i) {
    const Plan p(i);
    if (p.most == 1) return p.spans * p.a.kv_heads;
    int64_t segments = 0;
    for (int64_t at = 0; at < p.spans; at++) segments += p.segments(at).count();
    return segments * p.a.kv_heads;
}

void attention_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const Plan p(i);
    const int64_t head = chunk % p.a.kv_heads;
    int64_t number = chunk / p.a.kv_heads;
    /* The last tokens see most: first come those that take longest. */
    if (p.most == 1)
        return attend_wholly(p, p.tokens(p.spans - 1 - number), head, worker);
    int64_t at = p.spans - 1;
    for (; number >= p.segments(at).count(); at--) number -= p.segments(at).count();
    attend_segment(p, p.tokens(at), head, p.segments(at).from + number, worker);
}

/* The third phase: a chunk has the queries of one token and kv head. */
int64_t gather_chunks(const inl_instruction &i) {
    const Plan p(i);
    return p.most == 1 ? 0 : i.dims[0] * p.a.kv_heads;
}

void gather_body(const inl_instruction &i, int64_t chunk, Worker &worker) {
    const Plan p(i);
    const int64_t token = chunk / p.a.kv_heads, head = chunk % p.a.kv_heads;
    zero_padding(p.a, Span(token, 1, i.dims[0]), head);
    if (p.a.is_padding(token)) return;
    const int64_t from = Plan::segment_of(p.a, p.a.first_key(token)),
                  to = Plan::segment_of(p.a, p.a.ints(6, token)) + 1;
    for (int64_t mine = head * p.a.group; mine < (head + 1) * p.a.group; mine++) {
        Found found{reinterpret_cast<float *>(worker.own), 0, 0};
        for (int64_t number = from; number < to; number++) {
            const Partial partial(p, worker.shared, token, mine, number);
            found.join(partial.mixed, *partial.top, *partial.total,
                       p.a.shape.padded());
        }
        found.finish(p.a, mine,
                     data<float>(i, 5) + (token * p.a.heads + mine) * p.a.width);
    }
}
