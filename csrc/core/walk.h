// Exact-match verification: from the root, step into the child that carries the token the target sampled.
// The specification is the naive twin, tests/reference/exact_match.py.
#pragma once

#include <cstdint>
#include <vector>

namespace specrollout {

struct Walks {
  int width = 1;                    // most tokens any request yields
  std::vector<int32_t> output;      // [R, width] accepted tokens and the bonus token, padded with -1
  std::vector<int64_t> output_row;  // [R, width] row of `sampled` each output token came from; padding repeats the last
  std::vector<int32_t> num_accepted;  // [R]
  std::vector<int32_t> accepted;      // [sum(num_accepted)] accepted nodes, numbered within each request's tree
};

// sampled: [R + nodes] the target's token after the root and after each node, request by request.
Walks Walk(int num_requests, const int32_t* node_start, const int32_t* parents, const int32_t* tokens,
           const int64_t* sampled);

struct Followed {
  std::vector<int32_t> num_accepted;  // [R]
  std::vector<int32_t> accepted;      // [sum(num_accepted)] nodes, numbered within each request's tree
};

// The nodes that a walk along known tokens passes.
// output: [R, width] the tokens that each request went on with; counts: [R] how many of them there are.
Followed Follow(int num_requests, const int32_t* node_start, const int32_t* parents, const int32_t* tokens,
                const int32_t* output, int width, const int32_t* counts);

}  // namespace specrollout
