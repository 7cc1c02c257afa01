// The layers and the head of a Llama-like model for one row, as one kernel.
//
// Compiled by NVRTC; there are no headers. Defined by the caller:
//   HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCAB  sizes of the model, heads of 64
//   PAGE      tokens of a block of the cache
//   CLUSTERS  clusters of 8 blocks, at least one for each head
//   BATCH     keys of 8 lanes that are copied into shared memory at once
//   TABLE     most pages of a block's keys
//   WIDE_POSITIONS, WIDE_TABLE, WIDE_WRITES  whether indices are int64
//   PDL       whether the launch may start before the previous kernel ends
//
// One block runs on a multiprocessor, and all must be resident. The block of rank r in
// its cluster owns the r-th eighth of the columns of the residual stream; every cluster
// has a copy. A layer has two exchanges between clusters:
//
//   norm, qkv of a head by a cluster, rope, attention over an eighth of the keys by a
//   block, output product of the head's columns -> sums of all heads
//   norm, gate and up, activation, down product of the block's units, sums of the
//   cluster -> sums of all clusters
//
// Numbers are sent with a flag in one word of 64 bits (as in NCCL's LL protocol), so
// that an exchange is one store and one load. Flags count exchanges over all steps; a
// word that is 2^32 exchanges old is always overwritten before. Blocks of a cluster
// store in each other's shared memory, and barriers there count the bytes. Weights and
// keys are copied into shared memory a layer ahead.
//
// Two such kernels that are partly resident would wait for each other forever: the
// launch must be cooperative.

typedef unsigned long long Word;
typedef unsigned short Half;

struct LayerPointers {
  const unsigned char* qkv;  // [HEADS + 2 KV_HEADS heads of 64, HIDDEN]
  const unsigned char* up;   // [2 INNER, HIDDEN], gate first
  Half* k;                   // [pages, PAGE, KV_HEADS, 64]
  Half* v;
};

constexpr int DIM = 64, RANKS = 8, BLOCKS = CLUSTERS * RANKS, GROUP = HEADS / KV_HEADS;
constexpr int UNITS = INNER / BLOCKS, WARPS = UNITS, THREADS = 32 * WARPS;
constexpr int PAIRS = 3 * DIM / 2 / RANKS;  // pairs of rows of qkv of a block
constexpr int OWN = HIDDEN / RANKS;         // columns of a block
constexpr int OWNERS = OWN / 2 * 8;         // threads that sum them: 8 for two columns
constexpr int SQUARES = RANKS * OWNERS / 32;
constexpr int ROW = 2 * HIDDEN;             // bytes
constexpr int PARTS = (HIDDEN + 127) / 128; // of a row: 4 columns a lane
constexpr int DEPTH = 2;                    // pairs of rows of the head read ahead
constexpr int TURNS =                       // such pairs of a warp
    DEPTH * ((VOCAB + BLOCKS * 2 * WARPS * DEPTH - 1) / (BLOCKS * 2 * WARPS * DEPTH));
constexpr int WARP_KEYS = 4 * BATCH, KEYS = WARPS * WARP_KEYS;
constexpr int QKV_PIECES = 4;               // copies of a block's rows of qkv
constexpr int QKV_BYTES = 2 * PAIRS * ROW, OUT_BYTES = OWN * DIM * 2;
constexpr int UP_BYTES = 2 * UNITS * ROW, DOWN_BYTES = UNITS * ROW;
constexpr int NORM_BYTES = HIDDEN * 4 + SQUARES * 4;
constexpr int FLAGS = 64;                   // of a step
constexpr unsigned LIMIT = 1 << 27;         // polls before a trap: about a minute
constexpr float LEAST = -1e30f;

static_assert(BLOCKS * UNITS == INNER && UNITS % 4 == 0 && WARPS <= 32, "");
static_assert(WARPS * 32 >= OWNERS && WARPS >= PAIRS && HIDDEN % 64 == 0, "");
static_assert(HEADS <= CLUSTERS && CLUSTERS <= 16 && LAYERS < FLAGS - 1, "");
static_assert(VOCAB % 2 == 0, "");

__device__ unsigned address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}

__device__ unsigned remote(const void* p, int rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(mapped) : "r"(address(p)), "r"(rank));
  return mapped;
}

