// Kernels for a training step on a CPU, each one pass over memory: causal attention with rotary
// positions and normalized queries and keys, RMSNorm, LayerNorm, token shift, squared ReLU, GELU,
// dropout, cross-entropy; and linear layers where torch's matrix products are slow (`linear` in ops.py).
//
// Built once for each type of number, `real`, and called by native.py: with -DBF16 for bfloat16, on
// CPUs with AVX-512 BF16, whose one instruction multiplies 16 pairs of it and adds both products to
// 16 float32 sums; else for float32, on any CPU with AVX2 or AVX-512. tests/test_kernels.py compares
// everything with PyTorch. Sizes: B sequences, T characters, H heads of D, a multiple of 16 from 32
// on; arrays are dense. `threads` is how many to use.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, HEIGHT = 8 };  // float32 in a register; rows of a tile of a product
#else
enum { LANES = 8, HEIGHT = 4 };  // half the registers, too
#endif
enum { ROWS = 32 };  // queries of attention, or rows of x in `linear`, at once: they stay in the cache

// GCC's and Clang's own vectors: + - * / < and a single number work on each lane.
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

static const float LOG2_E = 1.44269504f;
static const float NORM_EPS = 1e-6f, LAYER_NORM_EPS = 1e-5f;  // as in native.py

static inline vector get(const float *p) {
    vector x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void put(float *p, vector x) { memcpy(p, &x, sizeof x); }

static inline vector broadcast(float x) { return x - (vector){0}; }

// A `group` is what one lane multiplies, TOGETHER numbers along the inner dimension of a product.
#ifdef BF16
typedef uint16_t real;
typedef uint32_t group __attribute__((aligned(2)));  // an array of `real` may begin anywhere
enum { TOGETHER = 2 };

static inline vector load(const real *p) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return (vector)_mm512_slli_epi32(bits, 16);
}

static inline void store(real *p, vector x) {
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

// sum + the product of one group with those of 16 columns.
static inline vector multiply(vector sum, group one, const group *columns) {
    __m512bh left = (__m512bh)_mm512_set1_epi32(one);
    return (vector)_mm512_dpbf16_ps((__m512)sum, left, (__m512bh)_mm512_loadu_si512(columns));
}
#else
typedef float real, group;
enum { TOGETHER = 1 };

static inline vector load(const real *p) { return get(p); }

static inline void store(real *p, vector x) { put(p, x); }

static inline vector multiply(vector sum, group one, const group *columns) {
    return one * get(columns) + sum;
}
#endif

// What the compiler's vectors lack. `maximum` gives b where one of both is a nan.
#ifdef __AVX512F__
static inline vector maximum(vector a, vector b) {
    return (vector)_mm512_max_ps((__m512)a, (__m512)b);
}

static inline vector where_positive(vector x, vector yes, vector no) {
    __mmask16 positive = _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return (vector)_mm512_mask_blend_ps(positive, (__m512)no, (__m512)yes);
}

static inline float sum_of(vector x) { return _mm512_reduce_add_ps((__m512)x); }

static inline float largest_of(vector x) { return _mm512_reduce_max_ps((__m512)x); }
#else
static inline vector maximum(vector a, vector b) {
    return (vector)_mm256_max_ps((__m256)a, (__m256)b);
}

static inline vector where_positive(vector x, vector yes, vector no) {
    __m256 positive = _mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return (vector)_mm256_blendv_ps((__m256)no, (__m256)yes, positive);
}

static inline float sum_of(vector x) {
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

static inline float largest_of(vector x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}
#endif

// 2^x, with a relative error below 3e-7, for x from -126 to 127. Below, the result is at most 2^-126, for
// -inf it is 0; above 127, it may be wrong. A nan stays one.
static inline vector exp2_of(vector x) {
#ifdef __AVX512F__
    vector rest = (vector)_mm512_reduce_ps((__m512)x, 0), whole = x - rest;
#else
    const float round = 12582912;  // 1.5 * 2^23: what is added to it loses its fraction
    x = maximum(broadcast(-127), x);
    vector whole = x + round - round, rest = x - whole;
#endif
    // The polynomial nearest to 2^rest, |rest| <= 1/2, of those that give 1 for 0.
    vector sum = broadcast(1.32647459e-3f);
    sum = sum * rest + 9.67151299e-3f;
    sum = sum * rest + 5.55073358e-2f;
    sum = sum * rest + 2.40222424e-1f;
    sum = sum * rest + 6.93147004e-1f;
    sum = sum * rest + 1.0f;
#ifdef __AVX512F__
    return (vector)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
    integers exponent = (__builtin_convertvector(whole, integers) + 127) << 23;
    return sum * (vector)exponent;
#endif
}

// c (HEIGHT, LANES V) = a b, or c += a b with `accumulate`, over `groups` of the inner dimension.
// Group p of row i of a is a[i * row + p * step]; group p of column j of b is b[p * ldb + j].
#define TILE(V)                                                                                    \
    static inline __attribute__((always_inline)) void tile_##V(                                    \
        long groups, const group *a, long row, long step, const group *b, long ldb, float *c,      \
        long ldc, int accumulate) {                                                                \
        vector sum[HEIGHT][V];                                                                     \
        for (int i = 0; i < HEIGHT; i++)                                                           \
            for (int v = 0; v < V; v++)                                                            \
                sum[i][v] = accumulate ? get(c + i * ldc + v * LANES) : broadcast(0);              \
        for (long p = 0; p < groups; p++)                                                          \
            for (int i = 0; i < HEIGHT; i++)                                                       \
                for (int v = 0; v < V; v++)                                                        \
                    sum[i][v] =                                                                    \
                        multiply(sum[i][v], a[i * row + p * step], b + p * ldb + v * LANES);       \
        for (int i = 0; i < HEIGHT; i++)                                                           \
            for (int v = 0; v < V; v++) put(c + i * ldc + v * LANES, sum[i][v]);                   \
    }
TILE(1)
TILE(2)

// The same for c (rows, columns), rows a multiple of HEIGHT and columns of LANES.
static void product(long rows, long columns, long groups, const group *a, long row, long step,
                    const group *b, long ldb, float *c, long ldc, int accumulate) {
    for (long i = 0; i < rows; i += HEIGHT) {
        const group *ai = a + i * row;
        float *ci = c + i * ldc;
        long j = 0;
        for (; j + 2 * LANES <= columns; j += 2 * LANES)
            tile_2(groups, ai, row, step, b + j, ldb, ci + j, ldc, accumulate);
        for (; j < columns; j += LANES)
            tile_1(groups, ai, row, step, b + j, ldb, ci + j, ldc, accumulate);
    }
}

#ifdef BF16
// y (rows / 2, width) = each two rows of x (rows, stride) as groups; width a multiple of 16.
static void pair_rows(long rows, long width, long stride, const real *x, group *y) {
    for (long i = 0; i < rows; i += 2, x += 2 * stride)
        for (long d = 0; d < width; d += 16, y += 16) {
            const void *first = x + d, *second = x + d + stride;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(first));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(second));
            _mm512_storeu_si512(y, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}
#endif

// (rows / TOGETHER, width): TOGETHER rows of x (rows, width) as groups: written to y, or x itself where a
// group is one number.
static const group *group_rows(long rows, long width, const real *x, group *y) {
#ifdef BF16
    pair_rows(rows, width, width, x, y);
    return y;
#else
    return x;
#endif
}

// y (width / TOGETHER, rows): the groups along each row of x (rows, width), transposed; rows a
// multiple of 16.
static void group_columns(long rows, long width, const real *x, group *y) {
    const group *groups = (const group *)x;
    width /= TOGETHER;
    for (long first = 0; first < rows; first += 16)
        for (long d = 0; d < width; d++)
            for (long i = first; i < first + 16; i++) y[d * rows + i] = groups[i * width + d];
}

// Prefetches `count` numbers from x on, some of which may lie behind the last one of an array.
static inline void fetch(const real *x, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(real)) __builtin_prefetch(x + i);
}

