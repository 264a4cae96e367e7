#include "core/layout.h"

#include <algorithm>

namespace specrollout {
namespace {

// Children of every node, in index order: the best child first. Slot n of `first` stands for the root.
struct Children {
  std::vector<int32_t> first, next;

  Children(const int32_t* parents, int n) : first(n + 1, -1), next(n, -1) {
    for (int i = n - 1; i >= 0; --i) {
      const int parent = parents[i] < 0 ? n : parents[i];
      next[i] = first[parent];
      first[parent] = i;
    }
  }
};

// Calls visit(path, fresh) for each root-to-leaf path, depth first; nodes from index `fresh` on are new to it.
template <typename Visit>
void ForEachPath(const Children& children, int n, Visit visit) {
  std::vector<int32_t> path;
  int node = children.first[n];
  size_t fresh = 0;
  while (node >= 0) {
    path.push_back(node);
    if (children.first[node] >= 0) {
      node = children.first[node];
      continue;
    }
    visit(path, fresh);
    while (!path.empty() && children.next[path.back()] < 0) path.pop_back();
    if (path.empty()) return;
    node = children.next[path.back()];
    path.pop_back();
    fresh = path.size();
  }
}

class Expander {
 public:
  explicit Expander(const Batch& batch) : b_(batch) {
    const int rows = b_.row_start[b_.num_requests];
    const int nodes = b_.node_start[b_.num_requests];
    out_.query_rows.reserve(rows);
    out_.inverse.assign(rows, -1);
    out_.node_path.assign(nodes, -1);
    out_.depths.resize(nodes);
    out_.node_rows.resize(nodes);
    out_.node_positions.resize(nodes);
    out_.query_start.push_back(0);
    for (int r = 0; r < b_.num_requests; ++r) Nodes(r);
  }

  PathLayout Run() {
    for (int r = 0; r < b_.num_requests; ++r) Request(r);
    FillTables();
    return std::move(out_);
  }

 private:
  struct Path {
    int request, first_scratch_block, scratch_begin, scratch_count;
  };

  int64_t Slot(int r, int position) const {
    const int64_t block = b_.block_table[r * b_.table_stride + position / b_.block_size];
    return block * b_.block_size + position % b_.block_size;
  }

  void Nodes(int r) {
    const int begin = b_.node_start[r], n = b_.node_start[r + 1] - begin;
    const int known = b_.row_start[r + 1] - b_.row_start[r] - n, root = b_.base[r] + known - 1;
    for (int i = 0; i < n; ++i) {
      const int parent = b_.parents[begin + i];
      const int depth = out_.depths[begin + i] = parent < 0 ? 1 : out_.depths[begin + parent] + 1;
      out_.node_rows[begin + i] = b_.row_start[r] + known + i;
      out_.node_positions[begin + i] = root + depth;
    }
    out_.root.push_back(root);
  }

  void Query(int64_t row) {
    out_.is_in_order &= row == static_cast<int64_t>(out_.query_rows.size());
    out_.inverse[row] = static_cast<int64_t>(out_.query_rows.size());
    out_.query_rows.push_back(row);
  }

  void Write(int64_t row, int64_t slot) {
    out_.write_rows.push_back(row);
    out_.write_slots.push_back(slot);
  }

  void Close(int r, int seq_len, int first_scratch_block, int scratch_begin, int scratch_count) {
    out_.query_start.push_back(static_cast<int32_t>(out_.query_rows.size()));
    out_.seq_lens.push_back(seq_len);
    paths_.push_back({r, first_scratch_block, scratch_begin, scratch_count});
  }

