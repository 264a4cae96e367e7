// Random operations on all of the core, among them trees that are none; meant to be built with the sanitizers on.
//
// fuzz_core SECONDS [SEED]: rounds from this seed on for so long; 0 seconds: this round alone. What fails says which.
// What belongs here: what a caller may do, right or wrong, and what must hold afterwards. A check that the bindings
// make for the core is made here too.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/blocks.h"
#include "core/history_index.h"
#include "core/history_lookup.h"
#include "core/layout.h"
#include "core/merge.h"
#include "core/received.h"
#include "core/walk.h"

namespace {

using Ints = std::vector<int32_t>;
constexpr int32_t kSomeEnds[] = {1, 2};
constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

class Chance {
 public:
  explicit Chance(uint64_t from) : engine_(from) {}
  // below `end`
  int Below(int end) { return static_cast<int>(engine_() % static_cast<uint64_t>(end)); }
  bool OneIn(int of) { return Below(of) == 0; }
  int32_t Any() { return static_cast<int32_t>(engine_()); }
  template <typename T>
  T Of(const std::vector<T>& values) {
    return values[Below(static_cast<int>(values.size()))];
  }
  // One that a careless caller passes as a limit.
  int32_t Limit() { return OneIn(8) ? Of<int32_t>({kLeast, -1, 0, 4096}) : Below(70); }
  int32_t Token(int words) { return OneIn(60) ? Of<int32_t>({kLeast, -1, 0, kMost}) : Below(words); }
  Ints Text(int most, int words) {
    Ints text(Below(most));
    for (int32_t& token : text) token = Token(words);
    return text;
  }

 private:
  std::mt19937_64 engine_;
};

// --- indices -------------------------------------------------------------------------------------------------------

void ExpectDraft(const specrollout::Draft& draft, const Ints& node_start) {
  for (size_t k = 0; k + 1 < node_start.size(); ++k) {
    for (int32_t node = node_start[k]; node < node_start[k + 1]; ++node) {
      const int32_t parent = draft.parents[node];
      Expect(parent >= -1 && parent < node - node_start[k], "parents come before children");
      Expect(std::isfinite(draft.log_q[node]) && draft.log_q[node] <= 0.0f, "probabilities are above 0 and at most 1");
    }
  }
}

void FuzzHistory(Chance* chance) {
  const int shortest = 1 + chance->Below(4), longest = shortest + chance->Below(65 - shortest);
  specrollout::HistoryIndex index(shortest, longest, 1 + chance->Below(chance->OneIn(2) ? 4 : 4096));
  specrollout::HistoryLookup lookup;
  specrollout::Draft draft;
  Ints node_start, docs;
  const int words = 1 + chance->Below(chance->OneIn(2) ? 3 : 2000), steps = 20 + chance->Below(100);
  for (int step = 0; step < steps; ++step) {
    const Ints text = chance->Text(chance->OneIn(8) ? 3000 : 150, words);
    // one that was removed, or never was, is refused
    const int32_t doc = docs.empty() || chance->OneIn(30) ? chance->Any() : chance->Of(docs);
    const int32_t weight = chance->Of<int32_t>({-1, 0, 1, 256, kMost}), epoch = chance->Below(5);
    try {
      const int what = chance->Below(9);
      if (what == 0) docs.push_back(index.Add(text.data(), text.size(), weight, epoch));
      if (what == 1) docs.push_back(index.Open(epoch, weight));
      if (what == 2) index.SetPrompt(text.data(), text.size());
      if (what == 3) index.Sync(doc, text.data(), text.size());
      if (what == 4) index.SetWeight(doc, weight);
      if (what == 5 && docs.size() > 3) index.Remove(doc);
      if (what == 6 && chance->OneIn(6)) index.Retire(epoch);
      if (what > 6) index.Append(doc, text.data(), text.size() / 4);
    } catch (const std::invalid_argument&) {
    }
    if (chance->OneIn(8)) index.CheckIntegrity();
    std::vector<specrollout::Ask> asks;
    for (const int32_t one : docs) {
      try {  // is it there?
        index.SetWeight(one, 256);
      } catch (const std::invalid_argument&) {
        continue;
      }
      if (chance->OneIn(3))
        asks.push_back(
            {&index, one, chance->Limit(), chance->Limit(), chance->OneIn(2), {kSomeEnds, chance->Below(3)}});
    }
    lookup.Propose(asks, chance->OneIn(2), &draft, &node_start);
    Expect(node_start.size() == asks.size() + 1, "one draft per ask");
    ExpectDraft(draft, node_start);
  }
}

// --- trees ---------------------------------------------------------------------------------------------------------

// The trees of one drafter for a batch.
struct Trees {
  Ints node_start{0}, token_ids, parents, source;
  std::vector<float> log_q;