// Store numbers in the shared memory of a rank, whose barrier counts their bytes.
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
__device__ void send(float* at, Word* link, int rank, float v) {
  asm volatile(SEND ".b32 [%0], %1, [%2];"
               ::"r"(remote(at, rank)), "r"(__float_as_uint(v)),
               "r"(remote(link, rank)) : "memory");
}

__device__ void send(float* at, Word* link, int rank, float2 v) {
  asm volatile(SEND ".v2.b32 [%0], {%1, %2}, [%3];"
               ::"r"(remote(at, rank)), "r"(__float_as_uint(v.x)),
               "r"(__float_as_uint(v.y)), "r"(remote(link, rank)) : "memory");
}

__device__ void send(float* at, Word* link, int rank, float4 v) {
  asm volatile(SEND ".v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(remote(at, rank)), "r"(__float_as_uint(v.x)),
               "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)),
               "r"(__float_as_uint(v.w)), "r"(remote(link, rank)) : "memory");
}

__device__ void meet() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ void publish(Word* slot, unsigned bits, unsigned flag) {
  Word word = (Word)flag << 32 | bits;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(word) : "memory");
}

__device__ void poll(const Word* slots, Word& a, Word& b) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(a), "=l"(b) : "l"(slots) : "memory");
}

// Loads bypass the first-level cache, which may hold data of the previous step.
__device__ float load(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}

__device__ unsigned load(const unsigned* at) {
  unsigned v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

__device__ long long load(const void* at, long long i, bool wide) {
  if (!wide) return (int)load((const unsigned*)at + i);
  long long v;
  asm volatile("ld.global.cg.s64 %0, [%1];"
               : "=l"(v) : "l"((const long long*)at + i) : "memory");
  return v;
}

__device__ uint4 load(const Half* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ float number(Word word) { return __uint_as_float((unsigned)word); }

// Sum of two columns over COUNT clusters, by 8 lanes that all get it.
template <int COUNT>
__device__ float2 gather(const Word* slots, int pair, int lane, unsigned flag) {
  const int first = lane % 8;
  const Word* at = slots + first * OWN + 2 * pair;
  Word a = (Word)flag << 32, b = a, c = a, d = a;  // zeros that have arrived
  unsigned polls = 0;
  bool arrived;
  do {
    if (first < COUNT) poll(at, a, b);
    if (first + 8 < COUNT) poll(at + 8 * OWN, c, d);
    arrived = (unsigned)(a >> 32) == flag && (unsigned)(b >> 32) == flag &&
              (unsigned)(c >> 32) == flag && (unsigned)(d >> 32) == flag;
    if (++polls > LIMIT) __trap();
  } while (!arrived);
  __syncwarp();
  float2 sum = {number(a) + number(c), number(b) + number(d)};
#pragma unroll
  for (int i = 1; i < 8; i *= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, i);
    sum.y += __shfl_xor_sync(~0u, sum.y, i);
  }
  return sum;
}

__device__ void expect(Word* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(address(barrier)), "r"(bytes) : "memory");
}

// By test_wait: warps that try_wait suspends are late, 32 us in a step.
__device__ void wait(Word* barrier, unsigned parity) {
  unsigned done = 0, polls = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
    if (++polls > 16 * LIMIT) __trap();
  }
}

// Wait for all that other blocks of the cluster send over a link.
__device__ void receive(Word* link, unsigned parity, int bytes) {
  if (threadIdx.x == 0) expect(link, bytes);
  wait(link, parity);
}

__device__ void copy(Word* ready, const void* target, const void* source, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];"
      ::"r"(address(target)), "l"(source), "r"(bytes), "r"(address(ready)) : "memory");
}

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ void unpack(uint4 bits, float* v) {
  v[0] = low(bits.x), v[1] = high(bits.x), v[2] = low(bits.y), v[3] = high(bits.y);
  v[4] = low(bits.z), v[5] = high(bits.z), v[6] = low(bits.w), v[7] = high(bits.w);
}

__device__ unsigned packed(float first, float second) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(second), "f"(first));
  return d;
}

// Whether a lane has columns in a part of a row.
__device__ bool has(int part, int lane) {
  return 128 * part + 128 <= HIDDEN || lane < HIDDEN % 128 / 4;
}

// Two rows of a matrix in the registers of a warp, 4 columns of 128 a lane.
struct Pair {
  uint2 first[PARTS], second[PARTS];
};

