#include "waiting/deadline.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "waiting/without_signals.h"

namespace hvdlite {
namespace {

// The states of a deadline. A futex word rather than a mutex and a condition: fork() may copy it in any state
// without leaving a lock that nobody in the child would ever release.
constexpr std::uint32_t kArmed = 0;
constexpr std::uint32_t kCancelled = 1;
constexpr std::uint32_t kFired = 2;

constexpr std::chrono::milliseconds kLook{500};  // longest sleep

// Writes what stderr takes; a pipe that nobody reads must not keep the process alive.
void write_to_stderr(const std::string& text) {
  constexpr std::size_t kNeverBlocks = 512;  // POSIX's least PIPE_BUF
  constexpr int kPatienceMs = 1000;
  for (std::size_t done = 0; done < text.size();) {
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    if (poll(&ready, 1, kPatienceMs) != 1) return;
    const ssize_t written = write(STDERR_FILENO, text.data() + done, std::min(kNeverBlocks, text.size() - done));
    if (written <= 0) return;
    done += static_cast<std::size_t>(written);
  }
}

void run_briefly(std::vector<std::string>& command) {
  constexpr int kPatienceMs = 3000, kLookMs = 10;
  std::vector<char*> words;
  for (std::string& word : command) words.push_back(word.data());
  words.push_back(nullptr);
  pid_t child;
  if (posix_spawn(&child, words[0], nullptr, nullptr, words.data(), environ) != 0) return;
  for (int waited_ms = 0; waited_ms < kPatienceMs; waited_ms += kLookMs) {
    if (waitpid(child, nullptr, WNOHANG) != 0) return;
    poll(nullptr, 0, kLookMs);
  }
  kill(child, SIGKILL);
}

}  // namespace

Deadline::Deadline(double seconds, std::string message, int exit_code, std::vector<std::string> explain, Named after)
    : state_(kArmed),
      seconds_(seconds),
      after_(std::move(after)),
      until_(time_after(seconds)),
      message_(std::move(message)),
      explain_(std::move(explain)),
      exit_code_(exit_code),
      owner_(getpid()) {
  if (message_.empty() || message_.back() != '\n') message_ += '\n';
  const WithoutSignals inherited;
  const int error = pthread_create(&thread_, nullptr, &Deadline::watch, this);
  if (error != 0) throw std::system_error(error, std::generic_category(), "Deadline: no thread");
  joinable_ = true;
}

void Deadline::cancel() {
  if (!joinable_ || getpid() != owner_) return;
  joinable_ = false;
  std::uint32_t expected = kArmed;
  if (state_.compare_exchange_strong(expected, kCancelled)) futex_wake_all(state_);
  pthread_join(thread_, nullptr);
}

// Returns with the end of a process, after which the message is about that and the time runs, or once cancelled.
void Deadline::await_end() {
  while (state_.load() == kArmed) {
    for (const auto& [end, name] : after_) {
      pollfd has_ended{end, POLLIN, 0};
      if (poll(&has_ended, 1, 0) != 1) continue;
      message_ = name + message_;
      until_ = time_after(seconds_);
      return;
    }
    futex_wait(state_, kArmed, Clock::now() + kLook);
  }
}

// For a moment, or until cancelled. Time in which this process did not run, as perhaps no other one did, does not
// count.
void Deadline::sleep() {
  const Clock::time_point until = std::min(until_, Clock::now() + kLook);
  futex_wait(state_, kArmed, until);
  const Clock::duration stopped = Clock::now() - until;
  if (stopped > kLook) until_ += stopped;
}

void* Deadline::watch(void* self) {
  auto& deadline = *static_cast<Deadline*>(self);
  if (!deadline.after_.empty()) deadline.await_end();
  while (deadline.state_.load() == kArmed && Clock::now() < deadline.until_) deadline.sleep();
  std::uint32_t expected = kArmed;
  if (deadline.state_.compare_exchange_strong(expected, kFired)) {
    write_to_stderr(deadline.message_);
    if (!deadline.explain_.empty()) run_briefly(deadline.explain_);
    _exit(deadline.exit_code_);
  }
  return nullptr;
}

void end_at_exit(int least) {
  // glibc alone tells a handler the exit status, which Python has decided by then.
  const auto end = [](int status, void* least_status) {
    _exit(status != 0 ? status : static_cast<int>(reinterpret_cast<std::intptr_t>(least_status)));
  };
  on_exit(end, reinterpret_cast<void*>(static_cast<std::intptr_t>(least)));
}

}  // namespace hvdlite
