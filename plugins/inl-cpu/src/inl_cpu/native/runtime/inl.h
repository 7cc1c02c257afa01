/* C interface of INL's native CPU kernels: plain structs and a few functions.
 *
 * A program is an array of instructions that run in order; the threads of a pool divide
 * the work of each. runtime/instructions.h lists the instructions and their operands.
 * Tensors are float32, row-major and contiguous in the last axis unless stated
 * otherwise; integers are int32. Strides count elements from one row to the next. NULL
 * leaves an optional operand out.
 *
 * Results are bitwise equal for any number of threads. Without INL_BATCH_VARIANT, the
 * result of a row is also independent of the other rows in the batch.
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

#define INL_ABI 5
#define INL_DIMS 10
#define INL_DATA 20
#define INL_REALS 4
#define INL_LANES 16 /* rows of a matrix tile, keys of a cache tile */

/* One operation; instructions.h names the elements of its arrays. */
typedef struct inl_instruction {
    int32_t opcode;
    int32_t flags;
    int64_t dims[INL_DIMS];
    void *data[INL_DATA];
    float reals[INL_REALS];
} inl_instruction;

/* Number format of a matrix. The codes of a quantized format are unsigned integers of
 * the bits that its name states; the last ones are indices of a table of signed bytes,
 * to which 128 is added. A number is scale * (code - zero) + offset. */
enum inl_format {
    INL_F32 = 0,  /* float32 */
    INL_BF16 = 1, /* bfloat16 */
    INL_U2 = 2,
    INL_U3 = 3,
    INL_U4 = 4,
    INL_U5 = 5,
    INL_U6 = 6,
    INL_U8 = 7,
    INL_N4 = 8, /* the table of iq4_nl and iq4_xs */
    INL_M4 = 9, /* the table of mxfp4: floats of 4 bits, doubled */
    INL_IQ1 = 10, /* 3 bits: the values of iq1_s and iq1_m, eight times */
    INL_IQ2 = 11, /* 3 bits: the magnitudes of iq2_xxs, iq2_xs and iq2_s, and a sign */
    INL_IQ3_XXS = 12, /* 4 bits: likewise, of iq3_xxs */
    INL_IQ3_S = 13,   /* 4 bits: likewise, of iq3_s, doubled */
    INL_FORMATS = 14
};

/* Scales of a quantized matrix. */
enum inl_scale {
    INL_SCALE_HALF = 0,   /* float16 for each 32 columns */
    INL_SCALE_BYTE = 1,   /* int8 for each group, times a float16 for 256 columns */
    INL_SCALE_NIBBLE = 2, /* 4 bits for each group, times a float16 for 256 columns; the
                           * offset is in the high half of the byte */
    INL_SCALE_EXPONENT = 3, /* a byte e for each 32 columns: the scale is 2^(e - 128) */
    INL_SCALE_SIX = 4, /* 6 bits, minus 32, for each group of 16, times a float16 for 256
                        * columns */
    INL_SCALE_WIDE = 5,   /* float16 for 256 columns */
    INL_SCALE_EIGHTHS = 6 /* int8 for each group, times an eighth of a float16 for 256
                           * columns */
};

/* Weights [rows, columns] in tiles of 16 rows; the last tile is padded with zeros.
 *
 * A tile is stored contiguously, 64-byte aligned:
 *   INL_F32  for each column: 16 floats;
 *   INL_BF16 for each pair of columns: 16 x 2 numbers (an odd last column is paired
 *            with zeros);
 *   others   for each block of columns, which is 256 if a float16 scales 256 columns,
 *            else 32:
 *            the float16 scales [16], then the float16 scales of offsets [16];
 *            for scales of 6 bits: the low 4 bits [8][16], of groups g and g + 8 in a
 *            byte, then the high 2 bits [4][16], of groups g, g + 4, g + 8 and g + 12;
 *            for each run of 32 columns:
 *            the codes, in one or two planes;
 *            for scales of bytes, for each group: 16 bytes of scales; then the same of
 *            offsets, unless they share a byte with the scales.
 *
 * A plane holds b bits of each code: 4 of U4, N4, M4, IQ3_XXS and IQ3_S, 8 of U8, 2 of
 * U2; U3, IQ1 and IQ2 are 2 low bits followed by a plane of 1 high bit, U5 is 4 and 1,
 * U6 is 4 and 2. The codes of 4
 * columns of 16 rows are bytes [16][4]; consecutive such steps are in consecutive bits
 * of one byte: with 4 bits, byte j of a row holds column j in its low half and column 4
 * + j in its high half.
 */
