/* Headers that every instruction set's file includes before it sets its target, so that
 * their code is compiled for the baseline. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "runtime/cpu.h"
#include "runtime/instructions.h"
#include "runtime/matrix.h"
#include "runtime/numbers.h"
#include "runtime/operation.h"
#include "runtime/quant.h"
#include "runtime/token_filter.h"
