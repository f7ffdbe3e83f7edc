// What the host passes to each kernel: one plain struct per kernel, mirrored field by field in src/device/cuda/arguments.rs (the
// module's NAME_launch carries the size, and loading refuses a difference). Pointers are device addresses. Unless said otherwise
// matrices are row-major, bf16 pointers 16-aligned, widths multiples of 8. Offsets are 64-bit everywhere.
//
// Beside each kernel stands its grid; threads per block and shared memory are in NAME_launch.
#pragma once

#include "device.h"

// ---- casts.cu: grid.x = any number of blocks, grid-stride ----

// cast_to_bf16: to[i] = round(from[i]);  cast_to_float: to[i] = from[i]
struct CastToBf16 {
    const float* from;
    bf16* to;
    int64_t length;
};
struct CastToFloat {
    const bf16* from;
    float* to;
    int64_t length;
};
// accumulate_floats: to[i] += from[i]
struct AccumulateFloats {
    const float* from;
    float* to;
    int64_t length;
};
// scale_floats: values[i] *= factor
struct ScaleFloats {
    float* values;
    int64_t length;
    float factor;
    int32_t reserved;
};
// gather_rows: to[i] = from[rows[i]];  scatter_rows: to[rows[i]] = from[i]; rows of `width` bf16
struct MoveRows {
    const bf16* from;
    bf16* to;
    const int32_t* rows; // [count]
    int64_t count;
    int64_t width;
};
// sum_parts: into[i] += the sum of parts[k][i] over k, in an order that depends on `count` only. The second stage of every gradient
// of a vector of weights. width and pitch are multiples of 4.
struct SumParts {
    const float* parts; // [count] rows of `width`, `pitch` floats from one to the next
    float* into;        // [width]
    int64_t count;
    int64_t width;
    int64_t pitch;
};

// ---- embedding.cu ----

// embed: x[i] = round(table[ids[i]]). grid.x: any, grid-stride over rows.
struct Embed {
    const float* table; // [vocabulary, width]
    const int32_t* ids; // [rows]
    bf16* x;            // [rows, width]
    int64_t rows;
    int64_t width;
};
// embed_backward: dtable[ids[u]] += sum of dx[order[j]] for j in starts[u] .. starts[u + 1], ascending. grid.x: any, grid-stride over
// (id, columns).
struct EmbedBackward {
    const bf16* dx;        // [rows, width]
    const int32_t* order;  // [rows] row numbers, grouped by id, ascending within one
    const int32_t* starts; // [unique + 1]
    const int32_t* ids;    // [unique]
    float* dtable;         // [vocabulary, width]
    int64_t unique;
    int64_t width;
};

// ---- rms_norm.cu: a team of warps per row, grid.x any, grid-stride over rows; bits depend on width only ----
//
// rms_norm and rms_norm_backward take rows of up to NORM_WIDTH columns, rms_norm_wide and rms_norm_backward_wide of up to
// NORM_WIDTH_WIDE.
constexpr int NORM_WIDTH = 8192;
constexpr int NORM_WIDTH_WIDE = 20480;

// rms_norm: sum = x + branch (if branch: rounded to bf16, written, and what is normed), y = weight * sum / sqrt(mean(sum^2) + epsilon)
struct RmsNorm {
    const bf16* x;       // [rows, width]
    const bf16* branch;  // [rows, width] or null
    const float* weight; // [width]
    bf16* sum;           // [rows, width], may be x; null where branch is
    bf16* y;             // [rows, width]
    int64_t rows;
    int64_t width;
    float epsilon;
    int32_t reserved;
};
// rms_norm_backward: dx += gradient by x; parts[block] = that block's share of the gradient by weight (then sum_parts).
// grid.x = number of parts; block b takes rows [b * rows_per_part, (b + 1) * rows_per_part).
struct RmsNormBackward {
    const bf16* dy;
    const bf16* x; // what was normed
    const float* weight;
    bf16* dx;     // [rows, width] read and written
    float* parts; // [grid.x, width]
    int64_t rows;
    int64_t width;
    int64_t rows_per_part;
    float epsilon;
    int32_t reserved;
};

