// The AVX-512 intrinsics that engine/kernels/kernels.c uses, in C for AVX2: `emulated.py` compiles the kernels with it,
// so that those for bfloat16 can be tested on other CPUs. Numbers are rounded as by the hardware, but subnormal sums stay.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#define EMULATED static inline __attribute__((always_inline))
#define EACH for (int i = 0; i < 16; i++)

typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

// bfloat16 numbers are the upper halves of float32 ones; their products take subnormal ones as 0.
EMULATED float widened(uint32_t half) {
    uint32_t word = half << 16;
    float number;
    if (!(word & 0x7f800000)) word &= 0x80000000;
    memcpy(&number, &word, 4);
    return number;
}

EMULATED uint16_t rounded(float number) {
    uint32_t word;
    memcpy(&word, &number, 4);
    if (isnan(number)) return word >> 16 | 0x40;
    if (!(word & 0x7f800000)) return word >> 16 & 0x8000;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

EMULATED __m512i cvtepu16(__m256i x) {
    words y;
    EACH y[i] = ((halves)x)[i];
    return (__m512i)y;
}

EMULATED __m256i cvtneps(__m512 x) {
    halves y;
    EACH y[i] = rounded(((floats)x)[i]);
    return (__m256i)y;
}

EMULATED __m512i set1(uint32_t x) {
    words y;
    EACH y[i] = x;
    return (__m512i)y;
}

EMULATED __m512 dpbf16(__m512 sums, __m512i a, __m512i b) {
    floats y = (floats)sums;
    EACH {
        uint32_t u = ((words)a)[i], v = ((words)b)[i];
        y[i] = fmaf(widened(u >> 16), widened(v >> 16), y[i]);
        y[i] = fmaf(widened(u & 0xffff), widened(v & 0xffff), y[i]);
    }
    return (__m512)y;
}

EMULATED __m512i loadu(const void *p) {
    __m512i x;
    memcpy(&x, p, 64);
    return x;
}

EMULATED void storeu(void *p, __m512i x) { memcpy(p, &x, 64); }

EMULATED __m512 larger(__m512 a, __m512 b) {
    floats x = (floats)a, y = (floats)b;
    EACH y[i] = x[i] > y[i] ? x[i] : y[i];
    return (__m512)y;
}

EMULATED __mmask16 greater(__m512 a, __m512 b) {
    __mmask16 mask = 0;
    EACH mask |= (((floats)a)[i] > ((floats)b)[i]) << i;
    return mask;
}

EMULATED __m512 blend(__mmask16 mask, __m512 a, __m512 b) {
    floats y = (floats)a;
    EACH if (mask >> i & 1) y[i] = ((floats)b)[i];
    return (__m512)y;
}

EMULATED float reduce_add(__m512 x) {
    floats y = (floats)x;
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) y[i] += y[i + n];
    return y[0];
}

EMULATED float reduce_max(__m512 x) {
    floats y = (floats)x;
    float most = y[0];
    EACH most = y[i] > most ? y[i] : most;
    return most;
}

EMULATED __m512 fraction(__m512 x) {
    floats y = (floats)x;
    EACH y[i] = isinf(y[i]) ? 0 : y[i] - rintf(y[i]);
    return (__m512)y;
}

EMULATED __m512 scalef(__m512 a, __m512 b) {
    floats x = (floats)a, y = (floats)b;
    EACH y[i] = isnan(y[i]) ? y[i] : x[i] * exp2f(floorf(y[i]));
    return (__m512)y;
}

#define __m512bh __m512i
#define _mm512_cvtepu16_epi32 cvtepu16
#define _mm512_slli_epi32(x, n) ((__m512i)((words)(x) << (n)))
#define _mm512_cvtneps_pbh cvtneps
#define _mm512_set1_epi32 set1
#define _mm512_dpbf16_ps dpbf16
#define _mm512_loadu_si512 loadu
#define _mm512_storeu_si512 storeu
#define _mm512_max_ps larger
#define _mm512_setzero_ps() ((__m512)(floats){0})
#define _mm512_cmp_ps_mask(a, b, is_greater) greater(a, b)
#define _mm512_mask_blend_ps blend
#define _mm512_reduce_add_ps reduce_add
#define _mm512_reduce_max_ps reduce_max
#define _mm512_reduce_ps(x, whole) fraction(x)
#define _mm512_scalef_ps scalef
#define _mm512_or_si512(a, b) ((__m512i)((words)(a) | (words)(b)))
