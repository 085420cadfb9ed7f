// Collectives as rounds. In round t every rank posts data in its staging buffer t % 2 and takes what it needs from others.
//
//   rank 0   post 0 | post 1 | take 0 | post 2 | take 1 | post 3 | take 2 | ...
//   rank 1       post 0 | post 1 | take 0 | post 2 | take 1 | ...
//
// Round t may be posted when every peer has taken round t - 2, and taken when those needed have posted it. Nothing here
// blocks: a call advances as far as it can and says for whom it waits.
#pragma once

#include <algorithm>
#include <vector>

#include "reduce.h"
#include "segment.h"

namespace weft {

enum class Kind : int32_t {
    send, recv, all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce,
    neighbour_all_reduce, barrier
};
enum class Reason : int32_t { none, died, silent, left, mismatch, closed };

// flat: each rank reduces all it gets.  sliced: rank r reduces slice r of a chunk, then all gather the slices.
// direct: all tensors lie in arenas; whoever is free reduces the next piece of all of them in place.
enum class Mode : int32_t { flat, announce, sliced, direct };

struct Call {
    Kind kind;
    Type type;
    Reduction op;
    int32_t root;  // or the peer of a send or recv
    int64_t tag;
    const char* input;
    char* output;
    int64_t count;  // elements of one part
    int64_t width;  // bytes of an element
    std::vector<int32_t> neighbours;
    std::vector<double> weights;

    Mode mode = Mode::flat;
    int64_t chunk = 1;  // elements of one part in one round
    uint64_t first = 0, rounds = 0, posted = 0, taken = 0;  // rounds of this call; `first` is counted over all calls
    uint64_t pieces_end = 0;
    int64_t moved = 0;  // bytes of a send or recv

    bool asked = false;  // whether it is done, by its owner

    std::atomic<uint32_t> done{0};
    Reason reason = Reason::none;
    int32_t culprit = -1;
    int64_t queued = 0, begun = 0, ended = 0;  // ns
    std::atomic<int64_t> waited{0};            // ns that callers were held up
};

constexpr int64_t kSmallBytes = 16 << 10;  // up to here one round in which everybody reduces everything is fastest
constexpr int64_t kPieceBytes = 256 << 10;

class Collectives {
  public:
    Collectives(const Segment& segment, int rank, void (*ring)(void*, int), void* ringer)
        : segment_(segment), me_(segment.rank(rank)), rank_(rank), size_(segment.size), ring_(ring), ringer_(ringer) {}

    void begin(Call& call) {
        call.first = round_;
        const int64_t bytes = call.count * call.width;
        if (call.kind == Kind::all_reduce && size_ > 1 && bytes > kSmallBytes) {
            call.mode = Mode::announce;
            call.rounds = 1;
            return;
        }
        call.chunk = fit(call, is_parted(call.kind) ? size_ : 1);
        call.rounds = count_chunks(call);
    }

    // kAwake: done. Otherwise the rank (or kAnyPeer) that it waits for. Sets `moved` when anything was done.
    int advance(Call& call, bool& moved) {
        for (;;) {
            int blocked = advance_rounds(call, moved);
            if (blocked != kAwake || call.reason != Reason::none) return blocked;
            if (call.mode == Mode::announce) {
                choose(call);
                continue;
            }
            if (call.mode == Mode::direct) {
                blocked = advance_pieces(call, moved);
                if (blocked != kAwake) return blocked;
            }
            return kAwake;
        }
    }

    // Whether the step that this call needs next is one of this peer.
    bool waits_for(const Call& call, int peer) const {
        if (call.taken == call.rounds) return segment_.header().finished.value.load() < call.pieces_end;
        const bool to_post = call.posted < call.rounds && call.posted <= call.taken + 1 && first_not_taken(call) == peer;
        return to_post || (call.taken < call.posted && first_not_posted(call) == peer);
    }

  private:
    // --- rounds

