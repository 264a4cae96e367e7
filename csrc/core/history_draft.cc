#include "core/history_draft.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace specrollout {
namespace {

constexpr uint64_t kOne = 1ull << 24;
// class of context -> doubt, in 1/16; see tests/reference/history.py
constexpr int kDoubt[] = {16, 12, 9, 9, 10, 13, 16, 11, 8, 6, 3, 2};

// 1 to 8 tokens: 0 to 7; then 9-12, 13-16, 17-32, more
int ContextClass(int tokens) {
  if (tokens <= 8) return tokens - 1;
  if (tokens <= 12) return 8;
  if (tokens <= 16) return 9;
  return tokens <= 32 ? 10 : 11;
}

float LogQ(uint64_t p) { return static_cast<float>(std::log(static_cast<double>(std::max<uint64_t>(p, 1)) / kOne)); }

}  // namespace

void Draft::Clear() {
  token_ids.clear();
  parents.clear();
  log_q.clear();
}

bool Drafting::IsWorse(const Waiting& a, const Waiting& b) {
  if (a.total_log_q != b.total_log_q) return a.total_log_q < b.total_log_q;
  if (a.parent_place != b.parent_place) return a.parent_place > b.parent_place;
  return a.node > b.node;
}

void Drafting::ShareOut(int context_class, int32_t class_id, int32_t places, int32_t distinct, uint64_t weight,
                        uint64_t* unexplained) {
  const uint64_t d = distinct;
  const uint64_t doubt = kDoubt[context_class] * d * d;
  const uint64_t left = *unexplained * doubt / (16 * static_cast<uint64_t>(places) + doubt);
  const uint64_t shared = *unexplained - left;
  *unexplained = left;
  for (Branch& branch : branches_) {
    if (branch.class_id == class_id) branch.p += distinct == 1 ? shared : shared * branch.weight / weight;
  }
}

void Drafting::Count(const HistoryText& text, int32_t begin, int32_t* end, int32_t depth) {
  branches_.clear();
  uint64_t unexplained = kOne;
  int context_class = -1;
  int32_t class_id = 0;
  int32_t places = 0;
  int32_t distinct = 0;
  uint64_t weight = 0;
  int32_t kept = begin;
  for (int32_t i = begin; i < *end; ++i) {
    Reader& reader = readers_[order_[i]];
    if (reader.next == reader.end) {
      // the end of a page, or of the text: then it counts neither for nor against what would come next
      const HistoryText::Page& page = text.pages()[reader.page];
      if (page.after == 0) continue;
      const HistoryText::Page& after = text.pages()[page.after];
      reader.page = page.after;
      reader.next = after.cells;
      reader.end = after.cells + after.end;
      if (reader.next == reader.end) continue;
    }
    order_[kept++] = order_[i];
    const int its_class = ContextClass(reader.shared + 2 * depth);
    if (its_class != context_class) {
      if (places != 0) ShareOut(context_class, class_id, places, distinct, weight, &unexplained);
      context_class = its_class;
      ++class_id;
      places = distinct = 0;
      weight = 0;
    }
    const int32_t token = *reader.next++;
    size_t at = 0;
    while (at < branches_.size() && branches_[at].token != token) ++at;
    if (at == branches_.size()) branches_.push_back({token, 0, 0, 0, 0, 0});
    Branch& branch = branches_[at];
    if (branch.class_id != class_id) {
      branch.class_id = class_id;
      branch.weight = 0;
      ++distinct;
    }
    ++branch.count;
    ++places;
    branch.weight += reader.weight;
    weight += reader.weight;
    reader.branch = static_cast<int32_t>(at);
  }
  if (places != 0) ShareOut(context_class, class_id, places, distinct, weight, &unexplained);
  *end = kept;
}

int32_t Drafting::Expand(const HistoryText& text, int32_t index) {
  const int32_t begin = nodes_[index].begin;
  int32_t end = nodes_[index].end;
  const int32_t depth = nodes_[index].depth;
  const int32_t first_child = static_cast<int32_t>(nodes_.size());
  Count(text, begin, &end, depth);
  int32_t at = begin;
  for (const Branch& branch : branches_) {
    nodes_.push_back({branch.token, LogQ(branch.p), depth + 1, at, at + branch.count});
    at += branch.count;
  }
  if (branches_.size() > 1) {
    sorted_.assign(order_.begin() + begin, order_.begin() + end);
    for (const int32_t reader : sorted_) {
      Node& child = nodes_[first_child + readers_[reader].branch];
      order_[child.begin++] = reader;
    }
    for (size_t child = 0; child < branches_.size(); ++child)
      nodes_[first_child + child].begin -= branches_[child].count;
  }
  return first_child;
}

void Drafting::Put(const Node& node, int32_t parent, Draft* draft) {
  draft->token_ids.push_back(node.token);
  draft->parents.push_back(parent);
  draft->log_q.push_back(node.log_q);
}

void Drafting::BestFirst(const HistoryText& text, int max_nodes, int max_depth, Ends ends, Draft* draft) {
  frontier_.clear();
  int32_t parent = 0;
  int32_t parent_place = -1;
  double total = 0.0;
  for (int place = 0; place < max_nodes; ++place) {
    if (nodes_[parent].depth < max_depth) {
      const int32_t first = Expand(text, parent);
      for (int32_t child = first; child < static_cast<int32_t>(nodes_.size()); ++child) {
        if (ends.Has(nodes_[child].token)) continue;
        frontier_.push_back({total + nodes_[child].log_q, parent_place, child});
        std::push_heap(frontier_.begin(), frontier_.end(), IsWorse);
      }
    }
    if (frontier_.empty()) return;
    std::pop_heap(frontier_.begin(), frontier_.end(), IsWorse);
    const Waiting best = frontier_.back();
    frontier_.pop_back();
    parent = best.node;
    parent_place = place;
    total = best.total_log_q;
    Put(nodes_[parent], best.parent_place, draft);
  }
}

void Drafting::BestChain(const HistoryText& text, int max_nodes, int max_depth, Ends ends, Draft* draft) {
  int32_t parent = 0;
  for (int place = 0; place < std::min(max_nodes, max_depth); ++place) {
    const int32_t first = Expand(text, parent);
    int32_t best = -1;
    for (int32_t child = 0; child < static_cast<int32_t>(branches_.size()); ++child) {
      if (ends.Has(branches_[child].token)) continue;
      if (best < 0 || branches_[child].p > branches_[best].p) best = child;
    }
    if (best < 0) return;
    parent = first + best;
    Put(nodes_[parent], place - 1, draft);
  }
}

void Drafting::Build(const HistoryText& text, const std::vector<Candidate>& candidates, int max_nodes, int max_depth,
                     bool is_chain, Ends ends, Draft* draft) {
  draft->Clear();
  if (candidates.empty() || max_nodes <= 0 || max_depth <= 0) return;
  readers_.clear();
  order_.clear();
  for (const Candidate& candidate : candidates) {
    const HistoryText::Page& page = text.PageAt(candidate.place);
    order_.push_back(static_cast<int32_t>(readers_.size()));
    readers_.push_back({page.cells + (candidate.place & (HistoryText::kPageSize - 1)), page.cells + page.end,
                        candidate.place >> HistoryText::kPageBits, candidate.shared, candidate.weight, 0});
  }
  nodes_.clear();
  nodes_.push_back({0, 0.0f, 0, 0, static_cast<int32_t>(order_.size())});
  if (is_chain) {
    BestChain(text, max_nodes, max_depth, ends, draft);
  } else {
    BestFirst(text, max_nodes, max_depth, ends, draft);
  }
}

}  // namespace specrollout
