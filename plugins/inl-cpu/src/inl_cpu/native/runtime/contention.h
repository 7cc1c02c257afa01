/* Detection of preemption by other processes.
 *
 * If a thread is preempted in the middle of a chunk, all others wait for it: with
 * another process on one of two cores, two threads are slower than one. A thread that
 * others wait for therefore compares the waiting time with the processor time that it
 * received in the meantime. If much time is lost, the caller computes alone for a
 * while, and longer each time that it happens again.
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

/* Processor time of a thread, readable by other threads. */
class CpuTime {
  public:
    /* Bind to the calling thread. */
    void adopt() {
#if defined(__linux__)
        clockid_t clock;
        if (pthread_getcpuclockid(pthread_self(), &clock) == 0) {
            clock_.store(clock, std::memory_order_relaxed);
            known_.store(true, std::memory_order_release);
        }
#endif
    }
    /* Nanoseconds; -1 if unknown. */
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

/* Measures how long a thread was preempted while others waited for its chunk. A waiting
 * thread starts the timer before it sleeps; the owner of the chunk stops it, because
 * the sleeper learns late that the chunk is done: waking takes time too. */
class PreemptionTimer {
  public:
    /* Called by a waiting thread; a timer that is running keeps its start. */
    void start(const CpuTime &time) {
        if (since_.load(std::memory_order_relaxed) != 0) return;
        before_.store(time.read(), std::memory_order_relaxed);
        since_.store(nanoseconds(), std::memory_order_release);
    }
    void reset() { since_.store(0, std::memory_order_relaxed); }

    /* Called by the measured thread: nanoseconds in which others waited for it and it
     * did not run. */
    int64_t stop(const CpuTime &time) {
        const int64_t since = since_.exchange(0, std::memory_order_acquire);
        const int64_t before = before_.load(std::memory_order_relaxed);
        if (since == 0 || before < 0) return 0;
        return nanoseconds() - since - (time.read() - before);
    }

  private:
    static int64_t nanoseconds() {
        return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
    }

    std::atomic<int64_t> since_{0}, before_{0};
};

/* Backoff to single-threaded execution; used under the pool's lock. One of two threads
 * loses half of the time when it computes alone, so backing off pays only if preemption
 * costs as much: lost time accumulates and decays at a fifth of the clock's rate. */
class SingleThreadBackoff {
  public:
    /* Record lost time; returns whether to back off from now on. */
    bool add_lost_time(std::chrono::nanoseconds lost, Clock::time_point now) {
        if (now < until_) return false;
        lost_ -= (now - last_) / 5;
        if (lost_ < lost_.zero()) lost_ = lost_.zero();
        lost_ += lost;
        last_ = now;
        if (lost_ < THRESHOLD) return false;
        const bool again = now - until_ < 4 * length_;
        length_ = again ? length_ * 2 : SHORTEST;
        if (length_ > LONGEST) length_ = LONGEST;
        until_ = last_ = now + length_;
        lost_ = lost_.zero();
        return true;
    }
    bool has_expired(Clock::time_point now) const { return now >= until_; }

  private:
    static constexpr std::chrono::milliseconds SHORTEST{40}, LONGEST{1280},
        THRESHOLD{8};
    std::chrono::nanoseconds length_ = SHORTEST, lost_{0};
    Clock::time_point until_{}, last_{};
};

} // namespace inl
