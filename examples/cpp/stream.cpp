// Streams one completion: stream MODEL PROMPT MAX_TOKENS [CANCEL_AFTER]
//
//   g++ -std=c++17 -O2 stream.cpp -o stream
//   ./stream "" "The capital of France is" 10
//
// INL names the program to start instead of `inl`; CONFIG is a JSON object of
// EngineConfig's fields.
#include <cstdlib>
#include <iostream>

#include "inl.hpp"

static std::string env(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value ? value : otherwise;
}

int main(int argc, char **argv) {
  if (argc < 4) {
    std::cerr << "usage: stream MODEL PROMPT MAX_TOKENS [CANCEL_AFTER]\n";
    return 2;
  }
  size_t most = argc > 4 ? std::strtoul(argv[4], nullptr, 10) : SIZE_MAX;
  std::vector<int32_t> tokens;
  try {
    inl::Engine engine(argv[1], env("CONFIG", "{}"), env("INL", "inl"));
    std::string options = std::string("\"max_tokens\": ") + argv[3];
    inl::Done done = engine.stream(argv[2], options, [&](const inl::Piece &piece) {
      std::cout << piece.text << std::flush;
      tokens.insert(tokens.end(), piece.tokens.begin(), piece.tokens.end());
      return std::cout && tokens.size() < most;
    });
    std::cout << "\n" << done.finish_reason << " after " << done.prompt_tokens << ":";
    for (int32_t token : tokens) std::cout << " " << token;
    std::cout << std::endl;
  } catch (const inl::Error &error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
