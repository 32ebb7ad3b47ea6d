// Products of a forward pass on a CPU, whose bits do not depend on how many rows are computed together.
//
// Reading the weights is what a forward of few rows spends its time on, so weights stay in the bits that they have in
// a file and become numbers in registers.  A panel is 16 outputs, one a lane; a lane adds its inputs in one order,
// whatever the number of rows and threads.  The fields of `Weights` are laid out by `native.Native`.
//
// Built several times, for instruction sets of x86 and without any; `native.py` loads the best for the processor.
#include "native.h"

#define BLOCK 32  // inputs whose sum is scaled at once; 16 where a group is 16
#define AHEAD 4096  // bytes of weights that are fetched before they are needed: a page
#define ROWS 64   // rows that share the unpacking of a block
#if WIDE == 16
#define TOGETHER 6  // rows whose sums fit the registers
#else
#define TOGETHER 2
#endif

// How the scales of groups are stored: as such, or as bytes times a float16 for 256 inputs.
enum { FLOAT16, BFLOAT16, TWO_LEVELS, TWO_LEVELS_SIGNED, FLOAT32 };
// In place of bits: bytes that are floating-point numbers (e4m3); nibbles that number the weights of a table.
enum { FLOAT8 = 9, TABLE = 10 };

typedef struct {
    int64_t outputs, inputs, bits, group, kind;
    const uint8_t *low, *high;             // nibbles or whole bytes or bfloat16; bits above the fourth
    const uint8_t *scales, *of_scales;     // of each group; of 256 inputs
    const uint8_t *least, *of_least;       // likewise, what is added to each weight of a group
    const uint8_t *zeros;                  // of each group, bytes that are subtracted from its steps
    const float *bias;
    float offset;                          // subtracted from each step
    const float *table;                    // 16 numbers
} Weights;

// Of WIDE lanes, from `lane` on counted over all panels: the scales of a group, or its least weights.
INLINE V scale_of(const Weights *w, const uint8_t *scales, const uint8_t *upper, int64_t lane, int64_t group, int kind) {
    const int64_t panel = lane / LANES, inside = lane % LANES;
    const int64_t at = (panel * (w->inputs / w->group) + group) * LANES + inside;
    if (kind == BFLOAT16) return from_bfloat16(*(const H *)(scales + 2 * at));
    if (kind == FLOAT16) return from_float16(scales + 2 * at);
    if (kind == FLOAT32) return *(const V *)(scales + 4 * at);
    const int64_t above = (panel * (w->inputs / 256) + group * w->group / 256) * LANES + inside;
    const V by = from_float16(upper + 2 * above);
    return from_bytes(scales + at, kind == TWO_LEVELS_SIGNED) * by;
}

// X: what inputs are multiplied as. UNIT: bits of what steps are unpacked to. ADDED: to each step of 4 to 6 bits, see
// `unpack`; `Rows.less` takes it off again. WHOLE: steps are multiplied as whole numbers, and inputs in parts.
#ifdef BF16
typedef uint16_t X;
#define UNIT 16
#define ADDED(bits) (1 << (bits))
#define WHOLE 0
#else
typedef float X;
#define UNIT 8
#define ADDED(bits) 0
#define WHOLE (WIDE > 4)
#endif

// Rows that are multiplied.
typedef struct {
    const X *x;           // [rows, inputs]
    const float *totals;  // [rows, groups]: sums of x
    const float *less;    // [rows, blocks]: of a block, added to its sum of steps times x: minus the offset
    // If WHOLE: x is 65,536, 256 and 1 times the bytes [rows, 3, inputs], times the unit of its block; for steps of 8
    // bits 4,096 and 1 times numbers of 16 bits [rows, 2, inputs].
    const void *parts;
    const float *units;   // [rows, inputs / BLOCK]
    int64_t inputs, groups, blocks;
} Rows;

#ifdef BF16
// Once: a compiler would load it anew for every shift.
INLINE __m512i loaded(const uint8_t *from) {
    __m512i words = _mm512_loadu_si512(from);
    __asm__("" : "+v"(words));
    return words;
}

INLINE __m512i shifted(__m512i words, int by) {
    return by < 0 ? _mm512_srli_epi16(words, -by) : _mm512_slli_epi16(words, by);
}

