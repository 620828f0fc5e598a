// The one kind of failure that crosses into Python, with ExecuTorch's own name for it.
#pragma once

#include <executorch/runtime/core/error.h>

#include <stdexcept>
#include <string>

namespace subfleet {

using executorch::runtime::Error;

class Failure : public std::runtime_error {
 public:
  Failure(Error code, const std::string& message) : std::runtime_error(message), code_(code) {}

  // "InvalidProgram" and so on: the names of ExecuTorch's error codes, without their prefix.
  std::string code_name() const {
    const std::string name = executorch::runtime::to_string(code_);
    return name.substr(name.rfind(':') + 1);
  }

 private:
  Error code_;
};

}  // namespace subfleet
