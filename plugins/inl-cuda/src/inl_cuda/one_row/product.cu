// The product of one row of activations with a matrix that is stored in 8 or 4 bits.
//
// Compiled by NVRTC for one shape of matrix; there are no headers. Defined by the caller:
//   K         columns of the matrix
//   INT4      0: E4M3 [rows, K]; 1: codes of 4 bits in chunks of 128 bytes, of which the
//             low halves are one group and the high halves the next one [rows, K / 2]
//   BFLOAT16  whether activations, gains, biases and results are bfloat16, else float16
//   NORMED    whether the row is the norm of x + delta, which is stored in `summed`
//   GATED     0: no; 1: SiLU, 2: tanh-GELU of the first half of the matrix's rows, times
//             the second half
//   HAS_BIAS  whether a bias is added
//   THREADS   threads of a program
//   RESIDENT  programs of this and of the next kernel that a multiprocessor can hold
//   DEPTH     units of 16 rows and 128 bytes that each warp has in flight, EARLY of them
//             before the previous kernel ends
//   PDL       whether the launch may start before the previous kernel ends
//
// Each warp copies units of the matrix to a ring in shared memory, and begins before the
// previous kernel ends. Each thread multiplies what it has copied, in an order of columns
// that the matrix units (mma.sync of 16 rows and 8 columns of x, of which the first is
// used) leave free. The row is scaled to a largest magnitude of 1 and stored as float16,
// in that order; sums are float32.

constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = K / 8;  // of 8 columns
constexpr int ROUNDS = (VECTORS + THREADS - 1) / THREADS;
constexpr int ROW_BYTES = INT4 ? K / 2 : K;
constexpr int PIECES = ROW_BYTES / 16;
constexpr int CHUNKS = (PIECES + 7) / 8;  // of 128 bytes
constexpr int PLANES = INT4 ? 4 : 2;      // of 8 columns of each piece
constexpr int PLANE = CHUNKS * 8 * 16;
constexpr int WIDTH = 128;  // columns of a group of 4-bit codes
constexpr int X_BYTES = PLANES * PLANE;
constexpr int TILE = 16;    // rows of the matrix
constexpr int SLOT = THREADS * (64 + (INT4 ? 4 : 0));

// Copies 16 bytes to shared memory; zeros if there is nothing to copy.
__device__ __forceinline__ void copy16(u32 to, const char* from, bool any) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(any ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :: "r"(to), "l"(from) : "memory");
}
// Loads 8 numbers; not moved across copies.
__device__ __forceinline__ Four load(const u16* from, int vector) {
  Four v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from + u64(vector) * 8) : "memory");
  return v;
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ float both(u32 pair) {
  return half_value(pair & 0xffff) + half_value(pair >> 16);
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Adds the products of 16 rows, of which each thread has four columns of two, with x.
__device__ __forceinline__ void multiply(float* sum, u32 top_low, u32 bottom_low,
                                         u32 top_high, u32 bottom_high, u32 x_low,
                                         u32 x_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(top_low), "r"(bottom_low), "r"(top_high), "r"(bottom_high), "r"(x_low),
        "r"(x_high));
}

__device__ __forceinline__ u32 float8_pair(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(codes)));
  return pair;
}

// Products of 16 bytes of two rows each with the columns of a piece.
__device__ __forceinline__ void float8_products(float* sum, Four top, Four bottom,
                                                const char* x) {
  const u32 a[4] = {top.x, top.y, top.z, top.w};
  const u32 b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    const Four pairs = *reinterpret_cast<const Four*>(x + plane * PLANE);
    const u32 p = a[2 * plane], q = b[2 * plane];
    multiply(sum, float8_pair(p), float8_pair(q), float8_pair(p >> 16),
             float8_pair(q >> 16), pairs.x, pairs.y);
    const u32 r = a[2 * plane + 1], t = b[2 * plane + 1];
    multiply(sum + 4, float8_pair(r), float8_pair(t), float8_pair(r >> 16),
             float8_pair(t >> 16), pairs.z, pairs.w);
  }
}

