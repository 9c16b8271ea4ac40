// Threads of the kernels: those of the OpenMP that PyTorch brings, or, without one, threads of their own for a call.
#include "threads.h"

#include <dlfcn.h>

#include <thread>
#include <vector>

#include "simd/flush.h"

namespace mnemos {
namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// A function of the OpenMP that this process has, or null. OWN_THREADS: always null, for the thread sanitizer, which does
// not see how OpenMP's threads wait for each other.
void* symbol([[maybe_unused]] const char* name) {
#ifdef OWN_THREADS
    return nullptr;
#else
    return dlsym(RTLD_DEFAULT, name);
#endif
}

struct Team {
    std::atomic<i64> worker{0}, unit{0};
    i64 units;
    void (*work)(void*, i64, i64);
    void* context;

    static void join(void* self) {
        Flush flush;
        Team& team = *(Team*)self;
        i64 me = team.worker++;
        for (i64 i; (i = team.unit++) < team.units;) team.work(team.context, i, me);
    }
};

// work(.., worker, workers), by as many as there turn out to be.
struct Crew {
    void (*work)(void*, i64, i64);
    void* context;
    int (*worker)();
    int (*workers)();

    static void join(void* self) {
        Crew& crew = *(Crew*)self;
        join(crew.work, crew.context, crew.worker(), crew.workers());
    }
    static void join(void (*work)(void*, i64, i64), void* context, i64 worker, i64 workers) {
        Flush flush;
        work(context, worker, workers);
    }
};

}  // namespace

void together(i64 threads, void (*work)(void*, i64, i64), void* context) {
    if (threads <= 1) return Crew::join(work, context, 0, 1);
    static const auto openmp = (Parallel)symbol("GOMP_parallel");
    static const auto worker = (int (*)())symbol("omp_get_thread_num");
    static const auto workers = (int (*)())symbol("omp_get_num_threads");
    if (openmp && worker && workers) {
        Crew crew{work, context, worker, workers};
        return openmp(Crew::join, &crew, (unsigned)threads, 0);
    }
    std::vector<std::thread> others;
    auto join = [=](i64 worker) { Crew::join(work, context, worker, threads); };
    for (i64 i = 1; i < threads; i++) others.emplace_back(join, i);
    join(0);
    for (auto& other : others) other.join();
}

void Barrier::wait(i64 workers) {
    constexpr i64 PATIENCE = 1 << 12;
    if (workers == 1) return;
    i64 before = passed.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == workers - 1) {
        arrived.store(0, std::memory_order_relaxed);
        passed.store(before + 1, std::memory_order_release);
        return;
    }
    for (i64 i = 0; passed.load(std::memory_order_acquire) == before; i++)
        if (i >= PATIENCE) std::this_thread::yield();
}

void parallel(i64 threads, i64 units, void (*work)(void*, i64, i64), void* context) {
    Team team;
    team.units = units, team.work = work, team.context = context;
    if (threads > units) threads = units;
    if (threads <= 1) return Team::join(&team);
    // The OpenMP that PyTorch brings has threads waiting. Linking one of our own would give the process a second pool.
    static const auto openmp = (Parallel)symbol("GOMP_parallel");
    if (openmp) return openmp(Team::join, &team, (unsigned)threads, 0);
    std::vector<std::thread> others;
    for (i64 i = 1; i < threads; i++) others.emplace_back(Team::join, &team);
    Team::join(&team);
    for (auto& other : others) other.join();
}

}  // namespace mnemos
