// Products of a forward pass on a CPU, whose bits do not depend on how many rows are computed together.
//
// A forward of few rows spends its time on reading the weights. So weights keep the bits that they have in a file, and are
// converted to numbers in registers.  A panel has 16 outputs, one in each lane.  A lane adds its inputs in one order,
// whatever the number of rows and threads.  `native.Native` fills in the fields of `Weights`.
//
// This file is built for several instruction sets of x86, and once for none; `native.py` loads the best build for the
// processor.
#include "native.h"

#define VECTORS (LANES / WIDE)  // vectors of a panel
#define BLOCK 32  // inputs whose sum is scaled at once; 16 where groups are no multiple of 32
#define AHEAD 4096  // bytes of weights that are fetched before they are needed: a page
#define ROWS 64   // rows that share the unpacking of a block
#define PIECES 8  // pieces of a product for each thread
#if WIDE == 16
#define TOGETHER 6  // rows whose sums fit the registers
#else
#define TOGETHER 2
#endif

// How the scales of groups are stored. FLOAT16, BFLOAT16, FLOAT32: as such. TWO_LEVELS, TWO_LEVELS_SIGNED: as bytes, to be
// multiplied by a float16 for 256 inputs. DIVIDED: as floats of 8 bits (e4m3), to be divided by a float32 for their row.
enum { FLOAT16, BFLOAT16, TWO_LEVELS, TWO_LEVELS_SIGNED, FLOAT32, DIVIDED };
// Values in place of bits. FLOAT8: steps are floats of 8 bits (e4m3). In the others, steps of 4 bits are places in a table
// of 16 numbers. TABLE: of any numbers. WHOLE_TABLE: of signed integers of 8 bits. SMALL_TABLE: of unsigned integers of 5
// bits, from which `offset` is subtracted.
enum { FLOAT8 = 9, TABLE = 10, WHOLE_TABLE = 11, SMALL_TABLE = 7 };

INLINE int width_of(int bits) {
    return bits >= TABLE || bits == SMALL_TABLE ? 4 : bits == FLOAT8 ? 8 : bits;
}

// Returns the scales, or the least weights, of a vector's lanes. They begin at `at`. Their factors (of 256 inputs) or
// divisors (of a row) begin at `above`.
INLINE V scales_of(const uint8_t *scales, const uint8_t *upper, int64_t at, int64_t above, int kind) {
    if (kind == BFLOAT16) return from_bfloat16(*(const H *)(scales + 2 * at));
    if (kind == FLOAT16) return from_float16(scales + 2 * at);
    if (kind == FLOAT32) return *(const V *)(scales + 4 * at);
    if (kind == DIVIDED) return from_float8(scales + at) / *(const V *)(upper + 4 * above);
    const V by = from_float16(upper + 2 * above);
    return from_bytes(scales + at, kind == TWO_LEVELS_SIGNED) * by;
}

// X: the type in which inputs are multiplied. WHOLE: whether steps of 4 to 6 and of 8 bits are multiplied as integers, by
// the parts of inputs. ROUNDS: whether inputs of float32 are rounded to bfloat16.
#ifdef BF16
typedef uint16_t X;
#define ROUNDS 1
#else
typedef float X;
#define ROUNDS 0
#endif
#define WHOLE (WIDE > 4)

// The rows of a product.
typedef struct {
    const X *x;           // [rows, inputs]; for `float_rows` float32
    const float *totals;  // [rows, groups]: sum of the x of a group
    const float *less;    // [rows, blocks]: -offset * (sum of the x of a block), to be added to the block's sum of steps times x
    // [rows, parts, inputs], if WHOLE: inputs as integers, to be multiplied by the unit of their block. They are cut into
    // parts so that sums of products are exact, in any order. Inputs of bfloat16 become integers of 16 bits, inputs of
    // float32 integers of 24. Parts are bytes, and each counts 256 times as much as the next part. If TAKES_SHORTS, parts
    // have 16 bits, and each counts 4,096 times as much as the next.
    const void *parts;
    const float *units;   // [rows, inputs / BLOCK]
    int64_t inputs, blocks;
    int are_wide;  // whether the integers have 24 bits
} Rows;

