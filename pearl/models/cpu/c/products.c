// Products of a forward pass on a CPU, whose bits do not depend on how many rows are computed together.
//
// Reading the weights is what a forward of few rows spends its time on, so weights stay in the bits that they have in
// a file and become numbers in registers.  A panel is 16 outputs, with AVX-512 32: two vectors, one output a lane. A lane
// adds its inputs in one order, whatever the number of rows and threads.  The fields of `Weights` are laid out by
// `native.Native`.
//
// Built several times, for instruction sets of x86 and without any; `native.py` loads the best for the processor.
#include "native.h"

#define BLOCK 32  // inputs whose sum is scaled at once; 16 where groups are no multiple of 32
#define AHEAD 4096  // bytes of weights that are fetched before they are needed: a page
#define ROWS 64   // rows that share the unpacking of a block
#define PIECES 8  // of a product, for each thread
#define SUMS 128  // panels times rows of a piece, whose sums are computed before any is written; at least `ROWS`
#if WIDE == 16
#define TOGETHER 6  // rows whose sums fit the registers, of whole weights
#define TILE 8      // and of steps, all parts of rows together
#define FEW_TILE 4  // and of rows in two bytes
#define FEW 6       // so many are multiplied in two bytes
#else
#define TOGETHER 2
#define TILE 4
#define FEW_TILE 3
#define FEW 3
#endif

// How the scales of groups are stored: as such; as bytes times a float16 for 256 inputs; or as numbers of 8 bits (e4m3)
// that a float32 of their row divides.
enum { FLOAT16, BFLOAT16, TWO_LEVELS, TWO_LEVELS_SIGNED, FLOAT32, DIVIDED };
// In place of bits: bytes that are floating-point numbers (e4m3); nibbles that number the weights of a table: of any 16
// numbers; of whole numbers of 8 bits with a sign; of whole numbers of 5 bits without one, of which `offset` comes off.
enum { FLOAT8 = 9, TABLE = 10, WHOLE_TABLE = 11, SMALL_TABLE = 7 };

INLINE int width_of(int bits) {
    return bits >= TABLE || bits == SMALL_TABLE ? 4 : bits == FLOAT8 ? 8 : bits;
}

// The scales of a vector's lanes, or their least weights: `at` is where theirs begin, `above` where those of 256 inputs, or
// of rows, do.
INLINE V scales_of(const uint8_t *scales, const uint8_t *upper, int64_t at, int64_t above, int kind) {
    if (kind == BFLOAT16) return from_bfloat16(*(const H *)(scales + 2 * at));
    if (kind == FLOAT16) return from_float16(scales + 2 * at);
    if (kind == FLOAT32) return *(const V *)(scales + 4 * at);
    if (kind == DIVIDED) return from_float8(scales + at) / *(const V *)(upper + 4 * above);
    const V by = from_float16(upper + 2 * above);
    return from_bytes(scales + at, kind == TWO_LEVELS_SIGNED) * by;
}

// X: what inputs are multiplied as. WHOLE: steps of 4 to 6 and of 8 bits are multiplied as whole numbers, and inputs in
// parts. ROUNDS: whether inputs of float32 are rounded to bfloat16.
#ifdef BF16
typedef uint16_t X;
#define ROUNDS 1
#else
typedef float X;
#define ROUNDS 0
#endif
#define WHOLE (WIDE > 4)

// Forms of whole numbers: of 8 bits; of 16, for bfloat16, in two bytes, of which the first counts 256 times, or in one part;
// of 24, for float32, in two parts of 16, of which the first counts 4,096 times. Steps of few bits are multiplied by bytes
// for a few rows, because that takes less unpacking; as numbers of 16 bits for more rows, because a row takes fewer instructions.
enum { BYTES, TWO_BYTES, SHORTS, TWO_SHORTS };

// Rows that are multiplied.
typedef struct {
    const X *x;           // [rows, inputs]; for `float_rows` float32
    const float *totals;  // [groups, of]: sums of x
    const float *less;    // [blocks, of]: of a block, added to its sum of steps times x: minus the offset times x
    // If WHOLE: inputs as whole numbers times the unit of their block, for products that are exact in any order.
    const void *parts;    // [inputs / BLOCK, of, parts, BLOCK], of the form's parts
    const float *units;   // [inputs / BLOCK, of]; of numbers of 8 bits each 16 have one: [inputs / BLOCK, of, 2]
    int64_t inputs;
    int64_t of;      // all rows of the product
    int form;
} Rows;

// What a block's sums are added with.
typedef struct {
    V scales[VECTORS], least[VECTORS];
    const float *totals;  // of rows, where the block begins its group and this has least weights; else none
} Group;

INLINE void add(const Group *group, int row, int vector, V found, V *sums) {
    V sum = sums[row * VECTORS + vector];
    if (group->totals) sum += group->least[vector] * group->totals[row];
    sums[row * VECTORS + vector] = sum + found * group->scales[vector];
}

#ifdef BF16
// Steps of pairs of inputs of a vector's lanes, as bfloat16: [pairs][16 lanes][2].
INLINE void unpack(const Weights *w, int64_t at, __m512i table, int bits, int pairs, int vector, __m512i *found) {
    for (int i = 0; i < pairs; i++) {
        if (bits == TABLE) {
            const __m512i words = _mm512_loadu_si512(w->steps + at * LANES / 2 + 4 * LANES * (i / 4) + 64 * vector);
            found[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * (i % 4)), table);
            continue;
        }
        const uint8_t *from = w->steps + at * LANES + 2 * LANES * i + 32 * vector;
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from));
        const __m512i size = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
        __m512i step = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
        // Subnormal numbers, which products of bfloat16 take for zero, from a table.
        step = _mm512_mask_permutexvar_epi16(step, _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8)), size, table);
        found[i] = _mm512_or_si512(step, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), bytes), 8));
    }
}

INLINE __m512i pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm512_set1_epi32(both);
}
#define DOT(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, __m512i table, const Rows *given, int rows,
                          const Group *group, V *sums) {
    for (int vector = 0; vector < VECTORS; vector++) {
        __m512i steps[BLOCK / 2];
        unpack(w, at, table, bits, pairs, vector, steps);
        for (int row = 0; row < rows; row++) {
            const X *x = given->x + row * given->inputs + at;
            __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int i = 0; i < pairs; i += 4)
                for (int j = 0; j < 4; j++) part[j] = DOT(part[j], steps[i + j], pair(x + 2 * (i + j)));
            add(group, row, vector, ((V)part[0] + (V)part[1]) + ((V)part[2] + (V)part[3]), sums);
        }
    }
}

