/* Noticing that another process has taken a thread's core.
 *
 * Where a thread is put aside amid a chunk, all others wait for it: with a neighbor on
 * one of two cores, two threads are then slower than one. Whoever has waited compares
 * how long that took with the processor time that those it waited for have had. If they
 * did not run, the caller computes alone for a while, and longer if it happens again.
 */
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <pthread.h>
#include <time.h>
#endif

namespace inl {

using Clock = std::chrono::steady_clock;

/* Processor time of a thread, which others may read. */
class CpuTime {
  public:
    /* Called by the thread itself. */
    void adopt() {
#if defined(__linux__)
        clockid_t clock;
        if (pthread_getcpuclockid(pthread_self(), &clock) == 0) {
            clock_.store(clock, std::memory_order_relaxed);
            known_.store(true, std::memory_order_release);
        }
#endif
    }
    /* Nanoseconds; -1 where it cannot be told. */
    int64_t read() const {
#if defined(__linux__)
        timespec time;
        if (known_.load(std::memory_order_acquire) &&
            clock_gettime(clock_.load(std::memory_order_relaxed), &time) == 0)
            return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
#endif
        return -1;
    }

  private:
    std::atomic<int> clock_{0};
    std::atomic<bool> known_{false};
};

/* For how long the caller computes alone; changed under the pool's lock. */
class Solitude {
  public:
    /* Somebody has waited in vain. */
    void extend(Clock::time_point now) {
        if (now < until_) return;
        const bool again = now - until_ < 10 * length_;
        length_ = again ? length_ * 2 : FIRST;
        if (length_ > LONGEST) length_ = LONGEST;
        until_ = now + length_;
    }
    bool over(Clock::time_point now) const { return now >= until_; }

  private:
    static constexpr std::chrono::milliseconds FIRST{20}, LONGEST{640};
    std::chrono::milliseconds length_ = FIRST;
    Clock::time_point until_{};
};

} // namespace inl