// ---- rotate.cu: bias, RMSNorm of each query and key head, rotary embedding (halves) ----

// The most columns of a projected row.
constexpr int PROJECTED_WIDTH = 12288;

// rotate: one warp per row, grid.x any, grid-stride. Value heads only get their bias. head_dim 32, 64 or 128:
// kernels rotate_d32, rotate_d64, rotate_d128. In place (rotated = projected) is allowed.
struct Rotate {
    const bf16* projected;   // [rows, (query_heads + 2 key_value_heads) head_dim]
    const float* bias;       // [projected width] or null
    const float* query_norm; // [head_dim] or null, as key_norm
    const float* key_norm;
    const float* table;       // [positions, head_dim]: cosines of head_dim / 2 angles, then sines
    const int32_t* positions; // [rows]
    bf16* rotated;            // as projected
    int64_t rows;
    int32_t query_heads;
    int32_t key_value_heads;
    float epsilon;
    int32_t reserved;
};
// rotate_backward_d*: gradient (of rotated) becomes that of projected, in place. parts[block]: [projected width] for the bias, then
// [head_dim] for query_norm and [head_dim] for key_norm; each section is there only if its weights are. grid.x = number of parts.
struct RotateBackward {
    const bf16* projected; // read only where heads are normed
    const float* bias;
    const float* query_norm;
    const float* key_norm;
    const float* table;
    const int32_t* positions;
    bf16* gradient;
    float* parts; // [grid.x, part_width] or null where there is neither bias nor norms
    int64_t rows;
    int64_t rows_per_part;
    int64_t part_width;
    int32_t query_heads;
    int32_t key_value_heads;
    float epsilon;
    int32_t reserved;
};

// ---- attention ----

constexpr int KEYS_PER_PAGE = 64;
constexpr int QUERIES_PER_TILE = 64;

// New rows of one sequence in a pass, or a tile of them: at most QUERIES_PER_TILE rows, `past` a multiple of KEYS_PER_PAGE further
// than its span's. Results do not depend on the order of tiles; the longest work first keeps a GPU busy to the end.
struct AttentionSpan {
    int32_t row;    // first row in the pass
    int32_t length; // rows
    int32_t past;   // keys before them
    int32_t page;   // where the page table of their sequence starts in `pages`
};
// One page of keys that were computed here, and the tiles of queries at or after it in its document: tiles[first_tile .. end_tile), at
// least the one that stands where the keys do.
struct AttentionKeys {
    int32_t block;  // the page's place in the buffer of blocks
    int32_t first;  // position of its first key in the document
    int32_t row;    // of its first key in the pass
    int32_t length; // keys
    int32_t first_tile;
    int32_t end_tile;
};
// The heads of a layer, and the key/value heads first .. first + count - 1 that pages hold: [2 (keys, values), count, KEYS_PER_PAGE,
// head_dim] each. Kernels with a grid over heads compute these and the query heads of their groups.
struct HeadRange {
    int32_t query_heads;
    int32_t key_value_heads;
    int32_t first;
    int32_t count;
};

