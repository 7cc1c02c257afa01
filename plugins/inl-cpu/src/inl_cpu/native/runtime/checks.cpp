#include "runtime/checks.h"

#include <string>

#include "runtime/instructions.h"
#include "runtime/matrix.h"

namespace inl {

const char *matrix_refusal(const inl_matrix &m) {
    if (m.rows < 1 || m.columns < 1) return "matrix: rows and columns must be positive";
    if (m.data == nullptr) return "matrix: it has no data";
    if (m.format == INL_F32 || m.format == INL_BF16) return nullptr;
    if (m.format < 0 || m.format >= INL_FORMATS)
        return "matrix: accepted formats are F32, BF16 and those with codes";
    if (m.scale < INL_SCALE_HALF || m.scale > INL_SCALE_EIGHTHS)
        return "matrix: accepted scales are HALF, BYTE, NIBBLE, EXPONENT, SIX, WIDE and "
               "EIGHTHS";
    const bool small = m.format == INL_U2 || m.format == INL_U3 || m.format == INL_U6;
    const bool indices = m.format == INL_IQ1 || m.format == INL_IQ2;
    if (m.group != (small ? 16 : RUN) && !(indices && m.group == 16))
        return "matrix: groups must have 16 columns for U2, U3 and U6, 16 or 32 for IQ1 "
               "and IQ2, else 32";
    if (m.group != RUN && (m.scale == INL_SCALE_HALF || m.scale == INL_SCALE_EXPONENT))
        return "matrix: groups of 16 columns require scales of 256 columns";
    if (indices && m.scale != INL_SCALE_EIGHTHS)
        return "matrix: IQ1 and IQ2 require scales in eighths";
    if (m.columns % BlockShape(m).columns)
        return "matrix: columns must be whole blocks";
    if ((m.scale == INL_SCALE_EXPONENT || m.scale == INL_SCALE_EIGHTHS) && m.offsets)
        return "matrix: exponents and eighths have no offsets";
    if (m.scale == INL_SCALE_SIX && (m.group == RUN || m.offsets))
        return "matrix: scales of 6 bits are for groups of 16 columns without offsets";
    const int bits = code_bits(m.format).all();
    const int32_t largest = has_table(m) ? 255 : (1 << bits) - 1;
    if (m.zero < 0 || m.zero > largest) return "matrix: zero must be one of its codes";
    if (largest == 255 && m.zero != 128) return "matrix: zero of codes of 8 bits is 128";
    if (m.middle < 0 || m.middle > largest)
        return "matrix: middle must be one of its codes";
    return nullptr;
}

namespace {

const char *linear_refusal(const args::Linear &op) {
    const inl_matrix &m = op.matrix();
    if (const char *reason = matrix_refusal(m)) return reason;
    const int gate = op.flags() & INL_GATE_MASK, mode = op.flags() & INL_X_MASK;
    if (gate == INL_GATE_MASK) return "linear: accepts one activation";
    if (gate &&
        (op.bias() || m.rows % (2 * INL_LANES) || op.gated_columns() * 2 > m.rows))
        return "linear: a gate takes whole pairs of tiles, at most half as many "
               "columns "
               "and no bias";
    if (is_quantized(m) ? mode == INL_X_BF16
                        : mode == INL_X_INT8 || mode == INL_X_INT16)
        return "linear: integer x is for quantized weights, bfloat16 x for plain ones";
    if (op.delta() && (!op.norm_weight() || !op.sum()))
        return "linear: delta requires norm_weight and sum";
    if (op.delta() && (op.sum() == op.x() || op.sum() == op.delta()))
        return "linear: sum must be neither x nor delta";
    return nullptr;
}

const char *expert_linear_refusal(const args::ExpertLinear &op) {
    const inl_matrix &m = op.matrix();
    if (const char *reason = matrix_refusal(m)) return reason;
    const int gate = op.flags() & INL_GATE_MASK, mode = op.flags() & INL_X_MASK;
    if (gate == INL_GATE_MASK) return "expert_linear: accepts one activation";
    if (is_quantized(m) ? mode == INL_X_BF16
                        : mode == INL_X_INT8 || mode == INL_X_INT16)
        return "expert_linear: integer x is for quantized weights, bfloat16 x for "
               "plain ones";
    const int64_t unit = gate ? 2 * INL_LANES : INL_LANES;
    if (op.experts() < 1 || m.rows % (unit * op.experts()))
        return "expert_linear: each expert must have whole tiles, in pairs with a gate";
    if (op.width() > m.rows / op.experts() / (gate ? 2 : 1))
        return "expert_linear: width exceeds the rows of an expert";
    if (op.sharing() < 1 || op.slots() % op.sharing() || op.slots() >= 1 << 30)
        return "expert_linear: slots must be a multiple of sharing, below 2^30";
    return nullptr;
}

const char *route_refusal(const args::Route &op) {
    if (op.k() < 1 || op.k() > op.experts()) return "route: k must be 1 to experts";
    return op.kind() > 2 ? "route: accepted kinds are 0, 1 and 2" : nullptr;
}

const char *attention_refusal(const args::Attention &op) {
    if (op.k() && !(op.v() && op.writes())) return "attention: k requires v and writes";
    if (!op.cos() != !op.sin()) return "attention: cos and sin require each other";
    if (op.kv_heads() < 1 || op.heads() % op.kv_heads())
        return "attention: heads must be a multiple of kv_heads";
    return nullptr;
}

const char *cache_refusal(int64_t block_size, int64_t head_width, int32_t flags) {
    if (head_width < 2 || head_width % 2) return "cache: head_width must be even";
    if (block_size < 1) return "cache: block_size must be positive";
    const int kinds = flags & (INL_KV_BF16 | INL_KV_INT8 | INL_KV_FLOAT8);
    if (kinds & (kinds - 1)) return "cache: accepts one of bfloat16, int8 and float8";
    return nullptr;
}

template <class Op>
const char *cache_refusal(const Op &op) {
    return cache_refusal(op.block_size(), op.head_width(), op.flags());
}

const char *sample_refusal(const args::Sample &op) {
    const int sampler = op.flags() & INL_SAMPLE_MASK;
    if (op.vocabulary() < 1 || op.vocabulary() > 1 << 30)
        return "sample: vocabulary must be 1 to 2^30";
    if (op.row_samples() < 1 || op.samples() % op.row_samples())
        return "sample: samples must be a multiple of row_samples";
    if (!op.slots() != !op.last()) return "sample: slots and last require each other";
    if (sampler == INL_SAMPLE_MASK) return "sample: accepts one sampler";
    if (sampler && !(op.slots() && op.params() && op.uniforms()))
        return "sample: random sampling requires slots, last, params and uniforms";
    return nullptr;
}

const char *score_refusal(const args::Score &op) {
    if (op.vocabulary() < 1 || op.vocabulary() > 1 << 30)
        return "score: vocabulary must be 1 to 2^30";
    if (op.count() < 1 || op.count() > op.vocabulary())
        return "score: count must be 1 to the vocabulary";
    return nullptr;
}

const char *pack_refusal(const args::Pack &op) {
    const inl_matrix &m = op.matrix();
    if (const char *reason = matrix_refusal(m)) return reason;
    if (m.columns != op.columns()) return "pack: columns differ from the matrix";
    const int32_t kind = int32_t(op.kind());
    if (inl_source_bytes(kind, op.columns()) < 0)
        return "pack: unknown kind, or columns are not whole blocks of it";
    if (kind >= INL_KIND_IQ1_S && op.codebook() == nullptr)
        return "pack: the kind requires a codebook";
    inl_matrix expected = m;
    inl_packing(kind, &expected);
    const bool plain = m.format <= INL_BF16 && expected.format <= INL_BF16;
    const bool same = m.format == expected.format && m.group == expected.group &&
                      m.zero == expected.zero && m.scale == expected.scale &&
                      m.offsets == expected.offsets;
    if (!plain && !same) return "pack: the matrix has another format than the kind";
    const int64_t last = op.rows() - 1;
    const int64_t target = op.flags() & INL_INTERLEAVE
                               ? last / INL_LANES * 2 * INL_LANES + last % INL_LANES
                               : last;
    return op.first() + target >= m.rows ? "pack: rows exceed the matrix" : nullptr;
}

const char *causal_conv_refusal(const args::CausalConv &op) {
    return op.taps() < 2 ? "causal_conv: taps must be 2 or more" : nullptr;
}

const char *delta_rule_refusal(const args::DeltaRule &op) {
    if (op.key_heads() < 1 || op.heads() % op.key_heads())
        return "delta_rule: heads must be a multiple of key_heads";
    return op.key_width() < 1 || op.width() < 1
               ? "delta_rule: key_width and width must be positive"
               : nullptr;
}

const char *ssm_scan_refusal(const args::SsmScan &op) {
    if (op.groups() < 1 || op.heads() % op.groups())
        return "ssm_scan: heads must be a multiple of groups";
    return op.key_width() < 1 || op.width() < 1
               ? "ssm_scan: key_width and width must be positive"
               : nullptr;
}

const char *full_attention_refusal(const args::FullAttention &op) {
    if (op.kv_heads() < 1 || op.heads() < 1 || op.heads() % op.kv_heads())
        return "full_attention: heads must be a multiple of kv_heads";
    return op.head_width() < 1 ? "full_attention: head_width must be positive"
                               : nullptr;
}

/* Checks of one opcode beyond those of the instruction table. */
const char *specific_refusal(const inl_instruction &i) {
    switch (i.opcode) {
    case INL_EMBEDDING: return matrix_refusal(args::Embedding(i).matrix());
    case INL_LINEAR: return linear_refusal(args::Linear(i));
    case INL_EXPERT_LINEAR: return expert_linear_refusal(args::ExpertLinear(i));
    case INL_ROUTE: return route_refusal(args::Route(i));
    case INL_GATED:
        return i.flags & INL_GATE_MASK ? nullptr : "gated: requires an activation";
    case INL_ATTENTION:
        if (const char *reason = cache_refusal(args::Attention(i))) return reason;
        return attention_refusal(args::Attention(i));
    case INL_WRITE_KV: return cache_refusal(args::WriteKv(i));
    case INL_READ_CACHE: return cache_refusal(args::ReadCache(i));
    case INL_SAMPLE: return sample_refusal(args::Sample(i));
    case INL_SCORE: return score_refusal(args::Score(i));
    case INL_PACK: return pack_refusal(args::Pack(i));
    case INL_CAUSAL_CONV: return causal_conv_refusal(args::CausalConv(i));
    case INL_DELTA_RULE: return delta_rule_refusal(args::DeltaRule(i));
    case INL_SSM_SCAN: return ssm_scan_refusal(args::SsmScan(i));
    case INL_FULL_ATTENTION: return full_attention_refusal(args::FullAttention(i));
    case INL_ACTIVATE:
        return args::Activate(i).kind() > 7 ? "activate: accepted kinds are 0 to 7"
                                            : nullptr;
    default: return nullptr;
    }
}

/* The reason why has_valid_fields is false. */
std::string fields_refusal(const InstructionSpec &spec, const inl_instruction &i) {
    const auto name = [&](const char *field) {
        return std::string(spec.name) + ": " + field;
    };
    for (int index = 0; index < spec.dim_count; index++)
        if (i.dims[index] < 0) return name(spec.dims[index]) + " must not be negative";
    for (int index = 0; index < spec.operand_count; index++)
        if (spec.required >> index & 1 && i.data[index] == nullptr)
            return name(spec.operands[index]) + " is missing";
    return name("does not accept flags ") + std::to_string(i.flags & ~spec.flags);
}

} // namespace

bool is_refused(const inl_instruction &i, std::string &reason) {
    if (i.opcode < 0 || i.opcode >= INL_OPCODES) {
        reason = "opcode " + std::to_string(i.opcode) +
                 ": unknown, accepted are 0 to " + std::to_string(INL_OPCODES - 1);
        return true;
    }
    if (!has_valid_fields(i)) {
        reason = fields_refusal(INSTRUCTIONS[i.opcode], i);
        return true;
    }
    const char *specific = specific_refusal(i);
    if (specific == nullptr) return false;
    reason = specific;
    return true;
}

} // namespace inl
