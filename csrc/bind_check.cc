// Python's view of checking: a drafter's trees as they come, and no logic.
//
// Every tree of every step passes here, so attributes are read in place and nothing is converted.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "core/check.h"

namespace py = pybind11;

namespace specrollout {
namespace {

// One column of a tree. Returns what is wrong with it, "" if nothing; `size` is the tree's, or negative where this
// column tells it.
template <typename T>
std::string Column(const py::object& array, const char* name, const T** data, py::ssize_t* size) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    return std::string(name) + " is not a contiguous array of " + py::str(py::dtype::of<T>()).cast<std::string>();
  }
  const auto& column = reinterpret_cast<const py::array&>(array);
  if (column.ndim() != 1 || (*size >= 0 && column.size() != *size)) {
    return std::string(name) + " does not have one entry per node";
  }
  *size = column.size();
  *data = static_cast<const T*>(column.data());
  return "";
}

py::list CheckTrees(const py::list& trees, int64_t vocab_size) {
  py::list unordered;
  for (py::ssize_t index = 0; index < PyList_GET_SIZE(trees.ptr()); ++index) {
    const py::handle tree = PyList_GET_ITEM(trees.ptr(), index);
    const py::object token_ids = tree.attr("token_ids"), parents = tree.attr("parents"), log_q = tree.attr("log_q"),
                     source = tree.attr("source");
    TreeView view{};
    py::ssize_t size = -1;
    std::string fault = Column(token_ids, "token_ids", &view.token_ids, &size);
    if (fault.empty()) fault = Column(parents, "parents", &view.parents, &size);
    if (fault.empty()) fault = Column(log_q, "log_q", &view.log_q, &size);
    if (fault.empty()) fault = Column(source, "source", &view.source, &size);
    if (fault.empty() && size > 0) {
      view.size = static_cast<size_t>(size);
      const Checked checked = CheckTree(view, vocab_size);
      fault = Describe(view, checked, vocab_size);
      if (!checked.is_best_first) unordered.append(index);
    }
    if (!fault.empty()) throw std::invalid_argument("tree " + std::to_string(index) + ": " + fault);
  }
  return unordered;
}

}  // namespace
}  // namespace specrollout

void bind_check(py::module_& m) {
  m.def("check_trees", &specrollout::CheckTrees, py::arg("trees"), py::arg("vocab_size"),
        "Raises ValueError for the first tree that is none; returns the indices of those that are not best first.");
}
