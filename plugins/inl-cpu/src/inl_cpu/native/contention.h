/* Noticing that another process has taken a thread's core.
 *
 * Where a thread is put aside amid a chunk, all others wait for it: with a neighbor on
 * one of two cores, two threads are then slower than one. So a thread that others wait
 * for compares how long they did with the processor time that it has had meanwhile.
 * Where much is lost that way, the caller computes alone for a while, and longer if it
 * happens again.
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

/* What a thread that holds a chunk is told by one that goes to sleep over it, so that it
 * can tell itself how long it was put aside: the sleeper learns it late, for to wake
 * takes time too. */
class Watch {
  public:
    /* By a waiting thread; a watch that is there already is older and stays. */
    void begin(const CpuTime &time) {
        if (since_.load(std::memory_order_relaxed) != 0) return;
        before_.store(time.read(), std::memory_order_relaxed);
        since_.store(nanoseconds(), std::memory_order_release);
    }
    void forget() { since_.store(0, std::memory_order_relaxed); }

    /* By the watched thread: nanoseconds in which it was waited for and did not run. */
    int64_t end(const CpuTime &time) {
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

/* Whether the caller computes alone; changed under the pool's lock. One thread of two
 * loses half the time, so waiting in vain is no reason until it takes as much: lost time
 * adds up and is forgotten at a fifth of the clock's pace. */
class Solitude {
  public:
    /* Somebody has waited in vain for so long; true where the caller had better be
     * alone from now on. */
    bool lose(std::chrono::nanoseconds lost, Clock::time_point now) {
        if (now < until_) return false;
        debt_ -= (now - last_) / 5;
        if (debt_ < debt_.zero()) debt_ = debt_.zero();
        debt_ += lost;
        last_ = now;
        if (debt_ < ENOUGH) return false;
        const bool again = now - until_ < 4 * length_;
        length_ = again ? length_ * 2 : FIRST;
        if (length_ > LONGEST) length_ = LONGEST;
        until_ = last_ = now + length_;
        debt_ = debt_.zero();
        return true;
    }
    bool over(Clock::time_point now) const { return now >= until_; }

  private:
    static constexpr std::chrono::milliseconds FIRST{40}, LONGEST{1280}, ENOUGH{8};
    std::chrono::nanoseconds length_ = FIRST, debt_{0};
    Clock::time_point until_{}, last_{};
};

} // namespace inl
