// The engine of one rank: drives its calls, in the thread that waits for one or else in a thread of its own.
//
// Whoever holds `drive_` drives. A caller that waits takes it when it is free, so that a synchronous call runs in the
// caller's thread. The engine's own thread sleeps on a timer that a started call sets: by the time it goes off, a
// synchronous caller is driving its call. Waiting means: spin for a moment, then sleep until a peer rings.
//
// Where no core is free for the engine's own thread, it takes turns with the computation at the kernel's whim, and a
// peer waits for every turn. There a caller that asks whether its call is done drives it for as long as peers are with
// it: ranks that compute the same ask at the same time.

#include <chrono>
#include <mutex>
#include <thread>

#include <poll.h>
#include <sched.h>
#include <sys/timerfd.h>

#include "channels.h"

namespace weft {

constexpr int64_t kGraceNs = 150 * 1000;  // for a caller to wait for what it started
constexpr int64_t kCallerSpinNs = 200 * 1000;
constexpr int64_t kHoldNs = 30 * 1000;
constexpr int64_t kPatienceNs = 300 * 1000;       // of a caller that asks for the first time, or while peers move
constexpr int64_t kGlanceNs = 5 * 1000;           // of one that asks again
constexpr int64_t kThreadSpinNs = 3 * 1000;       // it competes with the computation
constexpr int64_t kLookNs = 5 * 1000 * 1000;      // between two looks at whether the peers are alive
constexpr int64_t kMoveNs = 1000 * 1000;          // between two moves to another core
constexpr int64_t kFreshNs = 1000 * 1000 * 1000;  // a heartbeat older than this is not one
constexpr int64_t kGapNs = 1000 * 1000 * 1000;    // between two looks: this rank was frozen, and its peers maybe too

class Engine {
  public:
    Engine(const Segment& segment, int rank, const int* pidfds, int64_t timeout_ns, bool may_spin, bool may_overlap)
        : segment_(segment), me_(segment.rank(rank)), rank_(rank), timeout_ns_(timeout_ns), may_spin_(may_spin),
          may_overlap_(may_overlap),
          collectives_(segment, rank, &Engine::ring, this), channels_(segment, rank, &Engine::ring, this) {
        me_.asleep_for.store(kAwake);
        me_.blocked_on.store(kAwake);
        for (int peer = 0; peer < segment.size; peer++) lives_.push_back({pidfds[peer], POLLIN, 0});
        timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
        thread_ = std::thread([this] { run(); });
    }

    ~Engine() { shut(); }

    // Ends all calls. When it returns, nobody touches the segment or the descriptors any more; a call that comes later
    // ends at once. Other threads may be inside all the while.
    void shut() {
        {
            std::lock_guard<std::mutex> guard(inbox_lock_);  // a call is in the inbox by now, or will find it shut
            if (stop_.exchange(true)) return;
        }
        set_timer(1);
        wake(me_);
        thread_.join();
        {
            std::lock_guard<std::mutex> guard(drive_);  // a caller that drives lets go when it sees stop_
            abandon(Reason::closed, rank_);
        }
        while (callers_.load() + visitors_.load() > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(kHoldNs));
        close(timer_);
        me_.left.store(1);
        ring_everybody();
    }

    void start(Call* call) {
        const Visit visit(visitors_);
        if (queue(call) && !timer_set_.exchange(true)) set_timer(kGraceNs);
    }

    // The caller drives: the engine's own thread need not know.
    void run(Call& call) {
        const Visit visit(callers_);
        if (queue(&call)) await(call);
    }

    void wait(Call& call) {
        if (call.done.load(std::memory_order_acquire)) return;
        const Visit visit(callers_);
        await(call);
    }

    bool is_done(Call& call) {
        if (call.done.load(std::memory_order_acquire)) return true;
        if (may_overlap_) return false;
        const Visit visit(visitors_);
        if (stop_.load() || !drive_.try_lock()) return false;
        drive_while_moving(call);
        drive_.unlock();
        if (num_open_.load() > 0) set_timer(kGraceNs);
        return call.done.load(std::memory_order_acquire) != 0;
    }

  private:
    // A caller inside. It counts itself, then looks at stop_; `shut` sets stop_, then looks at the count. So either it
    // sees that the engine is shut, and leaves the segment alone, or `shut` waits for it.
    struct Visit {
        explicit Visit(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
        ~Visit() { count_.fetch_sub(1); }
        Visit(const Visit&) = delete;
        std::atomic<int>& count_;
    };

