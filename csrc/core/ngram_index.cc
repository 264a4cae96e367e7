#include "core/ngram_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specrollout {
namespace {

constexpr size_t kFirstCapacity = 64;
constexpr int kMostMatch = 256;  // each length has a table of its own
// the newest place of a length counts 3, the others 2; see ngram_naive.py
constexpr int kNewestWeight = 3;
constexpr int kWeight = 2;

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

void Require(bool condition, const std::string& reason) {
  if (!condition) throw std::logic_error("n-gram index: " + reason);
}

}  // namespace

NgramIndex::NgramIndex(int min_match, int max_match, int max_matches)
    : min_match_(min_match), max_match_(max_match), max_matches_(max_matches) {
  if (min_match < 1 || max_match < min_match || max_match > kMostMatch || max_matches < 1) {
    throw std::invalid_argument("n-gram index: need 1 <= min_match <= max_match <= 256 and 1 <= max_matches");
  }
  Clear();
}

void NgramIndex::Clear() {
  tokens_.clear();
  lengths_.clear();
  for (int n = min_match_; n <= max_match_; ++n) {
    lengths_.push_back({n, std::vector<int32_t>(kFirstCapacity, 0), 0, {}});
  }
}

uint64_t NgramIndex::Hash(size_t end, int n) const {
  uint64_t hash = 0;
  for (int back = 1; back <= n; ++back) hash = Mix(hash, tokens_[end - back]);
  return hash;
}

size_t NgramIndex::Slot(const Length& length, size_t end, uint64_t hash) const {
  const size_t mask = length.latest.size() - 1;
  // the high bits are the well mixed ones
  size_t slot = (hash >> 24) & mask;
  const int32_t* wanted = tokens_.data() + end - length.n;
  while (const int32_t place = length.latest[slot]) {
    if (std::equal(wanted, wanted + length.n, tokens_.data() + place - length.n)) break;
    slot = (slot + 1) & mask;
  }
  return slot;
}

void NgramIndex::Grow(Length* length) {
  std::vector<int32_t> old(length->latest.size() * 2, 0);
  old.swap(length->latest);
  const size_t mask = length->latest.size() - 1;
  for (const int32_t place : old) {
    if (place == 0) continue;
    // the n-grams in the table differ, so the first free slot is the place's own
    size_t slot = (Hash(place, length->n) >> 24) & mask;
    while (length->latest[slot] != 0) slot = (slot + 1) & mask;
    length->latest[slot] = place;
  }
}

// Called when a token is about to follow the present end: only then do the n-grams ending here have a continuation.
void NgramIndex::IndexEnd() {
  const size_t end = tokens_.size();
  uint64_t hash = 0;
  int hashed = 0;
  for (Length& length : lengths_) {
    int32_t before = 0;
    if (static_cast<size_t>(length.n) <= end) {
      while (hashed < length.n) hash = Mix(hash, tokens_[end - ++hashed]);
      int32_t& latest = length.latest[Slot(length, end, hash)];
      before = latest;
      latest = static_cast<int32_t>(end);
      if (before == 0 && ++length.num_distinct * 2 > length.latest.size()) Grow(&length);
    }
    length.previous.push_back(before);
  }
}

void NgramIndex::Append(const int32_t* token_ids, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    IndexEnd();
    tokens_.push_back(token_ids[i]);
  }
}

bool NgramIndex::Sync(const int32_t* token_ids, size_t count) {
  const size_t held = size();
  const size_t window = std::min(held, kSyncWindow);
  const bool is_prefix =
      held <= count && std::equal(tokens_.end() - window, tokens_.end(), token_ids + (held - window));
  if (!is_prefix) Clear();
  Append(token_ids + size(), count - size());
  return is_prefix;
}

// Counts the most recent places that share exactly the last n tokens (n at least, for the longest length).
int NgramIndex::AddPlaces(const Length& length, int max_depth, Trie* trie) const {
  const size_t end = size();
  const size_t n = length.n;
  int found = 0;
  int32_t place = length.latest[Slot(length, end, Hash(end, length.n))];
  for (; place != 0 && found < max_matches_; place = length.previous[place]) {
    const size_t at = place;
    const bool is_longer = length.n < max_match_ && at > n && end > n && tokens_[at - n - 1] == tokens_[end - n - 1];
    if (is_longer) continue;
    const int count = static_cast<int>(std::min<size_t>(max_depth, end - at));
    trie->Add(tokens_.data() + at, count, found == 0 ? kNewestWeight : kWeight);
    ++found;
  }
  return found;
}

void NgramIndex::Propose(int max_nodes, int max_depth, bool chain, Trie* trie, Draft* draft) const {
  draft->Clear();
  if (max_nodes <= 0 || max_depth <= 0) return;
  trie->Clear();
  int found = 0;
  for (auto length = lengths_.rbegin(); length != lengths_.rend() && found < max_matches_; ++length) {
    if (static_cast<size_t>(length->n) > size()) continue;
    trie->BeginLength();
    found += AddPlaces(*length, max_depth, trie);
    trie->EndLength(length->n);
  }
  if (chain) {
    trie->BestChain(max_nodes, draft);
  } else {
    trie->BestFirst(max_nodes, draft);
  }
}

void NgramIndex::CheckIntegrity() const {
  Require(lengths_.size() == static_cast<size_t>(max_match_ - min_match_ + 1), "a length is missing");
  for (const Length& length : lengths_) CheckLength(length);
}

void NgramIndex::CheckLength(const Length& length) const {
  const std::string name = " (n = " + std::to_string(length.n) + ")";
  const size_t n = length.n;
  Require(length.previous.size() == size(), "one entry per place is kept" + name);
  Require((length.latest.size() & (length.latest.size() - 1)) == 0, "the table is a power of two" + name);
  Require(length.num_distinct * 2 <= length.latest.size(), "the table is at most half full" + name);
  size_t heads = 0;
  size_t reached = 0;
  for (size_t slot = 0; slot < length.latest.size(); ++slot) {
    int32_t place = length.latest[slot];
    if (place == 0) continue;
    ++heads;
    Require(Slot(length, place, Hash(place, length.n)) == slot, "an n-gram is found where it is stored" + name);
    for (; place != 0; place = length.previous[place]) {
      const size_t at = place;
      ++reached;
      Require(at >= n && at < size(), "a place has n tokens before it and one after" + name);
      const int32_t before = length.previous[at];
      if (before == 0) continue;
      Require(before < place && static_cast<size_t>(before) >= n, "places are chained backwards" + name);
      Require(std::equal(&tokens_[at - n], tokens_.data() + at, &tokens_[before - n]),
              "chained places have the same n-gram" + name);
    }
  }
  Require(heads == length.num_distinct, "num_distinct counts the heads" + name);
  // chains are disjoint (each strictly decreases, each holds one n-gram), so equal counts mean that none is missing
  Require(reached == (size() > n ? size() - n : 0), "every place is on one chain" + name);
}

}  // namespace specrollout