// Steps of 32 (or 16) inputs of a panel, as pairs of bfloat16: [16 or 8][16 lanes][2].
//
// Of 4 to 6 bits plus 2^bits: a number of that exponent has the step in its first bits, with no conversion.
INLINE void unpack(const Weights *w, int64_t at, __m512i table, int bits, int pairs, __m512i *found) {
    if (bits == 8) {
        const uint8_t *steps = w->low + at * LANES;
        for (int i = 0; i < pairs; i++) {
            const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((void *)(steps + 32 * i))));
            const __m512 last = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((void *)(steps + 32 * i + 16))));
            found[i] = (__m512i)_mm512_cvtne2ps_pbh(last, first);
        }
        return;
    }
    if (bits == FLOAT8) {
        for (int i = 0; i < pairs; i++) {
            const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(w->low + at * LANES + 32 * i)));
            const __m512i size = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
            __m512i step = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
            // Subnormal numbers, which products of bfloat16 take for zero, from a table.
            step = _mm512_mask_permutexvar_epi16(step, _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8)), size, table);
            found[i] = _mm512_or_si512(step, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), bytes), 8));
        }
        return;
    }
    const uint8_t *low = w->low + at * LANES / 2;
    const int more = bits - 4, by = 7 - bits;  // bits above the fourth; a step's first bit in the number
    const __m512i high = bits == 5 || bits == 6 ? loaded(w->high + at * LANES * more / 8) : table;
    __m512i words = table;
    for (int i = 0; i < pairs; i++) {
        if (i % 4 == 0) words = loaded(low + 16 * i);
        if (bits == TABLE) {
            found[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * (i % 4)), table);
            continue;
        }
        found[i] = _mm512_ternarylogic_epi32(shifted(words, by - 4 * (i % 4)), _mm512_set1_epi16(15 << by),
                                             _mm512_set1_epi16((0x83 + more) << 7), 0xea);
        if (more)
            found[i] = _mm512_ternarylogic_epi32(shifted(high, by + 4 - more * i),
                                                 _mm512_set1_epi16(((1 << more) - 1) << (by + 4)), found[i], 0xea);
    }
}

INLINE __m512i pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm512_set1_epi32(both);
}
#define DOT(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, __m512i table, const Rows *given, int rows,
                          V scale, V *sums) {
    __m512i steps[BLOCK / 2];
    unpack(w, at, table, bits, pairs, steps);
    for (int row = 0; row < rows; row++) {
        const X *x = given->x + row * given->inputs + at;
        __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        if (bits < 8) part[0] = _mm512_set1_ps(given->less[row * given->blocks + at / (2 * pairs)]);
        for (int i = 0; i < pairs; i += 4)
            for (int j = 0; j < 4; j++) part[j] = DOT(part[j], steps[i + j], pair(x + 2 * (i + j)));
        sums[row] += (((V)part[0] + (V)part[1]) + ((V)part[2] + (V)part[3])) * scale;
    }
}

// Panels of bfloat16 weights: [inputs / 2][16 lanes][2].
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

