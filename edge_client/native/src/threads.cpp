#include "threads.h"

#include "failure.h"

#include <mutex>
#include <string>

// The wheel ships the pool without the header that declares it. These are its declarations, as of ExecuTorch 1.5.
namespace executorch::extension::threadpool {
class ThreadPool final {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t num_threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace subfleet {
namespace {

std::mutex users_mutex;
size_t user_count = 0;

}  // namespace

size_t thread_count() {
  return executorch::extension::threadpool::get_threadpool()->get_thread_count();
}

void set_thread_count(uint32_t count) {
  if (count < 1) {
    throw Failure(Error::InvalidArgument, "the thread count must be 1 or more, but is 0");
  }
  const std::lock_guard<std::mutex> lock(users_mutex);
  if (thread_count() == count) {
    return;
  }
  if (user_count > 0) {
    throw Failure(
        Error::InvalidState,
        "the thread count cannot change while methods are loaded, and " + std::to_string(user_count) +
            " are; drop them first");
  }
  if (!executorch::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool(count)) {
    throw Failure(Error::OutOfResources, "the system gave no " + std::to_string(count) + " threads");
  }
}

PoolUser::PoolUser() {
  const std::lock_guard<std::mutex> lock(users_mutex);
  ++user_count;
}

PoolUser::~PoolUser() {
  const std::lock_guard<std::mutex> lock(users_mutex);
  --user_count;
}

}  // namespace subfleet