// Panels of bfloat16 weights: [inputs / 2][lanes][2].
INLINE void plain_rows(const uint16_t *panel, int64_t inputs, const X *x, int64_t stride, int rows, V *sums) {
    __m512 part[TOGETHER][4];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < 4; i++) part[row][i] = _mm512_setzero_ps();
    for (int64_t at = 0; at < inputs; at += 8) {
        __m512i some[4];
        for (int i = 0; i < 4; i++) some[i] = _mm512_loadu_si512(panel + (at + 2 * i) * LANES);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < 4; i++)
                part[row][i] = DOT(part[row][i], some[i], pair(x + row * stride + at + 2 * i));
    }
    for (int row = 0; row < rows; row++)
        sums[row * VECTORS] = (V)_mm512_add_ps(_mm512_add_ps(part[row][0], part[row][1]), _mm512_add_ps(part[row][2], part[row][3]));
}
#else
// Numbers of a table of 16, by their places.
INLINE V numbered(const float *table, U at) {
#if WIDE == 16
    return (V)_mm512_permutexvar_ps((__m512i)at, _mm512_loadu_ps(table));
#elif WIDE == 8
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)at);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)at);
    return (V)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32((__m256i)at, 28));
#else
    V found;
    for (int i = 0; i < WIDE; i++) found[i] = table[at[i]];
    return found;
#endif
}

INLINE U shifted(U words, int by) {
    return by < 0 ? words >> -by : words << by;
}

// Steps of the i-th pair of inputs from `at` on, of the lanes of a vector.
INLINE void unpack(const Weights *w, int64_t at, int bits, int i, int vector, V *found) {
    if (bits == 8 || bits == FLOAT8) {
        const H both = *(const H *)(w->steps + at * LANES + 2 * LANES * i + 2 * WIDE * vector);
        for (int odd = 0; odd < 2 && bits == 8; odd++)
            found[odd] = __builtin_convertvector((T)(both << 8 * !odd) >> 8, V);
        for (int odd = 0; odd < 2 && bits == FLOAT8; odd++) {  // as float16, so 2^-8 times as large
            const H half = (H)((T)(both << 8 * !odd) >> 1) & 0xbf80;
            found[odd] = from_float16((const uint8_t *)&half);
        }
        return;
    }
    const uint8_t *from = w->steps + at * LANES * width_of(bits) / 8 + 4 * WIDE * vector;
#define WORDS(k) (*(const U *)(from + 4 * LANES * (k)))
    for (int odd = 0; odd < 2; odd++) {
        const int by = 16 * (i % 2) + 8 * odd;  // the first bit of a byte
        U step = bits == 6 ? WORDS(i / 2 % 3) >> by & 63 : WORDS(i / 4) >> (by + 4 * (i / 2 % 2)) & 15;
        if (bits == 5) step |= (WORDS(4) >> (by + i / 2) & 1) << 4;
        if (bits == 6 && i / 2 == 3)
            step = (WORDS(0) >> by & 192) >> 6 | (WORDS(1) >> by & 192) >> 4 | (WORDS(2) >> by & 192) >> 2;
        found[odd] = bits >= TABLE || bits == SMALL_TABLE ? numbered(w->table, step) : __builtin_convertvector((I)step, V);
    }
}

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, const Rows *given, int rows,
                          const Group *group, V *sums) {
    for (int vector = 0; vector < VECTORS; vector++) {
        V steps[BLOCK];
        for (int i = 0; i < pairs; i++) unpack(w, at, bits, i, vector, steps + 2 * i);
        for (int row = 0; row < rows; row++) {
            const X *x = given->x + row * given->inputs + at;
            V part[4] = {{0}, {0}, {0}, {0}};
            if (bits < 8) part[0] += given->less[at / (2 * pairs) * given->of + row];
            for (int i = 0; i < 2 * pairs; i += 4)
                for (int j = 0; j < 4; j++) part[j] += steps[i + j] * x[i + j];
            add(group, row, vector, (part[0] + part[1]) + (part[2] + part[3]), sums);
        }
    }
}

INLINE void plain_rows(const uint16_t *panel, int64_t inputs, const X *x, int64_t stride, int rows, V *sums) {
    V part[TOGETHER][4];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < 4; i++) part[row][i] = (V){0};
    for (int64_t at = 0; at < inputs; at += 4)
        for (int i = 0; i < 4; i += 2) {
            const U both = *(const U *)(panel + (at + i) * LANES);
            const V first = (V)(both << 16), last = (V)(both & 0xffff0000u);
            for (int row = 0; row < rows; row++) {
                part[row][i] += first * x[row * stride + at + i];
                part[row][i + 1] += last * x[row * stride + at + i + 1];
            }
        }
    for (int row = 0; row < rows; row++)
        sums[row * VECTORS] = (part[row][0] + part[row][1]) + (part[row][2] + part[row][3]);
}
#endif

// Weights [inputs][lanes] of float32, float16 or bfloat16 times rows of float32, which are not rounded: for models of
// float32 and float16.
INLINE void float_rows(const uint8_t *weights, int kind, int64_t inputs, const float *x, int rows, V *sums) {
    const int64_t size = kind == FLOAT32 ? 4 : 2;
    V part[TOGETHER][4];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < 4; i++) part[row][i] = (V){0};
    for (int64_t at = 0; at < inputs; at += 4)
        for (int i = 0; i < 4; i++) {
            const uint8_t *from = weights + (at + i) * LANES * size;
            const V some = kind == FLOAT32 ? *(const V *)from : kind == FLOAT16 ? from_float16(from) : from_bfloat16(*(const H *)from);
            for (int row = 0; row < rows; row++) part[row][i] += some * x[row * inputs + at + i];
        }
    for (int row = 0; row < rows; row++)
        sums[row * VECTORS] = (part[row][0] + part[row][1]) + (part[row][2] + part[row][3]);
}

// Whether steps are multiplied as bytes, and so may be rows; or whether they are as whole numbers at all.
#define TAKES_BYTES(bits) (WHOLE && (bits) < 8)
#define TAKES_PARTS(bits) (WHOLE && ((bits) <= 8 || (bits) == WHOLE_TABLE))

