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

// FEW(first, count) for all rows; with constant counts, sums stay in registers.
#if TOGETHER > 2
#define LAST(ROWS, AT, FEW) \
    case 5: FEW(AT, 5); break; \
    case 4: FEW(AT, 4); break; \
    case 3: FEW(AT, 3); break; \
    case 2: FEW(AT, 2); break;
#else
#define LAST(ROWS, AT, FEW)
#endif
#define IN_TURNS(ROWS, FEW) { \
    int row_ = 0; \
    for (; row_ + TOGETHER <= ROWS; row_ += TOGETHER) FEW(row_, TOGETHER); \
    switch (ROWS - row_) { \
        LAST(ROWS, row_, FEW) \
        case 1: FEW(row_, 1); break; \
    } \
}

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

#ifdef BF16
typedef uint16_t X;
#else
typedef float X;
#endif

// Rows that are multiplied.
typedef struct {
    const X *x;           // [rows, inputs]
    const float *totals;  // [rows, groups]: sums of x
    const float *less;    // [rows, blocks]: added to the sum of a block: see `unpack`
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
// Of 4 to 6 bits plus 2^bits: a number of that exponent has the step in its first bits, with no conversion. `Rows.less`
// takes 2^bits and the offset off again.
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

// Steps of the i-th pair of inputs from `at` on. Of 4 to 6 bits plus 2^bits: a number of that exponent has the step in
// its first bits, with no conversion. `Rows.less` takes 2^bits and the offset off again.
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
    const int more = bits - 4, by = 23 - bits;  // bits above the fourth; a step's first bit in the number
    const U words = *(const U *)(w->low + at * LANES / 2 + 64 * (i / 4));
    for (int odd = 0; odd < 2; odd++) {
        const int first = 4 * (i % 4) + 16 * odd;
        if (bits == TABLE) {
            found[odd] = numbered(w->table, (words >> first) & 15);
            continue;
        }
        U number = (shifted(words, by - first) & (15u << by)) | ((uint32_t)(0x83 + more) << 23);
        if (more) {
            const U high = *(const U *)(w->high + at * LANES * more / 8);
            number |= shifted(high, by + 4 - more * i - 16 * odd) & (((1u << more) - 1) << (by + 4));
        }
        found[odd] = (V)number;
    }
}

// Likewise for few rows, whose sums stay in registers while steps are used as they are unpacked.
INLINE void few_rows_of_block(const Weights *w, int64_t at, int bits, int pairs, const Rows *given, int first, int rows,
                              V scale, V *sums) {
    const X *x = given->x + first * given->inputs + at;
    const float *less = given->less + first * given->blocks + at / (2 * pairs);
    V part[TOGETHER][4];
    for (int row = 0; row < rows; row++) {
        for (int j = 0; j < 4; j++) part[row][j] = (V){0};
        if (bits < 8) part[row][0] += less[row * given->blocks];
    }
    for (int i = 0; i < pairs; i += 2) {
        V steps[4];
        unpack(w, at, bits, i, steps);
        unpack(w, at, bits, i + 1, steps + 2);
        for (int row = 0; row < rows; row++)
            for (int j = 0; j < 4; j++) part[row][j] += steps[j] * x[row * given->inputs + 2 * i + j];
    }
    for (int row = 0; row < rows; row++)
        sums[first + row] += ((part[row][0] + part[row][1]) + (part[row][2] + part[row][3])) * scale;
}

// Adds a block's products to the sums of rows.
INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, const Rows *given, int rows, V scale,
                          V *sums) {
#define FEW(FIRST, ROWS) few_rows_of_block(w, at, bits, pairs, given, FIRST, ROWS, scale, sums)
    if (rows == 1 || (bits == 4 && rows <= TOGETHER)) {
        IN_TURNS(rows, FEW)
        return;
    }
#undef FEW
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
#define FEW(FIRST, ROWS) plain_rows(weights, inputs, given->x + (FIRST) * inputs, inputs, ROWS, sums + (FIRST))
        IN_TURNS(rows, FEW)
#undef FEW
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

// words [panels][inputs * bits / 32][16 lanes][2] of some bits of each step [panels][16 lanes][inputs], from `shift` on.
// A word has those of every second input, the lowest first; the two words of a lane take turns.
void pearl_pack(const uint8_t *steps, int64_t panels, int64_t inputs, int shift, int bits, uint16_t *words) {
    const int64_t many = 16 / bits;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t word = 0; word < inputs / 2 / many; word++)
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int odd = 0; odd < 2; odd++) {
                    const uint8_t *some = steps + (panel * LANES + lane) * inputs + 2 * word * many + odd;
                    uint32_t found = 0;
                    for (int64_t i = 0; i < many; i++) found |= (uint32_t)(some[2 * i] >> shift & ((1 << bits) - 1)) << bits * i;
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
// `scratch` holds rows * (inputs + inputs / group + inputs / 16) floats.
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t rows, float *scratch, int threads) {
    const int64_t inputs = w->inputs, groups = w->bits == 16 ? 0 : inputs / w->group, size = w->bits == 6 ? 16 : 32;
    const int64_t blocks = w->bits < 8 ? inputs / size : 0;
    float *totals = scratch, *less = totals + rows * groups;
    X *converted = (X *)(less + rows * blocks);
    convert(x, converted, rows * inputs, x_is_float32);
    if (w->least || w->zeros)
        for (int64_t i = 0; i < rows * groups; i++) totals[i] = total_of(converted + i * w->group, w->group);
    for (int64_t i = 0; i < rows * blocks; i++)
        less[i] = -(w->offset + (1 << w->bits)) * total_of(converted + i * size, size);
    const int64_t vectors = (w->outputs + WIDE - 1) / WIDE;
    // A thread keeps its weights in its cache while it goes through the rows.
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t vector = 0; vector < vectors; vector++) {
        V sums[ROWS];
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int some = rows - row < ROWS ? rows - row : ROWS;
            const Rows given = {converted + row * inputs, totals + row * groups, less + row * blocks, inputs, groups, blocks};
            multiply_lanes(w, vector * WIDE, &given, some, sums);
            for (int i = 0; i < some; i++)
                store(w, vector * WIDE, sums[i], out, out_is_float32, y, y_is_float32, row + i);
        }
    }
}
