// Collectives as rounds. In round t every rank posts data in its staging buffer t % 2 and takes what it needs from others.
//
//   rank 0   post 0 | post 1 | take 0 | post 2 | take 1 | post 3 | take 2 | ...
//   rank 1       post 0 | post 1 | take 0 | post 2 | take 1 | ...
//
// Round t may be posted when every peer has taken round t - 2, and taken when those needed have posted it. Nothing here
// blocks: a call advances as far as it can and says for whom it waits.
//
// Parts may differ in length. A round carries a chunk of each part; chunks are in proportion to the parts, so that all
// parts of a tensor end in about the same round. In an all-to-all a rank knows its own lengths alone: there a round in
// which everybody posts those comes first.
#pragma once

#include <algorithm>
#include <vector>

#include "parts.h"
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
// announce: one round before, to learn whether they do, or how long the parts of an all-to-all are.
enum class Mode : int32_t { flat, announce, sliced, direct };

struct Call {
    Kind kind;
    Type type;
    Reduction op;
    int32_t root;  // or the peer of a send or recv; below 0 for a recv from any
    int64_t tag;
    const char* input;
    char* output;
    int64_t count;  // elements of one part; of this rank's, where parts differ
    int64_t width;  // bytes of an element
    std::vector<int32_t> neighbours;
    std::vector<double> weights;
    std::vector<int64_t> lengths;  // elements of the parts where they differ; all-to-all: of those sent, then received

    uint64_t agreed = 0;              // stands for the lengths that are the same on all ranks
    std::vector<Part> sends, recvs;  // where parts differ: by the rank that they go to, that they come from
    Mode mode = Mode::flat;
    int64_t chunk = 1;  // elements of one part in one round; of this rank's, where parts differ
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
constexpr uint64_t kMix = 0x9e3779b97f4a7c15u;

class Collectives {
  public:
    Collectives(const Segment& segment, int rank, void (*ring)(void*, int), void* ringer)
        : segment_(segment), me_(segment.rank(rank)), rank_(rank), size_(segment.size), ring_(ring), ringer_(ringer) {}

