// Parts of a tensor that differ in length, and their rooms in a staging buffer. In elements.
//
//   tensor  | part 0       | part 1 | part 2          |      begin, count
//   stage   | 0    | 1 | 2      |                            room, chunk: what one round carries of a part
#pragma once

#include <algorithm>
#include <vector>

#include "segment.h"

namespace weft {

constexpr int64_t kGrain = 64;  // chunks are multiples of it

struct Part {
    int64_t begin, count, room, chunk;
};

// One after the other, without rooms.
inline std::vector<Part> lay_out(const int64_t* lengths, int num_parts) {
    std::vector<Part> parts;
    int64_t begin = 0;
    for (int i = 0; i < num_parts; begin += lengths[i++]) parts.push_back({begin, lengths[i], 0, 0});
    return parts;
}

// With rooms in proportion to the parts, so that all end in about the same round. Rounding up adds less than a grain to
// each, which is set aside before.
inline std::vector<Part> cut(const int64_t* lengths, int num_parts, int64_t width) {
    std::vector<Part> parts = lay_out(lengths, num_parts);
    const int64_t total = std::max<int64_t>(parts.back().begin + parts.back().count, 1);
    const int64_t space = kStageBytes / width - kGrain * num_parts;
    int64_t room = 0;
    for (Part& part : parts) {
        part.room = room;
        part.chunk = round_up((space * part.count + total - 1) / total, kGrain);
        room += part.chunk;
    }
    return parts;
}

inline uint64_t count_rounds(const std::vector<Part>& parts) {
    int64_t rounds = 1;
    for (const Part& part : parts)
        if (part.count > 0) rounds = std::max(rounds, (part.count + part.chunk - 1) / part.chunk);
    return uint64_t(rounds);
}

}  // namespace weft
