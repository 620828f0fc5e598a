#include "program.h"

#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace subfleet {
namespace {

using executorch::aten::ScalarType;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using executorch::runtime::Result;
using executorch::runtime::Tag;

// What the runtime asks of a program's bytes.
constexpr size_t kAlignment = 16;
// Where one planned buffer of a method begins behind another.
constexpr size_t kArenaAlignment = 64;

// XNNPACK's mode in which the delegates of one method share a workspace, and no others.
constexpr int kSharedWithinMethod = 1;

// NumPy's names; nullptr where there is none.
const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    default: return nullptr;
  }
}

std::string place(const char* kind, size_t index) {
  return std::string(kind) + " " + std::to_string(index);
}

TensorInfo tensor_info(
    const Guard& guard,
    const Result<Tag>& tag,
    const Result<executorch::runtime::TensorInfo>& meta,
    const std::string& name) {
  guard.check(tag.error(), name + " cannot be read");
  if (tag.get() != Tag::Tensor) {
    throw Failure(Error::NotSupported, name + " is no tensor");
  }
  guard.check(meta.error(), name + " cannot be read");
  const char* dtype = dtype_name(meta->scalar_type());
  if (dtype == nullptr) {
    throw Failure(Error::NotSupported, name + " is of a type that NumPy does not have");
  }
  const auto order = meta->dim_order();
  for (size_t axis = 0; axis < order.size(); ++axis) {
    if (order[axis] != axis) {
      throw Failure(Error::NotSupported, name + " is not in row-major order");
    }
  }
  const auto sizes = meta->sizes();
  return TensorInfo{
      dtype,
      std::vector<int64_t>(sizes.begin(), sizes.end()),
      meta->nbytes(),
      meta->is_memory_planned(),
      meta->scalar_type()};
}

// What stands in a method's table of kernels before it is filled. ExecuTorch's verification lets through a program with
// instructions that never set theirs, and would jump to whatever lay there. It leaves by an exception, since ExecuTorch
// would go on to read the name of an operator that is not there, either.
void unset_kernel(executorch::runtime::KernelRuntimeContext&, executorch::runtime::Span<EValue*>) {
  throw Failure(Error::InvalidProgram, "an instruction of the program names no operator");
}

// Whether the bytes that kernels may read behind a tensor could lie in memory that nobody has.
bool at_the_edge(const View& view) {
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t end = reinterpret_cast<size_t>(view.data) + view.size_bytes;
  return (end - 1) / page != (end - 1 + kReadableBeyond) / page;
}

void check_sizes(const char* kind, const std::vector<TensorInfo>& infos, const std::vector<View>& views) {
  if (infos.size() != views.size()) {
    throw Failure(
        Error::InvalidArgument,
        "the method has " + std::to_string(infos.size()) + " " + kind + "s, but was given " +
            std::to_string(views.size()));
  }
  for (size_t i = 0; i < infos.size(); ++i) {
    if (infos[i].size_bytes != views[i].size_bytes) {
      throw Failure(
          Error::InvalidArgument,
          place(kind, i) + " is of " + std::to_string(infos[i].size_bytes) + " bytes, but was given " +
              std::to_string(views[i].size_bytes));
    }
  }
}

// No output may share memory with an input or another output: kernels read on while they write.
void check_apart(const std::vector<View>& inputs, const std::vector<View>& outputs) {
  struct Piece {
    const uint8_t* begin;
    const uint8_t* end;
    bool output;
  };
  std::vector<Piece> pieces;
  pieces.reserve(inputs.size() + outputs.size());
  const auto add = [&pieces](const std::vector<View>& views, bool output) {
    for (const View& view : views) {
      const auto* begin = static_cast<const uint8_t*>(view.data);
      if (view.size_bytes > 0) {
        pieces.push_back({begin, begin + view.size_bytes, output});
      }
    }
  };
  add(inputs, false);
  add(outputs, true);
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  // The furthest end so far, of anything and of outputs alone.
  const uint8_t* end = nullptr;
  const uint8_t* output_end = nullptr;
  for (const Piece& piece : pieces) {
    if (piece.begin < output_end || (piece.output && piece.begin < end)) {
      throw Failure(Error::InvalidArgument, "an output shares memory with an input or with another output");
    }
    end = std::max(end, piece.end);
    output_end = piece.output ? std::max(output_end, piece.end) : output_end;
  }
}

}  // namespace

