/* The C interface of INL's native CPU kernels: plain structs and a few functions.
 *
 * A program is an array of instructions that run in order; inside one, the pool's
 * threads share the work. Tensors are float32, row-major and contiguous in their last
 * axis unless said otherwise; integers are int32, as a Step has them. Strides count
 * elements between rows. A NULL pointer leaves an optional part out.
 *
 * Results have the same bits for any number of threads. Except with INL_ANY_BITS, a
 * row's results also do not depend on which other rows are computed with it.
 */
#ifndef INL_H
#define INL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define INL_EXPORT __declspec(dllexport)
#else
#define INL_EXPORT __attribute__((visibility("default")))
#endif

#define INL_ABI 1
#define INL_DIMS 10
#define INL_DATA 20
#define INL_REALS 4
#define INL_LANES 16 /* rows of a matrix tile, keys of a cache tile */

/* One operation. Its fields are named in the list of opcodes below. */
typedef struct inl_instruction {
    int32_t opcode;
    int32_t flags;
    int64_t dims[INL_DIMS];
    void *data[INL_DATA];
    float reals[INL_REALS];
} inl_instruction;

/* How the numbers of a matrix are held. */
enum inl_format {
    INL_F32 = 0,  /* float32 */
    INL_BF16 = 1, /* bfloat16, the upper half of a float32 */
    INL_U4 = 2,   /* scale * (code - zero) + offset, codes of 4 bits */
    INL_U8 = 3,   /* the same, codes of 8 bits */
    INL_F16 = 4   /* float16: for scales and for sources of INL_PACK */
};

/* Weights [rows, columns] in tiles of 16 rows; rows beyond the last are zeros.
 *
 * A tile is one stream, 64-byte aligned, of
 *   INL_F32  for each column: 16 floats;
 *   INL_BF16 for each pair of columns: 16 x 2 numbers (a last odd one beside zeros);
 *   INL_U8   for each group: for each 4 columns 16 x 4 codes, then scales [16], then
 *            offsets [16] if there are any;
 *   INL_U4   for each group: for each 8 columns 16 x 4 bytes, of which byte j of a row
 *            holds column j in its low half and column 4 + j in its high half; then
 *            scales and offsets as above.
 */
typedef struct inl_matrix {
    int32_t format;
    int32_t group;   /* columns that share a scale: 16 or 32; 0 for plain formats */
    int32_t zero;    /* code that stands for 0 */
    int32_t scale;   /* INL_F16 or INL_F32: of scales and offsets */
    int32_t offsets; /* whether groups have an offset */
    int32_t
        middle; /* a code amid those in use: sums are about it, see kernel_tiles.h */
    int64_t rows;
    int64_t columns; /* a multiple of group */
    void *data;
} inl_matrix;

/* Opcodes: dims (d), data (p), reals (r), flags. "x, y" may be one buffer where every
 * element is read before it is written at the same place (marked "in place"). */