// Where the first row of one of B H heads is in an array (B, T, parts, H, D).
static inline long head_at(long head, long T, long parts, long H, long D) {
    return (head / H * T * parts * H + head % H) * D;
}

// y (padded, D): one head's rows of x (T, stride), with zeros after them. Where there are cosines
// and sines (T, D / 2), each row is turned by its position's and divided by its root mean square;
// r (T) is what it was multiplied by.
static void read_head(long T, long padded, long D, long stride, const real *x, const float *cosine,
                      const float *sine, real *y, float *r) {
    long half = D / 2;
    for (long t = 0; t < T; t++) {
        const real *from = x + t * stride;
        real *to = y + t * D;
        if (!cosine) {
            memcpy(to, from, D * sizeof(real));
            continue;
        }
        vector squares = broadcast(0);
        for (long d = 0; d < D; d += LANES) squares += load(from + d) * load(from + d);
        r[t] = 1 / sqrtf(sum_of(squares) / D + NORM_EPS);
        for (long i = 0; i < half; i += LANES) {
            long d = i < half - LANES ? i : half - LANES;  // the last ones may overlap
            vector a = load(from + d), b = load(from + d + half);
            vector c = get(cosine + t * half + d) * r[t];
            vector s = get(sine + t * half + d) * r[t];
            store(to + d, a * c + b * s);
            store(to + d + half, b * c - a * s);
        }
    }
    memset(y + T * D, 0, (padded - T) * D * sizeof(real));
}

// Backward of read_head: from factor g (T, D), the gradient of y, that of x into dx (T,
// stride). y and r are read_head's.
static void write_gradient(long T, long D, long stride, const float *g, float factor, const real *y,
                           const float *r, const float *cosine, const float *sine, real *dx) {
    long half = D / 2;
    for (long t = 0; t < T; t++) {
        const float *from = g + t * D;
        const real *made = y + t * D;
        real *to = dx + t * stride;
        if (!cosine) {
            for (long d = 0; d < D; d += LANES) store(to + d, get(from + d) * factor);
            continue;
        }
        vector dots = broadcast(0);
        for (long d = 0; d < D; d += LANES) dots += get(from + d) * load(made + d);
        float mean = -sum_of(dots) / D;
        float whole = r[t] * factor;
        for (long i = 0; i < half; i += LANES) {
            long d = i < half - LANES ? i : half - LANES;
            vector a = get(from + d), b = get(from + d + half);
            a = load(made + d) * mean + a;
            b = load(made + d + half) * mean + b;
            vector c = get(cosine + t * half + d) * whole;
            vector s = get(sine + t * half + d) * whole;
            store(to + d, a * c - b * s);
            store(to + d + half, b * c + a * s);
        }
    }
}

