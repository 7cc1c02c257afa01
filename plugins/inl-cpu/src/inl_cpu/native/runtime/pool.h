/* Thread pool that runs a list of tasks in order.
 *
 * A 64-bit ticket holds the current task, its number of chunks and the next chunk. The
 * thread that finishes the last chunk of a task advances the ticket to the next task.
 * So no thread waits for one that was preempted before it claimed a chunk, and no
 * thread coordinates the others.
 */
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/contention.h"
#include "runtime/operation.h"

namespace inl {

struct Task {
    const inl_instruction *instruction;
    Body body;
    int64_t chunks;
};

class Pool {
  public:
    Pool(int threads, const Operation *operations);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    /* Run a program; returns 0, or the number of the first invalid instruction, and
     * then sets refusal. */
    int64_t run(const inl_instruction *program, int64_t count, std::string &refusal);

    int threads() const { return threads_; }

    /* Whether this is a forked child of the process that started the threads. */
    bool forked() const;

  private:
    struct alignas(64) Member {
        Worker worker{};
        int64_t own_bytes = 0;
        uint32_t last_epoch = 0;
        bool used = false;
        std::atomic<bool> busy{false}; /* computing a chunk */
        CpuTime time;
        PreemptionTimer preemption;
    };

    bool check(const inl_instruction *program, int64_t count, int64_t &bad,
               std::string &refusal);
    void plan(const inl_instruction *program, int64_t count);
    void add(const inl_instruction &instruction, const Phase &phase);
    void reserve(Scratch needed);
    void execute();
    void compute_until(Member &member, uint32_t end);
    void run_thread(Member &member);
    bool claim(Member &member, uint64_t ticket);
    void compute(Member &member, uint64_t ticket);
    void advance(uint32_t epoch);
    void publish(uint64_t ticket);
    uint64_t wait(uint64_t seen);
    bool spin(uint64_t seen, uint64_t &now, int microseconds) const;
    uint64_t sleep(uint64_t seen);
    void sleep_in_backoff();
    void start_timers();
    void report_lost_time(int64_t lost);

    const int threads_;
    const Operation *const operations_;
    const long process_;
    std::vector<Task> tasks_;
    std::vector<Member> members_;
    std::vector<std::thread> others_;
    char *shared_ = nullptr;
    int64_t shared_bytes_ = 0;
    std::mutex running_;
    uint32_t first_epoch_ = 1;
    std::atomic<bool> forked_{false}; /* as last computed by run */
    SingleThreadBackoff backoff_;
    std::atomic<bool> alone_{false}; /* whether only the caller computes */

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_;
    std::condition_variable woken_;
};

} // namespace inl
