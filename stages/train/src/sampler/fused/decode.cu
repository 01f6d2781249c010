// One step of decoding in bfloat16: everything between the matrix products.
//
// Compiled at run time for one model: HIDDEN, HEADS, GROUPS (key and value heads), WIDTH (of a head), INNER, VOCABULARY,
// EPSILON and HEAD_NORMS are macros. A value is rounded to bfloat16 wherever torch's own operators round it, so that the
// step differs from the trainer's forward pass in the order of additions alone.
//
// A row of the batch is a slot of the cache; a row whose position is negative is empty, and nothing is read or written for it.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITE __int_as_float(0x7f800000)
#define QUERIES (HEADS * WIDTH)
#define KEYS (GROUPS * WIDTH)
#define SHARED_BY (HEADS / GROUPS)

__device__ __forceinline__ float wide(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u16 narrow(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u32 narrow_pair(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }

__device__ __forceinline__ float rounded(float value) { return wide(narrow(value)); }

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

union Eight {
  uint4 whole;
  u32 pairs[4];
  u16 each[8];
};

// hidden[row] = embedding[token]
extern "C" __global__ void embed(const u16* embedding, const int* tokens, const int* positions, u16* hidden) {
  int row = blockIdx.x;
  if (positions[row] < 0) return;
  const uint4* from = (const uint4*)(embedding + (u64)tokens[row] * HIDDEN);
  uint4* to = (uint4*)(hidden + (u64)row * HIDDEN);
  for (int place = threadIdx.x; place < HIDDEN / 8; place += blockDim.x) to[place] = from[place];
}

// hidden += delta, where there is one; normed = RMS norm of hidden; out = bias, where there is one, as what a matrix product
// adds to.
extern "C" __global__ void add_norm(u16* hidden, const u16* delta, const u16* weight, u16* normed, const u16* bias,
                                    u16* out, int out_width) {
  __shared__ float sums[32];
  int row = blockIdx.x;
  u16* own = hidden + (u64)row * HIDDEN;
  float squares = 0;
  for (int place = threadIdx.x; place < HIDDEN / 8; place += blockDim.x) {
    Eight values;
    values.whole = ((const uint4*)own)[place];
    if (delta != 0) {
      Eight added;
      added.whole = ((const uint4*)(delta + (u64)row * HIDDEN))[place];
      for (int i = 0; i < 8; ++i) values.each[i] = narrow(wide(values.each[i]) + wide(added.each[i]));
      ((uint4*)own)[place] = values.whole;
    }
    for (int i = 0; i < 8; ++i) squares += wide(values.each[i]) * wide(values.each[i]);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
  float scale = rsqrtf(total / HIDDEN + EPSILON);
  for (int place = threadIdx.x; place < HIDDEN / 8; place += blockDim.x) {
    Eight values, factors;
    values.whole = ((const uint4*)own)[place];
    factors.whole = ((const uint4*)weight)[place];
    for (int i = 0; i < 8; ++i) values.each[i] = narrow(wide(values.each[i]) * scale * wide(factors.each[i]));
    ((uint4*)(normed + (u64)row * HIDDEN))[place] = values.whole;
  }
  if (bias != 0)
    for (int place = threadIdx.x; place < out_width / 8; place += blockDim.x)
      ((uint4*)(out + (u64)row * out_width))[place] = ((const uint4*)bias)[place];
}

// Queries and keys are normalised (HEAD_NORMS) and rotated, keys and values stored in the cache. One warp a head; cosines and
// sines are [positions, WIDTH / 2], a layer's keys and values [slots, capacity, GROUPS, WIDTH]. With a capacity of 0 these are
// [rows, GROUPS, WIDTH]: rows of prompts, which are stored elsewhere.
extern "C" __global__ void rotate(const u16* projected, const int* positions, const u16* cosines, const u16* sines,
                                  const u16* query_norm, const u16* key_norm, u16* queries, u16* keys, u16* values,
                                  int capacity) {
  int row = blockIdx.x, head = blockIdx.y * blockDim.y + threadIdx.y, position = positions[row];
  if (position < 0 || head >= HEADS + 2 * GROUPS) return;
  const u16* from = projected + (u64)row * (QUERIES + 2 * KEYS) + head * WIDTH;
  u64 place = (capacity > 0 ? (u64)row * capacity + position : row) * (u64)KEYS;
  if (head >= HEADS + GROUPS) {
    u16* to = values + place + (head - HEADS - GROUPS) * WIDTH;
    for (int i = threadIdx.x; i < WIDTH / 2; i += 32) ((u32*)to)[i] = ((const u32*)from)[i];
    return;
  }
  bool is_query = head < HEADS;
  u16* to = is_query ? queries + (u64)row * QUERIES + head * WIDTH : keys + place + (head - HEADS) * WIDTH;
  float scale = 1;
#if HEAD_NORMS
  const u16* norm = is_query ? query_norm : key_norm;
  float squares = 0;
  for (int i = threadIdx.x; i < WIDTH; i += 32) squares += wide(from[i]) * wide(from[i]);
  scale = rsqrtf(warp_sum(squares) / WIDTH + EPSILON);
#endif
  for (int i = threadIdx.x; i < WIDTH / 2; i += 32) {
    float first = wide(from[i]), second = wide(from[i + WIDTH / 2]);
#if HEAD_NORMS
    first = rounded(first * scale * wide(norm[i]));
    second = rounded(second * scale * wide(norm[i + WIDTH / 2]));
#endif
    float cosine = wide(cosines[(u64)position * (WIDTH / 2) + i]), sine = wide(sines[(u64)position * (WIDTH / 2) + i]);
    to[i] = narrow(rounded(first * cosine) - rounded(second * sine));
    to[i + WIDTH / 2] = narrow(rounded(second * cosine) + rounded(first * sine));
  }
}

__device__ __forceinline__ void multiply_add(float* sum, u32 a0, u32 a2, u32 b0, u32 b1) {
  // Rows 8 to 15 of the first factor are zero: a group has at most eight query heads.
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

#define TILE 32
#define WARPS 4

// Attention of one query a slot over its keys and values, those of positions 0 to its own. A block is one group of query heads
// of one row, and one of `splits` parts of the keys; its warps take tiles of 32 keys in turn. With splits = 1 the result is
// written, else (largest score, sum of weights, weighted values) for `combine`.
//
// Products of matrices are m16n8k16: a thread holds head r = lane / 4 and columns 2c, 2c + 1 with c = lane % 4. Which dimension
// of a head stands at which k, and which at which n, is chosen such that every load is 16 bytes of one row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attend(const u16* queries, const u16* keys, const u16* values, const int* positions, u16* attended, float* parts,
           int capacity, int splits, float scale) {
  __shared__ float largest_of[WARPS][8], weight_of[WARPS][8], values_of[WARPS][8][WIDTH];
  int group = blockIdx.x, row = blockIdx.y, split = blockIdx.z;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  int length = positions[row] + 1;
  int tiles = (length + TILE - 1) / TILE, share = (tiles + splits - 1) / splits;
  int first = split * share, end = min(tiles, first + share);

  uint4 query[WIDTH / 32];
  for (int v = 0; v < WIDTH / 32; ++v) {
    query[v] = make_uint4(0, 0, 0, 0);
    if (r < SHARED_BY && length > 0)
      query[v] = *(const uint4*)(queries + (u64)row * QUERIES + (group * SHARED_BY + r) * WIDTH + v * 32 + c * 8);
  }
  const u16* own_keys = keys + (u64)row * capacity * KEYS + group * WIDTH;
  const u16* own_values = values + (u64)row * capacity * KEYS + group * WIDTH;
  float largest = -INFINITE, weight = 0;
  float sums[WIDTH / 8][4];
  for (int i = 0; i < WIDTH / 8; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;

  for (int tile = first + warp; tile < end; tile += WARPS) {
    int base = tile * TILE;
    uint4 key[4][WIDTH / 32];
    Eight value[8][WIDTH / 64];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int place = min(base + j * 8 + r, length - 1);
#pragma unroll
      for (int v = 0; v < WIDTH / 32; ++v)
        key[j][v] = __ldg((const uint4*)(own_keys + (u64)place * KEYS + v * 32 + c * 8));
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      // Keys 2c, 2c + 1, 2c + 8, 2c + 9 of the first sixteen, then of the others.
      int place = min(base + (k / 4) * 16 + (k / 2 % 2) * 8 + 2 * c + k % 2, length - 1);
#pragma unroll
      for (int v = 0; v < WIDTH / 64; ++v)
        value[k][v].whole = __ldg((const uint4*)(own_values + (u64)place * KEYS + v * 64 + r * 8));
    }
    float scores[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
#pragma unroll
      for (int v = 0; v < WIDTH / 32; ++v) {
        multiply_add(scores[j], query[v].x, query[v].y, key[j][v].x, key[j][v].y);
        multiply_add(scores[j], query[v].z, query[v].w, key[j][v].z, key[j][v].w);
      }
    }
    float highest = largest;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (base + j * 8 + 2 * c + i >= length) scores[j][i] = -INFINITE;
        highest = fmaxf(highest, scores[j][i]);
      }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    float shrink = exp2f((largest - highest) * scale);
    largest = highest;
    weight *= shrink;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) sums[i][0] *= shrink, sums[i][1] *= shrink;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[j][i] = exp2f((scores[j][i] - highest) * scale);
        weight += scores[j][i];
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a0 = narrow_pair(scores[2 * half][0], scores[2 * half][1]);
      u32 a2 = narrow_pair(scores[2 * half + 1][0], scores[2 * half + 1][1]);
      const Eight(*four)[WIDTH / 64] = value + 4 * half;
#pragma unroll
      for (int v = 0; v < WIDTH / 64; ++v)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          u32 x0 = four[0][v].pairs[pair], x1 = four[1][v].pairs[pair];
          u32 x2 = four[2][v].pairs[pair], x3 = four[3][v].pairs[pair];
          multiply_add(sums[v * 8 + 2 * pair], a0, a2, __byte_perm(x0, x1, 0x5410), __byte_perm(x2, x3, 0x5410));
          multiply_add(sums[v * 8 + 2 * pair + 1], a0, a2, __byte_perm(x0, x1, 0x7632), __byte_perm(x2, x3, 0x7632));
        }
    }
  }

  weight += __shfl_xor_sync(~0u, weight, 1);
  weight += __shfl_xor_sync(~0u, weight, 2);
  if (c == 0) largest_of[warp][r] = largest, weight_of[warp][r] = weight;
  for (int i = 0; i < WIDTH / 8; ++i)
    for (int n = 0; n < 2; ++n) values_of[warp][r][(i / 8) * 64 + (2 * c + n) * 8 + i % 8] = sums[i][n];
  __syncthreads();
  for (int place = threadIdx.x; place < SHARED_BY * WIDTH; place += blockDim.x) {
    int head = place / WIDTH, dimension = place % WIDTH;
    float highest = -INFINITE, total = 0, sum = 0;
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, largest_of[w][head]);
    for (int w = 0; w < WARPS; ++w) {
      if (largest_of[w][head] == -INFINITE) continue;
      float factor = exp2f((largest_of[w][head] - highest) * scale);
      total += weight_of[w][head] * factor;
      sum += values_of[w][head][dimension] * factor;
    }
    int query_head = group * SHARED_BY + head;
    if (splits == 1) {
      attended[(u64)row * QUERIES + query_head * WIDTH + dimension] = narrow(total > 0 ? sum / total : 0);
    } else {
      float* part = parts + (((u64)row * HEADS + query_head) * splits + split) * (WIDTH + 2);
      if (dimension == 0) part[0] = highest, part[1] = total;
      part[2 + dimension] = sum;
    }
  }
}

