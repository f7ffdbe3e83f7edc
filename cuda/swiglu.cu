// SwiGLU (Shazeer 2020): y = silu(gate) * up with silu(g) = g / (1 + e^-g), and its backward.
//
//   with s = 1 / (1 + e^-g):  dup = dy g s,  dgate = dy up s (1 + g (1 - s))
//
// Floor in bytes per element of y: 6 forward (gate and up read, y written), 12 backward (dy, gate and up read; dgate, dup and y
// written). The backward computes y again, which is cheaper than keeping it, and writes the gradients over gate and up.
//
// Each thread takes 8 columns at a time; a grid's threads cover the matrix chunk by chunk, whatever its width.
#include "include/arguments.h"
#include "include/rows.h"

constexpr int THREADS = 256;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * x)); }

KERNEL(swiglu, THREADS, SwiGlu, NoShared) {
    const int64_t width = arguments.width;
    for (Walk walk(width / CHUNK); walk.row < arguments.rows; walk.next()) {
        const bf16* const gates = arguments.gate_up + walk.row * 2 * width + walk.piece * CHUNK;
        const Vector16 packed_gate = load16(gates);
        const Vector16 packed_up = load16(gates + width);
        float gate[CHUNK], up[CHUNK];
        unpack8(packed_gate, gate);
        unpack8(packed_up, up);
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) up[k] = gate[k] * sigmoid(gate[k]) * up[k];
        store16(arguments.y + walk.row * width + walk.piece * CHUNK, pack8(up));
    }
}

KERNEL(swiglu_backward, THREADS, SwiGluBackward, NoShared) {
    const int64_t width = arguments.width;
    for (Walk walk(width / CHUNK); walk.row < arguments.rows; walk.next()) {
        bf16* const gates = arguments.gate_up + walk.row * 2 * width + walk.piece * CHUNK;
        const int64_t place = walk.row * width + walk.piece * CHUNK;
        const Vector16 packed_gate = load16(gates);
        const Vector16 packed_up = load16(gates + width);
        const Vector16 packed_dy = load16(arguments.dy + place);
        float gate[CHUNK], up[CHUNK], dy[CHUNK];
        unpack8(packed_gate, gate);
        unpack8(packed_up, up);
        unpack8(packed_dy, dy);
        float y[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            const float g = gate[k];
            const float s = sigmoid(g);
            const float silu = g * s;
            y[k] = silu * up[k];
            gate[k] = dy[k] * up[k] * (s * multiply_add(g, 1.0f - s, 1.0f));
            up[k] = dy[k] * silu;
        }
        store16(gates, pack8(gate));
        store16(gates + width, pack8(up));
        store16(arguments.y + place, pack8(y));
    }
}
