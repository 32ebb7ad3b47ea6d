// Our own threads. Work is cut into pieces, which threads take from a shared counter, and which give the same bits
// whoever computes them. The caller goes on as soon as all pieces are done: it does not wait for a helper that took none.
//
// Where another process wants a helper's core, the helper can lose its time slice in the middle of a piece for milliseconds,
// in which the caller could compute a hundred pieces. So the caller takes the piece of a late helper back and computes it
// itself. Two rules make this safe:
// * A piece is written once. It computes results in memory of its thread and writes them only if `keep` returns 1. The state
//   of the helper says who writes: `keep` changes it from COMPUTING to STORING, and `take_back` from COMPUTING to TAKEN, by
//   compare-and-swap, so one of them fails. If that is `take_back`, the caller waits: the helper has only to copy.
// * A late helper reads nothing that may be freed by then, because it computes nothing more of a piece that was taken back.
//   The caller sends it a signal, whose handler leaves the piece (`leave`). A helper without a core meets the signal before
//   its next instruction. One that runs does so at the latest when `membarrier` returns, which interrupts all cores that
//   threads of this process run on. Only then does the caller go on.
//
// A helper that is late between `take` and the new state, or while it copies, has to be waited for. Both are short.
//
// For a caller without a core all wait. So one that waits long for its core exchanges it with a helper. While it waits as long
// on the cores of all helpers, it computes alone: threads that rarely have their cores at the same time help little, and Linux
// divides among them the share that their session or container gets.
#define _GNU_SOURCE
#include "native.h"

#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Nanoseconds.
#define SECOND 1000000000
#define PATIENCE 1000000      // a helper spins after its last piece: the next one usually comes sooner
#define LATE 500000           // a thread that spins notices so little time only if another one had its core
#define ENDING 30000          // a helper is late if its last piece takes so much longer than
#define PIECES_LATE 2         // so many of the caller's: its core may be a slower one
#define LOOKS 50000000        // so often the caller looks for how long it waited for its core
#define LONG 0.25f            // this share of the time is long
#define RETRY 20              // after so many looks that it computes alone it tries another core again

// What a helper does with its piece.
enum { NOTHING, COMPUTING, STORING, TAKEN };

typedef struct {
    _Alignas(64) _Atomic int64_t held;  // the number of a piece times four, plus what the helper does with it
    sigjmp_buf without_piece;           // where it goes on if its piece was taken back
    int32_t id;                         // native
} Helper;