// Scores (ROWS, up to key `first` + ROWS) of the queries from `first` on, before they are scaled: a
// query does not see the keys after it.
static void score(long first, long D, long padded, const real *q, const group *k, float *scores) {
    long groups = D / TOGETHER;
    product(ROWS, first + ROWS, groups, (const group *)q + first * groups, groups, 1, k, padded,
            scores, padded, 0);
    for (long i = 0; i < ROWS; i++)
        for (long j = i + 1; j < ROWS; j++) scores[i * padded + first + j] = -INFINITY;
}

#define ARRAY(type, name, count)        \
    type *name = (type *)(memory + used); \
    used += ((count) * sizeof(type) + 63) / 64 * 64

// out (B, T, H, D) = softmax(q k' / sqrt(D)) v for qkv (B, T, 3, H, D). Saved for backward: the
// highest score of each softmax and the binary logarithm of its sum, (B, H, T) each. Not one sum of
// both, in which a high score would drown the logarithm. Returns 0, as all functions do here, or 1
// if memory ran out.
int attention(long threads, long B, long T, long H, long D, const real *qkv, const float *cosine,
              const float *sine, real *out, float *highest, float *log_sum) {
    long padded = (T + ROWS - 1) / ROWS * ROWS, C = H * D;
    float scale = LOG2_E / sqrtf(D);  // scores are binary logarithms
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        long used = 0;
        long bytes = sizeof(real) * padded * (4 * D + ROWS);
        bytes += sizeof(float) * (padded * (ROWS + 1) + ROWS * D);
        char *memory = aligned_alloc(64, bytes / 64 * 64 + 1024);
        ARRAY(real, q, padded * D);
        ARRAY(real, kv, padded * D);
        ARRAY(group, k, padded * D / TOGETHER);
        ARRAY(group, v_room, padded * D / TOGETHER);
        ARRAY(float, r, padded);
        ARRAY(float, scores, ROWS * padded);
        ARRAY(real, p, ROWS * padded);
        ARRAY(float, sums, ROWS * D);
        failed = memory == NULL;
#pragma omp for
        for (long head = 0; head < B * H; head++) {
            if (failed) continue;
            const real *x = qkv + head_at(head, T, 3, H, D);
            const real *next_x = qkv + head_at(head + 1, T, 3, H, D);
            real *y = out + head_at(head, T, 1, H, D);
            read_head(T, padded, D, 3 * C, x, cosine, sine, q, r);
            read_head(T, padded, D, 3 * C, x + C, cosine, sine, kv, r);
            group_columns(padded, D, kv, k);
            read_head(T, padded, D, 3 * C, x + 2 * C, NULL, NULL, kv, NULL);
            const group *v = group_rows(padded, D, kv, v_room);
            for (long first = 0; first < T; first += ROWS) {
                long seen = first + ROWS, rows = T - first < ROWS ? T - first : ROWS;
                float total[ROWS];
                score(first, D, padded, q, k, scores);
                for (long i = 0; i < ROWS; i++) {
                    const float *row = scores + i * padded;
                    // The next head's rows are 3 C apart, which the CPU's own prefetching does not follow.
                    for (long part = 0; part < 3; part++)
                        fetch(next_x + ((first + i) * 3 + part) * C, D);
                    vector most = get(row);
                    for (long j = LANES; j < seen; j += LANES)
                        most = maximum(most, get(row + j));
                    float largest = largest_of(most);
                    vector sum = broadcast(0);
                    for (long j = 0; j < seen; j += LANES) {
                        // In this order the largest is exactly 0, however large.
                        vector e = exp2_of((get(row + j) - largest) * scale);
                        sum = sum + e;
                        store(p + i * padded + j, e);
                    }
                    total[i] = sum_of(sum);
                    if (i < rows) {
                        highest[head * T + first + i] = largest;
                        log_sum[head * T + first + i] = log2f(total[i]);
                    }
                }
                product(ROWS, D, seen / TOGETHER, (group *)p, padded / TOGETHER, 1, v, D, sums, D, 0);
                for (long i = 0; i < rows; i++)
                    for (long d = 0; d < D; d += LANES)
                        store(y + (first + i) * C + d,
                              get(sums + i * D + d) / total[i]);
            }
        }
        free(memory);
    }
    return failed;
}

