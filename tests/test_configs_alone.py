"""The engine's own process reads configs without the code of models; what it reads is the same."""

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

from engine.model.checkpoint import read_config
from engine.model.families import build_spec

# Prints what each folder describes, and which modules that took.
CHILD = """
import json, sys
from pathlib import Path
from engine.process.configs_alone import take_configs_alone
take_configs_alone()
from transformers import models
from transformers.utils import import_utils
first = import_utils.define_import_structure(models.__file__)
whole = import_utils.create_import_structure_from_path.__wrapped__(models.__file__)
from engine.model.checkpoint import read_config
from engine.model.families import build_spec
bundled = build_spec(read_config(Path(sys.argv[1])))
brought = [name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules]
specs = {folder.name: repr(build_spec(read_config(folder))) for folder in sorted(Path(sys.argv[2]).iterdir())}
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
        expected[name] = repr(build_spec(read_config(tmp_path / name)))
    command = [sys.executable, "-c", CHILD, str(ROOT / "server" / "demo" / "chat"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["brought"] == []
    assert found["listed"]
    assert len(expected) > 100
    assert found["specs"] == expected
