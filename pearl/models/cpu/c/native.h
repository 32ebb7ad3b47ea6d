// Vectors of the instruction set that this is built for, and conversions of numbers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef __AVX512BF16__
#define BF16 1
#endif

#define VERSION 7  // of all that `native.py` and these files agree on: raised with every change of theirs
#define WIDEST 16384  // numbers of a row's queries
#define MOST_THREADS 256
#define ROWS_TOGETHER 8  // that go through cached positions together
#ifdef __AVX512F__
#define WIDE 16   // lanes of a vector
#elif defined(__AVX2__)
#define WIDE 8
#else
#define WIDE 4
#endif
#if WIDE == 16
#define LANES 32  // of a panel
#else
#define LANES 16
#endif
#define VECTORS (LANES / WIDE)
#define INLINE static inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef int32_t I __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef uint32_t U __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef uint16_t H __attribute__((vector_size(2 * WIDE), aligned(2)));
typedef int16_t T __attribute__((vector_size(2 * WIDE), aligned(2)));
typedef uint8_t Q __attribute__((vector_size(WIDE), aligned(1)));

INLINE V from_bfloat16(H bits) {
    return (V)(__builtin_convertvector(bits, U) << 16);
}

INLINE V from_float16(const uint8_t *at) {
#if WIDE == 16
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif WIDE == 8
    return (V)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#else
    V value;
    for (int i = 0; i < WIDE; i++) {
        const uint16_t bits = ((const uint16_t *)at)[i];
        const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
        float found;  // of another exponent, which a product puts right, for subnormal numbers too
        memcpy(&found, &rest, 4);
        found *= 0x1p112f;
        uint32_t whole;
        memcpy(&whole, &found, 4);
        whole |= sign;
        memcpy(&found, &whole, 4);
        value[i] = found;
    }
    return value;
#endif
}

// Numbers of 8 bits (e4m3).
INLINE V from_float8(const uint8_t *at) {
    const H bytes = __builtin_convertvector(*(const Q *)at, H);
    const H half = (bytes & 0x80) << 8 | (bytes & 0x7f) << 7;  // as float16, so 2^-8 times as large
    return from_float16((const uint8_t *)&half) * 256;
}

INLINE V from_bytes(const uint8_t *at, int is_signed) {
#if WIDE == 16
    const __m128i bytes = _mm_loadu_si128((const void *)at);
    return (V)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif WIDE == 8
    const __m128i bytes = _mm_loadl_epi64((const void *)at);
    return (V)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    V value;
    for (int i = 0; i < WIDE; i++) value[i] = is_signed ? (float)((const int8_t *)at)[i] : (float)at[i];
    return value;
#endif
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE H to_bfloat16s(V value) {
    const U bits = (U)value, no_number = (U)(value != value);
    const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~no_number) | (((bits >> 16) | 0x40) & no_number), H);
}

INLINE float wide(uint16_t bits) {
    const uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, 4);
    return value;
}

INLINE float number(const void *from, int64_t at, int is_float32) {
    return is_float32 ? ((const float *)from)[at] : wide(((const uint16_t *)from)[at]);
}

INLINE void put(void *to, int64_t at, float value, int is_float32) {
    if (is_float32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = to_bfloat16(value);
}

INLINE V vector_of(const void *from, int64_t at, int is_float32) {
    return is_float32 ? *(const V *)((const float *)from + at) : from_bfloat16(*(const H *)((const uint16_t *)from + at));
}

INLINE void put_vector(void *to, int64_t at, V value, int is_float32) {
    if (is_float32)
        *(V *)((float *)to + at) = value;
    else
        *(H *)((uint16_t *)to + at) = to_bfloat16s(value);
}

// Copies numbers to where they may have the other dtype.
INLINE void copy(const void *from, int64_t first, int from_float32, void *to, int64_t into, int to_float32, int64_t many) {
    int64_t i = 0;
    for (; i + WIDE <= many; i += WIDE) put_vector(to, into + i, vector_of(from, first + i, from_float32), to_float32);
    for (; i < many; i++) put(to, into + i, number(from, first + i, from_float32), to_float32);
}

// A matrix: see `products.c`.
typedef struct {
    int64_t outputs, inputs, bits, group, kind;
    const uint8_t *steps;                  // as `pearl_pack` has them, or bytes; or bfloat16
    const uint8_t *scales, *of_scales;     // of each group; of 256 inputs, or of a row
    const uint8_t *least, *of_least;       // likewise, what is added to each weight of a group
    const uint8_t *zeros;                  // of each group, bytes that are subtracted from its steps
    const float *bias;
    float offset;                          // subtracted from each step
    const float *table;                    // 16 numbers
    int32_t rounds_rows;                   // whether rows are rounded to 8 bits, if `products.c` multiplies those
} Weights;

typedef struct {
    int64_t rows, heads, kv_heads, dim, window, norm_width, slot_stride, head_stride, positions;
    const int64_t *table;  // of each row: slot (-1: padding), position, positions that are cached then, parent row or -1
    const void *states;    // [rows][heads + 2 * kv_heads][dim]
    const void *q_norm, *k_norm;
    const float *sinks;      // [heads]: scores beside those of positions, of which no value comes; or none
    const float *cos, *sin;  // [positions][dim]; the first half of the sines is negated
    char *keys, *values;     // [slots][kv_heads][positions][dim], of float32 or bfloat16
    float *queries;          // [rows][heads][dim]
    char *new_keys, *new_values;  // [rows][kv_heads][dim], as cached ones
    float *scores;  // [threads][ROWS_TOGETHER * heads / kv_heads * (positions + dim) + 16 * dim]; positions: of 16
    void *out;                               // [rows][heads][dim]
    float scale, cap, eps;
    int32_t is_float32, norm_is_float32, cache_is_float32, threads;
} Attention;

// Computes one piece of some work. `thread`: from 0 on, below the number of threads. It calls `keep` before it writes
// where other threads read, and returns if that is refused.
typedef void (*Piece)(const void *work, int64_t piece, int thread);

// Whether the thread may write the results of its piece; if not, another one computes it.
int keep(int thread);

// Has all pieces computed, by up to so many threads; see `threads.c`.
void in_pieces(Piece compute, const void *work, int64_t pieces, int threads);
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t stride, int64_t rows, float *scratch, int threads);
void pearl_attend(const Attention *a);
void pearl_normalise(const void *x, int is_float32, const void *weight, int weight_is_float32, float eps, int64_t rows,
                     int64_t many, float *scratch, void *out, int out_is_float32);
void pearl_gate(const void *x, int64_t rows, int64_t inner, int is_float32, int is_gelu, void *out);
