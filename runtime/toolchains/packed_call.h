// A kernel called with all of its arguments in an array of words: callers in C++ need no signature.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
namespace torchlazy_packed {
template <class T> T unpacked(int64_t word) {
  if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(word);
  else if constexpr (std::is_floating_point_v<T>) { double d; std::memcpy(&d, &word, 8); return static_cast<T>(d); }
  else return static_cast<T>(word);
}
template <class R, class... A, std::size_t... I>
int call(R (*f)(A...), const int64_t* words, std::index_sequence<I...>) {
  return static_cast<int>(f(unpacked<A>(words[I])...));
}
template <class R, class... A> int call(R (*f)(A...), const int64_t* words) {
  return call(f, words, std::index_sequence_for<A...>());
}
}
