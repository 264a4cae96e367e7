// Several drafters' trees for a batch become the trees that are verified.
//
// Specification: tests/reference/merge_select.py; what each step means: vllm_specrollout/trees/batch.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/ends.h"

namespace specrollout::merge {

// Drafters that are told apart, and ranges of probability; types.py has the same.
constexpr int kSources = 16;
constexpr int kTenths = 10;
// A vocabulary that holds every token id.
constexpr int64_t kAnyToken = int64_t{1} << 31;

// exp(log_q) within [0, 1]; 0 for what is not a number.
double Probability(float log_q);
int Tenth(double q);

// The trees of all requests behind one another, read in place.
struct BatchView {
  // [R + 1] first node of each request
  const int32_t* node_start;
  // [N]; parents count from their own request's first node, -1 for depth 1
  const int32_t *token_ids, *parents;
  const float* log_q;
  const int32_t* source;
};

// Why the arrays are no trees, in words for a log; "" if they are.
std::string Misshapen(const BatchView& batch, size_t num_requests, size_t num_nodes);

// The same, and what is wrong with their tokens and probabilities.
std::string Fault(const BatchView& batch, size_t num_requests, size_t num_nodes, int64_t vocab_size);

// Whether no node from the root down to each one has an end token of its request. The batch is well shaped.
// end_start: [R + 1] first of each request's `end_ids`; out: [nodes].
void Open(const BatchView& batch, size_t num_requests, const int32_t* end_start, const int32_t* end_ids, bool* out);

struct Limits {
  // [R]
  const int32_t *max_nodes, *max_depth;
  const uint8_t* is_chain;
  // of a level's nodes that are expanded, and of each one's children; 0: no bound
  int width;
};

struct Prices {
  double plain;
  // [num_nodes] what 0, 1, ... nodes add
  const double* nodes;
  size_t num_nodes;
  double branch, draft;
};

struct Merged {
  std::vector<int32_t> node_start, token_ids, parents, source, depth, num_proposed;
  std::vector<float> log_q, reach;
  double ms, gain;
  int best;
};

// Working memory; reused so that merging does not allocate.
class Merger {
 public:
  // calibration: [kSources * kTenths], or null. prices: or null: all within the limits is taken.
  // Throws std::invalid_argument for too few prices.
  void Run(const std::vector<BatchView>& proposals, size_t num_requests, const Limits& limits,
           const double* calibration, const Prices* prices, int least_nodes, Merged* out);

 private:
  struct Node {
    int32_t token, source, parent, depth, first_child, last_child, next_sibling;
    float log_q;
    double p, reach, total;  // total: of its children's p
    bool is_allowed;
    int32_t place;
  };
  struct Reachable {
    double reach;
    int32_t parent_place, node;
  };
  struct Ranked {
    uint32_t key;
    int32_t node;
  };

  void Lay(const BatchView& proposal, size_t request, const double* calibration);
  void Spread();
  void Allow(int max_depth, bool is_chain, int width);
  void Take(int max_nodes, Merged* out);
  void Rank();
  void Select(size_t num_requests, const Prices& prices, int least_nodes, Merged* out);
  void Keep(size_t count, Merged* out);

  std::vector<Node> nodes_;
  std::vector<int32_t> placed_, level_, next_;
  std::vector<Reachable> heap_;
  // of all requests' taken nodes: exact reach, parent among all, and whether it has had a child
  std::vector<double> reach_;
  std::vector<int32_t> parent_;
  std::vector<uint8_t> has_child_, keep_;
  std::vector<Ranked> ranked_, spare_;
};

// Acceptance of one step: what the target put to the test, by source and tenth of the drafter's word.
struct Tally {
  // [kSources * kTenths] nodes reached, the sum of their q, and nodes accepted
  double reached[kSources * kTenths], expected[kSources * kTenths], accepted[kSources * kTenths];
  // [kSources] nodes verified and accepted
  int64_t num_verified[kSources], num_accepted[kSources];
};

// num_accepted: [R]; accepted: [sum] nodes counted from their request's first. Throws std::invalid_argument for nodes
// that are not there.
void Count(const BatchView& batch, size_t num_requests, const int32_t* num_accepted, const int32_t* accepted,
           size_t num_listed, Tally* out);

}  // namespace specrollout::merge