#if WHOLE
#if WIDE == 16
typedef __m512i B;
#define LOAD(at) _mm512_loadu_si512(at)
#define EACH8(value) _mm512_set1_epi8(value)
#define EACH32(value) _mm512_set1_epi32(value)
#define AND(a, b) _mm512_and_si512(a, b)
#define OR(a, b) _mm512_or_si512(a, b)
#define RIGHT(a, by) _mm512_srli_epi16(a, by)
#define LEFT(a, by) _mm512_slli_epi16(a, by)
#define SIGNED_RIGHT(a, by) _mm512_srai_epi16(a, by)
#define LOOKED_UP(at, table) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), at)
#define LEFT32(a, by) _mm512_slli_epi32(a, by)
#define PAIRS8(a, b) _mm512_maddubs_epi16(a, b)
#define PAIRS16(a, b) _mm512_madd_epi16(a, b)
#define WIDENED(at) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(at)))
#define EACH16(value) _mm512_set1_epi16(value)
#define PLUS16(a, b) _mm512_add_epi16(a, b)
#define PLUS32(a, b) _mm512_add_epi32(a, b)
#define FLOATS(a) (V)_mm512_cvtepi32_ps(a)
#ifdef __AVX512VNNI__
#define VNNI 1
#define DOT8(sum, steps, x) _mm512_dpbusd_epi32(sum, steps, x)
#define DOT16(sum, steps, x) _mm512_dpwssd_epi32(sum, steps, x)
#endif
#else
typedef __m256i B;
#define LOAD(at) _mm256_loadu_si256((const void *)(at))
#define EACH8(value) _mm256_set1_epi8(value)
#define EACH32(value) _mm256_set1_epi32(value)
#define AND(a, b) _mm256_and_si256(a, b)
#define OR(a, b) _mm256_or_si256(a, b)
#define RIGHT(a, by) _mm256_srli_epi16(a, by)
#define LEFT(a, by) _mm256_slli_epi16(a, by)
#define SIGNED_RIGHT(a, by) _mm256_srai_epi16(a, by)
#define LOOKED_UP(at, table) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), at)
#define LEFT32(a, by) _mm256_slli_epi32(a, by)
#define PAIRS8(a, b) _mm256_maddubs_epi16(a, b)
#define PAIRS16(a, b) _mm256_madd_epi16(a, b)
#define WIDENED(at) _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at)))
#define EACH16(value) _mm256_set1_epi16(value)
#define PLUS16(a, b) _mm256_add_epi16(a, b)
#define PLUS32(a, b) _mm256_add_epi32(a, b)
#define FLOATS(a) (V)_mm256_cvtepi32_ps(a)
#ifdef __AVXVNNI__
#define VNNI 1
#define DOT8(sum, steps, x) _mm256_dpbusd_avx_epi32(sum, steps, x)
#define DOT16(sum, steps, x) _mm256_dpwssd_avx_epi32(sum, steps, x)
#endif
#endif

INLINE int32_t four_bytes(const void *at) {
    int32_t found;
    memcpy(&found, at, 4);
    return found;
}

// A sum plus products: of four bytes of each lane or, without VNNI in 16 bits, of two in each half of a lane; and of two
// numbers of 16 bits.
#ifdef VNNI
#define WITH8(sum, steps, x) DOT8(sum, steps, x)
#define WITH16(sum, steps, x) DOT16(sum, steps, x)
#else
#define VNNI 0
#define WITH8(sum, steps, x) PLUS16(sum, PAIRS8(steps, x))
#define WITH16(sum, steps, x) PLUS32(sum, PAIRS16(steps, x))
#endif
#define UNROLLED _Pragma("GCC unroll 16")
#define IN_ORDER(vector) __asm__("" : "+v"(vector))  // GCC would choose an order that takes more registers

// The i-th four inputs of each lane of a vector, from `at` on.
INLINE B bytes_of(const Weights *w, int64_t at, int bits, __m128i table, int i, int vector) {
    const uint8_t *from = w->steps + at * LANES * width_of(bits) / 8 + 4 * WIDE * vector;
#define WORD(k) LOAD(from + 4 * LANES * (k))
    if (bits == 6 && i < 3) return AND(WORD(i), EACH8(63));
    if (bits == 6)
        return OR(OR(AND(RIGHT(WORD(0), 6), EACH8(3)), AND(RIGHT(WORD(1), 4), EACH8(12))), AND(RIGHT(WORD(2), 2), EACH8(48)));
    const B low = AND(i % 2 ? RIGHT(WORD(i / 2), 4) : WORD(i / 2), EACH8(15));
    if (bits >= SMALL_TABLE) return LOOKED_UP(low, table);
    return bits == 4 ? low : OR(low, AND(i > 4 ? RIGHT(WORD(4), i - 4) : LEFT(WORD(4), 4 - i), EACH8(16)));
}

// Defines a function that multiplies a block's unpacked steps by all rows, whatever the kind of weights. SOME does so for
// as many rows as have their sums in registers TOGETHER: `some_shorts` or `some_bytes`.
#define ALL_ROWS(NAME, SOME, TOGETHER, ...) \
    static __attribute__((noinline)) void NAME(const B *steps, int64_t at, const Rows *given, int rows, \
                                               const Group *group, V *sums) { \
        const Rows own = *given; /* which stays in registers */ \
        int row = 0; \
        for (; row + TOGETHER <= rows; row += TOGETHER) \
            SOME(steps, at, __VA_ARGS__, &own, row, TOGETHER, group, sums); \
        if (TOGETHER > 4 && rows - row >= 4) SOME(steps, at, __VA_ARGS__, &own, row, 4, group, sums), row += 4; \
        if (TOGETHER > 2 && rows - row >= 2) SOME(steps, at, __VA_ARGS__, &own, row, 2, group, sums), row += 2; \
        if (rows - row) SOME(steps, at, __VA_ARGS__, &own, row, 1, group, sums); \
    }