// The parts of `attend`, put together. A block is one head of one row.
extern "C" __global__ void combine(const float* parts, u16* attended, int splits, float scale) {
  int head = blockIdx.x, row = blockIdx.y;
  const float* own = parts + ((u64)row * HEADS + head) * splits * (WIDTH + 2);
  float highest = -INFINITE, total = 0;
  for (int split = 0; split < splits; ++split) highest = fmaxf(highest, own[split * (WIDTH + 2)]);
  for (int dimension = threadIdx.x; dimension < WIDTH; dimension += blockDim.x) {
    float sum = 0;
    total = 0;
    for (int split = 0; split < splits; ++split) {
      const float* part = own + split * (WIDTH + 2);
      if (part[0] == -INFINITE) continue;
      float factor = exp2f((part[0] - highest) * scale);
      total += part[1] * factor;
      sum += part[2 + dimension] * factor;
    }
    attended[(u64)row * QUERIES + head * WIDTH + dimension] = narrow(total > 0 ? sum / total : 0);
  }
}

// inner = silu(gate) · up, from [gate, up] of each row.
extern "C" __global__ void gated(const u16* both, u16* inner) {
  int place = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (place >= INNER / 8) return;
  const uint4* from = (const uint4*)(both + (u64)row * 2 * INNER);
  Eight gate, up;
  gate.whole = from[place];
  up.whole = from[place + INNER / 8];
  for (int i = 0; i < 8; ++i) {
    float x = wide(gate.each[i]);
    gate.each[i] = narrow(rounded(x / (1 + expf(-x))) * wide(up.each[i]));
  }
  ((uint4*)(inner + (u64)row * INNER))[place] = gate.whole;
}

