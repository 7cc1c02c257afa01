/* Constants and struct layouts as JSON, for callers that do not read C headers. */

#include <cstddef>
#include <initializer_list>
#include <string>

#include "runtime/instructions.h"
#include "runtime/sets.h"

namespace {

using Text = std::string;

Text field(const char *name, size_t value) {
    return "\"" + Text(name) + "\": " + std::to_string(value);
}

/* Separated by commas. */
Text joined(std::initializer_list<Text> fields) {
    Text all;
    for (const Text &one : fields)
        if (!one.empty()) all += (all.empty() ? "" : ", ") + one;
    return all;
}

#define OFFSET(type, name) field(#name, offsetof(type, name))
#define NUMBER(name) field(#name, size_t(name))

Text object(const char *name, std::initializer_list<Text> fields) {
    return "\"" + Text(name) + "\": {" + joined(fields) + "}";
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

#define ENTRY(name) NUMBER(name),

Text opcodes() { return object("opcodes", {INL_FOR_EACH_OPCODE(ENTRY)}); }

Text flags() { return object("flags", {INL_FOR_EACH_FLAG(ENTRY)}); }

Text formats() {
    return object("formats", {NUMBER(INL_F32), NUMBER(INL_BF16), NUMBER(INL_U2),
                              NUMBER(INL_U3), NUMBER(INL_U4), NUMBER(INL_U5),
                              NUMBER(INL_U6), NUMBER(INL_U8), NUMBER(INL_N4),
                              NUMBER(INL_M4), NUMBER(INL_IQ1), NUMBER(INL_IQ2),
                              NUMBER(INL_IQ3_XXS), NUMBER(INL_IQ3_S)});
}

Text scales() {
    return object("scales", {NUMBER(INL_SCALE_HALF), NUMBER(INL_SCALE_BYTE),
                             NUMBER(INL_SCALE_NIBBLE), NUMBER(INL_SCALE_EXPONENT),
                             NUMBER(INL_SCALE_SIX), NUMBER(INL_SCALE_WIDE),
                             NUMBER(INL_SCALE_EIGHTHS)});
}

Text kinds() {
    return object("kinds",
                  {NUMBER(INL_KIND_F32), NUMBER(INL_KIND_F16), NUMBER(INL_KIND_BF16),
                   NUMBER(INL_KIND_Q4_0), NUMBER(INL_KIND_Q4_1), NUMBER(INL_KIND_Q5_0),
                   NUMBER(INL_KIND_Q5_1), NUMBER(INL_KIND_Q8_0), NUMBER(INL_KIND_Q2_K),
                   NUMBER(INL_KIND_Q3_K), NUMBER(INL_KIND_Q4_K), NUMBER(INL_KIND_Q5_K),
                   NUMBER(INL_KIND_Q6_K), NUMBER(INL_KIND_IQ4_NL),
                   NUMBER(INL_KIND_IQ4_XS), NUMBER(INL_KIND_MXFP4),
                   NUMBER(INL_KIND_TQ1_0), NUMBER(INL_KIND_TQ2_0),
                   NUMBER(INL_KIND_IQ1_S), NUMBER(INL_KIND_IQ1_M),
                   NUMBER(INL_KIND_IQ2_XXS), NUMBER(INL_KIND_IQ2_XS),
                   NUMBER(INL_KIND_IQ2_S), NUMBER(INL_KIND_IQ3_XXS),
                   NUMBER(INL_KIND_IQ3_S)});
}

Text isas() {
    return object("isas", {NUMBER(INL_SCALAR), NUMBER(INL_AVX2), NUMBER(INL_AVX512),
                           NUMBER(INL_AMX), NUMBER(INL_NEON), NUMBER(INL_AVX_VNNI)});
}

/* An instruction set of this architecture that the build left out; else nothing. */
Text left_out(const char *name, int32_t isa) {
    return inl::compiled_operations(isa) == nullptr ? field(name, size_t(isa)) : "";
}
#define LEFT_OUT(name) left_out(#name, name)

Text left_out() {
#if defined(__x86_64__)
    return object("left_out", {LEFT_OUT(INL_SCALAR), LEFT_OUT(INL_AVX2),
                               LEFT_OUT(INL_AVX_VNNI), LEFT_OUT(INL_AVX512),
                               LEFT_OUT(INL_AMX)});
#elif defined(__aarch64__)
    return object("left_out", {LEFT_OUT(INL_SCALAR), LEFT_OUT(INL_NEON)});
#else
    return object("left_out", {LEFT_OUT(INL_SCALAR)});
#endif
}

} // namespace

extern "C" const char *inl_describe(void) {
    static const Text described = "{" + field("abi", INL_ABI) + ", " + instruction() +
                                  ", " + matrix() + ", " + opcodes() + ", " + flags() +
                                  ", " + formats() + ", " + scales() + ", " +
                                  kinds() + ", " + isas() + ", " + left_out() + "}";
    return described.c_str();
}
