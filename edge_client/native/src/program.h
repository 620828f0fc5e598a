// A program and its methods: everything that a client needs of ExecuTorch's runtime, without Python.
#pragma once

#include "memory.h"
#include "platform.h"
#include "threads.h"

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace subfleet {

// A tensor that a method takes or gives. Its shape is fixed and its elements are in row-major order.
struct TensorInfo {
  std::string dtype;  // as NumPy names it
  std::vector<int64_t> shape;
  size_t size_bytes;
  bool planned;  // it lies in the method's arenas, so that it is copied in or out
  executorch::aten::ScalarType scalar_type;
};

// The bytes of one tensor of the caller.
struct View {
  void* data;
  size_t size_bytes;
};

class Program {
 public:
  // The bytes must live as long as the program and its methods; they are verified, and copied only where they are not
  // aligned. Throws Failure.
  Program(const void* data, size_t size);

  std::vector<std::string> method_names() const;

 private:
  friend class Method;

  std::optional<Pages> aligned_;
  std::unique_ptr<executorch::extension::BufferDataLoader> loader_;
  std::unique_ptr<executorch::runtime::Program> program_;
};

class Method {
 public:
  // Takes the memory that was planned for the method, where that is no more than the limit; where an arena is given, it
  // lies in that. XNNPACK keeps one workspace for all methods of a process, as large as the largest needs, unless a
  // method has its own. The program must outlive it. Throws Failure, or std::bad_alloc where the system has no memory.
  Method(
      const Program& program,
      const std::string& name,
      size_t memory_limit_bytes,
      std::shared_ptr<Arena> arena,
      bool own_workspace);

  // Runs once. Inputs are read where they are; outputs are written where they shall be. Both have exactly the sizes of
  // `inputs` and `outputs`, and no output overlaps anything else. Calls wait for each other. Throws like the constructor.
  void execute(const std::vector<View>& inputs, const std::vector<View>& outputs);

  const std::vector<TensorInfo>& inputs() const { return inputs_; }
  const std::vector<TensorInfo>& outputs() const { return outputs_; }
  const std::vector<std::string>& backends() const { return backends_; }
  const std::vector<size_t>& arena_bytes() const { return arena_bytes_; }
  // Beside the arenas: the method's own structures, and the most that kernels took at once so far.
  size_t structure_bytes() const { return structures_.peak_bytes(); }
  size_t scratch_peak_bytes() const { return scratch_.peak_bytes(); }

 private:
  void take_arenas(const executorch::runtime::MethodMeta& meta, size_t memory_limit_bytes);
  void describe(const executorch::runtime::MethodMeta& meta);
  void find_aliases();
  void bind(const Guard& guard, const std::vector<View>& inputs, const std::vector<View>& outputs);
  void copy_out(const std::vector<View>& inputs, const std::vector<View>& outputs) const;

  // Where an output's bytes come from once the method has run.
  enum class Source { kWritten, kRuntime, kInput };
  struct Output {
    Source source;
    size_t index;  // of the input
  };

  PoolUser pool_user_;
  std::mutex mutex_;
  bool usable_ = true;
  std::shared_ptr<Arena> shared_;  // where it is given, `arenas_` is empty
  std::vector<Pages> arenas_;
  std::vector<size_t> arena_bytes_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  HeapAllocator structures_;  // filled, so that a kernel that the program left unset is one that refuses
  HeapAllocator scratch_;
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_;
  std::unique_ptr<executorch::runtime::MemoryManager> memory_;
  std::vector<TensorInfo> inputs_;
  std::vector<TensorInfo> outputs_;
  std::vector<Output> origins_;
  std::vector<std::string> backends_;
  std::vector<Pages> moved_;  // inputs that lie at the very end of readable memory
  // The last one: it goes first, while everything that it uses is still there.
  std::unique_ptr<executorch::runtime::Method> method_;
};

}  // namespace subfleet