    // Whether the call is in the inbox; otherwise it has ended, as the engine is shut.
    bool queue(Call* call) {
        call->queued = now_ns();
        {
            std::lock_guard<std::mutex> guard(inbox_lock_);
            if (stop_.load()) return refuse(call);
            inbox_.push_back(call);
            num_open_.fetch_add(1);
        }
        // Somebody else may drive, and sleep for a peer. It says that it sleeps, then counts the calls; here it is the
        // other way round, so one of the two sees the other.
        if (me_.asleep_for.load() != kAwake) wake(me_);
        return true;
    }

    bool refuse(Call* call) {
        call->reason = Reason::closed;
        call->culprit = rank_;
        call->begun = call->ended = call->queued;
        call->done.store(1);
        return false;
    }

    void await(Call& call) {
        const int64_t begin = now_ns();
        while (!call.done.load(std::memory_order_acquire)) {
            if (!stop_.load() && drive_.try_lock()) {
                drive(&call);
                drive_.unlock();
                if (num_open_.load() > 0) set_timer(1);
                continue;
            }
            sleepers_.fetch_add(1);
            futex_wait(call.done, 0, kLookNs);
            sleepers_.fetch_sub(1);
        }
        call.waited.fetch_add(now_ns() - begin);
    }

    // --- the engine's own thread

    void run() {
        uint64_t expirations;
        while (!stop_.load()) {
            if (read(timer_, &expirations, sizeof expirations) < 0 || stop_.load()) continue;
            timer_set_.store(false);
            // Again for a call that came in the last moment: its caller found that somebody drives, and sleeps.
            while (num_open_.load() > 0 && !stop_.load() && drive_.try_lock()) {
                drive(nullptr);
                drive_.unlock();
            }
        }
    }

    void set_timer(int64_t ns) {
        const itimerspec when{{0, 0}, {time_t(ns / 1000000000), long(ns % 1000000000)}};
        timerfd_settime(timer_, 0, &when, nullptr);
    }

    // --- driving

    bool ended(Call* wanted) const {
        if (stop_.load(std::memory_order_relaxed)) return true;
        if (wanted) return wanted->done.load(std::memory_order_acquire) != 0;
        return num_open_.load(std::memory_order_relaxed) == 0;
    }

    void drive(Call* wanted) {
        while (!ended(wanted)) {
            const int waits_for = progress();
            if (waits_for == kAwake) continue;
            const uint64_t before = news(waits_for);
            // A step that came before the counters were read would not be news: look once more.
            if (progress() == waits_for) wait_for(waits_for, before, wanted);
        }
        me_.blocked_on.store(kAwake, std::memory_order_relaxed);
    }

    void drive_while_moving(Call& wanted) {
        int64_t patience = wanted.asked ? kGlanceNs : kPatienceNs;
        wanted.asked = true;
        while (!ended(&wanted)) {
            const int waits_for = progress();
            if (waits_for == kAwake) continue;
            const uint64_t before = news(waits_for);
            if (progress() != waits_for) continue;
            for (const int64_t end = now_ns() + patience; news(waits_for) == before && !has_inbox();) {
                if (now_ns() > end) return;
                may_spin_ ? pause_core() : void(sched_yield());
            }
            patience = kPatienceNs;
        }
    }

    // Advances everything. kAwake when something moved, otherwise for whom all wait.
    int progress() {
        bool moved = adopt();
        if (look_at_failure()) return kAwake;
        int waits_for = kAwake;
        while (!queue_.empty()) {
            Call& call = *queue_.front();
            if (call.begun == 0) {
                call.begun = now_ns();
                collectives_.begin(call);
            }
            waits_for = collectives_.advance(call, moved);
            if (waits_for != kAwake) break;
            if (call.reason == Reason::mismatch) {  // the next call would begin at the round of this one
                fail(Reason::mismatch, call.culprit);
                return kAwake;
            }
            queue_.pop_front();
            finish(&call);
            moved = true;
        }
        const int channel = channels_.advance(moved, [this](Call* call) { finish(call); });
        if (channel != kAwake) waits_for = waits_for == kAwake ? channel : kAnyPeer;
        if (moved) blocked_since_ = 0;
        return moved ? kAwake : waits_for;
    }

