#include "core/unite.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace specrollout {

void Forest::Clear() {
  node_start.assign(1, 0);
  token_ids.clear();
  parents.clear();
  log_q.clear();
  source.clear();
}

void Uniter::Begin() { nodes_.assign(1, Node{}); }

int32_t Uniter::Child(int32_t parent, int32_t token) const {
  int32_t node = nodes_[parent].first_child;
  while (node != 0 && nodes_[node].token != token) node = nodes_[node].next_sibling;
  return node;
}

int32_t Uniter::AddChild(int32_t parent, int32_t token, float log_q, int32_t source) {
  const int32_t node = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({token, source, log_q, 0, nodes_[parent].first_child});
  nodes_[parent].first_child = node;
  return node;
}

void Uniter::Lay(const TreeView& tree) {
  merged_.clear();
  for (size_t i = 0; i < tree.size; ++i) {
    const int32_t above = tree.parents[i];
    if (above < -1 || above >= static_cast<int32_t>(i)) {
      throw std::invalid_argument("node " + std::to_string(i) + " has parent " + std::to_string(above) +
                                  ", which does not come before it");
    }
    const int32_t parent = above < 0 ? 0 : merged_[above];
    int32_t node = Child(parent, tree.token_ids[i]);
    if (node == 0) {
      node = AddChild(parent, tree.token_ids[i], tree.log_q[i], tree.source[i]);
    } else if (tree.log_q[i] > nodes_[node].log_q) {
      nodes_[node].log_q = tree.log_q[i];
      nodes_[node].source = tree.source[i];
    }
    merged_.push_back(node);
  }
}

bool Uniter::IsWorse(const Candidate& a, const Candidate& b) {
  if (a.total_log_q != b.total_log_q) return a.total_log_q < b.total_log_q;
  if (a.parent_place != b.parent_place) return a.parent_place > b.parent_place;
  return a.node > b.node;
}

void Uniter::TakeBest(int max_nodes, Forest* forest) {
  frontier_.clear();
  int32_t node = 0;
  double total = 0.0;
  for (int32_t place = 0; place < max_nodes; ++place) {
    // the children of the node placed last (of the root at first) come into reach
    for (int32_t child = nodes_[node].first_child; child != 0; child = nodes_[child].next_sibling) {
      frontier_.push_back({total + nodes_[child].log_q, place - 1, child});
      std::push_heap(frontier_.begin(), frontier_.end(), IsWorse);
    }
    if (frontier_.empty()) break;
    std::pop_heap(frontier_.begin(), frontier_.end(), IsWorse);
    const Candidate best = frontier_.back();
    frontier_.pop_back();
    node = best.node;
    total = best.total_log_q;
    forest->token_ids.push_back(nodes_[node].token);
    forest->parents.push_back(best.parent_place);
    forest->log_q.push_back(nodes_[node].log_q);
    forest->source.push_back(nodes_[node].source);
  }
  forest->node_start.push_back(static_cast<int32_t>(forest->token_ids.size()));
}

}  // namespace specrollout
