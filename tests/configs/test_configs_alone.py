"""Configs are read without the code of models, and sent to the engine's process; what they say is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.encoder_shape import class_of
from support.encoders import ENCODER_SHAPES
from support.families import FAMILY_SHAPES
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from support.service import ROOT
from transformers import AutoConfig

from engine.model.families import build_spec

# Prints what each folder describes, and which modules that took.
CHILD = """
import json, socket, sys, threading
from pathlib import Path
from engine.configs.alone import take_configs_alone
take_configs_alone()
from transformers import models
from transformers.utils import import_utils
first = import_utils.define_import_structure(models.__file__)
whole = import_utils.create_import_structure_from_path.__wrapped__(models.__file__)
from engine.process.known import find_known
from engine.process.messages import receive_known, send_framed
bundled = find_known(sys.argv[1])
brought = [name for name in ("torch", "sympy") if name in sys.modules]
assert bundled.config.model_type
found = {folder: find_known(str(folder)) for folder in sorted(Path(sys.argv[2]).iterdir())}
from engine.model.checkpoint import read_config
from engine.model.families import build_spec
specs = {}
for folder, known in found.items():
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=send_framed, args=(ours, known))
    sender.start()
    arrived = receive_known(theirs)
    sender.join()
    assert arrived.folder == str(folder)
    specs[folder.name] = repr(build_spec(read_config(folder, arrived.config)))
    ours.close(), theirs.close()
listed = first == import_utils.spread_import_structure(whole)
print(json.dumps({"brought": brought, "listed": listed, "specs": specs}))
"""


@pytest.mark.slow
def test_every_family_is_read_the_same_without_models(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {**FAMILY_SHAPES, **ENCODER_SHAPES, **SEQ2SEQ_SHAPES}
    expected = {}
    for name, shape in shapes.items():
        config = class_of(shape.architecture).config_class(
            vocab_size=shape.vocab, **({"pad_token_id": 0} | shape.settings)
        )
        config.architectures = [shape.architecture]
        config.dtype = "bfloat16"
        config.save_pretrained(tmp_path / name)
        expected[name] = repr(build_spec(AutoConfig.from_pretrained(tmp_path / name)))
    command = [sys.executable, "-c", CHILD, str(ROOT / "server" / "demo" / "chat"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["brought"] == []
    assert found["listed"]
    assert len(expected) > 100
    assert found["specs"] == expected


# Starts an engine, and prints whether its process has mapped the library of transformers' tokenizers.
ENGINE = """
import asyncio, json, sys
from pathlib import Path
from engine.config import EngineConfig
from engine.process.client import ProcessEngineClient
config = EngineConfig(model=sys.argv[1], device="cpu", kv_cache_memory=1 << 24, show_progress=False)
from engine.process.known import find_known
from engine.process.messages import Known
client = ProcessEngineClient(config, known=lambda: find_known(sys.argv[1]) if sys.argv[2] == "here" else Known())
mapped = Path(f"/proc/{client.pid}/maps").read_text()
asyncio.run(client.close())
print(json.dumps({"transformers": "tokenizers" in mapped, "torch": "libtorch" in mapped}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc/self/maps")
@pytest.mark.parametrize("where", ["here", "there"])
def test_an_engine_that_is_told_the_config_imports_no_transformers(where: str) -> None:
    command = [sys.executable, "-c", ENGINE, str(ROOT / "server" / "demo" / "chat"), where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"transformers": where == "there", "torch": True}