// Steps of the i-th pair of inputs from `at` on.
INLINE void unpack(const Weights *w, int64_t at, int bits, int i, V *found) {
    if (bits == 8) {
        const T both = *(const T *)(w->low + at * LANES + 2 * LANES * i);
        found[0] = __builtin_convertvector((T)((H)both << 8) >> 8, V);
        found[1] = __builtin_convertvector(both >> 8, V);
        return;
    }
    if (bits == FLOAT8) {
        const H both = *(const H *)(w->low + at * LANES + 2 * LANES * i);
        for (int odd = 0; odd < 2; odd++) {
            const U byte = __builtin_convertvector((both >> 8 * odd) & 0xff, U);
            found[odd] = (V)((byte & 0x7f) << 20 | (byte & 0x80) << 24) * 0x1p120f;
        }
        return;
    }
    const int more = bits - 4;  // bits above the fourth
    const U words = *(const U *)(w->low + at * LANES / 2 + 64 * (i / 4));
    for (int odd = 0; odd < 2; odd++) {
        const int byte = 2 * (i % 2) + odd, field = i / 2;
        U step = (words >> (8 * byte + 4 * (field % 2))) & 15;
        if (bits == 5 || bits == 6) {
            const U high = *(const U *)(w->high + at * LANES * more / 8);
            step |= ((high >> (8 * byte + more * field)) & ((1u << more) - 1)) << 4;
        }
        found[odd] = bits == TABLE ? numbered(w->table, step) : __builtin_convertvector((I)step, V);
    }
}

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, const Rows *given, int rows, V scale,
                          V *sums) {
    V steps[BLOCK];
    for (int i = 0; i < pairs; i++) unpack(w, at, bits, i, steps + 2 * i);
    for (int row = 0; row < rows; row++) {
        const X *x = given->x + row * given->inputs + at;
        V part[4] = {{0}, {0}, {0}, {0}};
        if (bits < 8) part[0] += given->less[row * given->blocks + at / (2 * pairs)];
        for (int i = 0; i < 2 * pairs; i += 4)
            for (int j = 0; j < 4; j++) part[j] += steps[i + j] * x[i + j];
        sums[row] += ((part[0] + part[1]) + (part[2] + part[3])) * scale;
    }
}

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
#define PAIRS8(a, b) _mm512_maddubs_epi16(a, b)
#define PAIRS16(a, b) _mm512_madd_epi16(a, b)
#define WIDENED(at) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(at)))
#define EACH16(value) _mm512_set1_epi16(value)
#define PLUS16(a, b) _mm512_add_epi16(a, b)
#define PLUS32(a, b) _mm512_add_epi32(a, b)
#define FLOATS(a) (V)_mm512_cvtepi32_ps(a)
#else
typedef __m256i B;
#define LOAD(at) _mm256_loadu_si256((const void *)(at))
#define EACH8(value) _mm256_set1_epi8(value)
#define EACH32(value) _mm256_set1_epi32(value)
#define AND(a, b) _mm256_and_si256(a, b)
#define OR(a, b) _mm256_or_si256(a, b)
#define RIGHT(a, by) _mm256_srli_epi16(a, by)
#define LEFT(a, by) _mm256_slli_epi16(a, by)
#define PAIRS8(a, b) _mm256_maddubs_epi16(a, b)
#define PAIRS16(a, b) _mm256_madd_epi16(a, b)
#define WIDENED(at) _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at)))
#define EACH16(value) _mm256_set1_epi16(value)
#define PLUS16(a, b) _mm256_add_epi16(a, b)
#define PLUS32(a, b) _mm256_add_epi32(a, b)
#define FLOATS(a) (V)_mm256_cvtepi32_ps(a)
#endif

INLINE int32_t four_bytes(const void *at) {
    int32_t found;
    memcpy(&found, at, 4);
    return found;
}

// As `rows_of_block`, for steps of 8 bits.
INLINE void shorts_of_block(const Weights *w, int64_t at, int pairs, const Rows *given, int rows, V scale, V *sums) {
    B steps[BLOCK / 2];
    for (int i = 0; i < pairs; i++) steps[i] = WIDENED(w->low + at * LANES + 2 * LANES * i);
    for (int row = 0; row < rows; row++) {
        V sum = {0};
        for (int part = 0; part < 2; part++) {
            const int16_t *x = (const int16_t *)given->parts + (row * 2 + part) * given->inputs + at;
            B even = EACH8(0), odd = even;
            for (int i = 0; i < pairs; i += 2) {
                even = PLUS32(even, PAIRS16(steps[i], EACH32(four_bytes(x + 2 * i))));
                odd = PLUS32(odd, PAIRS16(steps[i + 1], EACH32(four_bytes(x + 2 * i + 2))));
            }
            sum = sum * 4096.0f + FLOATS(PLUS32(even, odd));
        }
        sums[row] += sum * given->units[row * (given->inputs / BLOCK) + at / BLOCK] * scale;
    }
}

