/* Dispatch table of one instruction set: the kernels of every opcode.
 *
 * Included once for each instruction set. Everything is in an unnamed namespace, so
 * that the linker cannot merge the code of one instruction set with that of another.
 * For the same reason no template of the standard library is used in the kernels.
 */
#pragma once

#include "kernels/attention.h"
#include "kernels/cache.h"
#include "kernels/checksum.h"
#include "kernels/experts.h"
#include "kernels/full_attention.h"
#include "kernels/heads.h"
#include "kernels/linear.h"
#include "kernels/lora.h"
#include "kernels/norm_rope.h"
#include "kernels/pack.h"
#include "kernels/phase.h"
#include "kernels/recurrent.h"
#include "kernels/route.h"
#include "kernels/rows.h"
#include "kernels/sample.h"
#include "kernels/span.h"
#include "kernels/token_scores.h"
#include "runtime/instructions.h"
#include "runtime/operation.h"

namespace inl {
namespace {

struct Table {
    Operation operations[INL_OPCODES];

    constexpr Table() : operations{} {
        Operation *ops = operations;
        ops[INL_ZERO] = {phase<span_chunks<args::Zero>, zero_body>()};
        ops[INL_COPY] = {phase<row_chunks<args::Copy>, copy_body>()};
        ops[INL_ADD] = {phase<span_chunks<args::Add>, combine_body<args::Add, Sum>>()};
        ops[INL_SUB] = {
            phase<span_chunks<args::Sub>, combine_body<args::Sub, Difference>>()};
        ops[INL_MUL] = {
            phase<span_chunks<args::Mul>, combine_body<args::Mul, Product>>()};
        ops[INL_SCALE] = {phase<span_chunks<args::Scale>, scale_body>()};
        ops[INL_EMBEDDING] = {phase<embedding_chunks, embedding_body>()};
        ops[INL_RMS_NORM] = {phase<head_chunks<args::RmsNorm>, rms_norm_body>()};
        ops[INL_ADD_NORM] = {phase<row_chunks<args::AddNorm>, add_norm_body>()};
        ops[INL_LINEAR] = {phase<encode_chunks, encode_body>(),
                           phase<linear_chunks, linear_body>(),
                           scratch<linear_scratch>()};
        ops[INL_GATED] = {phase<row_chunks<args::Gated>, gated_body>()};
        ops[INL_ROPE] = {phase<head_chunks<args::Rope>, rope_body>()};
        ops[INL_ROPE_TABLE] = {phase<rope_table_chunks, rope_table_body>()};
        ops[INL_ATTENTION] = {phase<cache_tokens_chunks, cache_tokens_body>(),
                              phase<attention_chunks, attention_body>(),
                              scratch<attention_scratch>(),
                              phase<reduce_chunks, reduce_body>()};
        ops[INL_WRITE_KV] = {phase<head_chunks<args::WriteKv>, write_kv_body>()};
        ops[INL_READ_CACHE] = {phase<read_cache_chunks, read_cache_body>()};
        ops[INL_TAKE_ROWS] = {phase<row_chunks<args::TakeRows>, take_rows_body>()};
        ops[INL_SAMPLE] = {phase<argmax_chunks, argmax_body>(),
                           phase<sample_chunks, sample_body>(),
                           scratch<sample_scratch>()};
        ops[INL_PENALIZE] = {phase<penalize_chunks, penalize_body>()};
        ops[INL_PACK] = {phase<pack_chunks, pack_body>()};
        ops[INL_READ] = {phase<read_chunks, read_body>(),
                         phase<read_total_chunks, read_total_body>(),
                         scratch<read_scratch>()};
        ops[INL_LORA] = {phase<lora_inner_chunks, lora_inner_body>(),
                         phase<row_chunks<args::Lora>, lora_body>(),
                         scratch<lora_scratch>()};
        ops[INL_EXPERT_LINEAR] = {phase<expert_blocks, encode_experts_body>(),
                                  phase<expert_linear_chunks, expert_linear_body>(),
                                  scratch<expert_linear_scratch>()};
        ops[INL_COMBINE_EXPERTS] = {
            phase<row_chunks<args::CombineExperts>, combine_experts_body>()};
        ops[INL_ROUTE] = {phase<route_chunks, route_body>(), {},
                          scratch<route_scratch>()};
        ops[INL_SIGMOID_GATE] = {
            phase<row_chunks<args::SigmoidGate>, sigmoid_gate_body>()};
        ops[INL_CAUSAL_CONV] = {phase<causal_conv_chunks, causal_conv_body>()};
        ops[INL_DELTA_RULE] = {phase<delta_factors_chunks, delta_factors_body>(),
                               phase<delta_rule_chunks, delta_rule_body>(),
                               scratch<delta_rule_scratch>()};
        ops[INL_SSM_SCAN] = {phase<ssm_factors_chunks, ssm_factors_body>(),
                             phase<ssm_scan_chunks, ssm_scan_body>(),
                             scratch<ssm_scan_scratch>()};
        ops[INL_ACTIVATE] = {phase<span_chunks<args::Activate>, activate_body>()};
        ops[INL_LAYER_NORM] = {phase<row_chunks<args::LayerNorm>, layer_norm_body>()};
        ops[INL_FULL_ATTENTION] = {phase<full_attention_chunks, full_attention_body>(),
                                   {}, scratch<full_attention_scratch>()};
        ops[INL_CHECKSUM] = {phase<checksum_chunks, checksum_body>()};
        ops[INL_SCORE] = {phase<score_chunks, score_body>()};
    }

    constexpr bool is_complete() const {
        for (const Operation &operation : operations)
            if (operation.first.body == nullptr) return false;
        return true;
    }
};

constexpr Table TABLE;
// GCC's sanitizers compare function pointers at run time only.
#ifndef __SANITIZE_ADDRESS__
static_assert(TABLE.is_complete(),
              "every opcode of the instruction table has a kernel");
#endif

} // namespace
} // namespace inl