#ifdef BF16
// Converts the steps of a panel's pairs of inputs to bfloat16: [pairs][16 lanes][2].
INLINE void unpack(const Weights *w, int64_t at, __m512i table, int bits, int pairs, __m512i *found) {
    for (int i = 0; i < pairs; i++) {
        if (bits == TABLE) {
            const __m512i words = _mm512_loadu_si512(w->steps + at * LANES / 2 + 64 * (i / 4));
            found[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * (i % 4)), table);
            continue;
        }
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(w->steps + at * LANES + 32 * i)));
        const __m512i size = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
        __m512i step = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
        // Takes subnormal numbers from a table: in products of bfloat16 they would count as zero.
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
                          const V *scale, V *sums) {
    __m512i steps[BLOCK / 2];
    unpack(w, at, table, bits, pairs, steps);
    for (int row = 0; row < rows; row++) {
        const X *x = given->x + row * given->inputs + at;
        __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int i = 0; i < pairs; i += 4)
            for (int j = 0; j < 4; j++) part[j] = DOT(part[j], steps[i + j], pair(x + 2 * (i + j)));
        sums[row] += (((V)part[0] + (V)part[1]) + ((V)part[2] + (V)part[3])) * *scale;
    }
}

// Multiplies by a panel of bfloat16 weights [inputs / 2][16 lanes][2].
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
        sums[row] = (V)_mm512_add_ps(_mm512_add_ps(part[row][0], part[row][1]), _mm512_add_ps(part[row][2], part[row][3]));
}
#else
// Returns the numbers at these places of a table of 16.
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

