#include "core/merge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace specrollout::merge {
namespace {

constexpr double kLeast = 1e-6, kMost = 0.995;

// Sorts ascending where the number sorts descending. For finite numbers of at least 0.
uint32_t DescendingKey(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return ~bits;
}

std::string At(size_t request, size_t node) {
  return "request " + std::to_string(request) + ", node " + std::to_string(node) + ": ";
}

}  // namespace

double Probability(float log_q) {
  if (!(log_q < 0.0f)) return log_q >= 0.0f ? 1.0 : 0.0;
  return std::exp(static_cast<double>(log_q));
}

int Tenth(double q) { return std::min(static_cast<int>(q * kTenths), kTenths - 1); }

std::string Misshapen(const BatchView& batch, size_t num_requests, size_t num_nodes) {
  if (batch.node_start[0] != 0 || batch.node_start[num_requests] != static_cast<int64_t>(num_nodes)) {
    return "node_start does not cover the nodes";
  }
  for (size_t r = 0; r < num_requests; ++r) {
    const int32_t start = batch.node_start[r], end = batch.node_start[r + 1];
    if (end < start || end > static_cast<int64_t>(num_nodes)) return "node_start falls";
    for (int32_t i = start; i < end; ++i) {
      const int32_t parent = batch.parents[i];
      if (parent < -1 || parent >= i - start) {
        return At(r, i - start) + "parent " + std::to_string(parent) + " does not come before it";
      }
      if (batch.source[i] < 0 || batch.source[i] >= kSources) {
        return At(r, i - start) + "source " + std::to_string(batch.source[i]) + " is not a drafter's index";
      }
    }
  }
  return "";
}

std::string Fault(const BatchView& batch, size_t num_requests, size_t num_nodes, int64_t vocab_size) {
  const std::string fault = Misshapen(batch, num_requests, num_nodes);
  for (size_t r = 0; fault.empty() && r < num_requests; ++r) {
    const int32_t start = batch.node_start[r];
    for (int32_t i = start; i < batch.node_start[r + 1]; ++i) {
      const int32_t token = batch.token_ids[i];
      if (!(std::isfinite(batch.log_q[i]) && batch.log_q[i] <= 0.0f)) {
        return At(r, i - start) + "log_q " + std::to_string(batch.log_q[i]) +
               " is not the log of a probability above 0 and at most 1";
      }
      if (token < 0 || token >= vocab_size) {
        return At(r, i - start) + "token " + std::to_string(token) + " is outside the vocabulary of " +
               std::to_string(vocab_size);
      }
    }
  }
  return fault;
}

void Open(const BatchView& batch, size_t num_requests, const int32_t* end_start, const int32_t* end_ids, bool* out) {
  for (size_t r = 0; r < num_requests; ++r) {
    const Ends ends{end_ids + end_start[r], end_start[r + 1] - end_start[r]};
    const int32_t start = batch.node_start[r];
    for (int32_t i = start; i < batch.node_start[r + 1]; ++i) {
      out[i] = !ends.Has(batch.token_ids[i]) && (batch.parents[i] < 0 || out[start + batch.parents[i]]);
    }
  }
}

void Merger::Run(const std::vector<BatchView>& proposals, size_t num_requests, const Limits& limits,
                 const double* calibration, const Prices* prices, int least_nodes, Merged* out) {
  *out = Merged{};
  out->node_start.assign(1, 0);
  reach_.clear();
  parent_.clear();
  for (size_t r = 0; r < num_requests; ++r) {
    nodes_.assign(1, Node{-1, 0, -1, 0, -1, -1, -1, 0.0f, 1.0, 1.0, 0.0, true, -1});
    for (const BatchView& proposal : proposals) Lay(proposal, r, calibration);
    out->num_proposed.push_back(static_cast<int32_t>(nodes_.size()) - 1);
    if (nodes_.size() > 1 && limits.max_nodes[r] > 0) {
      Spread();
      Allow(limits.max_depth[r], limits.is_chain[r], limits.width);
      Take(limits.max_nodes[r], out);
    }
    out->node_start.push_back(static_cast<int32_t>(reach_.size()));
  }
  out->ms = 0.0;
  out->gain = 1.0;
  out->best = static_cast<int>(reach_.size());
  if (prices) Select(num_requests, *prices, least_nodes, out);
  out->reach.assign(out->depth.size(), 0.0f);
  size_t kept = 0;
  for (size_t i = 0; i < reach_.size(); ++i) {
    if (!prices || keep_[i]) out->reach[kept++] = static_cast<float>(reach_[i]);
  }
}

