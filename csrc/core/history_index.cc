#include "core/history_index.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace specrollout {
namespace {

constexpr size_t kFirstCapacity = 16;

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// The shortest and the longest context, and one between where they are far apart.
std::vector<int> ContextLengths(int min_match, int max_match) {
  if (min_match < 1 || max_match < min_match || max_match > HistoryIndex::kReach) {
    throw std::invalid_argument("history index: need 1 <= min_match <= max_match <= 64");
  }
  std::vector<int> lengths{min_match};
  if (max_match > 3 * min_match) {
    int between = min_match;
    while (between * between < min_match * max_match) ++between;
    lengths.push_back(between);
  }
  if (max_match > min_match) lengths.push_back(max_match);
  return lengths;
}

}  // namespace

HistoryIndex::HistoryIndex(int min_match, int max_match, int max_matches)
    : max_matches_(max_matches), text_(static_cast<int>(ContextLengths(min_match, max_match).size())) {
  if (max_matches < 1) throw std::invalid_argument("history index: need 1 <= max_matches");
  for (const int n : ContextLengths(min_match, max_match)) {
    lengths_.push_back({n, std::vector<Head>(kFirstCapacity), 0});
  }
}

uint64_t HistoryIndex::Hash(const int32_t* recent_end, int count) {
  uint64_t hash = 0;
  for (int back = 1; back <= count; ++back) hash = Mix(hash, recent_end[-back]);
  return hash;
}

size_t HistoryIndex::FindHead(const Length& length, uint32_t tag, const int32_t* recent_end) const {
  const size_t mask = length.heads.size() - 1;
  size_t slot = tag & mask;
  while (const Place place = length.heads[slot].place) {
    if (length.heads[slot].tag == tag && text_.SharedContext(place, recent_end, length.n) == length.n) break;
    slot = (slot + 1) & mask;
  }
  return slot;
}

void HistoryIndex::Resize(Length* length, size_t capacity) {
  std::vector<Head> old(capacity);
  old.swap(length->heads);
  const size_t mask = capacity - 1;
  for (const Head& head : old) {
    if (head.place == 0) continue;
    // the contexts in the table differ, so the first free slot is the head's own
    size_t slot = head.tag & mask;
    while (length->heads[slot].place != 0) slot = (slot + 1) & mask;
    length->heads[slot] = head;
  }
}

void HistoryIndex::Link(int which, Place place, const int32_t* recent_end, uint64_t hash) {
  Length& length = lengths_[which];
  Head& head = length.heads[FindHead(length, Tag(hash), recent_end)];
  text_.Number(place, which) = head.place;
  const bool is_new = head.place == 0;
  head = {Tag(hash), place};
  if (is_new && IsTooFull(++length.num_distinct, length.heads.size())) Resize(&length, length.heads.size() * 2);
}

void HistoryIndex::AppendTo(int32_t slot, const int32_t* token_ids, size_t count) {
  // the first tokens' contexts begin in the text that is there, the others' lie in what comes
  std::array<int32_t, 2 * kReach> seam;
  const size_t longest = lengths_.back().n;
  const size_t head = std::min(count, longest);
  const int known = text_.Recent(slot, static_cast<int>(longest), seam.data() + longest);
  std::copy_n(token_ids, head, seam.data() + longest);
  for (size_t i = 0; i < head; ++i) {
    AppendOne(slot, token_ids[i], seam.data() + longest + i, static_cast<int>(std::min(known + i, longest)));
  }
  for (size_t i = head; i < count; ++i) AppendOne(slot, token_ids[i], token_ids + i, static_cast<int>(longest));
}

void HistoryIndex::AppendOne(int32_t slot, int32_t token, const int32_t* recent_end, int known) {
  const Place place = text_.Append(slot, token);
  uint64_t hash = 0;
  int hashed = 0;
  for (int which = 0; which < num_lengths(); ++which) {
    const int n = lengths_[which].n;
    if (n > known) {
      text_.Number(place, which) = 0;
      continue;
    }
    while (hashed < n) hash = Mix(hash, recent_end[-++hashed]);
    Link(which, place, recent_end, hash);
  }
}

void HistoryIndex::SetPrompt(const int32_t* token_ids, size_t count) {
  const int32_t before = prompt_;
  prompt_ = 0;
  for (const int32_t slot : prompts_) {
    const HistoryText::Document& held = text_.DocumentAt(slot);
    if (static_cast<size_t>(held.size) == count && text_.EndsIn(slot, token_ids, held.size)) prompt_ = held.last;
  }
  if (prompt_ == 0 && count > 0) {
    const int32_t slot = text_.AddPrompt(static_cast<int32_t>(count));
    text_.DocumentAt(slot).weight = kOne;
    prompts_.push_back(slot);
    AppendTo(slot, token_ids, count);
    prompt_ = text_.DocumentAt(slot).last;
  }
  if (before != prompt_) LeavePrompt(before, 0);
  CompactIfHalfDead();
}

void HistoryIndex::LeavePrompt(int32_t last, int32_t num_gone) {
  if (last == 0) return;
  const int32_t slot = text_.pages()[last].slot;
  HistoryText::Document& prompt = text_.DocumentAt(slot);
  prompt.num_answers -= num_gone;
  if (prompt.num_answers > 0 || last == prompt_) return;
  text_.Kill(slot, false);
  prompts_.erase(std::find(prompts_.begin(), prompts_.end(), slot));
}

