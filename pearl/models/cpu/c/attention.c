// What a decoder layer computes on a CPU beside its products: norms, gates, and attention to the cached positions.
//
// The bits of a row depend on its own position and on what it sees, not on the rows computed beside it: sums over
// positions are added in the order of the positions, whether these are cached or other rows of a tree.
#include "native.h"

#define DEEPEST 1024  // nodes of a path
#define AT_ONCE 16    // positions whose keys, or values, all queries of a head go through together

INLINE float total(V sum) {
    float parts[WIDE];
    memcpy(parts, &sum, sizeof parts);
    for (int many = WIDE / 2; many; many /= 2)
        for (int i = 0; i < many; i++) parts[i] += parts[i + many];
    return parts[0];
}

INLINE float dot(const float *a, const float *b, int64_t many) {
    V even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 2 * WIDE <= many; i += 2 * WIDE) {
        even += *(const V *)(a + i) * *(const V *)(b + i);
        odd += *(const V *)(a + i + WIDE) * *(const V *)(b + i + WIDE);
    }
    for (; i + WIDE <= many; i += WIDE) even += *(const V *)(a + i) * *(const V *)(b + i);
    float rest = 0;
    for (; i < many; i++) rest += a[i] * b[i];
    return total(even + odd) + rest;
}

// Adds halves of two vectors to one, for `many` pairs: in the end each lane of one vector has the sum of another.
INLINE void halve(V *sums, int many) {
    I low, high;
#pragma GCC unroll 16
    for (int lane = 0; lane < WIDE; lane++) {
        const int from = (lane & ~(2 * many - 1)) + (lane & (many - 1)) + (lane & many ? WIDE : 0);
        low[lane] = from, high[lane] = from + many;
    }
#pragma GCC unroll 8
    for (int each = 0; each < many; each++)
        sums[each] = __builtin_shuffle(sums[each], sums[each + many], low) +
                     __builtin_shuffle(sums[each], sums[each + many], high);
}

// Products of a query with the keys of WIDE positions.
INLINE V dots(const float *q, const float *const *keys, int64_t dim) {
    V sums[WIDE];
    float rest[WIDE] = {0};
    for (int lane = 0; lane < WIDE; lane++) sums[lane] = (V){0};
    int64_t i = 0;
    for (; i + WIDE <= dim; i += WIDE) {
        const V some = *(const V *)(q + i);
#pragma GCC unroll 16
        for (int lane = 0; lane < WIDE; lane++) sums[lane] += some * *(const V *)(keys[lane] + i);
    }
    for (; i < dim; i++)
        for (int lane = 0; lane < WIDE; lane++) rest[lane] += q[i] * keys[lane][i];
#if WIDE == 16
    halve(sums, 8);
#endif
#if WIDE >= 8
    halve(sums, 4);
#endif
    halve(sums, 2);
    halve(sums, 1);
    return sums[0] + *(V *)rest;
}

// e^x, to about two units in the last place; 0 below -87, and beyond 88, where a float ends, e^88.
INLINE V exponential(V x) {
    const V shift = (V){0} + 12582912.0f;  // rounds to an integer, in the low bits
    const I low = ~(x > -87.0f), high = ~(x < 88.0f);
    const V clamped = (V)((I)x & ~low & ~high) + (V)((I)((V){0} - 87.0f) & low) + (V)((I)((V){0} + 88.0f) & high);
    const V number = clamped * 1.44269504f + shift;
    const V whole = number - shift;
    const V rest = clamped - whole * 0.693145752f - whole * 1.42860677e-6f;
    V sum = rest * 0.00138888889f + 0.00833333333f;
    sum = sum * rest + 0.0416666667f;
    sum = sum * rest + 0.166666667f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const V power = (V)(((I)number << 23) + 0x3f800000);
    return (V)((I)(sum * power) & ~low);
}

INLINE V hyperbolic_tangent(V x) {
    return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f);
}

