/* What the library is given: a model and the plan of a step, made in Python over memory that Python owns
 * (kernels/native/abi.py mirrors these). All pointers are to contiguous arrays; "elements" are of the library call's
 * element type. */
#ifndef BATON_MODEL_H
#define BATON_MODEL_H

#include <stdint.h>

enum { FORMAT_ELEMENTS, FORMAT_INT8, FORMAT_INT4, FORMAT_INT4_STEPS };

typedef struct {
    const void *weight; /* packed as the format says, see linear/; NULL where a model has none */
    const float *bias;  /* [outputs rounded up to 32] in the packed order, or NULL */
    int64_t in, out;    /* `out` counts gates and ups both */
    const void *scales; /* of integer formats */
    int64_t format, group; /* and, of integer formats: inputs that share a scale, 32, 64 or 128 */
    const int32_t *order;  /* of integer formats: [in], weights of column i are of input order[i]; NULL: of input i */
} baton_linear;

typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    baton_linear qkv, o, gate_up, down;
    int64_t group, index; /* the layer's group, and its place in it */
} baton_layer;

enum { EMBEDDING_FLOAT32, EMBEDDING_BFLOAT16, EMBEDDING_FLOAT16 };

typedef struct {
    int64_t num_layers, hidden, intermediate, vocab, q_heads, kv_heads, head_dim, positions, embedding_kind;
    double eps, scale;
    const void *embedding;   /* [vocab, hidden] of embedding_kind */
    const float *rotary;     /* [positions, 2, head_dim] */
    const float *final_norm; /* [hidden] */
    const baton_layer *layers;
    baton_linear head, quick_head; /* the head again as 8-bit integers, or nothing: see linear/cpu_top.h */
    const float *quick_norms;      /* [blocks of 32][2][32] */
} baton_model;

enum { KV_ELEMENTS, KV_INT8, KV_FLOAT16 };

typedef struct {
    void *pool; /* [num_blocks, num_layers, 2, kv_heads, block_size, head_dim] as `format` says, see store_kv/ */
    int64_t num_blocks, num_layers, block_size;
    const int64_t *slots;        /* [num_tokens], -1: not stored */
    const int64_t *tables;       /* block ids of all sequences, one after the other */
    const int64_t *table_starts; /* [num_sequences + 1] */
    int64_t format;
} baton_group;

/* How a row of logits is sampled: kernels/sampling/__init__.py and adjustment.py say what it means. */
typedef struct {
    uint64_t seed, position;
    double top_p, log_min_p;                /* off: 1, minus infinity */
    const int64_t *said;                    /* [num_said] tokens, those of the prompt first; repeated as they were */
    const int64_t *bias_ids;                /* [num_biases], each once */
    const float *bias_values;
    const uint32_t *allowed;                /* [ceil(vocab / 32)], bit i % 32 of word i / 32 of token i; or NULL: all */
    int64_t num_said, num_prompt, num_biases;
    int64_t top_k;                          /* 0: off */
    float temperature;                      /* 0: the largest logit */
    float repetition, presence, frequency;  /* for tokens said */
} baton_row;

typedef struct {
    int64_t num_tokens, num_sequences, num_logits, num_groups;
    const int64_t *tokens, *positions;      /* [num_tokens] */
    const int64_t *cu_seqlens, *seq_lens;   /* [num_sequences + 1], [num_sequences] */
    const int64_t *logit_rows;              /* [num_logits] */
    const baton_group *groups;              /* [num_groups] */
    float *logits;                          /* [num_logits, vocab] */
    int64_t top_only;                       /* logits that no draw can look at may be minus infinity */
    int64_t *rechecked;                     /* [num_logits] of a quick head: blocks the real one computed; or NULL */
    const baton_row *draws;                 /* [num_logits] of top_only: how rows are drawn from; NULL: by the largest */
} baton_step;

typedef struct {
    const float *logits; /* [num_rows, vocab] */
    const baton_row *rows;
    int64_t *tokens;     /* [num_rows]; -1 where the largest is not finite: cpu_kernel.h */
    int64_t num_rows, vocab;
} baton_sampling;

/* Steps of rows that have one token each and draw the next, one after the other. */
typedef struct {
    const baton_model *model;
    baton_step *step;         /* of rows that drew draws->tokens; tokens, positions, lengths and slots are written */
    baton_sampling *draws;    /* its rows' positions are written */
    int64_t is_bfloat16;
    int64_t most;             /* steps, at least one */
    double until;             /* seconds of the monotonic clock: the last step is the one whose next would end later */
    const int64_t *ending;    /* [num_ending]: no step begins behind one that drew such a token */
    int64_t num_ending;
    const volatile int32_t *halt; /* no step but the first begins while it is not 0 */
    int64_t *tokens;          /* [most, num_rows] what each step drew */
    double *ends;             /* [most] when it ended */
    int64_t *rechecked;       /* [most, num_rows], as of baton_step */
    int64_t taken;            /* steps that were computed */
} baton_stretch;

/* Log-probabilities of the logits as given. */
typedef struct {
    const float *logits;         /* [some, vocab], the largest of a row finite */
    const int64_t *rows, *tokens; /* [num_wanted] row of the logits, and token of it */
    const int64_t *tops;         /* [num_wanted]: how many of the most likely tokens to tell, at most most_top */
    double *logprobs;            /* [num_wanted, 1 + most_top]: of the token, then of the most likely */
    int64_t *top_ids;            /* [num_wanted, most_top], -1 where no more are finite */
    int64_t num_wanted, num_rows, vocab, most_top;
} baton_logprobs;

/* What a call says when it did nothing. Python has the words. */
enum {
    OK = 0,
    NO_MEMORY = 1,
    BAD_TOKEN = 2,
    BAD_POSITION = 3,
    BAD_SLOT = 4,
    BAD_BLOCK = 5,
    BAD_LENGTHS = 6,
    BAD_LOGIT_ROW = 7,
    NO_HEAD = 8,
    BAD_MODEL = 9,
    BAD_SAMPLING = 10,
};

#endif
