#include "core/history_lookup.h"

#include <algorithm>

namespace specrollout {
namespace {

// What judging the place will read, and what reading on from it will.
void PrefetchPlace(const HistoryIndex& index, Place place, int which) {
  constexpr int kLine = 16;
  const HistoryText::Page& page = index.text().PageAt(place);
  const int offset = place & (HistoryText::kPageSize - 1);
  const int32_t* const token = page.cells + offset;
  __builtin_prefetch(&page.cells[HistoryText::kPageSize * (1 + which) + offset]);
  __builtin_prefetch(token);
  if (offset >= kLine) __builtin_prefetch(token - kLine);
  if (offset >= 2 * kLine) {
    __builtin_prefetch(token - 2 * kLine);
  } else if (page.before != 0) {
    const int32_t* const before = index.text().pages()[page.before].cells + HistoryText::kPageSize;
    __builtin_prefetch(before - 1);
    __builtin_prefetch(before - 1 - kLine);
  }
  if (offset + kLine < HistoryText::kPageSize) {
    __builtin_prefetch(token + kLine);
  } else if (page.after != 0) {
    __builtin_prefetch(index.text().pages()[page.after].cells);
  }
}

}  // namespace

void HistoryLookup::Begin(const Ask& ask, Walk* walk) {
  const HistoryText& text = ask.index->text();
  walk->index = ask.index;
  walk->slot = text.SlotOf(ask.document);
  walk->epoch = text.DocumentAt(walk->slot).epoch;
  walk->found.clear();
  walk->which = ask.index->num_lengths();
  walk->place = 0;
  walk->seen = 0;
  walk->known = 0;
  if (ask.max_nodes <= 0 || ask.max_depth <= 0) return;
  walk->known = text.Recent(walk->slot, ask.index->reach(), walk->recent + HistoryIndex::kReach);
  for (int which = 0; which < ask.index->num_lengths(); ++which) {
    const int n = ask.index->length(which);
    if (n > walk->known) break;
    walk->hashes[which] = HistoryIndex::Hash(walk->recent_end(), n);
    ask.index->PrefetchSlot(which, walk->hashes[which]);
  }
}

bool HistoryLookup::NextChain(Walk* walk) {
  while (--walk->which >= 0) {
    const int n = walk->index->length(walk->which);
    if (n > walk->known) continue;
    walk->place = walk->index->Latest(walk->which, walk->hashes[walk->which], walk->recent_end());
    walk->seen = 0;
    if (walk->place == 0) continue;
    PrefetchPlace(*walk->index, walk->place, walk->which);
    return true;
  }
  return false;
}

bool HistoryLookup::Step(Walk* walk, bool siblings) {
  const HistoryIndex& index = *walk->index;
  const HistoryText::Document& owner = index.text().Owner(walk->place);
  const int32_t slot = index.text().PageAt(walk->place).slot;
  const bool is_sibling = slot != walk->slot && !owner.is_prompt && owner.epoch == walk->epoch;
  if (owner.weight > 0 && (siblings || !is_sibling)) {
    const int shared = index.text().SharedContext(walk->place, walk->recent_end(), walk->known);
    // the chain of a longer context has seen it
    const bool is_known = walk->which + 1 < index.num_lengths() && shared >= index.length(walk->which + 1);
    if (!is_known) walk->found.push_back({walk->place, shared, owner.weight});
  }
  const int max_matches = index.max_matches();
  walk->place = index.Previous(walk->which, walk->place);
  if (walk->place != 0 && ++walk->seen < max_matches) {
    PrefetchPlace(index, walk->place, walk->which);
    return true;
  }
  return static_cast<int>(walk->found.size()) < std::min(kEnough, max_matches) && NextChain(walk);
}

void HistoryLookup::Propose(const std::vector<Ask>& asks, bool siblings, Draft* all, std::vector<int32_t>* node_start) {
  all->Clear();
  node_start->assign(1, 0);
  for (size_t first = 0; first < asks.size(); first += kAtOnce) {
    const int count = static_cast<int>(std::min<size_t>(kAtOnce, asks.size() - first));
    int walking[kAtOnce];
    int left = 0;
    for (int i = 0; i < count; ++i) Begin(asks[first + i], &walks_[i]);
    for (int i = 0; i < count; ++i) {
      const Walk& walk = walks_[i];
      for (int which = walk.index->num_lengths(); which-- > 0;) {
        if (walk.index->length(which) <= walk.known) walk.index->PrefetchHead(which, walk.hashes[which]);
      }
    }
    for (int i = 0; i < count; ++i) {
      if (NextChain(&walks_[i])) walking[left++] = i;
    }
    while (left > 0) {
      int still = 0;
      for (int at = 0; at < left; ++at) {
        if (Step(&walks_[walking[at]], siblings)) walking[still++] = walking[at];
      }
      left = still;
    }
    for (int i = 0; i < count; ++i) {
      const Ask& ask = asks[first + i];
      std::vector<Candidate>& found = walks_[i].found;
      std::stable_sort(found.begin(), found.end(),
                       [](const Candidate& a, const Candidate& b) { return a.shared > b.shared; });
      drafting_.Build(ask.index->text(), found, ask.max_nodes, ask.max_depth, ask.is_chain, ask.ends, &draft_);
      all->token_ids.insert(all->token_ids.end(), draft_.token_ids.begin(), draft_.token_ids.end());
      all->parents.insert(all->parents.end(), draft_.parents.begin(), draft_.parents.end());
      all->log_q.insert(all->log_q.end(), draft_.log_q.begin(), draft_.log_q.end());
      node_start->push_back(static_cast<int32_t>(all->token_ids.size()));
    }
  }
}

}  // namespace specrollout
