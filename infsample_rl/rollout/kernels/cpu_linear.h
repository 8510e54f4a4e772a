// Products of a few rows with one to three matrices that lie one after another in the list of parts.
#pragma once
#include <algorithm>
#include <cstdint>
#include "cpu_vectors.h"

namespace {

// gate * sigmoid(gate) * up
inline vec gated(vec gate, vec up) {
    const vec bounded = -gate < splat(88.0f) ? -gate : splat(88.0f);
    return gate / (splat(1.0f) + exp_of(bounded)) * up;
}

struct Matrix {
    const float *weight, *bias;  // [outs, in], [outs] or null
    float* out;                  // rows `out_stride` apart
    int64_t outs, out_stride;
};

struct Linear {
    const float* x;
    int64_t rows, x_stride, in;
    Matrix matrices[3];
    int count;           // of `matrices`
    bool is_gated;       // matrices are gate and up, of one size and one `out`, which gets gate * sigmoid(gate) * up
    int64_t strip = 0;   // groups of GROUP weight rows in one part

    // Cuts the work into parts, four or more a thread where there is enough; returns how many there are.
    int64_t cut(int64_t threads) {
        const int64_t groups = num_groups(), step = is_gated ? 2 : 1;
        strip = std::clamp<int64_t>(groups / (threads * 4) / step * step, step, 8);
        return (groups + strip - 1) / strip;
    }

    void run(int64_t part, int64_t following) const {
        const int64_t groups = num_groups(), end = std::min(groups, (part + 1) * strip);
        for (int64_t g = part * strip; g < end; ++g) {
            const Place at = place(g), ahead = place(g + 1 < end ? g + 1 : following * strip);
            four_rows(at, ahead.n + GROUP <= matrices[ahead.matrix].outs ? matrices[ahead.matrix].weight + ahead.n * in : nullptr);
        }
    }

private:
    struct Place {
        int matrix;
        int64_t n;  // weight rows n .. n + GROUP - 1; in the last group some may be past the end
    };

    static int64_t groups_of(const Matrix& matrix) { return (matrix.outs + GROUP - 1) / GROUP; }

    int64_t num_groups() const {
        int64_t groups = 0;
        for (int i = 0; i < count; ++i) groups += groups_of(matrices[i]);
        return groups;
    }

    // Gate and up by turns, else matrix after matrix; past the last group: past the end of the last matrix.
    Place place(int64_t g) const {
        if (is_gated) return {(int)(g % 2), g / 2 * GROUP};
        int i = 0;
        for (; i + 1 < count && g >= groups_of(matrices[i]); ++i) g -= groups_of(matrices[i]);
        return {i, g * GROUP};
    }

    // Columns n .. n + 3 of one output; past the last weight row the last one is computed again and dropped.
    void four_rows(Place at, const float* ahead) const {
        const Matrix& m = matrices[at.matrix];
        const float* w[GROUP];
        for (int i = 0; i < GROUP; ++i) w[i] = m.weight + std::min(at.n + i, m.outs - 1) * in;
        const int valid = (int)std::min<int64_t>(GROUP, m.outs - at.n);
        const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        const int each = tiles == 1 ? 4 : tiles <= 3 ? 2 : 1;  // the tiles share out the prefetching of four weight rows
        int fetched = 0;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t first = rows * t / tiles, number = rows * (t + 1) / tiles - first;
            const int fetch = ahead && fetched < GROUP ? each : 0;
            float sums[SUMS] = {};
            tile_for(number, fetch)(w, x + first * x_stride, x_stride, in, ahead + fetched * in, sums, GROUP);
            fetched += fetch;
            if (m.bias)
                for (int64_t r = 0; r < number; ++r)
                    for (int i = 0; i < valid; ++i) sums[r * GROUP + i] += m.bias[at.n + i];
            float* out = m.out + first * m.out_stride + at.n;
            if (is_gated && at.matrix == 1) gate(out, m.out_stride, sums, number, valid);
            for (int64_t r = 0; r < number; ++r)
                for (int i = 0; i < valid; ++i) out[r * m.out_stride + i] = sums[r * GROUP + i];
        }
    }

    // sums = silu(the gate that lies in out) * sums
    static void gate(const float* out, int64_t out_stride, float* sums, int64_t number, int valid) {
        float gates[SUMS] = {};
        for (int64_t r = 0; r < number; ++r)
            for (int i = 0; i < valid; ++i) gates[r * GROUP + i] = out[r * out_stride + i];
        for (int64_t k = 0; k < number * GROUP; k += LANES) store(sums + k, gated(load(gates + k), load(sums + k)));
    }

    static constexpr int SUMS = (MAX_ROWS * GROUP + LANES - 1) / LANES * LANES;  // of one tile, in whole vectors
};

}  // namespace
