// An index over one request's tokens: where did the last n tokens occur before, and what followed?
//
// Twin and specification: vllm_specrollout/drafters/ngram_naive.py; the two agree to the bit. All probabilities are
// fixed-point integers, so that neither the compiler nor the CPU can tell them, or two tensor-parallel ranks, apart.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ngram_trie.h"

namespace specrollout {

// Append-only. Not thread-safe: one caller at a time per index.
class NgramIndex {
 public:
  // Throws std::invalid_argument unless 1 <= min_match <= max_match and 1 <= max_matches.
  NgramIndex(int min_match, int max_match, int max_matches);

  void Append(const int32_t* token_ids, size_t count);
  // Makes the index hold exactly these tokens: appends what is new, or starts over where what it holds is no prefix.
  // Only the last `kSyncWindow` tokens it holds are compared. Returns false when it started over.
  bool Sync(const int32_t* token_ids, size_t count);
  size_t size() const { return tokens_.size(); }

  // Clears `draft` and fills it.
  void Propose(int max_nodes, int max_depth, bool chain, Trie* trie, Draft* draft) const;

  // Throws std::logic_error with the reason if a stored invariant is broken.
  void CheckIntegrity() const;

 private:
  static constexpr size_t kSyncWindow = 64;

  // All n-grams of one length n that some token follows. A place p stands for tokens [p - n, p).
  struct Length {
    int n;
    // open-addressing hash table of latest places, 0 = free; a power of two, at most half full
    std::vector<int32_t> latest;
    size_t num_distinct = 0;
    // place -> the place before it with the same n-gram, 0 = none; indexed by place, so its size is size()
    std::vector<int32_t> previous;
  };

  void Clear();
  void IndexEnd();
  void Grow(Length* length);
  // The slot of `latest` that holds the n-gram ending at `end`, or the free slot where it belongs.
  size_t Slot(const Length& length, size_t end, uint64_t hash) const;
  uint64_t Hash(size_t end, int n) const;
  int AddPlaces(const Length& length, int max_depth, Trie* trie) const;
  void CheckLength(const Length& length) const;

  int min_match_;
  int max_match_;
  int max_matches_;
  std::vector<int32_t> tokens_;
  // [max_match - min_match + 1] shortest first
  std::vector<Length> lengths_;
};

}  // namespace specrollout
