// What the ranks of one host share: counters, staging buffers, channels between pairs, and each rank's arena.
//
//   | roll (Python's) | header | rank state x P | channel state x P*P | staging x P | channels x P*P | arena x P |
//
// Every counter has one writer and only grows. All of it starts as zeros.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {

constexpr int64_t kRollBytes = 65536;       // matches segment.py
constexpr int64_t kStageBytes = 1 << 20;  // one of the two staging buffers of a rank: stays in the cache
constexpr int kStages = 2;
constexpr int64_t kPacketBytes = 128 << 10;
constexpr int kPackets = 4;
constexpr int64_t kAlign = 4096;

constexpr int32_t kAwake = -1;
constexpr int32_t kAnyPeer = -2;

struct alignas(64) Counter {
    std::atomic<uint64_t> value;
};

struct Header {
    Counter failure;   // 0, or the first failure: reason << 32 | peer
    Counter claimed;   // pieces of direct reductions that some rank took
    Counter finished;  // and that are done
};

// What a rank says about a round beside the data: peers check that they mean the same call.
struct alignas(64) Notice {
    uint64_t signature;
    int64_t place;  // of the tensor in the rank's arena, or -1
};

struct RankState {
    Counter posted;  // rounds whose data and notice are in the staging buffer
    Counter taken;   // rounds that this rank has read from all it needed
    alignas(64) std::atomic<uint32_t> doorbell;
    std::atomic<int32_t> asleep_for;  // kAwake, kAnyPeer, or the one rank whose step would help
    std::atomic<int32_t> core;        // on which its last step was taken
    alignas(64) std::atomic<int64_t> heartbeat;  // ns, while blocked
    std::atomic<int32_t> blocked_on;             // kAwake, kAnyPeer or a rank
    std::atomic<int32_t> left;
    Notice notices[kStages];
};

struct ChannelState {
    Counter sent;      // packets
    Counter received;
};

struct Packet {
    int64_t tag;
    int64_t total;  // bytes of the whole message
    alignas(64) char data[kPacketBytes];
};

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Segment {
    char* base;
    int size;
    int64_t arena_bytes;

    static int64_t ranks_at() { return kRollBytes + kAlign; }
    int64_t channels_at() const { return ranks_at() + round_up(size * int64_t(sizeof(RankState)), kAlign); }
    int64_t stages_at() const {
        return channels_at() + round_up(int64_t(size) * size * int64_t(sizeof(ChannelState)), kAlign);
    }
    int64_t packets_at() const { return stages_at() + size * kStages * kStageBytes; }
    int64_t arenas_at() const {
        return packets_at() + round_up(int64_t(size) * size * kPackets * int64_t(sizeof(Packet)), kAlign);
    }
    int64_t bytes() const { return arenas_at() + size * arena_bytes; }

    Header& header() const { return *reinterpret_cast<Header*>(base + kRollBytes); }
    RankState& rank(int r) const { return reinterpret_cast<RankState*>(base + ranks_at())[r]; }
    ChannelState& channel(int from, int to) const {
        return reinterpret_cast<ChannelState*>(base + channels_at())[from * size + to];
    }
    char* stage(int r, uint64_t round) const {
        return base + stages_at() + (int64_t(r) * kStages + int64_t(round % kStages)) * kStageBytes;
    }
    Packet& packet(int from, int to, uint64_t number) const {
        return reinterpret_cast<Packet*>(base + packets_at())[(int64_t(from) * size + to) * kPackets +
                                                              int64_t(number % kPackets)];
    }
    char* arena(int r) const { return base + arenas_at() + r * arena_bytes; }
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t ns) {
    timespec t{time_t(ns / 1000000000), long(ns % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace weft
