// Memory that goes back to the system with the object that holds it, and whose size is known.
#pragma once

#include <executorch/runtime/core/memory_allocator.h>
#include <executorch/runtime/core/span.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace subfleet {

// XNNPACK's kernels may read, never write, some bytes past the end of a tensor (XNN_EXTRA_BYTES is 16, on some
// processors 128). This much more must be readable behind everything that they are given.
constexpr size_t kReadableBeyond = 128;

// Pages of its own, all zeros: only those that are written cost memory, and all go back to the system at once.
class Pages {
 public:
  // Throws std::bad_alloc.
  explicit Pages(size_t size);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&&) = delete;

  // Gives what was written back to the system; all are zeros again.
  void release();

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
  size_t mapped_;
};

// Pages that several methods lie in, of which one runs at a time: nothing of them outlives a run.
struct Arena {
  // Throws std::bad_alloc.
  explicit Arena(size_t size) : pages(size) {}

  Pages pages;
  std::mutex mutex;  // held by whichever runs
};

// What the runtime takes from the heap: the structures of a method, or what a kernel needs for one call.
class HeapAllocator : public executorch::runtime::MemoryAllocator {
 public:
  // Every word of the memory that it gives holds `filling`, unless that is nullptr.
  explicit HeapAllocator(const void* filling = nullptr) : MemoryAllocator(0, nullptr), filling_(filling) {}
  ~HeapAllocator() override { reset(); }

  void* allocate(size_t size, size_t alignment = kDefaultAlignment) override;
  void reset() override;

  // The most that was ever held at once, and whether the system ever refused.
  size_t peak_bytes() const { return peak_; }
  bool refused() const { return refused_; }

 private:
  const void* filling_;
  std::vector<void*> blocks_;
  size_t held_ = 0;
  size_t peak_ = 0;
  bool refused_ = false;
};

}  // namespace subfleet