// `attention` of one more character of each sequence, that at position `past`: out (B, H, D) for qkv
// (B, 3, H, D) and what keys and values (B, H, block, D) hold of the `past` characters before it.
// Its own are written behind those. cosine and sine (D / 2) are of its position.
int attention_step(long threads, long B, long H, long D, long block, long past, const real *qkv,
                   const float *cosine, const float *sine, real *keys, real *values, real *out) {
    long seen = past + 1, padded = (seen + LANES - 1) / LANES * LANES;
    float scale = LOG2_E / sqrtf(D);  // scores are binary logarithms
    int failed = 0;
    if (B * H * seen < 4096) threads = 1;  // waking others takes longer
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        long used = 0;
        char *memory = aligned_alloc(64, (sizeof(float) * (padded + 2 * D) + 255) / 64 * 64);
        ARRAY(float, scores, padded);
        ARRAY(float, sums, D);
        ARRAY(real, q, D);
        failed = memory == NULL;
#pragma omp for
        for (long head = 0; head < B * H; head++) {
            if (failed) continue;
            const real *x = qkv + (head / H * 3 * H + head % H) * D;
            real *k = keys + head * block * D, *v = values + head * block * D;
            float r;
            read_head(1, 1, D, D, x, cosine, sine, q, &r);
            read_head(1, 1, D, D, x + H * D, cosine, sine, k + past * D, &r);
            memcpy(v + past * D, x + 2 * H * D, D * sizeof(real));
            for (long j = 0; j < seen; j++) {
                vector sum = broadcast(0);
                for (long d = 0; d < D; d += LANES) sum += load(q + d) * load(k + j * D + d);
                scores[j] = sum_of(sum) * scale;
            }
            for (long j = seen; j < padded; j++) scores[j] = -INFINITY;
            vector most = get(scores), total = broadcast(0);
            for (long j = LANES; j < padded; j += LANES) most = maximum(most, get(scores + j));
            float highest = largest_of(most);
            for (long j = 0; j < padded; j += LANES) {
                vector e = exp2_of(get(scores + j) - highest);
                total += e;
                put(scores + j, e);
            }
            float reciprocal = 1 / sum_of(total);
            memset(sums, 0, D * sizeof(float));
            for (long j = 0; j < seen; j++)
                for (long d = 0; d < D; d += LANES)
                    put(sums + d, load(v + j * D + d) * scores[j] + get(sums + d));
            for (long d = 0; d < D; d += LANES)
                store(out + head * D + d, get(sums + d) * reciprocal);
        }
        free(memory);
    }
    return failed;
}

// dqkv, the gradient of `attention`'s qkv, from dout, that of its out. The weights are computed
// again rather than kept (Dao et al., "FlashAttention", 2022).
int attention_backward(long threads, long B, long T, long H, long D, const real *qkv,
                       const float *cosine, const float *sine, const real *out,
                       const float *highest, const float *log_sum, const real *dout,
                       real *dqkv) {
    long padded = (T + ROWS - 1) / ROWS * ROWS, C = H * D, groups = D / TOGETHER;
    float root = 1 / sqrtf(D), scale = LOG2_E * root;  // scores are binary logarithms
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        long used = 0;
        long bytes = sizeof(real) * padded * (9 * D + 4 * ROWS);
        bytes += sizeof(float) * (padded * (2 * D + 2 * ROWS + 2) + ROWS * D);
        char *memory = aligned_alloc(64, bytes / 64 * 64 + 1536);
        ARRAY(real, q, padded * D);
        ARRAY(real, k, padded * D);
        ARRAY(real, v, padded * D);
        ARRAY(real, g, padded * D);
        ARRAY(group, q_room, padded * D / TOGETHER);
        ARRAY(group, k_room, padded * D / TOGETHER);
        ARRAY(group, g_room, padded * D / TOGETHER);
        ARRAY(group, k_columns, padded * D / TOGETHER);
        ARRAY(group, v_columns, padded * D / TOGETHER);
        ARRAY(float, q_r, padded);
        ARRAY(float, k_r, padded);
        ARRAY(float, scores, ROWS * padded);
        ARRAY(float, dp, ROWS * padded);
        ARRAY(real, p, ROWS * padded);
        ARRAY(real, ds, ROWS * padded);
        ARRAY(group, p_room, ROWS / TOGETHER * padded);
        ARRAY(group, ds_room, ROWS / TOGETHER * padded);
        ARRAY(float, dq, ROWS * D);
        ARRAY(float, dk, padded * D);
        ARRAY(float, dv, padded * D);
        failed = memory == NULL;
#pragma omp for
        for (long head = 0; head < B * H; head++) {
            if (failed) continue;
            long here = head_at(head, T, 1, H, D), next = head_at(head + 1, T, 1, H, D);
            const real *y = out + here, *dy = dout + here;
            const real *x = qkv + head_at(head, T, 3, H, D);
            const real *next_x = qkv + head_at(head + 1, T, 3, H, D);
            real *dx = dqkv + (x - qkv);
            read_head(T, padded, D, 3 * C, x, cosine, sine, q, q_r);
            read_head(T, padded, D, 3 * C, x + C, cosine, sine, k, k_r);
            read_head(T, padded, D, 3 * C, x + 2 * C, NULL, NULL, v, NULL);
            read_head(T, padded, D, C, dy, NULL, NULL, g, NULL);
            const group *q_rows = group_rows(padded, D, q, q_room);
            const group *k_rows = group_rows(padded, D, k, k_room);
            const group *g_rows = group_rows(padded, D, g, g_room);
            group_columns(padded, D, k, k_columns);
            group_columns(padded, D, v, v_columns);
            memset(dk, 0, padded * D * sizeof(float));
            memset(dv, 0, padded * D * sizeof(float));
            for (long first = 0; first < T; first += ROWS) {
                long seen = first + ROWS, rows = T - first < ROWS ? T - first : ROWS;
                score(first, D, padded, q, k_columns, scores);
                product(ROWS, seen, groups, (group *)g + first * groups, groups, 1, v_columns, padded,
                        dp, padded, 0);
                for (long i = 0; i < ROWS; i++) {
                    long at = i * padded;
                    if (i >= rows) {
                        memset(p + at, 0, seen * sizeof(real));
                        memset(ds + at, 0, seen * sizeof(real));
                        continue;
                    }
                    // As in `attention`.
                    fetch(out + next + (first + i) * C, D);
                    fetch(dout + next + (first + i) * C, D);
                    for (long part = 0; part < 3; part++)
                        fetch(next_x + ((first + i) * 3 + part) * C, D);
                    vector dots = broadcast(0);  // of out and its gradient: the softmax's own part
                    for (long d = 0; d < D; d += LANES)
                        dots = load(g + (first + i) * D + d) * load(y + (first + i) * C + d) + dots;
                    float mean = sum_of(dots);
                    float largest = highest[head * T + first + i];
                    float sum = log_sum[head * T + first + i];
                    for (long j = at; j < at + seen; j += LANES) {
                        vector weight = exp2_of((get(scores + j) - largest) * scale - sum);
                        vector change = get(dp + j) - mean;
                        store(p + j, weight);
                        store(ds + j, weight * change);
                    }
                }
                const group *p_rows = group_rows(ROWS, padded, p, p_room);
                const group *ds_rows = group_rows(ROWS, padded, ds, ds_room);
                product(seen, D, ROWS / TOGETHER, p_rows, 1, padded, g_rows + first * groups, D, dv, D,
                        1);
                product(seen, D, ROWS / TOGETHER, ds_rows, 1, padded, q_rows + first * groups, D, dk, D,
                        1);
                product(ROWS, D, seen / TOGETHER, (group *)ds, padded / TOGETHER, 1, k_rows, D, dq, D,
                        0);
                const float *c = cosine ? cosine + first * D / 2 : NULL;
                const float *s = cosine ? sine + first * D / 2 : NULL;
                write_gradient(rows, D, 3 * C, dq, root, q + first * D, q_r + first, c, s,
                               dx + first * 3 * C);
            }
            write_gradient(T, D, 3 * C, dk, root, k, k_r, cosine, sine, dx + C);
            write_gradient(T, D, 3 * C, dv, 1, v, NULL, NULL, NULL, dx + 2 * C);
        }
        free(memory);
    }
    return failed;
}