// Adds products of some rows of numbers of 16 bits, and steps of 16 bits: [pairs][VECTORS].
INLINE void some_shorts(const B *steps, int64_t at, int pairs, int parts, const Rows *given, int first, int rows,
                        const Group *group, V *sums) {
    const int64_t block = at / BLOCK * given->of + first;
    const int16_t *x = (const int16_t *)given->parts + block * parts * BLOCK + at % BLOCK;
    const float *less = given->less + at / (2 * pairs) * given->of + first;
    V whole[TILE][VECTORS];
    UNROLLED for (int part = 0; part < parts; part++) {
        B some[TILE][VECTORS];
        UNROLLED for (int i = 0; i < pairs; i++) {
            B step[VECTORS];
            UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                step[vector] = steps[i * VECTORS + vector];
                IN_ORDER(step[vector]);
            }
            UNROLLED for (int row = 0; row < rows; row++) {
                const B each = EACH32(four_bytes(x + (row * parts + part) * BLOCK + 2 * i));
                UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                    B *sum = &some[row][vector];
                    *sum = WITH16(i ? *sum : EACH8(0), step[vector], each);
                    IN_ORDER(*sum);
                }
            }
        }
        UNROLLED for (int row = 0; row < rows; row++)
            UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                const V found = FLOATS(some[row][vector]);
                whole[row][vector] = part ? whole[row][vector] * 4096.0f + found : found;
            }
    }
    UNROLLED for (int row = 0; row < rows; row++)
        UNROLLED for (int vector = 0; vector < VECTORS; vector++)
            add(group, first + row, vector, whole[row][vector] * given->units[block + row] + less[row], sums);
}

// Pairs of inputs of a block, and parts of a row.
#if ROUNDS
#define SHORT_SHAPES(DO) DO(16, 1) DO(8, 1)
#else
#define SHORT_SHAPES(DO) DO(16, 1) DO(8, 1) DO(16, 2) DO(8, 2)
#endif
#define DEFINED(PAIRS, PARTS) ALL_ROWS(short_rows_##PAIRS##_##PARTS, some_shorts, TILE, PAIRS, PARTS)
SHORT_SHAPES(DEFINED)
#undef DEFINED

// As `rows_of_block`, for steps as numbers of 16 bits.
INLINE void shorts_of_block(const Weights *w, int64_t at, int bits, int pairs, __m128i table, int parts, const Rows *given,
                            int rows, const Group *group, V *sums) {
    B steps[BLOCK / 2 * VECTORS];
    UNROLLED for (int i = 0; i < pairs; i++)
        UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
            B *into = steps + i * VECTORS + vector;
            if (bits == 8) {
                *into = WIDENED(w->steps + at * LANES + 2 * LANES * i + 2 * WIDE * vector);
                continue;
            }
            // Of four inputs the first and the third, then the others: see `in_parts`. A table's numbers have signs.
            const B four = bytes_of(w, at, bits, table, i / 2, vector);
            if (bits == WHOLE_TABLE) *into = SIGNED_RIGHT(i % 2 ? four : LEFT(four, 8), 8);
            else *into = i % 2 ? RIGHT(four, 8) : AND(four, EACH16(255));
        }
    if (__builtin_constant_p(rows) && rows == 1) {
        some_shorts(steps, at, pairs, parts, given, 0, 1, group, sums);
        return;
    }
#define CALLED(PAIRS, PARTS) \
    if (pairs == PAIRS && parts == PARTS) short_rows_##PAIRS##_##PARTS(steps, at, given, rows, group, sums);
    SHORT_SHAPES(CALLED)
#undef CALLED
}

// Adds products of some rows of bytes, and steps of bytes: [fours][VECTORS]. most: fours whose sums fit 16 bits.
INLINE void some_bytes(const B *steps, int64_t at, int fours, int most, int parts, const Rows *given, int first, int rows,
                       const Group *group, V *sums) {
    const int halves = parts == 1 ? fours / 4 : 1, many = fours / halves;
    const int64_t block = at / BLOCK * given->of + first;
    const int8_t *x = (const int8_t *)given->parts + block * parts * BLOCK + at % BLOCK;
    const float *less = given->less + at / (4 * fours) * given->of + first;
    V found[TILE][VECTORS];
    UNROLLED for (int half = 0; half < halves; half++) {
        B whole[TILE][2][VECTORS], some[TILE][2][VECTORS];
        UNROLLED for (int i = 0; i < many; i++) {
            B step[VECTORS];
            UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                step[vector] = steps[(4 * half + i) * VECTORS + vector];
                IN_ORDER(step[vector]);
            }
            UNROLLED for (int row = 0; row < rows; row++)
                UNROLLED for (int part = 0; part < parts; part++) {
                    const B each = EACH32(four_bytes(x + (row * parts + part) * BLOCK + 16 * half + 4 * i));
                    UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                        B *sum = &some[row][part][vector];
                        *sum = WITH8(i % most ? *sum : EACH8(0), step[vector], each);
                        IN_ORDER(*sum);
                        if ((i + 1) % most) continue;
                        const B more = VNNI ? *sum : PAIRS16(*sum, EACH16(1));
                        whole[row][part][vector] = i < most ? more : PLUS32(whole[row][part][vector], more);
                    }
                }
        }
        UNROLLED for (int row = 0; row < rows; row++)
            UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                const B first_part = whole[row][0][vector], last_part = whole[row][1][vector];
                const V all = FLOATS(parts == 2 ? PLUS32(LEFT32(first_part, 8), last_part) : first_part);
                const float unit = parts == 1 ? given->units[2 * (block + row) + at % BLOCK / 16 + half] : given->units[block + row];
                if (half) found[row][vector] += all * unit;
                else found[row][vector] = all * unit + less[row];
            }
    }
    UNROLLED for (int row = 0; row < rows; row++)
        UNROLLED for (int vector = 0; vector < VECTORS; vector++)
            add(group, first + row, vector, found[row][vector], sums);
}

