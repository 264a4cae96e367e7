#include "core/tree_rows.h"

#include <algorithm>

namespace specrollout {

void LayOutRows(const StepTrees& trees, const TreeRows& out) {
  int64_t at = 0;
  for (int r = 0; r < trees.num_requests; ++r) {
    std::fill(out.parents + trees.logits_start[r], out.parents + trees.logits_start[r + 1], -1);
    const int tree = trees.order[r];
    if (tree < 0) continue;
    const int begin = trees.node_start[tree], size = trees.node_start[tree + 1] - begin;
    const int64_t first = trees.row_start[r + 1] - size;
    int32_t* parents = out.parents + trees.logits_start[r + 1] - size;
    uint64_t* ancestors = out.ancestors + first;
    out.num_nodes[r] = size;
    for (int i = 0; i < size; ++i, ++at) {
      const int32_t parent = trees.parents[begin + i];
      parents[i] = parent + 1;
      ancestors[i] = (uint64_t{1} << i) | (parent < 0 ? 0 : ancestors[parent]);
      out.shift[first + i] = trees.depth[begin + i] - 1 - i;
      out.token_ids[at] = trees.token_ids[begin + i];
      out.nodes[at] = first + i;
    }
  }
}

}  // namespace specrollout
