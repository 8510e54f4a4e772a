// All decoder layers of Llama, Qwen2 and Qwen3 for one new token of every row, in one entry into the threads.
//
// A step is a list of phases, eight a layer: what one phase reads, phases before it have written. The structs are filled by
// cpu_decoder.py, field by field in this order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>
#include "cpu_attention.h"
#include "cpu_linear.h"
#include "cpu_threads.h"

namespace {

struct Layer {  // null: not there
    const float *norm_in, *query_norm, *key_norm, *norm_post;
    const float *query, *query_bias, *key, *key_bias, *value, *value_bias, *out, *out_bias;
    const float *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
};
struct Model {
    const Layer* layers;
    const float *embedding, *norm;
    int64_t num_layers, vocab_size, hidden, heads, kv_heads, size, inner;
    float eps, scaling;
};
struct Step {
    const int64_t *tokens, *starts, *positions;  // [rows]: newest tokens, tokens of the prompt, place in the response (< 0 counts as 0)
    const int32_t *tables, *lengths, *prompt_tables, *prompt_lengths, *prompt_of_row;
    float* store;             // [2 layers, num_pages, page_size, kv_heads, size]
    const float *cos, *sin;   // [num_angles, size], by place in the whole sequence
    float *workspace, *out;   // `workspace_floats` for each row; [rows, hidden]
    int64_t rows, row_pages, num_prompts, prompt_pages, num_pages, page_size, num_angles, threads;
};
enum Bad : int64_t { ROW = 1, PROMPT = 2, PROMPT_OF_ROW = 3, TOKEN = 4, ANGLE = 5 };

// x / rms(x) * weight; with a residual: residual += x first, and its norm. out may be x.
void normalize(const float* x, float* residual, const float* weight, float* out, int64_t size, float eps) {
    if (residual) {
        for (int64_t k = 0; k < size; ++k) residual[k] += x[k];
        x = residual;
    }
    vec squares = {};
    for_vectors(size, [&](int64_t k, auto get, auto) { squares = fmadd(get(x + k), get(x + k), squares); });
    const vec scale = splat(1.0f / std::sqrt(sum_of(squares) / (float)size + eps));
    for_vectors(size, [&](int64_t k, auto get, auto put) { put(out + k, get(weight + k) * (get(x + k) * scale)); });
}

// x cos + rotate_half(x) sin, as transformers' Llama does, in place.
void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    const int64_t half = size / 2;
    for_vectors(half, [&](int64_t k, auto get, auto put) {
        const vec a = get(x + k), b = get(x + half + k);
        put(x + k, a * get(cos + k) - b * get(sin + k));
        put(x + half + k, b * get(cos + half + k) + a * get(sin + half + k));
    });
}

struct Decode {
    const Model& m;
    const Step& s;
    Pages pages;  // of layer 0
    Part own, prompts;
    const std::vector<int32_t>& order;
    const std::vector<Task>& tasks;
    Phase* phases;

    // Buffers [rows, width] in the workspace, each used for two things that are not needed at once.
    int64_t query_size = m.heads * m.size, kv_size = m.kv_heads * m.size;
    int64_t wide_size = std::max(query_size + 2 * kv_size, m.inner), narrow_size = std::max(m.hidden, query_size);
    float *residual = s.workspace, *branch = residual + s.rows * m.hidden;  // branch: what a half layer adds to the residual
    float *narrow = branch + s.rows * m.hidden;                             // normed input, attention's output
    float *wide = narrow + s.rows * narrow_size;                            // query, key and value; silu(gate) * up

    static int64_t workspace_floats(const Model& m) {
        const int64_t query = m.heads * m.size;
        return 2 * m.hidden + std::max(m.hidden, query) + std::max(query + 2 * m.kv_heads * m.size, m.inner);
    }
    static int64_t num_phases(const Model& m) { return 8 * m.num_layers + 1; }

    void operator()() const {
        Phase* phase = phases;
        for (int64_t l = 0; l < m.num_layers; ++l) {
            const Layer& layer = m.layers[l];
            const Pages pool = pages_of(l);
            by_rows(*phase++, [&](int64_t row) { enter_layer(l, row); });
            multiply(*phase++, narrow, m.hidden,
                     {{layer.query, layer.query_bias, wide, query_size, wide_size},
                      {layer.key, layer.key_bias, wide + query_size, kv_size, wide_size},
                      {layer.value, layer.value_bias, wide + query_size + kv_size, kv_size, wide_size}}, 3, false);
            by_rows(*phase++, [&](int64_t row) { rotate_and_store(layer, pool, row); });
            attend(*phase++, pool);
            multiply(*phase++, narrow, query_size, {{layer.out, layer.out_bias, branch, m.hidden, m.hidden}}, 1, false);
            by_rows(*phase++, [&](int64_t row) { add_and_normalize(layer.norm_post, row, narrow); });
            multiply(*phase++, narrow, m.hidden,
                     {{layer.gate, layer.gate_bias, wide, m.inner, m.inner}, {layer.up, layer.up_bias, wide, m.inner, m.inner}}, 2, true);
            multiply(*phase++, wide, m.inner, {{layer.down, layer.down_bias, branch, m.hidden, m.hidden}}, 1, false);
        }
        by_rows(*phase, [&](int64_t row) { add_and_normalize(m.norm, row, s.out); });
    }

