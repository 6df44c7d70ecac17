"""Steps of one row, recorded in both ways of which the faster is kept: the tokens of `transformers` by either.

Without a GPU, Triton's interpreter runs them, what would be recorded is called, and the test says what took how long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from support.driving import Job, make_engine, run
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import CHECKPOINT, greedy, prompt
from support.reference import MIN_MARGIN
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ

from engine import Engine
from engine.backends.triton import matvec, rotary
from engine.backends.triton import overlap as overlap_of_kernels
from engine.execution import starting, warmup
from engine.execution.recording import CudaRecorder, Recorder, eager
from engine.execution.warmup import typical_row
from engine.model.row_form import FUSED, LIBRARY, OVERLAPPING
from engine.scheduling.plan import StepPlan

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 1}
SETTINGS["max_num_batched_tokens"] = 4  # also what an engine tries when it starts
TOKENS = 3
SLOWER, FASTER = (1.0, 2.0), (2.0, 1.0)  # seconds with the library's products, and with fused ones


def use_graphs(engine: Engine, device: torch.device, *seconds: float, typical: StepPlan | None = None) -> None:
    """Record steps of one row again, and be told how long they take."""
    record: Recorder = eager if device.type == "cpu" else CudaRecorder(device)
    times = cycle(seconds)
    engine.runner.use_graphs(1, record, (lambda replay: next(times)) if seconds else None, typical)


@contextmanager
def recorded(path: Path, *seconds: float, overlap: bool = False) -> Iterator[Engine]:
    with (
        kernels() as device,
        mock.patch.object(overlap_of_kernels, "can_overlap", return_value=overlap),
        # With a CPU's products, which are not ours here, a row alone may not be what it is among others.
        mock.patch.object(starting, "min_invariant_rows", return_value=1),
    ):
        engine = make_engine(path, **(SETTINGS | {"device": str(device)}))
        try:
            use_graphs(engine, device, *seconds)
            yield engine
        finally:
            engine.close()


@contextmanager
def counted() -> Iterator[mock.Mock]:
    """Calls of our products."""
    with mock.patch.object(matvec, "product", side_effect=matvec.product) as products:
        yield products


def check(path: Path, tokens: list[int], expected: list[int], both: bool = False) -> None:
    job = Job(tokens, greedy(TOKENS, ignore_eos=True))
    with recorded(path, *FASTER) as engine:
        with counted() as products:
            assert run(engine, [job])[0][0][: len(expected)] == expected
        graphs = engine.runner.graphs
        assert graphs is not None
        assert graphs.num_replayed == TOKENS - 1
        assert graphs.one_row.kept == dict.fromkeys(("layers", "logits"), FUSED.name)
        # A GPU calls nothing: it replays.
        assert products.call_count or engine.runner.model.device.type == "cuda"
        if not both:  # the library's products with these kernels: in other tests
            return
        use_graphs(engine, engine.runner.model.device, *SLOWER)
        with counted() as products:
            assert run(engine, [job])[0][0][: len(expected)] == expected
        assert not products.called


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2", "gpt-oss"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_family_checkpoint(FAMILY_SHAPES[name], tmp_path)
    tokens = min(model.prompts(), key=len)
    expected = model.greedy(tokens)
    assert expected.margin > MIN_MARGIN
    check(tmp_path, tokens, expected.answers[0].tokens[:TOKENS], both=name == "qwen3")


def test_tokens_of_an_encoder_decoder(tmp_path: Path) -> None:
    model = make_seq2seq_checkpoint(SEQ2SEQ["t5"], tmp_path)
    case = model.cases()[0]
    check(tmp_path, list(case.source), model.greedy(case).answers[0].tokens[:TOKENS])


def test_nothing_is_timed_where_nothing_can_be(checkpoint: Callable[[str], Any]) -> None:
    with recorded(checkpoint(CHECKPOINT).path) as engine, counted() as products:
        run(engine, [Job(prompt(1, 5), greedy(3))])
        assert not products.called
        assert engine.runner.graphs is not None
        assert not engine.runner.graphs.one_row.timed


def test_the_log_says_what_was_kept(checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="octavo.execution")
    times = (2e-3, 1e-3, 1e-3, 3e-3)
    with recorded(checkpoint(CHECKPOINT).path, *times):
        pass
    first, second = "the library's products", "fused products"
    assert f"layers of one row: 2.000 ms with {first}, 1.000 ms with {second}; kept: {second}" in caplog.text
    assert f"logits of one row: 1.000 ms with {first}, 3.000 ms with {second}; kept: {first}" in caplog.text


def test_kernels_may_overlap_where_a_gpu_can(checkpoint: Callable[[str], Any]) -> None:
    """There is a third way then, which nothing but its time tells from the second: products, heads and attention."""
    asked: dict[str, list[bool]] = {"product": [], "heads": [], "attention": []}

    def noting(name: str) -> Any:
        def overlapping(wanted: bool) -> dict[str, bool]:
            asked[name].append(wanted)
            return {"EARLY": False}

        return overlapping

    times = (3.0, 2.0, 1.0)
    if torch.cuda.is_available() and not overlap_of_kernels.can_overlap(torch.device("cuda")):
        pytest.skip("this GPU's kernels cannot overlap")
    path = checkpoint(CHECKPOINT).path
    with (
        mock.patch.object(matvec, "overlapping", noting("product")),
        mock.patch.object(rotary, "overlapping", noting("heads")),
        mock.patch.object(overlap_of_kernels, "overlapping", noting("attention")),
        recorded(path, *times, overlap=True) as engine,
    ):
        assert all(set(wanted) == {False, True} for wanted in asked.values())
        graphs = engine.runner.graphs
        assert graphs is not None
        assert graphs.one_row.kept == dict.fromkeys(("layers", "logits"), OVERLAPPING.name)
        assert list(graphs.one_row.timed["layers"].values()) == list(times)
        if engine.runner.model.device.type == "cpu":
            for wanted in asked.values():
                wanted.clear()
            run(engine, [Job(prompt(1, 5), greedy(4, ignore_eos=True))])
            assert set(asked["product"]) == {True}
            for name in ("heads", "attention"):  # those of the prompt wait
                assert asked[name].count(True) > asked[name].count(False) > 0


def wrong(*args: Any, **how: Any) -> torch.Tensor:
    return matvec_product(*args, **how).mul_(1.5)


def missing(*args: Any, **how: Any) -> torch.Tensor:
    return matvec_product(*args, **how).fill_(torch.nan)


def broken(*args: Any, **how: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available, says the test")


matvec_product = matvec.product


@pytest.mark.parametrize(
    ("kernel", "said"),
    [(wrong, "are off by"), (missing, "are off by nan"), (broken, "cannot be used (no kernel image")],
)
def test_kernels_that_go_wrong_are_not_used(
    kernel: Callable[..., torch.Tensor],
    said: str,
    checkpoint: Callable[[str], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with mock.patch.object(matvec, "product", kernel), recorded(checkpoint(CHECKPOINT).path, *FASTER) as engine:
        overlapping = engine.runner.model.device.type == "cuda"  # a GPU tries the kernels with overlap, too
        assert caplog.text.count(said) == (4 if overlapping else 2), "of layers and of logits"
        assert engine.runner.graphs is not None
        assert engine.runner.graphs.one_row.kept == dict.fromkeys(("layers", "logits"), LIBRARY.name)
        assert len(run(engine, [Job(prompt(1, 5), greedy(3, ignore_eos=True))])[0][0]) == 3


@pytest.mark.parametrize("wrong", ["queries", "keys", "values"])
def test_a_kernel_that_is_wrong_in_a_part_alone_is_not_used(
    wrong: str, checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where a context is one token, queries and keys say nothing: the row that is compared has a longer one. Its own
    keys and values say little even there: what is written is compared, too."""
    with recorded(checkpoint(CHECKPOINT).path) as engine:
        part = engine.runner.model.spec.trunk.attentions[0]
        queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
        joined = queries + 2 * keys
        place = {"queries": slice(queries), "keys": slice(queries, queries + keys), "values": slice(-keys, None)}[wrong]

        def without_it(x: torch.Tensor, weight: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
            made = matvec_product(x, weight, *args, **how)
            if weight.shape[0] == joined:
                made[:, place] = 0
            return made

        def kept() -> str:
            assert engine.runner.graphs is not None
            return engine.runner.graphs.one_row.kept["layers"]

        device = engine.runner.model.device
        with mock.patch.object(matvec, "product", without_it):
            use_graphs(engine, device, *FASTER)
            assert kept() == FUSED.name, "a row of padding does not show it"
            with mock.patch.object(warmup, "_TYPICAL", 9), typical_row(engine.runner) as typical:
                use_graphs(engine, device, *FASTER, typical=typical)
            assert kept() == LIBRARY.name
            assert "are off by" in caplog.text
        with mock.patch.object(warmup, "_TYPICAL", 9), typical_row(engine.runner) as typical:
            assert typical.context_lens.tolist() == [10]
            use_graphs(engine, device, *FASTER, typical=typical)
        assert kept() == FUSED.name
        assert all(not tensor.any() for layer in engine.runner.cache.layers for tensor in layer)
        assert len(run(engine, [Job(prompt(1, 5), greedy(3, ignore_eos=True))])[0][0]) == 3
