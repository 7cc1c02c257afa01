/* What the header says, for a caller that does not read C. */

#include <cstddef>
#include <string>

#include "inl.h"

namespace {

using Text = std::string;

Text field(const char *name, size_t value) {
    return "\"" + Text(name) + "\": " + std::to_string(value);
}

#define OFFSET(type, name) field(#name, offsetof(type, name))
#define NUMBER(name) field(#name, size_t(name))

Text object(const char *name, std::initializer_list<Text> fields) {
    Text joined;
    for (const Text &one : fields) joined += (joined.empty() ? "" : ", ") + one;
    return "\"" + Text(name) + "\": {" + joined + "}";
}

Text instruction() {
    return object("instruction",
                  {field("size", sizeof(inl_instruction)),
                   OFFSET(inl_instruction, opcode), OFFSET(inl_instruction, flags),
                   OFFSET(inl_instruction, dims), OFFSET(inl_instruction, data),
                   OFFSET(inl_instruction, reals)});
}

Text matrix() {
    return object("matrix",
                  {field("size", sizeof(inl_matrix)), OFFSET(inl_matrix, format),
                   OFFSET(inl_matrix, group), OFFSET(inl_matrix, zero),
                   OFFSET(inl_matrix, scale), OFFSET(inl_matrix, offsets),
                   OFFSET(inl_matrix, middle), OFFSET(inl_matrix, rows),
                   OFFSET(inl_matrix, columns), OFFSET(inl_matrix, data)});
}

Text opcodes() {
    return object(
        "opcodes",
        {NUMBER(INL_ZERO),       NUMBER(INL_COPY),       NUMBER(INL_ADD),
         NUMBER(INL_SUB),        NUMBER(INL_MUL),        NUMBER(INL_SCALE),
         NUMBER(INL_EMBEDDING),  NUMBER(INL_RMS_NORM),   NUMBER(INL_ADD_NORM),
         NUMBER(INL_LINEAR),     NUMBER(INL_GATED),      NUMBER(INL_ROPE),
         NUMBER(INL_ROPE_TABLE), NUMBER(INL_ATTENTION),  NUMBER(INL_WRITE_KV),
         NUMBER(INL_READ_CACHE), NUMBER(INL_FILL_CACHE), NUMBER(INL_COPY_BLOCKS),
         NUMBER(INL_TAKE_ROWS),  NUMBER(INL_CHOOSE),     NUMBER(INL_PENALIZE),
         NUMBER(INL_PACK),       NUMBER(INL_READ)});
}

Text flags() {
    return object("flags",
                  {NUMBER(INL_X_EXACT), NUMBER(INL_X_INT8), NUMBER(INL_X_INT16),
                   NUMBER(INL_X_BF16), NUMBER(INL_X_MASK), NUMBER(INL_GATE_SILU),
                   NUMBER(INL_GATE_GELU), NUMBER(INL_GATE_MASK), NUMBER(INL_PLUS_ONE),
                   NUMBER(INL_KV_BF16), NUMBER(INL_ONE_EACH), NUMBER(INL_SAMPLE_GREEDY),
                   NUMBER(INL_SAMPLE_DRAW), NUMBER(INL_SAMPLE_FULL),
                   NUMBER(INL_SAMPLE_MASK), NUMBER(INL_INTERLEAVE),
                   NUMBER(INL_ANY_BITS), NUMBER(INL_KV_INT8)});
}

Text formats() {
    return object("formats", {NUMBER(INL_F32), NUMBER(INL_BF16), NUMBER(INL_U4),
                              NUMBER(INL_U8), NUMBER(INL_F16)});
}

Text kinds() {
    return object("kinds",
                  {NUMBER(INL_KIND_F32), NUMBER(INL_KIND_F16), NUMBER(INL_KIND_BF16),
                   NUMBER(INL_KIND_Q4_0), NUMBER(INL_KIND_Q4_1), NUMBER(INL_KIND_Q5_0),
                   NUMBER(INL_KIND_Q5_1), NUMBER(INL_KIND_Q8_0), NUMBER(INL_KIND_Q2_K),
                   NUMBER(INL_KIND_Q3_K), NUMBER(INL_KIND_Q4_K), NUMBER(INL_KIND_Q5_K),
                   NUMBER(INL_KIND_Q6_K), NUMBER(INL_KIND_IQ4_NL),
                   NUMBER(INL_KIND_IQ4_XS), NUMBER(INL_KIND_MXFP4)});
}

Text isas() {
    return object("isas", {NUMBER(INL_SCALAR), NUMBER(INL_AVX2), NUMBER(INL_AVX512),
                           NUMBER(INL_AMX), NUMBER(INL_NEON)});
}

} // namespace

extern "C" const char *inl_describe(void) {
    static const Text described = "{" + field("abi", INL_ABI) + ", " + instruction() +
                                  ", " + matrix() + ", " + opcodes() + ", " + flags() +
                                  ", " + formats() + ", " + kinds() + ", " + isas() +
                                  "}";
    return described.c_str();
}