// y (rows, C) = r x, r (rows) = 1 / sqrt(mean(x^2) + eps); C a multiple of 16.
int rms_norm(long threads, long rows, long C, const real *x, real *y, float *r) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        vector squares = broadcast(0);
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            squares = load(x + c) * load(x + c) + squares;
        float ri = 1 / sqrtf(sum_of(squares) / C + NORM_EPS);
        if (r) r[i] = ri;
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            store(y + c, load(x + c) * ri);
    }
    return 0;
}

// dx = r (dy - y mean(y dy)).
int rms_norm_backward(long threads, long rows, long C, const real *dy, const real *y,
                      const float *r, real *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        vector dots = broadcast(0);
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            dots = load(dy + c) * load(y + c) + dots;
        float mean = -sum_of(dots) / C;
        for (long c = i * C; c < (i + 1) * C; c += LANES) {
            vector z = load(y + c) * mean + load(dy + c);
            store(dx + c, z * r[i]);
        }
    }
    return 0;
}

static inline vector standard(vector x, float mean, float r) {
    return (x - mean) * r;
}

// y (rows, C) = z w + b for z = r (x - mean), r (rows) = 1 / sqrt(variance + eps); C a multiple of
// 16. There may be no b (NULL).
int layer_norm(long threads, long rows, long C, const real *x, const float *w, const float *b,
               real *y, float *mean, float *r) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        const real *xi = x + i * C;
        vector sum = broadcast(0), squares = broadcast(0);
        for (long c = 0; c < C; c += LANES) sum = sum + load(xi + c);
        mean[i] = sum_of(sum) / C;
        for (long c = 0; c < C; c += LANES) {
            vector off = load(xi + c) - mean[i];
            squares = off * off + squares;
        }
        r[i] = 1 / sqrtf(sum_of(squares) / C + LAYER_NORM_EPS);
        for (long c = 0; c < C; c += LANES) {
            vector z = standard(load(xi + c), mean[i], r[i]);
            vector base = b ? get(b + c) : broadcast(0);
            store(y + i * C + c, z * get(w + c) + base);
        }
    }
    return 0;
}

