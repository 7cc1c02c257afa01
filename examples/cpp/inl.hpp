// Client of INL's caller protocol, version 1 (docs/callers.md): C++17 and POSIX only.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace inl {

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxBytes = 1u << 26;

enum Kind : uint16_t {
  kHello = 1, kOpen, kReady, kRequest, kTokens, kDone, kCancel, kError, kClose
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Frame {
  uint16_t kind = 0;
  std::string payload;
};

// A JSON string literal.
inline std::string quote(const std::string &text) {
  static const char *hex = "0123456789abcdef";
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', static_cast<char>(c)};
    } else if (c < 0x20) {
      out += "\\u00";
      out += {hex[c >> 4], hex[c & 15]};
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

inline uint32_t get32(const std::string &bytes, size_t at) {
  if (bytes.size() < at + 4) throw Error("inl: a payload ends too early");
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i)
    value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return value;
}

inline std::string put32(uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> 8 * i);
  return out;
}

// One piece of a stream: tokens and the text that they complete.
struct Piece {
  std::vector<int32_t> tokens;
  std::string text;
};

struct Done {
  uint32_t prompt_tokens = 0;
  std::string finish_reason;  // "stop", "length", "cancelled", "deadline"
};

// A process `inl pipe` with one open model; one stream at a time.
class Engine {
 public:
  // model: a folder or GGUF file; "" is the default model. config: a JSON object of
  // EngineConfig's fields. program: the `inl` to start.
  explicit Engine(const std::string &model = "", const std::string &config = "{}",
                  const std::string &program = "inl") {
    start(program);
    try {
      send(kHello, put32(kVersion));
      uint32_t version = get32(expect(kHello).payload, 0);
      if (version != kVersion)
        throw Error("inl: found protocol version " + std::to_string(version) +
                    ", this client has " + std::to_string(kVersion));
      std::string name = model.empty() ? "null" : quote(model);
      send(kOpen, "{\"model\": " + name + ", \"config\": " + config + "}");
      Frame ready = expect(kReady);
      context_ = get32(ready.payload, 0);
      device_ = ready.payload.substr(4);
    } catch (...) {
      stop();
      throw;
    }
  }
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;
  ~Engine() {
    try {
      send(kClose, "");
    } catch (const Error &) {
    }
    stop();
  }

  uint32_t context() const { return context_; }
  const std::string &device() const { return device_; }

  // Streams one completion. options: the inside of a JSON object, such as
  // "\"max_tokens\": 20"; on_piece returns false to cancel.
  Done stream(const std::string &prompt, const std::string &options,
              const std::function<bool(const Piece &)> &on_piece) {
    uint32_t number = ++last_;
    std::string json = "{\"prompt\": " + quote(prompt);
    if (!options.empty()) json += ", " + options;
    send(kRequest, put32(number) + json + "}");
    bool cancelled = false;
    for (;;) {
      Frame frame = receive();
      if (get32(frame.payload, 0) != number)
        throw Error("inl: found a frame of another request");
      if (frame.kind == kDone)
        return {get32(frame.payload, 4), frame.payload.substr(8)};
      if (frame.kind != kTokens)
        throw Error("inl: found frame kind " + std::to_string(frame.kind) +
                    " in a stream");
      size_t count = get32(frame.payload, 4), end = 8 + 4 * count;
      if (end > frame.payload.size()) throw Error("inl: a payload ends too early");
      Piece piece;
      for (size_t i = 0; i < count; ++i)
        piece.tokens.push_back(static_cast<int32_t>(get32(frame.payload, 8 + 4 * i)));
      piece.text = frame.payload.substr(end);
      if (!cancelled && !on_piece(piece)) {
        send(kCancel, put32(number));
        cancelled = true;
      }
    }
  }

 private:
  void start(const std::string &program) {
    int to[2], from[2];
    if (pipe(to) || pipe(from)) throw Error("inl: pipe: " + reason());
    std::signal(SIGPIPE, SIG_IGN);
    program_ = program;
    child_ = fork();
    if (child_ < 0) throw Error("inl: fork: " + reason());
    if (child_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      for (int fd : {to[0], to[1], from[0], from[1]}) close(fd);
      execlp(program.c_str(), program.c_str(), "pipe", static_cast<char *>(nullptr));
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
  }

  // Closes the pipes, waits for the process and says how it ended.
  std::string stop() {
    if (child_ <= 0) return "has ended";
    close(to_);
    close(from_);
    int status = 0;
    while (waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = 0;
    if (WIFSIGNALED(status)) return "was ended by signal " + std::to_string(WTERMSIG(status));
    if (WEXITSTATUS(status) == 127) return "could not be started: " + program_;
    return "ended with status " + std::to_string(WEXITSTATUS(status));
  }

  void send(uint16_t kind, const std::string &payload) {
    std::string data = "IC";
    data += {static_cast<char>(kind & 255), static_cast<char>(kind >> 8)};
    data += put32(static_cast<uint32_t>(payload.size())) + payload;
    for (size_t at = 0; at < data.size();) {
      ssize_t done = child_ > 0 ? write(to_, data.data() + at, data.size() - at) : -1;
      if (done < 0 && child_ > 0 && errno == EINTR) continue;
      if (done < 0) throw Error("inl: the process " + stop());
      at += static_cast<size_t>(done);
    }
  }

  std::string take(size_t size) {
    std::string data(size, '\0');
    for (size_t at = 0; at < size;) {
      ssize_t done = child_ > 0 ? read(from_, &data[at], size - at) : 0;
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) throw Error("inl: the process " + stop());
      at += static_cast<size_t>(done);
    }
    return data;
  }

  // An ERROR is thrown with INL's own sentence.
  Frame receive() {
    std::string head = take(8);
    if (head.compare(0, 2, "IC") != 0)
      throw Error("inl: found bytes that are not a frame; something else writes there");
    uint32_t size = get32(head, 4);
    if (size > kMaxBytes)
      throw Error("inl: found a payload of " + std::to_string(size) + " bytes");
    auto kind = static_cast<uint16_t>(get32(head, 0) >> 16);
    Frame frame{kind, take(size)};
    if (frame.kind == kError && frame.payload.size() >= 4)
      throw Error("inl: " + frame.payload.substr(4));
    return frame;
  }

  Frame expect(Kind kind) {
    Frame frame = receive();
    if (frame.kind != kind)
      throw Error("inl: found frame kind " + std::to_string(frame.kind) +
                  ", accepted: " + std::to_string(kind));
    return frame;
  }

  static std::string reason() { return std::strerror(errno); }

  pid_t child_ = 0;
  std::string program_;
  int to_ = -1, from_ = -1;
  uint32_t context_ = 0, last_ = 0;
  std::string device_;
};

}  // namespace inl