    int advance_rounds(Call& call, bool& moved) {
        while (call.taken < call.rounds) {
            int waits_for = kAwake;
            if (call.posted < call.rounds && call.posted <= call.taken + 1 && may_run_ahead(call)) {
                waits_for = first_not_taken(call);
                if (waits_for == kAwake) {
                    post(call);
                    moved = true;
                    continue;
                }
            }
            if (call.taken < call.posted) {
                const int poster = first_not_posted(call);
                if (poster == kAwake) {
                    if (!check_notices(call)) return kAwake;
                    take(call, call.taken);
                    call.taken++;
                    announce_step(me_.taken, call.first + call.taken);
                    moved = true;
                    continue;
                }
                waits_for = waits_for == kAwake || waits_for == poster ? poster : kAnyPeer;
            }
            return waits_for;
        }
        round_ = call.first + call.rounds;
        return kAwake;
    }

    // The gather of the only chunk's slices cannot be posted before its own slice is reduced.
    static bool may_run_ahead(const Call& call) {
        return call.posted == call.taken || call.mode != Mode::sliced || call.rounds > 3;
    }

    int first_not_taken(const Call& call) const {
        const uint64_t round = call.first + call.posted;
        if (round < kStages || !produces(call)) return kAwake;
        return first_behind(round - kStages + 1, [](RankState& peer) -> Counter& { return peer.taken; });
    }

    int first_not_posted(const Call& call) const {
        const uint64_t enough = call.first + call.taken + 1;
        if (call.kind == Kind::broadcast)
            return rank_ == call.root || has_posted(call.root, enough) ? kAwake : call.root;
        if (call.kind == Kind::reduce && rank_ != call.root) return kAwake;
        if (call.kind == Kind::neighbour_all_reduce) {
            for (int32_t peer : call.neighbours)
                if (peer != rank_ && !has_posted(peer, enough)) return peer;
            return kAwake;
        }
        return first_behind(enough, [](RankState& peer) -> Counter& { return peer.posted; });
    }

    bool has_posted(int peer, uint64_t enough) const {
        return segment_.rank(peer).posted.value.load(std::memory_order_acquire) >= enough;
    }

    template <class Which> int first_behind(uint64_t enough, Which which) const {
        for (int i = 1; i < size_; i++) {
            const int peer = rank_ + i < size_ ? rank_ + i : rank_ + i - size_;
            if (which(segment_.rank(peer)).value.load(std::memory_order_acquire) < enough) return peer;
        }
        return kAwake;
    }

    void announce_step(Counter& counter, uint64_t value) {
        counter.value.store(value, std::memory_order_release);
        ring_(ringer_, rank_);
    }

    void post(Call& call) {
        const uint64_t round = call.first + call.posted;
        if (produces(call)) {
            me_.notices[round % kStages] = {signature(call), place_of(call)};
            put(call, call.posted, segment_.stage(rank_, round));
        }
        call.posted++;
        announce_step(me_.posted, round + 1);
    }

    // --- what is the same on all ranks

    static uint64_t signature(const Call& call) {
        const uint64_t what = uint64_t(call.kind) | uint64_t(call.type) << 8 | uint64_t(call.op) << 16 |
                              uint64_t(uint32_t(call.root)) << 24;
        return what ^ uint64_t(call.count) * 0x9e3779b97f4a7c15u;
    }

    bool check_notices(Call& call) {
        const uint64_t round = call.first + call.taken, mine = signature(call);
        auto differs = [&](int peer) {
            if (peer == rank_ || segment_.rank(peer).notices[round % kStages].signature == mine) return false;
            call.reason = Reason::mismatch;
            call.culprit = peer;
            return true;
        };
        switch (call.kind) {
            case Kind::broadcast: return !differs(call.root);
            case Kind::neighbour_all_reduce: return std::none_of(call.neighbours.begin(), call.neighbours.end(), differs);
            case Kind::reduce:
                if (rank_ != call.root) return true;
                [[fallthrough]];
            default:
                for (int peer = 0; peer < size_; peer++)
                    if (differs(peer)) return false;
                return true;
        }
    }

    bool produces(const Call& call) const {
        switch (call.kind) {
            case Kind::broadcast: return rank_ == call.root;
            case Kind::reduce: return rank_ != call.root;
            default: return true;
        }
    }

