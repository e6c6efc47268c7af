/* Single operations in a run of their own: for packing, benchmarks, tests and checks. Included after step.h. */

typedef struct {
    long items;
    baton_item *item;
    const void *argument;
} NAME(single);

static void NAME(single_program)(void *argument, baton_team *team, int thread) {
    const NAME(single) *single = argument;
    team_phase(team, thread, 0, single->items, single->item, single->argument);
}

static int NAME(run_single)(baton_team *team, long items, baton_item *item, const void *argument) {
    NAME(single) single = {items, item, argument};
    return team_run(team, NAME(single_program), &single, 1) ? NO_MEMORY : OK;
}

/* Rows of a plain matrix into a packed one that is zero before; see linear/cpu_pack.h. */
int NAME(baton_pack)(baton_team *team, const element *from, element *to, int64_t rows, int64_t in, int64_t first,
                     int64_t run, int64_t step) {
    const row_packing packing = {from, to, rows, in, first, run, step, 0};
    return NAME(run_single)(team, rows, NAME(pack_item), &packing);
}

/* The same for integers in bytes, of a format and a size of groups. */
int NAME(baton_pack_integers)(baton_team *team, const uint8_t *from, uint8_t *to, int64_t rows, int64_t in,
                              int64_t first, int64_t run, int64_t step, int64_t format, int64_t group) {
    const row_packing packing = {from, to, rows, in, first, run, step, pieces(in, group) * group};
    return NAME(run_single)(team, rows, format == FORMAT_INT8 ? pack_int8_item : pack_int4_item, &packing);
}

static void NAME(product_program)(void *argument, baton_team *team, int thread) {
    const NAME(product) *p = argument;
    if (p->quantized) team_phase(team, thread, 0, NAME(quantize_items)(p), NAME(quantize_item), p);
    team_phase(team, thread, 1, NAME(product_items)(p), NAME(product_item), p);
}

int NAME(baton_linear)(baton_team *team, const baton_linear *linear, const element *x, void *y, int64_t rows,
                       int64_t x_stride, int64_t y_stride, int64_t kind) {
    int code = check_linear(linear);
    if (code) return code;
    NAME(product) product = {linear, x, y, rows, x_stride, y_stride, (int)kind, NULL};
    if (linear->format != FORMAT_ELEMENTS) {
        product.quantized = team_memory(team, -1, QUANTIZED, quantized_bytes(linear, rows));
        if (!product.quantized) return NO_MEMORY;
    }
    return team_run(team, NAME(product_program), &product, 2) ? NO_MEMORY : OK;
}

int NAME(baton_norm)(baton_team *team, const float *x, const float *weight, element *y, int64_t rows, int64_t size,
                     double eps) {
    const NAME(norm) norm = {x, weight, y, rows, size, size, size, (float)eps};
    return NAME(run_single)(team, rows, NAME(norm_item), &norm);
}

/* Rotate and store layer `index` of the first group: qkv is [num_tokens, q_heads + 2 kv_heads, head_dim], float32 for
 * keys and values of halves. */
int NAME(baton_rotate)(baton_team *team, const baton_model *model, const baton_step *step, void *qkv,
                       int64_t index) {
    const int code = NAME(check)(model, step);
    if (code) return code;
    const baton_group *group = &step->groups[0];
    const NAME(rotation) rotation = {qkv, model->rotary, step->positions, group->slots,
                                     NAME(layer_tiles)(model, group, index),
                                     (model->q_heads + 2 * model->kv_heads) * model->head_dim,
                                     model->q_heads};
    return NAME(run_single)(team, step->num_tokens, NAME(rotation_item), &rotation);
}

/* Attention of the first `layers` layers of the first group, one after the other: q and y are [num_tokens, q_heads,
 * head_dim], y of the last; q is float32 for keys and values of halves. */
typedef struct {
    const baton_step *step;
    const attention_plan *plan;
    NAME(attention) attention;
    const baton_model *model;
    long first, last;
} NAME(attentions);

static void NAME(attention_program)(void *argument, baton_team *team, int thread) {
    const NAME(attentions) *all = argument;
    NAME(attention) attention = all->attention;
    for (long i = all->first; i < all->last; i++) {
        attention.pool = NAME(layer_tiles)(all->model, &all->step->groups[0], i);
        const long items = all->plan->num_units * attention.pool.kv_heads;
        team_phase(team, thread, i - all->first, items, NAME(attention_item), &attention);
    }
}

