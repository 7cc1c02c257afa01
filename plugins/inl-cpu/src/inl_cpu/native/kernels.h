/* All kernels for the lanes of one instruction set; included once by each of them.
 *
 * Everything lies in an unnamed namespace, so that the linker cannot take the code of
 * one instruction set for that of another. For that reason no template of the standard
 * library is used here.
 */

#include "kernel_math.h"

#include "kernel_rows.h"

#include "kernel_encode.h"

#include "kernel_tiles.h"

#include "kernel_linear.h"

#include "kernel_cache.h"

#include "kernel_heads.h"

#include "kernel_queries.h"

#include "kernel_scores.h"

#include "kernel_values.h"

#include "kernel_attention.h"

#include "kernel_pack.h"

#include "kernel_sample.h"

constexpr Phase NONE = {nullptr, nullptr};

/* In the order of inl_opcode. */
const Operation OPERATIONS[INL_OPCODES] = {
    {{span_chunks, zero_body}, NONE, nullptr},
    {{row_chunks<1>, copy_body}, NONE, nullptr},
    {{span_chunks, combine_body<Sum>}, NONE, nullptr},
    {{span_chunks, combine_body<Difference>}, NONE, nullptr},
    {{span_chunks, combine_body<Product>}, NONE, nullptr},
    {{span_chunks, scale_body}, NONE, nullptr},
    {{token_chunks, embedding_body}, NONE, nullptr},
    {{row_chunks<2>, rms_norm_body}, NONE, nullptr},
    {{row_chunks<1>, add_norm_body}, NONE, nullptr},
    {{encode_chunks, encode_body}, {linear_chunks, linear_body}, linear_scratch},
    {{row_chunks<1>, gated_body}, NONE, nullptr},
    {{row_chunks<2>, rope_body}, NONE, nullptr},
    {{rope_table_chunks, rope_table_body}, NONE, nullptr},
    {{cache_tokens_chunks, cache_tokens_body},
     {attention_chunks, attention_body},
     attention_scratch,
     {gather_chunks, gather_body}},
    {{row_chunks<2>, write_kv_body}, NONE, nullptr},
    {{block_chunks, read_cache_body}, NONE, nullptr},
    {{block_chunks, fill_cache_body}, NONE, nullptr},
    {{copy_chunks, copy_blocks_body}, NONE, nullptr},
    {{row_chunks<1>, take_body}, NONE, nullptr},
    {{best_chunks, best_body}, {sample_chunks, choose_body}, choose_scratch},
    {{penalize_chunks, penalize_body}, NONE, nullptr},
    {{pack_chunks, pack_body}, NONE, nullptr},
    {{read_chunks, read_body}, {one_chunk, read_total_body}, read_scratch},
};