// The same for 4 bits. Low halves become 1024 + code, high ones 1024 + 16 * code.
__device__ __forceinline__ void int4_products(float* low, float* high, Four top,
                                              Four bottom, const char* x) {
  const u32 a[4] = {top.x, top.y, top.z, top.w};
  const u32 b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* at = x + (i >> 1) * PLANE + (i & 1) * 8;
    const uint2 x_low = *reinterpret_cast<const uint2*>(at);
    const uint2 x_high = *reinterpret_cast<const uint2*>(at + 2 * PLANE);
    const u32 p = a[i], q = b[i], p_odd = p >> 8, q_odd = q >> 8;
    constexpr u32 LOW = 0x000f000f, HIGH = 0x00f000f0, BASE = 0x64006400;
    multiply(low, (p & LOW) | BASE, (q & LOW) | BASE, (p_odd & LOW) | BASE,
             (q_odd & LOW) | BASE, x_low.x, x_low.y);
    multiply(high, (p & HIGH) | BASE, (q & HIGH) | BASE, (p_odd & HIGH) | BASE,
             (q_odd & HIGH) | BASE, x_high.x, x_high.y);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
one_row(const u16* __restrict__ x, const u16* __restrict__ delta,
        const u16* __restrict__ gain, u16* __restrict__ summed,
        const char* __restrict__ codes, const char* __restrict__ scales,
        const char* __restrict__ offsets, const u16* __restrict__ bias,
        u16* __restrict__ y, int n, float eps) {
  extern __shared__ __align__(16) char shared[];
  char* ring = shared + X_BYTES;
  float* sums = reinterpret_cast<float*>(ring + DEPTH * SLOT);  // of groups
  float* results = sums + (INT4 ? K / WIDTH : 0);               // [WARPS, tiles * TILE]
  __shared__ float warp_squares[WARPS], warp_largest[WARPS];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int first_row = u64(blockIdx.x) * n / gridDim.x;
  const int rows = u64(blockIdx.x + 1) * n / gridDim.x - first_row;
  const int gate_tiles = (rows + TILE - 1) / TILE;
  const int tiles = gate_tiles * (GATED ? 2 : 1), units = tiles * CHUNKS;

  // A unit is a chunk of the rows of a tile. A thread copies 64 bytes of it: two pieces
  // each of two rows that are 8 apart.
  const u32 ring_address = u32(__cvta_generic_to_shared(ring));
  const int piece = lane & 3, top = lane >> 2;
  int ahead = warp;  // what is copied next
  auto fetch = [&](int slot) {
    if (ahead < units) {
      const int tile = ahead / CHUNKS, chunk = ahead % CHUNKS;
      const bool is_up = GATED && tile >= gate_tiles;
      const int row = (is_up ? tile - gate_tiles : tile) * TILE + top;
      const u32 head = first_row + (is_up ? n : 0);
      const u32 upper = head + min(row, rows - 1), lower = head + min(row + 8, rows - 1);
      const u32 to = ring_address + slot * SLOT + thread * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 at = chunk * 8 + (i & 1) * 4 + piece;
        const bool any = PIECES % 8 == 0 || at < PIECES;
        const u32 begin = (i < 2 ? upper : lower) * ROW_BYTES + (any ? at : 0) * 16;
        copy16(to + i * THREADS * 16, codes + begin, any);
      }
#if INT4
      // Scales of the two rows, and their offsets.
      const u32 pair = (piece & 1 ? lower : upper) * (K / 256) + chunk;
      copy4(ring_address + slot * SLOT + THREADS * 64 + thread * 4,
            (piece & 2 ? offsets : scales) + pair * 4);
#endif
      ahead += WARPS;
    }
    commit();
  };
#pragma unroll 1
  for (int slot = 0; slot < EARLY; ++slot) fetch(slot);
#if !INT4
  const float* row_scales = reinterpret_cast<const float*>(scales);
  const float first_scale = thread < rows ? row_scales[first_row + thread] : 0;
  const float up_scale = GATED && thread < rows ? row_scales[n + first_row + thread] : 0;
#endif
#if NORMED
  Four gains[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int vector = i * THREADS + thread;
    gains[i] = vector < VECTORS ? reinterpret_cast<const Four*>(gain)[vector]
                                : Four{0, 0, 0, 0};
  }
#endif
  for (int i = thread; i < WARPS * tiles * TILE; i += THREADS) results[i] = 0;
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // The row, which is loaded before more of the matrix is copied.
  Four loaded[ROUNDS], updates[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int vector = i * THREADS + thread;
    if (vector < VECTORS) {
      loaded[i] = load(x, vector);
      if (NORMED) updates[i] = load(delta, vector);
    }
  }
#pragma unroll 1
  for (int slot = EARLY; slot < DEPTH; ++slot) fetch(slot);
  float row[ROUNDS][8], squares = 0, largest = 0;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int vector = i * THREADS + thread;
    if (vector < VECTORS) {
      unpack(loaded[i], row[i]);
#if NORMED
      float update[8], factor[8];
      unpack(updates[i], update);
      unpack(gains[i], factor);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        row[i][j] += update[j];
        squares += row[i][j] * row[i][j];
      }
      if (blockIdx.x == 0) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = rounded(row[i][2 * j]) | u32(rounded(row[i][2 * j + 1])) << 16;
        reinterpret_cast<Four*>(summed)[vector] =
            Four{words[0], words[1], words[2], words[3]};
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) row[i][j] *= factor[j];
#endif
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(row[i][j]));
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#if NORMED
    squares += __shfl_xor_sync(~0u, squares, step);
#endif
  }
  if (lane == 0) {
    warp_largest[warp] = largest;
    warp_squares[warp] = squares;
  }
  __syncthreads();
  squares = 0, largest = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    largest = fmaxf(largest, warp_largest[i]);
    squares += warp_squares[i];
  }
  const float inverse = largest > 0 ? 1 / largest : 1;
  float factor = largest > 0 ? largest : 1;