// Fours of inputs of a block, and those whose sums fit 16 bits: of rows of 8 bits.
#if VNNI
#define BYTE_SHAPES(DO) DO(8, 4) DO(4, 4)
#else
#define BYTE_SHAPES(DO) DO(8, 4) DO(4, 2) DO(4, 4)
#endif
// Where two fours fit 16 bits, wider sums take registers too.
#define DEFINED(FOURS, MOST) \
    ALL_ROWS(byte_rows_##FOURS##_##MOST, some_bytes, (MOST == 2 ? TILE / 2 : TILE), FOURS, MOST, 1)
BYTE_SHAPES(DEFINED)
#undef DEFINED

// As `rows_of_block`, for steps of 4 to 6 bits as bytes: of rows of 8 bits, or of at most FEW rows in two bytes.
INLINE void bytes_of_block(const Weights *w, int64_t at, int bits, int pairs, __m128i table, int parts,
                           const Rows *given, int rows, const Group *group, V *sums) {
    const int fours = pairs / 2, many = parts == 1 ? 4 : fours, fitting = 8 >> ((bits == SMALL_TABLE ? 5 : bits) - 4);
    const int most = VNNI || fitting > many ? many : fitting;
    B steps[BLOCK / 4 * VECTORS];
    for (int i = 0; i < fours; i++)
        for (int vector = 0; vector < VECTORS; vector++) steps[i * VECTORS + vector] = bytes_of(w, at, bits, table, i, vector);
    if (__builtin_constant_p(rows) && rows <= FEW) {
        UNROLLED for (int row = 0; row < rows; row += FEW_TILE)
            some_bytes(steps, at, fours, most, parts, given, row, rows - row < FEW_TILE ? rows - row : FEW_TILE, group, sums);
        return;
    }
#define CALLED(FOURS, MOST) \
    if (fours == FOURS && most == MOST) byte_rows_##FOURS##_##MOST(steps, at, given, rows, group, sums);
    BYTE_SHAPES(CALLED)
#undef CALLED
}

// `bytes_of_block` for 2 to FEW rows in two bytes. It is compiled once for all kinds of scales.
#define FEW_SHAPES(DO) DO(4, 16) DO(5, 16) DO(6, 8) DO(SMALL_TABLE, 8) DO(SMALL_TABLE, 16)
#define FOR(ROWS_GIVEN, BITS, PAIRS) \
    if (ROWS_GIVEN <= FEW && rows == ROWS_GIVEN) bytes_of_block(w, at, BITS, PAIRS, table, 2, given, ROWS_GIVEN, group, sums);
#define DEFINED(BITS, PAIRS) \
    static __attribute__((noinline)) void few_of_block_##BITS##_##PAIRS(const Weights *w, int64_t at, __m128i table, \
                                                                        const Rows *given, int rows, const Group *group, V *sums) { \
        FOR(2, BITS, PAIRS) FOR(3, BITS, PAIRS) FOR(4, BITS, PAIRS) FOR(5, BITS, PAIRS) FOR(6, BITS, PAIRS) \
    }
FEW_SHAPES(DEFINED)
#undef DEFINED

INLINE void few_of_block(const Weights *w, int64_t at, int bits, int pairs, __m128i table, const Rows *given, int rows,
                         const Group *group, V *sums) {
#define CALLED(BITS, PAIRS) \
    if (bits == BITS && pairs == PAIRS) few_of_block_##BITS##_##PAIRS(w, at, table, given, rows, group, sums);
    FEW_SHAPES(CALLED)
#undef CALLED
}
#endif