Program::Program(const void* data, size_t size) {
  refuse_if_broken();
  if (size < executorch::runtime::Program::kMinHeadBytes) {
    throw Failure(Error::InvalidProgram, "a program has more than " + std::to_string(size) + " bytes");
  }
  if (reinterpret_cast<size_t>(data) % kAlignment != 0) {
    aligned_.emplace(size);
    std::memcpy(aligned_->data(), data, size);
    data = aligned_->data();
  }
  loader_ = std::make_unique<executorch::extension::BufferDataLoader>(data, size);
  const Guard guard;
  auto loaded = executorch::runtime::Program::load(
      loader_.get(), executorch::runtime::Program::Verification::InternalConsistency);
  guard.check(loaded.error(), "the bytes are no program");
  program_ = std::make_unique<executorch::runtime::Program>(std::move(loaded.get()));
}

std::vector<std::string> Program::method_names() const {
  std::vector<std::string> names;
  const Guard guard;
  for (size_t i = 0; i < program_->num_methods(); ++i) {
    const auto name = program_->get_method_name(i);
    guard.check(name.error(), "a method has no name");
    names.push_back(printable(name.get()));
  }
  return names;
}

Method::Method(
    const Program& program,
    const std::string& name,
    size_t memory_limit_bytes,
    std::shared_ptr<Arena> arena,
    bool own_workspace)
    : shared_(std::move(arena)), structures_(reinterpret_cast<const void*>(&unset_kernel)) {
  refuse_if_broken();
  const Guard guard;
  const auto meta = program.program_->method_meta(name.c_str());
  guard.check(meta.error(), "the program has no method '" + name.substr(0, 80) + "'");
  describe(meta.get());
  take_arenas(meta.get(), memory_limit_bytes);
  planned_ = std::make_unique<executorch::runtime::HierarchicalAllocator>(
      executorch::runtime::Span<executorch::runtime::Span<uint8_t>>(spans_.data(), spans_.size()));
  memory_ = std::make_unique<executorch::runtime::MemoryManager>(&structures_, planned_.get(), &scratch_);
  executorch::runtime::BackendOptions<1> options;
  executorch::runtime::LoadBackendOptionsMap options_by_backend;
  if (own_workspace) {
    guard.check(options.set_option("workspace_sharing_mode", kSharedWithinMethod), "an option was refused");
    guard.check(options_by_backend.set_options("XnnpackBackend", options.view()), "an option was refused");
  }
  auto loaded = program.program_->load_method(name.c_str(), memory_.get(), nullptr, nullptr, &options_by_backend);
  if (!loaded.ok() && structures_.refused()) {
    throw std::bad_alloc();
  }
  guard.check(loaded.error(), "the method cannot be loaded");
  method_ = std::make_unique<executorch::runtime::Method>(std::move(loaded.get()));
  find_aliases();
}

void Method::describe(const MethodMeta& meta) {
  const Guard guard;
  for (size_t i = 0; i < meta.num_inputs(); ++i) {
    inputs_.push_back(tensor_info(guard, meta.input_tag(i), meta.input_tensor_meta(i), place("input", i)));
  }
  for (size_t i = 0; i < meta.num_outputs(); ++i) {
    outputs_.push_back(tensor_info(guard, meta.output_tag(i), meta.output_tensor_meta(i), place("output", i)));
  }
  for (size_t i = 0; i < meta.num_backends(); ++i) {
    const auto backend = meta.get_backend_name(i);
    guard.check(backend.error(), "a backend has no name");
    if (std::find(backends_.begin(), backends_.end(), printable(backend.get())) == backends_.end()) {
      backends_.push_back(printable(backend.get()));  // there is one for each part of the program that it runs
    }
  }
}

