// From places to a draft tree: what followed them, how probable it is, the best nodes first.
//
// Twin and specification: tests/reference/history.py, which also gives the reasoning. Only the nodes
// that get into the draft are looked into, so the cost follows the draft's size and not the history's.

#pragma once

#include <cstdint>
#include <vector>

#include "core/ends.h"
#include "core/history_text.h"

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

// A place and what it is worth.
struct Candidate {
  Place place;
  // tokens of context shared with the asker
  int32_t shared;
  // its document's
  int32_t weight;
};

// Working memory of a proposal; reused so that proposing does not allocate.
class Drafting {
 public:
  // Clears `draft` and fills it. The candidates come longest context first.
  void Build(const HistoryText& text, const std::vector<Candidate>& candidates, int max_nodes, int max_depth,
             bool is_chain, Ends ends, Draft* draft);

 private:
  // Reads on from a place.
  struct Reader {
    const int32_t* next;
    const int32_t* end;
    int32_t page;
    int32_t shared;
    int32_t weight;
    // token under the reader, valid while its node is expanded, and which branch takes it
    int32_t branch;
  };
  struct Node {
    int32_t token;
    float log_q;
    int32_t depth;
    // the readers below it: range of order_
    int32_t begin;
    int32_t end;
  };
  struct Branch {
    int32_t token;
    int32_t count;
    // of the present class of contexts
    int32_t class_id;
    uint64_t weight;
    // weight of all classes: who goes first among equals
    uint64_t total_weight;
    uint64_t p;
  };
  struct Waiting {
    double total_log_q;
    int32_t parent_place;
    int32_t node;
  };

  static bool IsWorse(const Waiting& a, const Waiting& b);
  // Appends the node's children to nodes_ and sorts its readers by child. Returns the first child's index.
  int32_t Expand(const HistoryText& text, int32_t node);
  // Counts the readers by branch; fills branches_.
  void Count(const HistoryText& text, int32_t begin, int32_t* end, int32_t depth);
  void ShareOut(int context_class, int32_t class_id, int32_t places, int32_t distinct, uint64_t weight,
                uint64_t* unexplained);
  void BestFirst(const HistoryText& text, int max_nodes, int max_depth, Ends ends, Draft* draft);
  void BestChain(const HistoryText& text, int max_nodes, int max_depth, Ends ends, Draft* draft);
  void Put(const Node& node, int32_t parent, Draft* draft);

  std::vector<Reader> readers_;
  // indices of readers_, each node's together
  std::vector<int32_t> order_;
  std::vector<int32_t> sorted_;
  std::vector<Node> nodes_;
  std::vector<Branch> branches_;
  std::vector<Waiting> frontier_;
};

}  // namespace specrollout