// Philox 4x32 with ten rounds, as in random.rs: the number in (0, 1) of a key's `count`-th token.
__device__ double uniform(u32 low, u32 high, u32 count) {
  u32 block[4] = {count, 0, 0, 0};
  for (int round = 0; round < 10; ++round) {
    if (round > 0) low += 0x9E3779B9u, high += 0xBB67AE85u;
    u64 first = (u64)0xD2511F53u * block[0], second = (u64)0xCD9E8D57u * block[2];
    u32 next[4] = {(u32)(second >> 32) ^ block[1] ^ low, (u32)second, (u32)(first >> 32) ^ block[3] ^ high, (u32)first};
    for (int i = 0; i < 4; ++i) block[i] = next[i];
  }
  u64 bits = ((u64)block[0] << 32 | block[1]) >> 11;
  return ((double)bits + 0.5) / 9007199254740992.0;
}

#define SAMPLERS 512
#define SEGMENTS (SAMPLERS / 32)
#define SEGMENT ((VOCABULARY / 8 + SEGMENTS - 1) / SEGMENTS)  // of vectors of eight logits
#define OWN ((SEGMENT + SAMPLERS - 1) / SAMPLERS)

// Draws a token of each row from its whole distribution, or takes the most likely one at temperature 0: the first whose
// cumulative probability in the order of ids exceeds the row's random number. Each warp adds up one segment of the ids; then
// all threads look into the one where it is.
extern "C" __global__ void __launch_bounds__(SAMPLERS)
    sample(const u16* logits, const int* positions, const float* temperatures, const u32* keys, const int* counts,
           int* tokens, float* log_probabilities) {
  __shared__ float largest_of[SEGMENTS];
  __shared__ double weight_of[SEGMENTS];
  __shared__ int top_at[SEGMENTS], found, nearest;
  int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (positions[row] < 0) return;
  const uint4* own = (const uint4*)(logits + (u64)row * VOCABULARY);
  bool is_greedy = temperatures[row] == 0;
  float temperature = is_greedy ? 1 : temperatures[row];
  float largest = -INFINITE, weight = 0;
  int top = 0;
  int stop = min((warp + 1) * SEGMENT, VOCABULARY / 8);
  for (int place = warp * SEGMENT + lane; place < stop; place += 32) {
    Eight eight;
    eight.whole = own[place];
    float before = largest;
    float scaled[8];
    for (int i = 0; i < 8; ++i) {
      scaled[i] = wide(eight.each[i]) / temperature;
      if (scaled[i] > largest) largest = scaled[i], top = place * 8 + i;
    }
    if (before > -INFINITE) weight *= expf(before - largest);
    if (largest > -INFINITE)
      for (int i = 0; i < 8; ++i) weight += expf(scaled[i] - largest);
  }
  float highest = largest;
  for (int step = 16; step > 0; step >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  double wider = largest > -INFINITE ? (double)weight * exp((double)largest - (double)highest) : 0;
  for (int step = 16; step > 0; step >>= 1) wider += __shfl_xor_sync(~0u, wider, step);
  int first = largest == highest ? top : 0x7fffffff;
  for (int step = 16; step > 0; step >>= 1) first = min(first, __shfl_xor_sync(~0u, first, step));
  if (lane == 0) largest_of[warp] = highest, weight_of[warp] = wider, top_at[warp] = first;
  if (threadIdx.x == 0) found = 0x7fffffff, nearest = 0;
  __syncthreads();
  highest = -INFINITE;
  int best = 0;
  for (int segment = 0; segment < SEGMENTS; ++segment)
    if (largest_of[segment] > highest) highest = largest_of[segment], best = top_at[segment];
  double total = 0;
  for (int segment = 0; segment < SEGMENTS; ++segment)
    if (largest_of[segment] > -INFINITE) total += weight_of[segment] * exp((double)largest_of[segment] - (double)highest);
  int token = best;
  if (!is_greedy) {
    double target = uniform(keys[2 * row], keys[2 * row + 1], counts[row]) * total, before = 0;
    int segment = 0, last = 0;
    for (int each = 0; each < SEGMENTS; ++each) {
      if (largest_of[each] == -INFINITE) continue;
      double own_weight = weight_of[each] * exp((double)largest_of[each] - (double)highest);
      last = each;
      if (before + own_weight > target) break;
      before += own_weight;
    }
    segment = last;
    // Each thread adds up some consecutive ids of that segment, then all add up what lies before them.
    __shared__ double sums[SEGMENTS];
    int begin = segment * SEGMENT + threadIdx.x * OWN, end = min(begin + OWN, min((segment + 1) * SEGMENT, VOCABULARY / 8));
    double sum = 0;
    for (int place = begin; place < end; ++place) {
      Eight eight;
      eight.whole = own[place];
      for (int i = 0; i < 8; ++i) sum += exp((double)(wide(eight.each[i]) / temperature) - (double)highest);
    }
    double through = sum;
    for (int step = 1; step < 32; step <<= 1) {
      double other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    for (int each = 0; each < warp; ++each) through += sums[each];
    double cumulative = before + through - sum;
    if (sum > 0) {
      int own_last = -1;
      for (int place = begin; place < end; ++place) {
        Eight eight;
        eight.whole = own[place];
        for (int i = 0; i < 8; ++i) {
          double share = exp((double)(wide(eight.each[i]) / temperature) - (double)highest);
          cumulative += share;
          if (share > 0) own_last = place * 8 + i;
          if (cumulative > target) {
            atomicMin(&found, place * 8 + i);
            place = end;
            break;
          }
        }
      }
      // Two ways of adding up may differ in their last bits: then it is the last id that has any weight.
      if (own_last >= 0) atomicMax(&nearest, own_last);
    }
    __syncthreads();
    token = found != 0x7fffffff ? found : nearest;
  }
  if (threadIdx.x == 0) {
    float chosen = wide(logits[(u64)row * VOCABULARY + token]) / temperature;
    tokens[row] = token;
    log_probabilities[row] = (float)((double)chosen - (double)highest - log(total));
  }
}
