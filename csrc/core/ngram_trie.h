// The trie of what followed earlier places: counts to probabilities, and the best nodes first.
//
// Twin and specification: vllm_specrollout/drafters/ngram_naive.py, which also gives the reasoning.

#pragma once

#include <cstdint>
#include <vector>

namespace specrollout {

// A draft tree, best first: every prefix is the best tree of its size.
struct Draft {
  std::vector<int32_t> token_ids;
  // node -> its parent's index, -1 for depth 1
  std::vector<int32_t> parents;
  // natural log of the estimated probability that the node is accepted given that its parent is
  std::vector<float> log_q;

  void Clear();
};

// Working memory of a proposal; reused so that proposing does not allocate.
class Trie {
 public:
  Trie() { Clear(); }
  void Clear();
  // Starts counting the places of one context length: what earlier lengths left unexplained is shared out by it.
  void BeginLength();
  // Counts one place's continuation.
  void Add(const int32_t* continuation, int count, int weight);
  // Turns the counts since BeginLength() into probability.
  void EndLength(int context_len);
  // Appends the best `max_nodes` nodes (in a chain: the best child of the best child ...) to the draft.
  void BestFirst(int max_nodes, Draft* draft);
  void BestChain(int max_nodes, Draft* draft) const;

 private:
  struct Node {
    int32_t token;
    int32_t parent;
    int32_t first_child = 0;
    int32_t next_sibling = 0;
    int32_t depth;
    // the length during which the counts below were last reset
    int32_t length_id = 0;
    // places of this length that pass through the node, weighted
    int32_t weight = 0;
    // places of this length that go on below the node: plain, weighted, and how many different tokens they name
    int32_t places = 0;
    int32_t weight_below = 0;
    int32_t distinct = 0;
    // probability given the parent
    uint64_t p = 0;
    // probability of the children not yet shared out, and the part that this length shares out
    uint64_t unexplained;
    uint64_t shared = 0;
  };
  struct Candidate {
    double total_log_q;
    int32_t parent_place;
    int32_t node;
  };

  static float LogQ(const Node& node);
  static bool IsWorse(const Candidate& a, const Candidate& b);
  void Touch(int32_t node);
  int32_t Child(int32_t parent, int32_t token);

  // node 0 is the root
  std::vector<Node> nodes_;
  // nodes counted since BeginLength()
  std::vector<int32_t> touched_;
  int32_t length_id_ = 0;
  std::vector<Candidate> frontier_;
};

}  // namespace specrollout
