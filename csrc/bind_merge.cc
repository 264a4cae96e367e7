// Python's view of the flat trees: arrays in, arrays out, and no logic.
//
// Arrays are read in place and checked rather than converted. The GIL is kept: some microseconds are less than the wait
// for its return when another thread takes it.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind_common.h"
#include "core/merge.h"

namespace py = pybind11;

namespace specrollout {
namespace {

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
  const auto table = [](const double* cells) {
    py::array_t<double> array({merge::kSources, merge::kTenths});
    std::copy(cells, cells + merge::kSources * merge::kTenths, array.mutable_data());
    return array;
  };
  return py::make_tuple(table(tally.reached), table(tally.expected), table(tally.accepted),
                        py::array_t<int64_t>(merge::kSources, tally.num_verified),
                        py::array_t<int64_t>(merge::kSources, tally.num_accepted));
}

}  // namespace
}  // namespace specrollout

void bind_merge(py::module_& m) {
  using namespace specrollout;
  m.def("check_batch", &CheckBatch, py::arg("node_start"), py::arg("token_ids"), py::arg("parents"), py::arg("log_q"),
        py::arg("source"), py::arg("num_requests"), py::arg("vocab_size"));
  m.def("depths", &Depths, py::arg("node_start"), py::arg("parents"), py::arg("num_requests"));
  m.def("merge_select", &MergeSelect, py::arg("proposals"), py::arg("max_nodes"), py::arg("max_depth"),
        py::arg("is_chain"), py::arg("calibration"), py::arg("width"), py::arg("prices"), py::arg("least_nodes"));
  m.def("tally", &Tally, py::arg("node_start"), py::arg("parents"), py::arg("log_q"), py::arg("source"),
        py::arg("num_accepted"), py::arg("accepted"));
}
