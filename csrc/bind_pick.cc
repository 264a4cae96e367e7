// Python's view of picking: lists of arrays in, arrays out, and no logic.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/pick.h"

namespace py = pybind11;

namespace specrollout {
namespace {

template <typename T>
py::array_t<T> ToNumpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// An array read in place; `size` is what it must have, or negative where it tells.
template <typename T>
const T* Read(const py::handle item, const char* name, py::ssize_t* size) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(item)) {
    throw std::invalid_argument(std::string(name) + " is not a contiguous array of " +
                                py::str(py::dtype::of<T>()).cast<std::string>());
  }
  const auto array = py::reinterpret_borrow<py::array>(item);
  if (*size >= 0 && array.size() != *size) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.size()) + " entries instead of " +
                                std::to_string(*size));
  }
  *size = array.size();
  return static_cast<const T*>(array.data());
}

template <typename T>
const T* Read(const py::handle item, const char* name, py::ssize_t size) {
  return Read<T>(item, name, &size);
}

py::handle Item(const py::list& list, size_t i) { return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); }

py::tuple PickNodes(const py::list& token_ids, const py::list& parents, const py::list& log_q, const py::list& source,
                    const py::array& by_bucket, const py::array& by_depth, const py::array& by_request,
                    const py::array& worth, const py::array& is_chain, const py::array& max_nodes,
                    const py::array& max_depth, const py::array& rows, double draft, double tree, double branch,
                    double least, double most, double least_net, int probes) {
  const size_t count = token_ids.size();
  if (parents.size() != count || log_q.size() != count || source.size() != count) {
    throw std::invalid_argument("token_ids, parents, log_q and source must have one array per request each");
  }
  thread_local std::vector<TreeView> trees;
  thread_local Picker picker;
  thread_local Pick pick;
  trees.resize(count);
  for (size_t r = 0; r < count; ++r) {
    py::ssize_t size = -1;
    trees[r].token_ids = Read<int32_t>(Item(token_ids, r), "token_ids", &size);
    trees[r].parents = Read<int32_t>(Item(parents, r), "parents", &size);
    trees[r].log_q = Read<float>(Item(log_q, r), "log_q", &size);
    trees[r].source = Read<int32_t>(Item(source, r), "source", &size);
    trees[r].size = static_cast<size_t>(size);
  }
  const py::ssize_t requests = static_cast<py::ssize_t>(count);
  PickRequest request{};
  request.by_bucket = Read<double>(by_bucket, "by_bucket", kSources * kProbabilityBuckets);
  request.by_depth = Read<double>(by_depth, "by_depth", kSources * kDepthRanges);
  request.by_request = Read<double>(by_request, "by_request", requests);
  request.worth = Read<double>(worth, "worth", requests);
  request.is_chain = reinterpret_cast<const uint8_t*>(Read<bool>(is_chain, "is_chain", requests));
  request.max_nodes = Read<int64_t>(max_nodes, "max_nodes", requests);
  request.max_depth = Read<int64_t>(max_depth, "max_depth", requests);
  py::ssize_t num_rows = -1;
  request.rows = Read<double>(rows, "rows", &num_rows);
  request.num_rows = static_cast<size_t>(num_rows);
  request.draft = draft, request.tree = tree, request.branch = branch;
  request.least = least, request.most = most, request.least_net = least_net, request.probes = probes;
  picker.Run(trees, request, &pick);
  return py::make_tuple(ToNumpy(pick.forest.node_start), ToNumpy(pick.forest.token_ids), ToNumpy(pick.forest.parents),
                        ToNumpy(pick.forest.log_q), ToNumpy(pick.forest.source), pick.tokens, pick.gain, pick.cost,
                        pick.net);
}

// The nodes whose parent was accepted, or is the root.
py::tuple ReachedNodes(const py::list& parents, const py::list& log_q, const py::list& source,
                       const py::list& accepted) {
  const size_t count = parents.size();
  if (log_q.size() != count || source.size() != count || accepted.size() != count) {
    throw std::invalid_argument("parents, log_q, source and accepted must have one array per draft each");
  }
  std::vector<int64_t> owner, bucket, depth;
  std::vector<double> q, got;
  std::vector<int32_t> depths;
  std::vector<uint8_t> is_accepted;
  for (size_t r = 0; r < count; ++r) {
    py::ssize_t size = -1, num_accepted = -1;
    const int32_t* parent = Read<int32_t>(Item(parents, r), "parents", &size);
    const float* logs = Read<float>(Item(log_q, r), "log_q", &size);
    const int32_t* sources = Read<int32_t>(Item(source, r), "source", &size);
    const int32_t* nodes = Read<int32_t>(Item(accepted, r), "accepted", &num_accepted);
    depths.assign(size, 0);
    is_accepted.assign(size, 0);
    for (py::ssize_t i = 0; i < num_accepted; ++i) {
      if (nodes[i] < 0 || nodes[i] >= size) throw std::invalid_argument("an accepted node is not in its tree");
      is_accepted[nodes[i]] = 1;
    }
    for (py::ssize_t i = 0; i < size; ++i) {
      if (parent[i] < -1 || parent[i] >= i) throw std::invalid_argument("a parent does not come before its child");
      if (sources[i] < 0 || sources[i] >= kSources) throw std::invalid_argument("a source is not a drafter's index");
      depths[i] = parent[i] < 0 ? 1 : depths[parent[i]] + 1;
      if (parent[i] >= 0 && !is_accepted[parent[i]]) continue;
      const double probability = Probability(logs[i]);
      owner.push_back(static_cast<int64_t>(r));
      bucket.push_back(sources[i] * kProbabilityBuckets + ProbabilityBucket(probability));
      depth.push_back(sources[i] * kDepthRanges + DepthRange(depths[i]));
      q.push_back(probability);
      got.push_back(is_accepted[i]);
    }
  }
  return py::make_tuple(ToNumpy(owner), ToNumpy(bucket), ToNumpy(depth), ToNumpy(q), ToNumpy(got));
}

}  // namespace
}  // namespace specrollout

void bind_pick(py::module_& m) {
  m.def("pick", &specrollout::PickNodes, py::arg("token_ids"), py::arg("parents"), py::arg("log_q"), py::arg("source"),
        py::arg("by_bucket"), py::arg("by_depth"), py::arg("by_request"), py::arg("worth"), py::arg("is_chain"),
        py::arg("max_nodes"), py::arg("max_depth"), py::arg("rows"), py::arg("draft"), py::arg("tree"),
        py::arg("branch"), py::arg("least"), py::arg("most"), py::arg("least_net"), py::arg("probes"),
        "The nodes worth verifying, as trees: (node_start [R + 1], token_ids, parents, log_q, source, expected tokens, "
        "gain, cost, net of the best choice).");
  m.def("reached", &specrollout::ReachedNodes, py::arg("parents"), py::arg("log_q"), py::arg("source"),
        py::arg("accepted"), "The nodes put to the test: (owner, bucket, depth, q, accepted), each [nodes].");
}