void Method::take_arenas(const MethodMeta& meta, size_t memory_limit_bytes) {
  const Guard guard;
  std::vector<size_t>& sizes = arena_bytes_;
  size_t total = 0;
  for (size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
    const auto size = meta.memory_planned_buffer_size(i);
    guard.check(size.error(), "the memory plan cannot be read");
    if (size.get() < 0) {
      throw Failure(Error::InvalidProgram, "the memory plan has a negative size");
    }
    sizes.push_back(static_cast<size_t>(size.get()));
    // Before anything is taken, and in this order, so that nothing overflows.
    if (sizes.back() > memory_limit_bytes - total) {
      throw Failure(
          Error::OutOfResources,
          "the method is planned with more than the limit of " + std::to_string(memory_limit_bytes) + " bytes");
    }
    total += sizes.back();
  }
  if (shared_ == nullptr) {
    for (const size_t size : sizes) {
      const Pages& arena = arenas_.emplace_back(size);
      spans_.emplace_back(arena.data(), arena.size());
    }
    return;
  }
  size_t offset = 0;
  for (const size_t size : sizes) {
    if (offset > shared_->pages.size() || size > shared_->pages.size() - offset) {
      throw Failure(
          Error::OutOfResources,
          "the method is planned with more than the shared arena of " + std::to_string(shared_->pages.size()) +
              " bytes");
    }
    spans_.emplace_back(shared_->pages.data() + offset, size);
    offset = (offset + size + kReadableBeyond + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  }
}

// An output may be an input that is handed through, or the same tensor as another output: then it is copied.
void Method::find_aliases() {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const EValue* value = &method_->get_output(i);
    Output origin{outputs_[i].planned ? Source::kRuntime : Source::kWritten, 0};
    for (size_t before = 0; before < i; ++before) {
      if (value == &method_->get_output(before)) {
        origin = {Source::kRuntime, 0};
      }
    }
    for (size_t input = 0; input < inputs_.size(); ++input) {
      if (value == &method_->get_input(input)) {
        origin = {Source::kInput, input};
      }
    }
    origins_.push_back(origin);
  }
}

void Method::bind(const Guard& guard, const std::vector<View>& inputs, const std::vector<View>& outputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    void* data = inputs[i].data;
    if (!inputs_[i].planned && at_the_edge(inputs[i])) {
      const Pages& copy = moved_.emplace_back(inputs[i].size_bytes);
      std::memcpy(copy.data(), data, inputs[i].size_bytes);
      data = copy.data();
    }
    std::vector<executorch::aten::SizesType> sizes(inputs_[i].shape.begin(), inputs_[i].shape.end());
    executorch::aten::TensorImpl tensor(
        inputs_[i].scalar_type, static_cast<ssize_t>(sizes.size()), sizes.data(), data);
    guard.check(method_->set_input(EValue(executorch::aten::Tensor(&tensor)), i), place("input", i) + " was refused");
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (origins_[i].source == Source::kWritten) {
      guard.check(
          method_->set_output_data_ptr(outputs[i].data, outputs[i].size_bytes, i), place("output", i) + " was refused");
    }
  }
}

void Method::copy_out(const std::vector<View>& inputs, const std::vector<View>& outputs) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (origins_[i].source == Source::kInput) {
      std::memcpy(outputs[i].data, inputs[origins_[i].index].data, outputs[i].size_bytes);
      continue;
    }
    const auto& tensor = method_->get_output(i).toTensor();
    if (tensor.nbytes() != outputs[i].size_bytes) {
      throw Failure(Error::NotSupported, place("output", i) + " came in another size than it was planned with");
    }
    if (origins_[i].source == Source::kRuntime) {
      std::memcpy(outputs[i].data, tensor.const_data_ptr(), outputs[i].size_bytes);
    }
  }
}

void Method::execute(const std::vector<View>& inputs, const std::vector<View>& outputs) {
  refuse_if_broken();
  check_sizes("input", inputs_, inputs);
  check_sizes("output", outputs_, outputs);
  check_apart(inputs, outputs);
  const std::lock_guard<std::mutex> lock(shared_ == nullptr ? mutex_ : shared_->mutex);
  if (!usable_) {
    throw Failure(Error::InvalidState, "the method failed inside before; load it anew");
  }
  usable_ = false;  // until it has ended as it should
  const Guard guard;
  moved_.clear();
  bind(guard, inputs, outputs);
  const Error ended = method_->execute();
  if (ended != Error::Ok && scratch_.refused()) {
    throw std::bad_alloc();
  }
  guard.check(ended, "the method failed");
  copy_out(inputs, outputs);
  moved_.clear();
  usable_ = true;
}

}  // namespace subfleet
