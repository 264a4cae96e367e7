// Draft trees that came from a drafter elsewhere, as the engine keeps them: the newest of each request.
// The specification is the naive twin, tests/reference/received.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace specrollout {

// A request's tokens so far.
struct Text {
  const int32_t* tokens;
  int64_t count;
};

// What came for some requests.
struct ArrivedTrees {
  const int64_t* handles;
  const int32_t* positions;   // [trees] tokens that stand before depth 1
  const int32_t* node_start;  // [trees + 1]
  const int32_t* token_ids;
  const int32_t* parents;  // node -> index of its parent within its tree, which is smaller; -1: depth 1
  const uint8_t* ranks;    // which of its parent's choices it is; 0: the first
  const float* log_q;
  size_t num_trees;
};

// What of them may be verified next.
struct FittingTrees {
  std::vector<int32_t> node_start{0};  // [requests + 1]
  std::vector<int32_t> token_ids, parents, is_first;
  std::vector<float> log_q;
};

// Tokens that a drafter was not told of yet.
struct News {
  std::vector<int32_t> index;   // [n] which of the requests asked about
  std::vector<int32_t> counts;  // [n] how many of its last tokens are new
  std::vector<int32_t> token_ids;
};

// How drafts fared, over the positions that the target came to along them.
struct Score {
  int64_t tried = 0;    // positions for which something was drafted
  int64_t matched = 0;  // the first choice was the target's own token
  int64_t covered = 0;  // one of the choices was
};

class Received {
 public:
  static constexpr int kNone = 8;  // rank of a token that no choice was

  // What is wrong with trees that came out of another process; empty: nothing.
  static std::string Misshapen(const ArrivedTrees& trees, int64_t vocab_size);

  // A request that the drafter was told of, with its first `num_told` tokens.
  void Open(int64_t handle, int64_t num_told);
  Score Close(int64_t handle);
  bool Has(int64_t handle) const { return followed_.count(handle) > 0; }
  Score Of(int64_t handle) const;

  // The newest tree of each request takes the place of an older one. Returns how many requests are known.
  size_t Put(const ArrivedTrees& trees);

  // handles, texts, most_nodes, most_depth, is_chain: [count] of each request; a handle that is not open has no tree.
  void Fit(size_t count, const int64_t* handles, const Text* texts, const int32_t* most_nodes,
           const int32_t* most_depth, const bool* is_chain, FittingTrees* out);

  // What is new of requests that are open; from now on it counts as told.
  void Tell(size_t count, const int64_t* handles, const Text* texts, News* out);

 private:
  struct Followed {
    std::vector<int32_t> token_ids, parents;
    std::vector<uint8_t> ranks;
    std::vector<float> log_q;
    int32_t root = -1;   // node that the request stands at; -1: above depth 1
    int64_t covers = 0;  // tokens of the request up to there
    int64_t told = 0;
    int64_t ranked = 0;  // tokens whose ranks are known, or never will be
    Score score;
  };

  static bool Walk(Followed* own, const Text& text);
  void Append(const Followed& own, int32_t most, int32_t depth, bool is_chain, FittingTrees* out);

  std::unordered_map<int64_t, Followed> followed_;
  std::vector<int32_t> place_, level_, seen_;  // of the tree at hand
};

}  // namespace specrollout