// As `rows_of_block`, for steps of 4 to 6 bits: sums of products of bytes are whole numbers, so exact in any order.
INLINE void bytes_of_block(const Weights *w, int64_t at, int bits, int pairs, const Rows *given, int rows, V scale,
                           V *sums) {
    const int more = bits - 4, many = pairs / 2;  // vectors of four inputs of each lane
    const int most = 8 >> more;                   // whose products have room in 16 bits
    B steps[BLOCK / 4], high = EACH8(0), words = high;
    if (more) high = LOAD(w->high + at * LANES * more / 8);
    for (int i = 0; i < many; i++) {
        if (i % 2 == 0) words = LOAD(w->low + at * LANES / 2 + 32 * i);
        steps[i] = AND(i % 2 ? RIGHT(words, 4) : words, EACH8(15));
        const int by = 4 - more * i;
        if (more) steps[i] = OR(steps[i], AND(by < 0 ? RIGHT(high, -by) : LEFT(high, by), EACH8(((1 << more) - 1) << 4)));
    }
    for (int row = 0; row < rows; row++) {
        V sum = {0};
        for (int part = 0; part < 3; part++) {
            const int8_t *x = (const int8_t *)given->parts + (row * 3 + part) * given->inputs + at;
            B whole = EACH8(0);
            for (int first = 0; first < many; first += most) {
                B some = EACH8(0);
                for (int i = first; i < first + most; i++) {
                    some = PLUS16(some, PAIRS8(steps[i], EACH32(four_bytes(x + 4 * i))));
                }
                whole = PLUS32(whole, PAIRS16(some, EACH16(1)));
            }
            sum = sum * 256.0f + FLOATS(whole);
        }
        const float unit = given->units[row * (given->inputs / BLOCK) + at / BLOCK];
        sums[row] += (sum * unit + given->less[row * given->blocks + at / (2 * pairs)]) * scale;
    }
}
#endif

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
    for (int row = 0; row < rows; row++) sums[row] = (part[row][0] + part[row][1]) + (part[row][2] + part[row][3]);
}
#endif

// Sums of WIDE lanes of the rows. bits, pairs and kind are constants where this is inlined.
INLINE void lanes_of(const Weights *w, int64_t lane, const Rows *given, int rows, V *sums, int bits, int pairs,
                     int kind) {
    const int64_t inputs = w->inputs, panel = lane / LANES, inside = lane % LANES;
    const int width = bits == TABLE ? 4 : bits;
    Weights part = *w;  // from these lanes on
    if (bits == 16) {
        const uint16_t *weights = (const uint16_t *)w->low + panel * inputs * LANES + 2 * inside;
        const X *x = given->x;
        int row = 0;
        for (; row + TOGETHER <= rows; row += TOGETHER)
            plain_rows(weights, inputs, x + row * inputs, inputs, TOGETHER, sums + row);
        switch (rows - row) {
#if TOGETHER > 2
            case 5: plain_rows(weights, inputs, x + row * inputs, inputs, 5, sums + row); break;
            case 4: plain_rows(weights, inputs, x + row * inputs, inputs, 4, sums + row); break;
            case 3: plain_rows(weights, inputs, x + row * inputs, inputs, 3, sums + row); break;
            case 2: plain_rows(weights, inputs, x + row * inputs, inputs, 2, sums + row); break;
#endif
            case 1: plain_rows(weights, inputs, x + row * inputs, inputs, 1, sums + row); break;
        }
        return;
    }
    part.low += width < 8 ? panel * inputs * LANES / 2 + 4 * inside : panel * inputs * LANES + 2 * inside;
    if (width > 4 && width < 8) part.high += panel * inputs * LANES * (bits - 4) / 8 + 4 * inside;
#ifdef BF16
    uint16_t numbers[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // FLOAT8's below 2^-6
    for (int i = 0; i < 32 && bits == TABLE; i++) numbers[i] = to_bfloat16(w->table[i % 16]);
    const __m512i table = _mm512_loadu_si512(numbers);
#endif
    for (int row = 0; row < rows; row++) sums[row] = (V){0};
    V scale = {0};
    for (int64_t at = 0, group = -1, end = 0; at < inputs; at += 2 * pairs) {
        if (at == end) {
            group++;
            end += w->group;
            scale = scale_of(w, w->scales, w->of_scales, lane, group, kind);
            if (w->least || w->zeros) {
                const uint8_t *zeros = w->zeros + (panel * given->groups + group) * LANES + inside;
                const V least = w->least ? scale_of(w, w->least, w->of_least, lane, group, kind)
                                         : -scale * from_bytes(zeros, 0);
                for (int row = 0; row < rows; row++) sums[row] += least * given->totals[row * given->groups + group];
            }
        }
        // What comes next, perhaps of the next panel: memory is slower than one row's products.
        for (int64_t i = 0; i < 2 * pairs * LANES * width / 8; i += 64)
            __builtin_prefetch(part.low + at * LANES * (width < 8 ? 4 : 8) / 8 + AHEAD + i);
#ifdef BF16
        rows_of_block(&part, at, bits, pairs, table, given, rows, scale, sums);
#else
#if WHOLE
        if (bits < 8) {
            bytes_of_block(&part, at, bits, pairs, given, rows, scale, sums);
            continue;
        }
        if (bits == 8) {
            shorts_of_block(&part, at, pairs, given, rows, scale, sums);
            continue;
        }
#endif
        rows_of_block(&part, at, bits, pairs, given, rows, scale, sums);
#endif
    }
}

static void multiply_lanes(const Weights *w, int64_t lane, const Rows *given, int rows, V *sums) {
#define CASE(BITS, PAIRS, KIND) \
    if (w->bits == BITS && w->kind == KIND) { \
        if (rows == 1) lanes_of(w, lane, given, 1, sums, BITS, PAIRS, KIND); /* its sum stays in a register */ \
        else lanes_of(w, lane, given, rows, sums, BITS, PAIRS, KIND); \
        return; \
    }
    if (w->bits == 16) {
        lanes_of(w, lane, given, rows, sums, 16, 16, 0);
        return;
    }
    CASE(4, 16, FLOAT16) CASE(4, 16, BFLOAT16) CASE(4, 16, TWO_LEVELS)
    CASE(5, 16, FLOAT16) CASE(5, 16, TWO_LEVELS) CASE(6, 8, TWO_LEVELS_SIGNED)
    CASE(8, 16, FLOAT16) CASE(8, 16, BFLOAT16) CASE(8, 16, FLOAT32) CASE(FLOAT8, 16, FLOAT32)
    CASE(TABLE, 16, FLOAT16) CASE(TABLE, 16, BFLOAT16) CASE(TABLE, 16, FLOAT32) CASE(TABLE, 16, TWO_LEVELS_SIGNED)
}

static void convert(const uint16_t *given, X *x, int64_t count, int is_float32) {
#ifdef BF16
    if (is_float32)
        for (int64_t i = 0; i < count; i++) x[i] = to_bfloat16(((const float *)given)[i]);
    else
        memcpy(x, given, 2 * count);
#else
    if (is_float32)
        memcpy(x, given, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)given[i] << 16;
            memcpy(x + i, &bits, 4);
        }
#endif
}