    // The first index out of range as 8 * index + which Bad, or 0.
    int64_t find_bad() const {
        if (const int64_t bad = first_bad(own, pages, s.rows); bad >= 0) return 8 * bad + ROW;
        for (int64_t i = 0; i < s.rows; ++i) {
            if (s.prompt_of_row[i] < 0 || s.prompt_of_row[i] >= s.num_prompts) return 8 * i + PROMPT_OF_ROW;
            if (s.tokens[i] < 0 || s.tokens[i] >= m.vocab_size) return 8 * i + TOKEN;
            if (angle(i) < 0 || angle(i) >= s.num_angles) return 8 * i + ANGLE;
        }
        for (const Task& task : tasks) {  // only prompts that have rows
            const int64_t prompt = s.prompt_of_row[order[task.first]];
            const Part one{s.prompt_tables + prompt * s.prompt_pages, s.prompt_lengths + prompt, s.prompt_pages};
            if (first_bad(one, pages, 1) >= 0) return 8 * prompt + PROMPT;
        }
        return 0;
    }

private:
    int64_t angle(int64_t row) const { return s.starts[row] + std::max<int64_t>(s.positions[row], 0); }

    Pages pages_of(int64_t layer) const {
        Pages pool = pages;
        const int64_t layer_size = s.num_pages * pool.page_stride;
        pool.keys += 2 * layer * layer_size;
        pool.values += 2 * layer * layer_size;
        return pool;
    }

    template <class One>
    void by_rows(Phase& phase, One one) const {
        constexpr int64_t EACH = 4;
        const int64_t parts = (s.rows + EACH - 1) / EACH;
        phase.take_parts(parts, [&](int64_t part, int64_t) {
            for (int64_t row = part * EACH; row < std::min((part + 1) * EACH, s.rows); ++row) one(row);
        });
        phase.wait(parts);
    }

    void multiply(Phase& phase, const float* x, int64_t in, const Matrix (&matrices)[3], int count, bool is_gated) const {
        Linear work{x, s.rows, in, in, {matrices[0], matrices[1], matrices[2]}, count, is_gated};
        const int64_t parts = work.cut(s.threads);
        phase.take_parts(parts, [&](int64_t part, int64_t following) { work.run(part, following); });
        phase.wait(parts);
    }

    void attend(Phase& phase, const Pages& pool) const {
        const Attention work{wide, wide_size, pool, own, prompts, s.prompt_of_row, narrow, m.heads / m.kv_heads, m.scaling, order, tasks};
        const int64_t parts = (int64_t)tasks.size();
        phase.take_parts(parts, [&](int64_t part, int64_t) { work.run(part); });
        phase.wait(parts);
    }

    void enter_layer(int64_t l, int64_t row) const {
        if (l) return add_and_normalize(m.layers[l].norm_in, row, narrow);
        float* to = residual + row * m.hidden;
        std::copy_n(m.embedding + s.tokens[row] * m.hidden, m.hidden, to);
        normalize(to, nullptr, m.layers[0].norm_in, narrow + row * m.hidden, m.hidden, m.eps);
    }

    void add_and_normalize(const float* weight, int64_t row, float* out) const {
        const int64_t at = row * m.hidden;
        normalize(branch + at, residual + at, weight, out + at, m.hidden, m.eps);
    }

    // The row's query in place, its key and value as its newest token in the pages.
    void rotate_and_store(const Layer& layer, const Pages& pool, int64_t row) const {
        const float *cos = s.cos + angle(row) * m.size, *sin = s.sin + angle(row) * m.size;
        float *query = wide + row * wide_size, *key = query + query_size, *value = key + kv_size;
        for (int64_t h = 0; h < m.heads + m.kv_heads; ++h) {
            float* head = query + h * m.size;
            const float* norm = h < m.heads ? layer.query_norm : layer.key_norm;
            if (norm) normalize(head, nullptr, norm, head, m.size, m.eps);
            rotate(head, cos, sin, m.size);
        }
        for (int64_t h = 0; h < m.kv_heads; ++h) {
            const int64_t at = pool.offset(s.tables + row * s.row_pages, s.lengths[row] - 1, h);
            std::copy_n(key + h * m.size, m.size, pool.keys + at);
            std::copy_n(value + h * m.size, m.size, pool.values + at);
        }
    }
};

}  // namespace