enum inl_opcode {
    /* Zero y. d: 0 count. p: 0 y. */
    INL_ZERO = 0,
    /* y = x over rows. d: 0 rows, 1 width, 2 x stride, 3 y stride. p: 0 x, 1 y. */
    INL_COPY = 1,
    /* y = a + b, a - b, a * b; in place. d: 0 count. p: 0 a, 1 b, 2 y. */
    INL_ADD = 2,
    INL_SUB = 3,
    INL_MUL = 4,
    /* y = r0 * x + r1; in place. d: 0 count. p: 0 x, 1 y. */
    INL_SCALE = 5,
    /* Rows of a matrix, times r0. d: 0 tokens, 1 y stride. p: 0 ids, 1 matrix, 2 y. */
    INL_EMBEDDING = 6,
    /* y = x / sqrt(mean(x^2) + r0) * weight; in place. flags: INL_PLUS_ONE.
     * d: 0 rows, 1 heads in a row, 2 width of a head, 3 x stride, 4 y stride.
     * p: 0 x, 1 weight [width] or NULL, 2 y. */
    INL_RMS_NORM = 7,
    /* sum = residual + delta; y = its norm. sum may be residual or delta.
     * d: 0 rows, 1 width. p: 0 residual, 1 delta, 2 weight, 3 sum, 4 y. r: 0 eps. */
    INL_ADD_NORM = 8,
    /* y [rows, matrix.rows] = x [rows, matrix.columns] times the transpose, plus bias.
     * flags: how to hold x (INL_X_*), INL_GATE_* (the matrix then holds 16 rows of
     * gate, 16 of up in turn, and y has half as many columns; no bias), INL_PLUS_ONE.
     * With a norm weight x is normalized first, after delta is added if there is one;
     * sum then gets x + delta and must be neither x nor delta.
     * d: 0 rows, 1 x stride (of delta and sum too), 2 y stride, 3 columns of y with a
     *    gate. p: 0 x, 1 matrix, 2 bias, 3 y, 4 delta, 5 norm weight, 6 sum.
     * r: 0 eps of the norm. */
    INL_LINEAR = 9,
    /* y = activation(gate) * up; in place. flags: INL_GATE_SILU or INL_GATE_GELU.
     * d: 0 rows, 1 width, 2 gate stride, 3 up stride, 4 y stride.
     * p: 0 gate, 1 up, 2 y. */
    INL_GATED = 10,
    /* Rotate halves; in place. d: 0 tokens, 1 heads, 2 head width, 3 x stride,
     * 4 y stride. p: 0 x, 1 cos [tokens, width / 2], 2 sin, 3 y. */
    INL_ROPE = 11,
    /* cos and sin of position * rate. d: 0 tokens, 1 count, 2 how many of the first have
     * the factor. p: 0 positions, 1 rates float64 [count], 2 cos [tokens, count], 3 sin.
     * r: 0 factor of both. */
    INL_ROPE_TABLE = 12,
    /* Causal attention over the paged cache, after rotating q and k, normalizing their
     * heads and writing k and v, each if given. A token sees keys of its row at
     * positions p - window + 1 .. p; tokens beyond starts[R] and rows of length 0 get
     * zeros. Weights are softmax(cap * tanh(scale * q k / cap)). Positions, rows,
     * starts and lengths are read before the program runs, to share the work out.
     * flags: INL_KV_BF16 or INL_KV_INT8, INL_PLUS_ONE, INL_ANY_BITS, INL_ONE_EACH (no row has two
     * tokens).
     * d: 0 tokens T, 1 heads, 2 kv heads, 3 head width, 4 block size, 5 rows R,
     *    6 blocks in a row's table, 7 window (0 is all), 8 q stride, 9 k and v stride.
     * p: 0 q, 1 k, 2 v, 3 k cache, 4 v cache, 5 y [T, heads * width], 6 positions [T],
     *    7 rows [T], 8 starts [R + 1], 9 lengths [R], 10 blocks [R, B] of the group,
     *    11 writes [T] of the group, 12 cos, 13 sin, 14 q norm, 15 k norm,
     *    16 sinks [heads] or NULL: a logit that takes its share and brings no value.
     * r: 0 scale, 1 cap (0 is none), 2 eps of the norms. */
    INL_ATTENTION = 13,
    /* Put k, v [tokens, kv heads, width] into the cache. flags: INL_KV_*.
     * d: 0 tokens, 1 kv heads, 2 width, 3 block size, 4 k and v stride.
     * p: 0 k, 1 v, 2 k cache, 3 v cache, 4 writes. */
    INL_WRITE_KV = 14,
    /* The cache as plain float32 [blocks, block size, kv heads, width], and back.
     * flags: INL_KV_*. d: 0 blocks, 1 block size, 2 kv heads, 3 width.
     * p: 0 k cache, 1 v cache, 2 plain k, 3 plain v. */
    INL_READ_CACHE = 15,
    INL_FILL_CACHE = 16,
    /* Copy whole blocks inside a cache: block from[i] to to[i]; same dims, 4 count.
     * p: 0 k cache, 1 v cache, 2 from, 3 to. */
    INL_COPY_BLOCKS = 17,
    /* y[i] = x[index[i]]. d: 0 count, 1 width, 2 x stride, 3 rows of x. p: 0 x,
     * 1 index, 2 y. */
    INL_TAKE_ROWS = 18,
    /* One token per sample as ops/sample.py defines it; penalties are applied before.
     * flags: INL_SAMPLE_*. d: 0 samples, 1 vocabulary, 2 logits stride, 3 samples of a
     * row. p: 0 logits, 1 tokens, 2 slots [rows], 3 last [slots], 4 params float32
     * [slots, 7], 5 uniforms [samples]. 2 to 5 may be NULL with INL_SAMPLE_GREEDY. */
    INL_CHOOSE = 19,
    /* Logits in place, for "full": repetition, frequency, presence penalties and bias;
     * counts the fed tokens of decoding rows. d: 0 rows, 1 vocabulary, 2 stride,
     * 3 decoding rows. p: 0 logits, 1 slots, 2 params, 3 counts [slots, V], 4 bias,
     * 5 fed tokens [rows]. */
    INL_PENALIZE = 20,
    /* Rows of a source into rows first.. of a matrix whose data was zeroed.
     * flags: INL_INTERLEAVE: row r goes to first + r / 16 * 32 + r % 16.
     * d: 0 rows, 1 columns, 2 first, 3 kind (inl_kind). p: 0 source, 1 matrix.
     * The matrix must have what inl_packing says of the kind. */
    INL_PACK = 21,
    /* Read count bytes (a multiple of 64) and write a checksum: the speed of memory.
     * d: 0 count. p: 0 x, 1 y uint64 [1]. */
    INL_READ = 22,
    INL_OPCODES = 23
};

