/* One step of a model: every layer, all threads, one call. Included once per element type.
 *
 * The residual stream is float32; what enters a product is rounded to elements. The last layer computes keys and values
 * of every token, and the rest for rows whose logits are wanted. */
#include "native/model.h"
#include "native/simd.h"
#include "native/threads.h"

/* The team's memory. */
enum { SUMS, NORMED, QKV, HEADS, GATED, PICKED, PIECES, UNITS, PARTIALS, ENDED, WANTED, QUANTIZED, QUICK };

#include "activation/cpu_kernel.h"
#include "attention/cpu_plan.h"
#include "linear/cpu_kernel.h"
#include "linear/cpu_pack.h"
#include "linear/cpu_top.h"
#include "native/check.h"
#include "norm/cpu_kernel.h"
#include "rotary/cpu_kernel.h"

enum { LAYER_PHASES = 13, OTHER_PHASES = 8 };

typedef struct {
    const baton_model *model;
    const baton_step *step;
    baton_team *team;
    float *sums, *picked;                     /* [tokens, hidden], [logits, hidden] */
    element *normed, *heads, *gated;          /* strides below */
    void *qkv;                                /* elements, or float32: NAME(number_bytes) */
    long hidden_stride, qkv_stride, heads_stride, gated_stride;
    const attention_plan *plans; /* [groups] */
    float *partials;
    void *quantized;
    element *pairs;               /* of a quick head: see linear/cpu_top.h */
    float *quick_logits, *bounds; /* [logits][2][vocab]; what bounds take: bounds_bytes a row */
    long phase; /* of the thread that holds this copy */
    int thread;
} NAME(run);

/* Rows begin on cache lines, and not a power of two apart: then rows of a tile would share their cache sets. */
static long NAME(stride)(long width) { return pieces(width, 64) * 64 + 32; }

static void NAME(all)(NAME(run) *run, long items, baton_item *item, const void *argument) {
    team_phase(run->team, run->thread, run->phase++, items, item, argument);
}

static void NAME(multiply)(NAME(run) *run, const baton_linear *linear, const element *x, long x_stride, void *y,
                           long y_stride, long rows, int kind) {
    const NAME(product) product = {linear, x, y, rows, x_stride, y_stride, kind, run->quantized};
    if (linear->format != FORMAT_ELEMENTS)
        NAME(all)(run, NAME(quantize_items)(&product), NAME(quantize_item), &product);
    NAME(all)(run, NAME(product_items)(&product), NAME(product_item), &product);
}

static void NAME(normalize)(NAME(run) *run, const float *x, const float *weight, long rows) {
    const baton_model *model = run->model;
    const long size = model->hidden;
    const NAME(norm) norm = {x, weight, run->normed, rows, size, size, run->hidden_stride, (float)model->eps};
    NAME(all)(run, rows, NAME(norm_item), &norm);
}

static void NAME(embed_item)(const void *argument, long row, int thread) {
    (void)thread;
    const NAME(run) *run = argument;
    const baton_model *model = run->model;
    const long size = model->hidden, from = run->step->tokens[row] * size;
    float *to = run->sums + row * size;
    for (long i = 0; i < size; i += LANES) {
        const lane_mask mask = first_lanes(size - i);
        const uint16_t *half = (const uint16_t *)model->embedding + from + i;
        lanes v;
        switch (model->embedding_kind) {
            case EMBEDDING_FLOAT32: v = load_part((const float *)model->embedding + from + i, mask); break;
            case EMBEDDING_FLOAT16: v = load_float16(half, mask); break;
            default: v = load_bfloat16(half, mask);
        }
        store_part(to + i, mask, v);
    }
}

/* The rows whose logits are wanted, of the residual stream and of the heads: the heads go where q, k and v were. */
static void NAME(pick_item)(const void *argument, long i, int thread) {
    (void)thread;
    const NAME(run) *run = argument;
    const long row = run->step->logit_rows[i], hidden = run->model->hidden;
    const long width = run->model->q_heads * run->model->head_dim;
    memcpy(run->picked + i * hidden, run->sums + row * hidden, (size_t)hidden * sizeof(float));
    element *heads = (element *)run->qkv + i * run->qkv_stride;
    memcpy(heads, run->heads + row * run->heads_stride, (size_t)width * sizeof(element));
}

static tiles_of_layer NAME(layer_tiles)(const baton_model *model, const baton_group *group, long index) {
    const int integers = group->format == KV_INT8;
    const long number = integers ? 1 : group->format == KV_FLOAT16 ? 2 : (long)sizeof(element);
    const long vector = model->head_dim * number, head = group->block_size * vector;
    const long layer = 2 * model->kv_heads * head, tiles = group->num_layers * layer;
    const long scales = integers ? 2 * model->kv_heads * group->block_size * (long)sizeof(float) : 0;
    return (tiles_of_layer){
        .base = (char *)group->pool + index * layer,
        .scales = (char *)group->pool + tiles + index * scales,
        .block_stride = tiles + group->num_layers * scales,
        .head_stride = head,
        .value_offset = model->kv_heads * head,
        .vector_bytes = vector,
        .head_dim = model->head_dim,
        .kv_heads = model->kv_heads,
        .block_shift = __builtin_ctzll((unsigned long long)group->block_size),
        .format = (int)group->format,
    };
}

