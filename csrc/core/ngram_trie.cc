#include "core/ngram_trie.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace specrollout {
namespace {

constexpr uint64_t kOne = 1ull << 24;
// context length - 1 -> doubt, in 1/16; longer contexts take the last
constexpr int kDoubt[] = {48, 30, 16, 12, 9, 7, 6, 5};

uint64_t Doubt(int context_len) { return kDoubt[std::min<size_t>(context_len, std::size(kDoubt)) - 1]; }

}  // namespace

void Draft::Clear() {
  token_ids.clear();
  parents.clear();
  log_q.clear();
}

void Trie::Clear() {
  nodes_.clear();
  touched_.clear();
  length_id_ = 0;
  Node root{};
  root.parent = -1;
  root.unexplained = kOne;
  nodes_.push_back(root);
}

void Trie::BeginLength() {
  ++length_id_;
  touched_.clear();
}

void Trie::Touch(int32_t index) {
  Node& node = nodes_[index];
  if (node.length_id == length_id_) return;
  node.length_id = length_id_;
  node.weight = node.places = node.weight_below = node.distinct = 0;
  touched_.push_back(index);
}

int32_t Trie::Child(int32_t parent, int32_t token) {
  int32_t index = nodes_[parent].first_child;
  while (index != 0 && nodes_[index].token != token) index = nodes_[index].next_sibling;
  if (index != 0) return index;
  index = static_cast<int32_t>(nodes_.size());
  Node node{};
  node.token = token;
  node.parent = parent;
  node.depth = nodes_[parent].depth + 1;
  node.next_sibling = nodes_[parent].first_child;
  node.unexplained = kOne;
  nodes_.push_back(node);
  nodes_[parent].first_child = index;
  return index;
}

void Trie::Add(const int32_t* continuation, int count, int weight) {
  int32_t parent = 0;
  Touch(parent);
  for (int i = 0; i < count; ++i) {
    const int32_t child = Child(parent, continuation[i]);
    Touch(child);
    Node& above = nodes_[parent];
    if (nodes_[child].weight == 0) ++above.distinct;
    ++above.places;
    above.weight_below += weight;
    nodes_[child].weight += weight;
    parent = child;
  }
}

void Trie::EndLength(int context_len) {
  for (const int32_t index : touched_) {
    Node& node = nodes_[index];
    if (node.places == 0) continue;
    const uint64_t places = node.places;
    const uint64_t distinct = node.distinct;
    const uint64_t doubt = Doubt(context_len + node.depth / 2) * distinct * distinct;
    const uint64_t left = node.unexplained * doubt / (16 * places * places + doubt);
    node.shared = node.unexplained - left;
    node.unexplained = left;
  }
  for (const int32_t index : touched_) {
    if (index == 0) continue;
    Node& node = nodes_[index];
    const Node& parent = nodes_[node.parent];
    node.p += parent.shared * node.weight / parent.weight_below;
  }
}

float Trie::LogQ(const Node& node) {
  return static_cast<float>(std::log(static_cast<double>(std::max<uint64_t>(node.p, 1)) / kOne));
}

bool Trie::IsWorse(const Candidate& a, const Candidate& b) {
  if (a.total_log_q != b.total_log_q) return a.total_log_q < b.total_log_q;
  if (a.parent_place != b.parent_place) return a.parent_place > b.parent_place;
  return a.node > b.node;
}

void Trie::BestFirst(int max_nodes, Draft* draft) {
  frontier_.clear();
  int32_t parent = 0;
  int32_t parent_place = -1;
  double total = 0.0;
  while (static_cast<int>(draft->token_ids.size()) < max_nodes) {
    for (int32_t child = nodes_[parent].first_child; child != 0; child = nodes_[child].next_sibling) {
      frontier_.push_back({total + LogQ(nodes_[child]), parent_place, child});
      std::push_heap(frontier_.begin(), frontier_.end(), IsWorse);
    }
    if (frontier_.empty()) return;
    std::pop_heap(frontier_.begin(), frontier_.end(), IsWorse);
    const Candidate best = frontier_.back();
    frontier_.pop_back();
    parent = best.node;
    parent_place = static_cast<int32_t>(draft->token_ids.size());
    total = best.total_log_q;
    draft->token_ids.push_back(nodes_[parent].token);
    draft->parents.push_back(best.parent_place);
    draft->log_q.push_back(LogQ(nodes_[parent]));
  }
}

void Trie::BestChain(int max_nodes, Draft* draft) const {
  int32_t node = 0;
  for (int place = 0; place < max_nodes; ++place) {
    int32_t best = 0;
    for (int32_t child = nodes_[node].first_child; child != 0; child = nodes_[child].next_sibling) {
      const bool is_better =
          best == 0 || nodes_[child].p > nodes_[best].p || (nodes_[child].p == nodes_[best].p && child < best);
      if (is_better) best = child;
    }
    if (best == 0) return;
    node = best;
    draft->token_ids.push_back(nodes_[node].token);
    draft->parents.push_back(place - 1);
    draft->log_q.push_back(LogQ(nodes_[node]));
  }
}

}  // namespace specrollout