// Sums [rows, VECTORS] of the panel. bits, pairs, kind and form are constants where this is inlined.
INLINE void sums_of(const Weights *w, int64_t panel, const Rows *rows_given, int rows, V *found, int bits, int pairs,
                    int kind, int form) {
    const Rows own = *rows_given, *given = &own;  // copies, which stay in registers
    const int64_t inputs = w->inputs, groups = inputs / w->group;
    const int width = width_of(bits);
    Weights part = *w;  // from this panel on
    V one[VECTORS], *sums = rows == 1 ? one : found;
    if (bits >= 16) {
        for (int vector = 0; vector < VECTORS; vector++) {
            const int size = kind == FLOAT32 ? 4 : 2, lanes = bits == 16 ? 2 * WIDE : WIDE;  // 16: pairs of inputs
            const uint8_t *weights = w->steps + (panel * inputs * LANES + lanes * vector) * size;
            const float *x = (const float *)own.x;
            V *into = found + vector;
            int row = 0;
#define PLAIN(some) \
    if (bits == 16) \
        plain_rows((const uint16_t *)weights, inputs, own.x + row * inputs, inputs, some, into + row * VECTORS); \
    else \
        float_rows(weights, kind, inputs, x + row * inputs, some, into + row * VECTORS)
            for (; row + TOGETHER <= rows; row += TOGETHER) PLAIN(TOGETHER);
            switch (rows - row) {
#if TOGETHER > 2
                case 5: PLAIN(5); break;
                case 4: PLAIN(4); break;
                case 3: PLAIN(3); break;
                case 2: PLAIN(2); break;
#endif
                case 1: PLAIN(1); break;
            }
        }
        return;
    }
    part.steps += panel * inputs * LANES * width / 8;
#ifdef BF16
    uint16_t numbers[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // FLOAT8's below 2^-6
    for (int i = 0; i < 32 && bits == TABLE; i++) numbers[i] = to_bfloat16(w->table[i % 16]);
    const __m512i table = _mm512_loadu_si512(numbers);
#endif
#if WHOLE
    int8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = bits == WHOLE_TABLE || bits == SMALL_TABLE ? (int8_t)w->table[i] : 0;
    const __m128i whole_table = _mm_loadu_si128((const void *)bytes);
#endif
    for (int i = 0; i < rows * VECTORS; i++) sums[i] = (V){0};
    Group own_group = {0};
    for (int64_t at = 0, group = -1, end = 0; at < inputs; at += 2 * pairs) {
        own_group.totals = 0;
        if (at == end) {
            group++;
            end += part.group;
            const int64_t upper = kind == DIVIDED ? panel : panel * (inputs / 256) + at / 256;
            for (int vector = 0; vector < VECTORS; vector++) {
                const int64_t first = (panel * groups + group) * LANES + vector * WIDE, above = upper * LANES + vector * WIDE;
                const V scale = scales_of(part.scales, part.of_scales, first, above, kind);
                own_group.scales[vector] = bits == FLOAT8 && !ROUNDS ? scale * 256 : scale;  // see `unpack`
                if (part.least) own_group.least[vector] = scales_of(part.least, part.of_least, first, above, kind);
                else if (part.zeros) own_group.least[vector] = -scale * from_bytes(part.zeros + first, 0);
            }
            if (part.least || part.zeros) own_group.totals = given->totals + group * given->of;
        }
        // What comes next, perhaps of the next panel: memory is slower than one row's products. It goes to the second
        // cache, which waits for several times as many lines at once as the first one does.
        for (int64_t i = 0; i < 2 * pairs * LANES * width / 8; i += 64)
            __builtin_prefetch(part.steps + at * LANES * width / 8 + AHEAD + i, 0, 2);
#if WHOLE
        if (form == SHORTS && TAKES_BYTES(bits) && own.form == TWO_BYTES) {
            few_of_block(&part, at, bits, pairs, whole_table, given, rows, &own_group, sums);
            continue;
        }
        if (form == BYTES || form == TWO_BYTES) {
            const int parts = form == BYTES ? 1 : 2;
            bytes_of_block(&part, at, bits, pairs, whole_table, parts, given, rows, &own_group, sums);
            continue;
        }
        if (TAKES_PARTS(bits)) {
            const int parts = form == SHORTS ? 1 : 2;
            shorts_of_block(&part, at, bits, pairs, whole_table, parts, given, rows, &own_group, sums);
            continue;
        }
#endif
#ifdef BF16
        rows_of_block(&part, at, bits, pairs, table, given, rows, &own_group, sums);
#else
        rows_of_block(&part, at, bits, pairs, given, rows, &own_group, sums);
#endif
    }
    for (int vector = 0; vector < VECTORS && rows == 1; vector++) found[vector] = one[vector];
}

static void multiply_panel(const Weights *w, int64_t panel, const Rows *given, int rows, V *sums) {
#define CASE(BITS, PAIRS, KIND) \
    if (w->bits == BITS && w->kind == KIND) { \
        if (TAKES_BYTES(BITS) && given->form == TWO_BYTES && rows == 1) \
            sums_of(w, panel, given, 1, sums, BITS, PAIRS, KIND, TWO_BYTES); /* they stay in registers */ \
        else if (TAKES_BYTES(BITS) && given->form == BYTES && rows == 1) \
            sums_of(w, panel, given, 1, sums, BITS, PAIRS, KIND, BYTES); \
        else if (TAKES_BYTES(BITS) && given->form == BYTES) \
            sums_of(w, panel, given, rows, sums, BITS, PAIRS, KIND, BYTES); \
        else if (!ROUNDS && given->form == TWO_SHORTS) \
            sums_of(w, panel, given, rows, sums, BITS, PAIRS, KIND, TWO_SHORTS); \
        else if (!TAKES_BYTES(BITS) && rows == 1) \
            sums_of(w, panel, given, 1, sums, BITS, PAIRS, KIND, SHORTS); \
        else sums_of(w, panel, given, rows, sums, BITS, PAIRS, KIND, SHORTS); \
        return; \
    }
    if (w->bits == 16) {
        sums_of(w, panel, given, rows, sums, 16, 16, 0, SHORTS);
        return;
    }
#define WHOLE_CASE(KIND) \
    if (w->bits == 32 && w->kind == KIND) { \
        sums_of(w, panel, given, rows, sums, 32, 16, KIND, SHORTS); \
        return; \
    }
    WHOLE_CASE(FLOAT16) WHOLE_CASE(BFLOAT16) WHOLE_CASE(FLOAT32)
    CASE(4, 16, FLOAT16) CASE(4, 16, BFLOAT16) CASE(4, 16, TWO_LEVELS)
    CASE(5, 16, FLOAT16) CASE(5, 16, TWO_LEVELS) CASE(6, 8, TWO_LEVELS_SIGNED)
    CASE(8, 16, FLOAT16) CASE(8, 16, BFLOAT16) CASE(8, 16, FLOAT32) CASE(FLOAT8, 16, BFLOAT16)
    CASE(FLOAT8, 16, FLOAT32) CASE(SMALL_TABLE, 8, DIVIDED) CASE(TABLE, 8, DIVIDED)
    CASE(SMALL_TABLE, 16, FLOAT16) CASE(SMALL_TABLE, 16, BFLOAT16) CASE(SMALL_TABLE, 16, FLOAT32)
    CASE(WHOLE_TABLE, 16, FLOAT16) CASE(WHOLE_TABLE, 16, BFLOAT16) CASE(WHOLE_TABLE, 16, TWO_LEVELS_SIGNED)
    CASE(TABLE, 16, FLOAT16) CASE(TABLE, 16, BFLOAT16) CASE(TABLE, 16, FLOAT32) CASE(TABLE, 16, TWO_LEVELS_SIGNED)
}

// Rows as they are multiplied: to float32, or to bfloat16.
static void convert(const void *given, void *x, int64_t count, int is_float32, int to_float32) {
    if (is_float32 == to_float32)
        memcpy(x, given, (to_float32 ? 4 : 2) * count);
    else if (to_float32)
        for (int64_t i = 0; i < count; i++) ((float *)x)[i] = wide(((const uint16_t *)given)[i]);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)x)[i] = to_bfloat16(((const float *)given)[i]);
}

INLINE float float_of(X value) {
#ifdef BF16
    return wide(value);
#else
    return value;
#endif
}

