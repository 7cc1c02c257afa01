// Attention of one token: rotary embedding, write to the cache, and attention to it.
//
// Compiled by NVRTC; there are no headers. Defined by the caller:
//   D         size of a head: a multiple of 64
//   GROUP     heads that share keys, 8 at most
//   SIZE      tokens of a block of the cache: a multiple of 16
//   RANKS     programs of a cluster, which share the keys of a head
//   THREADS   threads of a program
//   BFLOAT16  whether numbers are bfloat16, else float16
//   WINDOWED, CAPPED  whether keys are those of a window, and scores have a soft cap
//   WIDE_POSITIONS, WIDE_TABLE, WIDE_WRITES, WIDE_COUNTS  whether indices are int64
//   PDL       whether the launch may start before the previous kernel ends
//
// Grid: clusters of RANKS programs, one for each head of keys. Each warp multiplies tiles
// of 16 keys on the matrix units (mma.sync of 16 heads, of which up to 8 are used), in an
// order of columns in which no number changes its thread. The arrays of the step and the
// first tile are read before the previous kernel has ended. Warps are merged in shared
// memory, and programs in that of their cluster.

constexpr int WARPS = THREADS / 32;
constexpr int TILE = 16;      // keys
constexpr int PARTS = D / 32;  // 16 bytes of each of four threads
constexpr int STRIDE = RANKS * WARPS * TILE;
constexpr float LOWEST = -1e30f;

// Loads bypass the first-level cache, which may hold data of the previous step.
__device__ __forceinline__ Four load(const u16* at) {
  Four v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ __forceinline__ i64 load_index(const void* at, i64 i, bool wide) {
  if (wide) {
    i64 v;
    asm volatile("ld.global.cg.s64 %0, [%1];"
                 : "=l"(v) : "l"(static_cast<const i64*>(at) + i) : "memory");
    return v;
  }
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];"
               : "=r"(v) : "l"(static_cast<const int*>(at) + i) : "memory");
  return v;
}
__device__ __forceinline__ float power_of_two(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
__device__ __forceinline__ float score_of(float dot, float scale, float cap) {
  dot *= scale;
#if CAPPED
  constexpr float LOG2E = 1.4426950408889634f;
  dot = cap * LOG2E * (1 - 2 / (power_of_two(dot * (2 * LOG2E / cap)) + 1));
#endif
  return dot;
}
__device__ __forceinline__ float remote(u32 address, int rank) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 pair(float low, float high) {
  return rounded(low) | u32(rounded(high)) << 16;
}
__device__ __forceinline__ Four pack(const float* v) {
  return Four{pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])};
}
// Rotates parts of a head, which the same thread has of both halves.
__device__ __forceinline__ void rotate(Four* x, const float* cos, const float* sin) {
#pragma unroll
  for (int c = 0; c < PARTS / 2; ++c) {
    float a[8], b[8], first[8], second[8];
    unpack(x[c], a);
    unpack(x[c + PARTS / 2], b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      first[i] = a[i] * cos[8 * c + i] - b[i] * sin[8 * c + i];
      second[i] = b[i] * cos[8 * c + i] + a[i] * sin[8 * c + i];
    }
    x[c] = pack(first);
    x[c + PARTS / 2] = pack(second);
  }
}
// Adds products of the upper 8 rows of a, of which the lower 8 are zeros.
__device__ __forceinline__ void multiply(float* sum, u32 a_low, u32 a_high, u32 b_low,
                                         u32 b_high) {
#if BFLOAT16
#define TYPES "f32.bf16.bf16.f32"
#else
#define TYPES "f32.f16.f16.f32"
#endif
  asm("mma.sync.aligned.m16n8k16.row.col." TYPES
      " {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a_low), "r"(0), "r"(a_high), "r"(b_low), "r"(b_high));
}
__device__ __forceinline__ u32 select(u32 low, u32 high, u32 bytes) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(bytes));
  return d;
}

// What a thread has of the heads: those of row lane / 4.
struct State {
  Four q[PARTS];
  float acc[D / 64][8][4];
  float largest, sum;
};

// Scores of 16 keys: of keys 2 * (lane % 4) and the next one, and of those 8 further on.
__device__ __forceinline__ void score(const State& state, const Four (*keys)[PARTS],
                                      float* scores) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
      const Four a = state.q[c], b = keys[half][c];
      multiply(even, a.x, a.y, b.x, b.y);
      multiply(odd, a.z, a.w, b.z, b.w);
    }
    scores[2 * half] = even[0] + odd[0];
    scores[2 * half + 1] = even[1] + odd[1];
  }
}

