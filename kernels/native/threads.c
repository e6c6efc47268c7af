#define _GNU_SOURCE
#include "threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64 };
/* How long a thread looks for what it waits for before it sleeps: longer than a small step's serial parts, far shorter
 * than a time slice. */
static const long SPIN_NS = 60000;
static const int SPINS_A_LOOK = 64;

typedef struct {
    uint64_t value;
    char rest[LINE - sizeof(uint64_t)];
} counter; /* on a cache line of its own */

typedef struct {
    void *start;
    size_t bytes;
} memory;

struct baton_team {
    int size;
    int used;    /* threads of a run, the caller among them; the others sleep. Changes between runs only */
    int started; /* threads beside the caller that exist */
    pthread_t *threads;
    memory *memories; /* [(size + 1) * TEAM_SLOTS], the team's own last */

    /* Of the run. `done` has a counter a phase, `next` one a phase and thread: the next item of that thread's share. */
    baton_program *program;
    void *argument;
    counter *done, *next;
    long phases;

    counter run;    /* number of the run; what sleeping threads wait for */
    counter open;   /* 1 while threads may join the run */
    counter inside; /* threads of the team, without the caller, that are in it */
    counter ended;  /* raised when a phase ends; what threads that wait for one sleep on */
    counter sleepers;
    counter stop;
};

typedef struct {
    baton_team *team;
    int thread;
} seat;

static uint64_t load(const counter *c) { return __atomic_load_n(&c->value, __ATOMIC_SEQ_CST); }
static void store(counter *c, uint64_t value) { __atomic_store_n(&c->value, value, __ATOMIC_SEQ_CST); }
static uint64_t add(counter *c, uint64_t value) { return __atomic_add_fetch(&c->value, value, __ATOMIC_SEQ_CST); }

