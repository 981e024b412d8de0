// Work for all threads. Threads that sleep between calls (OMP_WAIT_POLICY=PASSIVE, which a shared
// machine needs) take 25 microseconds to wake up, as long as reading a megabyte. So tasks are taken
// dynamically: other threads do the share of one that wakes late, and the calling thread spins
// until all tasks are done.
#if defined(__x86_64__)
static inline void pause() { __builtin_ia32_pause(); }
#else
static inline void pause() {}
#endif

// Calls work(i) for every i below n, in any order; alone if `together` is false.
template <class Work>
static inline void for_each(int64_t n, bool together, const Work& work) {
    if (!together) {
        for (int64_t i = 0; i < n; i++) work(i);
        return;
    }
    int64_t left = n;
#pragma omp parallel
    {
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < n; i++) {
            work(i);
            __atomic_sub_fetch(&left, 1, __ATOMIC_RELEASE);
        }
        // Not forever: the system may have preempted the other threads.
        if (omp_get_thread_num() == 0)
            for (int i = 0; i < 10000 && __atomic_load_n(&left, __ATOMIC_ACQUIRE); i++) pause();
    }
}
