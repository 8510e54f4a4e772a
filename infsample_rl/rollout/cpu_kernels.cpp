// Decode-step kernels in float32, compiled at first use and bound by cpu_kernels.py, which checks every argument.
//
// A row's result does not depend on the batch around it, on its place in it, or on the number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include "cpu_attention.h"
#include "cpu_vectors.h"

namespace {

struct Linear {
    const float *x, *weight, *bias;
    float* out;
    int64_t rows, x_stride, in, outs, strip;  // strip: weight rows in one part
    std::atomic<int64_t> next{0};

    void operator()() {
        const int64_t parts = (outs + strip - 1) / strip;
        int64_t part = next++;
        while (part < parts) {
            const int64_t following = next++;  // claimed early: its weights are prefetched while this part is computed
            for (int64_t i = 0; i < strip && part * strip + i < outs; i += GROUP) {
                const bool last = i + GROUP >= strip;
                const int64_t ahead = last ? following * strip : part * strip + i + GROUP;
                four_rows(part * strip + i, ahead + GROUP <= outs ? weight + ahead * in : nullptr);
            }
            part = following;
        }
    }

    // out[:, n .. n + 3]; past the last weight row the last one is computed again and dropped.
    void four_rows(int64_t n, const float* ahead) {
        const float* w[GROUP];
        for (int i = 0; i < GROUP; ++i) w[i] = weight + std::min(n + i, outs - 1) * in;
        const int valid = (int)std::min<int64_t>(GROUP, outs - n);
        const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
        const int each = tiles == 1 ? 4 : tiles <= 3 ? 2 : 1;  // the tiles share out the prefetching of four weight rows
        int fetched = 0;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            const int fetch = ahead && fetched < GROUP ? each : 0;
            float sums[MAX_ROWS * GROUP];
            tile_for(count, fetch)(w, x + first * x_stride, x_stride, in, ahead + fetched * in, sums, GROUP);
            fetched += fetch;
            for (int64_t r = 0; r < count; ++r)
                for (int i = 0; i < valid; ++i) out[(first + r) * outs + n + i] = sums[r * GROUP + i] + (bias ? bias[n + i] : 0.0f);
        }
    }
};

// x[i][j] / rms(x[i][j]) * weight, of x [rows, heads, size]; with a residual: residual += x first, and its norm.
void normalize(const float* x, float* residual, const float* weight, float* out, int64_t size, float eps) {
    if (residual) {
        for (int64_t k = 0; k < size; ++k) residual[k] += x[k];
        x = residual;
    }
    vec squares = {};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) squares = fmadd(load(x + k), load(x + k), squares);
    if (k < size) squares = fmadd(load_some(x + k, size - k), load_some(x + k, size - k), squares);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)size + eps);
    for (k = 0; k < size; ++k) out[k] = weight[k] * (x[k] * scale);
}

// x cos + rotate_half(x) sin, as transformers' Llama does
void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t k = 0; k < half; ++k) {
        const float a = x[k], b = x[k + half];
        out[k] = a * cos[k] - b * sin[k];
        out[k + half] = b * cos[k + half] + a * sin[k + half];
    }
}

// gate * sigmoid(gate) * up
inline vec gated(vec gate, vec up) {
    const vec bounded = -gate < splat(88.0f) ? -gate : splat(88.0f);
    return gate / (splat(1.0f) + exp_of(bounded)) * up;
}

// Calls one(row) for every row, on threads where there is enough to do.
template <class One>
void for_rows(int64_t rows, int64_t row_size, int threads, One one) {
    std::atomic<int64_t> next{0};
    auto work = [&] { for (int64_t row = next++; row < rows; row = next++) one(row); };
    run_parts(work, rows, rows * row_size < 65536 ? 1 : threads);
}

}  // namespace

