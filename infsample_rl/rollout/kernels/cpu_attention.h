// Two-part paged attention over the KV pool: one online softmax over a row's prompt tokens, then over its own.
//
// The loop over a prompt's blocks is the outer one and its rows the inner one, so its KV comes from memory once for all of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "cpu_vectors.h"

namespace {

struct Pages {
    float *keys, *values;  // [pages, page_size, kv_heads, size]
    int64_t num_pages, page_size, kv_heads, size;
    int64_t page_stride, token_stride, head_stride;

    // Of a token, by its index in the row or prompt that `table` belongs to.
    int64_t offset(const int32_t* table, int64_t token, int64_t head) const {
        return table[token / page_size] * page_stride + token % page_size * token_stride + head * head_stride;
    }
};
struct Part {  // the prompt part or the rows' own: page tables [count, max_pages] and token counts
    const int32_t *tables, *lengths;
    int64_t max_pages;
};
struct Task {
    int64_t first, count, head;  // rows order[first .. first + count - 1], all of one prompt
};

struct Attention {
    const float* query;
    int64_t query_stride;  // of a row
    Pages pool;
    Part own, prompts;
    const int32_t* prompt_of_row;
    float* out;
    int64_t group;  // query heads per kv head
    float scaling;
    const std::vector<int32_t>& order;
    const std::vector<Task>& tasks;

    // One task's state, per query (row and query head): scaled query and sums padded to `width`, softmax weights' sum by lane, maximum.
    struct State {
        int64_t width;
        float *query, *sums, *weight_sums, *top, *weights;
    };
    struct Block {  // where up to TOKENS tokens lie; past `count` the last is repeated
        const float *keys[TOKENS], *values[TOKENS];
        int64_t count;
    };

    void run(int64_t number) const {
        static thread_local std::vector<float> memory;
        const Task& task = tasks[number];
        const int64_t queries = task.count * group;
        State s = make_state(queries, memory);
        for (int64_t i = 0; i < task.count; ++i) load_queries(s, task, i);
        const int32_t prompt = prompt_of_row[order[task.first]];
        Block block = find_block(prompts, prompt, task.head, 0);
        for (int64_t t = 0; t < prompts.lengths[prompt]; t += TOKENS) {
            const Block following = next_block(task, t, prompts, prompt, 0);
            attend(s, block, 0, queries);
            block = following;
        }
        for (int64_t i = 0; i < task.count; ++i) {
            const int32_t row = order[task.first + i];
            for (int64_t t = 0; t < own.lengths[row]; t += TOKENS) {
                const Block following = next_block(task, t, own, row, i + 1);
                attend(s, block, i * group, group);
                block = following;
            }
            for (int64_t n = 0; n < group; ++n) write_out(s, i * group + n, out + ((row * pool.kv_heads + task.head) * group + n) * pool.size);
        }
    }

    // The block after the one at `t`: of the same tokens, or of the task's row i, or (after all) any.
    Block next_block(const Task& task, int64_t t, const Part& part, int64_t index, int64_t i) const {
        if (t + TOKENS < part.lengths[index]) return find_block(part, index, task.head, t + TOKENS);
        return find_block(own, order[task.first + (i < task.count ? i : 0)], task.head, 0);
    }

    State make_state(int64_t queries, std::vector<float>& memory) const {
        const int64_t width = (pool.size + LANES - 1) / LANES * LANES;
        const size_t needed = queries * (2 * width + LANES + TOKENS + 1) + 16;
        if (memory.size() < needed) memory.resize(needed);
        float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
        State s{width, at, at + queries * width, nullptr, nullptr, nullptr};
        s.weights = s.sums + queries * width;
        s.weight_sums = s.weights + queries * TOKENS;
        s.top = s.weight_sums + queries * LANES;
        std::fill(s.query, s.weights, 0.0f);
        std::fill(s.weight_sums, s.top, 0.0f);
        std::fill(s.top, s.top + queries, -INFINITY);
        return s;
    }

    void load_queries(State& s, const Task& task, int64_t i) const {
        const float* from = query + order[task.first + i] * query_stride + task.head * group * pool.size;
        for (int64_t n = 0; n < group; ++n)
            for (int64_t d = 0; d < pool.size; ++d) s.query[(i * group + n) * s.width + d] = from[n * pool.size + d] * scaling;
    }

    // The tokens from `start` on; their prefetching has begun.
    Block find_block(const Part& part, int64_t index, int64_t head, int64_t start) const {
        Block block;
        block.count = std::min<int64_t>(TOKENS, part.lengths[index] - start);
        const int32_t* table = part.tables + index * part.max_pages;
        int64_t page = start / pool.page_size, slot = start % pool.page_size;
        for (int64_t i = 0; i < TOKENS; ++i) {
            const int64_t at = table[page] * pool.page_stride + slot * pool.token_stride + head * pool.head_stride;
            block.keys[i] = pool.keys + at;
            block.values[i] = pool.values + at;
            if (i < block.count)
                for (int64_t d = 0; d < pool.size; d += 16) {
                    __builtin_prefetch(block.keys[i] + d, 0, 2);
                    __builtin_prefetch(block.values[i] + d, 0, 2);
                }
            if (i + 1 < block.count && ++slot == pool.page_size) ++page, slot = 0;
        }
        return block;
    }

