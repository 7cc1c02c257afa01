/* Validation of instructions before a program runs. */
#pragma once

#include <string>

#include "runtime/inl.h"

namespace inl {

/* The reason why a matrix is invalid, or NULL. */
const char *matrix_refusal(const inl_matrix &matrix);

/* Whether an instruction is invalid; then sets reason. */
bool is_refused(const inl_instruction &instruction, std::string &reason);

} // namespace inl