INLINE float wide(X value) {
#ifdef BF16
    const uint32_t bits = (uint32_t)value << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
#else
    return value;
#endif
}

// `count` is a multiple of 16.
INLINE float total_of(const X *x, int64_t count) {
    float sums[16] = {0};
    for (int64_t i = 0; i < count; i += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += wide(x[i + lane]);
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

#if WHOLE
// Takes a block of x apart, for steps of so many bits: its first part to `parts`, others each `stride` numbers behind
// the one before; see `Rows`. Returns its unit.
static float in_parts(const float *x, int64_t bits, void *parts, int64_t stride) {
    const float most = 127 * 65536;  // a rounding above it still fits
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t number;
        memcpy(&number, x + i, 4);
        number &= 0x7fffffff;
        largest = number > largest ? number : largest;
    }
    float size;
    memcpy(&size, &largest, 4);
    const int is_number = largest < 0x7f800000;  // else it is not: NaN or infinite
    const float times = is_number && size > 1e-30f ? most / size : 0;
    int32_t whole[BLOCK];
    for (int i = 0; i < BLOCK; i++) whole[i] = is_number ? (int32_t)rintf(x[i] * times) : 0;
    if (bits == 8) {
        int16_t *into = parts;
        for (int i = 0; i < BLOCK; i++) {
            into[i] = (whole[i] + 2048) >> 12;
            into[i + stride] = whole[i] - into[i] * 4096;
        }
    } else {
        int8_t *into = parts;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t low = (int8_t)whole[i], rest = (whole[i] - low) >> 8, middle = (int8_t)rest;
            into[i] = (rest - middle) >> 8;
            into[i + stride] = middle;
            into[i + 2 * stride] = low;
        }
    }
    return is_number ? size / most : NAN;
}
#endif