// dx = r (g - mean(g) - z mean(z g)) for g = w dy; dw (C) and, behind it, db (C), which are sums
// over rows, taken in parts (ceil(rows / 64), 2, C): threads do not change their order.
int layer_norm_backward(long threads, long rows, long C, const real *dy, const real *x,
                        const float *w, const float *mean, const float *r, real *dx, float *parts,
                        float *dw) {
    long count = (rows + 63) / 64;
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < count; part++) {
        float *dwp = parts + part * 2 * C, *dbp = dwp + C;
        memset(dwp, 0, 2 * C * sizeof(float));
        for (long i = part * 64; i < rows && i < part * 64 + 64; i++) {
            vector sum = broadcast(0), dots = broadcast(0);
            for (long c = 0; c < C; c += LANES) {
                vector d = load(dy + i * C + c), g = d * get(w + c);
                vector z = standard(load(x + i * C + c), mean[i], r[i]);
                sum = sum + g;
                dots = g * z + dots;
                put(dwp + c, d * z + get(dwp + c));
                put(dbp + c, d + get(dbp + c));
            }
            float mean_g = sum_of(sum) / C;
            float mean_zg = sum_of(dots) / C;
            for (long c = 0; c < C; c += LANES) {
                vector g = load(dy + i * C + c) * get(w + c);
                vector z = standard(load(x + i * C + c), mean[i], r[i]);
                vector rest = g - mean_g - z * mean_zg;
                store(dx + i * C + c, rest * r[i]);
            }
        }
    }
    memset(dw, 0, 2 * C * sizeof(float));
    for (long part = 0; part < count; part++)
        for (long c = 0; c < 2 * C; c++) dw[c] += parts[part * 2 * C + c];
    return 0;
}

// y (B, T, C) = x + w (C) times x of the position before, if there is one; C a multiple of 16.
int token_shift(long threads, long B, long T, long C, const real *x, const float *w, real *y) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < B * T; i++) {
        const real *xi = x + i * C;
        for (long c = 0; c < C; c += LANES) {
            vector before = i % T ? load(xi + c - C) : broadcast(0);
            store(y + i * C + c, before * get(w + c) + load(xi + c));
        }
    }
    return 0;
}

// dx = dy + w times dy of the position after, if there is one; dw (C), the sum of dy times x of the
// position before, taken in parts (ceil(B T / 64), C): threads do not change its order.
int token_shift_backward(long threads, long B, long T, long C, const real *dy, const real *x,
                         const float *w, real *dx, float *parts, float *dw) {
    long rows = B * T, count = (rows + 63) / 64;
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < count; part++) {
        float *dwp = parts + part * C;
        memset(dwp, 0, C * sizeof(float));
        for (long i = part * 64; i < rows && i < part * 64 + 64; i++) {
            const real *xi = x + i * C, *di = dy + i * C;
            int is_first = i % T == 0, is_last = i % T == T - 1;
            for (long c = 0; c < C; c += LANES) {
                vector d = load(di + c), after = is_last ? broadcast(0) : load(di + C + c);
                store(dx + i * C + c, after * get(w + c) + d);
                if (!is_first) put(dwp + c, d * load(xi + c - C) + get(dwp + c));
            }
        }
    }
    memset(dw, 0, C * sizeof(float));
    for (long part = 0; part < count; part++)
        for (long c = 0; c < C; c++) dw[c] += parts[part * C + c];
    return 0;
}

#ifndef BF16
// R rows of the product below, four of its columns.
#define DOTS(R)                                                                                    \
    static inline __attribute__((always_inline)) void dots_##R(                                    \
        long C, long columns, const float *x, const float *w, const float *b, float *y) {          \
        vector sum[R][4];                                                                          \
        for (int i = 0; i < R; i++)                                                                \
            for (int j = 0; j < 4; j++) sum[i][j] = broadcast(0);                                  \
        for (long c = 0; c < C; c += LANES)                                                        \
            for (int j = 0; j < 4; j++) {                                                          \
                vector column = load(w + j * C + c);                                               \
                for (int i = 0; i < R; i++) sum[i][j] += load(x + i * C + c) * column;             \
            }                                                                                      \
        for (int i = 0; i < R; i++)                                                                \
            for (int j = 0; j < 4; j++) y[i * columns + j] = sum_of(sum[i][j]) + (b ? b[j] : 0);   \
    }
DOTS(1)
DOTS(4)

// y (rows, columns) = x (rows, C) w (columns, C)' + b (columns), of which there may be none (NULL);
// columns a multiple of 4, C of 16. A sum is the same however many rows there are.
int linear(long threads, long rows, long columns, long C, const float *x, const float *w,
           const float *b, float *y) {
    for (long first = 0; first < rows; first += 256) {  // which stay in the cache
        long end = rows < first + 256 ? rows : first + 256;
#pragma omp parallel for num_threads(threads)
        for (long j = 0; j < columns; j += 4) {
            const float *wj = w + j * C, *bj = b ? b + j : NULL;
            long i = first;
            for (; i + 4 <= end; i += 4) dots_4(C, columns, x + i * C, wj, bj, y + i * columns + j);
            for (; i < end; i++) dots_1(C, columns, x + i * C, wj, bj, y + i * columns + j);
        }
    }
    return 0;
}
#else
// How a matrix (inner, columns) is read: panels of WIDE columns, groups (inner / 2, WIDE) each.
enum { WIDE = 2 * LANES };