// x [many] times the weights of its norm, over their root mean square. Rounds as transformers does.
static void normalise(const void *x, int is_float32, const void *weight, int weight_is_float32, float eps, int64_t many,
                      float *full, void *out, int out_is_float32) {
    copy(x, 0, is_float32, full, 0, 1, many);
    const float inverse = 1.0f / sqrtf(dot(full, full, many) / many + eps);
    if (is_float32 == weight_is_float32 && !is_float32)
        for (int64_t i = 0; i < many; i++)
            put(out, i, wide(to_bfloat16(wide(to_bfloat16(full[i] * inverse)) * number(weight, i, 0))), out_is_float32);
    else if (weight_is_float32)
        for (int64_t i = 0; i < many; i++) put(out, i, full[i] * inverse * ((const float *)weight)[i], out_is_float32);
    else
        for (int64_t i = 0; i < many; i++) put(out, i, full[i] * inverse * number(weight, i, 0), out_is_float32);
}

void pearl_normalise(const void *x, int is_float32, const void *weight, int weight_is_float32, float eps, int64_t rows,
                     int64_t many, float *scratch, void *out, int out_is_float32) {
    const int64_t item = is_float32 ? 4 : 2, out_item = out_is_float32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row++)
        normalise((const char *)x + row * many * item, is_float32, weight, weight_is_float32, eps, many, scratch,
                  (char *)out + row * many * out_item, out_is_float32);
}

// out [rows, inner]: the activation of the first half of x [rows, 2 * inner] times the second half.
void pearl_gate(const void *x, int64_t rows, int64_t inner, int is_float32, int is_gelu, void *out) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t begin = 0; begin < inner; begin += WIDE) {
            const int64_t at = row * 2 * inner + begin, many = inner - begin < WIDE ? inner - begin : WIDE;
            V gate = {0}, up = {0}, active;
            if (many == WIDE) gate = vector_of(x, at, is_float32), up = vector_of(x, at + inner, is_float32);
            for (int64_t i = 0; i < many && many < WIDE; i++)
                gate[i] = number(x, at + i, is_float32), up[i] = number(x, at + inner + i, is_float32);
            if (is_gelu)
                active = 0.5f * gate * (1.0f + hyperbolic_tangent(0.797884561f * (gate + 0.044715f * gate * gate * gate)));
            else
                active = gate / (1.0f + exponential(-gate));
            if (!is_float32) active = from_bfloat16(to_bfloat16s(active));
            active *= up;
            if (many == WIDE) put_vector(out, row * inner + begin, active, is_float32);
            for (int64_t i = 0; i < many && many < WIDE; i++) put(out, row * inner + begin + i, active[i], is_float32);
        }
}

// Heads of a row, normalised and turned to its position.
static void turn(const Attention *a, int64_t row, int64_t first, int64_t heads, const void *norm, float *to) {
    const int64_t dim = a->dim, half = dim / 2, item = a->is_float32 ? 4 : 2;
    const char *from = (const char *)a->states + (row * (a->heads + 2 * a->kv_heads) + first) * dim * item;
    float full[WIDEST], plain[WIDEST];
    const int64_t together = norm && a->norm_width > dim ? heads : 1;
    for (int64_t head = 0; head < heads; head += together) {
        const int64_t many = together * dim;
        if (norm) {
            normalise(from + head * dim * item, a->is_float32, norm, a->norm_is_float32, a->eps, many, full, plain, 1);
            if (!a->is_float32)
                for (int64_t i = 0; i < many; i++) plain[i] = wide(to_bfloat16(plain[i]));
        } else
            copy(from, head * dim, a->is_float32, plain, 0, 1, many);
        const float *cos = a->cos ? a->cos + a->table[4 * row + 1] * dim : 0, *sin = a->cos ? a->sin + a->table[4 * row + 1] * dim : 0;
        for (int64_t each = 0; each < together; each++) {
            const float *x = plain + each * dim;
            float *out = to + (head + each) * dim;
            if (!cos)
                memcpy(out, x, dim * sizeof(float));
            else
                for (int64_t i = 0; i < half; i++) {
                    out[i] = x[i] * cos[i] + x[i + half] * sin[i];
                    out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
                }
        }
    }
}

// Where the keys, or values, of a head begin: of cached positions, and of new ones by the path to a row. Of float32 or
// bfloat16.
typedef struct {
    const char *cached, *new;
    const int64_t *path;
    int64_t dim, first_new, stride;  // stride: of new ones
} States;

