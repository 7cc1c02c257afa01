#include "runtime/pool.h"

#include "runtime/checks.h"
#include "runtime/platform.h"
#include "runtime/ticket.h"

namespace inl {
namespace {

/* Microseconds of spinning: longer than the gaps between tasks, too short to disturb
 * other processes. */
constexpr int SPIN_INSIDE = 30;
constexpr int SPIN_BETWEEN = 100;
/* Nanoseconds; shorter waits do not indicate preemption. */
constexpr int64_t LONG_WAIT = 50000;

} // namespace

Pool::Pool(int threads, const Operation *operations)
    : threads_(threads), operations_(operations), process_(process_id()),
      members_(threads) {
    for (int index = 1; index < threads; index++)
        others_.emplace_back([this, index] { run_thread(members_[index]); });
}

Pool::~Pool() {
    stopping_ = true;
    {
        std::lock_guard<std::mutex> lock(sleep_);
    }
    woken_.notify_all();
    for (auto &other : others_) other.join();
    for (auto &member : members_) release(member.worker.own);
    release(shared_);
}

bool Pool::forked() const { return process_id() != process_; }

int64_t Pool::run(const inl_instruction *program, int64_t count, std::string &refusal) {
    std::lock_guard<std::mutex> lock(running_);
    int64_t bad = 0;
    if (!check(program, count, bad, refusal)) return bad;
    plan(program, count);
    if (tasks_.empty()) return 0;
    execute();
    return 0;
}

bool Pool::check(const inl_instruction *program, int64_t count, int64_t &bad,
                 std::string &refusal) {
    if (count < 0 || count > int64_t(EPOCHS) / 4) {
        refusal = "count: accepts 0 to 4194304 instructions";
        bad = 1;
        return false;
    }
    for (int64_t index = 0; index < count; index++) {
        if (!is_refused(program[index], refusal)) continue;
        bad = index + 1;
        return false;
    }
    return true;
}

void Pool::plan(const inl_instruction *program, int64_t count) {
    tasks_.clear();
    Scratch most;
    for (int64_t index = 0; index < count; index++) {
        const inl_instruction &instruction = program[index];
        const Operation &operation = operations_[instruction.opcode];
        add(instruction, operation.first);
        add(instruction, operation.second);
        add(instruction, operation.third);
        if (operation.scratch == nullptr) continue;
        const Scratch needed = operation.scratch(instruction);
        if (needed.shared > most.shared) most.shared = needed.shared;
        if (needed.own > most.own) most.own = needed.own;
    }
    reserve(most);
}

void Pool::add(const inl_instruction &instruction, const Phase &phase) {
    if (phase.chunks == nullptr) return;
    const int64_t chunks = phase.chunks(instruction);
    if (chunks > 0) tasks_.push_back({&instruction, phase.body, chunks});
}

void Pool::reserve(Scratch needed) {
    grow(shared_, shared_bytes_, needed.shared);
    for (auto &member : members_) {
        grow(member.worker.own, member.own_bytes, needed.own);
        member.worker.shared = shared_;
        member.used = false;
    }
}

void Pool::execute() {
    members_[0].time.adopt();
    forked_ = forked();
    if (alone_.load() && !forked_) {
        std::lock_guard<std::mutex> lock(sleep_);
        if (backoff_.has_expired(Clock::now())) alone_ = false;
        woken_.notify_all();
    }
    first_epoch_ = (epoch_of(ticket_.load()) + 1) % EPOCHS;
    const uint32_t end = (first_epoch_ + uint32_t(tasks_.size())) % EPOCHS;
    publish(ticket_of(first_epoch_, tasks_[0].chunks));
    compute_until(members_[0], end);
}

void Pool::compute_until(Member &member, uint32_t end) {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (epoch_of(seen) != end) {
        if (next_of(seen) < chunks_of(seen)) {
            claim(member, seen);
            seen = ticket_.load(std::memory_order_acquire);
        } else {
            seen = wait(seen);
        }
    }
}

void Pool::run_thread(Member &member) {
    member.time.adopt();
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (alone_.load(std::memory_order_relaxed)) {
            sleep_in_backoff();
        } else if (next_of(seen) < chunks_of(seen)) {
            claim(member, seen);
        } else {
            seen = wait(seen);
            continue;
        }
        seen = ticket_.load(std::memory_order_acquire);
    }
}

bool Pool::claim(Member &member, uint64_t ticket) {
    if (!ticket_.compare_exchange_strong(ticket, ticket + 1)) return false;
    member.preemption.reset();
    member.busy.store(true, std::memory_order_relaxed);
    compute(member, ticket);
    return true;
}

void Pool::compute(Member &member, uint64_t ticket) {
    /* Tasks may be read only after the claim: until the chunk is done, the program
     * cannot end. */
    const uint32_t epoch = epoch_of(ticket);
    const Task &task = tasks_[(epoch - first_epoch_) % EPOCHS];
    const int64_t chunks = task.chunks;
    member.worker.fresh = !member.used || member.last_epoch != epoch;
    member.used = true;
    member.last_epoch = epoch;
    task.body(*task.instruction, next_of(ticket), member.worker);
    member.busy.store(false, std::memory_order_relaxed);
    const int64_t lost = member.preemption.stop(member.time);
    if (lost >= LONG_WAIT) report_lost_time(lost);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) advance(epoch);
}

void Pool::advance(uint32_t epoch) {
    done_.store(0, std::memory_order_relaxed);
    const size_t next = (epoch + 1 - first_epoch_) % EPOCHS;
    publish(ticket_of(epoch + 1, next < tasks_.size() ? tasks_[next].chunks : 0));
}

void Pool::publish(uint64_t ticket) {
    ticket_.store(ticket);
    /* A single chunk wakes no thread: the publisher claims it. */
    if (chunks_of(ticket) == 1 || sleepers_.load() == 0 || forked_) return;
    {
        std::lock_guard<std::mutex> lock(sleep_);
    }
    woken_.notify_all();
}

uint64_t Pool::wait(uint64_t seen) {
    uint64_t now = seen;
    const bool inside = chunks_of(seen) > 0;
    if (spin(seen, now, inside ? SPIN_INSIDE : SPIN_BETWEEN)) return now;
    if (inside) start_timers();
    return sleep(seen);
}

bool Pool::spin(uint64_t seen, uint64_t &now, int microseconds) const {
    const auto deadline = Clock::now() + std::chrono::microseconds(microseconds);
    do {
        for (int turn = 0; turn < 16; turn++) {
            now = ticket_.load(std::memory_order_acquire);
            if (now != seen || stopping_.load(std::memory_order_relaxed)) return true;
            pause();
        }
    } while (Clock::now() < deadline);
    return false;
}

uint64_t Pool::sleep(uint64_t seen) {
    uint64_t now = seen;
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    woken_.wait(lock, [&] { return (now = ticket_.load()) != seen || stopping_; });
    sleepers_.fetch_sub(1);
    return now;
}

void Pool::sleep_in_backoff() {
    std::unique_lock<std::mutex> lock(sleep_);
    /* This thread may have published a task of one chunk, for which it woke no thread,
     * and now does not claim it. */
    woken_.notify_all();
    woken_.wait(lock, [&] { return !alone_ || stopping_; });
}

void Pool::start_timers() {
    for (Member &member : members_)
        if (member.busy.load(std::memory_order_relaxed))
            member.preemption.start(member.time);
}

void Pool::report_lost_time(int64_t lost) {
    std::lock_guard<std::mutex> lock(sleep_);
    if (backoff_.add_lost_time(std::chrono::nanoseconds(lost), Clock::now()))
        alone_ = true;
}

} // namespace inl
