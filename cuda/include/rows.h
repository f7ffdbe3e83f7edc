// What the kernels that walk rows share: rows of weights in shared memory, teams of warps that share a row, and walks over chunks.
//
// These kernels are bound by memory: every element of a matrix is read once and written once, and whatever a block needs for each of
// its rows (weights, sums of gradients) stays in registers or shared memory while the block walks its rows.
#pragma once

#include "device.h"

constexpr int CHUNK = 8; // bf16 in a 16-byte access: the unit of a row

// ---- rows of floats in shared memory ----

// A row of floats that lanes read in chunks of 8, laid out so that no 16-byte access has a bank conflict, whether eight neighbouring
// lanes hold eight neighbouring chunks (a row), four and four from two heads of 64, or two each from four heads of 32. The first and
// the last four floats of each chunk lie in two planes, so that chunks follow each other every 16 bytes; the planes are half a line (16
// banks) apart, for the sake of filling them; and in every other line places are exchanged, so that chunk c + 8 lies in other banks.
template <int capacity> struct alignas(16) SharedRow {
    static constexpr int PLANE = (capacity / 2 + 31) / 32 * 32 + 16;
    float values[2 * PLANE];

    // Elements 4 * index .. 4 * index + 3.
    DEVICE float* quad(int index) {
        const int chunk = index / 2;
        return values + (index % 2) * PLANE + (chunk ^ (chunk / 8 % 2 * 6)) * 4;
    }

    DEVICE void read(int chunk, float (&into)[CHUNK]) {
        float half[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_floats(quad(2 * chunk + i), half);
#pragma unroll
            for (int k = 0; k < 4; ++k) into[4 * i + k] = half[k];
        }
    }
    DEVICE void write(int chunk, const float (&from)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float half[4] = {from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]};
            store_floats(quad(2 * chunk + i), half);
        }
    }
    DEVICE void add(int chunk, const float (&terms)[CHUNK]) {
        float sums[CHUNK];
        read(chunk, sums);
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) sums[k] += terms[k];
        write(chunk, sums);
    }

    // Copies `width` (a multiple of 4) floats from or to global memory: `rank` of `threads` threads takes part.
    DEVICE void fill(const float* from, int width, int rank, int threads) {
        for (int index = rank; index < width / 4; index += threads) store16(quad(index), load16(from + 4 * int64_t(index)));
    }
    DEVICE void clear(int width, int rank, int threads) {
        for (int index = rank; index < width / 4; index += threads) store16(quad(index), Vector16{});
    }
    DEVICE void copy_to(float* to, int width, int rank, int threads) {
        for (int index = rank; index < width / 4; index += threads) store16(to + 4 * int64_t(index), load16(quad(index)));
    }
};

// ---- teams ----

// The warps of a block form `count` equal teams, one row each. Which team a thread is in depends on the row's width alone.
struct Team {
    int warps;   // per team
    int threads; // per team
    int count;   // per block; warps that are left over have index == count and hold no row
    int index;   // of this thread's team
    int rank;    // of this thread in its team
};

// Teams for rows of `chunks` chunks, of which a thread takes at most `most`.
template <int block_threads, int most> DEVICE Team form_teams(int chunks) {
    Team team;
    team.warps = (chunks + WARP * most - 1) / (WARP * most);
    team.threads = team.warps * WARP;
    team.count = block_threads / team.threads;
    team.index = minimum(warp() / team.warps, team.count);
    team.rank = int(threadIdx.x) - team.index * team.threads;
    return team;
}

// values[i] becomes its sum over the team, the same bits in all its threads: lanes by butterfly, then warps ascending. Every thread
// of the block calls it. `scratch` may be used again at once.
template <int block_threads, int count>
DEVICE void team_sums(const Team& team, float (&values)[count], float (&scratch)[count][block_threads / WARP]) {
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = warp_sum(values[i]);
    if (team.warps == 1) return; // for all of the block or for none
    if (lane() == 0) {
#pragma unroll
        for (int i = 0; i < count; ++i) scratch[i][warp()] = values[i];
    }
    sync_block();
    if (team.index < team.count) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            values[i] = scratch[i][team.index * team.warps];
            for (int k = 1; k < team.warps; ++k) values[i] += scratch[i][team.index * team.warps + k];
        }
    }
    sync_block();
}

// ---- walks ----

// A grid-stride walk over the pieces of a matrix of [rows, pieces], row by row. One division at the start, none per step.
struct Walk {
    int64_t row;
    int64_t piece;
    int64_t pieces;       // per row
    int64_t step_rows;    // the grid's threads = step_rows * pieces + step_pieces
    int64_t step_pieces;

    DEVICE explicit Walk(int64_t pieces_per_row) {
        const int64_t threads = int64_t(gridDim.x) * blockDim.x;
        const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        pieces = pieces_per_row;
        row = first / pieces;
        piece = first - row * pieces;
        step_rows = threads / pieces;
        step_pieces = threads - step_rows * pieces;
    }
    DEVICE void next() {
        row += step_rows;
        piece += step_pieces;
        if (piece >= pieces) {
            piece -= pieces;
            ++row;
        }
    }
};

// This thread's and this warp's place in the grid, and how many there are.
DEVICE int64_t grid_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE int64_t grid_threads() { return int64_t(gridDim.x) * blockDim.x; }
DEVICE int64_t grid_warp() { return grid_thread() / WARP; }
DEVICE int64_t grid_warps() { return grid_threads() / WARP; }