  size_t size() const { return parents.size(); }
  specrollout::merge::BatchView view() const {
    return {node_start.data(), token_ids.data(), parents.data(), log_q.data(), source.data()};
  }
};

// is_evil: some of it is not as it has to be.
Trees MakeTrees(Chance* chance, int num_requests, bool is_evil, int most = 65) {
  Trees trees;
  const bool is_chain = chance->OneIn(4);
  for (int r = 0; r < num_requests; ++r) {
    const int size = chance->OneIn(4) ? 0 : chance->Below(most);
    for (int i = 0; i < size; ++i) {
      const bool is_wrong = is_evil && chance->OneIn(40);
      trees.parents.push_back(is_wrong ? chance->Any() : is_chain ? i - 1 : chance->Below(i + 1) - 1);
      trees.token_ids.push_back(is_evil ? chance->Token(3) : chance->Below(3));
      trees.source.push_back(is_evil && chance->OneIn(40) ? chance->Any()
                                                          : chance->Below(specrollout::merge::kSources));
      float q = -0.25f * static_cast<float>(chance->Below(20));
      if (is_evil && chance->OneIn(20)) q = chance->Of<float>({NAN, INFINITY, -INFINITY, 100.0f, 1e30f, -1e30f, -0.0f});
      trees.log_q.push_back(q);
    }
    trees.node_start.push_back(static_cast<int32_t>(trees.parents.size()));
  }
  if (is_evil && chance->OneIn(6)) trees.node_start[chance->Below(num_requests + 1)] = chance->Any();
  return trees;
}

void ExpectMerged(const specrollout::merge::Merged& out, const specrollout::merge::Limits& limits, int num_requests) {
  Expect(out.node_start.size() == static_cast<size_t>(num_requests) + 1, "a tree for each request");
  const size_t count = out.parents.size();
  Expect(out.node_start.front() == 0 && out.node_start.back() == static_cast<int32_t>(count), "the nodes are covered");
  for (const size_t size :
       {out.token_ids.size(), out.log_q.size(), out.source.size(), out.depth.size(), out.reach.size()})
    Expect(size == count, "columns are equally long");
  for (int r = 0; r < num_requests; ++r) {
    const int32_t start = out.node_start[r], size = out.node_start[r + 1] - start;
    Expect(size >= 0 && (size == 0 || size <= limits.max_nodes[r]), "no more nodes than are allowed");
    for (int32_t i = 0; i < size; ++i) {
      const int32_t parent = out.parents[start + i];
      Expect(parent >= -1 && parent < i, "merged parents come before children");
      Expect(out.depth[start + i] == (parent < 0 ? 1 : out.depth[start + parent] + 1), "depths follow the parents");
      Expect(out.depth[start + i] <= limits.max_depth[r], "no deeper than is allowed");
      Expect(!limits.is_chain[r] || parent == i - 1, "chains are chains");
      Expect(out.reach[start + i] >= 0.0f && out.reach[start + i] <= 1.0f, "reach is a probability");
    }
  }
}

void FuzzMerge(Chance* chance, bool is_evil) {
  namespace merge = specrollout::merge;
  const int num_requests = 1 + chance->Below(6);
  std::vector<Trees> all;
  std::vector<merge::BatchView> views;
  size_t nodes = 0;
  for (int count = chance->Below(4); count > 0; --count) {
    Trees trees = MakeTrees(chance, num_requests, is_evil);
    const std::string misshapen = merge::Misshapen(trees.view(), num_requests, trees.size());
    const std::string fault = merge::Fault(trees.view(), num_requests, trees.size(), 3);
    Expect(is_evil || fault.empty(), "sound trees are found sound");
    Expect(misshapen.empty() || !fault.empty(), "what is misshapen is a fault");
    // wrong probabilities and tokens alone must do no harm
    if (misshapen.empty()) {
      Ints end_start(num_requests + 1);
      for (size_t r = 0; r < num_requests; ++r) end_start[r + 1] = std::min(end_start[r] + chance->Below(2), 2);
      std::vector<uint8_t> is_open(trees.size());
      merge::Open(trees.view(), num_requests, end_start.data(), kSomeEnds, reinterpret_cast<bool*>(is_open.data()));
      all.push_back(std::move(trees));
    }
  }
  for (const Trees& trees : all) {
    views.push_back(trees.view());
    nodes += trees.size();
  }
  Ints max_nodes(num_requests), max_depth(num_requests);
  std::vector<uint8_t> is_chain(num_requests);
  for (int r = 0; r < num_requests; ++r) {
    max_nodes[r] = chance->Limit();
    max_depth[r] = chance->Limit();
    is_chain[r] = chance->OneIn(3);
  }
  const merge::Limits limits{max_nodes.data(), max_depth.data(), is_chain.data(),
                             chance->OneIn(3) ? 1 + chance->Below(5) : 0};
  const auto number = [&] {
    if (is_evil && chance->OneIn(12)) return chance->Of<double>({NAN, INFINITY, -INFINITY, 1e308, -1e308, 0.0, -1.0});
    return chance->Below(1000) / 500.0;
  };
  std::vector<double> calibration(merge::kSources * merge::kTenths),
      costs(chance->OneIn(20) ? nodes / 2 + 1 : nodes + 1);
  for (double& factor : calibration) factor = number();
  for (double& cost : costs) cost = number();
  const merge::Prices prices{number(), costs.data(), costs.size(), number(), number()};
  merge::Merger merger;
  merge::Merged out;
  for (int again = 0; again < 2; ++again) {
    try {
      merger.Run(views, num_requests, limits, chance->OneIn(2) ? calibration.data() : nullptr,
                 chance->OneIn(2) ? &prices : nullptr, chance->Limit(), &out);
      if (!is_evil) ExpectMerged(out, limits, num_requests);
    } catch (const std::invalid_argument&) {
    }
  }
}

void FuzzCount(Chance* chance) {
  namespace merge = specrollout::merge;
  const int num_requests = 1 + chance->Below(5);
  const Trees trees = MakeTrees(chance, num_requests, false);
  Ints num_accepted, accepted;
  for (int r = 0; r < num_requests; ++r) {
    num_accepted.push_back(chance->OneIn(20) ? chance->Any() % 1000 : chance->Below(4));
    for (int i = 0; i < num_accepted.back(); ++i)
      accepted.push_back(chance->OneIn(20) ? chance->Any() : chance->Below(8));
  }
  if (chance->OneIn(4)) accepted.resize(accepted.size() / 2);
  merge::Tally tally;
  try {
    merge::Count(trees.view(), num_requests, num_accepted.data(), accepted.data(), accepted.size(), &tally);
  } catch (const std::invalid_argument&) {
  }
}

void FuzzWalk(Chance* chance) {
  const int num_requests = chance->Below(6);
  const Trees trees = MakeTrees(chance, num_requests, false);
  std::vector<int64_t> sampled(trees.size() + num_requests);
  for (int64_t& token : sampled) token = chance->OneIn(30) ? std::numeric_limits<int64_t>::max() : chance->Below(3);
  const specrollout::Walks walks = specrollout::Walk(num_requests, trees.node_start.data(), trees.parents.data(),
                                                     trees.token_ids.data(), sampled.data());
  Expect(walks.output.size() == static_cast<size_t>(num_requests * walks.width), "a row of tokens for each request");
  Ints counts(num_requests);
  for (int r = 0; r < num_requests; ++r) counts[r] = walks.num_accepted[r];
  const specrollout::Followed found =
      specrollout::Follow(num_requests, trees.node_start.data(), trees.parents.data(), trees.token_ids.data(),
                          walks.output.data(), walks.width, counts.data());
  Expect(found.num_accepted.size() == static_cast<size_t>(num_requests), "each request is followed");
}

void FuzzLayout(Chance* chance) {
  const int num_requests = 1 + chance->Below(5), block_size = chance->Of<int>({1, 16, 32});
  const Trees trees = MakeTrees(chance, num_requests, false, 30);
  Ints row_start{0}, base;
  int width = 0;
  for (int r = 0; r < num_requests; ++r) {
    const int rows = 1 + chance->Below(5) + trees.node_start[r + 1] - trees.node_start[r];
    base.push_back(chance->Below(200));
    row_start.push_back(row_start.back() + rows);
    width = std::max(width, (base.back() + rows) / block_size + 2);
  }
  Ints table(static_cast<size_t>(num_requests) * width), scratch(chance->Below(400));
  for (int32_t& block : table) block = chance->Below(1000);
  for (int32_t& block : scratch) block = 1000 + chance->Below(1000);
  const specrollout::Batch batch{num_requests,
                                 row_start.data(),
                                 base.data(),
                                 trees.node_start.data(),
                                 trees.parents.data(),
                                 table.data(),
                                 width,
                                 block_size,
                                 scratch.data(),
                                 static_cast<int>(scratch.size()),
                                 5000};
  const specrollout::PathLayout layout = specrollout::ExpandPaths(batch);
  if (layout.scratch_used <= batch.num_scratch) {
    Expect(layout.query_rows.size() == static_cast<size_t>(row_start.back()), "each row is a query");
    for (size_t row = 0; row < layout.inverse.size(); ++row) {
      const int64_t place = layout.inverse[row];
      Expect(place >= 0 && layout.query_rows[place] == static_cast<int64_t>(row), "each row is a query once");
    }
  }
  for (int r = 0; r < num_requests; ++r) {
    const int32_t start = trees.node_start[r];
    Expect(specrollout::ScratchNeeded(trees.parents.data() + start, trees.node_start[r + 1] - start, base[r],
                                      block_size) >= 0,
           "nobody needs less than nothing");
  }
}

void FuzzBlocks(Chance* chance) {
  const int layers = 1 + chance->Below(3), blocks = 2 + chance->Below(8), copies = chance->Below(4);
  const int64_t stride = 1 + chance->Below(64);
  std::vector<std::vector<char>> memory(layers, std::vector<char>(blocks * stride));
  std::vector<uint64_t> bases;
  for (auto& layer : memory) bases.push_back(reinterpret_cast<uint64_t>(layer.data()));
  const std::vector<int64_t> strides(layers, stride);
  std::vector<int64_t> from, to;
  for (int i = 0; i < copies; ++i) {
    // no target is a source
    from.push_back(chance->Below(blocks / 2));
    to.push_back(blocks / 2 + chance->Below(blocks - blocks / 2));
  }
  specrollout::CopyBlocks(layers, bases.data(), strides.data(), copies, from.data(), to.data());
}

// Trees of another process, right and wrong, for requests that come, grow and go.
void FuzzReceived(Chance* chance) {
  specrollout::Received received;
  std::vector<int64_t> handles(4);
  std::vector<Ints> texts(4);
  for (int i = 0; i < 4; ++i) {
    handles[i] = chance->Below(3);
    texts[i] = chance->Text(12, 3);
    if (chance->OneIn(2)) received.Open(i, chance->Below(6));
  }
  for (int turn = 0; turn < 12; ++turn) {
    const int count = chance->Below(4);
    std::vector<int64_t> of(count);
    Ints positions(count), starts{0}, tokens, parents;
    std::vector<uint8_t> ranks;
    std::vector<float> log_q;
    for (int t = 0; t < count; ++t) {
      of[t] = chance->Below(4);
      positions[t] = chance->OneIn(20) ? chance->Any() : 1 + chance->Below(8);
      for (int i = 0, size = chance->Below(10); i < size; ++i) {
        tokens.push_back(chance->Token(3));
        parents.push_back(chance->OneIn(40) ? chance->Any() : chance->Below(i + 1) - 1);
        ranks.push_back(static_cast<uint8_t>(chance->Below(10)));
        log_q.push_back(chance->OneIn(60) ? std::nanf("") : -static_cast<float>(chance->Below(4)));
      }
      starts.push_back(static_cast<int32_t>(tokens.size()));
    }
    const specrollout::ArrivedTrees trees{of.data(),      positions.data(), starts.data(), tokens.data(),
                                          parents.data(), ranks.data(),     log_q.data(),  of.size()};
    if (specrollout::Received::Misshapen(trees, 3).empty()) received.Put(trees);
    std::vector<specrollout::Text> now;
    for (Ints& text : texts) {
      if (chance->OneIn(2)) text.push_back(chance->Below(3));
      now.push_back({text.data(), static_cast<int64_t>(text.size())});
    }
    Ints nodes(4), depths(4);
    bool chains[4];
    for (int i = 0; i < 4; ++i) nodes[i] = chance->Limit(), depths[i] = chance->Limit(), chains[i] = chance->OneIn(2);
    specrollout::FittingTrees out;
    received.Fit(4, handles.data(), now.data(), nodes.data(), depths.data(), chains, &out);
    Expect(out.node_start.size() == 5 && out.node_start.back() == static_cast<int32_t>(out.parents.size()),
           "a tree for each request");
    for (int r = 0; r < 4; ++r)
      for (int i = out.node_start[r]; i < out.node_start[r + 1]; ++i)
        Expect(out.parents[i] >= -1 && out.parents[i] < i - out.node_start[r], "parents come before their children");
    specrollout::News news;
    received.Tell(4, handles.data(), now.data(), &news);
    if (chance->OneIn(4)) received.Close(chance->Below(4));
  }
}

void Round(uint64_t seed) {
  Chance chance(seed);
  if (chance.OneIn(7)) {
    FuzzHistory(&chance);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    FuzzMerge(&chance, false);
    FuzzMerge(&chance, true);
    FuzzCount(&chance);
    FuzzWalk(&chance);
    FuzzLayout(&chance);
    FuzzBlocks(&chance);
    FuzzReceived(&chance);
  }
}

// What the two processes share: the round in progress, and how many there were.
struct Progress {
  uint64_t seed, rounds;
};

void Run(double seconds, Progress* progress) {
  const std::time_t begin = std::time(nullptr);
  do {
    if (progress->rounds++) ++progress->seed;
    try {
      Round(progress->seed);
    } catch (const std::exception& error) {
      Expect(false, error.what());
    }
  } while (std::difftime(std::time(nullptr), begin) < seconds);
}

}  // namespace

int main(int count, char** words) {
  void* memory = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  auto* progress = new (memory) Progress{count > 2 ? std::strtoull(words[2], nullptr, 10) : 0, 0};
  // a process of its own: however it ends, somebody is left to say in which round
  const pid_t child = fork();
  if (child < 0) return 2;
  if (child == 0) {
    Run(count > 1 ? std::atof(words[1]) : 60.0, progress);
    return 0;
  }
  int status = 0;
  waitpid(child, &status, 0);
  const auto rounds = static_cast<unsigned long long>(progress->rounds);
  const auto seed = static_cast<unsigned long long>(progress->seed);
  if (status != 0) {
    std::fprintf(stderr, "fuzz_core failed; to repeat it: build/sanitized/fuzz_core 0 %llu\n", seed);
    return 1;
  }
  std::printf("%llu rounds, the last one %llu: sound\n", rounds, seed);
  return 0;
}
