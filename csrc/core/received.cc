#include "core/received.h"

#include <algorithm>
#include <cmath>

namespace specrollout {

std::string Received::Misshapen(const ArrivedTrees& trees, int64_t vocab_size) {
  for (size_t t = 0; t < trees.num_trees; ++t) {
    const int32_t begin = trees.node_start[t], end = trees.node_start[t + 1];
    if (trees.positions[t] < 1) return "a tree hangs below no token";
    for (int32_t i = begin; i < end; ++i) {
      const float q = trees.log_q[i];
      if (trees.parents[i] < -1 || trees.parents[i] >= i - begin) return "a node comes before its parent";
      if (trees.token_ids[i] < 0 || trees.token_ids[i] >= vocab_size) return "a token is outside the vocabulary";
      if (!(q <= 0.0f) || !std::isfinite(q)) return "a probability is none";
    }
  }
  return "";
}

void Received::Open(int64_t handle, int64_t num_told) {
  Followed own;
  own.told = num_told;
  followed_[handle] = std::move(own);
}

Score Received::Close(int64_t handle) {
  const auto found = followed_.find(handle);
  if (found == followed_.end()) return Score{};
  const Score score = found->second.score;
  followed_.erase(found);
  return score;
}

Score Received::Of(int64_t handle) const {
  const auto found = followed_.find(handle);
  return found == followed_.end() ? Score{} : found->second.score;
}

size_t Received::Put(const ArrivedTrees& trees) {
  size_t known = 0;
  for (size_t t = 0; t < trees.num_trees; ++t) {
    const auto found = followed_.find(trees.handles[t]);
    if (found == followed_.end()) continue;  // over by now
    Followed& own = found->second;
    const int32_t begin = trees.node_start[t], end = trees.node_start[t + 1];
    own.token_ids.assign(trees.token_ids + begin, trees.token_ids + end);
    own.parents.assign(trees.parents + begin, trees.parents + end);
    own.ranks.assign(trees.ranks + begin, trees.ranks + end);
    own.log_q.assign(trees.log_q + begin, trees.log_q + end);
    own.root = -1;
    own.covers = trees.positions[t];
    ++known;
  }
  return known;
}

// Follows the request's own tokens down its tree; false: they leave it, or it hangs below tokens that are not there.
bool Received::Walk(Followed* own, const Text& text) {
  if (own->token_ids.empty() || own->covers > text.count) return false;
  const int32_t size = static_cast<int32_t>(own->token_ids.size());
  for (; own->covers < text.count; ++own->covers) {
    const int32_t token = text.tokens[own->covers];
    int32_t next = -1, rank = kNone;
    bool has_choice = false;
    for (int32_t i = own->root + 1; i < size; ++i) {
      if (own->parents[i] != own->root) continue;
      has_choice = true;
      if (own->token_ids[i] == token && own->ranks[i] < rank) next = i, rank = own->ranks[i];
    }
    if (has_choice && own->covers >= own->ranked) {
      ++own->score.tried;
      own->score.matched += rank == 0;
      own->score.covered += rank < kNone;
      own->ranked = own->covers + 1;
    }
    if (next < 0) {
      own->token_ids.clear();
      return false;
    }
    own->root = next;
  }
  return true;
}

void Received::Append(const Followed& own, int32_t most, int32_t depth, bool is_chain, FittingTrees* out) {
  const int32_t size = static_cast<int32_t>(own.token_ids.size());
  // node -> its place among those kept, and its level; -1: not below the root. Of the root itself: -1 and 0.
  place_.assign(size, -1);
  level_.assign(size, -1);
  seen_.assign(static_cast<size_t>(size) + 1, 0);
  int32_t kept = 0;
  for (int32_t i = own.root + 1; i < size && kept < most; ++i) {
    const int32_t parent = own.parents[i];
    const bool is_below_root = parent == own.root;
    const int32_t above = is_below_root ? 0 : parent < 0 ? -1 : level_[parent];
    if (above < 0 || above >= depth || (is_chain && seen_[parent + 1])) continue;
    seen_[parent + 1] = 1;
    out->token_ids.push_back(own.token_ids[i]);
    out->parents.push_back(is_below_root ? -1 : place_[parent]);
    out->log_q.push_back(own.log_q[i]);
    out->is_first.push_back(own.ranks[i] == 0);
    place_[i] = kept++;
    level_[i] = above + 1;
  }
}

void Received::Fit(size_t count, const int64_t* handles, const Text* texts, const int32_t* most_nodes,
                   const int32_t* most_depth, const bool* is_chain, FittingTrees* out) {
  for (size_t r = 0; r < count; ++r) {
    const auto found = followed_.find(handles[r]);
    if (found != followed_.end() && Walk(&found->second, texts[r]))
      Append(found->second, most_nodes[r], most_depth[r], is_chain[r], out);
    out->node_start.push_back(static_cast<int32_t>(out->token_ids.size()));
  }
}

void Received::Tell(size_t count, const int64_t* handles, const Text* texts, News* out) {
  for (size_t r = 0; r < count; ++r) {
    const auto found = followed_.find(handles[r]);
    if (found == followed_.end() || texts[r].count <= found->second.told) continue;
    int64_t& told = found->second.told;
    out->index.push_back(static_cast<int32_t>(r));
    out->counts.push_back(static_cast<int32_t>(texts[r].count - told));
    out->token_ids.insert(out->token_ids.end(), texts[r].tokens + told, texts[r].tokens + texts[r].count);
    told = texts[r].count;
  }
}

}  // namespace specrollout
