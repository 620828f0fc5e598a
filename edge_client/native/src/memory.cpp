#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>

namespace subfleet {

Pages::Pages(size_t size) : data_(nullptr), size_(size), mapped_(0) {
  if (size > std::numeric_limits<size_t>::max() - kReadableBeyond) {
    throw std::bad_alloc();
  }
  mapped_ = size + kReadableBeyond;
  void* pages = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    throw std::bad_alloc();
  }
  data_ = static_cast<uint8_t*>(pages);
}

Pages::~Pages() {
  if (data_ != nullptr) {
    munmap(data_, mapped_);
  }
}

Pages::Pages(Pages&& other) noexcept : data_(other.data_), size_(other.size_), mapped_(other.mapped_) {
  other.data_ = nullptr;
}

void Pages::release() {
  madvise(data_, mapped_, MADV_DONTNEED);
}

void* HeapAllocator::allocate(size_t size, size_t alignment) {
  alignment = std::max(alignment, alignof(std::max_align_t));
  const size_t padded = size + kReadableBeyond;
  void* block = nullptr;
  if (padded < size || posix_memalign(&block, alignment, padded) != 0) {
    refused_ = true;
    return nullptr;
  }
  try {
    blocks_.push_back(block);
  } catch (const std::bad_alloc&) {
    std::free(block);
    refused_ = true;
    return nullptr;
  }
  if (filling_ != nullptr) {
    std::fill_n(static_cast<const void**>(block), padded / sizeof(void*), filling_);
  }
  held_ += padded;
  peak_ = std::max(peak_, held_);
  return block;
}

void HeapAllocator::reset() {
  for (void* block : blocks_) {
    std::free(block);
  }
  blocks_.clear();
  held_ = 0;
}

}  // namespace subfleet
