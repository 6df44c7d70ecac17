// What Python compares its twins of structures with (engine/backends/native/structures.py).
#pragma once

#include "common.h"

namespace octavo {

struct Anything {
  template <class T>
  operator T() const;
};

// How many fields a structure without constructors has: as many as can be given values.
template <class Structure, class... Given>
constexpr int64_t fields_of() {
  if constexpr (requires { Structure{Given{}..., Anything{}}; })
    return fields_of<Structure, Given..., Anything>();
  else
    return sizeof...(Given);
}

}  // namespace octavo

// The bytes and the fields of a structure: a small field more may find room in the padding, where no byte is added.
#define OCTAVO_TWIN(name)                             \
  OCTAVO_EXPORT(twin_##name)(int64_t* shape) {        \
    shape[0] = sizeof(octavo::name);                  \
    shape[1] = octavo::fields_of<octavo::name>();     \
  }