__device__ Pair pair_at(const unsigned char* rows, int stride, int lane) {
  Pair w;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    w.first[i] = w.second[i] = make_uint2(0, 0);
    if (has(i, lane)) {
      w.first[i] = ((const uint2*)rows)[lane + 32 * i];
      w.second[i] = ((const uint2*)(rows + stride))[lane + 32 * i];
    }
  }
  return w;
}

struct Row {
  float4 part[PARTS];
};

__device__ Row row_at(const float* x, int lane) {
  Row row;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    row.part[i] = make_float4(0, 0, 0, 0);
    if (has(i, lane)) row.part[i] = ((const float4*)x)[lane + 32 * i];
  }
  return row;
}

__device__ void dot(float4 w, float4 x, float2& sum) {
  sum.x = fmaf(w.x, x.x, sum.x);
  sum.y = fmaf(w.y, x.y, sum.y);
  sum.x = fmaf(w.z, x.z, sum.x);
  sum.y = fmaf(w.w, x.w, sum.y);
}

__device__ void dot(uint2 w, float4 x, float2& sum) {
  dot(make_float4(low(w.x), high(w.x), low(w.y), high(w.y)), x, sum);
}

struct Wide {
  float4 first[PARTS], second[PARTS];
};

// Unpack now, not where it is used.
__device__ float4 wide(uint2 bits) {
  float4 v = make_float4(low(bits.x), high(bits.x), low(bits.y), high(bits.y));
  asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w));
  return v;
}

__device__ Wide wide(const Pair& w) {
  Wide v;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    v.first[i] = wide(w.first[i]);
    v.second[i] = wide(w.second[i]);
  }
  return v;
}

// Lanes 0 to 15 get the product of the first row, the others that of the second.
template <class Weights>
__device__ float multiply(const Weights& w, const Row& x, int lane) {
  float2 first = {0, 0}, second = {0, 0};
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    dot(w.first[i], x.part[i], first);
    dot(w.second[i], x.part[i], second);
  }
  const float one = first.x + first.y, other = second.x + second.y;
  float sum = lane < 16 ? one : other;
  sum += __shfl_xor_sync(~0u, lane < 16 ? other : one, 16);
#pragma unroll
  for (int i = 8; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return sum;
}

// Send two columns to the blocks of the cluster, times the norm's weight, and squares.
__device__ void share(float2 x, float2 gain, float* row, float* squares, Word* link,
                      int column, int rank, int warp, int lane) {
  const float2 y = {x.x * gain.x, x.y * gain.y};
  const float2 next = {__shfl_xor_sync(~0u, y.x, 8), __shfl_xor_sync(~0u, y.y, 8)};
  float square = x.x * x.x + x.y * x.y;
  square += __shfl_xor_sync(~0u, square, 8);
  square += __shfl_xor_sync(~0u, square, 16);
  if (lane % 16 < 8)
    send(row + column, link, lane % 8, make_float4(y.x, y.y, next.x, next.y));
  else if (lane < 16)
    send(squares + rank * (OWNERS / 32) + warp, link, lane % 8, square);
}

__device__ float inverse(const float* squares, float eps, int lane) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < SQUARES; i += 32)
    if (i + 32 <= SQUARES || lane < SQUARES % 32) sum += squares[i + lane];
#pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return rsqrtf(sum / HIDDEN + eps);
}

// Scores, weights and values of some keys, relative to the largest score.
struct Partial {
  float most, total, sums[8];

  __device__ void rescale(float top) {
    const float factor = exp2f(most - top);
    most = top, total *= factor;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] *= factor;
  }
  __device__ void add(float weight, const float* values) {
    total += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
  }
};

__device__ float score(const float* q, const float* k) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(q[i], k[i], sum);
#pragma unroll
  for (int i = 1; i < 8; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return sum;
}

