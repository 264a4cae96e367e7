// How draft trees lie in memory for one attention call: every root-to-leaf path becomes a sequence of its own.
//
// The stock attention kernel knows sequences, not trees. The first path of a tree lives in the request's own KV cache
// blocks; each further path shares the blocks before the branch and ends in scratch blocks. Each batch row (a known
// token or a node) is a query exactly once, in the first path that holds it; its key and value are written into every
// path that holds it. The specification is the naive twin, tests/reference/layout.py.
#pragma once

#include <cstdint>
#include <vector>

namespace specrollout {

// A step's batch, as the model runner has it. Pointers are borrowed for the duration of the call.
struct Batch {
  int num_requests;
  const int32_t* row_start;    // [R + 1] first batch row of each request
  const int32_t* base;         // [R] position of the request's first row (tokens already in the KV cache)
  const int32_t* node_start;   // [R + 1] first entry of each request in `parents`; equal neighbours: no draft
  const int32_t* parents;      // [nodes] parent within the request's tree, -1 is the root; parents come first
  const int32_t* block_table;  // [R, table_stride] physical blocks of each request
  int64_t table_stride;
  int block_size;
  const int32_t* scratch;  // [num_scratch] physical blocks free for paths beyond the first
  int num_scratch;
  int32_t zero_block;  // a block that holds zeros for ever
};

struct PathLayout {
  std::vector<int64_t> query_rows;          // [rows] batch row of each query, path after path
  std::vector<int64_t> inverse;             // [rows] place of each batch row among the queries
  std::vector<int32_t> query_start;         // [paths + 1]
  std::vector<int32_t> seq_lens;            // [paths] keys each path attends to
  std::vector<int32_t> tables;              // [paths, table_width]
  std::vector<int64_t> write_rows;          // [writes] batch row whose key and value are written
  std::vector<int64_t> write_slots;         // [writes] slot it is written to
  std::vector<int64_t> copy_from, copy_to;  // [copies] blocks copied before the forward pass: context, or zeros
  std::vector<int32_t> node_path;           // [nodes] first path that holds the node (index into `paths`)
  std::vector<int32_t> depths;              // [nodes] 1 for children of the root
  std::vector<int32_t> node_rows;           // [nodes] batch row: a request's nodes are the last of its rows
  std::vector<int32_t> node_positions;      // [nodes] position in the sequence
  std::vector<int32_t> first_path, root;    // [R] first path, and the root's position
  bool is_in_order = true;                  // the queries stand in the batch's own order
  int table_width = 0;                      // widest table any path needs
  int scratch_used = 0;                     // scratch blocks taken; more than num_scratch means the layout is unusable
};

PathLayout ExpandPaths(const Batch& batch);

// Scratch blocks a tree takes whose root stands at position `root`.
int ScratchNeeded(const int32_t* parents, int num_nodes, int root, int block_size);

}  // namespace specrollout