typedef struct inl_matrix {
    int32_t format;
    int32_t group;   /* columns that share a scale: 16 or 32; 0 for plain formats */
    int32_t zero;    /* code that represents 0 */
    int32_t scale;   /* inl_scale */
    int32_t offsets; /* whether groups have an offset */
    int32_t middle;  /* code near the middle of the range: see kernels/tiles.h */
    int64_t rows;
    int64_t columns; /* a multiple of the columns of a block */
    void *data;
} inl_matrix;

/* Source formats of INL_PACK: plain numbers, and the block formats of GGUF files. */
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
    INL_KIND_TQ1_0 = 16,
    INL_KIND_TQ2_0 = 17,
    INL_KIND_IQ1_S = 18, /* this one and all below are packed with a codebook */
    INL_KIND_IQ1_M = 19,
    INL_KIND_IQ2_XXS = 20,
    INL_KIND_IQ2_XS = 21,
    INL_KIND_IQ2_S = 22,
    INL_KIND_IQ3_XXS = 23,
    INL_KIND_IQ3_S = 24,
    INL_KINDS = 25
};

enum inl_isa {
    INL_SCALAR = 0,
    INL_AVX2 = 1,
    INL_AVX512 = 2,
    INL_AMX = 3,
    INL_NEON = 4,
    INL_AVX_VNNI = 5 /* AVX2 with dot products */
};

typedef struct inl_pool inl_pool;

/* Constants, struct sizes and field offsets of this interface as a JSON object. */
INL_EXPORT const char *inl_describe(void);

/* Whether this machine supports an instruction set, and the best that it supports. */
INL_EXPORT int32_t inl_can_run(int32_t isa);
INL_EXPORT int32_t inl_best_isa(void);

/* Open a thread pool. The calling thread counts as one, so 1 starts no thread. Returns
 * NULL if the machine does not support isa or threads is not in 1 .. 4096. */
INL_EXPORT inl_pool *inl_open(int32_t threads, int32_t isa);
INL_EXPORT void inl_close(inl_pool *pool);
INL_EXPORT int32_t inl_threads(const inl_pool *pool);
INL_EXPORT int32_t inl_isa(const inl_pool *pool);

/* Run a program. Returns 0, or the number (from 1) of the first invalid instruction;
 * then no instruction has run and inl_refusal returns the reason, if the same thread
 * calls it next. Concurrent calls are serialized. In a forked child, which has no pool
 * threads, the caller computes alone. */
INL_EXPORT int64_t inl_run(inl_pool *pool, const inl_instruction *program,
                           int64_t count);
INL_EXPORT const char *inl_refusal(const inl_pool *pool);

/* Set format, group, zero, scale, offsets and middle to the packing of a kind. Returns
 * 0, or -1 for an unknown kind. */
INL_EXPORT int32_t inl_packing(int32_t kind, inl_matrix *matrix);
/* Bytes of a matrix's data, of one source row, and of one cache (k or v); -1 if the
 * arguments are invalid. */
INL_EXPORT int64_t inl_matrix_bytes(const inl_matrix *matrix);
INL_EXPORT int64_t inl_source_bytes(int32_t kind, int64_t columns);
INL_EXPORT int64_t inl_cache_bytes(int64_t blocks, int64_t block_size, int64_t kv_heads,
                                   int64_t width, int32_t flags);

#ifdef __cplusplus
}
#endif
#endif