    void attend(State& s, const Block& block, int64_t first, int64_t queries) const {
        for (int64_t q = first; q < first + queries; q += MAX_ROWS) {
            const int64_t rows = std::min<int64_t>(MAX_ROWS, first + queries - q);
            const DotTile tile = tile_for(rows, 0);
            for (int64_t t = 0; t < block.count; t += GROUP)
                tile(block.keys + t, s.query + q * s.width, s.width, pool.size, nullptr, s.weights + q * TOKENS + t, TOKENS);
        }
        for (int64_t q = first; q < first + queries; ++q) soften(s, q, block.count);
        for (int64_t q = first; q < first + queries;) {
            const int64_t left = first + queries - q, now = left >= 6 ? 6 : left >= 3 ? 3 : 1;
            if (now == 6) add_values<6>(s, block, q);
            else if (now == 3) add_values<3>(s, block, q);
            else add_values<1>(s, block, q);
            q += now;
        }
    }

    // Scores of one query become weights; what was summed under a smaller maximum is scaled down.
    __attribute__((noinline)) void soften(State& s, int64_t q, int64_t count) const {
        float* weights = s.weights + q * TOKENS;
        for (int64_t t = count; t < TOKENS; ++t) weights[t] = -INFINITY;
        float top = s.top[q];
        for (int64_t t = 0; t < TOKENS; t += LANES) top = std::max(top, max_of(load(weights + t)));
        vec sum = load(s.weight_sums + q * LANES);
        if (top > s.top[q]) {
            const vec shrink = exp_of(splat(s.top[q] - top));
            sum = sum * shrink;
            for (int64_t d = 0; d < s.width; d += LANES) store(s.sums + q * s.width + d, load(s.sums + q * s.width + d) * shrink);
            s.top[q] = top;
        }
        for (int64_t t = 0; t < TOKENS; t += LANES) {
            const vec weight = exp_of(load(weights + t) - splat(top));
            store(weights + t, weight);
            sum = sum + weight;
        }
        store(s.weight_sums + q * LANES, sum);
    }

    // Adds weights x values to the sums of some queries, two vectors of each at a time as far as they go.
    template <int Queries>
    void add_values(State& s, const Block& block, int64_t q) const {
        int64_t d = 0;
        for (; d + 2 * LANES <= pool.size; d += 2 * LANES) add_vectors<Queries, 2>(s, block, q, d, 0);
        for (; d < pool.size; d += LANES) add_vectors<Queries, 1>(s, block, q, d, std::max<int64_t>(0, d + LANES - pool.size));
    }

    template <int Queries, int Vectors>
    void add_vectors(State& s, const Block& block, int64_t q, int64_t d, int64_t missing) const {
        vec sum[Queries][Vectors];
        float *sums = s.sums + q * s.width + d, *weights = s.weights + q * TOKENS;
#pragma GCC unroll 12
        for (int i = 0; i < Queries * Vectors; ++i) sum[i / Vectors][i % Vectors] = load(sums + i / Vectors * s.width + i % Vectors * LANES);
        for (int64_t t = 0; t < block.count; ++t) {
            vec value[Vectors];
            const float* from = block.values[t] + d;
            for (int v = 0; v < Vectors; ++v) value[v] = missing ? load_some(from, LANES - missing) : load(from + v * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < Queries; ++i) {
                const vec weight = splat(weights[i * TOKENS + t]);
                for (int v = 0; v < Vectors; ++v) sum[i][v] = fmadd(weight, value[v], sum[i][v]);
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < Queries * Vectors; ++i) store(sums + i / Vectors * s.width + i % Vectors * LANES, sum[i / Vectors][i % Vectors]);
    }

    void write_out(const State& s, int64_t q, float* to) const {
        const vec share = splat(1.0f / sum_of(load(s.weight_sums + q * LANES)));
        for (int64_t d = 0; d < pool.size; d += LANES) store_some(to + d, load(s.sums + q * s.width + d) * share, pool.size - d);
    }
};

// First index whose length or pages are out of range, or -1.
int64_t first_bad(const Part& part, const Pages& pool, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = part.lengths[i];
        if (length < 1 || length > part.max_pages * pool.page_size) return i;
        for (int64_t p = 0; p * pool.page_size < length; ++p)
            if (const int32_t page = part.tables[i * part.max_pages + p]; page < 0 || page >= pool.num_pages) return i;
    }
    return -1;
}

// Rows by prompt in `order`, and tasks of at most `most` rows of one prompt and one kv head.
void plan_tasks(const int32_t* prompt_of_row, int64_t rows, int64_t kv_heads, int64_t most, std::vector<int32_t>& order, std::vector<Task>& tasks) {
    order.resize(rows);
    tasks.clear();
    for (int64_t i = 0; i < rows; ++i) order[i] = (int32_t)i;
    std::sort(order.begin(), order.end(), [=](int32_t a, int32_t b) { return std::pair(prompt_of_row[a], a) < std::pair(prompt_of_row[b], b); });
    for (int64_t first = 0, end; first < rows; first = end) {
        for (end = first + 1; end < rows && end - first < most && prompt_of_row[order[end]] == prompt_of_row[order[first]];) ++end;
        for (int64_t head = 0; head < kv_heads; ++head) tasks.push_back({first, end - first, head});
    }
}

}  // namespace
