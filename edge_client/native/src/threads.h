// ExecuTorch's pool of threads, one for the whole process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace subfleet {

size_t thread_count();

// Throws a Failure unless the count is 1 or more and no method is loaded: delegates keep the pool that they were loaded
// with, and it goes when another takes its place.
void set_thread_count(uint32_t count);

// A loaded method holds one of these.
class PoolUser {
 public:
  PoolUser();
  ~PoolUser();
  PoolUser(const PoolUser&) = delete;
  PoolUser& operator=(const PoolUser&) = delete;
};

}  // namespace subfleet
