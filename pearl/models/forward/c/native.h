// Vectors of the instruction set that this is built for, and conversions of numbers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef __AVX512BF16__
#define BF16 1
#endif

#define LANES 16  // of a panel
#ifdef __AVX512F__
#define WIDE 16   // lanes of a vector
#elif defined(__AVX2__)
#define WIDE 8
#else
#define WIDE 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef int32_t I __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef uint32_t U __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef uint16_t H __attribute__((vector_size(2 * WIDE), aligned(2)));
typedef int16_t T __attribute__((vector_size(2 * WIDE), aligned(2)));

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
