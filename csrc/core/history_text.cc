#include "core/history_text.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace specrollout {
namespace {

// what malloc adds to a page, and a node of the map of ids costs
constexpr size_t kPerAllocation = 16;
constexpr size_t kPerId = 40;

}  // namespace

HistoryText::~HistoryText() {
  for (Page& page : pages_) delete[] page.cells;
}

int32_t HistoryText::AddSlot(const Document& document) {
  int32_t slot = static_cast<int32_t>(documents_.size());
  if (free_slots_.empty()) {
    documents_.push_back(document);
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
    documents_[slot] = document;
  }
  return slot;
}

int32_t HistoryText::AddDocument(int32_t epoch, int32_t weight, int32_t prompt) {
  Document document;
  document.id = next_id_++;
  document.epoch = epoch;
  document.weight = weight;
  document.prompt = prompt;
  const int32_t slot = AddSlot(document);
  slot_of_id_[document.id] = slot;
  return slot;
}

int32_t HistoryText::AddPrompt(int32_t size) {
  Document document;
  document.is_prompt = true;
  const int32_t slot = AddSlot(document);
  const int32_t begin = (kPageSize - size % kPageSize) % kPageSize;
  const int32_t page = AddPage(slot, 0, begin);
  documents_[slot].first = documents_[slot].last = page;
  return slot;
}

int32_t HistoryText::SlotOf(int32_t id) const {
  const auto found = slot_of_id_.find(id);
  if (found == slot_of_id_.end()) {
    throw std::invalid_argument("document " + std::to_string(id) + " is not in the index: it was removed or retired");
  }
  return found->second;
}

int32_t HistoryText::AddPage(int32_t slot, int32_t before, int begin) {
  int32_t index = static_cast<int32_t>(pages_.size());
  if (free_pages_.empty()) {
    if (index >= std::numeric_limits<int32_t>::max() >> kPageBits) {
      throw std::length_error("a history index holds at most 2^31 tokens");
    }
    pages_.emplace_back();
  } else {
    index = free_pages_.back();
    free_pages_.pop_back();
  }
  Page& page = pages_[index];
  page = Page{};
  page.cells = new int32_t[kPageSize * (1 + numbers_)];
  page.slot = slot;
  page.before = before;
  page.begin = page.end = static_cast<uint8_t>(begin);
  ++num_used_pages_;
  return index;
}

Place HistoryText::Append(int32_t slot, int32_t token) {
  const int32_t last = documents_[slot].last;
  int32_t index = last;
  if (last == 0 || pages_[last].end == kPageSize) {
    index = AddPage(slot, last == 0 ? documents_[slot].prompt : last, 0);
    Document& document = documents_[slot];
    if (last == 0) {
      document.first = index;
    } else {
      pages_[last].after = index;
    }
    document.last = index;
  }
  Page& page = pages_[index];
  const int offset = page.end++;
  page.cells[offset] = token;
  ++documents_[slot].size;
  ++num_tokens_;
  return (index << kPageBits) + offset;
}

void HistoryText::Kill(int32_t slot, bool is_kept) {
  Document ghost = documents_[slot];
  num_tokens_ -= ghost.size;
  num_dead_ += ghost.size;
  if (!is_kept) {
    slot_of_id_.erase(ghost.id);
    documents_[slot].is_dead = true;
    return;
  }
  if (ghost.size == 0) return;
  Document& document = documents_[slot];
  document.first = document.last = document.size = 0;
  ghost.is_dead = true;
  const int32_t ghost_slot = AddSlot(ghost);
  for (int32_t page = ghost.first; page != 0; page = pages_[page].after) pages_[page].slot = ghost_slot;
}

void HistoryText::FreeDead() {
  for (size_t index = 1; index < pages_.size(); ++index) {
    Page& page = pages_[index];
    if (page.cells == nullptr || !documents_[page.slot].is_dead) continue;
    delete[] page.cells;
    page = Page{};
    free_pages_.push_back(static_cast<int32_t>(index));
    --num_used_pages_;
  }
  for (size_t slot = 0; slot < documents_.size(); ++slot) {
    if (!documents_[slot].is_dead) continue;
    documents_[slot] = Document{};
    free_slots_.push_back(static_cast<int32_t>(slot));
  }
  num_dead_ = 0;
}

int HistoryText::Recent(int32_t slot, int count, int32_t* end) const {
  const Document& document = documents_[slot];
  int32_t index = document.last != 0 ? document.last : document.prompt;
  int found = 0;
  while (index != 0 && found < count) {
    const Page& page = pages_[index];
    const int part = std::min(page.end - page.begin, count - found);
    found += part;
    std::copy_n(page.cells + page.end - part, part, end - found);
    index = page.before;
  }
  return found;
}

int HistoryText::SharedContext(Place place, const int32_t* recent_end, int limit) const {
  int32_t index = place >> kPageBits;
  int offset = place & (kPageSize - 1);
  int shared = 0;
  while (index != 0) {
    const Page& page = pages_[index];
    const int32_t* token = page.cells + offset;
    const int32_t* const stop = token - std::min(offset - page.begin, limit - shared);
    const int32_t* wanted = recent_end - shared;
    // most contexts that are alike at all are alike for long
    while (token - stop >= 8 && std::memcmp(token - 8, wanted - 8, 8 * sizeof(int32_t)) == 0) {
      token -= 8;
      wanted -= 8;
    }
    while (token > stop && token[-1] == wanted[-1]) {
      --token;
      --wanted;
    }
    shared = static_cast<int>(recent_end - wanted);
    if (token > stop || shared == limit) return shared;
    index = page.before;
    offset = kPageSize;
  }
  return shared;
}

bool HistoryText::EndsIn(int32_t slot, const int32_t* token_ids, int32_t count) const {
  for (int32_t index = documents_[slot].last; index != 0 && count > 0;) {
    const Page& page = pages_[index];
    for (int offset = page.end; offset > page.begin && count > 0;) {
      if (page.cells[--offset] != token_ids[--count]) return false;
    }
    index = page.before;
  }
  return true;
}

size_t HistoryText::nbytes() const {
  const size_t page = sizeof(int32_t) * kPageSize * (1 + numbers_) + kPerAllocation;
  return num_used_pages_ * page + pages_.capacity() * sizeof(Page) + documents_.capacity() * sizeof(Document) +
         slot_of_id_.size() * kPerId + (free_pages_.capacity() + free_slots_.capacity()) * sizeof(int32_t);
}

}  // namespace specrollout
