// Threads of torch's own OpenMP runtime, entered through its C interface, so that no second one is ever loaded.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
Parallel gomp_parallel = nullptr;

// Calls work() on up to `threads` threads. They share out what is to do among them, so that any number of them finishes all.
template <class Work>
void run_on_threads(Work& work, int64_t threads) {
    auto entry = [](void* data) { (*static_cast<Work*>(data))(); };
    if (threads <= 1 || !gomp_parallel) entry(&work);
    else gomp_parallel(entry, &work, (unsigned)threads, 0);
}

// One piece of work cut into parts that threads take by turns.
struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};

    // Runs run(part, following) for parts of this thread until none is left. The following part is claimed early: what it reads can be
    // prefetched meanwhile; it may lie past the last.
    template <class Run>
    void take_parts(int64_t parts, Run&& run) {
        int64_t taken = 0;
        for (int64_t part = next++; part < parts; ++taken) {
            const int64_t following = next++;
            run(part, following);
            part = following;
        }
        if (taken) done.fetch_add(taken, std::memory_order_release);
    }

    // Returns when every part is done, whoever did it. A thread that comes late, or not at all, is not waited for: on a machine
    // with other work that would cost a slice of the scheduler's time.
    void wait(int64_t parts) const {
        for (int64_t spins = 0; done.load(std::memory_order_acquire) < parts; ++spins) {
            if (spins >= 4096) std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
            else __builtin_ia32_pause();
#elif defined(__aarch64__)
            else asm volatile("yield");
#endif
        }
    }
};

// One phase alone, on up to `threads` threads.
template <class Run>
void run_parts(int64_t parts, int64_t threads, Run run) {
    Phase phase;
    auto work = [&] { phase.take_parts(parts, run); };
    run_on_threads(work, std::min(threads, parts));
}

}  // namespace