// append_keys_values: copies the key and value part of every new row into the pages of its span, which hold all heads. grid.x: any,
// grid-stride over rows.
struct AppendKeysValues {
    const bf16* rotated; // [rows, (query_heads + 2 key_value_heads) head_dim]
    const AttentionSpan* spans;
    const int32_t* span_of_row; // [rows]
    bf16* const* pages;
    int64_t rows;
    int32_t query_heads;
    int32_t key_value_heads;
    int32_t head_dim;
    int32_t reserved;
};
// write_key_blocks: copies the key and value part of every row of each tile into its page, and zeros after the last row. grid =
// (tiles, 2 heads.count).
struct KeyBlockRows {
    const bf16* rotated;        // [rows, (query_heads + 2 key_value_heads) head_dim]
    const AttentionSpan* tiles; // `past` multiples of KEYS_PER_PAGE
    const int64_t* pages;       // places in `blocks`, in bytes
    bf16* blocks;
    HeadRange heads;
    int32_t head_dim;
    int32_t reserved;
};
// attention_forward_d32/_d64/_d128: grid = (tiles, query heads of the range). Reduces over segments of `segment` keys (a multiple of
// KEYS_PER_PAGE) counted from the sequence's start, merged ascending.
struct AttentionForward {
    const bf16* rotated;
    const AttentionSpan* tiles;
    const bf16* blocks;   // what `pages` count from; null where each page has memory of its own
    const int64_t* pages; // places of pages, in bytes
    bf16* output;         // [rows, query_heads * head_dim]
    float* log_sum_exp;   // [rows, query_heads] natural, or null
    int64_t segment;
    HeadRange heads;
    float scale; // 1 / sqrt(head_dim)
    int32_t reserved;
};
// attention_decode_d*: for spans with length * group <= 16. grid = (spans, key_value_heads, segments); a block whose segment lies
// beyond its span's keys returns. Rows of a block: new row r of query head g of the group at r * group + g.
// attention_merge_d*: one warp per (row, query head): merges the segments ascending. grid.x: any, grid-stride.
// Bit-equal to attention_forward.
struct AttentionDecode {
    const bf16* rotated;
    const AttentionSpan* spans;
    const int64_t* pages;
    float* partial; // [spans, key_value_heads, segments, 16 (head_dim + 2)]: not yet normalised outputs [16, head_dim], then
                    // maximum and sum of each row [16, 2]
    bf16* output;
    int64_t segment;
    int32_t span_count;
    int32_t segments; // the most of any span
    int32_t query_heads;
    int32_t key_value_heads;
    float scale;
    int32_t reserved;
};
// attention_delta_d*: delta[row, head] = sum over head_dim of doutput * output, f32. grid.x: any, a warp per row.
struct AttentionDelta {
    const bf16* doutput; // [rows, query_heads * head_dim]
    const bf16* output;
    float* delta; // [rows, query_heads]
    int64_t rows;
    int32_t query_heads;
    int32_t reserved;
};
// What the gradients of keys need of rows of queries, from the first query head of a range on; row r of head h is at r * pitch +
// h * head_dim, its statistics at r * pitch + h. Pitches in elements.
struct QueryRows {
    const bf16* queries;
    const bf16* doutputs;
    const float* log_sum_exps;
    const float* deltas;
    int64_t query_pitch;
    int64_t doutput_pitch;
    int64_t statistic_pitch;
};
// write_shared_queries: row rows[i] goes to row i of `to`: queries, doutputs, log_sum_exps, deltas, zeros up to `pitch`. grid.x: any,
// grid-stride over 16-byte chunks.
struct WriteSharedQueries {
    QueryRows from;
    const int32_t* rows;
    bf16* to; // [count, pitch]
    int64_t count;
    int64_t pitch; // a multiple of 8
    int32_t query_heads; // of the range
    int32_t head_dim;
};
// attention_backward_keys_d*: dK and dV of every page; grid = (keys, heads.count); walks the group's heads, then the tiles in the order
// given, whose `row` counts in `queries`.
struct AttentionBackwardKeys {
    QueryRows queries;
    const AttentionSpan* tiles;
    const AttentionKeys* keys;
    const bf16* blocks;
    bf16* drotated; // [rows, (query_heads + 2 key_value_heads) head_dim]
    HeadRange heads;
    float scale;
    int32_t reserved;
};
// attention_backward_queries_d*: dQ of every tile; grid = (tiles, query heads of the range).
struct AttentionBackwardQueries {
    const bf16* rotated;
    const bf16* doutput;      // [rows, query_heads * head_dim]
    const float* log_sum_exp; // [rows, query_heads]
    const float* delta;       // [rows, query_heads]
    const AttentionSpan* tiles;
    const bf16* blocks;
    const int64_t* pages; // places in `blocks`, in bytes
    bf16* drotated;       // [rows, projected width]
    HeadRange heads;
    float scale;
    int32_t reserved;
};