// Returns the steps of the i-th pair of inputs from `at` on, for the lanes of a vector.
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
                          const V *scales, V *sums) {
    for (int vector = 0; vector < VECTORS; vector++) {
        V steps[BLOCK];
        for (int i = 0; i < pairs; i++) unpack(w, at, bits, i, vector, steps + 2 * i);
        for (int row = 0; row < rows; row++) {
            const X *x = given->x + row * given->inputs + at;
            V part[4] = {{0}, {0}, {0}, {0}};
            if (bits < 8) part[0] += given->less[row * given->blocks + at / (2 * pairs)];
            for (int i = 0; i < 2 * pairs; i += 4)
                for (int j = 0; j < 4; j++) part[j] += steps[i + j] * x[i + j];
            sums[row * VECTORS + vector] += ((part[0] + part[1]) + (part[2] + part[3])) * scales[vector];
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

// Multiplies weights [inputs][16 lanes] of float32, float16 or bfloat16 by rows of float32, without rounding them: for
// models of float32 and float16.
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

#define TAKES_SHORTS(bits) ((bits) == 8 || (bits) == WHOLE_TABLE)

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

// WITH8 adds products of bytes to a sum: of four in each lane or, without VNNI, of two in each half of a lane, with sums
// of 16 bits. WITH16 adds products of two numbers of 16 bits.
#ifdef VNNI
#define WITH8(sum, steps, x) DOT8(sum, steps, x)
#define WITH16(sum, steps, x) DOT16(sum, steps, x)
#else
#define VNNI 0
#define WITH8(sum, steps, x) PLUS16(sum, PAIRS8(steps, x))
#define WITH16(sum, steps, x) PLUS32(sum, PAIRS16(steps, x))
#endif
#define UNROLLED _Pragma("GCC unroll 16")

// Returns the steps of the i-th four inputs from `at` on, for the lanes of a vector.
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

// Does the same as `rows_of_block`, for steps of 8 bits, or steps of 4 bits that are places in a table.
INLINE void shorts_of_block(const Weights *w, int64_t at, int bits, int pairs, __m128i table, int parts,
                            const Rows *given, int rows, const V *scales, V *sums) {
    for (int vector = 0; vector < VECTORS; vector++) {
        B steps[BLOCK / 2];
        for (int i = 0; i < pairs && bits == 8; i++)
            steps[i] = WIDENED(w->steps + at * LANES + 2 * LANES * i + 2 * WIDE * vector);
        for (int i = 0; i < pairs && bits == WHOLE_TABLE; i += 2) {
            const B four = bytes_of(w, at, bits, table, i / 2, vector);
            steps[i] = SIGNED_RIGHT(LEFT(four, 8), 8);  // the first and third inputs: see `in_parts`
            steps[i + 1] = SIGNED_RIGHT(four, 8);
        }
        for (int row = 0; row < rows; row++) {
            V sum = {0};
            for (int part = 0; part < parts; part++) {
                const int16_t *x = (const int16_t *)given->parts + (row * parts + part) * given->inputs + at;
                B even = EACH8(0), odd = even;
                for (int i = 0; i < pairs; i += 2) {
                    even = WITH16(even, steps[i], EACH32(four_bytes(x + 2 * i)));
                    odd = WITH16(odd, steps[i + 1], EACH32(four_bytes(x + 2 * i + 2)));
                }
                sum = sum * 4096.0f + FLOATS(PLUS32(even, odd));
            }
            sums[row * VECTORS + vector] += sum * given->units[row * (given->inputs / BLOCK) + at / BLOCK] * scales[vector];
        }
    }
}

// Does the same as `rows_of_block`, for steps of 4 to 6 bits.
INLINE void bytes_of_block(const Weights *w, int64_t at, int bits, int pairs, __m128i table, int parts,
                           const Rows *given, int rows, const V *scales, V *sums) {
    const int many = pairs / 2, size = bits == SMALL_TABLE ? 5 : bits;
    const int most = VNNI ? many : 8 >> (size - 4);  // fours of inputs; most of these whose sum fits 16 bits
    B steps[BLOCK / 4][VECTORS];
    const int is_one = __builtin_constant_p(rows) && rows == 1;  // a single row uses its steps as they are unpacked
    if (!is_one)
        for (int i = 0; i < many; i++)
            for (int vector = 0; vector < VECTORS; vector++) steps[i][vector] = bytes_of(w, at, bits, table, i, vector);
    for (int row = 0; row < rows; row++) {
        const int8_t *x = (const int8_t *)given->parts + row * parts * given->inputs + at;
        B whole[3][VECTORS];
        UNROLLED for (int first = 0; first < many; first += most) {
            B some[3][VECTORS];
            UNROLLED for (int i = first; i < first + most; i++)
                UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
                    const B each = is_one ? bytes_of(w, at, bits, table, i, vector) : steps[i][vector];
                    UNROLLED for (int part = 0; part < parts; part++) {
                        const B before = i > first ? some[part][vector] : EACH8(0);
                        some[part][vector] = WITH8(before, each, EACH32(four_bytes(x + part * given->inputs + 4 * i)));
                        __asm__("" : "+v"(some[part][vector]));  // GCC would sum in another order, of more registers
                    }
                }
            UNROLLED for (int vector = 0; vector < VECTORS; vector++)
                UNROLLED for (int part = 0; part < parts; part++) {
                    const B sum = VNNI ? some[part][vector] : PAIRS16(some[part][vector], EACH16(1));
                    whole[part][vector] = first ? PLUS32(whole[part][vector], sum) : sum;
                }
        }
        const float unit = given->units[row * (given->inputs / BLOCK) + at / BLOCK];
        UNROLLED for (int vector = 0; vector < VECTORS; vector++) {
            V sum = FLOATS(parts == 2 ? PLUS32(LEFT32(whole[0][vector], 8), whole[1][vector]) : whole[0][vector]);
            UNROLLED for (int part = 1; part < parts && parts > 2; part++)
                sum = sum * 256.0f + FLOATS(whole[part][vector]);
            sum = sum * unit + given->less[row * given->blocks + at / (2 * pairs)];
            sums[row * VECTORS + vector] += sum * scales[vector];
        }
    }
}
#endif

// Computes the sums [rows, VECTORS] of a panel. bits, pairs, kind and parts are constants wherever this is inlined.
INLINE void sums_of(const Weights *w, int64_t panel, const Rows *rows_given, int rows, V *found, int bits, int pairs,
                    int kind, int parts) {
    const Rows own = *rows_given, *given = &own;  // copies, which stay in registers
    const int64_t inputs = w->inputs, groups = inputs / w->group;
    const int width = width_of(bits);
    Weights part = *w;  // its pointers begin at this panel
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
    uint16_t numbers[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // FLOAT8: the numbers below 2^-6
    for (int i = 0; i < 32 && bits == TABLE; i++) numbers[i] = to_bfloat16(w->table[i % 16]);
    const __m512i table = _mm512_loadu_si512(numbers);
#endif
#if WHOLE
    int8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = bits == WHOLE_TABLE || bits == SMALL_TABLE ? (int8_t)w->table[i] : 0;
    const __m128i whole_table = _mm_loadu_si128((const void *)bytes);
#endif
    for (int i = 0; i < rows * VECTORS; i++) sums[i] = (V){0};
    V scales[VECTORS] = {{0}};
    for (int64_t at = 0, group = -1, end = 0; at < inputs; at += 2 * pairs) {
        if (at == end) {
            group++;
            end += part.group;
            for (int vector = 0; vector < VECTORS; vector++) {
                const int64_t first = (panel * groups + group) * LANES + vector * WIDE;
                const int64_t upper = kind == DIVIDED ? panel : panel * (inputs / 256) + at / 256;
                const int64_t above = upper * LANES + vector * WIDE;
                const V scale = scales_of(part.scales, part.of_scales, first, above, kind);
                scales[vector] = bits == FLOAT8 && !ROUNDS ? scale * 256 : scale;  // see `unpack`
                if (!part.least && !part.zeros) continue;
                const V least = part.least ? scales_of(part.least, part.of_least, first, above, kind)
                                           : -scale * from_bytes(part.zeros + first, 0);
                for (int row = 0; row < rows; row++)
                    sums[row * VECTORS + vector] += least * given->totals[row * groups + group];
            }
        }
        // Prefetches the next weights, perhaps of the next panel: memory is slower than one row's products. Weights are
        // read once, so they need not stay in the larger caches.
        for (int64_t i = 0; i < 2 * pairs * LANES * width / 8; i += 64)
            __builtin_prefetch(part.steps + at * LANES * width / 8 + AHEAD + i, 0, 0);
#if WHOLE
        if (bits < 8) {
            bytes_of_block(&part, at, bits, pairs, whole_table, parts, given, rows, scales, sums);
            continue;
        }
        if (TAKES_SHORTS(bits)) {
            shorts_of_block(&part, at, bits, pairs, whole_table, parts - 1, given, rows, scales, sums);
            continue;
        }
#endif
#ifdef BF16
        rows_of_block(&part, at, bits, pairs, table, given, rows, scales, sums);
#else
        rows_of_block(&part, at, bits, pairs, given, rows, scales, sums);
#endif
    }
    for (int vector = 0; vector < VECTORS && rows == 1; vector++) found[vector] = one[vector];
}

static void multiply_panel(const Weights *w, int64_t panel, const Rows *given, int rows, V *sums) {
#define CASE(BITS, PAIRS, KIND) \
    if (w->bits == BITS && w->kind == KIND) { \
        if (!ROUNDS && given->are_wide) sums_of(w, panel, given, rows, sums, BITS, PAIRS, KIND, 3); \
        else if (rows == 1) sums_of(w, panel, given, 1, sums, BITS, PAIRS, KIND, 2); /* they stay in registers */ \
        else sums_of(w, panel, given, rows, sums, BITS, PAIRS, KIND, 2); \
        return; \
    }
    if (w->bits == 16) {
        sums_of(w, panel, given, rows, sums, 16, 16, 0, 0);
        return;
    }
#define WHOLE_CASE(KIND) \
    if (w->bits == 32 && w->kind == KIND) { \
        sums_of(w, panel, given, rows, sums, 32, 16, KIND, 0); \
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

// Converts rows to the type in which they are multiplied: float32 or bfloat16.
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
// Cuts a block of x into parts, for steps of `bits` bits; see `Rows`. The first part is written to `into`, and each further
// part `stride` numbers after the part before. Returns the block's unit, a power of two, so that inputs that fit are
// exact. Writes the sum of each 16 of these inputs to `sums`.
static float in_parts(const X *x, int64_t bits, int parts, void *into, int64_t stride, float *sums) {
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const float value = float_of(x[i]);
        uint32_t number;
        memcpy(&number, &value, 4);
        number &= 0x7fffffff;
        largest = number > largest ? number : largest;
    }
    float size, times;
    memcpy(&size, &largest, 4);
    const int is_number = largest < 0x7f800000;  // otherwise it is NaN or infinite
    const int exponent = (int)(largest >> 23) - 127, room = parts == 2 ? 14 : 22;  // the largest: 2^room to 2^(room + 1)
    // Parts are rounded to the nearest, so the first is at most 127 below this.
    const float most = parts == 2 ? 127 * 256 + 127 : 127 * 65536 + 127 * 256 + 127;
    const uint32_t power = (uint32_t)(127 + room - exponent) << 23;
    memcpy(&times, &power, 4);
    if (size * times > most) times /= 2;
    if (!is_number || exponent < -100) times = 0;
    const float unit = is_number ? times ? 1 / times : 0 : NAN;
    int32_t whole[BLOCK];
    for (int i = 0; i < BLOCK; i++) whole[i] = is_number ? (int32_t)rintf(float_of(x[i]) * times) : 0;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) sum += whole[16 * half + i];
        sums[half] = (float)sum * unit;
    }
    if (TAKES_SHORTS(bits)) {
        int16_t *first = into;
        for (int i = 0; i < BLOCK; i++) {
            // With a table, the first and third of each four inputs come first, then the others.
            const int place = bits == 8 || i % 4 % 3 == 0 ? i : i ^ 3;
            first[place] = parts == 2 ? whole[i] : (whole[i] + 2048) >> 12;
            if (parts > 2) first[place + stride] = whole[i] - first[place] * 4096;
        }
    } else {
        for (int part = parts - 1; part >= 0; part--) {
            int8_t *bytes = (int8_t *)into + part * stride;
            for (int i = 0; i < BLOCK; i++) {
                bytes[i] = whole[i];
                whole[i] = (whole[i] - (int8_t)whole[i]) >> 8;
            }
        }
    }
    return unit;
}
#endif

// Stores up to WIDE outputs from `first` on; the last panel may have fewer outputs than lanes.
static void store(const Weights *w, int64_t first, V sums, void *out, int out_is_float32, int64_t stride, const void *y,
                  int y_is_float32, int64_t row) {
    const int64_t left = w->outputs - first, at = row * stride + first;
    const int64_t many = left < 0 ? 0 : left < WIDE ? left : WIDE;
    float found[WIDE];
    memcpy(found, &sums, sizeof found);
    if (w->bias)
        for (int64_t i = 0; i < many; i++) found[i] += w->bias[first + i];
    for (int64_t i = 0; i < many && y; i++) found[i] += number(y, at + i, y_is_float32);
    for (int64_t i = 0; i < many; i++) put(out, at + i, found[i], out_is_float32);
}

// Packs `bits` bits of successive steps, from bit `shift` on, into a word. The first steps go to the lowest bits of the
// word's bytes (or halves, if `unit` is 16), the next steps above them, and so on.
INLINE uint32_t word_of(const uint8_t *steps, int shift, int bits, int unit) {
    const int units = 32 / unit;
    uint32_t found = 0;
    for (int i = 0; i < 32 / bits; i++)
        found |= (uint32_t)(steps[i] >> shift & ((1 << bits) - 1)) << (unit * (i % units) + bits * (i / units));
    return found;
}

// Packs steps [panels][16 lanes][inputs] of 4 to 6 bits into words [panels][inputs * bits / 32][16 lanes].
// 5 bits: each 32 inputs have four words with the lower bits of steps, and then a word with their highest bits.
// 6 bits: each 16 inputs have three words. A byte has one of the first 12 steps and, above it, two bits of one of the last
// four steps.
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

// Returns whether x is rounded to bfloat16.
int pearl_rounds(void) {
    return ROUNDS;
}

// The arguments that all panels of a product share. of_row, of_parts: bytes of a row in `converted` and in `parts`.
typedef struct {
    const Weights *w;
    const uint8_t *converted, *parts;
    const float *totals, *less, *units;
    const void *y;
    void *out;
    int y_is_float32, out_is_float32, are_wide;
    int64_t of_row, of_parts, groups, blocks, stride, rows, together;
} Product;

// Computes a piece of a product. The weights of a panel stay in the core's cache while all rows are multiplied by them.
static void multiply_panels(const void *work, int64_t piece, int thread) {
    const Product *p = work;
    const int64_t panels = (p->w->outputs + LANES - 1) / LANES, inputs = p->w->inputs, first = piece * p->together;
    const int64_t end = first + p->together < panels ? first + p->together : panels;
    V sums[ROWS * VECTORS];
    for (int64_t panel = first; panel < end; panel++)
        for (int64_t row = 0; row < p->rows; row += ROWS) {
            const int some = p->rows - row < ROWS ? p->rows - row : ROWS;
            const Rows given = {(X *)(p->converted + row * p->of_row), p->totals + row * p->groups,
                                p->less + row * p->blocks, p->parts + row * p->of_parts,
                                p->units + row * (inputs / BLOCK), inputs, p->blocks, p->are_wide};
            multiply_panel(p->w, panel, &given, some, sums);
            for (int i = 0; i < some * VECTORS; i++)
                store(p->w, panel * LANES + i % VECTORS * WIDE, sums[i], p->out, p->out_is_float32, p->stride, p->y,
                      p->y_is_float32, row + i / VECTORS);
        }
}

// Returns how many panels a piece has. There are several pieces for each thread, so that a late thread delays little.
static int64_t panels_together(int64_t panels, int threads) {
    const int64_t together = panels / (PIECES * threads);
    return together ? together : 1;
}

// Computes out [rows, outputs] = x [rows, inputs] times the weights, plus the bias and y [rows, outputs], if given. Rows of
// out and of y are `stride` numbers apart. `scratch` holds rows * (3 * inputs + inputs / group) floats.
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t stride, int64_t rows, float *scratch, int threads) {
    const int64_t inputs = w->inputs, groups = w->bits >= 16 ? 0 : inputs / w->group, size = w->group % BLOCK ? 16 : 32;
    const int64_t blocks = w->bits >= 16 ? 0 : inputs / size, are_whole = WHOLE && (w->bits <= 8 || w->bits == WHOLE_TABLE);
    const int parts_of_row = x_is_float32 && !ROUNDS ? 3 : 2;
    float *totals = scratch, *less = totals + rows * groups, *units = less + rows * blocks;
    const int is_float32 = w->bits == 32 || !ROUNDS;
    const int64_t of_row = inputs * (is_float32 ? 4 : 2);  // bytes
    uint8_t *converted = (uint8_t *)(units + rows * (inputs / BLOCK)), *parts = converted + rows * of_row;
    const int64_t each = inputs * (TAKES_SHORTS(w->bits) ? 2 * parts_of_row - 2 : parts_of_row);  // bytes of the parts of a row
    convert(x, converted, rows * inputs, x_is_float32, is_float32);
#if WHOLE
    for (int64_t i = 0; i < rows * inputs / BLOCK && are_whole; i++) {
        const int64_t row = i / (inputs / BLOCK), at = i % (inputs / BLOCK) * BLOCK;
        uint8_t *into = parts + row * each + at * (TAKES_SHORTS(w->bits) ? 2 : 1);
        float sums[2];
        units[i] = in_parts((X *)(converted + row * of_row) + at, w->bits, parts_of_row, into, inputs, sums);
        if (size == 16) memcpy(less + 2 * i, sums, sizeof sums);
        else less[i] = sums[0] + sums[1];
    }
#endif
    const int has_totals = w->least || w->zeros;
    for (int64_t i = 0; i < rows * blocks && !are_whole && (has_totals || w->bits < 8); i++)
        less[i] = total_of((X *)converted + i * size, size);
    for (int64_t i = 0; i < rows * groups && has_totals; i++) {
        totals[i] = 0;
        for (int64_t j = 0; j < w->group / size; j++) totals[i] += less[i * (w->group / size) + j];
    }
    for (int64_t i = 0; i < rows * blocks && w->bits < 8; i++) less[i] *= -w->offset;
    const int64_t panels = (w->outputs + LANES - 1) / LANES;
    const Product product = {
        w, converted, parts, totals, less, units, y, out, y_is_float32, out_is_float32, parts_of_row > 2,
        of_row, each, groups, blocks, stride, rows, panels_together(panels, threads),
    };
    in_pieces(multiply_panels, &product, (panels + product.together - 1) / product.together, threads);
}
