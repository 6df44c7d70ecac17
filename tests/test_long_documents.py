"""Inputs of 16,384 tokens: memory grows with their length, not with its square."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch import attention_sparse

LENGTH = 16384
LIMIT = 2 << 30  # bytes above what the loaded model takes

# As wide as the published model, with fewer layers: what layers need they need one after the other.
SIZE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH + 2,
    "attention_window": 512,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "sep_token_id": 2,
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
found = ask(length)
# Not getrusage's: that counts what the process that started this one had.
peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
answer = {"above": peak - before}
if found.pooled is not None:
    answer |= {"shape": found.pooled.shape, "first": found.pooled.values()[0].tolist()[:3]}
print(json.dumps(answer))
"""


def measure(folder: Path, task: str) -> dict[str, Any]:
    """What an input takes, which must stay below the limit, and what comes of it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), task, str(LENGTH)],
        capture_output=True, text=True, timeout=900, check=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["above"] < LIMIT, found
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("LongformerModel", "embed"),
        ("LongformerForSequenceClassification", "classify"),
        ("LongformerForQuestionAnswering", "answer"),
    ],
)
def test_memory_of_long_inputs(name: str, task: str, tmp_path: Path) -> None:
    kind = getattr(transformers, name)
    kind(transformers.LongformerConfig(**SIZE)).save_pretrained(tmp_path)
    found = measure(tmp_path, task)
    assert found["shape"][0] == (LENGTH if task == "answer" else 1)
    assert all(number == number for number in found["first"])


def test_attention_to_blocks_is_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's queries meet all keys where it is the first or the last one, those of five blocks elsewhere."""
    length, size, met = 4096, 64, []
    attend = attention_sparse.F.scaled_dot_product_attention

    def spy(queries: Tensor, keys: Tensor, *more: Any, **options: Any) -> Tensor:
        met.append((queries.shape[2], keys.shape[2]))
        return attend(queries, keys, *more, **options)

    monkeypatch.setattr(attention_sparse.F, "scaled_dot_product_attention", spy)
    heads = (torch.randn(length, 1, 8), torch.randn(length, 1, 8), torch.randn(length, 1, 8))
    rows = AttentionMetadata.build([length], [length], torch.device("cpu"))
    attention_sparse.attend(heads, rows, 1.0, size=size, whole=704, first_counts=4)
    assert met == [(64, length), (64, 4 * 64), *[(64, 5 * 64)] * 60, (64, 4 * 64), (64, length)]


LED = transformers.LEDConfig(
    vocab_size=1000, d_model=768, encoder_layers=2, decoder_layers=1, encoder_attention_heads=12,
    decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072, attention_window=512,
)  # fmt: skip
LONG_T5 = transformers.LongT5Config(
    vocab_size=1000, d_model=768, num_layers=2, num_decoder_layers=1, num_heads=12, d_ff=2048, n_positions=LENGTH,
    encoder_attention_type="transient-global", feed_forward_proj="gated-gelu", decoder_start_token_id=0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "config"), [("LEDForConditionalGeneration", LED), ("LongT5ForConditionalGeneration", LONG_T5)]
)
def test_memory_of_long_inputs_of_an_encoder_beside_a_decoder(name: str, config: Any, tmp_path: Path) -> None:
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    measure(tmp_path, "generate")
