"""Kernels for GPUs, compiled without one, in one process: their shared memory, registers and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

pytest.importorskip("triton")

from support.gpu import Compiled, check_compiled, compile_variants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODULES = (
    "adapters", "attention", "beams", "copies", "elementwise", "experts", "few_bits", "float8", "matvec", "rotary",
    "sampling", "states", "of_tests",
)  # fmt: skip
# Bytes that a thread may keep on its stack. A few are spilled once, before a loop; more would be in it.
STACK = 64
# Of float32, whose products are three of tf32 each.
STACK_OF_FLOAT32 = 768


@pytest.fixture(scope="module")
def compiled() -> Mapping[str, Sequence[Compiled]]:
    return compile_variants(MODULES)


@pytest.mark.parametrize("module", MODULES[:-1])
@pytest.mark.whole
def test_kernels_compile_within_shared_memory(module: str, compiled: Mapping[str, Sequence[Compiled]]) -> None:
    check_compiled(compiled[module])


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.whole
def test_attention(capability: int, compiled: Mapping[str, Sequence[Compiled]]) -> None:
    found = [one for one in compiled["attention"] if one.capability == capability]
    assert {one.name.split()[0] for one in found} == {"decode", "prefill", "plan_decode", "plan_prefill"}
    assert any(one.waits for one in found) == (capability >= 90)
    assert not any(one.loads_first for one in found), "all that attention reads was just written"
    for one in found:
        limit = STACK_OF_FLOAT32 if "float32" in one.name else STACK
        assert one.stack <= limit, f"{one.name} for sm_{one.capability} spills {one.stack} bytes"


@pytest.mark.parametrize(("module", "kernels"), [("few_bits", {"rows", "widen"}), ("matvec", {"held", "pieces"})])
def test_products_of_one_row_spill_nothing(
    module: str, kernels: set[str], compiled: Mapping[str, Sequence[Compiled]]
) -> None:
    assert {one.name.split(":")[0] for one in compiled[module]} == kernels
    for one in compiled[module]:
        assert one.stack == 0, f"{one.name} for sm_{one.capability} spills {one.stack} bytes"


@pytest.mark.parametrize("module", ["matvec", "rotary"])
def test_weights_are_asked_for_before_the_wait(module: str, compiled: Mapping[str, Sequence[Compiled]]) -> None:
    for one in compiled[module]:
        assert one.waits == one.loads_first == ("early" in one.name), one.name


def test_what_fails_is_named(compiled: Mapping[str, Sequence[Compiled]]) -> None:
    names = ("doubled", "broken", "silent", "large")
    good, bad, silent, large = ([one for one in compiled["of_tests"] if one.name == name] for name in names)
    assert [one.capability for one in good] == [80, 100]
    check_compiled(good)
    with pytest.raises(AssertionError, match="broken for sm_80: "):
        check_compiled(bad)
    with pytest.raises(AssertionError, match="silent for sm_80 stores nothing"):
        check_compiled(silent)
    with pytest.raises(AssertionError, match=r"large takes \d+ bytes of sm_80's 166912"):
        check_compiled(large)
