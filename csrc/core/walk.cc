#include "core/walk.h"

#include <algorithm>

namespace specrollout {

Walks Walk(int num_requests, const int32_t* node_start, const int32_t* parents, const int32_t* tokens,
           const int64_t* sampled) {
  Walks out;
  out.num_accepted.resize(num_requests);
  for (int r = 0; r < num_requests; ++r) {
    const int begin = node_start[r], n = node_start[r + 1] - begin;
    const int64_t* own = sampled + begin + r;  // one root row per request before this one
    int node = -1, count = 0;
    // Parents come first, so a node's children all have larger indices: one pass finds the whole path.
    for (int child = 0; child < n; ++child) {
      if (parents[begin + child] != node || tokens[begin + child] != own[node + 1]) continue;
      node = child;
      out.accepted.push_back(child);
      ++count;
    }
    out.num_accepted[r] = count;
    out.width = std::max(out.width, count + 1);
  }
  out.output.assign(static_cast<size_t>(num_requests) * out.width, -1);
  out.output_row.resize(out.output.size());
  const int32_t* accepted = out.accepted.data();
  for (int r = 0; r < num_requests; ++r) {
    const int64_t first = node_start[r] + r;
    int64_t row = first;
    for (int i = 0; i < out.width; ++i) {
      const size_t at = static_cast<size_t>(r) * out.width + i;
      if (i > 0 && i <= out.num_accepted[r]) row = first + 1 + accepted[i - 1];
      out.output_row[at] = row;
      if (i <= out.num_accepted[r]) out.output[at] = static_cast<int32_t>(sampled[row]);
    }
    accepted += out.num_accepted[r];
  }
  return out;
}

Followed Follow(int num_requests, const int32_t* node_start, const int32_t* parents, const int32_t* tokens,
                const int32_t* output, int width, const int32_t* counts) {
  Followed out;
  out.num_accepted.resize(num_requests);
  for (int r = 0; r < num_requests; ++r) {
    const int begin = node_start[r], n = node_start[r + 1] - begin;
    const int32_t* own = output + static_cast<int64_t>(r) * width;
    int node = -1, count = 0;
    for (int child = 0; child < n && count < counts[r]; ++child) {
      if (parents[begin + child] != node || tokens[begin + child] != own[count]) continue;
      node = child;
      out.accepted.push_back(child);
      ++count;
    }
    out.num_accepted[r] = count;
  }
  return out;
}

}  // namespace specrollout
