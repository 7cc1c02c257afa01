// Numbers of activations in half precision, for the kernels of one row. Prepended to
// their sources; BFLOAT16 says whether numbers are bfloat16, else float16.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct Four { u32 x, y, z, w; };

__device__ __forceinline__ float half_value(u16 bits) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
}
__device__ __forceinline__ float value(u16 bits) {
#if BFLOAT16
  return __uint_as_float(u32(bits) << 16);
#else
  return half_value(bits);
#endif
}
__device__ __forceinline__ u16 rounded(float v) {
  u16 d;
#if BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
#endif
  return d;
}
__device__ __forceinline__ void unpack(Four bits, float* v) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = value(words[i] & 0xffff);
    v[2 * i + 1] = value(words[i] >> 16);
  }
}

