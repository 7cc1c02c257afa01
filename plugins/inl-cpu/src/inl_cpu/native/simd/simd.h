/* The lanes of the instruction set that INL_ISA_* names; plain C++ without one. */
#pragma once

#if defined(INL_ISA_AVX512) || defined(INL_ISA_AMX)
#include "simd/simd_avx512.h"
#elif defined(INL_ISA_AVX2) || defined(INL_ISA_AVX_VNNI)
#include "simd/simd_avx2.h"
#elif defined(INL_ISA_NEON)
#include "simd/simd_neon.h"
#else
#include "simd/simd_scalar.h"
#endif
