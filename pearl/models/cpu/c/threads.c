// Our own threads. Work is cut into pieces, which threads take from a shared counter, and which give the same bits
// whoever computes them. The caller goes on as soon as all pieces are done: it does not wait for a helper that took none.
//
// Where another process wants a helper's core, the helper can still lose its time slice in the middle of a piece, and the
// caller has to wait for milliseconds, in which it could have computed a hundred pieces. Or the helper wakes too late, and
// what it computes is lost to the caller's own share of time. Such a helper rests: it takes no pieces for a while, twice as
// long each time that it is late again. So the caller is about as fast as alone, however busy the other cores are.
#define _GNU_SOURCE
#include "native.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Nanoseconds.
#define SECOND 1000000000
#define PATIENCE 1000000      // a helper spins after its last piece: the next one usually comes sooner
#define ENDING 50000          // the caller spins for the last pieces of helpers
#define LATE 500000           // so late, in waking or with a piece, is a helper only if others use its core
#define SHORTEST_REST 20000000
#define LONGEST_REST 1000000000
#define REMEMBERED 256        // regions, whose beginnings are known
#define PIECES_LATE 4         // pieces whose time a helper may take for one: its core may be a slower one

typedef struct {
    _Alignas(64) _Atomic int32_t is_computing;
    _Atomic int64_t rests_until, rest;  // rest: its length
    int32_t id;                         // native
} Helper;

static struct {
    // Number of the region in the upper half, pieces that nobody has taken in the lower one. In one word, so that a late
    // helper cannot take a piece of the next region for one of the last.
    _Alignas(64) _Atomic uint64_t left;
    _Alignas(64) _Atomic uint32_t region;   // futex of helpers that sleep
    _Atomic int32_t asleep;
    _Alignas(64) _Atomic uint32_t done;     // pieces; futex of the caller
    _Atomic int32_t is_awaited;
    _Alignas(64) _Atomic uint32_t threads;  // of this region, the caller among them; futex of helpers without a part
    Piece compute;
    const void *work;
    int64_t pieces;
    _Atomic int64_t began[REMEMBERED];      // by region
    Helper helpers[MOST_THREADS];           // from 1 on
    _Atomic int32_t started;
    _Atomic int64_t delay;                  // before each piece of a helper, for tests
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

static void let_rest(Helper *helper) {
    const int64_t time = now(), last = atomic_load(&helper->rest);
    const int is_again = time - atomic_load(&helper->rests_until) < LONGEST_REST;
    int64_t rest = is_again ? 2 * last : SHORTEST_REST;
    rest = rest < LONGEST_REST ? rest : LONGEST_REST;
    atomic_store(&helper->rest, rest);
    atomic_store(&helper->rests_until, time + rest);
}

static void take_part(int thread) {
    Helper *own = &pool.helpers[thread];
    for (int64_t rest; (rest = atomic_load(&own->rests_until) - now()) > 0;) sleep_for(rest);
    atomic_store(&own->is_computing, 1);
    for (int64_t piece; (piece = take(thread)) >= 0;) {
        const int64_t delay = atomic_load(&pool.delay);
        if (delay) sleep_for(delay);
        pool.compute(pool.work, piece, thread);
        atomic_fetch_add(&pool.done, 1);
        if (atomic_load(&pool.is_awaited)) wake(&pool.done);
    }
    atomic_store(&own->is_computing, 0);
}

// Sleeps until the region after this one begins.
static void sleep_until_next(uint32_t region, Helper *own) {
    atomic_fetch_add(&pool.asleep, 1);
    sleep_while(&pool.region, region);
    atomic_fetch_sub(&pool.asleep, 1);
    const uint32_t missed = atomic_load(&pool.region) - region;
    if (missed >= REMEMBERED || (missed && now() - atomic_load(&pool.began[(region + 1) % REMEMBERED]) > LATE)) let_rest(own);
}

static void *help(void *number) {
    const int thread = (int)(intptr_t)number;
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
        sleep_until_next(region, &pool.helpers[thread]);
    }
    return 0;
}

// Waits until all pieces are done, sleeping unless that is soon. `usual`: nanoseconds that some pieces take.
static void finish(uint32_t pieces, int threads, int64_t usual) {
    if (ends(&pool.done, pieces, 0, ENDING)) return;
    const int64_t began = now();
    atomic_store(&pool.is_awaited, 1);
    for (uint32_t done; (done = atomic_load(&pool.done)) != pieces;) {
        const struct timespec most = {0, LATE + usual % (SECOND / 2)};
        syscall(SYS_futex, &pool.done, FUTEX_WAIT_PRIVATE, done, &most, 0, 0);
        if (now() - began > LATE + usual) break;
    }
    for (int thread = 1; thread < threads && atomic_load(&pool.done) != pieces; thread++)
        if (atomic_load(&pool.helpers[thread].is_computing)) let_rest(&pool.helpers[thread]);
    for (uint32_t done; (done = atomic_load(&pool.done)) != pieces;) sleep_while(&pool.done, done);
    atomic_store(&pool.is_awaited, 0);
}

// Starts the helpers that are missing. Where no more threads are to be had, there are fewer.
static void start(int threads) {
    for (int number = atomic_load(&pool.started) + 1; number < threads; number++) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help, (void *)(intptr_t)number)) break;
        pthread_detach(thread);
        while (atomic_load(&pool.started) < number) sched_yield();
    }
}

void in_pieces(Piece compute, const void *work, int64_t pieces, int threads) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (threads <= 1 || pieces <= 1 || pthread_mutex_trylock(&caller)) {  // last: another caller has the helpers
        for (int64_t piece = 0; piece < pieces; piece++) compute(work, piece, 0);
        return;
    }
    start(threads);
    pool.compute = compute, pool.work = work, pool.pieces = pieces;
    const int is_more = atomic_exchange(&pool.threads, threads) < (uint32_t)threads;
    atomic_store(&pool.done, 0);
    const uint32_t region = atomic_load(&pool.region) + 1;
    atomic_store(&pool.left, (uint64_t)region << 32 | (uint32_t)pieces);
    const int64_t began = now();
    atomic_store(&pool.began[region % REMEMBERED], began);
    atomic_store(&pool.region, region);
    if (is_more) wake(&pool.threads);
    if (atomic_load(&pool.asleep)) wake(&pool.region);
    uint32_t own = 0;
    for (int64_t piece; (piece = take(0)) >= 0; own++) compute(work, piece, 0);
    if (atomic_fetch_add(&pool.done, own) + own != pieces)
        finish((uint32_t)pieces, threads, PIECES_LATE * (now() - began) / (own ? own : 1));
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

// Makes helpers sleep for so many nanoseconds before each piece, as if they had lost their time slice: for tests.
void pearl_delay(int64_t nanoseconds) {
    atomic_store(&pool.delay, nanoseconds);
}