// Those of a block of positions, while the next block comes: one row's work is shorter than the memory's.
INLINE void block_of(const States *s, int64_t at, int64_t last, int is_float32, const void **found) {
    const int64_t item = is_float32 ? 4 : 2, each = s->dim * item;
    for (int i = 0; i < AT_ONCE; i++) {
        const int64_t position = at + i < last ? at + i : last;
        found[i] = position < s->first_new ? s->cached + position * each
                                           : s->new + s->path[position - s->first_new] * s->stride * item;
    }
    for (int64_t byte = 0; byte < AT_ONCE * each; byte += 64)
        __builtin_prefetch(s->cached + (at + AT_ONCE) * each + byte, 0, 0);
}

// Adds values by the shares of several queries [many][positions] to sums [many][dim]. many and is_float32 are constants
// where this is inlined.
INLINE void mix(int many, const void *const *values, int is_float32, int count, const float *shares, int64_t positions,
                int64_t dim, float *sums) {
    for (int64_t first = 0; first + WIDE <= dim; first += 2 * WIDE) {
        const int is_pair = first + 2 * WIDE <= dim;
        V part[4][2];
        for (int i = 0; i < many; i++) {
            part[i][0] = *(V *)(sums + i * dim + first);
            if (is_pair) part[i][1] = *(V *)(sums + i * dim + first + WIDE);
        }
        for (int at = 0; at < count; at++) {
            const V one = vector_of(values[at], first, is_float32);
            for (int i = 0; i < many; i++) part[i][0] += shares[i * positions + at] * one;
            if (!is_pair) continue;
            const V other = vector_of(values[at], first + WIDE, is_float32);
            for (int i = 0; i < many; i++) part[i][1] += shares[i * positions + at] * other;
        }
        for (int i = 0; i < many; i++) {
            *(V *)(sums + i * dim + first) = part[i][0];
            if (is_pair) *(V *)(sums + i * dim + first + WIDE) = part[i][1];
        }
    }
    for (int64_t each = dim / WIDE * WIDE; each < dim; each++)
        for (int at = 0; at < count; at++)
            for (int i = 0; i < many; i++) sums[i * dim + each] += shares[i * positions + at] * number(values[at], each, is_float32);
}

// Scores [positions] of a query to shares that are still to be divided by their sum, which is returned.
static float shares_of(const Attention *a, int64_t query, int64_t begin, int64_t stop, float *scores) {
    V highest = (V){0} - INFINITY;
    for (int64_t at = begin; at < stop; at += WIDE) {
        V some = *(V *)(scores + at);
        if (a->cap) {
            const V capped = a->cap * hyperbolic_tangent(some / a->cap);
            some = (V)((I)capped & (some > -INFINITY)) + (V)((I)some & ~(some > -INFINITY));
            *(V *)(scores + at) = some;
        }
        highest = (V)((I)some & (some > highest)) + (V)((I)highest & ~(some > highest));
    }
    float top = a->sinks ? a->sinks[query] : -INFINITY;
    for (int i = 0; i < WIDE; i++) top = highest[i] > top ? highest[i] : top;
    V sum = {0};
    for (int64_t at = begin; at < stop; at += WIDE) {
        const V share = exponential(*(V *)(scores + at) - top);
        *(V *)(scores + at) = share;
        sum += share;
    }
    return total(sum) + (a->sinks ? exponential((V){0} + (a->sinks[query] - top))[0] : 0);
}

// What a row sees: positions from `low` to `end` - 1, those from `cached` on by its path. `begin` and `stop`: whole blocks.
typedef struct {
    int64_t last, cached, low, end, begin, stop;
} Sight;

static Sight sight_of(const Attention *a, int64_t row) {
    const int64_t position = a->table[4 * row + 1], cached = a->table[4 * row + 2];
    const int64_t end = cached > position ? cached : position + 1, low = a->window && end > a->window ? end - a->window : 0;
    return (Sight){end - 1, cached, low, end, low / AT_ONCE * AT_ONCE, (end + AT_ONCE - 1) / AT_ONCE * AT_ONCE};
}

// The rows of the positions that are not cached.
static void path_of(const Attention *a, int64_t row, const Sight *sees, int64_t *path) {
    for (int64_t at = sees->last, node = row; at >= sees->cached; at--) {
        path[at - sees->cached] = node;
        node = a->table[4 * node + 3] >= 0 ? a->table[4 * node + 3] : row;
    }
}

