#pragma once
#include <atomic>

#include "call.h"

namespace mnemos {

// work(context, unit, worker) for every unit, by up to `threads` workers at once; `worker` < threads.
void parallel(i64 threads, i64 units, void (*work)(void*, i64, i64), void* context);

// work(context, worker, workers) by `workers` <= threads at the same time, so that they may wait for each other.
void together(i64 threads, void (*work)(void*, i64, i64), void* context);

// Where all workers wait for the last of them. In turn with others on a processor, waiting must not keep them from it.
struct Barrier {
    std::atomic<i64> arrived{0}, passed{0};
    void wait(i64 workers);
};

}  // namespace mnemos
