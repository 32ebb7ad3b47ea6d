// Computes regions of many sizes with threads that are late at random, and frees what they read at once.
//
// Ends with status 0 if each result was written once and is right; with 1, or by a signal, if not.
#define _GNU_SOURCE
#include "native.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define REGIONS 1500
#define MOST_PIECES 40
#define WIDTH 512

void pearl_delay(int64_t nanoseconds);

typedef struct {
    int64_t inputs[MOST_PIECES][WIDTH];
    int64_t *sums;  // changed in place, like a hidden state
    _Atomic int32_t *writes;
} Work;

static void add_up(const void *given, int64_t piece, int thread) {
    const Work *work = given;
    int64_t sum = 0;
    for (int i = 0; i < WIDTH; i++) {
        if (i == WIDTH / 2 && thread) usleep((unsigned)(piece * 37 % 400));
        sum += work->inputs[piece][i];
    }
    if (!keep(thread)) return;
    work->sums[piece] += sum;
    if (atomic_fetch_add(&work->writes[piece], 1)) _Exit(1);
}

static int is_right(int64_t region, int64_t pieces, int threads) {
    static int64_t sums[MOST_PIECES];
    static _Atomic int32_t writes[MOST_PIECES];
    Work *work = mmap(0, sizeof *work, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (work == MAP_FAILED) return 0;
    work->sums = sums, work->writes = writes;
    for (int64_t piece = 0; piece < pieces; piece++) {
        for (int i = 0; i < WIDTH; i++) work->inputs[piece][i] = region + piece + i;
        sums[piece] = piece;
        atomic_store(&writes[piece], 0);
    }
    in_pieces(add_up, work, pieces, threads);
    // No later region gets this address, where a late thread would read something else unnoticed.
    mmap(work, sizeof *work, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    for (int64_t piece = 0; piece < pieces; piece++)
        if (sums[piece] != piece + WIDTH * (region + piece) + WIDTH * (WIDTH - 1) / 2) return 0;
    return 1;
}

int main(void) {
    pearl_delay(400000);
    for (int64_t region = 0; region < REGIONS; region++)
        if (!is_right(region, 2 + region * 7 % (MOST_PIECES - 1), 2 + region / 50 % 3)) return 1;
    return 0;
}
