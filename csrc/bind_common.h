// What all bindings share: arrays read in place, and handed over without a copy.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/ends.h"

namespace specrollout {

// The memory of a contiguous array; `size` is what it must have, or negative where this array tells it.
template <typename T>
const T* Read(const pybind11::handle& array, const char* name, pybind11::ssize_t* size, int dimensions = 1) {
  namespace py = pybind11;
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    throw std::invalid_argument(std::string(name) + " is not a contiguous array of " +
                                py::str(py::dtype::of<T>()).template cast<std::string>());
  }
  const auto own = py::reinterpret_borrow<py::array>(array);
  if (own.ndim() != dimensions || (*size >= 0 && own.size() != *size)) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(own.size()) + " entries" +
                                (*size >= 0 ? ", not " + std::to_string(*size) : "") + ", or another shape");
  }
  *size = own.size();
  return static_cast<const T*>(own.data());
}

// The end tokens of a batch's requests: [R + 1] where each one's begin, and all of them behind one another.
struct EndLists {
  const int32_t *start = nullptr, *ids = nullptr;

  EndLists() = default;
  EndLists(const pybind11::handle& end_start, const pybind11::handle& end_ids, size_t num_requests) {
    pybind11::ssize_t starts = static_cast<pybind11::ssize_t>(num_requests) + 1, count = -1;
    start = Read<int32_t>(end_start, "end_start", &starts);
    ids = Read<int32_t>(end_ids, "end_ids", &count);
    bool is_fine = start[0] == 0 && start[num_requests] == count;
    for (size_t r = 0; is_fine && r < num_requests; ++r) is_fine = start[r] <= start[r + 1];
    if (!is_fine) throw std::invalid_argument("end_start does not cover the end tokens");
  }

  Ends Of(size_t request) const { return {ids + start[request], start[request + 1] - start[request]}; }
};

// Hands a vector's memory to numpy.
template <typename T>
pybind11::array_t<T> Give(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  pybind11::capsule free_when_done(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return pybind11::array_t<T>(static_cast<pybind11::ssize_t>(owned->size()), owned->data(), free_when_done);
}

}  // namespace specrollout