// y (rows, columns) = x (rows, inner) times what `panels` hold, plus b (columns), if any.
static void rows_by_panels(long rows, long columns, long inner, const real *x, const group *panels,
                           const float *b, real *y) {
#pragma omp for
    for (long i = 0; i < rows; i += ROWS) {
        long count = rows - i < ROWS ? rows - i : ROWS;
        for (long j = 0; j < columns; j += WIDE) {
            float sums[ROWS * WIDE];
            product(count, WIDE, inner / 2, (const group *)x + i * inner / 2, inner / 2, 1,
                    panels + j * inner / 2, WIDE, sums, WIDE, 0);
            vector base[2] = {b ? get(b + j) : broadcast(0), b ? get(b + j + LANES) : broadcast(0)};
            for (long r = 0; r < count; r++)
                for (long v = 0; v < 2; v++)
                    store(y + (i + r) * columns + j + v * LANES,
                          get(sums + r * WIDE + v * LANES) + base[v]);
        }
    }
}

// y (rows, width) = x (rows, stride), rounded.
static void round_rows(long rows, long width, long stride, const float *x, real *y) {
    for (long i = 0; i < rows; i++)
        for (long d = 0; d < width; d += LANES) store(y + i * width + d, get(x + i * stride + d));
}

// y (rows, columns) = x (rows, C) w' + b for w (columns, C) and b (columns), of which there may be
// none (NULL); rows a multiple of 8, columns and C of 32. A row is the same however many there are.
int linear(long threads, long rows, long columns, long C, const real *x, const float *w,
           const float *b, real *y) {
    real *rounded = aligned_alloc(64, 2 * columns * C * sizeof(real));
    group *panels = (group *)(rounded + columns * C);
    if (!rounded) return 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (long j = 0; j < columns; j += WIDE) {
            round_rows(WIDE, C, C, w + j * C, rounded + j * C);
            group_columns(WIDE, C, rounded + j * C, panels + j * C / 2);
        }
        rows_by_panels(rows, columns, C, x, panels, b, y);
    }
    free(rounded);
    return 0;
}

// From dy (rows, columns): dx (rows, C) = dy w, dw (columns, C) = dy' x, db (columns) = the sum of
// dy's rows. Each sum is in the same order with any number of threads.
int linear_backward(long threads, long rows, long columns, long C, const real *dy, const real *x,
                    const float *w, real *dx, float *dw, float *db) {
    enum { BLOCK = 256 };  // rows at a time: WIDE columns of them fit in a cache
    const group ones = 0x3F803F80;
    long size = BLOCK / 2 * C;
    real *rounded = aligned_alloc(64, 2 * columns * C * sizeof(real) + 2 * size * sizeof(group));
    group *panels = (group *)(rounded + columns * C), *room = panels + columns * C / 2;
    if (!rounded) return 1;
#pragma omp parallel num_threads(threads)
    {
        group narrow[BLOCK / 2 * LANES];
        for (long first = 0; first < rows; first += BLOCK) {
            long count = rows - first < BLOCK ? rows - first : BLOCK;
            // Two rooms in turn, and all wait once one is full: nobody writes what others still read.
            group *wide = room + first / BLOCK % 2 * size;
#pragma omp for
            for (long c = 0; c < C; c += WIDE)
                pair_rows(count, WIDE, C, x + first * C + c, wide + BLOCK / 2 * c);
#pragma omp for nowait
            for (long j = 0; j < columns; j += LANES) {
                pair_rows(count, LANES, columns, dy + first * columns + j, narrow);
                vector sum = first ? get(db + j) : broadcast(0);
                for (long p = 0; p < count / 2; p++) sum = multiply(sum, ones, narrow + p * LANES);
                put(db + j, sum);
                for (long c = 0; c < C; c += WIDE) {
                    // A share of the next rows, the same for each product.
                    long next = first + BLOCK, done = BLOCK * (j * C + c * LANES);
                    fetch(dy + next * columns + done / C, BLOCK * LANES * WIDE / C);
                    fetch(x + next * C + done / columns, BLOCK * LANES * WIDE / columns);
                    product(LANES, WIDE, count / 2, narrow, 1, LANES, wide + BLOCK / 2 * c, WIDE,
                            dw + j * C + c, C, first > 0);
                }
            }
        }
#pragma omp for
        for (long c = 0; c < C; c += WIDE) {
            round_rows(columns, WIDE, C, w + c, rounded + c * columns);
            pair_rows(columns, WIDE, WIDE, rounded + c * columns, panels + c * columns / 2);
        }
        rows_by_panels(rows, C, columns, dy, panels, NULL, dx);
    }
    free(rounded);
    return 0;
}
#endif

// y (n) = max(x, 0)^2; n a multiple of 16.
int squared_relu(long threads, long n, const real *x, real *y) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector positive = maximum(broadcast(0), load(x + i));
        store(y + i, positive * positive);
    }
    return 0;
}

// dx = 2 max(x, 0) dy.
int squared_relu_backward(long threads, long n, const real *x, const real *dy, real *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector positive = maximum(broadcast(0), load(x + i));
        store(dx + i, (positive + positive) * load(dy + i));
    }
    return 0;
}

// The normal distribution's cumulative share up to x; its bell curve exp(-x^2 / 2) into *bell.
// Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: within 1e-6.
static inline vector normal(vector x, vector *bell) {
    vector t = 1.0f / (maximum(x, -x) * (0.3275911f * 0.70710678f) + 1.0f);
    vector sum = broadcast(1.061405429f);
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    *bell = exp2_of(x * x * (-0.5f * LOG2_E));
    vector tail = sum * t * *bell * 0.5f;
    return where_positive(x, 1.0f - tail, tail);
}

