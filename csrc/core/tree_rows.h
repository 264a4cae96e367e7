// A step's trees, laid out over the rows of its forward pass.
// The specification is the naive twin, tests/reference/tree_rows.py.
#pragma once

#include <cstdint>

namespace specrollout {

// The trees, and the batch that they are computed in. Its requests have a root row and their nodes' last, both among
// the rows of logits and among those of the forward pass.
struct StepTrees {
  const int32_t* node_start;
  const int32_t* parents;
  const int32_t* depth;
  const int32_t* token_ids;
  int num_requests;
  const int32_t* order;         // [num_requests] request of the batch -> its tree; -1: it has none
  const int32_t* logits_start;  // [num_requests + 1] first logits row of each request
  const int32_t* row_start;     // [num_requests + 1] first row of each request
};

// What of it the device is told; all but `parents` and `nodes` holds zeros before.
struct TreeRows {
  int32_t* parents;     // [logits rows] each row's parent, counted from its request's root row; -1: it has none
  int32_t* token_ids;   // [nodes] in the batch's order
  int32_t* shift;       // [rows] from a row's place to its node's depth
  int64_t* nodes;       // [nodes] their rows
  int32_t* num_nodes;   // [num_requests]
  uint64_t* ancestors;  // [rows] bit j: the request's node j is the row's node, or above it
};

void LayOutRows(const StepTrees& trees, const TreeRows& out);

}  // namespace specrollout