// Adds 16 values, weighted by the scores of the visible ones.
__device__ __forceinline__ void add(State& state, const Four (*values)[D / 64],
                                    float* scores, const bool* visible, float scale,
                                    float cap) {
  float largest = state.largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i] = visible[i] ? score_of(scores[i], scale, cap) : LOWEST;
    largest = fmaxf(largest, scores[i]);
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const float rescale = power_of_two(state.largest - largest);
  state.largest = largest, state.sum *= rescale;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    scores[i] = visible[i] ? power_of_two(scores[i] - largest) : 0;
    state.sum += scores[i];
  }
  const u32 low = pair(scores[0], scores[1]), high = pair(scores[2], scores[3]);
#pragma unroll
  for (int e = 0; e < D / 64; ++e) {
    const u32* words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = &values[i][e].x;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float* sum = state.acc[e][2 * w + odd];
        sum[0] *= rescale, sum[1] *= rescale;
        const u32 bytes = odd ? 0x7632 : 0x5410;
        multiply(sum, low, high, select(words[0][w], words[1][w], bytes),
                 select(words[2][w], words[3][w], bytes));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
attend_one(const u16* __restrict__ q, const u16* __restrict__ k,
           const u16* __restrict__ v, const float* __restrict__ cos,
           const float* __restrict__ sin, u16* __restrict__ k_cache,
           u16* __restrict__ v_cache, const void* __restrict__ table,
           const void* __restrict__ positions, const void* __restrict__ used_counts,
           const void* __restrict__ writes, u16* __restrict__ out, int kv_heads,
           float scale, int window, float cap) {
  __shared__ float warp_max[WARPS][GROUP], warp_sum[WARPS][GROUP];
  __shared__ float warp_acc[WARPS][GROUP * D];
  __shared__ float rank_max[GROUP], rank_sum[GROUP], rank_acc[GROUP * D];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int head = blockIdx.x / RANKS;
  const int row = lane / 4, column = lane % 4;  // of tiles of the matrix units

  const int position = load_index(positions, 0, WIDE_POSITIONS);
  const bool is_token = load_index(used_counts, 2, WIDE_COUNTS) > 0;
  const i64 own_slot = load_index(writes, 0, WIDE_WRITES);
  const int end = is_token ? position : 0;
  const int begin = WINDOWED ? max(position - window + 1, 0) : 0;
  const i64 token_stride = i64(kv_heads) * D;
  // Tiles lie in one block each.
  auto find = [&](int first) -> i64 {
    if (first >= end) return 0;
    const i64 block = load_index(table, first / SIZE, WIDE_TABLE);
    return (block * SIZE + first % SIZE) * token_stride + head * D;
  };
  Four keys[2][PARTS], values[4][D / 64];
  auto load_keys = [&](i64 at, int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = half * 8 + row;
#pragma unroll
      for (int c = 0; c < PARTS; ++c)
        if (first + key < end)
          keys[half][c] = load(k_cache + at + key * token_stride + c * 32 + column * 8);
    }
  };
  auto key_of = [&](int i) -> int { return (i / 2) * 8 + column * 2 + i % 2; };
  auto load_values = [&](i64 at, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key_of(i);
#pragma unroll
      for (int e = 0; e < D / 64; ++e) {
        // Numbers of padding are undefined, possibly NaN.
        values[i][e] = Four{0, 0, 0, 0};
        if (first + key < end)
          values[i][e] = load(v_cache + at + key * token_stride + e * 64 + row * 8);
      }
    }
  };
  int first = begin / TILE * TILE + (int(rank) * WARPS + warp) * TILE;
  i64 at = find(first);
  load_keys(at, first);
  load_values(at, first);
  i64 next = find(first + STRIDE);
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // The heads, and this token's key and value.
  State state;
  float cosines[PARTS * 4], sines[PARTS * 4];
  const bool is_first = rank == 0 && warp == 0;
  Four own_keys[2][PARTS], own_values[4][D / 64];