int NAME(baton_attention)(baton_team *team, const baton_model *model, const baton_step *step, const void *q,
                          element *y, int64_t first, int64_t last) {
    int code = NAME(check)(model, step);
    if (code) return code;
    if (first < 0 || last > step->groups[0].num_layers) return BAD_MODEL;
    attention_plan plans[MAX_GROUPS];
    float *partials;
    if ((code = NAME(reserve_attention)(team, model))) return code;
    if ((code = NAME(plan_attention)(team, model, step, plans, &partials))) return code;
    NAME(attentions) all = {step, plans, NAME(attention_of)(model, step->groups, first, plans, partials, team), model,
                            first, last};
    all.attention.q = q;
    all.attention.y = y;
    all.attention.q_stride = all.attention.y_stride = model->q_heads * model->head_dim;
    return team_run(team, NAME(attention_program), &all, last - first) ? NO_MEMORY : OK;
}

/* Keys of a KV head that attention of the first group reads, those of a unit's common blocks once. */
int NAME(baton_keys_read)(baton_team *team, const baton_model *model, const baton_step *step, int64_t *keys) {
    int code = NAME(check)(model, step);
    if (code) return code;
    attention_plan plans[MAX_GROUPS];
    float *partials;
    if ((code = NAME(plan_attention)(team, model, step, plans, &partials))) return code;
    *keys = 0;
    for (const query_unit *unit = plans->units; unit < plans->units + plans->num_units; unit++) {
        *keys += unit->common;
        const query_piece *piece = plans->pieces + unit->piece;
        for (long i = 0; i < unit->count; i++, piece++) {
            const long end = piece->position + piece->tokens;
            *keys += unit->split < 0 ? end : smaller(end - unit->split * SPLIT, SPLIT) - unit->common;
        }
    }
    return OK;
}

/* Every product of the model with `rows` rows of zeros, the head with `head_rows`, nothing between them: the least a
 * step can take. */
typedef struct {
    const baton_model *model;
    const element *x;
    void *y, *quantized;
    long rows, head_rows, x_stride, y_stride;
} NAME(sweep);

static void NAME(sweep_program)(void *argument, baton_team *team, int thread) {
    const NAME(sweep) *s = argument;
    const baton_model *m = s->model;
    long phase = 0;
    for (long i = 0; i <= m->num_layers; i++) {
        const baton_layer *layer = &m->layers[i < m->num_layers ? i : 0];
        const baton_linear *all[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        const int last = i == m->num_layers;
        for (int j = 0; j < (last ? 1 : 4); j++) {
            const baton_linear *linear = last ? &m->head : all[j];
            if (!linear->weight) continue;
            const NAME(product) product = {
                .linear = linear,
                .x = s->x,
                .y = s->y,
                .rows = last ? s->head_rows : s->rows,
                .x_stride = s->x_stride,
                .y_stride = s->y_stride,
                .kind = last ? TO_FLOATS : TO_ELEMENTS,
                .quantized = s->quantized,
            };
            if (linear->format != FORMAT_ELEMENTS)
                team_phase(team, thread, phase++, NAME(quantize_items)(&product), NAME(quantize_item), &product);
            team_phase(team, thread, phase++, NAME(product_items)(&product), NAME(product_item), &product);
        }
    }
}

int NAME(baton_sweep)(baton_team *team, const baton_model *model, int64_t rows, int64_t head_rows) {
    if (rows < 1 || head_rows < 0 || head_rows > rows || model->num_layers < 1) return BAD_LENGTHS;
    const long width = larger(larger(model->hidden, model->intermediate), model->q_heads * model->head_dim);
    const long qkv = (model->q_heads + 2 * model->kv_heads) * model->head_dim;
    NAME(sweep) sweep = {.model = model, .rows = rows, .head_rows = head_rows, .x_stride = NAME(stride)(width)};
    sweep.y_stride = larger(larger(model->hidden, model->vocab), larger(qkv, 2 * model->intermediate));
    const size_t bytes = (size_t)(rows * sweep.x_stride) * sizeof(element);
    element *x = team_memory(team, -1, GATED, bytes);
    sweep.y = team_memory(team, -1, SUMS, (size_t)(rows * sweep.y_stride) * sizeof(float));
    sweep.quantized = team_memory(team, -1, QUANTIZED, NAME(quantized_memory)(model, rows, head_rows));
    if (!x || !sweep.y || !sweep.quantized) return NO_MEMORY;
    memset(x, 0, bytes);
    sweep.x = x;
    return team_run(team, NAME(sweep_program), &sweep, 8 * model->num_layers + 2) ? NO_MEMORY : OK;
}