int32_t HistoryIndex::Add(const int32_t* token_ids, size_t count, int32_t weight, int32_t epoch) {
  const int32_t id = Open(epoch, weight);
  Append(id, token_ids, count);
  return id;
}

int32_t HistoryIndex::Open(int32_t epoch, int32_t weight) {
  if (weight < 0) throw std::invalid_argument("a document's weight is below 0");
  if (prompt_ != 0) ++text_.DocumentAt(text_.pages()[prompt_].slot).num_answers;
  return text_.DocumentAt(text_.AddDocument(epoch, weight, prompt_)).id;
}

void HistoryIndex::Append(int32_t id, const int32_t* token_ids, size_t count) {
  AppendTo(text_.SlotOf(id), token_ids, count);
}

bool HistoryIndex::Sync(int32_t id, const int32_t* token_ids, size_t count) {
  const int32_t slot = text_.SlotOf(id);
  const size_t held = text_.DocumentAt(slot).size;
  const size_t window = std::min(held, kSyncWindow);
  const bool is_prefix = held <= count && text_.EndsIn(slot, token_ids + (held - window), static_cast<int32_t>(window));
  if (!is_prefix) Kill(slot, true);
  const size_t begin = is_prefix ? held : 0;
  AppendTo(slot, token_ids + begin, count - begin);
  return is_prefix;
}

void HistoryIndex::SetWeight(int32_t id, int32_t weight) {
  if (weight < 0) throw std::invalid_argument("a document's weight is below 0");
  text_.DocumentAt(text_.SlotOf(id)).weight = weight;
}

void HistoryIndex::Remove(int32_t id) { Kill(text_.SlotOf(id), false); }

int HistoryIndex::Retire(int32_t before_epoch) {
  std::vector<int32_t> old;
  for (size_t slot = 0; slot < text_.documents().size(); ++slot) {
    const HistoryText::Document& document = text_.documents()[slot];
    if (document.id >= 0 && !document.is_dead && document.epoch < before_epoch) old.push_back(document.id);
  }
  for (const int32_t id : old) {
    const int32_t slot = text_.SlotOf(id);
    text_.Kill(slot, false);
    LeavePrompt(text_.DocumentAt(slot).prompt, 1);
  }
  CompactIfHalfDead();
  return static_cast<int>(old.size());
}

void HistoryIndex::Kill(int32_t slot, bool is_kept) {
  text_.Kill(slot, is_kept);
  if (!is_kept) LeavePrompt(text_.DocumentAt(slot).prompt, 1);
  CompactIfHalfDead();
}

void HistoryIndex::CompactIfHalfDead() {
  if (text_.num_dead() > text_.num_tokens()) Compact();
}

Place HistoryIndex::SkipDead(int which, Place place) const {
  while (place != 0 && text_.IsDead(place)) place = text_.Number(place, which);
  return place;
}

// Takes dead places out of all chains, then gives their pages back. The order of the others stays.
void HistoryIndex::Compact() {
  for (int which = 0; which < num_lengths(); ++which) {
    for (size_t index = 1; index < text_.pages().size(); ++index) {
      const HistoryText::Page& page = text_.pages()[index];
      if (page.cells == nullptr || text_.documents()[page.slot].is_dead) continue;
      const Place first = static_cast<Place>(index) << HistoryText::kPageBits;
      for (Place place = first + page.begin; place < first + page.end; ++place) {
        int32_t& previous = text_.Number(place, which);
        previous = SkipDead(which, previous);
      }
    }
    Length& length = lengths_[which];
    length.num_distinct = 0;
    for (Head& head : length.heads) {
      head.place = SkipDead(which, head.place);
      length.num_distinct += head.place != 0;
    }
    size_t capacity = kFirstCapacity;
    while (IsTooFull(length.num_distinct, capacity)) capacity *= 2;
    Resize(&length, capacity);
  }
  text_.FreeDead();
}

void HistoryIndex::PrefetchSlot(int which, uint64_t hash) const {
  const std::vector<Head>& heads = lengths_[which].heads;
  __builtin_prefetch(&heads[Tag(hash) & (heads.size() - 1)]);
}

void HistoryIndex::PrefetchHead(int which, uint64_t hash) const {
  const std::vector<Head>& heads = lengths_[which].heads;
  const Head& head = heads[Tag(hash) & (heads.size() - 1)];
  if (head.place == 0) return;
  const HistoryText::Page& page = text_.PageAt(head.place);
  const int offset = head.place & (HistoryText::kPageSize - 1);
  __builtin_prefetch(&page.cells[offset]);
  __builtin_prefetch(&page.cells[std::max(0, offset - 8)]);
}

Place HistoryIndex::Latest(int which, uint64_t hash, const int32_t* recent_end) const {
  const Length& length = lengths_[which];
  return SkipDead(which, length.heads[FindHead(length, Tag(hash), recent_end)].place);
}

Place HistoryIndex::Previous(int which, Place place) const { return SkipDead(which, text_.Number(place, which)); }

size_t HistoryIndex::num_documents() const {
  const auto& all = text_.documents();
  return std::count_if(all.begin(), all.end(), [](const auto& one) { return one.id >= 0 && !one.is_dead; });
}

size_t HistoryIndex::nbytes() const {
  size_t total = sizeof(*this) + text_.nbytes() + prompts_.capacity() * sizeof(int32_t);
  for (const Length& length : lengths_) total += sizeof(length) + length.heads.capacity() * sizeof(Head);
  return total;
}

}  // namespace specrollout