    static bool is_parted(Kind kind) { return kind == Kind::reduce_scatter || kind == Kind::all_to_all; }

    static int64_t fit(const Call& call, int parts) {
        return std::max<int64_t>(kStageBytes / parts / call.width / 64 * 64, 1);
    }

    static uint64_t count_chunks(const Call& call) {
        return uint64_t(std::max<int64_t>((call.count + call.chunk - 1) / call.chunk, 1));
    }

    // --- all-reduce of large tensors

    int64_t place_of(const Call& call) const {
        const char* arena = segment_.arena(rank_);
        return call.output >= arena && call.output < arena + segment_.arena_bytes ? call.output - arena : -1;
    }

    void read_places(const Call& call) {
        places_.resize(size_);
        for (int peer = 0; peer < size_; peer++) places_[peer] = segment_.rank(peer).notices[call.first % kStages].place;
    }

    void choose(Call& call) {
        call.first = round_;
        call.posted = call.taken = 0;
        if (std::all_of(places_.begin(), places_.end(), [](int64_t place) { return place >= 0; })) {
            call.mode = Mode::direct;
            call.rounds = 0;
            call.chunk = kPieceBytes / call.width;
            pieces_ += count_chunks(call);
            call.pieces_end = pieces_;
            return;
        }
        call.mode = Mode::sliced;
        call.chunk = fit(call, 1);
        call.rounds = 2 * count_chunks(call);
    }

    int advance_pieces(Call& call, bool& moved) {
        std::atomic<uint64_t>&claimed = segment_.header().claimed.value, &finished = segment_.header().finished.value;
        const uint64_t first = call.pieces_end - count_chunks(call);
        uint64_t next = claimed.load(std::memory_order_relaxed);
        while (next < call.pieces_end) {
            if (!claimed.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) continue;
            reduce_piece(call, int64_t(next - first) * call.chunk);
            moved = true;
            if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == call.pieces_end) ring_(ringer_, rank_);
            next = claimed.load(std::memory_order_relaxed);
        }
        return finished.load(std::memory_order_acquire) >= call.pieces_end ? kAwake : kAnyPeer;
    }

    void reduce_piece(const Call& call, int64_t begin) {
        tensors_.resize(size_);
        for (int peer = 0; peer < size_; peer++)
            tensors_[peer] = segment_.arena(peer) + places_[peer] + begin * call.width;
        reduce(call.type, call.op, tensors_.data(), size_, tensors_.data(), size_,
               std::min(call.chunk, call.count - begin));
    }

    // Rounds of a sliced all-reduce of n chunks: R0 R1 G0 R2 G1 ... R(n-1) G(n-2) G(n-1); R reduces, G gathers.
    struct Turn {
        bool gathers;
        int64_t chunk;
    };

    static Turn turn(const Call& call, uint64_t round) {
        if (round == 0) return {false, 0};
        if (round + 1 == call.rounds) return {true, int64_t(call.rounds / 2) - 1};
        return round % 2 ? Turn{false, int64_t(round + 1) / 2} : Turn{true, int64_t(round) / 2 - 1};
    }

    struct Range {
        int64_t begin, count;
    };

    Range slice(int64_t count, int rank) const {
        const int64_t each = round_up((count + size_ - 1) / size_, 64), begin = std::min(count, each * rank);
        return {begin, std::min(each, count - begin)};
    }

    // --- data in and out of the staging buffers

    Range chunk_of(const Call& call, int64_t index) const {
        const int64_t begin = index * call.chunk;
        return {begin, std::max<int64_t>(std::min(call.chunk, call.count - begin), 0)};
    }

    static void copy(char* target, const char* source, int64_t bytes) {
        if (target != source && bytes > 0) copy_bytes(target, source, bytes);
    }

    void put(const Call& call, uint64_t round, char* stage) const {
        const int64_t w = call.width;
        if (call.mode == Mode::announce || call.kind == Kind::barrier) return;
        if (call.mode == Mode::sliced) return put_slices(call, turn(call, round), stage);
        const Range part = chunk_of(call, int64_t(round));
        if (!is_parted(call.kind)) return copy(stage, call.input + part.begin * w, part.count * w);
        for (int peer = 0; peer < size_; peer++)
            if (peer != rank_)
                copy(stage + peer * call.chunk * w, call.input + (peer * call.count + part.begin) * w, part.count * w);
    }

