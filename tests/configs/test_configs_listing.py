"""The kept list of `transformers`' modules: the same as a new one, and made again when a file changes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from support.service import ROOT

from engine.configs import listing

NAMES: listing.Names = {
    frozenset(): {"llama.configuration_llama": {"LlamaConfig"}},
    frozenset({"torch", "vision"}): {"llama.modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
}


class Models:
    """A folder of models' modules, and how often they are listed."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.file = folder / "llama" / "modeling_llama.py"
        self.file.parent.mkdir()
        self.file.write_text("class LlamaModel: ...")

    def define(self, path: str, prefix: str | None = None) -> listing.Names:
        self.count += 1
        return NAMES if Path(path) == self.folder else {frozenset(): {path: {str(prefix)}}}

    def listed(self, prefix: str | None = None) -> listing.Names:
        """As a new process lists them."""
        return listing._with_list(self.define, self.folder)(str(self.folder / "__init__.py"), prefix)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return Models(tmp_path / "models")


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "octavo" / "transformers").iterdir()
    return file


def test_the_list_is_made_once_and_read_afterwards(models: Models) -> None:
    assert models.listed() == models.listed() == NAMES
    assert models.count == 1
    with_prefix = models.listed("models")
    assert with_prefix[frozenset()] == {"models.llama.configuration_llama": {"LlamaConfig"}}
    assert models.count == 1


def test_other_folders_are_listed_as_ever(models: Models) -> None:
    define = listing._with_list(models.define, models.folder)
    assert define("/elsewhere", "p") == {frozenset(): {"/elsewhere": {"p"}}}


def test_a_changed_file_makes_a_new_list(models: Models, tmp_path: Path) -> None:
    models.listed()
    models.file.write_text("class LlamaModel: ...  # longer")
    models.listed()
    (models.file.parent / "modeling_more.py").touch()
    models.listed()
    models.listed()
    assert models.count == 3
    kept(tmp_path)  # there is one file


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"state": 1}', '{"names": []}'])
def test_a_damaged_file_is_not_read(damage: str, models: Models, tmp_path: Path) -> None:
    models.listed()
    kept(tmp_path).write_text(damage)
    assert models.listed() == models.listed() == NAMES
    assert models.count == 2


def test_a_cache_that_others_can_write_to_is_not_used(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models.listed()
    false = {"state": json.loads(kept(tmp_path).read_text())["state"], "names": []}
    kept(tmp_path).write_text(json.dumps(false))
    assert models.listed() == {}, "it is read"
    kept(tmp_path).parent.chmod(0o777)
    with caplog.at_level(logging.DEBUG, "octavo.configs"):
        assert models.listed() == NAMES
    assert "other users can write to" in caplog.text


CHILD = """
from engine.configs.alone import take_configs_alone
take_configs_alone()
import transformers
from transformers.utils import import_utils
assert transformers.LlamaConfig.model_type == "llama"
print(import_utils.create_import_structure_from_path.cache_info().misses)
"""


@pytest.mark.slow
def test_transformers_reads_no_files_for_a_list_that_is_kept(tmp_path: Path) -> None:
    read = []
    for _ in range(2):
        command = [sys.executable, "-c", CHILD]
        environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        read.append(int(done.stdout))
    assert read[0] > 300, "a folder for each family"
    assert read[1] < 3, "those of the models that are used"