// `count` is a multiple of 16.
INLINE float total_of(const X *x, int64_t count) {
    float sums[16] = {0};
    for (int64_t i = 0; i < count; i += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += float_of(x[i + lane]);
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

#if WHOLE
#if WIDE == 16
#define ROUNDED(value) (I)_mm512_cvtps_epi32((__m512)(value))
#else
#define ROUNDED(value) (I)_mm256_cvtps_epi32((__m256)(value))
#endif
#define OF_HALF (16 / WIDE)  // vectors of 16 numbers
typedef int8_t C __attribute__((vector_size(WIDE), aligned(1)));

INLINE V vector_of_x(const X *x) {
    return vector_of(x, 0, !ROUNDS);
}

// The lanes in another order: each exchanged with the one that is so many before or behind it.
INLINE I exchanged(I value, int many) {
    I places;
    for (int lane = 0; lane < WIDE; lane++) places[lane] = lane ^ many;
    return __builtin_shuffle(value, places);
}

INLINE I larger(I a, I b) {
    const I is_more = a > b;
    return (a & is_more) | (b & ~is_more);
}

// The largest magnitude, and the sum, of some vectors.
INLINE float largest_of(const V *some, int vectors) {
    I largest = {0};
    UNROLLED for (int i = 0; i < vectors; i++) largest = larger(largest, (I)some[i] & 0x7fffffff);
    UNROLLED for (int many = WIDE / 2; many; many /= 2) largest = larger(largest, exchanged(largest, many));
    return ((V)largest)[0];
}

INLINE int32_t sum_of(const I *whole, int vectors) {
    I sum = {0};
    UNROLLED for (int i = 0; i < vectors; i++) sum += whole[i];
    UNROLLED for (int many = WIDE / 2; many; many /= 2) sum += exchanged(sum, many);
    return sum[0];
}

// Takes a block of x apart, for steps of so many bits; see `Rows`. Returns its unit, a power of two, so that what fits is
// exact; `sums`: of each 16 such numbers.
static float in_parts(const X *x, int64_t bits, int form, void *into, float *sums) {
    V some[BLOCK / WIDE];
    I whole[BLOCK / WIDE];
    for (int i = 0; i < BLOCK / WIDE; i++) some[i] = vector_of_x(x + i * WIDE);
    const float size = largest_of(some, BLOCK / WIDE);
    uint32_t largest;
    memcpy(&largest, &size, 4);
    const int is_number = largest < 0x7f800000;  // else it is not: NaN or infinite
    const int exponent = (int)(largest >> 23) - 127, room = form == TWO_SHORTS ? 22 : 14;  // the largest: 2^room to 2^(room + 1)
    // Parts are rounded to the nearest, so the first is at most 127 below this.
    const float most = form == TWO_SHORTS ? 127 * 65536 + 127 * 256 + 127 : 127 * 256 + 127;
    const uint32_t power = (uint32_t)(127 + room - exponent) << 23;
    float times;
    memcpy(&times, &power, 4);
    if (size * times > most) times /= 2;
    if (!is_number || exponent < -100) times = 0;
    const float unit = is_number ? times ? 1 / times : 0 : NAN;
    for (int i = 0; i < BLOCK / WIDE; i++) whole[i] = ROUNDED(some[i] * times) & -is_number;
    for (int half = 0; half < 2; half++) sums[half] = (float)sum_of(whole + half * OF_HALF, OF_HALF) * unit;
    for (int i = 0; i < BLOCK / WIDE; i++) {
        if (form == TWO_BYTES) {
            int8_t *first = (int8_t *)into + i * WIDE;
            *(C *)(first + BLOCK) = __builtin_convertvector(whole[i], C);
            *(C *)first = __builtin_convertvector((whole[i] - (whole[i] << 24 >> 24)) >> 8, C);
            continue;
        }
        int16_t *first = (int16_t *)into + i * WIDE;
        if (bits != 8) {  // of each four inputs come the first and the third, then the others: see `shorts_of_block`
            I places;
            for (int lane = 0; lane < WIDE; lane++) places[lane] = lane % 4 % 3 ? lane ^ 3 : lane;
            whole[i] = __builtin_shuffle(whole[i], places);
        }
        const I upper = form == SHORTS ? whole[i] : (whole[i] + 2048) >> 12;
        *(T *)first = __builtin_convertvector(upper, T);
        if (form == TWO_SHORTS) *(T *)(first + BLOCK) = __builtin_convertvector(whole[i] - upper * 4096, T);
    }
    return unit;
}

// As `in_parts`, for rows of 8 bits, where each 16 numbers have a unit.
static void in_bytes(const X *x, int8_t *into, float *units, float *sums) {
    for (int half = 0; half < 2; half++) {
        V some[OF_HALF];
        I whole[OF_HALF];
        for (int i = 0; i < OF_HALF; i++) some[i] = vector_of_x(x + 16 * half + i * WIDE);
        const float size = largest_of(some, OF_HALF);
        const int is_number = size < INFINITY;
        const float times = size < 0x1p-100f ? 0 : 127 / size;
        units[half] = is_number ? size / 127 : NAN;
        for (int i = 0; i < OF_HALF; i++) {
            whole[i] = ROUNDED(some[i] * times) & -is_number;
            *(C *)(into + 16 * half + i * WIDE) = __builtin_convertvector(whole[i], C);
        }
        sums[half] = (float)sum_of(whole, OF_HALF) * units[half];
    }
}
#endif

// Up to WIDE outputs from `first` on; the last panel may have fewer than lanes.
static void store(const Weights *w, int64_t first, V sums, void *out, int out_is_float32, int64_t stride, const void *y,
                  int y_is_float32, int64_t row) {
    const int64_t left = w->outputs - first, at = row * stride + first;
    const int64_t many = left < 0 ? 0 : left;
    if (many >= WIDE) {
        if (w->bias) sums += *(const V *)(w->bias + first);
        if (y) sums += vector_of(y, at, y_is_float32);
        put_vector(out, at, sums, out_is_float32);
        return;
    }
    float found[WIDE];
    memcpy(found, &sums, sizeof found);
    if (w->bias)
        for (int64_t i = 0; i < many; i++) found[i] += w->bias[first + i];
    for (int64_t i = 0; i < many && y; i++) found[i] += number(y, at + i, y_is_float32);
    for (int64_t i = 0; i < many; i++) put(out, at + i, found[i], out_is_float32);
}

// Successive steps in the lowest of `bits` bits of a word's bytes (or halves, if `unit` is 16), the next ones above them,
// and so on. Of steps their bits from `shift` on.
INLINE uint32_t word_of(const uint8_t *steps, int shift, int bits, int unit) {
    const int units = 32 / unit;
    uint32_t found = 0;
    for (int i = 0; i < 32 / bits; i++)
        found |= (uint32_t)(steps[i] >> shift & ((1 << bits) - 1)) << (unit * (i % units) + bits * (i / units));
    return found;
}

// words [panels][inputs * bits / 32][lanes] of steps [panels][lanes][inputs] of 4 to 6 bits.
// 5 bits: of 32 inputs four words with their lower bits, then one with the highest. 6 bits: of 16 inputs three words,
// whose bytes have one step each and, above it, two bits of one of the last four.
void pearl_pack(const uint8_t *steps, int64_t panels, int64_t inputs, int bits, int is_table, uint32_t *words) {
    const int block = bits == 6 ? 16 : 32;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0; first < inputs; first += block)
            for (int word = 0; word < block * bits / 32; word++)
                for (int64_t lane = 0; lane < LANES; lane++) {
                    const uint8_t *some = steps + (panel * LANES + lane) * inputs + first;
                    if (bits < 6) {
                        *words++ = word == 4 ? word_of(some, 4, 1, 8) : word_of(some + 8 * word, 0, 4, ROUNDS && is_table ? 16 : 8);
                        continue;
                    }
                    uint32_t found = 0;
                    for (int i = 0; i < 4; i++)
                        found |= (some[4 * word + i] | (uint32_t)(some[12 + i] >> 2 * word & 3) << 6) << 8 * i;
                    *words++ = found;
                }
}

int pearl_version(void) {
    return VERSION;
}

int pearl_lanes(void) {
    return LANES;
}

// Whether rows are rounded to 8 bits for these weights.
int pearl_rounds_rows(const Weights *w) {
    return w->rounds_rows && TAKES_BYTES(w->bits);
}

// Whether x is rounded to bfloat16.
int pearl_rounds(void) {
    return ROUNDS;
}

// The form in which rows of a product are multiplied.
static int form_of(const Weights *w, int x_is_float32, int64_t rows) {
    if (pearl_rounds_rows(w)) return BYTES;
    if (x_is_float32 && !ROUNDS) return TWO_SHORTS;
    return TAKES_BYTES(w->bits) && rows <= FEW ? TWO_BYTES : SHORTS;
}

// What the panels of a product have in common. of_row: bytes of a row; of_parts: those of its parts of a block.
typedef struct {
    const Weights *w;
    const uint8_t *converted, *parts;
    const float *totals, *less, *units;
    const void *y;
    void *out;
    int y_is_float32, out_is_float32, form, units_of_row;
    int64_t of_row, of_parts, stride, rows, together;
} Product;

// A piece of a product. A thread keeps the weights of a panel in its cache while it goes through the rows.
static void multiply_panels(const void *work, int64_t piece, int thread) {
    const Product *p = work;
    const int64_t panels = (p->w->outputs + LANES - 1) / LANES, inputs = p->w->inputs, first = piece * p->together;
    const int64_t end = first + p->together < panels ? first + p->together : panels;
    V sums[SUMS * VECTORS];
    for (int64_t row = 0; row < p->rows; row += ROWS) {
        const int some = p->rows - row < ROWS ? p->rows - row : ROWS, of_panel = some * VECTORS;
        const Rows given = {(X *)(p->converted + row * p->of_row), p->totals + row, p->less + row,
                            p->parts + row * p->of_parts, p->units + row * p->units_of_row, inputs, p->rows, p->form};
        for (int64_t panel = first; panel < end; panel++)
            multiply_panel(p->w, panel, &given, some, sums + (panel - first) * of_panel);
        if (!keep(thread)) return;
        const V *sum = sums;
        for (int64_t panel = first; panel < end; panel++)
            for (int i = 0; i < of_panel; i++)
                store(p->w, panel * LANES + i % VECTORS * WIDE, *sum++, p->out, p->out_is_float32, p->stride, p->y,
                      p->y_is_float32, row + i / VECTORS);
    }
}

// Panels of a piece: a thread takes several pieces, so that one that is late holds up little.
static int64_t panels_together(int64_t panels, int64_t rows, int threads) {
    const int64_t some = rows < ROWS ? rows : ROWS;
    int64_t together = panels / (PIECES * threads);
    if (together * some > SUMS) together = SUMS / some;
    return together ? together : 1;
}

// out [rows, outputs] = x [rows, inputs] times the weights, plus bias and y [rows, outputs] if there are any, whose rows,
// and those of out, begin `stride` numbers behind one another.
// `scratch` holds rows * (3 * inputs + inputs / group) floats.
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t stride, int64_t rows, float *scratch, int threads) {
    const int64_t inputs = w->inputs, groups = w->bits >= 16 ? 0 : inputs / w->group, size = w->group % BLOCK ? 16 : 32;
    const int64_t blocks = w->bits >= 16 ? 0 : inputs / size, are_whole = TAKES_PARTS(w->bits);
    const int form = form_of(w, x_is_float32, rows);
    float *totals = scratch, *less = totals + rows * groups, *units = less + rows * blocks;
    const int64_t all_units = rows * (inputs / (form == BYTES ? 16 : BLOCK));
    const int is_float32 = w->bits == 32 || !ROUNDS;
    const int64_t of_row = inputs * (is_float32 ? 4 : 2);  // bytes
    uint8_t *converted = (uint8_t *)(units + all_units), *parts = converted + rows * of_row;
    const int64_t of_parts = BLOCK * (form == BYTES ? 1 : form == TWO_SHORTS ? 4 : 2);  // bytes
    convert(x, converted, rows * inputs, x_is_float32, is_float32);
    const int has_totals = w->least || w->zeros, has_less = has_totals || w->bits < 8;
    const int64_t together = groups ? w->group / size : 0;
    for (int64_t row = 0; row < rows; row++) {
        const X *some = (X *)(converted + row * of_row);
#if WHOLE
        for (int64_t block = 0; block < inputs / BLOCK && are_whole; block++) {
            const int64_t at = block * rows + row;
            float sums[2];
            if (form == BYTES) in_bytes(some + block * BLOCK, (int8_t *)parts + at * of_parts, units + 2 * at, sums);
            else units[at] = in_parts(some + block * BLOCK, w->bits, form, parts + at * of_parts, sums);
            if (size == 32) less[at] = sums[0] + sums[1];
            else less[2 * block * rows + row] = sums[0], less[(2 * block + 1) * rows + row] = sums[1];
        }
#endif
        for (int64_t block = 0; block < blocks && !are_whole && has_less; block++)
            less[block * rows + row] = total_of(some + block * size, size);
        for (int64_t group = 0; group < groups && has_totals; group++) {
            float total = 0;
            for (int64_t i = group * together; i < (group + 1) * together; i++) total += less[i * rows + row];
            totals[group * rows + row] = total;
        }
    }
    for (int64_t i = 0; i < rows * blocks && (are_whole || has_less); i++) less[i] *= -w->offset;
    const int64_t panels = (w->outputs + LANES - 1) / LANES;
    const Product product = {
        w, converted, parts, totals, less, units, y, out, y_is_float32, out_is_float32, form, form == BYTES ? 2 : 1, of_row,
        of_parts, stride, rows, panels_together(panels, rows, threads),
    };
    in_pieces(multiply_panels, &product, (panels + product.together - 1) / product.together, threads);
}
