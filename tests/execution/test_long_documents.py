"""Inputs of up to 16,384 tokens: memory and work grow with their length, not with its square."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.driving import finish, make_engine
from torch import Tensor

from engine import PoolingParams, SamplingParams, TokenInput
from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch import attention_sparse

LENGTH = 16384
LIMIT = 2 << 30  # bytes above what the loaded model takes, for an input of this length

# As wide as BERT's base, with few layers: what layers need they need one after the other.
ENCODER: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    "num_hidden_layers": 2, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, "pad_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 1000, "d_model": 768, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 1000, "d_model": 768, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 12, "d_ff": 2048,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "n_positions": LENGTH,
}  # fmt: skip
LONGFORMER = ENCODER | {"attention_window": 512}
# What is asked of each architecture, and the settings of its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LongformerForSequenceClassification": ("classify", LONGFORMER),
    "LongformerForQuestionAnswering": ("answer", LONGFORMER),
    "BigBirdModel": ("embed", ENCODER),
    "LEDForConditionalGeneration": ("generate", BART | {"attention_window": 512}),
    "LongT5ForConditionalGeneration": ("generate", T5 | {"encoder_attention_type": "transient-global"}),
    "BigBirdPegasusForConditionalGeneration": ("generate", BART | {"max_position_embeddings": LENGTH}),
    "PegasusXForConditionalGeneration": ("generate", BART | {"max_position_embeddings": LENGTH}),
}
PROGRAM = """
import json, resource, sys
from engine import LLM, PoolingParams, SamplingParams, TokenInput
task, length = sys.argv[2], int(sys.argv[3])
llm = LLM(sys.argv[1], device="cpu", dtype="float32", show_progress=False, max_num_batched_tokens=length)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def ask(length):
    ids = [0, *(5 + 7 * i % 900 for i in range(length - 1))]
    ids[40] = 2
    params = SamplingParams(temperature=0, max_tokens=2) if task == "generate" else PoolingParams(task=task)
    llm.engine.add_request("a", TokenInput(ids), params)
    found = []
    while llm.engine.has_unfinished_requests():
        found += [d for d in llm.engine.step_deltas() if d.finished]
    return found[-1]
ask(64)
before = resident()
# Not getrusage's: that counts what the process that started this one had.
def above():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024 - before
ask(length // 4)
answer = {"quarter": above()}
found = ask(length)
answer |= {"above": above()}
if found.pooled is not None:
    answer |= {"shape": found.pooled.shape, "first": found.pooled.values()[0].tolist()[:3]}
print(json.dumps(answer))
"""


def make(name: str, folder: Path, **settings: Any) -> None:
    """A checkpoint of one of CASES."""
    kind = getattr(transformers, name)
    kind(kind.config_class(**(CASES[name][1] | settings))).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", CASES)
def test_memory_of_long_inputs(name: str, tmp_path: Path) -> None:
    """Below the limit, and no more than an input of a quarter's length lets expect. The first is the longest."""
    make(name, tmp_path)
    length = LENGTH if name == next(iter(CASES)) else LENGTH // 2
    task = CASES[name][0]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), task, str(length)],
        capture_output=True, text=True, timeout=900, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["above"] < LIMIT * length / LENGTH, found
    assert found["above"] < 4.6 * found["quarter"], found
    if task != "generate":
        assert found["shape"][0] == (length if task == "answer" else 1)
        assert all(number == number for number in found["first"])


# As few features as can be, since pairs of tokens are counted: parts are as long as above.
NARROW: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1},
    "num_layers": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 8},
    "encoder_layers": {
        "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_work_of_long_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens meet twice as many keys. LongT5's sums, one for 16 tokens, are met by all: a sixteenth of the
    square."""
    task, settings = CASES[name]
    make(name, tmp_path, **next(narrow for key, narrow in NARROW.items() if key in settings))
    pairs = 0
    attend = F.scaled_dot_product_attention

    def spy(queries: Tensor, keys: Tensor, *more: Any, **options: Any) -> Tensor:
        nonlocal pairs
        pairs += queries.shape[2] * keys.shape[2]
        return attend(queries, keys, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    engine = make_engine(tmp_path, max_num_batched_tokens=LENGTH // 2, num_gpu_blocks_override=520)
    counted = []
    for length in (LENGTH // 4, LENGTH // 2):
        pairs = 0
        ids = [0, *(5 + 7 * i % 900 for i in range(length - 1))]
        ids[40] = 2
        params = SamplingParams(max_tokens=1) if task == "generate" else PoolingParams(task=task)
        engine.add_request("a", TokenInput(ids), params)
        finish(engine)
        counted.append(pairs)
    engine.close()
    few, many = counted
    left = 2 * (LENGTH // 4) ** 2 // 16 if name.startswith("LongT5") else 0
    assert few > 64 * LENGTH // 4
    assert many - left == pytest.approx(2 * few, rel=0.1)


def test_attention_to_blocks_is_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's queries meet all keys where it is the first or the last one, those of five blocks elsewhere."""
    length, size, met = 4096, 64, []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(queries: Tensor, keys: Tensor, *more: Any, **options: Any) -> Tensor:
        met.append((queries.shape[2], keys.shape[2]))
        return attend(queries, keys, *more, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    heads = (torch.randn(length, 1, 8), torch.randn(length, 1, 8), torch.randn(length, 1, 8))
    rows = AttentionMetadata.build([length], [length], torch.device("cpu"))
    attention_sparse.attend(heads, rows, 1.0, size=size, whole=704, first_counts=4)
    assert met == [(64, length), (64, 4 * 64), *[(64, 5 * 64)] * 60, (64, 4 * 64), (64, length)]
