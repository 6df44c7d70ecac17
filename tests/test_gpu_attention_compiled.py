"""Attention's kernels, compiled for each generation of GPUs: their shared memory and registers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.gpu import check_compiled, compile_variants

pytestmark = pytest.mark.slow

# Bytes that a thread may keep on its stack. A few are spilled once, before a loop; more would be in it.
STACK = 64
# Of float32, whose products are three of tf32 each.
STACK_OF_FLOAT32 = 768


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_kernels_compile_within_shared_memory_and_registers(capability: int, tmp_path: Path) -> None:
    found = compile_variants("support.variants_attention", tmp_path, capability)
    check_compiled(found)
    assert {one.name.split()[0] for one in found} == {"decode", "prefill", "plan_decode", "plan_prefill"}
    assert any(one.waits for one in found) == (capability >= 90)
    assert not any(one.loads_first for one in found), "all that attention reads was just written"
    for one in found:
        limit = STACK_OF_FLOAT32 if "float32" in one.name else STACK
        assert one.stack <= limit, f"{one.name} for sm_{one.capability} spills {one.stack} bytes"
