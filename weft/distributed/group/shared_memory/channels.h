// Messages between two ranks: a ring of packets each way, matched by tag. Nothing here blocks.
//
// A message up to kPackets * kPacketBytes leaves at once; a longer one streams through the ring while it is received.
// One that comes before its recv, behind which another is wanted, is put aside. A recv from any rank stands in the
// line of every peer until a message of one of them begins to fill it.
#pragma once

#include <deque>
#include <memory>

#include "collectives.h"

namespace weft {

class Channels {
  public:
    Channels(const Segment& segment, int rank, void (*ring)(void*, int), void* ringer)
        : segment_(segment), rank_(rank), peers_(segment.size), ring_(ring), ringer_(ringer) {}

    void add(Call* call) {
        open_++;
        if (is_from_any(call)) {
            for (Peer& peer : peers_) peer.recvs.push_back(call);
            return;
        }
        Peer& peer = peers_[size_t(call->root)];
        (call->kind == Kind::send ? peer.sends : peer.recvs).push_back(call);
    }

    bool idle() const { return open_ == 0; }

    bool waits_for(int peer) const {
        const bool is_full = count_packets(rank_, peer) >= kPackets, is_empty = count_packets(peer, rank_) == 0;
        const Calls& recvs = peers_[size_t(peer)].recvs;
        return (!peers_[size_t(peer)].sends.empty() && is_full) ||
               (is_empty && !std::all_of(recvs.begin(), recvs.end(), is_from_any));
    }

    // Whether a recv from any rank finds nothing from any of them.
    bool waits_for_any() const {
        for (int peer = 0; peer < int(peers_.size()); peer++)
            if (count_packets(peer, rank_) > 0) return false;
        return std::any_of(peers_[0].recvs.begin(), peers_[0].recvs.end(), is_from_any);
    }

    // Advances all messages; gives what is done to `finish`. Returns whom they wait for.
    template <class Finish> int advance(bool& moved, Finish finish) {
        int waits_for = kAwake;
        if (idle()) return waits_for;
        for (int p = 0; p < int(peers_.size()); p++) {
            Peer& peer = peers_[p];
            if (peer.sends.empty() && peer.recvs.empty()) continue;
            if (send(peer, p, finish) | receive(peer, p, finish)) moved = true;
            if (peer.sends.empty() && peer.recvs.empty()) continue;
            waits_for = waits_for == kAwake ? p : kAnyPeer;
        }
        return waits_for;
    }

    template <class Finish> void abandon(Finish finish) {
        for (int p = 0; p < int(peers_.size()); p++)
            for (auto* calls : {&peers_[p].sends, &peers_[p].recvs})
                while (!calls->empty()) {
                    settle(calls->front(), p);
                    close(*calls, calls->begin(), finish);
                }
    }

  private:
    using Calls = std::deque<Call*>;

    int64_t count_packets(int from, int to) const {
        const ChannelState& channel = segment_.channel(from, to);
        const uint64_t received = channel.received.value.load(std::memory_order_acquire);
        return int64_t(channel.sent.value.load(std::memory_order_acquire) - received);
    }

    struct Aside {
        int64_t tag;
        std::vector<char> data;
    };

    struct Peer {
        Calls sends, recvs;
        std::deque<Aside> aside;
        Call* target = nullptr;          // of the message that is coming in
        std::unique_ptr<Aside> unasked;  // or where it is put aside
        int64_t arrived = 0;             // bytes of it
    };

    static bool is_from_any(const Call* call) { return call->root < 0; }

    // From here on the recv is this peer's alone, if it was for any.
    void settle(Call* call, int from) {
        if (!is_from_any(call)) return;
        call->root = from;
        for (int p = 0; p < int(peers_.size()); p++)
            if (p != from) peers_[p].recvs.erase(std::find(peers_[p].recvs.begin(), peers_[p].recvs.end(), call));
    }

    template <class Finish> void close(Calls& calls, Calls::iterator at, Finish finish) {
        Call* call = *at;
        calls.erase(at);
        open_--;
        finish(call);
    }

