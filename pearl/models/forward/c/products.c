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

#ifdef BF16
// Steps of 32 (or 16) inputs of a panel, less the offset, as pairs of bfloat16: [16 or 8][16 lanes][2].
INLINE void unpack(const Weights *w, int64_t at, __m512i table, __m512i more, int bits, int pairs, __m512i *found) {
    const __m512i mask = _mm512_set1_epi16(15);
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
    const uint8_t *high = w->high + at * LANES * (bits - 4) / 8;
    const __m512i above = bits == 5 || bits == 6 ? _mm512_loadu_si512(high) : table;
    for (int i = 0; i < pairs; i++) {
        __m512i index = _mm512_srli_epi16(_mm512_loadu_si512(low + 64 * (i / 4)), 4 * (i % 4));
        if (bits == 5) {
            const __m512i bit = i < 4 ? _mm512_slli_epi16(above, 4 - i) : _mm512_srli_epi16(above, i - 4);
            index = _mm512_ternarylogic_epi32(mask, index, bit, 0xca);
        } else if (bits == 6) {
            const int by = 2 * (i % 8);
            const __m512i two = by < 4 ? _mm512_slli_epi16(above, 4 - by) : _mm512_srli_epi16(above, by - 4);
            index = _mm512_ternarylogic_epi32(mask, index, two, 0xca);
        }
        found[i] = bits == 6 ? _mm512_permutex2var_epi16(table, index, more) : _mm512_permutexvar_epi16(index, table);
    }
}

INLINE __m512i pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm512_set1_epi32(both);
}
#define DOT(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))

