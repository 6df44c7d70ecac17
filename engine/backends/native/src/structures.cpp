// The structures in headers that Python has twins of.
#include "program.h"
#include "sampling_edit.h"
#include "twins.h"

OCTAVO_TWIN(Attention)
OCTAVO_TWIN(Place)
OCTAVO_TWIN(Operation)
OCTAVO_TWIN(Step)
OCTAVO_TWIN(NormWhat)
OCTAVO_TWIN(ProductWhat)
OCTAVO_TWIN(Pages)
OCTAVO_TWIN(RotateWhat)
OCTAVO_TWIN(AttendWhat)
OCTAVO_TWIN(ExpertsWhat)
OCTAVO_TWIN(GatherWhat)
OCTAVO_TWIN(ActivateWhat)
OCTAVO_TWIN(AddWhat)
OCTAVO_TWIN(OpenWhat)
OCTAVO_TWIN(ClipWhat)
OCTAVO_TWIN(StateMemory)
OCTAVO_TWIN(ConvolveWhat)
OCTAVO_TWIN(LowRank)
OCTAVO_TWIN(AdapterSlot)
OCTAVO_TWIN(ShrinkWhat)
OCTAVO_TWIN(ExpandWhat)
OCTAVO_TWIN(Edit)
OCTAVO_TWIN(Edits)