/* The kernel compares 32 bits: the low ones, which come first on the machines this is built for. */
static void futex_wait(counter *c, uint64_t seen) {
    syscall(SYS_futex, &c->value, FUTEX_WAIT_PRIVATE, (uint32_t)seen, NULL, NULL, 0);
}
/* The same for those with a bit of the mask. */
static void futex_wait_as(counter *c, uint64_t seen, uint32_t mask) {
    syscall(SYS_futex, &c->value, FUTEX_WAIT_BITSET_PRIVATE, (uint32_t)seen, NULL, NULL, mask);
}
static void futex_wake_those(counter *c, uint32_t mask) {
    syscall(SYS_futex, &c->value, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, mask);
}
static void futex_wake(counter *c) { syscall(SYS_futex, &c->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

static void pause_a_little(void) {
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("isb" ::: "memory"); /* its yield does nothing on most processors */
#endif
}

/* Bits of threads that sleep until a run: from the 32nd on they share them, and some wake for nothing. */
enum { BITS = 32 };
static uint32_t bit_of(int thread) { return (uint32_t)1 << thread % BITS; }
static uint32_t bits_below(int threads) { return threads < BITS ? bit_of(threads) - 1 : UINT32_MAX; }

static long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

/* Spin until the counter is `value` or another than `not`, at most for SPIN_NS. Returns whether it came. */
static int spin(const counter *c, uint64_t value, int equal) {
    long until = 0;
    for (;;) {
        for (int i = 0; i < SPINS_A_LOOK; i++) {
            if ((load(c) == value) == equal) return 1;
            pause_a_little();
        }
        long now = now_ns();
        if (!until) until = now + SPIN_NS;
        if (now >= until) return 0;
    }
}

void *team_memory(baton_team *team, int thread, int slot, size_t bytes) {
    memory *m = &team->memories[(thread < 0 ? team->size : thread) * TEAM_SLOTS + slot];
    if (m->bytes < bytes || !m->start) {
        bytes = (bytes + LINE) / LINE * LINE;
        free(m->start);
        m->start = aligned_alloc(LINE, bytes);
        m->bytes = m->start ? bytes : 0;
    }
    return m->start;
}

void team_phase(baton_team *team, int thread, long phase, long items, baton_item *item, const void *argument) {
    const int size = team->used;
    counter *done = &team->done[phase], *next = &team->next[phase * size];
    if (load(done) == (uint64_t)items) return;
    uint64_t mine = 0;
    /* its own share, one after the other, then what others have left of theirs */
    for (int i = 0; i < size; i++) {
        int owner = (thread + i) % size;
        long first = items * owner / size, last = items * (owner + 1) / size;
        while (load(&next[owner]) < (uint64_t)(last - first)) {
            long at = first + (long)add(&next[owner], 1) - 1;
            if (at >= last) break;
            item(argument, at, thread);
            mine++;
        }
    }
    if (mine && add(done, mine) == (uint64_t)items) {
        add(&team->ended, 1);
        if (load(&team->sleepers)) futex_wake(&team->ended);
        return;
    }
    while (!spin(done, (uint64_t)items, 1)) {
        uint64_t seen = load(&team->ended);
        add(&team->sleepers, 1);
        if (load(done) != (uint64_t)items) futex_wait(&team->ended, seen);
        add(&team->sleepers, (uint64_t)-1);
    }
}

static void *worker(void *argument) {
    seat own = *(seat *)argument;
    free(argument);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL); /* they are for the program's own threads */
    baton_team *team = own.team;
    uint64_t seen = 0;
    int waits = 1; /* of use in the last run: looks for the next one before it sleeps */
    for (;;) {
        if (!waits || !spin(&team->run, seen, 0)) futex_wait_as(&team->run, seen, bit_of(own.thread));
        if (load(&team->stop)) return NULL;
        const uint64_t run = load(&team->run);
        if (run == seen) continue;
        seen = run;
        add(&team->inside, 1);
        /* the caller closes the run and then looks who is inside: one of the two sees the other */
        if (load(&team->open) && (waits = own.thread < team->used)) team->program(team->argument, team, own.thread);
        add(&team->inside, (uint64_t)-1);
    }
}

int team_run(baton_team *team, baton_program *program, void *argument, long phases) {
    if (phases > team->phases) {
        free(team->done);
        free(team->next);
        team->done = aligned_alloc(LINE, (size_t)phases * sizeof(counter));
        team->next = aligned_alloc(LINE, (size_t)phases * team->size * sizeof(counter));
        team->phases = team->done && team->next ? phases : 0;
        if (!team->phases) return -1;
    }
    memset(team->done, 0, (size_t)phases * sizeof(counter));
    memset(team->next, 0, (size_t)phases * team->size * sizeof(counter));
    team->program = program;
    team->argument = argument;
    if (team->used > 1) {
        store(&team->open, 1);
        add(&team->run, 1);
        futex_wake_those(&team->run, bits_below(team->used));
    }
    program(argument, team, 0);
    store(&team->open, 0);
    while (!spin(&team->inside, 0, 1)) sched_yield();
    return 0;
}

int team_size(const baton_team *team) { return team->size; }

void team_use(baton_team *team, int threads) {
    team->used = threads < 1 ? 1 : threads > team->size ? team->size : threads;
}

void team_free(baton_team *team) {
    if (!team) return;
    store(&team->stop, 1);
    add(&team->run, 1);
    futex_wake_those(&team->run, UINT32_MAX);
    for (int i = 0; i < team->started; i++) pthread_join(team->threads[i], NULL);
    for (int i = 0; team->memories && i < (team->size + 1) * TEAM_SLOTS; i++) free(team->memories[i].start);
    free(team->memories);
    free(team->threads);
    free(team->done);
    free(team->next);
    free(team);
}

baton_team *team_new(int threads) {
    if (threads < 1) return NULL;
    baton_team *team = aligned_alloc(LINE, (sizeof(baton_team) + LINE - 1) / LINE * LINE);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
    team->size = team->used = threads;
    team->threads = calloc((size_t)threads, sizeof(pthread_t));
    team->memories = calloc((size_t)(threads + 1) * TEAM_SLOTS, sizeof(memory));
    for (int i = 1; i < threads && team->threads && team->memories; i++) {
        seat *own = malloc(sizeof(seat));
        if (!own) break;
        *own = (seat){team, i};
        if (pthread_create(&team->threads[team->started], NULL, worker, own)) {
            free(own);
            break;
        }
        team->started++;
    }
    if (!team->threads || !team->memories || team->started != threads - 1) {
        team_free(team);
        return NULL;
    }
    return team;
}