typedef uint16_t X;  // inputs

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, __m512i table, __m512i more,
                          const X *x, int64_t stride, int rows, V scale, V *sums) {
    __m512i steps[BLOCK / 2];
    unpack(w, at, table, more, bits, pairs, steps);
    for (int row = 0; row < rows; row++) {
        const X *given = x + row * stride + at;
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int i = 0; i < pairs; i += 2) {
            even = DOT(even, steps[i], pair(given + 2 * i));
            odd = DOT(odd, steps[i + 1], pair(given + 2 * i + 2));
        }
        sums[row] += (V)_mm512_add_ps(even, odd) * scale;
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
typedef float X;

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

INLINE void unpack(const Weights *w, int64_t at, int bits, int pairs, V *found) {
    if (bits == 8) {
        for (int i = 0; i < pairs; i++) {
            const T both = *(const T *)(w->low + at * LANES + 2 * LANES * i);
            found[2 * i] = __builtin_convertvector((T)((H)both << 8) >> 8, V);
            found[2 * i + 1] = __builtin_convertvector(both >> 8, V);
        }
        return;
    }
    if (bits == FLOAT8) {
        for (int i = 0; i < pairs; i++) {
            const H both = *(const H *)(w->low + at * LANES + 2 * LANES * i);
            for (int odd = 0; odd < 2; odd++) {
                const U byte = __builtin_convertvector((both >> 8 * odd) & 0xff, U);
                found[2 * i + odd] = (V)((byte & 0x7f) << 20 | (byte & 0x80) << 24) * 0x1p120f;
            }
        }
        return;
    }
    const int has_more = bits == 5 || bits == 6;
    const uint8_t *low = w->low + at * LANES / 2;
    const U above = has_more ? *(const U *)(w->high + at * LANES * (bits - 4) / 8) : (U){0};
    const uint32_t mask = (1u << (bits - 4)) - 1;
    for (int i = 0; i < pairs; i++) {
        const U words = *(const U *)(low + 64 * (i / 4));
        for (int odd = 0; odd < 2; odd++) {
            U step = (words >> (4 * (i % 4) + 16 * odd)) & 15;
            if (has_more) step |= ((above >> ((bits - 4) * i + 16 * odd)) & mask) << 4;
            found[2 * i + odd] = bits == TABLE ? numbered(w->table, step) : __builtin_convertvector((I)step, V) - w->offset;
        }
    }
}

INLINE void rows_of_block(const Weights *w, int64_t at, int bits, int pairs, const X *x, int64_t stride, int rows,
                          V scale, V *sums) {
    V steps[BLOCK];
    unpack(w, at, bits, pairs, steps);
    for (int row = 0; row < rows; row++) {
        const X *given = x + row * stride + at;
        V part[4] = {{0}, {0}, {0}, {0}};
        for (int i = 0; i < 2 * pairs; i += 4)
            for (int j = 0; j < 4; j++) part[j] += steps[i + j] * given[i + j];
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
INLINE void lanes_of(const Weights *w, int64_t lane, const X *x, const float *totals, int rows, V *sums, int bits,
                     int pairs, int kind) {
    const int64_t inputs = w->inputs, groups = inputs / w->group, panel = lane / LANES, inside = lane % LANES;
    const int width = bits == TABLE ? 4 : bits;
    Weights part = *w;  // from these lanes on
    if (bits == 16) {
        const uint16_t *weights = (const uint16_t *)w->low + panel * inputs * LANES + 2 * inside;
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
    uint16_t tables[64];
    for (int i = 0; i < 64; i++) {
        const float step = bits == TABLE ? w->table[i % 16] : i % (1 << (bits & 7)) - w->offset;
        tables[i] = to_bfloat16(bits == FLOAT8 ? ldexpf(i % 8, -9) : step);
    }
    const __m512i table = _mm512_loadu_si512(tables), more = _mm512_loadu_si512(tables + 32);
#endif
    for (int row = 0; row < rows; row++) sums[row] = (V){0};
    V scale = {0};
    int64_t group = -1;
    for (int64_t at = 0; at < inputs; at += 2 * pairs) {
        if (at / w->group != group) {
            group = at / w->group;
            scale = scale_of(w, w->scales, w->of_scales, lane, group, kind);
            if (w->least || w->zeros) {
                const uint8_t *zeros = w->zeros + (panel * groups + group) * LANES + inside;
                const V least = w->least ? scale_of(w, w->least, w->of_least, lane, group, kind)
                                         : -scale * from_bytes(zeros, 0);
                for (int row = 0; row < rows; row++) sums[row] += least * totals[row * groups + group];
            }
        }
        // What comes next, perhaps of the next panel: memory is slower than one row's products.
        for (int64_t i = 0; i < 2 * pairs * LANES * width / 8; i += 64)
            __builtin_prefetch(part.low + at * LANES * (width < 8 ? 4 : 8) / 8 + AHEAD + i);
#ifdef BF16
        rows_of_block(&part, at, bits, pairs, table, more, x, inputs, rows, scale, sums);
#else
        rows_of_block(&part, at, bits, pairs, x, inputs, rows, scale, sums);
#endif
    }
}

static void multiply_lanes(const Weights *w, int64_t lane, const X *x, const float *totals, int rows, V *sums) {
#define CASE(BITS, PAIRS, KIND) \
    if (w->bits == BITS && w->kind == KIND) { \
        lanes_of(w, lane, x, totals, rows, sums, BITS, PAIRS, KIND); \
        return; \
    }
    if (w->bits == 16) {
        lanes_of(w, lane, x, totals, rows, sums, 16, 16, 0);
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
// `scratch` holds rows * (inputs + inputs / group) floats.
void pearl_multiply(const Weights *w, const void *x, int x_is_float32, const void *y, int y_is_float32, void *out,
                    int out_is_float32, int64_t rows, float *scratch, int threads) {
    const int64_t inputs = w->inputs, groups = w->bits == 16 ? 0 : inputs / w->group;
    float *totals = scratch;
    X *given = (X *)(scratch + rows * groups);
    convert(x, given, rows * inputs, x_is_float32);
    if (w->least || w->zeros)
        for (int64_t i = 0; i < rows * groups; i++) {
            float sums[16] = {0}, sum = 0;
            for (int64_t j = 0; j < w->group; j += 16)
                for (int64_t lane = 0; lane < 16; lane++) sums[lane] += wide(given[i * w->group + j + lane]);
            for (int lane = 0; lane < 16; lane++) sum += sums[lane];
            totals[i] = sum;
        }
    const int64_t vectors = (w->outputs + WIDE - 1) / WIDE;
    // A thread keeps its weights in its cache while it goes through the rows.
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t vector = 0; vector < vectors; vector++) {
        V sums[ROWS];
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int some = rows - row < ROWS ? rows - row : ROWS;
            multiply_lanes(w, vector * WIDE, given + row * inputs, totals + row * groups, some, sums);
            for (int i = 0; i < some; i++)
                store(w, vector * WIDE, sums[i], out, out_is_float32, y, y_is_float32, row + i);
        }
    }
}
