// What a step on a CPU spends its time on beside matrix products, in one pass over memory each:
// causal attention with rotary positions and normalised queries and keys, RMSNorm, LayerNorm,
// squared ReLU, GELU.
//
// For CPUs with AVX-512 BF16, whose one instruction multiplies 16 pairs of bfloat16 and adds both
// products to 16 float32 sums. Built and called by kernels.py; tests/test_kernels.py compares
// everything with PyTorch. Sizes: B sequences, T characters, H heads of D = 32 n; arrays are dense.
// `threads` is how many to use.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint32_t pair;  // two bfloat16, what one lane multiplies
typedef __m512 vector;  // 16 float32

enum { LANES = 16, ROWS = 32 };  // ROWS of scores are worked on at once: they stay in the cache

static const float LOG2_E = 1.44269504f;
static const float NORM_EPS = 1e-6f, LAYER_NORM_EPS = 1e-5f;  // as in model.py

static inline vector load(const bf16 *p) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store(bf16 *p, vector x) {
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline vector all(float x) { return _mm512_set1_ps(x); }

// 2^x, within 4e-6 of it; 0 from -150 down.
static inline vector exp2_of(vector x) {
    x = _mm512_max_ps(all(-200), x);  // in this order a nan stays one
    vector whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vector rest = _mm512_sub_ps(x, whole);  // Taylor's series of 2^rest, |rest| <= 1/2
    vector sum = all(1.3333558e-3f);
    sum = _mm512_fmadd_ps(sum, rest, all(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, rest, all(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, rest, all(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, rest, all(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, rest, all(1));
    return _mm512_scalef_ps(sum, whole);
}

// c (8, 16 V) = a b, or c += a b if `more`, over `pairs` pairs of the inner dimension. Pair p of
// row i of a is a[i * row + p * step]; pair p of column j of b is b[p * ldb + j].
#define TILE(V)                                                                                    \
    static inline __attribute__((always_inline)) void tile_##V(                                    \
        long pairs, const pair *a, long row, long step, const pair *b, long ldb, float *c,         \
        long ldc, int more) {                                                                      \
        vector sum[8][V];                                                                          \
        for (int i = 0; i < 8; i++)                                                                \
            for (int v = 0; v < V; v++)                                                            \
                sum[i][v] = more ? _mm512_loadu_ps(c + i * ldc + v * LANES) : all(0);              \
        for (long p = 0; p < pairs; p++) {                                                         \
            __m512bh columns[V];                                                                   \
            for (int v = 0; v < V; v++)                                                            \
                columns[v] = (__m512bh)_mm512_loadu_si512(b + p * ldb + v * LANES);                \
            for (int i = 0; i < 8; i++) {                                                          \
                __m512bh one = (__m512bh)_mm512_set1_epi32(a[i * row + p * step]);                 \
                for (int v = 0; v < V; v++)                                                        \
                    sum[i][v] = _mm512_dpbf16_ps(sum[i][v], one, columns[v]);                      \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < 8; i++)                                                                \
            for (int v = 0; v < V; v++) _mm512_storeu_ps(c + i * ldc + v * LANES, sum[i][v]);      \
    }
TILE(1)
TILE(2)

// The same for c (rows, columns), rows a multiple of 8 and columns of 16.
static void product(long rows, long columns, long pairs, const pair *a, long row, long step,
                    const pair *b, long ldb, float *c, long ldc, int more) {
    for (long i = 0; i < rows; i += 8) {
        const pair *ai = a + i * row;
        float *ci = c + i * ldc;
        long j = 0;
        for (; j + 32 <= columns; j += 32)
            tile_2(pairs, ai, row, step, b + j, ldb, ci + j, ldc, more);
        for (; j < columns; j += 16) tile_1(pairs, ai, row, step, b + j, ldb, ci + j, ldc, more);
    }
}

// y (rows / 2, width): rows 2p and 2p + 1 of x (rows, width) as pairs.
static void pair_rows(long rows, long width, const bf16 *x, pair *y) {
    for (long i = 0; i < rows; i += 2)
        for (long d = 0; d < width; d++)
            y[i / 2 * width + d] = x[i * width + d] | (pair)x[(i + 1) * width + d] << 16;
}

// y (width / 2, rows): the pairs along each row of x (rows, width), transposed.
static void pair_columns(long rows, long width, const bf16 *x, pair *y) {
    const pair *pairs = (const pair *)x;
    for (long d = 0; d < width / 2; d++)
        for (long i = 0; i < rows; i++) y[d * rows + i] = pairs[i * width / 2 + d];
}

// y (padded, D): one head's rows of x (T, stride), with zeros after them. Where there are cosines
// and sines (T, D / 2), each row is turned by its position's and divided by its root mean square;
// r (T) is what it was multiplied by.
static void read_head(long T, long padded, long D, long stride, const bf16 *x, const float *cosine,
                      const float *sine, bf16 *y, float *r) {
    long half = D / 2;
    for (long t = 0; t < T; t++) {
        const bf16 *from = x + t * stride;
        bf16 *to = y + t * D;
        if (!cosine) {
            memcpy(to, from, D * sizeof(bf16));
            continue;
        }
        vector squares = all(0);
        for (long d = 0; d < D; d += LANES)
            squares = _mm512_fmadd_ps(load(from + d), load(from + d), squares);
        r[t] = 1 / sqrtf(_mm512_reduce_add_ps(squares) / D + NORM_EPS);
        vector factor = all(r[t]);
        for (long d = 0; d < half; d += LANES) {
            vector a = load(from + d), b = load(from + d + half);
            vector c = _mm512_mul_ps(_mm512_loadu_ps(cosine + t * half + d), factor);
            vector s = _mm512_mul_ps(_mm512_loadu_ps(sine + t * half + d), factor);
            store(to + d, _mm512_fmadd_ps(a, c, _mm512_mul_ps(b, s)));
            store(to + d + half, _mm512_fmsub_ps(b, c, _mm512_mul_ps(a, s)));
        }
    }
    memset(y + T * D, 0, (padded - T) * D * sizeof(bf16));
}

// The way back through read_head: from factor g (T, D), the gradient of y, that of x into dx (T,
// stride). y and r are what read_head gave.
static void write_gradient(long T, long D, long stride, const float *g, float factor, const bf16 *y,
                           const float *r, const float *cosine, const float *sine, bf16 *dx) {
    long half = D / 2;
    for (long t = 0; t < T; t++) {
        const float *from = g + t * D;
        const bf16 *made = y + t * D;
        bf16 *to = dx + t * stride;
        if (!cosine) {
            for (long d = 0; d < D; d += LANES)
                store(to + d, _mm512_mul_ps(_mm512_loadu_ps(from + d), all(factor)));
            continue;
        }
        vector dots = all(0);
        for (long d = 0; d < D; d += LANES)
            dots = _mm512_fmadd_ps(_mm512_loadu_ps(from + d), load(made + d), dots);
        vector mean = all(-_mm512_reduce_add_ps(dots) / D);
        vector whole = all(r[t] * factor);
        for (long d = 0; d < half; d += LANES) {
            vector a = _mm512_loadu_ps(from + d), b = _mm512_loadu_ps(from + d + half);
            a = _mm512_fmadd_ps(load(made + d), mean, a);
            b = _mm512_fmadd_ps(load(made + d + half), mean, b);
            vector c = _mm512_mul_ps(_mm512_loadu_ps(cosine + t * half + d), whole);
            vector s = _mm512_mul_ps(_mm512_loadu_ps(sine + t * half + d), whole);
            store(to + d, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
            store(to + d + half, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
        }
    }
}

// Scores (ROWS, up to key `first` + ROWS) of the queries from `first` on, before they are scaled: a
// query does not see the keys after it.
static void score(long first, long D, long padded, const bf16 *q, const pair *k, float *scores) {
    product(ROWS, first + ROWS, D / 2, (const pair *)(q + first * D), D / 2, 1, k, padded, scores,
            padded, 0);
    for (long i = 0; i < ROWS; i++)
        for (long j = i + 1; j < ROWS; j++) scores[i * padded + first + j] = -INFINITY;
}

#define ARRAY(type, name, count)        \
    type *name = (type *)(memory + used); \
    used += ((count) * sizeof(type) + 63) / 64 * 64

// out (B, T, H, D) = softmax(q k' / sqrt(D)) v for qkv (B, T, 3, H, D); lse (B, H, T), the binary
// logarithm of each softmax's sum, is kept for the way back. Returns 0, as all functions do here,
// or 1 if memory ran out.
int attention(long threads, long B, long T, long H, long D, const bf16 *qkv, const float *cosine,
              const float *sine, bf16 *out, float *lse) {
    long padded = (T + ROWS - 1) / ROWS * ROWS, C = H * D;
    float scale = LOG2_E / sqrtf(D);  // scores are powers of 2
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        long used = 0;
        long bytes = padded * (8 * D + 6 * ROWS + 4) + 4 * ROWS * D + 1024;
        char *memory = aligned_alloc(64, bytes / 64 * 64);
        ARRAY(bf16, q, padded * D);
        ARRAY(bf16, kv, padded * D);
        ARRAY(pair, k, padded * D / 2);
        ARRAY(pair, v, padded * D / 2);
        ARRAY(float, r, padded);
        ARRAY(float, scores, ROWS * padded);
        ARRAY(bf16, p, ROWS * padded);
        ARRAY(float, sums, ROWS * D);
        failed = memory == NULL;
#pragma omp for
        for (long head = 0; head < B * H; head++) {
            if (failed) continue;
            const bf16 *x = qkv + head / H * T * 3 * C + head % H * D;
            bf16 *y = out + head / H * T * C + head % H * D;
            read_head(T, padded, D, 3 * C, x, cosine, sine, q, r);
            read_head(T, padded, D, 3 * C, x + C, cosine, sine, kv, r);
            pair_columns(padded, D, kv, k);
            read_head(T, padded, D, 3 * C, x + 2 * C, NULL, NULL, kv, NULL);
            pair_rows(padded, D, kv, v);
            for (long first = 0; first < T; first += ROWS) {
                long seen = first + ROWS, rows = T - first < ROWS ? T - first : ROWS;
                float total[ROWS];
                score(first, D, padded, q, k, scores);
                for (long i = 0; i < ROWS; i++) {
                    const float *row = scores + i * padded;
                    vector most = _mm512_loadu_ps(row);
                    for (long j = LANES; j < seen; j += LANES)
                        most = _mm512_max_ps(most, _mm512_loadu_ps(row + j));
                    float highest = scale * _mm512_reduce_max_ps(most);
                    vector sum = all(0);
                    for (long j = 0; j < seen; j += LANES) {
                        vector e = _mm512_mul_ps(_mm512_loadu_ps(row + j), all(scale));
                        e = exp2_of(_mm512_sub_ps(e, all(highest)));
                        sum = _mm512_add_ps(sum, e);
                        store(p + i * padded + j, e);
                    }
                    total[i] = _mm512_reduce_add_ps(sum);
                    if (i < rows) lse[head * T + first + i] = highest + log2f(total[i]);
                }
                product(ROWS, D, seen / 2, (pair *)p, padded / 2, 1, v, D, sums, D, 0);
                for (long i = 0; i < rows; i++)
                    for (long d = 0; d < D; d += LANES)
                        store(y + (first + i) * C + d,
                              _mm512_div_ps(_mm512_loadu_ps(sums + i * D + d), all(total[i])));
            }
        }
        free(memory);
    }
    return failed;
}

// dqkv, the gradient of `attention`'s qkv, from dout, that of its out. The weights are computed
// again rather than kept (Dao et al., "FlashAttention", 2022).
int attention_backward(long threads, long B, long T, long H, long D, const bf16 *qkv,
                       const float *cosine, const float *sine, const bf16 *out,
                       const float *lse, const bf16 *dout, bf16 *dqkv) {
    long padded = (T + ROWS - 1) / ROWS * ROWS, C = H * D;
    float root = 1 / sqrtf(D), scale = LOG2_E * root;  // scores are powers of 2
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        long used = 0;
        long bytes = padded * (26 * D + 16 * ROWS + 8) + 4 * ROWS * D + 1536;
        char *memory = aligned_alloc(64, bytes / 64 * 64);
        ARRAY(bf16, q, padded * D);
        ARRAY(bf16, k, padded * D);
        ARRAY(bf16, v, padded * D);
        ARRAY(bf16, g, padded * D);
        ARRAY(pair, q_rows, padded * D / 2);
        ARRAY(pair, k_rows, padded * D / 2);
        ARRAY(pair, g_rows, padded * D / 2);
        ARRAY(pair, k_columns, padded * D / 2);
        ARRAY(pair, v_columns, padded * D / 2);
        ARRAY(float, q_r, padded);
        ARRAY(float, k_r, padded);
        ARRAY(float, scores, ROWS * padded);
        ARRAY(float, dp, ROWS * padded);
        ARRAY(bf16, p, ROWS * padded);
        ARRAY(bf16, ds, ROWS * padded);
        ARRAY(pair, p_rows, ROWS / 2 * padded);
        ARRAY(pair, ds_rows, ROWS / 2 * padded);
        ARRAY(float, dq, ROWS * D);
        ARRAY(float, dk, padded * D);
        ARRAY(float, dv, padded * D);
        failed = memory == NULL;
#pragma omp for
        for (long head = 0; head < B * H; head++) {
            if (failed) continue;
            const bf16 *x = qkv + head / H * T * 3 * C + head % H * D;
            const bf16 *y = out + head / H * T * C + head % H * D;
            const bf16 *dy = dout + head / H * T * C + head % H * D;
            bf16 *dx = dqkv + head / H * T * 3 * C + head % H * D;
            read_head(T, padded, D, 3 * C, x, cosine, sine, q, q_r);
            read_head(T, padded, D, 3 * C, x + C, cosine, sine, k, k_r);
            read_head(T, padded, D, 3 * C, x + 2 * C, NULL, NULL, v, NULL);
            read_head(T, padded, D, C, dy, NULL, NULL, g, NULL);
            pair_rows(padded, D, q, q_rows);
            pair_rows(padded, D, k, k_rows);
            pair_rows(padded, D, g, g_rows);
            pair_columns(padded, D, k, k_columns);
            pair_columns(padded, D, v, v_columns);
            memset(dk, 0, padded * D * sizeof(float));
            memset(dv, 0, padded * D * sizeof(float));
            for (long first = 0; first < T; first += ROWS) {
                long seen = first + ROWS, rows = T - first < ROWS ? T - first : ROWS;
                score(first, D, padded, q, k_columns, scores);
                product(ROWS, seen, D / 2, (pair *)(g + first * D), D / 2, 1, v_columns, padded, dp,
                        padded, 0);
                for (long i = 0; i < ROWS; i++) {
                    long at = i * padded;
                    if (i >= rows) {
                        memset(p + at, 0, seen * sizeof(bf16));
                        memset(ds + at, 0, seen * sizeof(bf16));
                        continue;
                    }
                    vector dots = all(0);  // of out and its gradient: the softmax's own part
                    for (long d = 0; d < D; d += LANES)
                        dots = _mm512_fmadd_ps(load(g + (first + i) * D + d),
                                               load(y + (first + i) * C + d), dots);
                    vector mean = all(_mm512_reduce_add_ps(dots));
                    vector sum = all(lse[head * T + first + i]);
                    for (long j = at; j < at + seen; j += LANES) {
                        vector weight = _mm512_mul_ps(_mm512_loadu_ps(scores + j), all(scale));
                        weight = exp2_of(_mm512_sub_ps(weight, sum));
                        vector change = _mm512_sub_ps(_mm512_loadu_ps(dp + j), mean);
                        store(p + j, weight);
                        store(ds + j, _mm512_mul_ps(weight, change));
                    }
                }
                pair_rows(ROWS, padded, p, p_rows);
                pair_rows(ROWS, padded, ds, ds_rows);
                product(seen, D, ROWS / 2, p_rows, 1, padded, g_rows + first / 2 * D, D, dv, D, 1);
                product(seen, D, ROWS / 2, ds_rows, 1, padded, q_rows + first / 2 * D, D, dk, D, 1);
                product(ROWS, D, seen / 2, (pair *)ds, padded / 2, 1, k_rows, D, dq, D, 0);
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
int rms_norm(long threads, long rows, long C, const bf16 *x, bf16 *y, float *r) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        vector squares = all(0);
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            squares = _mm512_fmadd_ps(load(x + c), load(x + c), squares);
        r[i] = 1 / sqrtf(_mm512_reduce_add_ps(squares) / C + NORM_EPS);
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            store(y + c, _mm512_mul_ps(load(x + c), all(r[i])));
    }
    return 0;
}

// dx = r (dy - y mean(y dy)).
int rms_norm_backward(long threads, long rows, long C, const bf16 *dy, const bf16 *y,
                      const float *r, bf16 *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        vector dots = all(0);
        for (long c = i * C; c < (i + 1) * C; c += LANES)
            dots = _mm512_fmadd_ps(load(dy + c), load(y + c), dots);
        vector mean = all(-_mm512_reduce_add_ps(dots) / C);
        for (long c = i * C; c < (i + 1) * C; c += LANES) {
            vector z = _mm512_fmadd_ps(load(y + c), mean, load(dy + c));
            store(dx + c, _mm512_mul_ps(z, all(r[i])));
        }
    }
    return 0;
}

static inline vector standard(vector x, float mean, float r) {
    return _mm512_mul_ps(_mm512_sub_ps(x, all(mean)), all(r));
}

// y (rows, C) = z w + b for z = r (x - mean), r (rows) = 1 / sqrt(variance + eps); C a multiple of
// 16. There may be no b (NULL).
int layer_norm(long threads, long rows, long C, const bf16 *x, const float *w, const float *b,
               bf16 *y, float *mean, float *r) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < rows; i++) {
        const bf16 *xi = x + i * C;
        vector sum = all(0), squares = all(0);
        for (long c = 0; c < C; c += LANES) sum = _mm512_add_ps(sum, load(xi + c));
        mean[i] = _mm512_reduce_add_ps(sum) / C;
        for (long c = 0; c < C; c += LANES) {
            vector off = _mm512_sub_ps(load(xi + c), all(mean[i]));
            squares = _mm512_fmadd_ps(off, off, squares);
        }
        r[i] = 1 / sqrtf(_mm512_reduce_add_ps(squares) / C + LAYER_NORM_EPS);
        for (long c = 0; c < C; c += LANES) {
            vector z = standard(load(xi + c), mean[i], r[i]);
            vector base = b ? _mm512_loadu_ps(b + c) : all(0);
            store(y + i * C + c, _mm512_fmadd_ps(z, _mm512_loadu_ps(w + c), base));
        }
    }
    return 0;
}

// dx = r (g - mean(g) - z mean(z g)) for g = w dy; dw (C) and, behind it, db (C), which are sums
// over rows, taken in parts (ceil(rows / 64), 2, C): threads do not change their order.
int layer_norm_backward(long threads, long rows, long C, const bf16 *dy, const bf16 *x,
                        const float *w, const float *mean, const float *r, bf16 *dx, float *parts,
                        float *dw) {
    long count = (rows + 63) / 64;
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < count; part++) {
        float *dwp = parts + part * 2 * C, *dbp = dwp + C;
        memset(dwp, 0, 2 * C * sizeof(float));
        for (long i = part * 64; i < rows && i < part * 64 + 64; i++) {
            vector sum = all(0), dots = all(0);
            for (long c = 0; c < C; c += LANES) {
                vector d = load(dy + i * C + c), g = _mm512_mul_ps(d, _mm512_loadu_ps(w + c));
                vector z = standard(load(x + i * C + c), mean[i], r[i]);
                sum = _mm512_add_ps(sum, g);
                dots = _mm512_fmadd_ps(g, z, dots);
                _mm512_storeu_ps(dwp + c, _mm512_fmadd_ps(d, z, _mm512_loadu_ps(dwp + c)));
                _mm512_storeu_ps(dbp + c, _mm512_add_ps(d, _mm512_loadu_ps(dbp + c)));
            }
            vector mean_g = all(_mm512_reduce_add_ps(sum) / C);
            vector mean_zg = all(_mm512_reduce_add_ps(dots) / C);
            for (long c = 0; c < C; c += LANES) {
                vector g = _mm512_mul_ps(load(dy + i * C + c), _mm512_loadu_ps(w + c));
                vector z = standard(load(x + i * C + c), mean[i], r[i]);
                vector rest = _mm512_sub_ps(_mm512_sub_ps(g, mean_g), _mm512_mul_ps(z, mean_zg));
                store(dx + i * C + c, _mm512_mul_ps(rest, all(r[i])));
            }
        }
    }
    memset(dw, 0, 2 * C * sizeof(float));
    for (long part = 0; part < count; part++)
        for (long c = 0; c < 2 * C; c++) dw[c] += parts[part * 2 * C + c];
    return 0;
}

// y (n) = max(x, 0)^2; n a multiple of 16.
int squared_relu(long threads, long n, const bf16 *x, bf16 *y) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector positive = _mm512_max_ps(all(0), load(x + i));
        store(y + i, _mm512_mul_ps(positive, positive));
    }
    return 0;
}

// dx = 2 max(x, 0) dy.
int squared_relu_backward(long threads, long n, const bf16 *x, const bf16 *dy, bf16 *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector positive = _mm512_max_ps(all(0), load(x + i));
        store(dx + i, _mm512_mul_ps(_mm512_add_ps(positive, positive), load(dy + i)));
    }
    return 0;
}

