#include "core/pick.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace specrollout {
namespace {

// nodes below one that opens a path whose gain may help to pay for it
constexpr int kHelpers = 3;
constexpr double kFreeRow = 1e-9;

// Larger numbers first: the bits of a positive float, turned around.
uint32_t DescendingKey(double value) {
  const float single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof bits);
  return ~bits;
}

}  // namespace

int DepthRange(int depth) {
  constexpr int kStarts[kDepthRanges] = {0, 1, 2, 3, 4, 5, 7, 10, 16};
  int range = kDepthRanges - 1;
  while (depth < kStarts[range]) --range;
  return range;
}

int ProbabilityBucket(double q) { return std::min(static_cast<int>(q * kProbabilityBuckets), kProbabilityBuckets - 1); }

double Probability(float log_q) {
  const double q = std::exp(static_cast<double>(log_q));
  return q > 0.0 ? std::min(q, 1.0) : 0.0;
}

void Picker::Run(const std::vector<TreeView>& trees, const PickRequest& request, Pick* out) {
  Value(trees, request);
  const size_t n = parent_.size();
  if (request.num_rows < n + 1) throw std::invalid_argument("rows must have a price for every node");
  keep_.assign(n, 0);
  double cheapest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < n; ++i) cheapest = std::min(cheapest, request.rows[i + 1] - request.rows[i]);
  size_t count = 0;
  double net = 0.0;
  if (n) {
    // Not what the next row costs: where that is nothing, every node would be worth infinitely much, and all alike.
    Help(std::max((request.rows[n] - request.rows[0]) / static_cast<double>(n), kFreeRow));
    Rank(cheapest);
    count = BestPrefix(request, &net);
  }
  for (size_t i = 0; i < count; ++i) keep_[ranked_[i].node] = 1;
  out->net = 0.0;
  if (count) {
    Settle(trees, request, out);
    out->net = out->gain - out->cost;
  }
  // a branch was ranked as if a likelier sibling were there: where it is not, the reckoning may come out below zero
  if (out->net <= std::max(request.least_net, 0.0) || !count) {
    keep_.assign(n, 0);
    Probe(static_cast<size_t>(std::max(request.probes, 0)));
    const double found = std::max(out->net, 0.0);
    Settle(trees, request, out);
    out->net = found;
  }
}

// Probabilities, gains and what each node costs besides its row.
void Picker::Value(const std::vector<TreeView>& trees, const PickRequest& request) {
  size_t n = 0;
  for (const TreeView& tree : trees) n += tree.size;
  for (auto* column : {&parent_, &owner_, &first_child_, &depth_}) column->resize(n);
  for (auto* column : {&reach_, &gain_, &extra_, &value_}) column->resize(n);
  is_first_.resize(n);
  size_t at = 0;
  for (size_t r = 0; r < trees.size(); ++r) {
    const TreeView& tree = trees[r];
    const Checked checked = CheckTree(tree, kAnyToken);
    if (checked.fault != Fault::kNone) throw std::invalid_argument(Describe(tree, checked, kAnyToken));
    const int32_t start = static_cast<int32_t>(at);
    int32_t root_child = -1;
    for (size_t i = 0; i < tree.size; ++i, ++at) {
      const int32_t local = tree.parents[i], source = tree.source[i];
      const int32_t parent = local < 0 ? -1 : start + local;
      int32_t& first = parent < 0 ? root_child : first_child_[parent];
      is_first_[at] = first < 0;
      if (first < 0) first = static_cast<int32_t>(at);
      first_child_[at] = -1;
      parent_[at] = parent;
      owner_[at] = static_cast<int32_t>(r);
      depth_[at] = parent < 0 ? 1 : depth_[parent] + 1;
      const double q = Probability(tree.log_q[i]);
      double p = q * (request.by_bucket[source * kProbabilityBuckets + ProbabilityBucket(q)] *
                      request.by_depth[source * kDepthRanges + DepthRange(depth_[at])]);
      p = std::clamp(p * request.by_request[r], request.least, request.most);
      const bool is_beyond = static_cast<int64_t>(i) >= request.max_nodes[r] || depth_[at] > request.max_depth[r];
      if (is_beyond || (request.is_chain[r] && !is_first_[at])) p = 0.0;
      reach_[at] = parent < 0 ? p : reach_[parent] * p;
      gain_[at] = reach_[at] * request.worth[r];
      extra_[at] = !is_first_[at] ? request.branch : parent < 0 ? request.tree : 0.0;
    }
  }
}

