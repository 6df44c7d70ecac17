"""Models whose attention is computed by Triton's kernels: the answers of the CPU; and parts of the kernels, alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.checkpoints import random_prompt
from support.driving import Job, make_engine, run
from support.jobs import CHECKPOINT, beams, greedy, prompt
from support.kernels_attention import bent, widened
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ

from engine.backends.attention.base import AttentionPart
from engine.backends.attention.formats import FP8
from engine.backends.torch.attention import TorchReference
from engine.backends.triton.attention import TritonAttention

pytestmark = pytest.mark.slow


class Served(TritonAttention):
    """On a CPU, too, by the interpreter, while torch computes everything but attention."""

    @classmethod
    def made_for(cls, device: torch.device) -> bool:
        return True

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        return []


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(device: torch.device, path: Path, jobs: list[Job], **settings: Any) -> None:
    """The jobs, run together, get the answers of the torch reference."""
    settings |= {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    answers = []
    for backend, where in ((TorchReference, "cpu"), (Served, str(device))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.backends.attention.selection.BACKENDS", (backend,))
            engine = make_engine(path, **(settings | {"device": where}))
        assert type(engine.runner.model.decoder.blocks[0].attention.inner.backend) is backend  # type: ignore[union-attr]
        answers.append(run(engine, jobs))
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("pages", ["int8", "fp8"])
def test_pages_of_8_bits(device: torch.device, pages: str, checkpoint: Callable[[str], Any]) -> None:
    """A prompt in chunks beside a row that decodes."""
    jobs = [Job(prompt(1, 5), greedy(4)), Job(prompt(2, 40), greedy(3))]
    check(device, checkpoint(CHECKPOINT).path, jobs, kv_cache_dtype=pages, block_size=16)


def test_beams_over_an_encoder(device: torch.device, tmp_path: Path) -> None:
    """Buckets of distances in both stacks; beams read the encoder's pages as one row of a few queries."""
    make_seq2seq_checkpoint(SEQ2SEQ["t5"], tmp_path)
    vocab = SEQ2SEQ["t5"].vocab
    jobs = [Job(random_prompt(vocab, 1, 7), beams(3, 4)), Job(random_prompt(vocab, 2, 20), greedy(3))]
    check(device, tmp_path, jobs, block_size=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_of_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """By bits and, where there is one, by the instruction."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    hardware = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    for instruction in {False, hardware}:
        out = torch.empty(256, dtype=dtype, device=device)
        widened[(1,)](numbers.to(device), out, HARDWARE=instruction)
        assert torch.equal(out.cpu().float().nan_to_num(1e9), numbers.view(FP8).float().nan_to_num(1e9))


def test_a_cap_is_as_exact_near_0_as_far_from_it(device: torch.device) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-30, 2, 94), torch.tensor([float("inf")])])
    out = torch.empty_like(x, device=device)
    bent[(1,)](x.to(device), out, SIZE=4096)
    want = x.double().tanh()
    assert bool(((out.cpu().double() - want).abs() <= 5e-7 * want.abs()).all())
    out = torch.empty(4096, device=device)
    bent[(1,)](torch.full((4096,), float("nan"), device=device), out, SIZE=4096)
    assert bool(out.isnan().all())