// The normal distribution's cumulative share up to x; its bell curve exp(-x^2 / 2) into *bell.
// Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: within 1e-6.
static inline vector normal(vector x, vector *bell) {
    vector t = _mm512_fmadd_ps(_mm512_abs_ps(x), all(0.3275911f * 0.70710678f), all(1));
    t = _mm512_div_ps(all(1), t);
    vector sum = all(1.061405429f);
    sum = _mm512_fmadd_ps(sum, t, all(-1.453152027f));
    sum = _mm512_fmadd_ps(sum, t, all(1.421413741f));
    sum = _mm512_fmadd_ps(sum, t, all(-0.284496736f));
    sum = _mm512_fmadd_ps(sum, t, all(0.254829592f));
    *bell = exp2_of(_mm512_mul_ps(_mm512_mul_ps(x, x), all(-0.5f * LOG2_E)));
    vector tail = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(sum, t), *bell), all(0.5f));
    __mmask16 positive = _mm512_cmp_ps_mask(x, all(0), _CMP_GT_OQ);
    return _mm512_mask_sub_ps(tail, positive, all(1), tail);
}

// y (n) = x times the normal distribution's share up to x; n a multiple of 16.
int gelu(long threads, long n, const bf16 *x, bf16 *y) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector z = load(x + i), bell;
        store(y + i, _mm512_mul_ps(z, normal(z, &bell)));
    }
    return 0;
}

// dx = (share + x density) dy.
int gelu_backward(long threads, long n, const bf16 *x, const bf16 *dy, bf16 *dx) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i += LANES) {
        vector z = load(x + i), bell, share = normal(z, &bell);
        vector slope = _mm512_fmadd_ps(_mm512_mul_ps(z, bell), all(0.39894228f), share);
        store(dx + i, _mm512_mul_ps(slope, load(dy + i)));
    }
    return 0;
}