__device__ void eight(const float* from, float* to) {
  const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Columns of a head whose columns i and i + 32 are adjacent.
__device__ void columns(const float* head, int first, float* to) {
  const float4* from = (const float4*)(head + first % 32 * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 a = from[i];
    to[2 * i] = first < 32 ? a.x : a.y, to[2 * i + 1] = first < 32 ? a.z : a.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) step(
    const LayerPointers* pointers, const unsigned char* out, const unsigned char* down,
    const unsigned char* head_matrix, const float* gains, const Half* embedded,
    const float* cosines, const float* sines, const void* table, const void* position,
    const void* write, unsigned* steps, Word* slots, float* logits,
    float eps, float score_scale) {
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* qkv_part = shared;
  unsigned char* out_part = qkv_part + QKV_BYTES;
  unsigned char* up_part = out_part + OUT_BYTES;
  unsigned char* down_part = up_part + UP_BYTES;
  Half* key_part = (Half*)(down_part + DOWN_BYTES);
  Half* value_part = key_part + KEYS * DIM;
  __shared__ __align__(16) float rows[2][HIDDEN], squares[2][SQUARES], head[3 * DIM];
  __shared__ __align__(16) float merged[RANKS][DIM + 4], partials[WARPS][DIM + 4];
  __shared__ __align__(16) float result[DIM], sums[RANKS][OWN], activated[UNITS];
  __shared__ LayerPointers layers[LAYERS];
  __shared__ int pages[TABLE], places[KEYS];
  __shared__ long long newest_place;
  __shared__ Word ready[4];  // weights have been copied
  __shared__ Word links[6];  // numbers of the cluster: norm, qkv, attention, norm, down

  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  const int cluster = blockIdx.x / RANKS, rank = blockIdx.x % RANKS;
  const int kv_head = cluster / GROUP;
  const bool attends = cluster < HEADS, owns = t < OWNERS;
  const int pair = warp * 4 + lane / 8, column = rank * OWN + 2 * pair;

  if (t == 0) {
    for (int i = 0; i < 10; ++i) {
      Word* barrier = i < 4 ? ready + i : links + i - 4;
      const int arrivals = i == 0 ? QKV_PIECES : i == 2 ? 2 : 1;
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                   ::"r"(address(barrier)), "r"(arrivals));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int i = t; i < LAYERS * 4; i += THREADS)
    ((Word*)layers)[i] = ((const Word*)pointers)[i];
  __syncthreads();

  // Copies of a layer are issued by different warps, as issuing one takes 20
  // instructions. Rows i and i + 32 of a head rotate together: the former come first.
  auto fill_attention = [&](int layer, int piece) {
    if (piece < QKV_PIECES) {
      // The block's rows are those of one or two of queries, keys and values.
      const int begin = rank * PAIRS, half = piece % 2;
      const int head_end = min(PAIRS, 32 - begin % 32);
      const int skipped = piece < 2 ? 0 : head_end;
      const int count = piece < 2 ? head_end : PAIRS - head_end;
      const int section = (begin + skipped) / 32, at = (begin + skipped) % 32;
      const int of = section ? HEADS + (section - 1) * KV_HEADS + kv_head : cluster;
      const int row = of * DIM + half * 32 + at;
      expect(ready, count * ROW);
      if (count)
        copy(ready, qkv_part + (half * PAIRS + skipped) * ROW,
             layers[layer].qkv + (long long)row * ROW, count * ROW);
    } else if (piece == QKV_PIECES) {
      const long long own = (layer * HEADS + cluster) * RANKS + rank;
      expect(ready + 1, OUT_BYTES);
      copy(ready + 1, out_part, out + own * OUT_BYTES, OUT_BYTES);
    }
  };
  auto fill_mlp = [&](int layer, int piece) {
    if (piece < 2) {
      const long long row = piece * INNER + blockIdx.x * UNITS;
      expect(ready + 2, UP_BYTES / 2);
      copy(ready + 2, up_part + piece * (UP_BYTES / 2), layers[layer].up + row * ROW,
           UP_BYTES / 2);
    } else if (piece == 2) {
      const long long own = (long long)layer * BLOCKS + blockIdx.x;
      expect(ready + 3, DOWN_BYTES);
      copy(ready + 3, down_part, down + own * DOWN_BYTES, DOWN_BYTES);
    }
  };
  // The last warps, or in clusters without a head those that wait for sums.
  const int piece = lane ? WARPS : attends ? WARPS - 1 - warp : warp;
  if (attends) fill_attention(0, piece);
  fill_mlp(0, piece);
#if PDL
  // All above are constants of the program.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  unsigned flag = load(steps) * FLAGS;  // the last one; of each exchange its own

  // The block's keys, and where the cache has them.
  const int count = (int)load(position, 0, WIDE_POSITIONS);
  const int share_of_keys = (count + RANKS - 1) / RANKS, start = rank * share_of_keys;
  const int keys = max(0, min(share_of_keys, count - start));
  if (attends) {
    const int first_page = start / PAGE;
    const int page_count = keys ? (start + keys - 1) / PAGE - first_page + 1 : 0;
    for (int i = t; i < page_count; i += THREADS)
      pages[i] = (int)load(table, first_page + i, WIDE_TABLE);
    if (t == 0) newest_place = load(write, 0, WIDE_WRITES);
  }
  float cosine = 1, sine = 0;  // of the warp's pair of rows of qkv
  const int section = (rank * PAIRS + warp) / 32, turn = (rank * PAIRS + warp) % 32;
  if (section < 2 && warp < PAIRS) {
    const float scale = section ? 1.0f : score_scale;
    cosine = load(cosines + turn) * scale;
    sine = load(sines + turn) * scale;
  }
  float2 x = {0, 0};
  if (owns) {
    const unsigned bits = load((const unsigned*)(embedded + column));
    x = make_float2(low(bits), high(bits));
  }
  __syncthreads();

  auto place = [&](int at) {
    const unsigned token = start % PAGE + at;
    return (int)(pages[token / PAGE] * PAGE + token % PAGE) * KV_HEADS + kv_head;
  };
  if (attends)
    for (int i = t; i < min(keys, KEYS); i += THREADS) places[i] = place(i);
  // A thread copies what it reads: in each of its batch, 8 numbers of a key and value.
  const int own = (warp * WARP_KEYS + lane / 8) * DIM + lane % 8 * 8;
  auto fetch_key = [&](int layer, int at, int i) {
    const long long from = (long long)at * DIM + lane % 8 * 8;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(address(key_part + own + i * 4 * DIM)),
                 "l"(layers[layer].k + from) : "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(address(value_part + own + i * 4 * DIM)),
                 "l"(layers[layer].v + from) : "memory");
  };
  auto fetch_keys = [&](int layer) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int at = warp * WARP_KEYS + i * 4 + lane / 8;
      if (at < keys) fetch_key(layer, places[at], i);
    }
  };
  auto slots_of = [&](int kind, int layer) {
    return slots + ((kind * 2 + (layer & 1)) * RANKS + rank) * CLUSTERS * OWN;
  };
  __syncthreads();
  if (attends) fetch_keys(0);
  meet();  // all blocks of the cluster have started