/* Bytes of a number of q, k and v. Those that are stored as halves are not rounded to elements before. */
INLINE long NAME(number_bytes)(const baton_group *group) {
    return group->format == KV_FLOAT16 ? (long)sizeof(float) : (long)sizeof(element);
}

static void NAME(rotate_and_store)(NAME(run) *run, const baton_layer *layer) {
    const baton_model *model = run->model;
    const baton_step *step = run->step;
    const baton_group *group = &step->groups[layer->group];
    const NAME(rotation) rotation = {run->qkv,        model->rotary, step->positions, group->slots,
                                     NAME(layer_tiles)(model, group, layer->index), run->qkv_stride, model->q_heads};
    NAME(all)(run, step->num_tokens, NAME(rotation_item), &rotation);
}

static NAME(attention) NAME(attention_of)(const baton_model *model, const baton_group *group, long index,
                                          const attention_plan *plan, float *partials, baton_team *team) {
    return (NAME(attention)){
        .pool = NAME(layer_tiles)(model, group, index),
        .pieces = plan->pieces,
        .units = plan->units,
        .num_units = plan->num_units,
        .q_bytes = NAME(number_bytes)(group),
        .ended = plan->ended,
        .partials = partials,
        .team = team,
        .group = model->q_heads / model->kv_heads,
        .scale = (float)(model->scale * M_LOG2E),
    };
}

static void NAME(attend)(NAME(run) *run, const baton_layer *layer, int wanted_only) {
    const baton_group *group = &run->step->groups[layer->group];
    const attention_plan *plan = &run->plans[layer->group];
    NAME(attention) attention = NAME(attention_of)(run->model, group, layer->index, plan, run->partials, run->team);
    attention.q = run->qkv;
    attention.q_stride = run->qkv_stride;
    attention.y = run->heads;
    attention.y_stride = run->heads_stride;
    attention.wanted_only = wanted_only;
    NAME(all)(run, plan->num_units * run->model->kv_heads, NAME(attention_item), &attention);
}

INLINE int NAME(is_quick)(const baton_model *model, const baton_step *step) {
    return step->top_only && step->rechecked && model->quick_head.weight;
}

static void NAME(find_top)(NAME(run) *run, long rows) {
    const baton_model *model = run->model;
    const long slices = NAME(slices)(&model->head);
    const NAME(top) top = {.head = &model->head,
                           .quick = &model->quick_head,
                           .norms = model->quick_norms,
                           .x = run->normed,
                           .pairs = run->pairs,
                           .quick_logits = run->quick_logits,
                           .logits = run->step->logits,
                           .draws = run->step->draws,
                           .factors = run->bounds,
                           .limits = run->bounds + 2 * rows,
                           .uppers = run->bounds + 3 * rows,
                           .lowers = run->bounds + (3 + slices) * rows,
                           .rechecked = run->step->rechecked,
                           .rows = rows,
                           .x_stride = run->hidden_stride};
    const long items = rows * slices;
    NAME(all)(run, rows, NAME(split_item), &top);
    NAME(multiply)(run, top.quick, top.pairs, top.x_stride, run->quick_logits, model->vocab, 2 * rows, TO_FLOATS);
    NAME(all)(run, items, NAME(lower_item), &top);
    NAME(all)(run, rows, NAME(limit_item), &top);
    NAME(all)(run, items, NAME(recheck_item), &top);
}

static void NAME(program)(void *argument, baton_team *team, int thread) {
    (void)team;
    NAME(run) own = *(const NAME(run) *)argument, *run = &own;
    const baton_model *model = run->model;
    const baton_step *step = run->step;
    const long hidden = model->hidden;
    run->thread = thread;
    NAME(all)(run, step->num_tokens, NAME(embed_item), run);
    long rows = step->num_tokens;
    float *sums = run->sums;
    for (long i = 0; i < model->num_layers; i++) {
        const baton_layer *layer = &model->layers[i];
        NAME(normalize)(run, sums, layer->attention_norm, rows);
        const int halves = step->groups[layer->group].format == KV_FLOAT16;
        NAME(multiply)(run, &layer->qkv, run->normed, run->hidden_stride, run->qkv, run->qkv_stride, rows,
                       halves ? TO_FLOATS : TO_ELEMENTS);
        NAME(rotate_and_store)(run, layer);
        const int last = i == model->num_layers - 1;
        if (last && !step->num_logits) return;
        NAME(attend)(run, layer, last);
        const element *heads = run->heads;
        long heads_stride = run->heads_stride;
        if (last) {
            NAME(all)(run, step->num_logits, NAME(pick_item), run);
            heads = run->qkv;
            heads_stride = run->qkv_stride;
            sums = run->picked;
            rows = step->num_logits;
        }
        NAME(multiply)(run, &layer->o, heads, heads_stride, sums, hidden, rows, TO_SUM);
        NAME(normalize)(run, sums, layer->mlp_norm, rows);
        NAME(multiply)(run, &layer->gate_up, run->normed, run->hidden_stride, run->gated, run->gated_stride, rows,
                       TO_GATED);
        NAME(multiply)(run, &layer->down, run->gated, run->gated_stride, sums, hidden, rows, TO_SUM);
    }
    NAME(normalize)(run, sums, model->final_norm, rows);
    if (NAME(is_quick)(model, step))
        NAME(find_top)(run, rows);
    else
        NAME(multiply)(run, &model->head, run->normed, run->hidden_stride, step->logits, model->vocab, rows, TO_FLOATS);
}