    void put_slices(const Call& call, Turn turn, char* stage) const {
        const Range chunk = chunk_of(call, turn.chunk);
        const char* tensor = call.output + chunk.begin * call.width;
        for (int peer = 0; peer < size_; peer++) {
            if (turn.gathers != (peer == rank_)) continue;
            const Range s = slice(chunk.count, peer);
            copy(stage + s.begin * call.width, tensor + s.begin * call.width, s.count * call.width);
        }
    }

    void take(const Call& call, uint64_t round) {
        if (call.kind == Kind::barrier) return;
        if (call.mode == Mode::announce) return read_places(call);
        if (call.mode == Mode::sliced) return take_slices(call, turn(call, round), call.first + round);
        const Range part = chunk_of(call, int64_t(round));
        const int64_t w = call.width, bytes = part.count * w;
        const uint64_t at = call.first + round;
        const char* own = call.input + part.begin * w;
        char* out = call.output + part.begin * w;
        switch (call.kind) {
            case Kind::all_reduce: return reduce_staged(call, own, 0, out, part.count, at);
            case Kind::reduce:
                if (rank_ == call.root) reduce_staged(call, own, 0, out, part.count, at);
                return;
            case Kind::reduce_scatter:
                return reduce_staged(call, own + rank_ * call.count * w, rank_ * call.chunk * w, out, part.count, at);
            case Kind::all_gather: return gather_staged(call, own, 0, part, at);
            case Kind::all_to_all:
                return gather_staged(call, own + rank_ * call.count * w, rank_ * call.chunk * w, part, at);
            case Kind::broadcast:
                if (rank_ != call.root) copy(out, segment_.stage(call.root, at), bytes);
                return;
            case Kind::neighbour_all_reduce:
                sources_.assign(1, own);
                for (int32_t peer : call.neighbours) sources_.push_back(source(peer, own, 0, at));
                return reduce_weighted(call.type, call.weights.data(), sources_.data(), int(sources_.size()), out,
                                       part.count);
            default: return;
        }
    }

    const char* source(int peer, const char* own, int64_t offset, uint64_t round) const {
        return peer == rank_ ? own : segment_.stage(peer, round) + offset;
    }

    void reduce_staged(const Call& call, const char* own, int64_t offset, char* out, int64_t count, uint64_t round) {
        sources_.resize(size_);
        for (int peer = 0; peer < size_; peer++) sources_[peer] = source(peer, own, offset, round);
        reduce(call.type, call.op, sources_.data(), size_, &out, 1, count);
    }

    void gather_staged(const Call& call, const char* own, int64_t offset, Range part, uint64_t round) const {
        for (int peer = 0; peer < size_; peer++)
            copy(call.output + (peer * call.count + part.begin) * call.width, source(peer, own, offset, round),
                 part.count * call.width);
    }

    void take_slices(const Call& call, Turn turn, uint64_t round) {
        const Range chunk = chunk_of(call, turn.chunk);
        char* tensor = call.output + chunk.begin * call.width;
        if (!turn.gathers) {
            const Range s = slice(chunk.count, rank_);
            const int64_t offset = s.begin * call.width;
            return reduce_staged(call, tensor + offset, offset, tensor + offset, s.count, round);
        }
        for (int peer = 0; peer < size_; peer++) {
            const Range s = slice(chunk.count, peer);
            if (peer != rank_)
                copy(tensor + s.begin * call.width, segment_.stage(peer, round) + s.begin * call.width,
                     s.count * call.width);
        }
    }

    Segment segment_;
    RankState& me_;
    int rank_, size_;
    void (*ring_)(void*, int);
    void* ringer_;
    uint64_t round_ = 0;   // rounds of all calls that have ended here
    uint64_t pieces_ = 0;  // pieces of all direct reductions so far
    std::vector<int64_t> places_;
    std::vector<char*> tensors_;
    std::vector<const char*> sources_;
};

}  // namespace weft