#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer) {
    const unsigned parity = layer & 1;
    const bool last = layer + 1 == LAYERS;
    Wide w;
    float2 gain = {1, 1};
    if (owns) gain = *(const float2*)(gains + 2 * layer * HIDDEN + column);
    uint4 out_weights[2];
    if (attends) {
      wait(ready, parity);
      wait(ready + 1, parity);
      if (warp < PAIRS) w = wide(pair_at(qkv_part + warp * ROW, PAIRS * ROW, lane));
      if (owns) {
        const uint4* from = (const uint4*)out_part + t;
        out_weights[0] = from[0], out_weights[1] = from[OWNERS];
      }
    }
    if (owns && layer) {
      const float2 sum = gather<CLUSTERS>(slots_of(1, layer - 1), pair, lane, flag);
      x.x += sum.x, x.y += sum.y;
    }
    ++flag;
    if (!attends && layer) fill_mlp(layer, piece);
    if (attends) {
      if (owns) share(x, gain, rows[0], squares[0], links, column, rank, warp, lane);
      asm volatile("cp.async.wait_all;" ::: "memory");
      receive(links, parity, NORM_BYTES);
      if (layer) fill_mlp(layer, piece);
      if (warp < PAIRS) {
        float y = multiply(w, row_at(rows[0], lane), lane);
        y *= inverse(squares[0], eps, lane);
        const float other = __shfl_xor_sync(~0u, y, 16);
        if (lane < 8)
          send(head + 2 * (rank * PAIRS + warp), links + 1, lane,
               make_float2(y * cosine - other * sine, other * cosine + y * sine));
      }
      receive(links + 1, parity, 3 * DIM * 4);

      const int group = lane / 8, dims = lane % 8 * 8;
      const int busy = min((keys + WARP_KEYS - 1) / WARP_KEYS, WARPS);
      const int newest = rank == RANKS - 1 ? min(busy, WARPS - 1) : -1;
      const int used = max(busy, newest + 1);
      float q[8], k[8], v[8];
      columns(head, dims, q);
      Partial found = {LEAST, 0, {}};
#pragma unroll 1
      for (int base = warp * WARP_KEYS; base < keys; base += KEYS) {
        if (base >= KEYS) asm volatile("cp.async.wait_all;" ::: "memory");
        float scores[BATCH];
        float top = found.most;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          scores[i] = LEAST;
          if (base + i * 4 >= keys) continue;
          unpack(*(const uint4*)(key_part + own + i * 4 * DIM), k);
          const float s = score(q, k);
          if (base + i * 4 + group < keys) scores[i] = s;
          top = fmaxf(top, scores[i]);
        }
        found.rescale(top);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
          if (base + i * 4 + group >= keys) continue;
          unpack(*(const uint4*)(value_part + own + i * 4 * DIM), v);
          found.add(exp2f(scores[i] - top), v);
        }