// Up to WIDE outputs from `first` on; the last panel may have fewer than lanes.
static void store(const Weights *w, int64_t first, V sums, void *out, int out_is_float32, const void *y,
                  int y_is_float32, int64_t row) {
    const int64_t many = w->outputs - first < WIDE ? w->outputs - first : WIDE, at = row * w->outputs + first;
    float found[WIDE];
    memcpy(found, &sums, sizeof found);
    if (w->bias)
        for (int64_t i = 0; i < many; i++) found[i] += w->bias[first + i];
    if (y && y_is_float32)
        for (int64_t i = 0; i < many; i++) found[i] += ((const float *)y)[at + i];
    if (y && !y_is_float32)
        for (int64_t i = 0; i < many; i++) {
            const uint32_t bits = (uint32_t)((const uint16_t *)y)[at + i] << 16;
            float more;
            memcpy(&more, &bits, 4);
            found[i] += more;
        }
    if (out_is_float32)
        for (int64_t i = 0; i < many; i++) ((float *)out)[at + i] = found[i];
    else
        for (int64_t i = 0; i < many; i++) ((uint16_t *)out)[at + i] = to_bfloat16(found[i]);
}

// words [panels][inputs * bits / 32][16 lanes] of some bits of each step [panels][16 lanes][inputs], from `shift` on.
// The units of a word have successive inputs in their lowest bits, the next ones above them, and so on.
void pearl_pack(const uint8_t *steps, int64_t panels, int64_t inputs, int shift, int bits, uint32_t *words) {
    const int units = 32 / UNIT, fields = UNIT / bits;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0; first < inputs; first += units * fields)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const uint8_t *some = steps + (panel * LANES + lane) * inputs + first;
                uint32_t found = 0;
                for (int i = 0; i < units * fields; i++)
                    found |= (uint32_t)(some[i] >> shift & ((1 << bits) - 1)) << (UNIT * (i % units) + bits * (i / units));
                *words++ = found;
            }
}

// Whether x is rounded to bfloat16.
int pearl_rounds(void) {
#ifdef BF16
    return 1;
#else
    return 0;
#endif
}

// out [rows, outputs] = x [rows, inputs] times the weights, plus bias and y [rows, outputs] if there are any.
// `scratch` holds rows * (3 * inputs + inputs / group) floats.
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t rows, float *scratch, int threads) {
    const int64_t inputs = w->inputs, groups = w->bits == 16 ? 0 : inputs / w->group, size = w->bits == 6 ? 16 : 32;
    const int64_t blocks = w->bits < 8 ? inputs / size : 0;
    float *totals = scratch, *less = totals + rows * groups;
    float *units = less + rows * blocks;
    X *converted = (X *)(units + rows * (inputs / BLOCK));
    convert(x, converted, rows * inputs, x_is_float32);
    if (w->least || w->zeros)
        for (int64_t i = 0; i < rows * groups; i++) totals[i] = total_of(converted + i * w->group, w->group);
    for (int64_t i = 0; i < rows * blocks; i++)
        less[i] = -(w->offset + ADDED(w->bits)) * total_of(converted + i * size, size);
    uint8_t *parts = (uint8_t *)(converted + rows * inputs);
    const int64_t each = w->bits == 8 ? 4 * inputs : 3 * inputs;  // bytes of a row's parts
#if WHOLE
    for (int64_t i = 0; i < rows * (w->bits <= 8 ? inputs / BLOCK : 0); i++) {
        const int64_t row = i / (inputs / BLOCK), at = i % (inputs / BLOCK) * BLOCK;
        units[i] = in_parts(converted + row * inputs + at, w->bits, parts + row * each + at * (w->bits == 8 ? 2 : 1), inputs);
    }
#endif
    const int64_t vectors = (w->outputs + WIDE - 1) / WIDE;
    // A thread keeps its weights in its cache while it goes through the rows.
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t vector = 0; vector < vectors; vector++) {
        V sums[ROWS];
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int some = rows - row < ROWS ? rows - row : ROWS;
            const Rows given = {converted + row * inputs, totals + row * groups, less + row * blocks,
                                parts + row * each, units + row * (inputs / BLOCK), inputs, groups, blocks};
            multiply_lanes(w, vector * WIDE, &given, some, sums);
            for (int i = 0; i < some; i++)
                store(w, vector * WIDE, sums[i], out, out_is_float32, y, y_is_float32, row + i);
        }
    }
}
