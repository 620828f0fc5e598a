// The Python module: objects, arrays and errors. What it does is in program.cpp.
#include "platform.h"
#include "program.h"
#include "threads.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Headers of another machine's Python serve a cross build, where their basic sizes are those of the target.
static_assert(SIZEOF_VOID_P == sizeof(void*) && SIZEOF_LONG == sizeof(long) && SIZEOF_SIZE_T == sizeof(size_t));
static_assert(SIZEOF_LONG_LONG == sizeof(long long) && SIZEOF_WCHAR_T == sizeof(wchar_t));

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using subfleet::Failure;
using subfleet::TensorInfo;
using executorch::runtime::Error;

// The memory of a Python object, lent to us: it neither moves nor goes while this lives.
class Buffer {
 public:
  Buffer(nb::handle object, int flags, const std::string& name) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      throw Failure(
          Error::InvalidArgument,
          name + " must be a contiguous array" + ((flags & PyBUF_WRITABLE) ? " that can be written" : ""));
    }
  }
  ~Buffer() {
    PyBuffer_Release(&buffer_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Py_buffer& get() const { return buffer_; }

 private:
  Py_buffer buffer_;
};

// Whether a buffer's format is what NumPy, array and memoryview write for a type; `l` and `q` are both 64 bits here.
bool has_format(const std::string& dtype, std::string_view format) {
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) {
    format.remove_prefix(1);
  }
  if (dtype == "float32") return format == "f";
  if (dtype == "float64") return format == "d";
  if (dtype == "float16") return format == "e";
  if (dtype == "int64") return format == "q" || (format == "l" && sizeof(long) == 8);
  if (dtype == "int32") return format == "i" || (format == "l" && sizeof(long) == 4);
  if (dtype == "int16") return format == "h";
  if (dtype == "int8") return format == "b";
  if (dtype == "uint8") return format == "B";
  return dtype == "bool" && format == "?";
}

std::string shape_text(const int64_t* sizes, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) {
    text += std::to_string(sizes[i]) + (i + 1 < count ? ", " : "");
  }
  return text + (count == 1 ? ",)" : ")");
}

void check_fits(const TensorInfo& info, const Py_buffer& buffer, const std::string& name) {
  std::vector<int64_t> shape(buffer.shape, buffer.shape + buffer.ndim);
  const char* format = buffer.format == nullptr ? "B" : buffer.format;
  if (shape != info.shape || !has_format(info.dtype, format)) {
    throw Failure(
        Error::InvalidArgument,
        name + " is " + info.dtype + " of shape " + shape_text(info.shape.data(), info.shape.size()) +
            ", but was given format '" + std::string(format).substr(0, 20) + "' of shape " +
            shape_text(shape.data(), shape.size()));
  }
}

using Buffers = std::vector<std::unique_ptr<Buffer>>;

std::vector<subfleet::View> views_of(
    const nb::sequence& arrays, const std::vector<TensorInfo>& infos, bool written, Buffers& held) {
  const std::string kind = written ? "output" : "input";
  const size_t count = nb::len(arrays);
  if (count != infos.size()) {
    throw Failure(
        Error::InvalidArgument,
        "the method has " + std::to_string(infos.size()) + " " + kind + "s, but was given " + std::to_string(count));
  }
  std::vector<subfleet::View> views;
  views.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const std::string name = kind + " " + std::to_string(i);
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (written ? PyBUF_WRITABLE : 0);
    const Py_buffer& buffer = held.emplace_back(std::make_unique<Buffer>(arrays[i], flags, name))->get();
    check_fits(infos[i], buffer, name);
    views.push_back({buffer.buf, static_cast<size_t>(buffer.len)});
  }
  return views;
}

// A program with the bytes that it was read from. Members go in the reverse of this order.
class BoundProgram {
 public:
  explicit BoundProgram(nb::handle data)
      : bytes_(data, PyBUF_SIMPLE, "a program's bytes"),
        program_(bytes_.get().buf, static_cast<size_t>(bytes_.get().len)) {}

  const subfleet::Program& get() const { return program_; }

 private:
  Buffer bytes_;
  subfleet::Program program_;
};

