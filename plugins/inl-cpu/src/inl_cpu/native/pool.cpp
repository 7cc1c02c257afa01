#include "pool.h"

#include <cstdlib>
#include <new>

#if defined(_WIN32)
#include <malloc.h>
#else
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inl {
namespace {

/* A ticket: epoch of the task in the upper 24 bits, then chunks, then the next one.
 * Epochs come round again; a ticket that was read a whole round ago and still compares
 * equal names work that is there to be taken, so taking it is right. */
constexpr int FIELD = 20;
constexpr uint32_t EPOCHS = 1u << 24;

uint64_t ticket_of(uint32_t epoch, int64_t chunks) {
    return uint64_t(epoch % EPOCHS) << (2 * FIELD) | uint64_t(chunks) << FIELD;
}

uint32_t epoch_of(uint64_t ticket) { return uint32_t(ticket >> (2 * FIELD)); }

int64_t chunks_of(uint64_t ticket) { return (ticket >> FIELD) & MOST_CHUNKS; }

int64_t next_of(uint64_t ticket) { return ticket & MOST_CHUNKS; }

/* Microseconds: longer than gaps between tasks, shorter than what a neighbor feels. */
constexpr int SPIN_INSIDE = 30;
constexpr int SPIN_BETWEEN = 100;
/* Nanoseconds; below, a wait is no sign of anything. */
constexpr int64_t LONG_WAIT = 50000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

long this_process() {
#if defined(_WIN32)
    return 0;
#else
    return getpid();
#endif
}

char *allocate(int64_t bytes) {
#if defined(_WIN32)
    void *memory = _aligned_malloc(bytes, 64);
#else
    void *memory = std::aligned_alloc(64, aligned(bytes));
#endif
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<char *>(memory);
}

void release(char *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}

void grow(char *&memory, int64_t &bytes, int64_t needed) {
    if (needed <= bytes) return;
    char *larger = allocate(needed);
    release(memory);
    memory = larger;
    bytes = needed;
}

} // namespace

Pool::Pool(int threads, const Operation *operations)
    : threads_(threads), operations_(operations), process_(this_process()),
      members_(threads) {
    for (int index = 1; index < threads; index++)
        others_.emplace_back([this, index] { serve(members_[index]); });
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

bool Pool::forked() const { return this_process() != process_; }

int64_t Pool::run(const inl_instruction *program, int64_t count) {
    std::lock_guard<std::mutex> lock(running_);
    int64_t bad = 0;
    if (!check(program, count, bad)) return bad;
    plan(program, count);
    if (tasks_.empty()) return 0;
    begin();
    return 0;
}

bool Pool::check(const inl_instruction *program, int64_t count, int64_t &bad) {
    if (count < 0 || count > int64_t(EPOCHS) / 4) {
        refusal_ = "count: accepted are 0 to 4194304 instructions";
        bad = 1;
        return false;
    }
    for (int64_t index = 0; index < count; index++) {
        const char *why = inl::refusal(program[index]);
        if (why == nullptr) continue;
        refusal_ = why;
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

void Pool::begin() {
    members_[0].time.adopt();
    forked_ = forked();
    if (alone_.load() && !forked_) {
        std::lock_guard<std::mutex> lock(sleep_);
        if (solitude_.over(Clock::now())) alone_ = false;
        woken_.notify_all();
    }
    first_epoch_ = (epoch_of(ticket_.load()) + 1) % EPOCHS;
    const uint32_t end = (first_epoch_ + uint32_t(tasks_.size())) % EPOCHS;
    publish(ticket_of(first_epoch_, tasks_[0].chunks));
    help(members_[0], end);
}

void Pool::help(Member &member, uint32_t end) {
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

void Pool::serve(Member &member) {
    member.time.adopt();
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (alone_.load(std::memory_order_relaxed)) {
            sleep_alone();
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
    member.watch.forget();
    member.busy.store(true, std::memory_order_relaxed);
    compute(member, ticket);
    return true;
}

void Pool::compute(Member &member, uint64_t ticket) {
    /* Only now may the tasks be read: the run cannot end while this chunk is out. */
    const uint32_t epoch = epoch_of(ticket);
    const Task &task = tasks_[(epoch - first_epoch_) % EPOCHS];
    const int64_t chunks = task.chunks;
    member.worker.fresh = !member.used || member.last_epoch != epoch;
    member.used = true;
    member.last_epoch = epoch;
    task.body(*task.instruction, next_of(ticket), member.worker);
    member.busy.store(false, std::memory_order_relaxed);
    const int64_t lost = member.watch.end(member.time);
    if (lost >= LONG_WAIT) judge(lost);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) advance(epoch);
}

void Pool::advance(uint32_t epoch) {
    done_.store(0, std::memory_order_relaxed);
    const size_t next = (epoch + 1 - first_epoch_) % EPOCHS;
    publish(ticket_of(epoch + 1, next < tasks_.size() ? tasks_[next].chunks : 0));
}

void Pool::publish(uint64_t ticket) {
    ticket_.store(ticket);
    /* Nobody need wake for one chunk: whoever published it takes it. */
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
    if (inside) watch_others();
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

void Pool::sleep_alone() {
    std::unique_lock<std::mutex> lock(sleep_);
    /* This thread may have published a task of one chunk, woken nobody for it, and now
     * does not take it. */
    woken_.notify_all();
    woken_.wait(lock, [&] { return !alone_ || stopping_; });
}

void Pool::watch_others() {
    for (Member &member : members_)
        if (member.busy.load(std::memory_order_relaxed)) member.watch.begin(member.time);
}

void Pool::judge(int64_t lost) {
    std::lock_guard<std::mutex> lock(sleep_);
    if (solitude_.lose(std::chrono::nanoseconds(lost), Clock::now())) alone_ = true;
}

} // namespace inl