#pragma unroll 1
        for (int i = 0; i < BATCH; ++i) {  // small code: most contexts have one round
          const int at = base + KEYS + i * 4 + group;
          if (at < keys) fetch_key(layer, place(at), i);
        }
      }
      if (warp == newest) {  // the token itself
        columns(head + DIM, dims, k);
        columns(head + 2 * DIM, dims, v);
        const float s = score(q, k), top = fmaxf(s, found.most);
        if (group == 0) {
          found.rescale(top);
          found.add(exp2f(s - top), v);
          if (cluster % GROUP == 0) {
            const long long there = (newest_place * KV_HEADS + kv_head) * DIM + dims;
            *(uint4*)(layers[layer].k + there) = make_uint4(
                packed(k[0], k[1]), packed(k[2], k[3]), packed(k[4], k[5]),
                packed(k[6], k[7]));
            *(uint4*)(layers[layer].v + there) = make_uint4(
                packed(v[0], v[1]), packed(v[2], v[3]), packed(v[4], v[5]),
                packed(v[6], v[7]));
          }
        }
        __syncwarp();
      }
      if (warp < used) {  // groups of the warp
        float top = found.most;
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        found.rescale(top);
#pragma unroll
        for (int i = 8; i < 32; i *= 2) {
          found.total += __shfl_xor_sync(~0u, found.total, i);
#pragma unroll
          for (int j = 0; j < 8; ++j)
            found.sums[j] += __shfl_xor_sync(~0u, found.sums[j], i);
        }
        if (group == 0) {
          float4* to = (float4*)(partials[warp] + dims);
          to[0] = make_float4(found.sums[0], found.sums[1], found.sums[2],
                              found.sums[3]);
          to[1] = make_float4(found.sums[4], found.sums[5], found.sums[6],
                              found.sums[7]);
          if (lane == 0)
            *(float2*)(partials[warp] + DIM) = make_float2(top, found.total);
        }
      }
      __syncthreads();
      if (t < RANKS * DIM / 4) {  // warps of the block: 16 threads for a rank
        const int at = t % 16 * 4, to = t / 16;
        const float most = lane < used ? partials[lane][DIM] : LEAST;
        float top = most;
#pragma unroll
        for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        const float factor = lane < used ? exp2f(most - top) : 0;
        float total = lane < used ? factor * partials[lane][DIM + 1] : 0;
#pragma unroll
        for (int i = 16; i; i /= 2) total += __shfl_xor_sync(~0u, total, i);
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
          if (i >= used) break;
          const float f = __shfl_sync(~0u, factor, i);
          const float4 part = *(const float4*)(partials[i] + at);
          sum.x = fmaf(f, part.x, sum.x), sum.y = fmaf(f, part.y, sum.y);
          sum.z = fmaf(f, part.z, sum.z), sum.w = fmaf(f, part.w, sum.w);
        }
        send(&merged[rank][at], links + 2, to, sum);
        if (at == 0)
          send(&merged[rank][DIM], links + 2, to, make_float2(top, total));
      }
      if (t < DIM) {  // blocks of the cluster
        receive(links + 2, parity, RANKS * (DIM + 2) * 4);
        float top = LEAST, total = 0, sum = 0;
#pragma unroll
        for (int i = 0; i < RANKS; ++i) top = fmaxf(top, merged[i][DIM]);
#pragma unroll
        for (int i = 0; i < RANKS; ++i) {
          const float factor = exp2f(merged[i][DIM] - top);
          total = fmaf(factor, merged[i][DIM + 1], total);
          sum = fmaf(factor, merged[i][t], sum);
        }
        result[t] = sum / total;
      }
      __syncthreads();
      if (owns) {  // output product: a row by 4 threads
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float weights[8], values[8];
          unpack(out_weights[i], weights);
          eight(result + t % 4 * 16 + 8 * i, values);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum = fmaf(weights[j], values[j], sum);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t % 4 == 0)
          publish(slots_of(0, layer) + cluster * OWN + t / 4, __float_as_uint(sum),
                  flag);
      }
      if (!last) fetch_keys(layer + 1);
    }

    uint4 down_quads[UNITS / 4];
    wait(ready + 2, parity);
    wait(ready + 3, parity);
    w = wide(pair_at(up_part + warp * ROW, UNITS * ROW, lane));
    if (owns) {
      gain = *(const float2*)(gains + (2 * layer + 1) * HIDDEN + column);
#pragma unroll
      for (int i = 0; i < UNITS / 4; ++i)
        down_quads[i] = ((const uint4*)down_part)[i * OWNERS + t];
      const float2 sum = gather<HEADS>(slots_of(0, layer), pair, lane, flag);
      x.x += sum.x, x.y += sum.y;
      share(x, gain, rows[1], squares[1], links + 3, column, rank, warp, lane);
    }
    receive(links + 3, parity, NORM_BYTES);
    if (attends && !last) fill_attention(layer + 1, piece);
    float y = multiply(w, row_at(rows[1], lane), lane);
    y *= inverse(squares[1], eps, lane);
    const float second = __shfl_down_sync(~0u, y, 16);
    // Read in the last layer before the block's owners sent what has just been received
    // (compute-sanitizer does not see that: its racecheck reports this array).
    if (lane == 0) activated[warp] = y / (1 + exp2f(-1.44269504f * y)) * second;
    __syncthreads();
    if (owns) {
      float2 sum = {0, 0};
      const unsigned* down_weights = (const unsigned*)down_quads;
#pragma unroll
      for (int i = 0; i < UNITS / 2; ++i) {
        const float2 a = ((const float2*)activated)[i];
        sum.x = fmaf(low(down_weights[i]), a.x, sum.x);
        sum.x = fmaf(high(down_weights[i]), a.y, sum.x);
        sum.y = fmaf(low(down_weights[UNITS / 2 + i]), a.x, sum.y);
        sum.y = fmaf(high(down_weights[UNITS / 2 + i]), a.y, sum.y);
      }
      const float2 next = {__shfl_xor_sync(~0u, sum.x, 1),
                           __shfl_xor_sync(~0u, sum.y, 1)};
      if (t % 2 == 0)
        send(&sums[rank][2 * (t % (OWN / 2))], links + 4, t / (OWN / 2),
             make_float4(sum.x, sum.y, next.x, next.y));
    }
    if (warp <= OWN / 32) {  // whole warps: other threads would go on to the next layer
      receive(links + 4, parity, RANKS * OWN * 4);
      float sum = 0;
      if (t < OWN) {
#pragma unroll
        for (int i = 0; i < RANKS; ++i) sum += sums[i][t];
        publish(slots_of(1, layer) + cluster * OWN + t, __float_as_uint(sum), flag);
      }
      __syncwarp();
    }
  }

  // Final norm and head.
  const int first_row = (blockIdx.x * TURNS * WARPS + warp) * 2;
  auto head_rows = [&](int turn) {
    const int at = min(first_row + turn * 2 * WARPS, VOCAB - 2);
    return pair_at(head_matrix + (long long)at * ROW, ROW, lane);
  };
  Pair next[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) next[i] = head_rows(i);
  if (owns) {
    const float2 gain = *(const float2*)(gains + 2 * LAYERS * HIDDEN + column);
    const float2 sum = gather<CLUSTERS>(slots_of(1, LAYERS - 1), pair, lane, flag);
    x.x += sum.x, x.y += sum.y;
    share(x, gain, rows[0], squares[0], links + 5, column, rank, warp, lane);
  }
  if (blockIdx.x == 0 && t == 0) {
    // Every cluster has sent its last sums: all blocks have started, and read `steps`.
    *steps = flag / FLAGS + 1;
  }
  receive(links + 5, 0, NORM_BYTES);
  const Row row = row_at(rows[0], lane);
  const float scale = inverse(squares[0], eps, lane);
#pragma unroll 1
  for (int i = 0; i < TURNS; i += DEPTH) {
    Pair now[DEPTH];
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      now[j] = next[j];
      if (i + DEPTH < TURNS) next[j] = head_rows(i + DEPTH + j);
    }
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      const float y = multiply(now[j], row, lane) * scale;
      const int at = first_row + (i + j) * 2 * WARPS + lane / 16;
      if (lane % 16 == 0 && at < VOCAB) logits[at] = y;
    }
  }
}
