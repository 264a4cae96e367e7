// Laying several drafters' trees for one request over each other, and taking the best nodes of the result.
//
// Twin and specification: vllm_specrollout/trees/build.py, `union`.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace specrollout {

// A drafter's tree, read in place.
struct TreeView {
  // [size] each; parents: node -> its parent's index, -1 for depth 1
  const int32_t* token_ids;
  const int32_t* parents;
  const float* log_q;
  const int32_t* source;
  size_t size;
};

// Trees behind one another.
struct Forest {
  // [T + 1] first node of each tree
  std::vector<int32_t> node_start;
  // [nodes]; parents count from their own tree's first node
  std::vector<int32_t> token_ids, parents;
  std::vector<float> log_q;
  std::vector<int32_t> source;

  void Clear();
};

// Working memory; reused so that uniting does not allocate.
class Uniter {
 public:
  Uniter() { Begin(); }
  // The next trees are for another request.
  void Begin();
  // Lays a tree over those since Begin(). Nodes with the same tokens from the root down are one, with the largest of
  // their probabilities and the source of the node that had it, the earlier tree's when equal.
  // Throws std::invalid_argument if a parent does not come before its child.
  void Lay(const TreeView& tree);
  // Appends the best `max_nodes` nodes to the forest, as one more tree, best first: ties go to the node whose parent
  // was placed earlier, then to the one that was laid earlier.
  void TakeBest(int max_nodes, Forest* forest);

 private:
  struct Node {
    int32_t token;
    int32_t source;
    float log_q;
    // 0: none. Node 0 is the root
    int32_t first_child;
    int32_t next_sibling;
  };
  struct Candidate {
    double total_log_q;
    int32_t parent_place;
    int32_t node;
  };

  static bool IsWorse(const Candidate& a, const Candidate& b);
  // The child of `parent` that holds `token`, or 0. A tree has at most 64 nodes: looking through siblings is quick.
  int32_t Child(int32_t parent, int32_t token) const;
  int32_t AddChild(int32_t parent, int32_t token, float log_q, int32_t source);

  std::vector<Node> nodes_;
  // node of the tree being laid -> its place in nodes_
  std::vector<int32_t> merged_;
  std::vector<Candidate> frontier_;
};

}  // namespace specrollout
