// Thin: numpy in, numpy out. Everything that thinks is in core/.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bind_common.h"
#include "core/blocks.h"
#include "core/layout.h"
#include "core/walk.h"

namespace py = pybind11;
using namespace specrollout;

void bind_history(py::module_& m);
void bind_merge(py::module_& m);
void bind_ngram(py::module_& m);

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void Expect(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void ExpectTree(const Array<int32_t>& node_start, const Array<int32_t>& parents, int num_requests) {
  Expect(node_start.size() == num_requests + 1, "node_start must have one entry per request and one more");
  Expect(node_start.at(0) == 0 && node_start.at(num_requests) == parents.size(), "node_start must cover parents");
  for (int r = 0; r < num_requests; ++r) {
    Expect(node_start.at(r) <= node_start.at(r + 1), "node_start must not fall");
    for (int i = node_start.at(r); i < node_start.at(r + 1); ++i)
      Expect(parents.at(i) >= -1 && parents.at(i) < i - node_start.at(r), "parents must come before their children");
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
    Expect(roots.at(r) >= 0, "roots must not be below 0");
    const int start = node_start.at(r), size = node_start.at(r + 1) - start;
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
  py::gil_scoped_release release;
  CopyBlocks(static_cast<int>(bases.size()), bases.data(), strides.data(), static_cast<int>(from.size()), from.data(),
             to.data());
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Host arithmetic of tree speculation; see csrc/core for what each function means.";
  m.def("expand_paths", &expand_paths, py::arg("row_start"), py::arg("base"), py::arg("node_start"), py::arg("parents"),
        py::arg("block_table"), py::arg("block_size"), py::arg("scratch"), py::arg("zero_block"));
  m.def("without_scratch", &without_scratch, py::arg("node_start"), py::arg("parents"), py::arg("roots"),
        py::arg("block_size"), py::arg("num_scratch"));
  m.def("walk", &walk, py::arg("node_start"), py::arg("parents"), py::arg("tokens"), py::arg("sampled"));
  m.def("follow", &follow, py::arg("node_start"), py::arg("parents"), py::arg("tokens"), py::arg("output"),
        py::arg("counts"));
  m.def("copy_blocks", &copy_blocks, py::arg("bases"), py::arg("strides"), py::arg("copy_from"), py::arg("copy_to"));
  bind_history(m);
  bind_merge(m);
  bind_ngram(m);
}