#pragma unroll
  for (int c = 0; c < PARTS; ++c) {
    const Four zero = {0, 0, 0, 0};
    state.q[c] = row < GROUP ? load(q + (head * GROUP + row) * D + c * 32 + column * 8)
                             : zero;
    own_keys[0][c] = zero, own_keys[1][c] = zero;
    if (is_first && row == 0)
      own_keys[0][c] = load(k + head * D + c * 32 + column * 8);
  }
#pragma unroll
  for (int e = 0; e < D / 64; ++e) {
#pragma unroll
    for (int i = 0; i < 4; ++i) own_values[i][e] = Four{0, 0, 0, 0};
    if (is_first && column == 0)
      own_values[0][e] = load(v + head * D + e * 64 + row * 8);
  }
#pragma unroll
  for (int c = 0; c < PARTS / 2; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      cosines[8 * c + i] = cos[c * 32 + column * 8 + i];
      sines[8 * c + i] = sin[c * 32 + column * 8 + i];
    }
  }
  rotate(state.q, cosines, sines);
  state.largest = LOWEST, state.sum = 0;
#pragma unroll
  for (int e = 0; e < D / 64; ++e)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.acc[e][j][i] = 0;
  if (is_first) {
    rotate(own_keys[0], cosines, sines);
    const i64 own = own_slot * token_stride + head * D;
    if (row == 0)
#pragma unroll
      for (int c = 0; c < PARTS; ++c)
        *reinterpret_cast<Four*>(k_cache + own + c * 32 + column * 8) = own_keys[0][c];
    if (column == 0)
#pragma unroll
      for (int e = 0; e < D / 64; ++e)
        *reinterpret_cast<Four*>(v_cache + own + e * 64 + row * 8) = own_values[0][e];
    float scores[4];
    bool visible[4] = {is_token && column == 0, false, false, false};
    score(state, own_keys, scores);
    add(state, own_values, scores, visible, scale, cap);
  }

  for (; first < end; first += STRIDE) {
    float scores[4];
    bool visible[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + key_of(i);
      visible[i] = key >= begin && key < end;
    }
    score(state, keys, scores);
    const i64 then = next;
    next = find(first + 2 * STRIDE);
    load_keys(then, first + STRIDE);
    add(state, values, scores, visible, scale, cap);
    load_values(then, first + STRIDE);
  }

  // Warps, then programs.
  state.sum += __shfl_xor_sync(~0u, state.sum, 1);
  state.sum += __shfl_xor_sync(~0u, state.sum, 2);
  if (row < GROUP) {
#pragma unroll
    for (int e = 0; e < D / 64; ++e)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          warp_acc[warp][row * D + e * 64 + (column * 2 + i) * 8 + j] =
              state.acc[e][j][i];
    if (column == 0) warp_max[warp][row] = state.largest, warp_sum[warp][row] = state.sum;
  }
  __syncthreads();
  for (int i = thread; i < GROUP * D; i += THREADS) {
    const int g = i / D;
    float largest = LOWEST, total = 0, number = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, warp_max[w][g]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = power_of_two(warp_max[w][g] - largest);
      total += warp_sum[w][g] * weight;
      number += warp_acc[w][i] * weight;
    }
    rank_acc[i] = number;
    if (i % D == 0) rank_max[g] = largest, rank_sum[g] = total;
  }
  cluster_barrier();
  constexpr int SHARE = (GROUP * D + RANKS - 1) / RANKS;
  const int i = rank * SHARE + thread;
  if (thread < SHARE && i < GROUP * D) {
    const int g = i / D;
    const u32 max_at = u32(__cvta_generic_to_shared(&rank_max[g]));
    const u32 sum_at = u32(__cvta_generic_to_shared(&rank_sum[g]));
    const u32 acc_at = u32(__cvta_generic_to_shared(&rank_acc[i]));
    float maxima[RANKS], sums[RANKS], numbers[RANKS], largest = LOWEST;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      maxima[r] = remote(max_at, r), sums[r] = remote(sum_at, r);
      numbers[r] = remote(acc_at, r);
    }
#pragma unroll
    for (int r = 0; r < RANKS; ++r) largest = fmaxf(largest, maxima[r]);
    float total = 0, number = 0;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const float weight = power_of_two(maxima[r] - largest);
      total += sums[r] * weight, number += numbers[r] * weight;
    }
    out[head * GROUP * D + i] = rounded(total > 0 ? number / total : 0);
  }
  cluster_barrier();  // no program ends while its memory is read
}
