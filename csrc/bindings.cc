// Thin: numpy in, numpy out. Everything that thinks is in core/.
//
// What is small keeps the GIL: some microseconds are less than the wait for its return when another thread takes it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind_common.h"
#include "core/blocks.h"
#include "core/layout.h"
#include "core/merge.h"
#include "core/walk.h"

namespace py = pybind11;
using namespace specrollout;

void bind_drafters(py::module_& m);

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void Expect(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void ExpectTree(const Array<int32_t>& node_start, const Array<int32_t>& parents, int num_requests) {
  Expect(num_requests >= 0 && node_start.size() == num_requests + 1,
         "node_start must have one entry per request and one more");
  const int32_t *start = node_start.data(), *parent = parents.data();
  Expect(start[0] == 0 && start[num_requests] == parents.size(), "node_start must cover parents");
  // before any node is looked at: only then does every start lie within `parents`
  for (int r = 0; r < num_requests; ++r) Expect(start[r] <= start[r + 1], "node_start must not fall");
  for (int r = 0; r < num_requests; ++r)
    for (int i = start[r]; i < start[r + 1]; ++i)
      Expect(parent[i] >= -1 && parent[i] < i - start[r], "parents must come before their children");
}

// Every position that the layout looks up lies in a block of its request's row of the table.
void ExpectRows(const Array<int32_t>& row_start, const Array<int32_t>& base, const Array<int32_t>& node_start,
                const Array<int32_t>& parents, int64_t num_slots) {
  const int n = static_cast<int>(base.size());
  const int32_t *rows = row_start.data(), *start = node_start.data(), *parent = parents.data();
  Expect(rows[0] == 0, "row_start must begin at 0");
  std::vector<int32_t> depth(static_cast<size_t>(parents.size()));
  for (int r = 0; r < n; ++r) {
    const int64_t known = int64_t{rows[r + 1]} - rows[r] - (start[r + 1] - start[r]);
    Expect(known >= 1, "row_start must give each request a row beside those of its nodes");
    int32_t deepest = 0;
    for (int i = start[r]; i < start[r + 1]; ++i) {
      depth[i] = parent[i] < 0 ? 1 : depth[start[r] + parent[i]] + 1;
      deepest = std::max(deepest, depth[i]);
    }
    Expect(base.data()[r] >= 0, "base must not be below 0");
    Expect(base.data()[r] + known + deepest <= num_slots, "base must lie within the blocks of block_table");
  }
}

py::dict expand_paths(Array<int32_t> row_start, Array<int32_t> base, Array<int32_t> node_start, Array<int32_t> parents,
                      py::array_t<int32_t> block_table, int block_size, Array<int32_t> scratch, int32_t zero_block) {
  const int n = static_cast<int>(base.size());
  Expect(row_start.size() == n + 1, "row_start must have one entry per request and one more");
  Expect(block_table.ndim() == 2 && block_table.shape(0) >= n, "block_table must have a row per request");
  Expect(block_table.strides(1) == sizeof(int32_t), "block_table rows must be contiguous");
  Expect(block_size > 0, "block_size must be above 0");
  ExpectTree(node_start, parents, n);
  ExpectRows(row_start, base, node_start, parents, int64_t{block_table.shape(1)} * block_size);
  Batch batch{n,
              row_start.data(),
              base.data(),
              node_start.data(),
              parents.data(),
              block_table.data(),
              static_cast<int64_t>(block_table.strides(0) / sizeof(int32_t)),
              block_size,
              scratch.data(),
              static_cast<int>(scratch.size()),
              zero_block};
  PathLayout layout = [&] {
    py::gil_scoped_release release;
    return ExpandPaths(batch);
  }();
  Expect(layout.scratch_used <= batch.num_scratch, "the trees need more scratch blocks than there are");
  const py::ssize_t paths = static_cast<py::ssize_t>(layout.seq_lens.size()), width = layout.table_width;
  py::dict out;
  out["query_rows"] = Give(std::move(layout.query_rows));
  out["inverse"] = Give(std::move(layout.inverse));
  out["query_start"] = Give(std::move(layout.query_start));
  out["seq_lens"] = Give(std::move(layout.seq_lens));
  out["tables"] = Give(std::move(layout.tables)).reshape({paths, width});
  out["write_rows"] = Give(std::move(layout.write_rows));
  out["write_slots"] = Give(std::move(layout.write_slots));
  out["copy_from"] = Give(std::move(layout.copy_from));
  out["copy_to"] = Give(std::move(layout.copy_to));
  out["node_path"] = Give(std::move(layout.node_path));
  out["depths"] = Give(std::move(layout.depths));
  out["node_rows"] = Give(std::move(layout.node_rows));
  out["node_positions"] = Give(std::move(layout.node_positions));
  out["first_path"] = Give(std::move(layout.first_path));
  out["root"] = Give(std::move(layout.root));
  out["is_in_order"] = layout.is_in_order;
  return out;
}

// Request and depth of every logits row: a root's, then its nodes', request after request.
py::tuple row_layout(Array<int32_t> node_start, Array<int32_t> depth) {
  const int n = static_cast<int>(node_start.size()) - 1;
  Expect(n >= 0 && node_start.at(0) == 0 && node_start.at(n) == depth.size(), "node_start must cover depth");
  std::vector<int32_t> request, level;
  request.reserve(depth.size() + n);
  level.reserve(depth.size() + n);
  for (int r = 0; r < n; ++r) {
    const int begin = node_start.data()[r], end = node_start.data()[r + 1];
    Expect(begin <= end && end <= depth.size(), "node_start must not fall");
    request.insert(request.end(), end - begin + 1, r);
    level.push_back(0);
    level.insert(level.end(), depth.data() + begin, depth.data() + end);
  }
  return py::make_tuple(Give(std::move(request)), Give(std::move(level)));
}

// Each row's entry of its request's list: the one of the row's depth; 0 where the request has no list.
py::array_t<int64_t> by_depth(const py::sequence& lists, Array<int32_t> node_start, Array<int32_t> row_depth) {
  const int n = static_cast<int>(lists.size());
  Expect(node_start.size() == n + 1, "node_start must have one entry per list and one more");
  Expect(node_start.at(n) + n == row_depth.size(), "row_depth must have a row per list and per node");
  py::array_t<int64_t> out(row_depth.size());
  int row = 0;
  for (int r = 0; r < n; ++r) {
    const int end = node_start.data()[r + 1] + r + 1;
    Expect(row <= end && end <= row_depth.size(), "node_start must not fall");
    const py::object list = lists[r];
    if (list.is_none()) {
      std::fill(out.mutable_data() + row, out.mutable_data() + end, 0);
      row = end;
      continue;
    }
    const auto values = list.cast<Array<int64_t>>();
    for (; row < end; ++row) {
      const int depth = row_depth.data()[row];
      Expect(depth >= 0 && depth < values.size(), "a row lies deeper than its list is long");
      out.mutable_data()[row] = values.data()[depth];
    }
  }
  return out;
}

// Which trees must do without their branches, since the scratch blocks go to those before them.
py::array_t<bool> without_scratch(Array<int32_t> node_start, Array<int32_t> parents, Array<int32_t> roots,
                                  int block_size, int num_scratch) {
  const int n = static_cast<int>(roots.size());
  Expect(block_size > 0, "block_size must be above 0");
  Expect(node_start.size() == n + 1, "node_start must have one entry per request and one more");
  ExpectTree(node_start, parents, n);
  py::array_t<bool> out(n);
  for (int r = 0; r < n; ++r) {
    const int start = node_start.at(r), size = node_start.at(r + 1) - start;
    Expect(roots.at(r) >= 0 && int64_t{roots.at(r)} + size < INT32_MAX, "roots must be positions from 0 on");
    const int needed = ScratchNeeded(parents.data() + start, size, roots.at(r), block_size);
    out.mutable_at(r) = needed > num_scratch;
    if (needed <= num_scratch) num_scratch -= needed;
  }
  return out;
}

py::tuple walk(Array<int32_t> node_start, Array<int32_t> parents, Array<int32_t> tokens, Array<int64_t> sampled) {
  const int n = static_cast<int>(node_start.size()) - 1;
  ExpectTree(node_start, parents, n);
  Expect(tokens.size() == parents.size(), "tokens and parents must have the same length");
  Expect(sampled.size() == parents.size() + n, "sampled must have a row per request and per node");
  Walks walks = Walk(n, node_start.data(), parents.data(), tokens.data(), sampled.data());
  const py::ssize_t width = walks.width;
  return py::make_tuple(Give(std::move(walks.output)).reshape({py::ssize_t(n), width}),
                        Give(std::move(walks.output_row)).reshape({py::ssize_t(n), width}),
                        Give(std::move(walks.num_accepted)), Give(std::move(walks.accepted)));
}

py::tuple follow(Array<int32_t> node_start, Array<int32_t> parents, Array<int32_t> tokens, Array<int32_t> output,
                 Array<int32_t> counts) {
  const int n = static_cast<int>(node_start.size()) - 1;
  ExpectTree(node_start, parents, n);
  Expect(tokens.size() == parents.size(), "tokens and parents must have the same length");
  Expect(output.ndim() == 2 && output.shape(0) == n && counts.size() == n,
         "output and counts must have a row per request");
  const int width = static_cast<int>(output.shape(1));
  for (int r = 0; r < n; ++r) Expect(counts.at(r) >= 0 && counts.at(r) <= width, "counts must lie within output");
  Followed found = Follow(n, node_start.data(), parents.data(), tokens.data(), output.data(), width, counts.data());
  return py::make_tuple(Give(std::move(found.num_accepted)), Give(std::move(found.accepted)));
}

void copy_blocks(Array<uint64_t> bases, Array<int64_t> strides, Array<int64_t> from, Array<int64_t> to) {
  Expect(bases.size() == strides.size(), "bases and strides must have the same length");
  Expect(from.size() == to.size(), "from and to must have the same length");
  for (py::ssize_t i = 0; i < bases.size(); ++i) {
    Expect(bases.data()[i] != 0 && strides.data()[i] > 0, "bases must be addresses, and strides above 0");
  }
  for (const auto& blocks : {from, to}) {
    const int64_t* end = blocks.data() + blocks.size();
    Expect(std::all_of(blocks.data(), end, [](int64_t block) { return block >= 0; }), "blocks must not be below 0");
  }
  py::gil_scoped_release release;
  CopyBlocks(static_cast<int>(bases.size()), bases.data(), strides.data(), static_cast<int>(from.size()), from.data(),
             to.data());
}

// --- merging and counting: arrays are read in place, and checked rather than converted ---

using merge::BatchView;

struct Arrays {
  BatchView view;
  size_t num_nodes;
};

Arrays ReadBatch(const py::handle& node_start, const py::handle& token_ids, const py::handle& parents,
                 const py::handle& log_q, const py::handle& source, size_t num_requests) {
  Arrays out;
  py::ssize_t starts = static_cast<py::ssize_t>(num_requests) + 1, nodes = -1;
  out.view.node_start = Read<int32_t>(node_start, "node_start", &starts);
  out.view.token_ids = Read<int32_t>(token_ids, "token_ids", &nodes);
  out.view.parents = Read<int32_t>(parents, "parents", &nodes);
  out.view.log_q = Read<float>(log_q, "log_q", &nodes);
  out.view.source = Read<int32_t>(source, "source", &nodes);
  out.num_nodes = static_cast<size_t>(nodes);
  return out;
}

void CheckBatch(const py::object& node_start, const py::object& token_ids, const py::object& parents,
                const py::object& log_q, const py::object& source, size_t num_requests, int64_t vocab_size) {
  const Arrays own = ReadBatch(node_start, token_ids, parents, log_q, source, num_requests);
  const std::string fault = merge::Fault(own.view, num_requests, own.num_nodes, vocab_size);
  if (!fault.empty()) throw std::invalid_argument(fault);
}

py::array_t<bool> OpenNodes(Array<int32_t> node_start, Array<int32_t> parents, Array<int32_t> tokens,
                            const py::object& end_start, const py::object& end_ids) {
  const int n = static_cast<int>(node_start.size()) - 1;
  ExpectTree(node_start, parents, n);
  Expect(tokens.size() == parents.size(), "tokens and parents must have the same length");
  const EndLists ends(end_start, end_ids, static_cast<size_t>(n));
  py::array_t<bool> out(tokens.size());
  // probabilities and sources are not looked at
  const BatchView batch{node_start.data(), tokens.data(), parents.data(), nullptr, nullptr};
  merge::Open(batch, static_cast<size_t>(n), ends.start, ends.ids, out.mutable_data());
  return out;
}

py::tuple MergeSelect(const py::list& proposals, const py::object& max_nodes, const py::object& max_depth,
                      const py::object& is_chain, const py::object& calibration, int width, const py::object& prices,
                      int least_nodes) {
  thread_local merge::Merger merger;
  thread_local std::vector<BatchView> views;
  py::ssize_t requests = -1;
  merge::Limits limits{};
  limits.max_nodes = Read<int32_t>(max_nodes, "max_nodes", &requests);
  limits.max_depth = Read<int32_t>(max_depth, "max_depth", &requests);
  limits.is_chain = reinterpret_cast<const uint8_t*>(Read<bool>(is_chain, "is_chain", &requests));
  limits.width = width;
  const size_t num_requests = static_cast<size_t>(requests);
  views.clear();
  for (const py::handle& item : proposals) {
    const auto columns = py::cast<py::tuple>(item);
    if (columns.size() != 5) throw std::invalid_argument("a proposal has five columns");
    const Arrays own = ReadBatch(columns[0], columns[1], columns[2], columns[3], columns[4], num_requests);
    // what is no tree would read beyond the arrays
    const std::string fault = merge::Misshapen(own.view, num_requests, own.num_nodes);
    if (!fault.empty()) throw std::invalid_argument(fault);
    views.push_back(own.view);
  }
  py::ssize_t cells = merge::kSources * merge::kTenths;
  const double* table = calibration.is_none() ? nullptr : Read<double>(calibration, "calibration", &cells, 2);
  merge::Prices costs{};
  if (!prices.is_none()) {
    const auto given = py::cast<py::tuple>(prices);
    if (given.size() != 4) throw std::invalid_argument("prices are plain, nodes, branch and draft");
    py::ssize_t steps = -1;
    costs.plain = py::cast<double>(given[0]);
    costs.nodes = Read<double>(given[1], "prices", &steps);
    costs.num_nodes = static_cast<size_t>(steps);
    costs.branch = py::cast<double>(given[2]);
    costs.draft = py::cast<double>(given[3]);
  }
  merge::Merged out;
  merger.Run(views, num_requests, limits, table, prices.is_none() ? nullptr : &costs, least_nodes, &out);
  return py::make_tuple(Give(std::move(out.node_start)), Give(std::move(out.token_ids)), Give(std::move(out.parents)),
                        Give(std::move(out.log_q)), Give(std::move(out.source)), Give(std::move(out.depth)),
                        Give(std::move(out.reach)), Give(std::move(out.num_proposed)), out.ms, out.gain, out.best);
}

py::array_t<int32_t> Depths(const py::object& node_start, const py::object& parents, size_t num_requests) {
  py::ssize_t starts = static_cast<py::ssize_t>(num_requests) + 1, nodes = -1;
  const int32_t* start = Read<int32_t>(node_start, "node_start", &starts);
  const int32_t* parent = Read<int32_t>(parents, "parents", &nodes);
  std::vector<int32_t> depth(static_cast<size_t>(nodes));
  if (start[0] != 0 || start[num_requests] != nodes) throw std::invalid_argument("node_start does not cover the nodes");
  for (size_t r = 0; r < num_requests; ++r) {
    if (start[r + 1] < start[r] || start[r + 1] > nodes) throw std::invalid_argument("node_start falls");
    for (int32_t i = start[r]; i < start[r + 1]; ++i) {
      if (parent[i] < -1 || parent[i] >= i - start[r]) {
        throw std::invalid_argument("parent " + std::to_string(parent[i]) + " does not come before its child");
      }
      depth[i] = parent[i] < 0 ? 1 : depth[start[r] + parent[i]] + 1;
    }
  }
  return Give(std::move(depth));
}

py::tuple Tally(const py::object& node_start, const py::object& parents, const py::object& log_q,
                const py::object& source, const py::object& num_accepted, const py::object& accepted) {
  py::ssize_t requests = -1, listed = -1;
  const int32_t* counts = Read<int32_t>(num_accepted, "num_accepted", &requests);
  const int32_t* nodes = Read<int32_t>(accepted, "accepted", &listed);
  const size_t num_requests = static_cast<size_t>(requests);
  // tokens are not looked at
  const Arrays own = ReadBatch(node_start, parents, parents, log_q, source, num_requests);
  const std::string fault = merge::Misshapen(own.view, num_requests, own.num_nodes);
  if (!fault.empty()) throw std::invalid_argument(fault);
  merge::Tally tally;
  merge::Count(own.view, num_requests, counts, nodes, static_cast<size_t>(listed), &tally);
  constexpr int kCells = merge::kSources * merge::kTenths;
  py::array_t<double> cells({3, merge::kSources, merge::kTenths});
  std::copy_n(tally.reached, kCells, cells.mutable_data());
  std::copy_n(tally.expected, kCells, cells.mutable_data() + kCells);
  std::copy_n(tally.accepted, kCells, cells.mutable_data() + 2 * kCells);
  return py::make_tuple(cells, py::array_t<int64_t>(merge::kSources, tally.num_verified),
                        py::array_t<int64_t>(merge::kSources, tally.num_accepted));
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Host arithmetic of tree speculation; see csrc/core for what each function means.";
  m.def("expand_paths", &expand_paths, py::arg("row_start"), py::arg("base"), py::arg("node_start"), py::arg("parents"),
        py::arg("block_table"), py::arg("block_size"), py::arg("scratch"), py::arg("zero_block"));
  m.def("row_layout", &row_layout, py::arg("node_start"), py::arg("depth"));
  m.def("by_depth", &by_depth, py::arg("lists"), py::arg("node_start"), py::arg("row_depth"));
  m.def("without_scratch", &without_scratch, py::arg("node_start"), py::arg("parents"), py::arg("roots"),
        py::arg("block_size"), py::arg("num_scratch"));
  m.def("walk", &walk, py::arg("node_start"), py::arg("parents"), py::arg("tokens"), py::arg("sampled"));
  m.def("follow", &follow, py::arg("node_start"), py::arg("parents"), py::arg("tokens"), py::arg("output"),
        py::arg("counts"));
  m.def("copy_blocks", &copy_blocks, py::arg("bases"), py::arg("strides"), py::arg("copy_from"), py::arg("copy_to"));
  m.def("check_batch", &CheckBatch, py::arg("node_start"), py::arg("token_ids"), py::arg("parents"), py::arg("log_q"),
        py::arg("source"), py::arg("num_requests"), py::arg("vocab_size"));
  m.def("open_nodes", &OpenNodes, py::arg("node_start"), py::arg("parents"), py::arg("tokens"), py::arg("end_start"),
        py::arg("end_ids"));
  m.def("depths", &Depths, py::arg("node_start"), py::arg("parents"), py::arg("num_requests"));
  m.def("merge_select", &MergeSelect, py::arg("proposals"), py::arg("max_nodes"), py::arg("max_depth"),
        py::arg("is_chain"), py::arg("calibration"), py::arg("width"), py::arg("prices"), py::arg("least_nodes"));
  m.def("tally", &Tally, py::arg("node_start"), py::arg("parents"), py::arg("log_q"), py::arg("source"),
        py::arg("num_accepted"), py::arg("accepted"));
  bind_drafters(m);
}
