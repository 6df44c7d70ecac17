"""docs/adding-a-model.md: its files work as they stand, and it names every part there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest
import test_golden_families as golden
import torch
import transformers
from support.decoder_classes import logits, make_classifier
from support.driving import finish, make_engine
from support.family_shape import make_family_checkpoint
from support.family_shapes import stablelm
from support.pages import close

from engine import PoolingParams
from engine.model import positions, spec, table

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"All of `([^`]+)`:\n\n```python\n(.*?)```\n", DOCUMENT, re.DOTALL))
ROWS_FILE, SHAPES_FILE = "engine/model/families/decoders.py", "tests/support/family_shapes/stablelm.py"
ROWS = dict(re.findall(r"The row in `([^`]+)`:\n\n```python\n(.*?)```\n", DOCUMENT, re.DOTALL))
SHAPES = stablelm.SHAPES


def test_the_row_and_the_file_are_those_in_the_tree() -> None:
    assert set(ROWS) == {ROWS_FILE}
    assert set(FILES) == {SHAPES_FILE}
    assert ROWS[ROWS_FILE] in (ROOT / ROWS_FILE).read_text(encoding="utf-8")
    assert FILES[SHAPES_FILE] == (ROOT / SHAPES_FILE).read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[golden.Subject]:
    """The document's shapes, loaded by the document's row."""
    model = make_family_checkpoint(SHAPES[request.param], tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, max_model_len=model.shape.max_model_len, block_size=4, max_num_seqs=32)
    yield golden.Subject(model, engine)
    engine.close()


@pytest.mark.parametrize(
    "proof",
    [
        golden.test_greedy_equals_reference,
        golden.test_beams_equal_reference,
        golden.test_hidden_states_equal_reference,
        golden.test_no_parameter_is_left_at_its_first_value,
    ],
)
def test_the_family_equals_reference(subject: golden.Subject, proof: Callable[[golden.Subject], None]) -> None:
    proof(subject)


def test_the_family_has_classifiers(tmp_path: Path) -> None:
    """As the document says, for naming the model without a head."""
    shape = next(iter(SHAPES.values()))
    model = make_classifier(shape, transformers.StableLmForSequenceClassification, tmp_path)
    engine = make_engine(tmp_path, max_model_len=shape.max_model_len, max_num_batched_tokens=16)
    engine.add_request("0", model.ragged()[0], PoolingParams(task="classify", use_activation=False))
    pooled = finish(engine)["0"].pooled
    engine.close()
    assert pooled is not None
    close(torch.tensor(pooled.values()), logits(model, model.ragged()[0]))


def test_the_shapes_turn_every_switch() -> None:
    """The advice that the document gives is followed by its own example."""
    read = set(re.findall(r"\bc\.(\w+)", ROWS[ROWS_FILE]))
    switches = {name for name in read if isinstance(getattr(transformers.StableLmConfig(), name), bool)}
    assert switches == {"use_parallel_residual", "use_qkv_bias", "qk_layernorm"}
    changed = {name for shape in SHAPES.values() for name in shape.settings}
    assert switches | {"tie_word_embeddings"} <= changed


def test_the_files_are_those_of_the_steps() -> None:
    assert all(f"| `{path}` |" in DOCUMENT for path in (*ROWS, *FILES))
    for name, shape in SHAPES.items():
        assert f"\n{name}: prompts={shape.prompts}\n" in DOCUMENT


@pytest.mark.parametrize("module", [spec, positions])
def test_every_part_is_named(module: ModuleType) -> None:
    parts = defined(module)
    assert parts
    missing = [name for name in parts if f"`{name}`" not in DOCUMENT]
    assert not missing, f"name these parts in the table of docs/adding-a-model.md: {', '.join(missing)}"


def test_every_transformation_is_named() -> None:
    transforms = [name for name in defined(table) if hasattr(getattr(table, name), "fill")]
    assert {"Same", "Joined"} <= set(transforms)
    missing = [name for name in transforms if f"\n| `{name}` |" not in DOCUMENT]
    assert not missing, f"name these transformations in docs/adding-a-model.md: {', '.join(missing)}"


def defined(module: ModuleType) -> list[str]:
    """The parts that a module or a package defines; containers of parts apart."""
    found = inspect.getmembers(module, inspect.isclass)
    own = [(name, value) for name, value in found if f"{value.__module__}.".startswith(f"{module.__name__}.")]
    return [name for name, value in own if is_dataclass(value) and name not in ("Stack", "Block")]


def test_every_file_and_link_is_there() -> None:
    paths = re.findall(r"`((?:engine|tests|docs)/[\w/.-]+)`", DOCUMENT)
    assert len(paths) > 5
    assert [path for path in paths if path not in FILES and not (ROOT / path).exists()] == []