static struct {
    // Number of the region in the upper half, pieces that nobody has taken in the lower one. In one word, so that a late
    // helper cannot take a piece of the next region for one of the last.
    _Alignas(64) _Atomic uint64_t left;
    _Alignas(64) _Atomic uint32_t region;   // futex of helpers that sleep
    _Atomic int32_t asleep;
    _Alignas(64) _Atomic uint32_t done;     // pieces
    _Alignas(64) _Atomic uint32_t threads;  // of this region, the caller among them; futex of helpers without a part
    Piece compute;
    const void *work;
    int64_t pieces;
    Helper helpers[MOST_THREADS];           // from 1 on
    int64_t looked, ran, waited;            // by the caller: when, and its time with a core and for one until then
    float wait;                             // its share of the time between its last two looks
    int64_t long_waits;                     // at so many looks in a row it had waited long
    int is_trying, tried;                   // whether it has come from the core of a helper since, and which
    _Atomic int32_t started;
    int signal;                             // 0: no piece can be taken back
    _Atomic int64_t delay;                  // at most, for tests
    _Atomic uint32_t random;
} pool;
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static void sleep_for(int64_t nanoseconds) {
    nanosleep(&(struct timespec){nanoseconds / SECOND, nanoseconds % SECOND}, 0);
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

// Spins while the word has (or, if not `is_value`, has not) the value; returns whether that ended in time. Gives up at
// once where the thread loses its time slice: spinning would use up the next one.
static int ends(_Atomic uint32_t *word, uint32_t value, int is_value, int64_t patience) {
    const int64_t began = now();
    int64_t before = began;
    while ((atomic_load(word) == value) == is_value) {
#if defined(__x86_64__)
        for (int i = 0; i < 4; i++) __builtin_ia32_pause();
#endif
        const int64_t time = now();
        if (time - began >= patience || time - before > LATE) return 0;
        before = time;
    }
    return 1;
}

// The next piece for a thread; -1: there is none.
static int64_t take(uint32_t thread) {
    uint64_t left = atomic_load(&pool.left);
    while ((uint32_t)left && thread < atomic_load(&pool.threads))
        if (atomic_compare_exchange_weak(&pool.left, &left, left - 1)) return pool.pieces - (uint32_t)left;
    return -1;
}

// In tests, a thread sleeps for a random time wherever it could lose its time slice.
static void hesitate(void) {
    const int64_t most = atomic_load(&pool.delay);
    if (most) sleep_for((int64_t)(atomic_fetch_add(&pool.random, 0x9e3779b9) % 256) * most / 256);
}

// Changes what a helper does with its piece, and returns the piece; -1: the helper does not do `from`.
static int64_t change(Helper *helper, int from, int to) {
    int64_t held = atomic_load(&helper->held);
    if ((held & 3) != from) return -1;
    hesitate();
    return atomic_compare_exchange_strong(&helper->held, &held, held - from + to) ? held >> 2 : -1;
}

int keep(int thread) {
    if (!thread) return 1;
    Helper *own = &pool.helpers[thread];
    const int is_kept = change(own, COMPUTING, STORING) >= 0 || (atomic_load(&own->held) & 3) == STORING;
    hesitate();
    return is_kept;
}

static void take_part(int thread) {
    Helper *own = &pool.helpers[thread];
    sigsetjmp(own->without_piece, 0);
    atomic_store(&own->held, NOTHING);
    for (int64_t piece; (piece = take(thread)) >= 0;) {
        atomic_store(&own->held, piece << 2 | COMPUTING);
        hesitate();
        pool.compute(pool.work, piece, thread);
        if ((atomic_exchange(&own->held, NOTHING) & 3) != TAKEN) atomic_fetch_add(&pool.done, 1);
    }
}

// Has the helper that gets the signal go on without the piece that was taken back, unless it has noticed already.
static void leave(int signal) {
    (void)signal;
    const int32_t id = (int32_t)syscall(SYS_gettid), started = atomic_load(&pool.started);
    for (int thread = 1; thread <= started; thread++) {
        Helper *helper = &pool.helpers[thread];
        if (helper->id == id && (atomic_load(&helper->held) & 3) == TAKEN) siglongjmp(helper->without_piece, 1);
    }
}

// Computes the pieces over that helpers hold and have not begun to write.
static void take_back(int threads) {
    for (int thread = 1; thread < threads && pool.signal; thread++) {
        Helper *helper = &pool.helpers[thread];
        const int64_t piece = change(helper, COMPUTING, TAKEN);
        if (piece < 0) continue;
        hesitate();
        int is_late = 0;
        if (syscall(SYS_tgkill, getpid(), helper->id, pool.signal)) is_late = 1;
        if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0)) is_late = 1;
        while (is_late && (atomic_load(&helper->held) & 3) == TAKEN) sched_yield();  // until `keep` is refused
        pool.compute(pool.work, piece, 0);
        atomic_fetch_add(&pool.done, 1);
    }
}

// Takes a signal that nobody else uses for `leave`; 0: there is none, or `membarrier` is not to be had.
static int signal_to_leave(void) {
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0)) return 0;
    for (int number = SIGRTMAX; number >= SIGRTMIN; number--) {
        struct sigaction action;
        if (sigaction(number, 0, &action) || action.sa_handler != SIG_DFL) continue;
        action = (struct sigaction){.sa_handler = leave, .sa_flags = SA_NODEFER | SA_RESTART};
        return sigaction(number, &action, 0) ? 0 : number;
    }
    return 0;
}

static void *help(void *number) {
    const int thread = (int)(intptr_t)number;
    sigset_t signals;
    sigemptyset(&signals);
    if (pool.signal) sigaddset(&signals, pool.signal);
    pthread_sigmask(SIG_UNBLOCK, &signals, 0);
    pool.helpers[thread].id = (int32_t)syscall(SYS_gettid);
    atomic_fetch_add(&pool.started, 1);
    for (;;) {
        const uint32_t region = atomic_load(&pool.region), threads = atomic_load(&pool.threads);
        if ((uint32_t)thread >= threads) {
            sleep_while(&pool.threads, threads);
            continue;
        }
        take_part(thread);
        if (ends(&pool.region, region, 1, PATIENCE)) continue;
        atomic_fetch_add(&pool.asleep, 1);
        sleep_while(&pool.region, region);
        atomic_fetch_sub(&pool.asleep, 1);
    }
    return 0;
}