// Lays one drafter's tree over those laid before it.
void Merger::Lay(const BatchView& proposal, size_t request, const double* calibration) {
  placed_.clear();
  for (int32_t i = proposal.node_start[request]; i < proposal.node_start[request + 1]; ++i) {
    const int32_t above = proposal.parents[i] < 0 ? 0 : placed_[proposal.parents[i]], token = proposal.token_ids[i];
    const double q = Probability(proposal.log_q[i]);
    const double factor = calibration ? calibration[proposal.source[i] * kTenths + Tenth(q)] : 1.0;
    const double p = std::min(std::max(q * factor, kLeast), kMost);
    int32_t node = nodes_[above].first_child;
    while (node >= 0 && nodes_[node].token != token) node = nodes_[node].next_sibling;
    if (node < 0) {
      node = static_cast<int32_t>(nodes_.size());
      nodes_.push_back(Node{token, 0, above, nodes_[above].depth + 1, -1, -1, -1, 0.0f, 0.0, 0.0, 0.0, false, -1});
      Node& parent = nodes_[above];
      (parent.first_child < 0 ? parent.first_child : nodes_[parent.last_child].next_sibling) = node;
      parent.last_child = node;
    }
    if (p > nodes_[node].p) {
      nodes_[node].p = p;
      nodes_[node].log_q = proposal.log_q[i];
      nodes_[node].source = proposal.source[i];
    }
    placed_.push_back(node);
  }
}

// How far the target walks: siblings that claim more than there is share it.
void Merger::Spread() {
  for (size_t i = 1; i < nodes_.size(); ++i) nodes_[nodes_[i].parent].total += nodes_[i].p;
  for (size_t i = 1; i < nodes_.size(); ++i) {
    const Node& parent = nodes_[nodes_[i].parent];
    nodes_[i].reach = parent.reach * (parent.total > 1.0 ? nodes_[i].p / parent.total : nodes_[i].p);
  }
}

void Merger::Allow(int max_depth, bool is_chain, int width) {
  if (!is_chain && width <= 0) {
    for (Node& node : nodes_) node.is_allowed = node.depth <= max_depth;
    return;
  }
  const auto more = [this](int32_t a, int32_t b) { return nodes_[a].reach > nodes_[b].reach; };
  const size_t most_children = is_chain ? 1 : width;
  level_.assign(1, 0);
  for (int depth = 0; depth < max_depth && !level_.empty(); ++depth) {
    std::stable_sort(level_.begin(), level_.end(), more);
    if (width > 0 && level_.size() > static_cast<size_t>(width)) level_.resize(width);
    next_.clear();
    for (const int32_t parent : level_) {
      const size_t first = next_.size();
      for (int32_t c = nodes_[parent].first_child; c >= 0; c = nodes_[c].next_sibling) next_.push_back(c);
      std::stable_sort(next_.begin() + first, next_.end(), more);
      if (next_.size() > first + most_children) next_.resize(first + most_children);
    }
    for (const int32_t node : next_) nodes_[node].is_allowed = true;
    level_.swap(next_);
  }
}

// Appends the best allowed nodes of one request, best first.
void Merger::Take(int max_nodes, Merged* out) {
  const auto is_worse = [](const Reachable& a, const Reachable& b) {
    if (a.reach != b.reach) return a.reach < b.reach;
    if (a.parent_place != b.parent_place) return a.parent_place > b.parent_place;
    return a.node > b.node;
  };
  const int32_t base = static_cast<int32_t>(reach_.size());
  heap_.clear();
  int32_t node = 0;
  for (int32_t place = 0; place < max_nodes; ++place) {
    for (int32_t c = nodes_[node].first_child; c >= 0; c = nodes_[c].next_sibling) {
      if (!nodes_[c].is_allowed) continue;
      heap_.push_back({nodes_[c].reach, place - 1, c});
      std::push_heap(heap_.begin(), heap_.end(), is_worse);
    }
    if (heap_.empty()) break;
    std::pop_heap(heap_.begin(), heap_.end(), is_worse);
    const Reachable best = heap_.back();
    heap_.pop_back();
    node = best.node;
    const Node& taken = nodes_[node];
    out->token_ids.push_back(taken.token);
    out->parents.push_back(best.parent_place);
    out->log_q.push_back(taken.log_q);
    out->source.push_back(taken.source);
    out->depth.push_back(taken.depth);
    reach_.push_back(taken.reach);
    parent_.push_back(best.parent_place < 0 ? -1 : base + best.parent_place);
  }
}