#if NORMED
  factor *= rsqrtf(squares / K + eps);
#endif
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int vector = i * THREADS + thread;
#if INT4
    float total = 0;
#endif
    if (vector < VECTORS) {
      float* r = row[i];
#pragma unroll
      for (int j = 0; j < 8; ++j) r[j] *= inverse;
#if INT4
      // Vectors 0 to 15 of a chunk are of low halves. Pairs are two bytes apart.
      const int inside = vector % 32, plane = (inside / 16) * 2 + (inside & 1);
      const int place = (vector / 32) * 8 + (inside % 16) / 2;
      const Four packed = {half_pair(r[0], r[2]), half_pair(r[1], r[3]),
                           half_pair(r[4], r[6]), half_pair(r[5], r[7])};
#else
      const int plane = vector & 1, place = vector >> 1;
      const Four packed = {half_pair(r[0], r[1]), half_pair(r[2], r[3]),
                           half_pair(r[4], r[5]), half_pair(r[6], r[7])};
#endif
      *reinterpret_cast<Four*>(shared + plane * PLANE + place * 16) = packed;
#if INT4
      total = both(packed.x) + both(packed.y) + both(packed.z) + both(packed.w);
#endif
    }
#if INT4
#pragma unroll
    for (int step = 8; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
    if (vector < VECTORS && lane % 16 == 0) sums[vector / 16] = total;
#endif
  }
#if !INT4
  // Pieces out of bounds are zeros.
  for (int i = PIECES + thread; i < CHUNKS * 8; i += THREADS)
    for (int plane = 0; plane < PLANES; ++plane)
      *reinterpret_cast<Four*>(shared + plane * PLANE + i * 16) = Four{0, 0, 0, 0};
#endif
  __syncthreads();

  float upper = 0, lower = 0;
  int slot = 0;
  for (int unit = warp; unit < units; unit += WARPS) {
    asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
    const int tile = unit / CHUNKS, chunk = unit % CHUNKS;
    const char* now = ring + slot * SLOT + thread * 16;
    const char* at = shared + (chunk * 8 + piece) * 16;
    Four w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = *reinterpret_cast<const Four*>(now + i * THREADS * 16);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#if INT4
    __syncwarp();
    const Four pairs = *reinterpret_cast<const Four*>(
        ring + slot * SLOT + THREADS * 64 + (thread & ~3) * 4);
    float other[8] = {0, 0, 0, 0, 0, 0, 0, 0};  // two chains are faster than one
    int4_products(sum, sum + 4, w[0], w[2], at);
    int4_products(other, other + 4, w[1], w[3], at + 64);
    const float low = sums[2 * chunk], high = sums[2 * chunk + 1];
    const u32 scale[2] = {pairs.x, pairs.y}, offset[2] = {pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[2 * i] += other[2 * i], sum[4 + 2 * i] += other[4 + 2 * i];
      const float one = (sum[2 * i] - 1024 * low) * half_value(scale[i] & 0xffff) +
                        low * half_value(offset[i] & 0xffff) +
                        (sum[4 + 2 * i] - 1024 * high) * 0.0625f *
                            half_value(scale[i] >> 16) +
                        high * half_value(offset[i] >> 16);
      (i ? lower : upper) += one;
    }
#else
    float8_products(sum, w[0], w[2], at);
    float8_products(sum, w[1], w[3], at + 64);
    upper += sum[0] + sum[4];
    lower += sum[2] + sum[6];
#endif
    if (unit + WARPS >= (tile + 1) * CHUNKS) {
      // The last of this warp's chunks of the tile.
      if (piece == 0) {
        float* to = results + (warp * tiles + tile) * TILE + top;
        to[0] = upper, to[8] = lower;
      }
      upper = 0, lower = 0;
    }
#if INT4
    __syncwarp();
#endif
    fetch(slot);
    if (++slot == DEPTH) slot = 0;
  }
  __syncthreads();
  for (int r = thread; r < rows; r += THREADS) {
    float result = 0, up = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float* from = results + i * tiles * TILE + r;
      result += from[0];
      if (GATED) up += from[gate_tiles * TILE];
    }
    result *= factor;
#if !INT4
    result *= r == thread ? first_scale : row_scales[first_row + r];
#endif
#if GATED
    up *= factor;
#if !INT4
    up *= r == thread ? up_scale : row_scales[n + first_row + r];
#endif
    // The tanh form of GELU is a sigmoid.
    const float slope =
        GATED == 1 ? result
                   : 1.5957691216057308f * (result + 0.044715f * result * result * result);
    result = result / (1 + __expf(fminf(-slope, 80.0f))) * up;
#endif
#if HAS_BIAS
    result += value(bias[first_row + r]);
#endif
    y[first_row + r] = rounded(result);
  }
}