// The share of the time since the last call in which the caller had no core, of that in which it could have computed.
static float wait_of_caller(void) {
    const int64_t ran = pool.ran, waited = pool.waited;
    FILE *file = fopen("/proc/thread-self/schedstat", "r");
    if (!file) return 0;
    const int are_read = fscanf(file, "%" SCNd64 " %" SCNd64, &pool.ran, &pool.waited);
    fclose(file);
    const float more = (float)(pool.waited - waited), both = (float)(pool.ran - ran) + more;
    return are_read == 2 && both > 0 ? more / both : 0;
}

static void exchange_cores(int32_t helper) {
    cpu_set_t of_caller, of_helper;
    if (sched_getaffinity(0, sizeof of_caller, &of_caller)) return;
    if (sched_getaffinity(helper, sizeof of_helper, &of_helper)) return;
    if (CPU_COUNT(&of_caller) != 1 || CPU_COUNT(&of_helper) != 1) return;  // the kernel chooses among several
    sched_setaffinity(0, sizeof of_helper, &of_helper);
    sched_setaffinity(helper, sizeof of_caller, &of_caller);
}

// Decides from time to time on which core the caller computes, and whether alone.
static void look_at_wait(int threads, int64_t time) {
    const int64_t since = time - pool.looked;
    if (since < LOOKS || atomic_load(&pool.delay)) return;
    const float wait = wait_of_caller();
    const int is_worse = pool.is_trying && wait > pool.wait;
    pool.looked = time, pool.wait = wait, pool.is_trying = 0;
    if (wait < LONG || since > SECOND) pool.long_waits = 0;
    if (wait < LONG) return;
    pool.is_trying = !is_worse && (pool.long_waits < threads - 1 || pool.long_waits % RETRY == 0);
    pool.long_waits++;
    if (pool.is_trying) pool.tried = 1 + pool.tried % (threads - 1);
    if (pool.is_trying || is_worse) exchange_cores(pool.helpers[pool.tried].id);
}

// Starts the helpers that are missing. Where no more threads are to be had, there are fewer.
static void start(int threads) {
    if (!atomic_load(&pool.started) && threads > 1) pool.signal = signal_to_leave();
    for (int number = atomic_load(&pool.started) + 1; number < threads; number++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)number)) break;
        pthread_detach(thread);
        while (atomic_load(&pool.started) < number) sched_yield();
    }
}

static void compute_alone(Piece compute, const void *work, int64_t pieces) {
    for (int64_t piece = 0; piece < pieces; piece++) compute(work, piece, 0);
}

static void compute_together(Piece compute, const void *work, int64_t pieces, int threads, int64_t began) {
    pool.compute = compute, pool.work = work, pool.pieces = pieces;
    const int is_more = atomic_exchange(&pool.threads, threads) < (uint32_t)threads;
    atomic_store(&pool.done, 0);
    const uint32_t region = atomic_load(&pool.region) + 1;
    atomic_store(&pool.left, (uint64_t)region << 32 | (uint32_t)pieces);
    atomic_store(&pool.region, region);
    if (is_more) wake(&pool.threads);
    if (atomic_load(&pool.asleep)) wake(&pool.region);
    uint32_t own = 0;
    for (int64_t piece; (piece = take(0)) >= 0; own++) compute(work, piece, 0);
    if (atomic_fetch_add(&pool.done, own) + own == pieces) return;
    const int64_t patience = ENDING + PIECES_LATE * (now() - began) / (own ? own : 1);
    while (!ends(&pool.done, (uint32_t)pieces, 0, patience)) take_back(threads);
}

void in_pieces(Piece compute, const void *work, int64_t pieces, int threads) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (threads <= 1 || pieces <= 1 || pthread_mutex_trylock(&caller)) {  // last: another caller has the helpers
        compute_alone(compute, work, pieces);
        return;
    }
    start(threads);
    const int64_t began = now();
    look_at_wait(threads, began);
    if (pool.long_waits >= threads) compute_alone(compute, work, pieces);
    else compute_together(compute, work, pieces, threads, began);
    pthread_mutex_unlock(&caller);
}

// Starts helpers for so many threads, the caller among them, and writes their native ids; returns how many there are.
int pearl_helpers(int threads, int32_t *ids) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    pthread_mutex_lock(&caller);
    start(threads);
    const int started = atomic_load(&pool.started), helpers = started < threads - 1 ? started : threads - 1;
    for (int i = 0; i < helpers; i++) ids[i] = pool.helpers[i + 1].id;
    pthread_mutex_unlock(&caller);
    return helpers;
}

// Makes threads sleep for up to so many nanoseconds, as if they had lost their time slice: for tests.
void pearl_delay(int64_t nanoseconds) {
    atomic_store(&pool.delay, nanoseconds);
}