    bool adopt() {
        if (num_adopted_ == num_open_.load(std::memory_order_acquire)) return false;
        std::lock_guard<std::mutex> guard(inbox_lock_);
        for (Call* call : inbox_) {
            num_adopted_++;
            if (call->kind == Kind::send || call->kind == Kind::recv) {
                call->begun = now_ns();
                channels_.add(call);
            } else {
                queue_.push_back(call);
            }
        }
        const bool any = !inbox_.empty();
        inbox_.clear();
        return any;
    }

    void finish(Call* call) {
        call->ended = now_ns();
        num_adopted_--;
        num_open_.fetch_sub(1);
        call->done.store(1);
        if (sleepers_.load() > 0) futex_wake(call->done);  // by address: its owner may have freed the call by now
    }

    // --- waiting

    void wait_for(int peer, uint64_t before, Call* wanted) {
        if (!spin(peer, before, wanted)) sleep_for(peer, before);
        if (may_spin_) step_aside(peer);
    }

    // First without giving the core away, as others may want it for long; unless the peer is waiting for this very core.
    bool spin(int peer, uint64_t before, Call* wanted) {
        const bool for_caller = wanted || callers_.load(std::memory_order_relaxed) > 0;
        if (!may_spin_) return for_caller && yield_until(peer, before);
        const int64_t begin = now_ns(), end = begin + (for_caller ? kCallerSpinNs : kThreadSpinNs);
        const int64_t yield_from = is_on_core(peer, sched_getcpu()) ? begin : begin + kHoldNs;
        for (;;) {
            for (int i = 0; i < 32; i++) {
                if (news(peer) != before || has_inbox()) return true;
                pause_core();
            }
            const int64_t now = now_ns();
            if (now > end) return false;
            if (now > yield_from) sched_yield();
        }
    }

    // With more ranks than cores the way to a peer's step is to let it run.
    bool yield_until(int peer, uint64_t before) {
        for (const int64_t end = now_ns() + kCallerSpinNs; now_ns() < end; sched_yield())
            if (news(peer) != before || has_inbox()) return true;
        return false;
    }

    bool is_on_core(int waits_for, int core) const {
        for (int peer = 0; peer < segment_.size; peer++) {
            if (peer == rank_ || (waits_for != kAnyPeer && waits_for != peer)) continue;
            const RankState& state = segment_.rank(peer);
            if (state.core.load(std::memory_order_relaxed) == core &&
                state.asleep_for.load(std::memory_order_relaxed) == kAwake)
                return true;
        }
        return false;
    }

    // The kernel likes to wake a thread on the core of the one that woke it. Two ranks that take turns on one core look
    // to it like a single busy thread, and it never parts them; so a rank that finds a peer's step taken on its own core
    // moves away.
    void step_aside(int waits_for) {
        const int core = sched_getcpu();
        const int64_t now = now_ns();
        if (now - last_move_ < kMoveNs || !is_on_core(waits_for, core)) return;
        last_move_ = now;
        cpu_set_t allowed, others;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
        others = allowed;
        CPU_CLR(core, &others);
        if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
    }

    // Changes when a peer takes a step.
    uint64_t news(int peer) const {
        if (peer != kAnyPeer) return news_of(peer);
        uint64_t sum = segment_.header().finished.value.load(std::memory_order_acquire);
        for (int other = 0; other < segment_.size; other++) sum += other == rank_ ? 0 : news_of(other);
        return sum;
    }

    uint64_t news_of(int peer) const {
        const RankState& state = segment_.rank(peer);
        uint64_t sum = state.posted.value.load(std::memory_order_acquire) + state.taken.value.load(std::memory_order_acquire);
        if (!channels_.idle())
            sum += segment_.channel(peer, rank_).sent.value.load(std::memory_order_acquire) +
                   segment_.channel(rank_, peer).received.value.load(std::memory_order_acquire);
        return sum;
    }

    bool has_inbox() const { return num_adopted_ != num_open_.load(std::memory_order_relaxed); }

    void sleep_for(int peer, uint64_t before) {
        const int64_t begin = now_ns();
        if (blocked_since_ == 0) blocked_since_ = last_awake_ = begin;
        me_.heartbeat.store(begin, std::memory_order_relaxed);
        me_.blocked_on.store(peer, std::memory_order_relaxed);
        const uint32_t bell = me_.doorbell.load();
        me_.asleep_for.store(has_inbox() ? kAwake : peer);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (news(peer) == before && !has_inbox() && !stop_.load() && failure() == 0) {
            futex_wait(me_.doorbell, bell, kLookNs);
        }
        me_.asleep_for.store(kAwake, std::memory_order_relaxed);
        pass_over_gap();
        if (now_ns() - last_look_ >= kLookNs) look_at_peers(peer);
    }