extern "C" {

void infsample_use_openmp(void* gomp) { gomp_parallel = reinterpret_cast<Parallel>(gomp); }

void infsample_linear(
    const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t x_stride, int64_t in, int64_t outs, int threads) {
    const int64_t strip = std::clamp<int64_t>(outs / (threads * 4) / GROUP * GROUP, GROUP, 32);
    Linear work{x, weight, bias, out, rows, x_stride, in, outs, strip};
    run_parts(work, (outs + strip - 1) / strip, threads);
}

// 0; 3 i + 1, + 2, + 3: row i, prompt i or prompt_of_row[i] is out of range.
int64_t infsample_paged_attention(
    const float* query, float* keys, float* values, const int32_t* row_tables, const int32_t* row_lengths, const int32_t* prompt_tables,
    const int32_t* prompt_lengths, const int32_t* prompt_of_row, float* out, int64_t rows, int64_t group, int64_t num_prompts, int64_t num_pages,
    int64_t page_size, int64_t kv_heads, int64_t size, int64_t query_stride, int64_t page_stride, int64_t token_stride, int64_t head_stride,
    int64_t max_row_pages, int64_t max_prompt_pages, float scaling, int threads) {
    const Pages pool{keys, values, num_pages, page_size, kv_heads, size, page_stride, token_stride, head_stride};
    const Part own{row_tables, row_lengths, max_row_pages}, prompts{prompt_tables, prompt_lengths, max_prompt_pages};
    if (const int64_t bad = first_bad(own, pool, rows); bad >= 0) return 3 * bad + 1;
    if (const int64_t bad = first_bad(prompts, pool, num_prompts); bad >= 0) return 3 * bad + 2;
    for (int64_t i = 0; i < rows; ++i)
        if (prompt_of_row[i] < 0 || prompt_of_row[i] >= num_prompts) return 3 * i + 3;
    static thread_local std::vector<int32_t> order;  // kept from call to call, so that a step allocates nothing
    static thread_local std::vector<Task> tasks;
    const int64_t most = std::clamp<int64_t>(rows * kv_heads / (4 * threads), 1, 16);
    plan_tasks(prompt_of_row, rows, kv_heads, most, order, tasks);
    Attention work{query, query_stride, pool, own, prompts, prompt_of_row, out, group, scaling, order, tasks};
    run_parts(work, (int64_t)tasks.size(), threads);
    return 0;
}

// Rotates query [rows, heads, size] in place and writes rotated key and value [rows, kv_heads, size] as each row's newest token.
int64_t infsample_rotate_and_store(
    float* query, const float* key, const float* value, const float* cos, const float* sin, float* keys, float* values, const int32_t* row_tables,
    const int32_t* row_lengths, int64_t rows, int64_t heads, int64_t num_pages, int64_t page_size, int64_t kv_heads, int64_t size,
    int64_t query_stride, int64_t key_stride, int64_t value_stride, int64_t page_stride, int64_t token_stride, int64_t head_stride,
    int64_t max_pages) {
    const Pages pool{keys, values, num_pages, page_size, kv_heads, size, page_stride, token_stride, head_stride};
    if (const int64_t bad = first_bad({row_tables, row_lengths, max_pages}, pool, rows); bad >= 0) return 3 * bad + 1;
    for (int64_t row = 0; row < rows; ++row) {
        const float *row_cos = cos + row * size, *row_sin = sin + row * size;
        float* row_query = query + row * query_stride;
        for (int64_t h = 0; h < heads; ++h) rotate(row_query + h * size, row_cos, row_sin, row_query + h * size, size);
        for (int64_t h = 0; h < kv_heads; ++h) {
            const int64_t at = pool.offset(row_tables + row * max_pages, row_lengths[row] - 1, h);
            rotate(key + row * key_stride + h * size, row_cos, row_sin, keys + at, size);
            std::copy_n(value + row * value_stride + h * size, size, values + at);
        }
    }
    return 0;
}

void infsample_rms_norm(
    const float* x, float* residual, const float* weight, float* out, int64_t rows, int64_t heads, int64_t size, int64_t row_stride,
    int64_t head_stride, float eps, int threads) {
    for_rows(rows, heads * size, threads, [=](int64_t row) {
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = (row * heads + h) * size;
            normalize(x + row * row_stride + h * head_stride, residual ? residual + at : nullptr, weight, out + at, size, eps);
        }
    });
}

void infsample_silu_mul(
    const float* gate, const float* up, float* out, int64_t rows, int64_t size, int64_t gate_stride, int64_t up_stride, int threads) {
    for_rows(rows, 4 * size, threads, [=](int64_t row) {
        const float *row_gate = gate + row * gate_stride, *row_up = up + row * up_stride;
        float* row_out = out + row * size;
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) store(row_out + k, gated(load(row_gate + k), load(row_up + k)));
        if (const int64_t rest = size - k; rest > 0) {
            const vec v = gated(load_some(row_gate + k, rest), load_some(row_up + k, rest));
            std::memcpy(row_out + k, &v, rest * sizeof(float));
        }
    });
}

}  // extern "C"