    void begin(Call& call) {
        call.first = round_;
        if (!call.lengths.empty()) return begin_uneven(call);
        call.agreed = uint64_t(call.count);
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
        return what ^ call.agreed * kMix;
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

    // --- parts that differ

    void begin_uneven(Call& call) {
        call.agreed = kMix;  // no equal call has so many elements
        if (call.kind == Kind::all_to_all) {
            call.mode = Mode::announce;
            call.rounds = 1;
            return;
        }
        for (int64_t length : call.lengths) call.agreed = (call.agreed ^ uint64_t(length)) * kMix + 1;
        if (call.kind == Kind::all_gather) {
            call.chunk = fit(call, 1);
            call.recvs = lay_out(call.lengths.data(), size_);
            for (Part& part : call.recvs) part.chunk = call.chunk;
            call.rounds = count_rounds(call.recvs);
        } else {
            call.sends = cut(call.lengths.data(), size_, call.width);
            call.chunk = call.sends[size_t(rank_)].chunk;
            call.rounds = count_rounds(call.sends);
        }
    }

    // Every rank has read the lengths of all: who sends how much to whom.
    void begin_exchange(Call& call) {
        call.mode = Mode::flat;
        call.recvs = lay_out(call.lengths.data() + size_, size_);
        call.rounds = 0;
        for (int peer = 0; peer < size_; peer++) {
            const std::vector<Part> parts = cut(lengths_.data() + peer * size_, size_, call.width);
            Part& mine = call.recvs[size_t(peer)];
            if (mine.count != parts[size_t(rank_)].count) return differ(call, peer);
            mine.room = parts[size_t(rank_)].room;
            mine.chunk = parts[size_t(rank_)].chunk;
            call.rounds = std::max(call.rounds, count_rounds(parts));
            if (peer == rank_) call.sends = parts;
        }
    }

    static void differ(Call& call, int peer) {
        call.reason = Reason::mismatch;
        call.culprit = peer;
        call.rounds = 0;
    }

    // What this rank sends to a peer: in its input, and in its own staging buffer.
    Part sent_to(const Call& call, int peer) const {
        if (!call.sends.empty()) return call.sends[size_t(peer)];
        return {peer * call.count, call.count, peer * call.chunk, call.chunk};
    }

    // What comes from a peer: in the output, and in the peer's staging buffer.
    Part received_from(const Call& call, int peer) const {
        if (!call.recvs.empty()) return call.recvs[size_t(peer)];
        return {peer * call.count, call.count, is_parted(call.kind) ? rank_ * call.chunk : 0, call.chunk};
    }

    void put_lengths(const Call& call, char* stage) const {
        std::memcpy(stage, call.lengths.data(), size_t(size_) * sizeof(int64_t));
    }

    void read_lengths(const Call& call, uint64_t round) {
        lengths_.resize(size_t(size_) * size_t(size_));
        for (int peer = 0; peer < size_; peer++)
            std::memcpy(&lengths_[size_t(peer) * size_t(size_)], segment_.stage(peer, round),
                        size_t(size_) * sizeof(int64_t));
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
        if (call.kind == Kind::all_to_all) return begin_exchange(call);
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

    static Range chunk_of(int64_t count, int64_t chunk, int64_t index) {
        const int64_t begin = index * chunk;
        return {begin, std::max<int64_t>(std::min(chunk, count - begin), 0)};
    }

    static Range chunk_of(const Call& call, int64_t index) { return chunk_of(call.count, call.chunk, index); }
    static Range chunk_of(const Part& part, uint64_t round) { return chunk_of(part.count, part.chunk, int64_t(round)); }

    static void copy(char* target, const char* source, int64_t bytes) {
        if (target != source && bytes > 0) copy_bytes(target, source, bytes);
    }

    void put(const Call& call, uint64_t round, char* stage) const {
        const int64_t w = call.width;
        if (call.kind == Kind::barrier) return;
        if (call.mode == Mode::announce) return call.lengths.empty() ? void() : put_lengths(call, stage);
        if (call.mode == Mode::sliced) return put_slices(call, turn(call, round), stage);
        const Range own = chunk_of(call, int64_t(round));
        if (!is_parted(call.kind)) return copy(stage, call.input + own.begin * w, own.count * w);
        for (int peer = 0; peer < size_; peer++) {
            if (peer == rank_) continue;
            const Part part = sent_to(call, peer);
            const Range chunk = chunk_of(part, round);
            copy(stage + part.room * w, call.input + (part.begin + chunk.begin) * w, chunk.count * w);
        }
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
        if (call.mode == Mode::announce) return call.lengths.empty() ? read_places(call) : read_lengths(call, call.first);
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
            case Kind::reduce_scatter: {
                const Part mine = sent_to(call, rank_);
                return reduce_staged(call, own + mine.begin * w, mine.room * w, out, part.count, at);
            }
            case Kind::all_gather: return gather_staged(call, call.input, round);
            case Kind::all_to_all: return gather_staged(call, call.input + sent_to(call, rank_).begin * w, round);
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

    void gather_staged(const Call& call, const char* own, uint64_t round) const {
        const int64_t w = call.width;
        for (int peer = 0; peer < size_; peer++) {
            const Part part = received_from(call, peer);
            const Range chunk = chunk_of(part, round);
            copy(call.output + (part.begin + chunk.begin) * w,
                 source(peer, own + chunk.begin * w, part.room * w, call.first + round), chunk.count * w);
        }
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
    std::vector<int64_t> lengths_;  // of an all-to-all: row by row, what each rank sends to each
    std::vector<char*> tensors_;
    std::vector<const char*> sources_;
};

}  // namespace weft