  void Request(int r) {
    const int n = b_.node_start[r + 1] - b_.node_start[r];
    const int begin = b_.row_start[r], known = b_.row_start[r + 1] - begin - n;
    const int root = out_.root[r];
    out_.first_path.push_back(static_cast<int32_t>(out_.seq_lens.size()));
    for (int i = 0; i < known; ++i) {
      Query(begin + i);
      Write(begin + i, Slot(r, b_.base[r] + i));
    }
    if (n == 0) return Close(r, root + 1, 0, 0, 0);
    const Children children(b_.parents + b_.node_start[r], n);
    bool is_first = true;
    ForEachPath(children, n, [&](const std::vector<int32_t>& path, size_t fresh) {
      const int64_t node_row = begin + known;
      for (size_t i = fresh; i < path.size(); ++i) {
        Query(node_row + path[i]);
        out_.node_path[b_.node_start[r] + path[i]] = static_cast<int32_t>(out_.seq_lens.size());
      }
      if (is_first) {
        for (size_t i = 0; i < path.size(); ++i) Write(node_row + path[i], Slot(r, root + 1 + static_cast<int>(i)));
        Close(r, root + 1 + static_cast<int>(path.size()), 0, 0, 0);
      } else {
        Branch(r, begin, known, root, path);
      }
      is_first = false;
    });
  }

  // A path beyond the first: its own scratch blocks from the block of position root + 1 on.
  void Branch(int r, int begin, int known, int root, const std::vector<int32_t>& path) {
    const int size = b_.block_size, length = static_cast<int>(path.size());
    const int first_block = (root + 1) / size;
    const int count = (root + length) / size - first_block + 1;
    const int scratch_begin = out_.scratch_used;
    out_.scratch_used += count;
    if (out_.scratch_used > b_.num_scratch) return Close(r, root + 1 + length, 0, 0, 0);
    const int32_t* scratch = b_.scratch + scratch_begin;
    auto slot = [&](int position) {
      return static_cast<int64_t>(scratch[position / size - first_block]) * size + position % size;
    };
    const int block_start = first_block * size;
    for (int i = 0; i < count; ++i) {
      // If the block's beginning is context, bring it along. Else start from zeros: the kernel reads whole tiles and
      // weighs what lies behind the last key with 0, which a NaN left by another request would survive.
      const bool has_context = i == 0 && block_start < b_.base[r];
      out_.copy_from.push_back(has_context ? b_.block_table[r * b_.table_stride + first_block] : b_.zero_block);
      out_.copy_to.push_back(scratch[i]);
    }
    for (int p = std::max(block_start, b_.base[r]); p <= root; ++p) Write(begin + p - b_.base[r], slot(p));
    for (int i = 0; i < length; ++i) Write(begin + known + path[i], slot(root + 1 + i));
    Close(r, root + 1 + length, first_block, scratch_begin, count);
  }

  void FillTables() {
    const int size = b_.block_size;
    for (int32_t len : out_.seq_lens) out_.table_width = std::max(out_.table_width, (len + size - 1) / size);
    const int width = out_.table_width;
    out_.tables.assign(paths_.size() * static_cast<size_t>(width), 0);
    for (size_t p = 0; p < paths_.size(); ++p) {
      const Path& path = paths_[p];
      int32_t* row = out_.tables.data() + p * width;
      const int blocks = (out_.seq_lens[p] + size - 1) / size;
      std::copy_n(b_.block_table + path.request * b_.table_stride, blocks, row);
      if (out_.scratch_used > b_.num_scratch) continue;
      for (int i = 0; i < path.scratch_count; ++i)
        row[path.first_scratch_block + i] = b_.scratch[path.scratch_begin + i];
    }
  }

  const Batch& b_;
  PathLayout out_;
  std::vector<Path> paths_;
};

}  // namespace

PathLayout ExpandPaths(const Batch& batch) { return Expander(batch).Run(); }

int ScratchNeeded(const int32_t* parents, int num_nodes, int root, int block_size) {
  if (num_nodes == 0) return 0;
  int needed = 0;
  bool is_first = true;
  const Children children(parents, num_nodes);
  ForEachPath(children, num_nodes, [&](const std::vector<int32_t>& path, size_t) {
    const int length = static_cast<int>(path.size());
    if (!is_first) needed += (root + length) / block_size - (root + 1) / block_size + 1;
    is_first = false;
  });
  return needed;
}

}  // namespace specrollout