/* Bytes that the quantized rows of any product of the model take. */
static size_t NAME(quantized_memory)(const baton_model *model, long rows, long head_rows) {
    size_t most = 0;
    for (long i = 0; i < model->num_layers; i++) {
        const baton_layer *layer = &model->layers[i];
        const baton_linear *all[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        for (int j = 0; j < 4; j++)
            if (all[j]->format != FORMAT_ELEMENTS && quantized_bytes(all[j], rows) > most)
                most = quantized_bytes(all[j], rows);
    }
    const baton_linear *heads[] = {&model->head, &model->quick_head};
    for (int i = 0; i < 2; i++)
        if (heads[i]->weight && heads[i]->format != FORMAT_ELEMENTS && quantized_bytes(heads[i], 2 * head_rows) > most)
            most = quantized_bytes(heads[i], 2 * head_rows); /* a quick head's rows are twice as many */
    return most;
}

static int NAME(reserve_quick)(NAME(run) *run) {
    const size_t rows = (size_t)run->step->num_logits, vocab = (size_t)run->model->vocab;
    const size_t stride = (size_t)run->hidden_stride;
    const size_t logits = 2 * rows * vocab * sizeof(float), bounds = rows * NAME(bounds_bytes)(&run->model->head);
    char *memory = team_memory(run->team, -1, QUICK, logits + bounds + 2 * rows * stride * sizeof(element));
    if (!memory) return NO_MEMORY;
    run->quick_logits = (float *)memory;
    run->bounds = (float *)(memory + logits);
    run->pairs = (element *)(memory + logits + bounds);
    return OK;
}

static int NAME(reserve)(NAME(run) *run) {
    const baton_model *m = run->model;
    const size_t tokens = (size_t)run->step->num_tokens, wanted = (size_t)run->step->num_logits;
    size_t number = sizeof(element);
    for (long g = 0; g < run->step->num_groups; g++)
        number = (size_t)larger((long)number, NAME(number_bytes)(&run->step->groups[g]));
    run->hidden_stride = NAME(stride)(m->hidden);
    run->qkv_stride = NAME(stride)((m->q_heads + 2 * m->kv_heads) * m->head_dim);
    run->heads_stride = NAME(stride)(m->q_heads * m->head_dim);
    run->gated_stride = NAME(stride)(m->intermediate);
    run->sums = team_memory(run->team, -1, SUMS, tokens * (size_t)m->hidden * sizeof(float));
    run->picked = team_memory(run->team, -1, PICKED, wanted * (size_t)m->hidden * sizeof(float));
    run->normed = team_memory(run->team, -1, NORMED, tokens * (size_t)run->hidden_stride * sizeof(element));
    run->qkv = team_memory(run->team, -1, QKV, tokens * (size_t)run->qkv_stride * number);
    run->heads = team_memory(run->team, -1, HEADS, tokens * (size_t)run->heads_stride * sizeof(element));
    run->gated = team_memory(run->team, -1, GATED, tokens * (size_t)run->gated_stride * sizeof(element));
    run->quantized = team_memory(run->team, -1, QUANTIZED, NAME(quantized_memory)(m, (long)tokens, (long)wanted));
    if (!run->sums || !run->picked || !run->normed || !run->qkv || !run->heads || !run->gated || !run->quantized)
        return NO_MEMORY;
    if (NAME(is_quick)(m, run->step) && NAME(reserve_quick)(run)) return NO_MEMORY;
    return NAME(reserve_attention)(run->team, m);
}

enum { MAX_GROUPS = 16 };

static int NAME(check)(const baton_model *model, const baton_step *step) {
    if (model->num_layers < 1 || step->num_groups < 1 || step->num_groups > MAX_GROUPS) return BAD_MODEL;
    if (model->head_dim % (2 * PACK) || model->kv_heads < 1 || model->q_heads % model->kv_heads) return BAD_MODEL;
    return check_step(model, step);
}

int NAME(baton_step)(baton_team *team, const baton_model *model, const baton_step *step) {
    int code = NAME(check)(model, step);
    if (code) return code;
    attention_plan plans[MAX_GROUPS];
    NAME(run) run = {.model = model, .step = step, .team = team, .plans = plans};
    if ((code = NAME(reserve)(&run))) return code;
    if ((code = NAME(plan_attention)(team, model, step, plans, &run.partials))) return code;
    return team_run(team, NAME(program), &run, model->num_layers * LAYER_PHASES + OTHER_PHASES) ? NO_MEMORY : OK;
}
