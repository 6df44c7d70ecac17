"""What a backend launches, as variants to compile: recorded from calls on tensors without memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from support.gpu import Variant

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@contextmanager
def recorded(name: str, capability: int) -> Iterator[list[Variant]]:
    """Collects the kernels that are launched, none of which runs."""
    found: list[Variant] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in ("num_warps", "num_stages") if key in kwargs}
        kwargs.pop("launch_pdl", None)  # of the launch alone, not of the code
        kwargs.pop("enable_fp_fusion", None)  # changes neither shared memory nor what is asked for
        bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
        signature, constants, multiples = {}, {}, []
        for parameter in kernel.params:
            value = bound[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                constants[parameter.name] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{_TYPES[value.dtype]}"
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    multiples.append(parameter.name)
        found.append(
            Variant(
                name=f"{kernel.fn.__name__} {name}",
                kernel=kernel,
                signature=signature,
                constants=constants,
                multiples=tuple(multiples),
                capabilities=(capability,),
                **options,
            )
        )

    with mock.patch.object(JITFunction, "run", record):
        yield found
