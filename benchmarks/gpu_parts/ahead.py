"""Kernels compiled without a GPU: the engine starts and serves on a CPU, and each launch compiles, and runs nothing.

Triton is given a driver that says what a GPU would say of itself. So variants, options and keys of its cache come from
the launches themselves, and a process on such a GPU finds them in the same folder. What is computed is all zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine, SamplingParams
from engine.backends import triton as gpu
from engine.execution import one_row, warmup
from gpu_parts import shapes

# Bytes of shared memory that a block may have and multiprocessors of a common card, by compute capability.
GPUS = {
    80: (163 * 1024, 108),
    86: (99 * 1024, 84),
    89: (99 * 1024, 142),
    90: (227 * 1024, 132),
    100: (227 * 1024, 148),
    120: (99 * 1024, 170),
}
# Larger tensors are fresh memory, which the system gives as zeros: weights take none until they are written.
_FRESH = 64 * 2**20
_MAKING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class _Zeros(TorchDispatchMode):
    """Memory is zero where a kernel should have written it; products and random weights cost nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "normal_":
            return args[0]
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            return left.new_zeros(left.shape[0], right.shape[1])
        if name == "linear":
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        made = func(*args, **(kwargs or {}))
        if name in _MAKING and made.nbytes < _FRESH:
            made.zero_()
        return made


@contextmanager
def compiling(capability: int) -> Iterator[list[bool]]:
    """Let kernels be compiled for a compute capability, such as 90, where they would be launched.

    Collects for each variant whether Triton's cache had it. It is for a process of its own, without TRITON_INTERPRET.

    Raises:
        ValueError: the capability is none of `GPUS`.
    """
    if capability not in GPUS:
        raise ValueError(f"kernels are compiled for {', '.join(map(str, GPUS))}, not for {capability}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from engine.backends.triton import attention, experts, overlap

    shared, multiprocessors = GPUS[capability]
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
            launcher_cls=lambda _source, _metadata: lambda *_arguments: None,
            utils=SimpleNamespace(
                load_binary=lambda *_: (None, None, 0, 0, 1024),
                get_device_properties=lambda _device: {"max_shared_mem": shared},
            ),
        )
    )
    facts = attention._Device(capability, multiprocessors, hardware=capability >= 89)
    hits: list[bool] = []

    def note(*, cache_hit: bool, **_of_compilation: Any) -> None:
        hits.append(cache_hit)

    with ExitStack() as stack:
        for owner, name, value in (
            (gpu, "_interpreting", True),  # kernels serve the CPU
            (attention, "_facts", lambda _device: facts),
            (experts, "capability_of", lambda _device: capability),
            (overlap, "can_overlap", lambda _device: capability >= 90),
            (one_row, "_difference", lambda _found, _wanted: 0.0),  # all ways of one row are gone through
            (triton.knobs.compilation, "listener", note),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Zeros())
        yield hits


def serve(config: Mapping[str, Any], sizes: shapes.Sizes, **settings: Any) -> None:
    """Start an engine as a GPU's would be, with its recordings, and serve requests of several kinds.

    Args:
        settings: of `EngineConfig`.
    """
    with shapes.random_engine(config, "cpu", sizes, **settings) as engine:
        problem = shapes.facts(engine)["attention"]
        if problem != "triton":
            raise RuntimeError(f"attention of this model is {problem}: it has no kernels to compile")
        runner = engine.runner
        runner.warm()
        runner.use_prompt_graphs(max(sizes.batches), sizes.chunk, _called)
        with warmup.typical_row(runner) as typical:
            runner.use_graphs(max(sizes.batches), _called, _timed, typical)
        for params in (
            SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
            SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, max_tokens=4, ignore_eos=True),
            SamplingParams(temperature=0.8, presence_penalty=0.5, max_tokens=4, ignore_eos=True, logprobs=2),
            SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=3, max_tokens=4, ignore_eos=True),
            SamplingParams(temperature=0.0, num_beams=4, n=1, max_tokens=4, ignore_eos=True),
        ):
            _answer(engine, params, sizes)


def _answer(engine: Engine, params: SamplingParams, sizes: shapes.Sizes) -> None:
    for number, length in enumerate((1, 17, sizes.context)):
        engine.add_request(str(number), shapes.prompt(number, length, engine.info.vocab_size), params)
    while engine.has_unfinished_requests():
        engine.step_deltas()


def _called(function: Callable[[], None]) -> Callable[[], None]:
    function()
    return function


def _timed(replay: Callable[[], None]) -> float:
    replay()
    return 1.0
