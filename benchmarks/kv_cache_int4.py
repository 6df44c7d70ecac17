"""What pages of 4 bits would cost in accuracy, without kernels for them: two small trained models read their own texts
over pages of float32 numbers that were rounded to few bits when they were written.

Teacher-forced as in kv_cache_dtype.py, whose measure this is: stories260k, and the chat model that comes with Octavo.
A vector is one token's K or V of one head; keys have the mean key subtracted that int8 and fp8 pages subtract. Forms:

    int8, fp8   as pages have them
    int4        integers from -7 to 7 and a bfloat16 scale for each vector
    int4 min    integers from 0 to 15, a bfloat16 scale and minimum
    /16 ...     a scale, or both, for so many neighbours of a vector
    turned      the vector is multiplied with a Hadamard matrix before (arXiv:2404.00456), which spreads what is large
    keys int8   keys as int8 pages have them, values as the form says

    python benchmarks/kv_cache_int4.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kv_cache_dtype import TRAINED, agreement, open_trained, score, tell_stories, told
from offline import ROOT, machine
from torch import Tensor

from engine.backends.attention.base import Paged
from engine.backends.attention.formats import FP8, SCALE, dequantise, quantise
from engine.execution.kv_cache import KVCache
from engine.model.executors import choice
from engine.model.executors.native_rows import NativeRows

CHAT = ROOT / "server" / "demo" / "chat"
MODELS = {"stories260k": (TRAINED, 1), "chat": (CHAT, 0)}
"""A folder, and the token that its texts begin with."""
SMALLEST = 2.0**-126
SCALE_BITS = torch.finfo(SCALE).bits

Rounding = Callable[[Tensor], Tensor]
"""Vectors [..., head_dim] of float32 as pages would give them back."""


def as_int8(vectors: Tensor) -> Tensor:
    return dequantise(*quantise(vectors))


def as_fp8(vectors: Tensor) -> Tensor:
    return dequantise(*quantise(vectors, FP8))


def symmetric(vectors: Tensor) -> Tensor:
    """4 bits by a scale."""
    scales = vectors.abs().amax(-1, keepdim=True).div(7).clamp_min(SMALLEST).to(SCALE).float()
    return (vectors / scales).round().clamp(-7, 7) * scales


def with_minimum(vectors: Tensor) -> Tensor:
    """4 bits by a scale and a minimum."""
    least = vectors.amin(-1, keepdim=True).to(SCALE).float()
    scales = (vectors.amax(-1, keepdim=True) - least).div(15).clamp_min(SMALLEST).to(SCALE).float()
    return ((vectors - least) / scales).round().clamp(0, 15) * scales + least


def in_groups(rounding: Rounding, size: int) -> Rounding:
    """Groups of so many neighbours; the whole vector if it is shorter."""

    def rounded(vectors: Tensor) -> Tensor:
        return rounding(vectors.unflatten(-1, (-1, min(size, vectors.shape[-1])))).flatten(-2)

    return rounded


def turned(rounding: Rounding) -> Rounding:
    """The vector's product with a Hadamard matrix, which is its own inverse."""

    def rounded(vectors: Tensor) -> Tensor:
        matrix = hadamard(vectors.shape[-1])
        return rounding(vectors @ matrix) @ matrix

    return rounded


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix [size, size], symmetric and orthonormal, of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


FORMS: dict[str, tuple[Rounding, Rounding]] = {
    "int8": (as_int8, as_int8),
    "fp8": (as_fp8, as_fp8),
    "int4": (symmetric, symmetric),
    "int4 min": (with_minimum, with_minimum),
    "int4 /16": (in_groups(symmetric, 16),) * 2,
    "int4 min /16": (in_groups(with_minimum, 16),) * 2,
    "int4 turned": (turned(symmetric),) * 2,
    "int4 min turned": (turned(with_minimum),) * 2,
    "keys int8, int4": (as_int8, symmetric),
    "keys int8, int4 min": (as_int8, with_minimum),
}
"""How keys and values are rounded."""


def bits(form: str, head_dim: int) -> float:
    """The bits of a number in such pages: the mean of K and V, with scales and minima."""
    first, _, rest = form.partition(", ")

    def of(kind: str) -> float:
        extra = SCALE_BITS * (1 + ("min" in kind))
        size = next((int(word[1:]) for word in kind.split() if word.startswith("/")), head_dim)
        return (4 if "int4" in kind else 8) + extra / min(size, head_dim)

    return of(form) if not rest else (of(first) + of(rest)) / 2


@contextmanager
def written_as(form: str) -> Iterator[None]:
    """Pages of float32 get rounded vectors."""
    round_keys, round_values = FORMS[form]
    plain = Paged.write

    def write(self: Paged, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        assert self.key_centre is not None
        plain(self, slots, round_keys(keys.float() - self.key_centre), round_values(values.float()))

    with (
        mock.patch.object(Paged, "write", write),
        mock.patch.object(NativeRows, "rotate_and_store", return_value=False),
    ):
        yield


def scores_of(model: Path, form: str, texts: dict[str, list[list[int]]]) -> dict[str, list[tuple[int, float]]]:
    """Of each text over such pages, which torch's operators write and read. For pages of int8 the keys' mean is
    measured; their places are taken by pages of float32."""
    with mock.patch.object(choice, "refusal", return_value="pages are rounded"):
        llm = open_trained("int8", model)
    runner = llm.engine.runner
    few = runner.cache
    shapes = runner.model.kv_shapes()
    pages = len(few.layers[0][0]) - 1
    runner.cache = KVCache(shapes, pages, few.block_size, torch.float32, runner.model.device, few.key_centres)
    with written_as(form):
        found = {name: score(llm, told) for name, told in texts.items()}
    llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=int, default=16, help="of each kind")
    parser.add_argument("--length", type=int, default=255, help="tokens of a story")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "kv-cache-int4.json")
    options = parser.parse_args()
    if not TRAINED.is_dir():
        parser.error(f"there is no trained model at {TRAINED}")
    rows: list[dict[str, Any]] = []
    for name, (model, first) in MODELS.items():
        texts = tell_stories(options.stories, options.length, model, first)
        llm = open_trained("float32", model)
        exact = {text: score(llm, told) for text, told in texts.items()}
        head_dim = llm.engine.runner.model.kv_shapes()[0].head_dim
        llm.close()
        for form in FORMS:
            found = scores_of(model, form, texts)
            for text in texts:
                row = {"model": name, "text": text, "format": form, "bits": bits(form, head_dim)}
                rows.append(row | agreement(found[text], exact[text]))
                print(name, told(rows[-1]), flush=True)
    result = {"benchmark": "kv_cache_int4", "machine": machine(), "agreement": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