enum inl_flag {
    /* How LINEAR holds x. Scales of integers are smaller than what they scale: groups
     * of x below 1e-33 lose digits. */
    INL_X_EXACT = 0, /* x as float32 */
    INL_X_INT8 = 1,  /* quantized weights: x as int8 with a scale for each group, and
                        a second plane for groups with outliers */
    INL_X_INT16 = 2, /* quantized weights: x as two planes of int8, 15 bits */
    INL_X_BF16 = 3,  /* x rounded to bfloat16 */
    INL_X_MASK = 3,
    INL_GATE_SILU = 4,
    INL_GATE_GELU = 8, /* the tanh form */
    INL_GATE_MASK = 12,
    INL_PLUS_ONE = 16, /* norms multiply by 1 + weight */
    INL_KV_BF16 = 32,  /* the cache holds bfloat16, else float32 */
    INL_ONE_EACH = 64, /* attention: no row has two tokens in this step */
    INL_SAMPLE_GREEDY = 0,
    INL_SAMPLE_DRAW = 128,
    INL_SAMPLE_FULL = 256,
    INL_SAMPLE_MASK = 384,
    INL_INTERLEAVE = 512,
    INL_ANY_BITS =
        1024, /* linear, attention: may use AMX, with other bits than one row's */
    INL_KV_INT8 =
        16384 /* the cache holds int8, with a scale for each token and head */
};

/* Sources of INL_PACK: plain numbers, and the packed kinds of GGUF files. */
enum inl_kind {
    INL_KIND_F32 = 0,
    INL_KIND_F16 = 1,
    INL_KIND_BF16 = 2,
    INL_KIND_Q4_0 = 3,
    INL_KIND_Q4_1 = 4,
    INL_KIND_Q5_0 = 5,
    INL_KIND_Q5_1 = 6,
    INL_KIND_Q8_0 = 7,
    INL_KIND_Q2_K = 8,
    INL_KIND_Q3_K = 9,
    INL_KIND_Q4_K = 10,
    INL_KIND_Q5_K = 11,
    INL_KIND_Q6_K = 12,
    INL_KIND_IQ4_NL = 13,
    INL_KIND_IQ4_XS = 14,
    INL_KIND_MXFP4 = 15,
    INL_KINDS = 16
};

enum inl_isa {
    INL_SCALAR = 0,
    INL_AVX2 = 1,
    INL_AVX512 = 2,
    INL_AMX = 3,
    INL_NEON = 4
};

typedef struct inl_pool inl_pool;

/* Names, numbers, sizes and offsets of all of the above, as one JSON object. */
INL_EXPORT const char *inl_describe(void);

/* Whether this machine can run an instruction set, and the best one that it can. */
INL_EXPORT int32_t inl_can_run(int32_t isa);
INL_EXPORT int32_t inl_best_isa(void);

/* Threads that compute; the caller is one of them, so 1 starts none. NULL if the
 * machine cannot run isa or threads is not 1 .. 4096. */
INL_EXPORT inl_pool *inl_open(int32_t threads, int32_t isa);
INL_EXPORT void inl_close(inl_pool *pool);
INL_EXPORT int32_t inl_threads(const inl_pool *pool);
INL_EXPORT int32_t inl_isa(const inl_pool *pool);

/* Run a program; 0, or the number (from 1) of the first instruction that is refused,
 * in which case none has run and inl_refusal says why. Calls from several threads wait
 * for each other. In a forked child, whose pool has lost its threads, the caller
 * computes alone. */
INL_EXPORT int64_t inl_run(inl_pool *pool, const inl_instruction *program,
                           int64_t count);
INL_EXPORT const char *inl_refusal(const inl_pool *pool);

/* Set format, group, zero, scale, offsets and middle to what a kind is packed into.
 * 0, or -1 for a kind that does not exist. */
INL_EXPORT int32_t inl_packing(int32_t kind, inl_matrix *matrix);
/* Bytes of the data of a matrix, of one source row, of one cache (k or v); or -1. */
INL_EXPORT int64_t inl_matrix_bytes(const inl_matrix *matrix);
INL_EXPORT int64_t inl_source_bytes(int32_t kind, int64_t columns);
INL_EXPORT int64_t inl_cache_bytes(int64_t blocks, int64_t block_size, int64_t kv_heads,
                                   int64_t width, int32_t flags);

#ifdef __cplusplus
}
#endif
#endif
