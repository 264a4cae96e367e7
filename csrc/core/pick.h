// Which nodes of all requests' trees are verified, when all compete for one budget.
//
// Twin and specification: vllm_specrollout/policies/pick.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/unite.h"

namespace specrollout {

// Shapes of the tables that correct drafters' probabilities; policies/acceptance.py has the same.
constexpr int kProbabilityBuckets = 10;
constexpr int kDepthRanges = 9;

int DepthRange(int depth);
// Of a probability in [0, 1].
int ProbabilityBucket(double q);
// exp(log_q) within [0, 1]; 0 for what is not a number.
double Probability(float log_q);

// What is believed and what it costs. All pointers are borrowed.
struct PickRequest {
  // [kSources * kProbabilityBuckets], [kSources * kDepthRanges]
  const double* by_bucket;
  const double* by_depth;
  // [R] each
  const double* by_request;
  const double* worth;
  const uint8_t* is_chain;
  const int64_t* max_nodes;
  const int64_t* max_depth;
  // [nodes + 1] milliseconds that 0, 1, ... more rows add
  const double* rows;
  size_t num_rows;
  double draft, tree, branch;
  double most, least;
  // if what pays saves less than this, only the likeliest `probes` nodes are kept
  double least_net;
  int probes;
};

struct Pick {
  Forest forest;
  double tokens, gain, cost, net;
};

// Working memory; reused so that picking does not allocate.
class Picker {
 public:
  // Throws std::invalid_argument for what is not a tree (core/check.h), or too few rows.
  void Run(const std::vector<TreeView>& trees, const PickRequest& request, Pick* out);

 private:
  struct Ranked {
    uint32_t key;
    int32_t node;
  };
  void Value(const std::vector<TreeView>& trees, const PickRequest& request);
  void Help(double row);
  void Rank(double cheapest);
  size_t BestPrefix(const PickRequest& request, double* net) const;
  void Probe(size_t count);
  void Settle(const std::vector<TreeView>& trees, const PickRequest& request, Pick* out);

  // [N] over all trees; parent_ counts over all nodes, -1 for depth 1
  std::vector<int32_t> parent_, owner_, first_child_, depth_;
  std::vector<uint8_t> is_first_, keep_;
  std::vector<double> reach_, gain_, extra_, value_;
  std::vector<Ranked> ranked_, spare_;
  std::vector<int32_t> root_child_;
};

}  // namespace specrollout