// y (n) = x times the normal distribution's share up to x; n a multiple of 16.
int gelu(long threads, long n, const real *x, real *y) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector z = load(x + i), bell;
        store(y + i, z * normal(z, &bell));
    }
    return 0;
}

// dx = (share + x density) dy.
int gelu_backward(long threads, long n, const real *x, const real *dy, real *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector z = load(x + i), bell, share = normal(z, &bell);
        vector slope = z * bell * 0.39894228f + share;
        store(dx + i, slope * load(dy + i));
    }
    return 0;
}

// y (n) = x with dropout: 0 with probability dropped / 2^24, else x / (1 - that); n a multiple of 16.
// A hash of the seed and the position decides, so that the backward pass, the same for dy, stores no
// mask. Two seeds that differ in a few bits give similar masks: all bits must be drawn at random. The
// hash's constants: Ellis, "Prospecting for Hash Functions", 2018 (lowbias32).
int dropout(long threads, long n, long dropped, uint64_t seed, const real *x, real *y) {
    const float scale = 16777216.0f / (16777216 - dropped);
    bits lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        bits hash = lane + ((uint32_t)i + (uint32_t)seed);
        hash = (hash ^ (hash >> 16)) * 0x7feb352dU ^ (uint32_t)(seed >> 32);
        hash = (hash ^ (hash >> 15)) * 0x846ca68bU;
        integers kept = (integers)((hash ^ (hash >> 16)) >> 8) >= (int32_t)dropped;
        store(y + i, load(x + i) * (vector)((integers)broadcast(scale) & kept));
    }
    return 0;
}

// LANES of the `left` numbers from p on, 0 where there are no more.
static inline vector load_rest(const real *p, long left) {
    real rest[LANES] = {0};
    if (left >= LANES) return load(p);
    memcpy(rest, p, left * sizeof(real));
    return load(rest);
}

static inline void store_rest(real *p, vector x, long left) {
    real rest[LANES];
    if (left >= LANES) {
        store(p, x);
        return;
    }
    store(rest, x);
    memcpy(p, rest, left * sizeof(real));
}

// loss (rows) = log(sum(exp(y))) - y of the target, or 0 where that is -1, for y (rows, V) =
// softcap tanh(x / softcap), with an absolute error of 2e-8 times softcap, or x where softcap is 0.
// Saved for backward: the highest y of each row, and the logarithm of the sum once it is subtracted.
// sum_of_losses is added up in order: it is the same with any number of threads. Returns 2 for a
// target that is none.
int cross_entropy(long threads, long rows, long V, long softcap, const real *x,
                  const int64_t *target, float *y, float *highest, float *log_sum, float *loss,
                  float *sum_of_losses) {
    float cap = softcap;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *row = aligned_alloc(64, (sizeof(float) * V + 63) / 64 * 64);
        failed = row == NULL;
#pragma omp for
        for (long i = 0; i < rows; i++) {
            if (failed) continue;
            if (target[i] < -1 || target[i] >= V) {
                failed = 2;
                continue;
            }
            for (long c = 0; c < V; c += LANES) {
                vector z = load_rest(x + i * V + c, V - c);
                if (softcap) {
                    vector e = exp2_of(maximum(z, -z) * (-2 * LOG2_E / cap));
                    vector size = (1.0f - e) / (1.0f + e) * cap;
                    z = where_positive(z, size, -size);
                }
                put(row + c, z);
            }
            for (long c = V; c % LANES; c++) row[c] = -INFINITY;
            vector most = get(row), sum = broadcast(0);
            for (long c = LANES; c < V; c += LANES) most = maximum(most, get(row + c));
            float largest = largest_of(most);
            for (long c = 0; c < V; c += LANES)
                sum += exp2_of((get(row + c) - largest) * LOG2_E);
            highest[i] = largest;
            log_sum[i] = logf(sum_of(sum));
            loss[i] = target[i] < 0 ? 0 : log_sum[i] - (row[target[i]] - largest);
            memcpy(y + i * V, row, V * sizeof(float));
        }
        free(row);
    }
    double total = 0;
    for (long i = 0; i < rows && !failed; i++) total += loss[i];
    *sum_of_losses = total;
    return failed;
}

// dx = factor (softmax(y) - 1 at the target), times the slope of the cap, from what `cross_entropy`
// gave; 0 where the target is -1.
int cross_entropy_backward(long threads, long rows, long V, long softcap, real *dx, const float *y,
                           const int64_t *target, const float *highest, const float *log_sum,
                           const float *factor) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        float scale = target[i] < 0 ? 0 : *factor;
        for (long c = 0; c < V; c += LANES) {
            float part[LANES] = {0};
            memcpy(part, y + i * V + c, (V - c < LANES ? V - c : LANES) * sizeof(float));
            vector z = get(part), slope = broadcast(1);
            if (softcap) slope -= z * z / (float)(softcap * softcap);
            vector weight = exp2_of((z - highest[i] - log_sum[i]) * LOG2_E);
            if (c <= target[i] && target[i] < c + LANES) weight[target[i] - c] -= 1;
            store_rest(dx + i * V + c, weight * slope * scale, V - c);
        }
    }
    return 0;
}
