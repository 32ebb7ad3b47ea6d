// Our own threads. A product is cut into pieces, which threads take from a shared counter, so a thread that has lost its
// time slice takes none, and the caller goes on as soon as all pieces are done: it never waits for a thread that took no
// piece. Which thread computes a piece changes no bit of it.
//
// Helpers spin for a moment after their last piece, because the next one usually comes within microseconds. Where
// another process wants their core they sleep at once: spinning would use up the time slice that the next piece needs.
#define _GNU_SOURCE
#include "native.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NANOSECONDS 1000000000
#define PATIENCE 1000000  // nanoseconds that a helper spins after its last piece
#define ENDING 50000      // nanoseconds that the caller spins for the last pieces of others
#define LOST 300000       // nanoseconds: a longer gap between two looks at the clock is a lost time slice
#define BUSY 100000000    // nanoseconds for which a lost time slice makes the machine a busy one

static struct {
    // Number of the region in the upper half, pieces that nobody has taken in the lower half: one word, so a helper that
    // is late cannot take a piece of a later region for one of its own.
    _Alignas(64) _Atomic uint64_t left;
    _Alignas(64) _Atomic uint32_t region;  // futex of helpers that sleep
    _Atomic int32_t asleep;
    _Alignas(64) _Atomic uint32_t done;    // pieces; futex of the caller
    _Atomic int32_t is_awaited;
    _Alignas(64) _Atomic int32_t threads;  // of this region, the caller among them; futex of helpers that take no part
    Piece compute;
    const void *work;
    int64_t pieces;
    _Alignas(64) _Atomic int64_t busy_until;
    int32_t ids[MOST_THREADS];             // native ids of helpers, from 1 on
    _Atomic int32_t started;
    void (*delay)(int thread);             // called before each piece of a helper, for tests
} pool;
static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * NANOSECONDS + time.tv_nsec;
}

INLINE void pause_briefly(void) {
    for (int i = 0; i < 4; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("" ::: "memory");
#endif
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

// Spins until the word has (or, if `is_change`, no longer has) the value; returns whether that came in time.
static int comes(_Atomic uint32_t *word, uint32_t value, int is_change, int64_t patience) {
    int64_t before = now();
    const int64_t began = before;
    if (before < atomic_load(&pool.busy_until)) patience = 0;
    while ((atomic_load(word) == value) == is_change) {
        pause_briefly();
        const int64_t time = now();
        if (time - before > LOST) {
            atomic_store(&pool.busy_until, time + BUSY);
            return 0;
        }
        if (time - began >= patience) return 0;
        before = time;
    }
    return 1;
}

// The next piece for a thread; -1: there is none.
static int64_t take(int thread) {
    uint64_t left = atomic_load(&pool.left);
    while ((uint32_t)left && thread < atomic_load(&pool.threads))
        if (atomic_compare_exchange_weak(&pool.left, &left, left - 1)) return pool.pieces - (uint32_t)left;
    return -1;
}

static void *help(void *number) {
    const int thread = (int)(intptr_t)number;
    pool.ids[thread] = (int32_t)syscall(SYS_gettid);
    atomic_fetch_add(&pool.started, 1);
    for (;;) {
        const uint32_t region = atomic_load(&pool.region);
        const int32_t threads = atomic_load(&pool.threads);
        if (thread >= threads) {
            sleep_while((_Atomic uint32_t *)&pool.threads, threads);
            continue;
        }
        for (int64_t piece; (piece = take(thread)) >= 0;) {
            if (pool.delay) pool.delay(thread);
            pool.compute(pool.work, piece, thread);
            atomic_fetch_add(&pool.done, 1);
            if (atomic_load(&pool.is_awaited)) wake(&pool.done);
        }
        if (comes(&pool.region, region, 1, PATIENCE)) continue;
        atomic_fetch_add(&pool.asleep, 1);
        sleep_while(&pool.region, region);
        atomic_fetch_sub(&pool.asleep, 1);
    }
    return 0;
}

static void finish(uint32_t pieces) {
    const int64_t began = now();
    if (comes(&pool.done, pieces, 0, ENDING)) return;
    atomic_store(&pool.is_awaited, 1);
    for (uint32_t done; (done = atomic_load(&pool.done)) != pieces;) sleep_while(&pool.done, done);
    atomic_store(&pool.is_awaited, 0);
    const int64_t ended = now();
    if (ended - began > LOST) atomic_store(&pool.busy_until, ended + BUSY);
}

// Starts the helpers that are missing. Where there are no more threads to be had, there are fewer.
static void start(int threads) {
    int started = atomic_load(&pool.started) + 1;
    for (; started < threads; started++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)started)) break;
        pthread_detach(thread);
        while (atomic_load(&pool.started) < started) pause_briefly();
    }
}

void in_pieces(Piece compute, const void *work, int64_t pieces, int threads) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (threads <= 1 || pieces <= 1 || pthread_mutex_trylock(&caller)) {  // another caller has the helpers
        for (int64_t piece = 0; piece < pieces; piece++) compute(work, piece, 0);
        return;
    }
    if (atomic_load(&pool.started) + 1 < threads) start(threads);
    pool.compute = compute, pool.work = work, pool.pieces = pieces;
    const int32_t before = atomic_exchange(&pool.threads, threads);
    atomic_store(&pool.done, 0);
    const uint32_t region = atomic_load(&pool.region) + 1;
    atomic_store(&pool.left, (uint64_t)region << 32 | (uint32_t)pieces);
    atomic_store(&pool.region, region);
    if (before < threads) wake((_Atomic uint32_t *)&pool.threads);
    if (atomic_load(&pool.asleep)) wake(&pool.region);
    uint32_t own = 0;
    for (int64_t piece; (piece = take(0)) >= 0; own++) compute(work, piece, 0);
    if (atomic_fetch_add(&pool.done, own) + own != pieces) finish((uint32_t)pieces);
    pthread_mutex_unlock(&caller);
}

// Starts helpers for so many threads, the caller among them, and writes their native ids; returns how many there are.
int pearl_helpers(int threads, int32_t *ids) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    pthread_mutex_lock(&caller);
    start(threads);
    const int started = atomic_load(&pool.started), helpers = started < threads - 1 ? started : threads - 1;
    memcpy(ids, pool.ids + 1, helpers * sizeof *ids);
    pthread_mutex_unlock(&caller);
    return helpers;
}

void pearl_delay(void (*delay)(int thread)) {
    pool.delay = delay;
}
