// NCCL's data types, and reductions over ranks: element by element, ranks ascending, so that the bits depend on nothing else.
// Narrow floats are added in f32 and rounded once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace emulator::nccl {

// ncclRedOp_t
enum class Reduction { Sum, Product, Maximum, Minimum, Average };

// ncclDataType_t: the number is the index here
struct Type {
    const char* name;
    size_t bytes;
};
constexpr Type TYPES[] = {{"int8", 1},  {"uint8", 1},   {"int32", 4},   {"uint32", 4},  {"int64", 8},
                          {"uint64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}};

inline size_t type_bytes(int32_t type) { return type >= 0 && type < 10 ? TYPES[type].bytes : 0; } // 0: unknown
inline const char* type_name(int32_t type) { return type >= 0 && type < 10 ? TYPES[type].name : "numbers of an unknown type"; }

struct BFloat16 {
    uint16_t bits;
};

// How an element is widened for the sum and rounded back (to nearest, ties to even).
template <class T> struct Widened {
    using Sum = T;
    static Sum widen(T value) { return value; }
    static T round(Sum value) { return value; }
};
template <> struct Widened<_Float16> {
    using Sum = float;
    static float widen(_Float16 value) { return float(value); }
    static _Float16 round(float value) { return _Float16(value); }
};
template <> struct Widened<BFloat16> {
    using Sum = float;
    static float widen(BFloat16 value) {
        const uint32_t bits = uint32_t(value.bits) << 16;
        float widened;
        std::memcpy(&widened, &bits, sizeof widened);
        return widened;
    }
    static BFloat16 round(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        if (value != value) return {uint16_t(bits >> 16 | 0x40)};
        return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};

template <class T>
void reduce_typed(const std::vector<const char*>& sources, const std::vector<char*>& destinations, size_t count,
                  Reduction reduction) {
    using Sum = typename Widened<T>::Sum;
    for (size_t i = 0; i < count; ++i) { // read from all before it is written to any: buffers may be reduced in place
        const auto element = [&](size_t rank) { return Widened<T>::widen(reinterpret_cast<const T*>(sources[rank])[i]); };
        Sum sum = element(0);
        for (size_t rank = 1; rank < sources.size(); ++rank) {
            const Sum other = element(rank);
            switch (reduction) {
            case Reduction::Product: sum = Sum(sum * other); break;
            case Reduction::Maximum: sum = std::max(sum, other); break;
            case Reduction::Minimum: sum = std::min(sum, other); break;
            default: sum = Sum(sum + other); break;
            }
        }
        if (reduction == Reduction::Average) sum = Sum(sum / Sum(sources.size()));
        const T rounded = Widened<T>::round(sum);
        for (char* destination : destinations) reinterpret_cast<T*>(destination)[i] = rounded;
    }
}

// destinations[..][i] = reduction over ranks of sources[rank][i]
inline void reduce(const std::vector<const char*>& sources, const std::vector<char*>& destinations, size_t count, int32_t type,
                   Reduction reduction) {
    switch (type) {
    case 0: return reduce_typed<int8_t>(sources, destinations, count, reduction);
    case 1: return reduce_typed<uint8_t>(sources, destinations, count, reduction);
    case 2: return reduce_typed<int32_t>(sources, destinations, count, reduction);
    case 3: return reduce_typed<uint32_t>(sources, destinations, count, reduction);
    case 4: return reduce_typed<int64_t>(sources, destinations, count, reduction);
    case 5: return reduce_typed<uint64_t>(sources, destinations, count, reduction);
    case 6: return reduce_typed<_Float16>(sources, destinations, count, reduction);
    case 7: return reduce_typed<float>(sources, destinations, count, reduction);
    case 8: return reduce_typed<double>(sources, destinations, count, reduction);
    case 9: return reduce_typed<BFloat16>(sources, destinations, count, reduction);
    }
}

} // namespace emulator::nccl