// The keys of a head for a row, or its values.
INLINE States states_of(const Attention *a, int64_t row, int64_t head, int is_float32, const char *cached, const char *new,
                        const int64_t *path) {
    const int64_t item = is_float32 ? 4 : 2, from = a->table[4 * row] * a->slot_stride + head * a->head_stride;
    return (States){cached + from * item, new + head * a->dim * item, path, a->dim, a->table[4 * row + 2], a->kv_heads * a->dim};
}

// Has a block's numbers in float32, for all queries.
INLINE void widen(const void **some, int64_t dim, float *into) {
    for (int i = 0; i < AT_ONCE; i++, into += dim) {
        int64_t each = 0;
        for (; each + WIDE <= dim; each += WIDE) *(V *)(into + each) = vector_of(some[i], each, 0);
        for (; each < dim; each++) into[each] = number(some[i], each, 0);
        some[i] = into;
    }
}

// Scores [group][positions] of a row's queries, at a block's positions.
static void score(const Attention *a, int64_t row, int64_t head, const void *const *keys, float *scores) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads;
    for (int64_t query = 0; query < group; query++)
        for (int i = 0; i < AT_ONCE; i += WIDE)
            *(V *)(scores + query * a->positions + i) =
                dots(a->queries + (row * a->heads + head * group + query) * dim, (const float *const *)keys + i, dim) * a->scale;
}

// Adds a block's values to the sums [group][dim] of a row, by the shares of its queries.
INLINE void mix_all(const Attention *a, const void *const *values, int is_float32, int count, const float *shares, float *sums) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads;
    int64_t query = 0;
#define MIX(many) \
    mix(many, values, is_float32, count, shares + query * a->positions, a->positions, dim, sums + query * dim)
    for (; query + 4 <= group; query += 4) MIX(4);
    switch (group - query) {
        case 3: MIX(3); break;
        case 2: MIX(2); break;
        case 1: MIX(1); break;
    }
}

// Cached positions that several rows of a slot see, and that they go through together: whole blocks from 0 on.
static int64_t shared_by(const Attention *a, int64_t first, int64_t rows) {
    int64_t shared = rows > 1 ? INT64_MAX : 0;
    for (int64_t row = first; row < first + rows; row++) {
        const Sight sees = sight_of(a, row);
        const int64_t most = sees.begin ? 0 : sees.cached < sees.end ? sees.cached : sees.end;
        shared = most < shared ? most : shared;
    }
    return shared / AT_ONCE * AT_ONCE;
}

// The query heads of one key-value head of rows of one slot. is_float32, of the cache, is a constant where this is inlined.
INLINE void attend(const Attention *a, int64_t first, int64_t rows, int64_t head, int is_float32, float *room, int thread) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, of_scores = group * a->positions, of_sums = group * dim;
    float by[ROWS_TOGETHER * 64], *sums = room + rows * of_scores, *wide_states = sums + rows * of_sums;
    int64_t path[DEEPEST];
    const int64_t shared = shared_by(a, first, rows);
    const void *some[AT_ONCE];
    const States keys = states_of(a, first, head, is_float32, a->keys, a->new_keys, path);
    for (int64_t at = 0; at < shared; at += AT_ONCE) {
        block_of(&keys, at, shared, is_float32, some);
        if (!is_float32) widen(some, dim, wide_states);
        for (int64_t i = 0; i < rows; i++) score(a, first + i, head, some, room + i * of_scores + at);
    }
    for (int64_t i = 0; i < rows; i++) {
        const Sight sees = sight_of(a, first + i);
        const States own = states_of(a, first + i, head, is_float32, a->keys, a->new_keys, path);
        float *scores = room + i * of_scores;
        path_of(a, first + i, &sees, path);
        for (int64_t at = shared > sees.begin ? shared : sees.begin; at < sees.stop; at += AT_ONCE) {
            block_of(&own, at, sees.last, is_float32, some);
            if (!is_float32) widen(some, dim, wide_states);
            score(a, first + i, head, some, scores + at);
        }
        for (int64_t query = 0; query < group; query++, scores += a->positions) {
            for (int64_t at = sees.begin; at < sees.low; at++) scores[at] = -INFINITY;
            for (int64_t at = sees.end; at < sees.stop; at++) scores[at] = -INFINITY;
            by[i * group + query] = 1.0f / shares_of(a, head * group + query, sees.begin, sees.stop, scores);
        }
    }
    memset(sums, 0, rows * of_sums * sizeof(float));
    const States values = states_of(a, first, head, is_float32, a->values, a->new_values, path);
    for (int64_t at = 0; at < shared; at += AT_ONCE) {
        block_of(&values, at, shared, is_float32, some);
        if (!is_float32) widen(some, dim, wide_states);
        for (int64_t i = 0; i < rows; i++) mix_all(a, some, 1, AT_ONCE, room + i * of_scores + at, sums + i * of_sums);
    }
    for (int64_t i = 0; i < rows; i++) {
        const Sight sees = sight_of(a, first + i);
        const States own = states_of(a, first + i, head, is_float32, a->values, a->new_values, path);
        path_of(a, first + i, &sees, path);
        for (int64_t at = shared > sees.begin ? shared : sees.begin; at < sees.end; at += AT_ONCE) {
            block_of(&own, at, sees.last, is_float32, some);
            const int count = sees.end - at < AT_ONCE ? sees.end - at : AT_ONCE;
            mix_all(a, some, is_float32, count, room + i * of_scores + at, sums + i * of_sums);
        }
    }
    if (!keep(thread)) return;
    for (int64_t i = 0; i < rows * group; i++) {
        for (int64_t each = 0; each < dim; each++) sums[i * dim + each] *= by[i];
        const int64_t query = (first + i / group) * a->heads + head * group + i % group;
        copy(sums, i * dim, 1, a->out, query * dim, a->is_float32, dim);
    }
}

