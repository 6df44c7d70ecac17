"""Long texts are tokenised in a worker: the same tokens, with the memory of another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_client import FakeClient, say
from support.asgi import Call
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine import InvalidRequestError
from engine.text.processor import Tokenizer
from server.answering.long_texts import LONG, LongTexts, leave_to_worker
from server.app import create_app
from server.workers import child
from server.workers.pool import WorkerPool

MIB = 2**20


def bert_like(*, lower_case: bool = False) -> Tokenizer:
    """Words, with special tokens around a text, and characters that vanish."""
    rust = RustTokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "ab": 3, "##c": 4}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=False)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    return Tokenizer(hf, lower_case=lower_case)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def peak_after_reset() -> int:
    """Bytes that this process has had at most since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("lower_case", [False, True])
def test_the_tokens_are_the_same(special: bool, lower_case: bool, pool: WorkerPool) -> None:
    here, there = bert_like(lower_case=lower_case), bert_like(lower_case=lower_case)
    there.encode_long = (LONG, LongTexts(there, pool).encode)
    at_most, beyond = "ab abc AB xyz " * (LONG // 14), "ab abc AB xyz " * (LONG // 14 + 1)
    assert there.encode(at_most, special) == here.encode(at_most, special)
    assert pool._forker is None, "a text that is not long went to a worker"
    assert there.encode(beyond, special) == here.encode(beyond, special)
    assert len(pool._idle) == 1, "no worker was asked"
    assert there.encode(beyond + "ab", special)[-2:] == here.encode(beyond + "ab", special)[-2:]
    assert len(pool._idle) == 1, "the worker was not kept"


@pytest.mark.slow
def test_the_memory_is_that_of_a_worker(pool: WorkerPool) -> None:
    tokenizer = bert_like()
    tokenizer.encode_long = (LONG, LongTexts(tokenizer, pool).encode)
    text = "\u200b" * (2 * MIB)  # vanishes, after the tokenizer has taken 160 bytes for each
    before = resident()
    peak_after_reset()
    assert tokenizer.encode(text) == [1, 2]
    assert peak_after_reset() - before < 64 * MIB


@pytest.mark.slow
def test_what_takes_too_much_is_refused_and_harms_nothing(pool: WorkerPool) -> None:
    tokenizer = bert_like()
    tokenizer.encode_long = (LONG, LongTexts(tokenizer, pool).encode)
    with pytest.raises(InvalidRequestError, match=r"[0-9]+ characters took too much memory"):
        tokenizer.encode("\u200b" * (child.MEMORY // 100))
    assert tokenizer.encode("ab" + " " * LONG) == [1, 3, 2]


async def test_the_service_sends_long_prompts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = LongTexts.encode

    def encode(self: LongTexts, text: str, special: bool) -> list[int]:
        asked.append(len(text))
        return ask(self, text, special)

    monkeypatch.setattr(LongTexts, "encode", encode)
    tokenizer = bert_like()
    leave_to_worker(tokenizer)
    client = FakeClient(lambda request_id, source, params: say(request_id, ["x"], params))
    client.info = replace(client.info, max_model_len=2**17)
    app = create_app(client, tokenizer, "fake")
    text = "ab" + " " * LONG + "abc"
    for path, body in (("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text})):
        call = Call(app, path, body)
        await call.wait_end()
        assert call.status == 200, call.text
    assert asked == [len(text)] * 2
    assert [list(source.token_ids) for source, *_ in client.asked.values()] == [[1, 3, 3, 4, 2]]
