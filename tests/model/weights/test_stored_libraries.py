"""Matrices that AutoAWQ, AutoGPTQ, GPTQModel and bitsandbytes have stored are read as these libraries read them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import libraries
from support.libraries import ALL, KEPT, LIBRARIES
from test_stored_weights import write
from torch import Tensor

from engine.model.stored.methods import find_scheme
from engine.model.weight_files import Checkpoint


def read(folder: Path, said: dict[str, Any], parts: dict[str, Tensor]) -> Tensor:
    """What these tensors of one matrix hold."""
    write(folder / "model.safetensors", {f"m{ending}": part for ending, part in parts.items()})
    with Checkpoint(folder, find_scheme(SimpleNamespace(quantization_config=said))) as checkpoint:
        assert list(checkpoint.names) == ["m.weight"]
        return checkpoint.read("m.weight")


@pytest.mark.parametrize("name", KEPT)
def test_what_a_library_has_stored_is_read_as_it_reads_it(name: str, tmp_path: Path) -> None:
    """To the last bit of the format in which the library multiplies."""
    kept = libraries.kept()[name]
    found = read(tmp_path, kept.said, kept.parts).to(kept.dtype)
    assert found[0, : len(kept.begins)].tolist() == kept.begins
    assert libraries.digest(found) == kept.digest


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_an_installed_library_stores_is_read_as_it_reads_it(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{LIBRARIES[library]} is not installed; see support/libraries.py")
    wrong = []
    makers = {name: make for name, (by, make) in ALL.items() if by == library}
    for name, make in makers.items():
        made = make()
        if not torch.equal(read(tmp_path, made.said, made.parts).to(made.holds.dtype), made.holds):
            wrong.append(name)
    assert makers
    assert not wrong
