"""What tests of `engine.backends.triton` share: where kernels run, and how they are compiled where there is no GPU.

As a script (`python -m support.gpu NAME...`) it compiles the `VARIANTS` of `variants_NAME.py` beside it and prints the
results: in a process of its own, because kernels that were imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine.backends import triton as gpu
from engine.host.folders import cache_folder, make_private

TESTS = Path(__file__).resolve().parents[1]
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications).
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@contextmanager
def kernels() -> Iterator[torch.device]:
    """The device that kernels are tested on: a GPU if there is one, else the CPU by Triton's interpreter."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        multiply = InterpreterBuilder.create_dot

        def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
            """As a GPU's products, whose rows have the same bits in any tile: NumPy's depend on the CPU and the shape,
            which does not show through rounding from float64."""
            if d.data.dtype != np.float32 or not all(x.dtype.primitive_bitwidth in (16, 32) for x in (a, b)):
                return multiply(self, a, b, d, *how)
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
            return TensorHandle(product + d.data, d.dtype.scalar)

        with gpu.interpreted(), mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
            yield torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel as it is launched.

    Attributes:
        name: for messages.
        kernel: a function under `triton.jit`.
        signature: the type of each argument that is not a constant, in Triton's words ("*bf16", "i32", "fp32").
        constants: the values of the others.
        multiples: integers that are multiples of 16 at the launch; pointers are, all of them. Triton compiles other
            code for those, which takes more shared memory.
        num_warps, num_stages: as at the launch.
        capabilities: what it is compiled for: the oldest and the newest, between which code without products of
            matrices hardly differs.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    multiples: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = (80, 100)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of a variant for one capability.

    Attributes:
        shared: bytes of shared memory.
        size: bytes of the machine code.
        stores: it writes to global memory. What Triton could not place becomes a body that traps, which does not.
        stack: bytes of a thread's stack: registers that were spilled.
        waits: it waits for the kernel before it; loads_first: it reads global memory before that.
    """

    name: str
    capability: int
    shared: int
    size: int
    stores: bool = False
    stack: int = 0
    waits: bool = False
    loads_first: bool = False
    error: str = ""


def compile_variants(names: Sequence[str]) -> dict[str, list[Compiled]]:
    """Compile the `VARIANTS` of these modules, by name, without a GPU. Triton's cache keeps kernels that did not
    change."""
    cache = cache_folder("test-triton")
    make_private(cache)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "support.gpu", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Compiled(**item) for item in items] for name, items in found.items()}


def check_compiled(found: list[Compiled]) -> None:
    """All were compiled, to something, within the shared memory of their GPUs."""
    assert found
    for one in found:
        assert not one.error, f"{one.name} for sm_{one.capability}: {one.error}"
        assert one.size > 0
        assert one.stores, f"{one.name} for sm_{one.capability} stores nothing"
        limit = SHARED_MEMORY[one.capability]
        assert one.shared <= limit, f"{one.name} takes {one.shared} bytes of sm_{one.capability}'s {limit}"


def _compile(variant: Variant, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(variant.constants, "constexpr") | dict(variant.signature)
    even = [name for name, kind in variant.signature.items() if kind.startswith("*") or name in variant.multiples]
    attributes = {(variant.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # reported with the variant's name, by the process that asked
        return Compiled(name=variant.name, capability=capability, shared=0, size=0, error=str(error)[:2000])
    cubin = made.asm["cubin"]
    before, wait, _after = made.asm["ptx"].partition("griddepcontrol.wait")
    return Compiled(
        name=variant.name,
        capability=capability,
        shared=made.metadata.shared,
        size=len(cubin),
        stores=re.search(r"\bst\.(\w+\.)*global\b", made.asm["ptx"]) is not None,
        stack=_stack(cubin),
        waits=bool(wait),
        loads_first=bool(wait) and re.search(r"\bld\.(\w+\.)*global\b", before) is not None,
    )


def _stack(cubin: bytes) -> int:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1])


if __name__ == "__main__":
    made = {}
    for name in sys.argv[1:]:
        variants: list[Variant] = importlib.import_module(f"support.variants_{name}").VARIANTS
        made[name] = [asdict(_compile(v, capability)) for v in variants for capability in v.capabilities]
    print(json.dumps(made))
