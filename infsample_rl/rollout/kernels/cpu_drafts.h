// What may come next in a sample, by what came after the same tokens before: in its prompt, its siblings and
// itself, or in samples of other prompts.
//
// Hash chains as in LZ77: every place whose last 1, 2 or 5 tokens are equal is linked to the one before it. The longest
// match wins, among equally long ones the token that most of them go on with, then the newest.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

class Drafts {
public:
    explicit Drafts(const int32_t* prompt, int64_t count) : prompt(prompt, prompt + count) { texts.push_back({}); }

    // A new sample's number.
    int64_t open() {
        texts.push_back({});
        return (int64_t)texts.size() - 1;
    }

    // `count` more tokens of text number `text`; the places that they follow are linked.
    void extend(int64_t text, const int32_t* tokens, int64_t count) {
        if (!prompt_linked) {
            prompt_linked = true;
            for (int64_t end = FIRST; end < (int64_t)prompt.size(); ++end) link(0, end);
        }
        for (int64_t i = 0; i < count; ++i) {
            texts[text].push_back(tokens[i]);
            const int64_t end = length(text) - 1;
            if (end >= FIRST) link(text, end);
        }
    }

    // Up to `most` tokens that may follow the text, each with the length of the match that it was found by; how many. Where
    // these texts say little, `others` are asked too: a match there that is longer by more than LONGER counts, as less
    // than 0.
    int64_t draft(int64_t text, Drafts& others, int64_t most, int32_t* tokens, int32_t* matches) {
        const int64_t end = length(text), known = std::min<int64_t>(end, LONGEST);
        tail.clear();
        for (int64_t i = end - known; i < end; ++i) tail.push_back(at(text, i));
        others.tail = tail;
        matching.clear();
        const int64_t found = follow_tail(most, tokens, matches), longest = found ? matches[0] : 0;
        if (longest >= SURE) return found;
        others.matching.clear();
        others.find();
        if (others.matching.empty() || (found && others.matched <= longest + LONGER)) return found;
        const int64_t of_others = others.follow_tail(most, tokens, matches);
        for (int64_t i = 0; i < of_others; ++i) matches[i] = -matches[i];
        return of_others;
    }
    int64_t bytes() const {
        int64_t sum = (int64_t)(prompt.capacity() * sizeof(int32_t) + places.capacity() * sizeof(Place));
        for (const Chains& each : chains) sum += (int64_t)(each.heads.capacity() * sizeof(int32_t));
        for (const std::vector<int32_t>& text : texts) sum += (int64_t)(text.capacity() * sizeof(int32_t) + sizeof(text));
        return sum;
    }

private:
    static constexpr int64_t LONGEST = 24, MOST_TRIED = 48, KINDS = 3, TOKENS[KINDS] = {1, 2, 5};
    static constexpr int64_t FIRST = TOKENS[KINDS - 1];  // place that is linked: enough tokens come before it
    static constexpr int64_t SURE = 5, LONGER = 2;  // tokens
    struct Place {  // token `end` of a text, and the place before it of equal hash, by so many TOKENS; -1: none
        int32_t text, end, before[KINDS];
    };
    struct Chains {
        std::vector<int32_t> heads = std::vector<int32_t>(64, -1);  // newest place by hash
    };

    struct Match {  // token `end` of a text comes after the tail there
        int32_t text, end;
    };

    std::vector<int32_t> prompt, tail;
    std::vector<Match> matching;  // those of the longest match
    int64_t matched = 0;          // its length
    std::vector<std::vector<int32_t>> texts;  // without the prompt; the first is the prompt alone
    std::vector<Place> places;
    Chains chains[KINDS];
    bool prompt_linked = false;

    int64_t follow_tail(int64_t most, int32_t* tokens, int32_t* matches) {
        for (int64_t drafted = 0; drafted < most; ++drafted) {
            if (matching.empty()) find();
            if (matching.empty()) return drafted;
            tokens[drafted] = likeliest(), matches[drafted] = (int32_t)matched;
            follow(tokens[drafted]);
        }
        return most;
    }

    int64_t length(int64_t text) const { return (int64_t)(prompt.size() + texts[text].size()); }
    int32_t at(int64_t text, int64_t index) const {
        const int64_t own = index - (int64_t)prompt.size();
        return own < 0 ? prompt[index] : texts[text][own];
    }

    template <class Get>
    size_t bucket(int kind, Get get) const {  // of the tokens get(1), get(2), ... back from the end
        uint64_t hash = 0x9E3779B97F4A7C15ull;
        for (int64_t back = 1; back <= TOKENS[kind]; ++back) hash = (hash ^ (uint32_t)get(back)) * 0xBF58476D1CE4E5B9ull, hash ^= hash >> 29;
        return hash & (chains[kind].heads.size() - 1);
    }

    void link(int64_t text, int64_t end) {
        if (places.size() >= chains[0].heads.size()) grow();
        places.push_back({(int32_t)text, (int32_t)end, {-1, -1, -1}});
        put((int32_t)places.size() - 1);
    }

    void put(int32_t number) {
        Place& place = places[number];
        for (int kind = 0; kind < KINDS; ++kind) {
            int32_t& head = chains[kind].heads[bucket(kind, [&](int64_t back) { return at(place.text, place.end - back); })];
            place.before[kind] = head;
            head = number;
        }
    }

    void grow() {
        for (Chains& each : chains) each.heads.assign(2 * each.heads.size(), -1);
        for (int32_t number = 0; number < (int32_t)places.size(); ++number) put(number);
    }

    // The places where the longest match of the tail ends; none if no token is known.
    void find() {
        const int64_t size = (int64_t)tail.size();
        const auto back_of_tail = [&](int64_t back) { return tail[size - back]; };
        for (int kind = KINDS - 1; kind >= 0 && matching.empty(); --kind) {
            if (size < TOKENS[kind]) continue;
            matched = TOKENS[kind];
            int64_t tried = 0;
            for (int32_t number = chains[kind].heads[bucket(kind, back_of_tail)]; number >= 0 && tried < MOST_TRIED; number = places[number].before[kind], ++tried) {
                const Place& place = places[number];
                int64_t equal = 0;
                while (equal < std::min<int64_t>({LONGEST, size, place.end}) && at(place.text, place.end - 1 - equal) == back_of_tail(equal + 1)) ++equal;
                if (equal < matched) continue;
                if (equal > matched) matched = equal, matching.clear();
                matching.push_back({place.text, place.end});
            }
        }
    }

    // The token that most of the matches go on with, the first of equally many.
    int32_t likeliest() const {
        int32_t found[MOST_TRIED], counts[MOST_TRIED];
        int64_t kinds = 0;
        for (const Match& match : matching) {
            const int32_t following = at(match.text, match.end);
            int64_t kind = 0;
            while (kind < kinds && found[kind] != following) ++kind;
            if (kind == kinds) found[kinds] = following, counts[kinds++] = 0;
            ++counts[kind];
        }
        return found[std::max_element(counts, counts + kinds) - counts];
    }

    // The tail goes on with `token`: the matches that do so too are a token longer.
    void follow(int32_t token) {
        tail.push_back(token);
        int64_t kept = 0;
        for (const Match match : matching)
            if (at(match.text, match.end) == token && match.end + 1 < length(match.text)) matching[kept++] = {match.text, match.end + 1};
        matching.resize(kept);
        matched = std::min<int64_t>(matched + 1, LONGEST);
    }
};

}  // namespace