    template <class Finish> bool send(Peer& peer, int to, Finish finish) {
        ChannelState& channel = segment_.channel(rank_, to);
        bool moved = false;
        while (!peer.sends.empty()) {
            Call& call = *peer.sends.front();
            const uint64_t number = channel.sent.value.load(std::memory_order_relaxed);
            if (number - channel.received.value.load(std::memory_order_acquire) >= kPackets) return moved;
            const int64_t total = call.count * call.width, bytes = std::min(kPacketBytes, total - call.moved);
            Packet& packet = segment_.packet(rank_, to, number);
            packet.tag = call.tag;
            packet.total = total;
            if (bytes > 0) std::memcpy(packet.data, call.input + call.moved, size_t(bytes));
            channel.sent.value.store(number + 1, std::memory_order_release);
            ring_(ringer_, rank_);
            moved = true;
            call.moved += bytes;
            if (call.moved == total) close(peer.sends, peer.sends.begin(), finish);
        }
        return moved;
    }

    template <class Finish> bool receive(Peer& peer, int from, Finish finish) {
        bool moved = take_aside(peer, from, finish);
        ChannelState& channel = segment_.channel(from, rank_);
        while (!peer.recvs.empty()) {
            const uint64_t number = channel.received.value.load(std::memory_order_relaxed);
            if (channel.sent.value.load(std::memory_order_acquire) == number) return moved;
            const Packet& packet = segment_.packet(from, rank_, number);
            if (!peer.target && !peer.unasked) open_message(peer, from, packet);
            unpack(peer, packet);
            const bool is_whole = peer.arrived == packet.total;
            channel.received.value.store(number + 1, std::memory_order_release);  // from here on the packet is the peer's
            ring_(ringer_, rank_);
            moved = true;
            if (is_whole) close_message(peer, from, finish);
        }
        return moved;
    }

    static Calls::iterator find(Calls& calls, int64_t tag) {
        return std::find_if(calls.begin(), calls.end(), [tag](const Call* call) { return call->tag == tag; });
    }

    void open_message(Peer& peer, int from, const Packet& packet) {
        peer.arrived = 0;
        const auto at = find(peer.recvs, packet.tag);
        if (at == peer.recvs.end()) {
            peer.unasked = std::make_unique<Aside>(Aside{packet.tag, std::vector<char>(size_t(packet.total))});
            return;
        }
        peer.target = *at;
        settle(peer.target, from);
        check_size(*peer.target, packet.total);
    }

    static void unpack(Peer& peer, const Packet& packet) {
        const int64_t bytes = std::min(kPacketBytes, packet.total - peer.arrived);
        char* target = peer.target ? peer.target->output : peer.unasked->data.data();
        if (bytes > 0 && !(peer.target && peer.target->reason != Reason::none))
            std::memcpy(target + peer.arrived, packet.data, size_t(bytes));
        peer.arrived += bytes;
    }

    template <class Finish> void close_message(Peer& peer, int from, Finish finish) {
        if (peer.target) {
            close(peer.recvs, std::find(peer.recvs.begin(), peer.recvs.end(), peer.target), finish);
            peer.target = nullptr;
            return;
        }
        peer.aside.push_back(std::move(*peer.unasked));
        peer.unasked = nullptr;
        take_aside(peer, from, finish);
    }

    template <class Finish> bool take_aside(Peer& peer, int from, Finish finish) {
        bool moved = false;
        for (auto message = peer.aside.begin(); message != peer.aside.end();) {
            const auto at = find(peer.recvs, message->tag);
            if (at == peer.recvs.end() || *at == peer.target) {
                ++message;
                continue;
            }
            Call& call = **at;
            settle(&call, from);
            check_size(call, int64_t(message->data.size()));
            if (call.reason == Reason::none && !message->data.empty())
                std::memcpy(call.output, message->data.data(), message->data.size());
            message = peer.aside.erase(message);
            close(peer.recvs, at, finish);
            moved = true;
        }
        return moved;
    }

    static void check_size(Call& call, int64_t total) {
        if (total == call.count * call.width) return;
        call.reason = Reason::mismatch;
        call.culprit = call.root;
    }

    Segment segment_;
    int rank_;
    std::vector<Peer> peers_;
    void (*ring_)(void*, int);
    void* ringer_;
    int64_t open_ = 0;
};

}  // namespace weft