    // A rank that did not run cannot tell how long its peers were silent: a whole job may have been stopped.
    void pass_over_gap() {
        const int64_t now = now_ns(), gap = now - last_awake_;
        if (gap > kGapNs) blocked_since_ += gap;
        last_awake_ = now;
    }

    // Called after each step of this rank: wakes those who sleep for it.
    static void ring(void* self, int rank) {
        Engine& engine = *static_cast<Engine*>(self);
        engine.me_.core.store(sched_getcpu(), std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (int peer = 0; peer < engine.segment_.size; peer++) {
            RankState& state = engine.segment_.rank(peer);
            const int32_t asleep_for = state.asleep_for.load(std::memory_order_relaxed);
            if (peer != rank && (asleep_for == rank || asleep_for == kAnyPeer)) engine.wake(state);
        }
    }

    void wake(RankState& state) {
        state.doorbell.fetch_add(1);
        futex_wake(state.doorbell);
    }

    void ring_everybody() {
        for (int peer = 0; peer < segment_.size; peer++) wake(segment_.rank(peer));
    }

    // --- failure

    uint64_t failure() const { return segment_.header().failure.value.load(std::memory_order_acquire); }

    bool look_at_failure() {
        const uint64_t seen = failure();
        if (seen == 0) return false;
        abandon(Reason(seen >> 32), int32_t(seen));
        return true;
    }

    void look_at_peers(int waits_for) {
        last_look_ = now_ns();
        poll(lives_.data(), nfds_t(lives_.size()), 0);
        for (int peer = 0; peer < segment_.size; peer++) {
            const bool left = segment_.rank(peer).left.load() != 0, died = lives_[size_t(peer)].revents != 0;
            if (peer == rank_ || !(left || died) || !is_waited_for(peer)) continue;
            return fail(left ? Reason::left : Reason::died, peer);
        }
        if (channels_.waits_for_any()) look_for_any();
        if (now_ns() - blocked_since_ > timeout_ns_) fail(Reason::silent, find_silent(waits_for));
    }

    // A recv from any rank fails with the first that died, or when all have left.
    void look_for_any() {
        int num_left = 0, last = rank_;
        for (int peer = 0; peer < segment_.size; peer++) {
            if (peer == rank_) continue;
            const bool left = segment_.rank(peer).left.load() != 0;
            if (!left && lives_[size_t(peer)].revents != 0) return fail(Reason::died, peer);
            num_left += left;
            if (left) last = peer;
        }
        if (num_left > 0 && num_left == segment_.size - 1) fail(Reason::left, last);
    }

    // Looks at the counters again: the last steps of a peer may have come just before its end.
    bool is_waited_for(int peer) const {
        return channels_.waits_for(peer) || (!queue_.empty() && collectives_.waits_for(*queue_.front(), peer));
    }

    // A peer that waits for another is not the silent one: follow the chain.
    int find_silent(int waits_for) const {
        int peer = waits_for == kAnyPeer ? first_awake() : waits_for;
        for (int hop = 0; hop < segment_.size; hop++) {
            const RankState& state = segment_.rank(peer);
            const int next = state.blocked_on.load();
            if (next < 0 || next == rank_ || next == peer || now_ns() - state.heartbeat.load() > kFreshNs) break;
            peer = next;
        }
        return peer;
    }

    int first_awake() const {
        for (int peer = 0; peer < segment_.size; peer++) {
            const RankState& state = segment_.rank(peer);
            const bool waits = state.blocked_on.load() != kAwake && now_ns() - state.heartbeat.load() <= kFreshNs;
            if (peer != rank_ && !waits) return peer;
        }
        return rank_ == 0 ? 1 % segment_.size : 0;
    }

    // The first failure is the one that all ranks report.
    void fail(Reason reason, int peer) {
        uint64_t none = 0;
        segment_.header().failure.value.compare_exchange_strong(none, uint64_t(reason) << 32 | uint32_t(peer));
        ring_everybody();
    }

    void abandon(Reason reason, int32_t culprit) {
        auto end = [&](Call* call) {
            if (call->reason == Reason::none) {
                call->reason = reason;
                call->culprit = culprit;
            }
            finish(call);
        };
        adopt();
        for (; !queue_.empty(); queue_.pop_front()) end(queue_.front());
        channels_.abandon(end);
    }

    Segment segment_;
    RankState& me_;
    int rank_;
    int64_t timeout_ns_;
    bool may_spin_, may_overlap_;
    Collectives collectives_;
    Channels channels_;
    std::vector<pollfd> lives_;

    std::mutex inbox_lock_;
    std::vector<Call*> inbox_;
    std::atomic<int64_t> num_open_{0};
    std::atomic<int> callers_{0}, visitors_{0}, sleepers_{0};  // those who wait, who only ask or start, who sleep
    std::atomic<bool> stop_{false}, timer_set_{false};
    std::mutex drive_;
    // Belongs to whoever drives:
    std::deque<Call*> queue_;
    int64_t num_adopted_ = 0;
    int64_t blocked_since_ = 0, last_awake_ = 0, last_look_ = 0, last_move_ = 0;

    int timer_;
    std::thread thread_;
};

}  // namespace weft

using weft::Call;
using weft::Engine;

// What native.py packs; pointers as whole numbers.
struct Order {
    int32_t kind, type, op, root;
    int64_t tag, input, output, count, width, num_numbers;
};

// The numbers are the neighbours of a neighbour_all_reduce, or else the lengths of parts.
static Call make_call(const Order* packed, const int64_t* numbers, const double* weights) {
    Order order;
    std::memcpy(&order, packed, sizeof order);  // it need not be aligned
    const auto kind = weft::Kind(order.kind);
    std::vector<int32_t> neighbours;
    std::vector<int64_t> lengths;
    std::vector<double> factors;
    if (numbers && kind == weft::Kind::neighbour_all_reduce) neighbours.assign(numbers, numbers + order.num_numbers);
    else if (numbers) lengths.assign(numbers, numbers + order.num_numbers);
    if (weights) factors.assign(weights, weights + order.num_numbers + 1);
    return {kind, weft::Type(order.type), weft::Reduction(order.op), order.root,
            order.tag, reinterpret_cast<const char*>(order.input), reinterpret_cast<char*>(order.output),
            order.count, order.width, std::move(neighbours), std::move(factors), std::move(lengths)};
}

// The reason why it failed, 0 for none, and in the upper half the rank that is the cause.
static int64_t outcome_of(const Call& call) { return int64_t(call.reason) | int64_t(call.culprit) << 32; }

extern "C" {

int64_t weft_segment_bytes(int size, int64_t arena_bytes) { return weft::Segment{nullptr, size, arena_bytes}.bytes(); }

int64_t weft_arena_offset(int size, int64_t arena_bytes, int rank) {
    const weft::Segment segment{nullptr, size, arena_bytes};
    return segment.arenas_at() + rank * arena_bytes;
}

Engine* weft_open(void* base, int size, int64_t arena_bytes, int rank, const int* pidfds, int64_t timeout_ns,
                  int may_spin, int may_overlap) {
    const weft::Segment segment{static_cast<char*>(base), size, arena_bytes};
    return new Engine(segment, rank, pidfds, timeout_ns, may_spin != 0, may_overlap != 0);
}

// The engine stays for those who still ask, until it is freed.
void weft_close(Engine* engine) { engine->shut(); }

void weft_free(Engine* engine) { delete engine; }

Call* weft_start(Engine* engine, const Order* packed, const int64_t* numbers, const double* weights) {
    Call* call = new Call(make_call(packed, numbers, weights));
    engine->start(call);
    return call;
}

int64_t weft_run(Engine* engine, const Order* packed, const int64_t* numbers, const double* weights) {
    Call call(make_call(packed, numbers, weights));
    engine->run(call);
    return outcome_of(call);
}

int64_t weft_wait(Engine* engine, Call* call) {
    engine->wait(*call);
    return outcome_of(*call);
}

int weft_is_done(Engine* engine, Call* call) { return engine->is_done(*call); }

void weft_times(const Call* call, int64_t* times) {
    times[0] = call->queued;
    times[1] = call->begun;
    times[2] = call->ended;
    times[3] = call->waited.load();
}

// Of a recv: the rank that it came from.
int weft_source(const Call* call) { return call->root; }

void weft_forget(Call* call) { delete call; }

}  // extern "C"