// Gain per cost. Nodes with an extra cost share it with the chain below them; no child is valued above its parent.
void Picker::Help(double row) {
  const int32_t n = static_cast<int32_t>(parent_.size());
  for (int32_t i = 0; i < n; ++i) {
    double best = gain_[i] / (row + extra_[i]);
    if (extra_[i] > 0.0) {
      double sum = gain_[i], cost = row + extra_[i];
      int32_t node = i;
      for (int step = 0; step < kHelpers && first_child_[node] >= 0; ++step) {
        node = first_child_[node];
        sum += gain_[node];
        cost += row + extra_[node];
        best = std::max(best, sum / cost);
      }
    }
    value_[i] = parent_[i] < 0 ? best : std::min(best, value_[parent_[i]]);
  }
}

// The nodes that gain more than the cheapest row costs, by value; of equals, the earlier node first. A radix sort: the
// whole batch may have thousands of nodes.
void Picker::Rank(double cheapest) {
  ranked_.clear();
  for (size_t i = 0; i < value_.size(); ++i) {
    if (gain_[i] > cheapest) ranked_.push_back({DescendingKey(value_[i]), static_cast<int32_t>(i)});
  }
  if (ranked_.size() < 64) {
    std::stable_sort(ranked_.begin(), ranked_.end(), [](const Ranked& a, const Ranked& b) { return a.key < b.key; });
    return;
  }
  spare_.resize(ranked_.size());
  for (int shift = 0; shift < 33; shift += 11) {
    uint32_t starts[2049] = {0};
    for (const Ranked& item : ranked_) ++starts[((item.key >> shift) & 2047) + 1];
    for (int digit = 0; digit < 2048; ++digit) starts[digit + 1] += starts[digit];
    for (const Ranked& item : ranked_) spare_[starts[(item.key >> shift) & 2047]++] = item;
    ranked_.swap(spare_);
  }
}

// How many nodes, in their order, gain most over what they cost; 0 if nothing pays for drafting at all.
size_t Picker::BestPrefix(const PickRequest& request, double* net) const {
  double sum = 0.0, best = -std::numeric_limits<double>::infinity();
  size_t count = 0;
  for (size_t i = 0; i < ranked_.size(); ++i) {
    sum += gain_[ranked_[i].node] - extra_[ranked_[i].node];
    const double here = sum - request.rows[i + 1];
    if (here > best) best = here, count = i + 1;
  }
  *net = best - request.draft;
  return best > request.draft ? count : 0;
}

// The likeliest nodes of all.
void Picker::Probe(size_t count) {
  for (; count > 0; --count) {
    int32_t best = -1;
    for (int32_t i = 0; i < static_cast<int32_t>(reach_.size()); ++i) {
      const bool is_open = !keep_[i] && (parent_[i] < 0 || keep_[parent_[i]]) && reach_[i] > 0.0;
      if (is_open && (best < 0 || reach_[i] > reach_[best])) best = i;
    }
    if (best < 0) return;
    keep_[best] = 1;
  }
}

// The kept nodes as trees, and what they come to.
void Picker::Settle(const std::vector<TreeView>& trees, const PickRequest& request, Pick* out) {
  Forest& forest = out->forest;
  forest.Clear();
  out->tokens = out->gain = 0.0;
  size_t at = 0, num_trees = 0, branches = 0;
  std::vector<int32_t>& position = depth_;  // of a kept node in its tree; depths are not needed any more
  std::vector<uint8_t>& has_child = is_first_;
  std::fill(has_child.begin(), has_child.end(), 0);
  for (const TreeView& tree : trees) {
    const size_t before = forest.token_ids.size();
    bool has_root_child = false;
    for (size_t i = 0; i < tree.size; ++i, ++at) {
      if (!keep_[at]) continue;
      const int32_t parent = parent_[at];
      position[at] = static_cast<int32_t>(forest.token_ids.size() - before);
      forest.token_ids.push_back(tree.token_ids[i]);
      forest.parents.push_back(parent < 0 ? -1 : position[parent]);
      forest.log_q.push_back(tree.log_q[i]);
      forest.source.push_back(tree.source[i]);
      out->tokens += reach_[at];
      out->gain += gain_[at];
      if (parent < 0) {
        branches += has_root_child;
        has_root_child = true;
      } else {
        branches += has_child[parent];
        has_child[parent] = 1;
      }
    }
    num_trees += forest.token_ids.size() > before;
    forest.node_start.push_back(static_cast<int32_t>(forest.token_ids.size()));
  }
  const size_t nodes = forest.token_ids.size();
  out->cost = nodes ? request.rows[nodes] + request.draft + request.tree * num_trees + request.branch * branches : 0.0;
}

}  // namespace specrollout