// All taken nodes, likeliest first; of equals, the earlier one. A radix sort: there may be thousands of them.
void Merger::Rank() {
  ranked_.resize(reach_.size());
  for (size_t i = 0; i < reach_.size(); ++i) {
    ranked_[i] = {DescendingKey(static_cast<float>(reach_[i])), static_cast<int32_t>(i)};
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

// Keeps the prefix that yields most tokens per millisecond, if that is more than without drafts.
void Merger::Select(size_t num_requests, const Prices& prices, int least_nodes, Merged* out) {
  if (prices.num_nodes <= reach_.size()) throw std::invalid_argument("fewer prices than nodes");
  Rank();
  // has a child been kept: of each node, and behind them of each request's root
  const size_t count = reach_.size();
  has_child_.assign(count + num_requests, 0);
  std::vector<int32_t>& owner = placed_;
  owner.resize(count);
  for (size_t r = 0; r < num_requests; ++r) {
    std::fill(owner.begin() + out->node_start[r], owner.begin() + out->node_start[r + 1], static_cast<int32_t>(r));
  }
  const auto above = [&](size_t i) { return parent_[i] < 0 ? count + owner[i] : static_cast<size_t>(parent_[i]); };
  double tokens = static_cast<double>(num_requests), best_rate = -1.0, best_ms = prices.plain, best_tokens = tokens;
  int best = 0, paths = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t node = ranked_[i].node;
    uint8_t& mark = has_child_[above(node)];
    paths += mark;
    mark = 1;
    tokens += reach_[node];
    const double ms = prices.plain + prices.nodes[i + 1] + prices.branch * paths;
    if (tokens / ms > best_rate) {
      best = static_cast<int>(i) + 1;
      best_rate = tokens / ms;
      best_ms = ms;
      best_tokens = tokens;
    }
  }
  keep_.assign(count, 0);
  out->best = best;
  out->ms = prices.plain;
  out->gain = 0.0;
  if (!best) {
    if (count) Keep(count, out);
    return;
  }
  const double plain_rate = static_cast<double>(num_requests) / prices.plain;
  const bool does_pay = best_rate > plain_rate;
  out->gain = best_tokens / (best_ms + prices.draft) / plain_rate;
  const size_t take = does_pay ? best : std::min(std::max(least_nodes, 0), best);
  for (size_t i = 0; i < take; ++i) keep_[ranked_[i].node] = 1;
  out->ms = best_ms;
  if (!does_pay) {
    has_child_.assign(count + num_requests, 0);
    paths = 0;
    for (size_t i = 0; i < take; ++i) {
      uint8_t& mark = has_child_[above(ranked_[i].node)];
      paths += mark;
      mark = 1;
    }
    out->ms = prices.plain + (take ? prices.nodes[take] + prices.branch * paths : 0.0);
  }
  if (take < count) Keep(count, out);
}

// Leaves out what was not kept; parents of the kept are kept.
void Merger::Keep(size_t count, Merged* out) {
  std::vector<int32_t>& moved = placed_;  // owners are not needed any more
  size_t at = 0, request = 0;
  int32_t start = 0;
  for (size_t i = 0; i <= count; ++i) {
    while (request + 1 < out->node_start.size() && static_cast<size_t>(out->node_start[request + 1]) == i) {
      // the request's nodes end here
      out->node_start[request + 1] = static_cast<int32_t>(at);
      start = static_cast<int32_t>(at);
      ++request;
    }
    if (i == count || !keep_[i]) continue;
    moved[i] = static_cast<int32_t>(at);
    out->token_ids[at] = out->token_ids[i];
    out->parents[at] = parent_[i] < 0 ? -1 : moved[parent_[i]] - start;
    out->log_q[at] = out->log_q[i];
    out->source[at] = out->source[i];
    out->depth[at] = out->depth[i];
    ++at;
  }
  for (auto* column : {&out->token_ids, &out->parents, &out->source, &out->depth}) column->resize(at);
  out->log_q.resize(at);
}

void Count(const BatchView& batch, size_t num_requests, const int32_t* num_accepted, const int32_t* accepted,
           size_t num_listed, Tally* out) {
  *out = Tally{};
  std::vector<uint8_t> is_accepted;
  size_t listed = 0;
  for (size_t r = 0; r < num_requests; ++r) {
    const int32_t start = batch.node_start[r], size = batch.node_start[r + 1] - start;
    is_accepted.assign(size, 0);
    for (int32_t i = 0; i < num_accepted[r]; ++i, ++listed) {
      if (listed >= num_listed || accepted[listed] < 0 || accepted[listed] >= size) {
        throw std::invalid_argument("request " + std::to_string(r) + " has accepted nodes that it does not have");
      }
      is_accepted[accepted[listed]] = 1;
    }
    for (int32_t i = 0; i < size; ++i) {
      const int32_t source = batch.source[start + i], parent = batch.parents[start + i];
      ++out->num_verified[source];
      out->num_accepted[source] += is_accepted[i];
      if (parent >= 0 && !is_accepted[parent]) continue;
      const double q = Probability(batch.log_q[start + i]);
      const int cell = source * kTenths + Tenth(q);
      out->reached[cell] += 1.0;
      out->expected[cell] += q;
      out->accepted[cell] += is_accepted[i];
    }
  }
}

}  // namespace specrollout::merge
