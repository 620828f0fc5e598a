// What ExecuTorch asks of the system that it runs on: where its messages go, and what happens where it gives up.
#pragma once

#include "failure.h"

#include <string>

namespace subfleet {

// Takes the place of ExecuTorch's defaults, which write to stderr and end the process. Called once, by the module.
void install_platform();

// While one of these lives, ExecuTorch's messages of this thread are kept for the error that may follow, and a check of
// its own that fails becomes a Failure of this thread instead of the end of the process.
class Guard {
 public:
  Guard();
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  // Throws a Failure unless all is well: `what` went wrong, and the first thing that ExecuTorch said about it.
  void check(Error error, const std::string& what) const;
};

// Text of a program, which may be anything or missing, with all but printable ASCII replaced.
std::string printable(const char* text);

// Throws a Failure where an earlier check failed while other threads were at work: nobody knows what they left behind.
void refuse_if_broken();

}  // namespace subfleet
