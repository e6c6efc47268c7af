/* Nothing in a plan may reach outside the memory it was given, whoever made it. */
#include "check.h"

static int power_of_two(int64_t n) { return n > 0 && !(n & (n - 1)); }

/* Sums of MOST_INTEGERS products of a 16-bit and an 8-bit integer fit 32 bits: see attention/cpu_integers.h. */
enum { MOST_INTEGERS = 512 };

static int check_group(const baton_model *model, const baton_step *step, const baton_group *group) {
    if (!power_of_two(group->block_size) || group->block_size < 16 || group->num_blocks < 1) return BAD_MODEL;
    if (group->format < KV_ELEMENTS || group->format > KV_FLOAT16) return BAD_MODEL;
    if (group->format == KV_INT8 && model->head_dim > MOST_INTEGERS) return BAD_MODEL;
    for (int64_t i = 0; i < step->num_tokens; i++)
        if (group->slots[i] < -1 || group->slots[i] >= group->num_blocks * group->block_size) return BAD_SLOT;
    if (group->table_starts[0]) return BAD_BLOCK;
    for (int64_t i = 0; i < step->num_sequences; i++) {
        const int64_t first = group->table_starts[i], blocks = group->table_starts[i + 1] - first;
        if (blocks < 0 || blocks * group->block_size < step->seq_lens[i]) return BAD_BLOCK;
        for (int64_t j = 0; j < blocks; j++)
            if (group->tables[first + j] < 0 || group->tables[first + j] >= group->num_blocks) return BAD_BLOCK;
    }
    return OK;
}

int check_linear(const baton_linear *linear) {
    if (!linear->weight || linear->in < 1 || linear->out < 1) return BAD_MODEL;
    if (linear->format == FORMAT_ELEMENTS) return OK;
    if (linear->format < FORMAT_INT8 || linear->format > FORMAT_INT4_STEPS) return BAD_MODEL;
    const int64_t group = linear->group;
    return linear->scales && (group == 32 || group == 64 || group == 128) ? OK : BAD_MODEL;
}

int check_step(const baton_model *model, const baton_step *step) {
    if (step->num_tokens < 1 || step->num_sequences < 1 || step->cu_seqlens[0]) return BAD_LENGTHS;
    for (int64_t i = 0; i < step->num_sequences; i++) {
        const int64_t tokens = step->cu_seqlens[i + 1] - step->cu_seqlens[i];
        if (tokens < 1 || tokens > step->seq_lens[i]) return BAD_LENGTHS;
    }
    if (step->cu_seqlens[step->num_sequences] != step->num_tokens) return BAD_LENGTHS;
    for (int64_t i = 0; i < step->num_tokens; i++) {
        if (step->tokens[i] < 0 || step->tokens[i] >= model->vocab) return BAD_TOKEN;
        if (step->positions[i] < 0 || step->positions[i] >= model->positions) return BAD_POSITION;
    }
    if (step->num_logits < 0 || step->num_logits > step->num_tokens) return BAD_LOGIT_ROW;
    for (int64_t i = 0; i < step->num_logits; i++)
        if (step->logit_rows[i] < 0 || step->logit_rows[i] >= step->num_tokens) return BAD_LOGIT_ROW;
    if (step->num_logits && !model->head.weight) return NO_HEAD;
    if (model->head.weight && check_linear(&model->head)) return BAD_MODEL;
    if (model->quick_head.weight) {
        const baton_linear *quick = &model->quick_head, *head = &model->head;
        if (check_linear(quick) || !model->quick_norms || quick->format != FORMAT_INT8) return BAD_MODEL;
        if (!head->weight || head->format != FORMAT_ELEMENTS || head->bias || quick->bias) return BAD_MODEL;
        if (quick->in != head->in || quick->out != head->out) return BAD_MODEL;
    }
    for (int64_t i = 0; i < model->num_layers; i++) {
        const baton_layer *layer = &model->layers[i];
        if (layer->group < 0 || layer->group >= step->num_groups) return BAD_MODEL;
        if (layer->index < 0 || layer->index >= step->groups[layer->group].num_layers) return BAD_MODEL;
        if (check_linear(&layer->qkv) || check_linear(&layer->o)) return BAD_MODEL;
        if (check_linear(&layer->gate_up) || check_linear(&layer->down)) return BAD_MODEL;
    }
    for (int64_t i = 0; i < step->num_groups; i++) {
        const int code = check_group(model, step, &step->groups[i]);
        if (code) return code;
    }
    return OK;
}
