// The sizes of the structures that Python has twins of, which compares them (engine/backends/native/structures.py).
#include "program.h"
#include "sampling_edit.h"

namespace octavo {
namespace {

struct Known {
  const char* name;
  size_t size;
};

#define OCTAVO_KNOWN(name) Known{#name, sizeof(name)}
constexpr Known KNOWN[] = {
    OCTAVO_KNOWN(Attention),    OCTAVO_KNOWN(Place),       OCTAVO_KNOWN(Operation),  OCTAVO_KNOWN(Step),
    OCTAVO_KNOWN(NormWhat),     OCTAVO_KNOWN(ProductWhat), OCTAVO_KNOWN(Pages),      OCTAVO_KNOWN(RotateWhat),
    OCTAVO_KNOWN(AttendWhat),   OCTAVO_KNOWN(ExpertsWhat), OCTAVO_KNOWN(GatherWhat), OCTAVO_KNOWN(ActivateWhat),
    OCTAVO_KNOWN(AddWhat),      OCTAVO_KNOWN(ClipWhat),    OCTAVO_KNOWN(Edits),
};
#undef OCTAVO_KNOWN

bool same(const char* one, const char* other) {
  while (*one && *one == *other) ++one, ++other;
  return *one == *other;
}

}  // namespace
}  // namespace octavo

// The size of a structure in bytes, -1 for a name that is not known.
OCTAVO_EXPORT(structure_size)(const char* name, int64_t* size) {
  *size = -1;
  for (const octavo::Known& known : octavo::KNOWN)
    if (octavo::same(known.name, name)) *size = static_cast<int64_t>(known.size);
}
