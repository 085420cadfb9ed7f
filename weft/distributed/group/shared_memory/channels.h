// Messages between two ranks: a ring of packets each way, matched by tag. Nothing here blocks.
//
// A message up to kPackets * kPacketBytes leaves at once; a longer one streams through the ring while it is received.
// One that comes before its recv, behind which another is wanted, is put aside.
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
        Peer& peer = peers_[call->root];
        (call->kind == Kind::send ? peer.sends : peer.recvs).push_back(call);
        open_++;
    }

    bool idle() const { return open_ == 0; }

    bool waits_for(int peer) const {
        const bool is_full = count_packets(rank_, peer) >= kPackets, is_empty = count_packets(peer, rank_) == 0;
        return (!peers_[size_t(peer)].sends.empty() && is_full) || (!peers_[size_t(peer)].recvs.empty() && is_empty);
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
        for (Peer& peer : peers_)
            for (auto* calls : {&peer.sends, &peer.recvs})
                while (!calls->empty()) close(*calls, calls->begin(), finish);
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
        bool moved = take_aside(peer, finish);
        ChannelState& channel = segment_.channel(from, rank_);
        while (!peer.recvs.empty()) {
            const uint64_t number = channel.received.value.load(std::memory_order_relaxed);
            if (channel.sent.value.load(std::memory_order_acquire) == number) return moved;
            const Packet& packet = segment_.packet(from, rank_, number);
            if (!peer.target && !peer.unasked) open_message(peer, packet);
            unpack(peer, packet);
            const bool is_whole = peer.arrived == packet.total;
            channel.received.value.store(number + 1, std::memory_order_release);  // from here on the packet is the peer's
            ring_(ringer_, rank_);
            moved = true;
            if (is_whole) close_message(peer, finish);
        }
        return moved;
    }

    static Calls::iterator find(Calls& calls, int64_t tag) {
        return std::find_if(calls.begin(), calls.end(), [tag](const Call* call) { return call->tag == tag; });
    }

    static void open_message(Peer& peer, const Packet& packet) {
        peer.arrived = 0;
        const auto at = find(peer.recvs, packet.tag);
        if (at == peer.recvs.end()) {
            peer.unasked = std::make_unique<Aside>(Aside{packet.tag, std::vector<char>(size_t(packet.total))});
            return;
        }
        peer.target = *at;
        check_size(**at, packet.total);
    }

    static void unpack(Peer& peer, const Packet& packet) {
        const int64_t bytes = std::min(kPacketBytes, packet.total - peer.arrived);
        char* target = peer.target ? peer.target->output : peer.unasked->data.data();
        if (bytes > 0 && !(peer.target && peer.target->reason != Reason::none))
            std::memcpy(target + peer.arrived, packet.data, size_t(bytes));
        peer.arrived += bytes;
    }

    template <class Finish> void close_message(Peer& peer, Finish finish) {
        if (peer.target) {
            close(peer.recvs, std::find(peer.recvs.begin(), peer.recvs.end(), peer.target), finish);
            peer.target = nullptr;
            return;
        }
        peer.aside.push_back(std::move(*peer.unasked));
        peer.unasked = nullptr;
        take_aside(peer, finish);
    }

    template <class Finish> bool take_aside(Peer& peer, Finish finish) {
        bool moved = false;
        for (auto message = peer.aside.begin(); message != peer.aside.end();) {
            const auto at = find(peer.recvs, message->tag);
            if (at == peer.recvs.end() || *at == peer.target) {
                ++message;
                continue;
            }
            Call& call = **at;
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