// Rows of a piece: fewer where there are threads for more pieces.
static int64_t rows_together(const Attention *a) {
    const int64_t most = a->threads > 1 ? a->rows * a->kv_heads / (4 * a->threads) : ROWS_TOGETHER;
    return most < 1 ? 1 : most < ROWS_TOGETHER ? most : ROWS_TOGETHER;
}

// A key-value head of some rows.
static void attend_piece(const void *work, int64_t piece, int thread) {
    const Attention *a = work;
    const int64_t kv = a->kv_heads, group = a->heads / kv, together = rows_together(a), head = piece % kv;
    const int64_t end = (piece / kv + 1) * together < a->rows ? (piece / kv + 1) * together : a->rows;
    float *room = a->scores + thread * (ROWS_TOGETHER * group * (a->positions + a->dim) + AT_ONCE * a->dim);
    for (int64_t row = piece / kv * together, next; row < end; row = next) {
        const int64_t slot = a->table[4 * row];
        for (next = row + 1; next < end && a->table[4 * next] == slot;) next++;
        if (slot < 0 && !keep(thread)) return;
        if (slot < 0)
            for (int64_t i = 0; i < (next - row) * group * a->dim; i++) {
                const int64_t of_row = group * a->dim;
                put(a->out, (row + i / of_row) * a->heads * a->dim + head * of_row + i % of_row, 0, a->is_float32);
            }
        else if (a->cache_is_float32)
            attend(a, row, next - row, head, 1, room, thread);
        else
            attend(a, row, next - row, head, 0, room, thread);
    }
}

void pearl_attend(const Attention *a) {
    const int64_t dim = a->dim, kv = a->kv_heads, all = a->heads + 2 * kv;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t *place = a->table + 4 * row;
        if (place[0] < 0) continue;
        float keys[WIDEST];
        turn(a, row, 0, a->heads, a->q_norm, a->queries + row * a->heads * dim);
        turn(a, row, a->heads, kv, a->k_norm, keys);
        const int64_t new = row * kv * dim, value = (row * all + a->heads + kv) * dim;
        copy(keys, 0, 1, a->new_keys, new, a->cache_is_float32, kv * dim);
        copy(a->states, value, a->is_float32, a->new_values, new, a->cache_is_float32, kv * dim);
        if (place[2] <= place[1]) continue;  // else it is of a chain or a block, which other rows find in the cache
        for (int64_t head = 0; head < kv; head++) {
            const int64_t at = place[0] * a->slot_stride + head * a->head_stride + place[1] * dim;
            copy(keys, head * dim, 1, a->keys, at, a->cache_is_float32, dim);
            copy(a->states, value + head * dim, a->is_float32, a->values, at, a->cache_is_float32, dim);
        }
    }
    const int64_t together = rows_together(a);
    in_pieces(attend_piece, a, (a->rows + together - 1) / together * kv, a->threads);
}