// ---- swiglu.cu: grid.x any, grid-stride; gate_up [rows, 2 width], gate first ----
struct SwiGlu {
    const bf16* gate_up;
    bf16* y; // [rows, width]
    int64_t rows;
    int64_t width;
};
// swiglu_backward: gate_up becomes its gradient, y is computed again
struct SwiGluBackward {
    const bf16* dy;
    bf16* gate_up;
    bf16* y;
    int64_t rows;
    int64_t width;
};

// ---- gemm.cu: C[m, n] = A B, f32 accumulation over k ascending in steps of 16, never split ----
//
// Kernels gemm_LAYOUT_OUTPUT_TILE:
//   LAYOUT  nt: A [m, k], B [n, k] (y = x W^T)   nn: A [m, k], B [k, n] (dx = dy W)   tn: A [k, m], B [k, n] (dW = dy^T x)
//   OUTPUT  bf16: C = round(AB)   f32: C = AB   add: C += AB in f32
//   TILE    128x128, 64x64, and 16x64 for few rows; the bits do not depend on it
// Built: nt_bf16 and nt_f32 in all three tiles, nn_bf16 in all three, tn_add in 128x128 and 64x64.
// m, n and k are at least 1 and free. Row pitches are in elements, those of A and B multiples of 8; pointers are 16-aligned. Nothing
// beyond a matrix is read, be it the padding of a row, and nothing but C's m x n elements is written: chunks that reach over an edge
// are filled with zeros. C is written in 16-byte pieces where its pitch is a multiple of 16 bytes.
// grid = (ceil(n / tile_n), ceil(m / tile_m)).
struct Gemm {
    const bf16* a;
    const bf16* b;
    void* c;
    int64_t m;
    int64_t n;
    int64_t k;
    int64_t pitch_a;
    int64_t pitch_b;
    int64_t pitch_c;
};

// ---- head.cu: one block per row over its logits (f32, finite, not yet divided by the temperature); padding is not read ----

constexpr int64_t HEAD_MAX_VOCABULARY = 262144;

// head_scores. The same log-probability, bit for bit, as head_sample gives.
struct HeadScores {
    const float* logits;    // [rows, pitch]
    const int32_t* targets; // [rows]
    float* log_probs;       // [rows]
    float* entropies;       // [rows]
    float* log_sum_exps;    // [rows]
    int64_t rows;
    int64_t vocabulary;
    int64_t pitch; // a multiple of 4
    float inverse_temperature;
    int32_t reserved;
};
// head_gradient: dlogits for cotangents of the scores: with z = logit / temperature, p = softmax(z), H the entropy,
// dz = dlog_prob (1[target] - p) - dentropy p (log p + H), dlogit = dz / temperature. The target's 1 - p is -expm1(log p).
// Columns vocabulary .. pitch_d are written 0.
struct HeadGradient {
    const float* logits;
    const int32_t* targets;
    const float* log_probs;
    const float* entropies;
    const float* log_sum_exps;
    const float* dlog_probs;
    const float* dentropies; // or null
    bf16* dlogits;           // [rows, pitch_d]
    int64_t rows;
    int64_t vocabulary;
    int64_t pitch;
    int64_t pitch_d; // a multiple of 8
    float inverse_temperature;
    int32_t reserved;
};
// head_sample: inverts the cumulative distribution over ids 0 .. sampleable ascending at uniforms[row]; greedy: largest logit, the
// lowest id on ties. log_probs over the whole vocabulary.
struct HeadSample {
    const float* logits;
    const double* uniforms;
    int32_t* tokens;
    float* log_probs;
    int64_t rows;
    int64_t vocabulary;
    int64_t sampleable;
    int64_t pitch;
    float inverse_temperature;
    int32_t greedy;
};

