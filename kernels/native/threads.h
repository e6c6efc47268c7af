/* A team of threads that runs one program together, phase by phase. Knows nothing about what the phases compute.
 *
 * A phase is a number of items. Threads wait for the items of a phase, not for one another: a thread that the operating
 * system took off its core between two items delays nobody, and catches up when it comes back. */
#ifndef BATON_THREADS_H
#define BATON_THREADS_H

#include <stddef.h>
#include <stdint.h>

typedef struct baton_team baton_team;

/* Every thread of a run calls this once per run, with its number from 0. */
typedef void baton_program(void *argument, baton_team *team, int thread);
/* One item of a phase. */
typedef void baton_item(const void *argument, long item, int thread);

/* A team of `threads`, the caller of `team_run` among them. NULL: no memory, or the system gives no more threads. */
baton_team *team_new(int threads);
void team_free(baton_team *team);
int team_size(const baton_team *team);

/* Let runs use the first `threads` threads, at least one and at most all. To be called between runs; costs nothing. */
void team_use(baton_team *team, int threads);

/* Memory of one thread (0 <= thread < size) or of the team (thread = -1), at least `bytes`, aligned to 64; contents are
 * lost when it grows. To be called between runs. NULL: no memory. */
enum { TEAM_SLOTS = 16 };
void *team_memory(baton_team *team, int thread, int slot, size_t bytes);

/* Run `program` on the threads in use, of at most `phases` phases. Not to be called by two threads at once.
 * Returns 0, or -1 without memory for the phases. */
int team_run(baton_team *team, baton_program *program, void *argument, long phases);

/* Called by every thread of a run, in the same order with the same arguments: run `items` items. Returns when all have
 * ended. Phases count from 0. */
void team_phase(baton_team *team, int thread, long phase, long items, baton_item *item, const void *argument);

#endif