std::unique_ptr<subfleet::Method> load_method(
    const BoundProgram& program,
    const std::string& name,
    std::optional<size_t> limit,
    std::shared_ptr<subfleet::Arena> arena,
    bool own_workspace) {
  const nb::gil_scoped_release released;
  return std::make_unique<subfleet::Method>(
      program.get(), name, limit.value_or(std::numeric_limits<size_t>::max()), std::move(arena), own_workspace);
}

void release(subfleet::Arena& arena) {
  const nb::gil_scoped_release released;
  const std::lock_guard<std::mutex> lock(arena.mutex);
  arena.pages.release();
}

void execute(subfleet::Method& method, const nb::sequence& inputs, const nb::sequence& outputs) {
  Buffers held;
  const auto sources = views_of(inputs, method.inputs(), false, held);
  const auto targets = views_of(outputs, method.outputs(), true, held);
  const nb::gil_scoped_release released;
  method.execute(sources, targets);
}

nb::tuple tuple_of(const nb::handle& items) {
  return nb::tuple(items);
}

template <typename T>
nb::tuple as_tuple(const std::vector<T>& values) {
  return tuple_of(nb::cast(values));
}

std::string info_text(const TensorInfo& info) {
  return "TensorInfo(" + info.dtype + " of shape " + shape_text(info.shape.data(), info.shape.size()) + ")";
}

}  // namespace

NB_MODULE(_native, module) {
  subfleet::install_platform();

  static nb::object error_type = nb::steal(PyErr_NewException("subfleet_executorch.ExecutorchError", PyExc_RuntimeError, nullptr));
  module.attr("ExecutorchError") = error_type;
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Failure& failure) {
      nb::object error = error_type(std::string(failure.what()));
      error.attr("code") = failure.code_name();
      PyErr_SetObject(error_type.ptr(), error.ptr());
    }
  });

  nb::class_<TensorInfo>(module, "TensorInfo")
      .def_ro("dtype", &TensorInfo::dtype)
      .def_prop_ro("shape", [](const TensorInfo& info) { return as_tuple(info.shape); })
      .def_ro("size_bytes", &TensorInfo::size_bytes)
      .def_ro("planned", &TensorInfo::planned)
      .def("__repr__", &info_text);

  nb::class_<subfleet::Arena>(module, "Arena")
      .def(nb::init<size_t>(), "size_bytes"_a)
      .def_prop_ro("size_bytes", [](const subfleet::Arena& arena) { return arena.pages.size(); })
      .def("release", &release);

  nb::class_<subfleet::Method>(module, "Method")
      .def_prop_ro("inputs", [](const subfleet::Method& method) { return as_tuple(method.inputs()); })
      .def_prop_ro("outputs", [](const subfleet::Method& method) { return as_tuple(method.outputs()); })
      .def_prop_ro("backends", [](const subfleet::Method& method) { return as_tuple(method.backends()); })
      .def_prop_ro("arena_bytes", [](const subfleet::Method& method) { return as_tuple(method.arena_bytes()); })
      .def_prop_ro("structure_bytes", &subfleet::Method::structure_bytes)
      .def_prop_ro("scratch_peak_bytes", &subfleet::Method::scratch_peak_bytes)
      .def("execute", &execute, "inputs"_a, "outputs"_a);

  nb::class_<BoundProgram>(module, "Program")
      .def(nb::init<nb::handle>(), "data"_a)
      .def_prop_ro("method_names", [](const BoundProgram& program) { return as_tuple(program.get().method_names()); })
      .def(
          "load_method",
          &load_method,
          "name"_a = "forward",
          nb::kw_only(),
          "memory_limit_bytes"_a = nb::none(),
          "arena"_a = nb::none(),
          "own_workspace"_a = false,
          nb::keep_alive<0, 1>());

  module.def("thread_count", &subfleet::thread_count);
  module.def(
      "set_thread_count",
      [](uint32_t count) {
        const nb::gil_scoped_release released;
        subfleet::set_thread_count(count);
      },
      "count"_a);
  module.attr("EXECUTORCH_VERSION") = SUBFLEET_EXECUTORCH_VERSION;
}