// ---- adamw.cu: grid.x any, grid-stride ----
struct AdamW {
    float* weights;
    bf16* rounded; // the copy that products read, or null
    const float* gradient;
    float* first;
    float* second;
    int64_t length;
    float learning_rate;
    float beta1;
    float beta2;
    float epsilon;
    float weight_decay;
    float correction1; // 1 - beta1^step
    float correction2; // 1 - beta2^step
    float gradient_scale;
};

// ---- sum_of_squares.cu ----

// sum_of_squares: parts[block] = sum over that block's chunk in f64. grid.x = number of parts, a function of length alone.
// sum_of_parts: total[0] = sum of the parts in a fixed order, one block.
struct SumOfSquares {
    const float* values;
    double* parts;
    double* total;
    int64_t length;
    int64_t count; // of parts
};

// ---- probes.cu: what the two-bodied functions of include/ give on known inputs, for a test to hold a GPU and the emulated one
// against what the PTX ISA documents. One block each, threads as in NAME_launch. ----

// probe_numbers: of each pair (x, y), and for z = x * y in f32.
constexpr int PROBED_NUMBERS = 8;
struct ProbeNumbers {
    const float* x;   // [count]
    const float* y;   // [count]
    uint32_t* packed; // [count] pack(x, y)
    float* results;   // [count, PROBED_NUMBERS]: exp2_fast(x), log_precise(x), exp_precise(x), expm1_precise(x), square_root(x),
                      // multiply_add(x, y, -z), maximum(x, y), z
    int64_t count;
};
// probe_warp: one warp, lane l gives values[l].
struct ProbeWarp {
    const float* values;  // [32]
    const int32_t* from;  // [32] whose value lane l asks for
    float* shuffled;      // [32] shuffle(value, from[l])
    float* exchanged;     // [5, 32] shuffle_xor(value, 1 << i)
    float* sums;          // [5, 32] warp_sum<2 << i>
    float* maxima;        // [5, 32] warp_maximum<2 << i>
};
// probe_block: block_sum and block_maximum of a block's values, as each thread sees them.
constexpr int PROBE_THREADS = 128;
struct ProbeBlock {
    const float* values; // [PROBE_THREADS]
    float* sums;         // [PROBE_THREADS]
    float* maxima;       // [PROBE_THREADS]
};
// probe_memory: `from` copied by load16/store16, load8/store8, load4/store4, unpack8/pack8, load_floats/store_floats, in this order.
constexpr int PROBED_COPIES = 5;
struct ProbeMemory {
    const uint32_t* from; // [128], read as bf16 by the fourth
    uint32_t* to;         // [PROBED_COPIES, 128]
};
// probe_copies: one warp; lane l copies the first bytes[l] (0 to 16) of chunk l of `from` to shared memory with copy_async_part, even
// lanes in one group and odd lanes in the next. Shared memory holds ones before.
struct ProbeCopies {
    const uint32_t* from; // [32, 4]
    const int32_t* bytes; // [32]
    uint32_t* to;         // [32, 4] what shared memory holds after
};
// probe_matrices: one warp; load_matrices<2> and load_matrices_transposed<2>. Lane l of call i points at row rows[i][l] of `matrix`.
struct ProbeMatrices {
    const bf16* matrix;       // [64, 8]
    const int32_t* rows;      // [2, 32]
    uint32_t* registers;      // [32, 2, 4] by lane
    uint32_t* transposed;     // [32, 2, 4]
};
// probe_multiply: one warp; multiply<2, 3> on fragments given by lane.
struct ProbeMultiply {
    const uint32_t* a; // [32, 2, 4]
    const uint32_t* b; // [32, 3, 2]
    const float* c;    // [32, 2, 3, 4]
    float* result;     // as c
};
// probe_tile: where Tile<64, columns>::at puts each chunk, in elements from the tile's start, for columns 32, 64 and 128.
struct ProbeTile {
    int32_t* columns32;  // [64, 4]
    int32_t* columns64;  // [64, 8]
    int32_t* columns128; // [64, 16]
};
