#include "platform.h"

#include "threads.h"

#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace subfleet {
namespace {

constexpr size_t kLongestMessage = 300;

thread_local bool guarded = false;
thread_local std::string first_message;
std::atomic<bool> broken{false};

void keep_message(
    et_timestamp_t,
    et_pal_log_level_t level,
    const char*,
    const char*,
    size_t,
    const char* message,
    size_t length) {
  const bool matters = level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal;
  // The first message is the cause; what follows are its callers.
  if (guarded && matters && first_message.empty()) {
    first_message = printable(std::string(message, length < kLongestMessage ? length : kLongestMessage).c_str());
  }
}

// An exception may leave here: ExecuTorch's libraries are built with unwinding tables.
void give_up() {
  if (!guarded) {
    std::abort();  // a thread of the pool: nobody there could catch it
  }
  broken = broken || thread_count() > 1;
  throw Failure(Error::Internal, "a check inside the runtime failed: " + first_message);
}

}  // namespace

void install_platform() {
  executorch::runtime::PalImpl platform{};
  platform.abort = reinterpret_cast<pal_abort_method>(&give_up);
  platform.emit_log_message = &keep_message;
  platform.source_filename = __FILE__;
  executorch::runtime::register_pal(platform);
  executorch::runtime::runtime_init();
}

Guard::Guard() {
  first_message.clear();
  guarded = true;
}

Guard::~Guard() {
  guarded = false;
}

void Guard::check(Error error, const std::string& what) const {
  if (error != Error::Ok) {
    throw Failure(error, first_message.empty() ? what : what + ": " + first_message);
  }
}

std::string printable(const char* text) {
  // A string that a damaged program lacks comes as an address just above 0.
  constexpr uintptr_t kLowestAddress = 4096;
  std::string printed = reinterpret_cast<uintptr_t>(text) < kLowestAddress ? "" : text;
  for (char& letter : printed) {
    letter = letter >= ' ' && letter <= '~' ? letter : '?';
  }
  return printed;
}

void refuse_if_broken() {
  if (broken) {
    throw Failure(Error::InvalidState, "an earlier program broke the runtime; start the process anew");
  }
}

}  // namespace subfleet
