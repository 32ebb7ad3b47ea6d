// Decoder layers in one call: what `DecoderLayers.hidden_states` computes by calls of `products.c` and `attention.c`, in
// the same order and with the same roundings.
#include "native.h"

#define SIDES 3  // matrices of one product, side by side

typedef struct {
    const Weights *products[4][SIDES];  // query, key and value; output; gate and up; down
    const void *norms[4];               // before and behind attention, before and behind the gates; or none
    const void *q_norm, *k_norm;
    const float *sinks, *cos, *sin;     // see `Attention`
    int64_t window;
} Layer;

typedef struct {
    Attention attention;  // what is the same in all layers; is_float32: whether rows of products are
    const Layer *layers;
    void *hidden;         // [rows, width], changed in place
    float *room;          // see `pearl_layers`
    int64_t first, end;   // layers that are computed
    int64_t width, inner;
    int64_t layer_stride, new_stride;  // of keys and values, cached and new ones
    float residual;                    // multiplier of what a block adds to the hidden state
    int32_t hidden_is_float32, is_gelu;
} Forward;

static void multiply(const Forward *f, const Weights *const *parts, const void *x, void *out, int64_t stride,
                     float *scratch) {
    const Attention *a = &f->attention;
    const int64_t item = a->is_float32 ? 4 : 2;
    char *into = out;
    for (int side = 0; side < SIDES && parts[side]; side++) {
        pearl_multiply(parts[side], x, a->is_float32, 0, 0, into, a->is_float32, stride, a->rows, scratch, a->threads);
        into += parts[side]->outputs * item;
    }
}

// The rows of the products, from the hidden state.
static void normed(const Forward *f, const void *x, int is_float32, const void *norm, float *scratch, void *out) {
    const Attention *a = &f->attention;
    if (norm)
        pearl_normalise(x, is_float32, norm, a->norm_is_float32, a->eps, a->rows, f->width, scratch, out, a->is_float32);
    else
        for (int64_t i = 0; i < a->rows * f->width; i++) put(out, i, number(x, i, is_float32), a->is_float32);
}

// Adds the product of x, after its norm and multiplier, to the hidden state.
static void add(const Forward *f, const Weights *const *parts, const void *x, const void *norm, void *part,
                void *normed_part, float *scratch) {
    const Attention *a = &f->attention;
    if (!norm && f->residual == 1) {
        pearl_multiply(*parts, x, a->is_float32, f->hidden, f->hidden_is_float32, f->hidden, f->hidden_is_float32,
                       f->width, a->rows, scratch, a->threads);
        return;
    }
    multiply(f, parts, x, part, f->width, scratch);
    if (norm) normed(f, part, a->is_float32, norm, scratch, normed_part);
    const void *found = norm ? normed_part : part;
    for (int64_t i = 0; i < a->rows * f->width; i++) {
        float more = number(found, i, a->is_float32) * f->residual;
        if (!a->is_float32 && f->residual != 1) more = wide(to_bfloat16(more));
        put(f->hidden, i, number(f->hidden, i, f->hidden_is_float32) + more, f->hidden_is_float32);
    }
}

// `room` holds of each row 3 * width + (2 * heads + 2 * kv_heads) * dim + 3 * inner floats, and then what the products ask
// for.
void pearl_layers(const Forward *f) {
    Attention a = f->attention;
    const int64_t states = (a.heads + 2 * a.kv_heads) * a.dim;
    float *fed = f->room, *part = fed + a.rows * f->width, *normed_part = part + a.rows * f->width;
    float *gates = normed_part + a.rows * f->width, *inner = gates + 2 * a.rows * f->inner;
    float *qkv = inner + a.rows * f->inner, *mixed = qkv + a.rows * states;
    float *scratch = mixed + a.rows * a.heads * a.dim;
    a.states = qkv, a.out = mixed;
    for (int64_t each = f->first; each < f->end; each++) {
        const Layer *layer = f->layers + each;
        normed(f, f->hidden, f->hidden_is_float32, layer->norms[0], scratch, fed);
        multiply(f, layer->products[0], fed, qkv, states, scratch);
        a.window = layer->window, a.sinks = layer->sinks, a.cos = layer->cos, a.sin = layer->sin;
        a.q_norm = layer->q_norm, a.k_norm = layer->k_norm;
        const int64_t item = a.cache_is_float32 ? 4 : 2, cached = each * f->layer_stride * item;
        const int64_t new = each * f->new_stride * item;
        a.keys = f->attention.keys + cached, a.values = f->attention.values + cached;
        a.new_keys = f->attention.new_keys + new, a.new_values = f->attention.new_values + new;
        pearl_attend(&a);
        add(f, layer->products[1], mixed, layer->norms[1], part, normed_part, scratch);
        normed(f, f->hidden, f->hidden_is_float32, layer->norms[2], scratch, fed);
        multiply(f, layer->products[2], fed, gates, 2 * f->inner, scratch);
        pearl_gate(gates, a.rows, f->inner, a.is_float32, f->is_gelu, inner);
        add(f, layer->products[3], inner, layer->norms[3], part, normed_part, scratch);
    }
}
