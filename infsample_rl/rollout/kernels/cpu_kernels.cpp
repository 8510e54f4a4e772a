// Decode-step kernels in float32, compiled at first use and bound by cpu_kernels.py and cpu_decoder.py, which check every argument.
//
// A row's result does not depend on the batch around it, on its place in it, or on the number of threads.
#include <algorithm>
#include <cstdint>
#include <vector>
#include "cpu_attention.h"
#include "cpu_decoder.h"
#include "cpu_drafts.h"
#include "cpu_linear.h"
#include "cpu_threads.h"

namespace {

// Kept from call to call, so that a step allocates nothing.
thread_local std::vector<int32_t> order;
thread_local std::vector<Task> tasks;
thread_local std::vector<Phase> phases;

// Rows of one prompt that share a pass over its KV: as many as leave every thread four tasks.
int64_t rows_at_once(int64_t rows, int64_t kv_heads, int64_t threads) { return std::clamp<int64_t>(rows * kv_heads / (4 * threads), 1, 16); }

// one(row) for every row, on threads where there is enough to do.
template <class One>
void run_rows(int64_t rows, int64_t row_work, int64_t threads, One one) {
    run_parts(rows, rows * row_work < 65536 ? 1 : threads, [&](int64_t row, int64_t) { one(row); });
}

}  // namespace

extern "C" {

void infsample_use_openmp(void* gomp) { gomp_parallel = reinterpret_cast<Parallel>(gomp); }

void infsample_linear(
    const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t x_stride, int64_t in, int64_t outs, int threads) {
    Linear work{x, rows, x_stride, in, {{weight, bias, out, outs, outs}}, 1, false};
    run_parts(work.cut(threads), threads, [&](int64_t part, int64_t following) { work.run(part, following); });
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
    plan_tasks(prompt_of_row, rows, kv_heads, rows_at_once(rows, kv_heads, threads), order, tasks);
    const Attention work{query, query_stride, pool, own, prompts, prompt_of_row, out, group, scaling, order, tasks};
    run_parts((int64_t)tasks.size(), threads, [&](int64_t part, int64_t) { work.run(part); });
    return 0;
}

void infsample_rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t size, float eps, int threads) {
    run_rows(rows, size, threads, [=](int64_t row) { normalize(x + row * size, nullptr, weight, out + row * size, size, eps); });
}

void infsample_silu_mul(const float* gate, const float* up, float* out, int64_t rows, int64_t size, int threads) {
    run_rows(rows, 4 * size, threads, [=](int64_t row) {
        const float *row_gate = gate + row * size, *row_up = up + row * size;
        float* to = out + row * size;
        for_vectors(size, [=](int64_t k, auto get, auto put) { put(to + k, gated(get(row_gate + k), get(row_up + k))); });
    });
}

// Floats of workspace that one row needs.
int64_t infsample_workspace_floats(const Model* model) { return Decode::workspace_floats(*model); }

// 0, or what Decode::find_bad found before anything was read or written.
int64_t infsample_decode(const Model* model, const Step* step) {
    const Model& m = *model;
    const Step& s = *step;
    plan_tasks(s.prompt_of_row, s.rows, m.kv_heads, rows_at_once(s.rows, m.kv_heads, s.threads), order, tasks);
    const int64_t num_phases = Decode::num_phases(m), token_stride = m.kv_heads * m.size, page_stride = s.page_size * token_stride;
    if ((int64_t)phases.size() < num_phases) phases = std::vector<Phase>(num_phases);
    for (Phase& phase : phases) phase.next.store(0, std::memory_order_relaxed), phase.done.store(0, std::memory_order_relaxed);
    const Pages pages{s.store, s.store + s.num_pages * page_stride, s.num_pages, s.page_size, m.kv_heads, m.size, page_stride, token_stride, m.size};
    const Part own{s.tables, s.lengths, s.row_pages}, prompts{s.prompt_tables, s.prompt_lengths, s.prompt_pages};
    Decode work{m, s, pages, own, prompts, order, tasks, phases.data()};
    if (const int64_t bad = work.find_bad()) return bad;
    run_on_threads(work, s.threads);
    return 0;
}

Drafts* infsample_open_drafts(const int32_t* prompt, int64_t count) { return new Drafts(prompt, count); }

void infsample_close_drafts(Drafts* drafts) { delete drafts; }

int64_t infsample_bytes_of_drafts(const Drafts* drafts) { return drafts->bytes(); }

int64_t infsample_open_text(Drafts* drafts) { return drafts->open(); }

void infsample_extend_text(Drafts* drafts, int64_t text, const int32_t* tokens, int64_t count) { drafts->extend(text, tokens, count); }

int64_t infsample_draft(Drafts* drafts, int64_t text, const int32_t* newest, int64_t count, Drafts* others, int64_t most, int32_t* tokens, int32_t* matches) {
    drafts->extend(text, newest, count);
    return drafts->draft(text, *others, most, tokens, matches);
}

}  // extern "C"
