"""Text in and out of encoder-decoder models, with tokenizers as published folders have them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from fake_client import VOCAB_SIZE, FakeClient, byte_tokenizer, say
from support.asgi import Call, error
from support.service import ROOT
from support.text_seq2seq import (
    KINDS,
    MAX_LENGTH,
    TEXTS,
    m2m100_tokenizer,
    make_text_checkpoint,
    marian_tokenizer,
    mbart50_tokenizer,
    mbart_tokenizer,
    nllb_tokenizer,
    t5_tokenizer,
)
from test_http_api import Api
from test_http_chat import Api as ChatApi
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from engine import LLM, InvalidRequestError, SamplingParams, Seq2SeqInput, TokenInput
from engine.interface.inputs import ReadInput, decoder_start, read_input
from engine.process.messages import decode_command, encode_add
from engine.text.languages import Languages
from engine.text.processor import Tokenizer, load_tokenizer
from server.app import create_app

LOADED = {
    "m2m100": "M2M100Tokenizer",
    "small100": "M2M100Tokenizer",
    "nllb": "NllbTokenizer",
    "t5": "T5Tokenizer",
    "bart": "RobertaTokenizer",
    "mbart50": "MBart50Tokenizer",
    "plbart": "PLBartTokenizer",
    "marian": "MarianTokenizer",
    "fsmt": "FSMTTokenizer",
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_references(kind: str, tmp_path: Path) -> None:
    """Special tokens of the input, text of the answer, and where a given beginning stands."""
    if kind == "fsmt":
        pytest.importorskip("sacremoses")
    one = make_text_checkpoint(kind, tmp_path)
    assert type(one.tokenizer).__name__ == LOADED.get(kind, "PegasusTokenizer")
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", show_progress=False, num_gpu_blocks_override=64,
        max_model_len=MAX_LENGTH,
    )  # fmt: skip
    assert llm.tokenizer is not None
    start = one.model.generation_config.decoder_start_token_id
    params = [SamplingParams(temperature=0, max_tokens=10), SamplingParams(num_beams=3, max_tokens=8)]
    for text in (TEXTS[0], TEXTS[1]):
        encoder = one.encode(text)
        answers = [
            one.generate(encoder, num_beams=1, max_new_tokens=10),
            one.generate(encoder, num_beams=3, max_new_tokens=8),
        ]
        for output, (answer,) in zip(llm.generate([text, encoder], params), answers, strict=True):
            assert output.encoder_token_ids == encoder
            assert output.prompt_token_ids == [start]
            assert output.outputs[0].token_ids == answer
            assert output.outputs[0].text == one.text(answer)
    begin = llm.tokenizer.encode_answer("winter with you")
    if getattr(one.tokenizer, "tgt_lang", "") is None:  # the reference must be told one
        one.tokenizer.tgt_lang = one.tokenizer.src_lang
    if kind == "fsmt":  # the reference has no such mode
        assert one.tokenizer.decode(begin) == "winter with you"
        assert begin != one.encode("winter with you")[:-1]
        assert llm.tokenizer.languages.pair == ("en", "de")
        quoted = 'the "old" stone (a well-known one): "late", and "the sea" sings.'
        ids, streamed = llm.tokenizer.encode_answer(quoted), llm.tokenizer.detokenizer([start])
        pieces = [streamed.append([token]) for token in ids]
        assert "".join(pieces) + streamed.finish() == one.text(ids) == quoted
        assert sum(map(bool, pieces)) > 5
    else:
        assert begin == one.tokenizer(text_target="winter with you", add_special_tokens=False).input_ids
    other = llm.generate(TokenInput(encoder), SamplingParams(temperature=0, max_tokens=5, decoder_start_token_id=20))
    assert other[0].prompt_token_ids == [20]
    expected = one.generate(encoder, num_beams=1, decoder_start_token_id=20, max_new_tokens=5)
    assert [other[0].outputs[0].token_ids] == expected
    output = llm.generate(Seq2SeqInput(encoder, begin), params[1])[0]
    (answer,) = one.generate(encoder, [start, *begin], num_beams=3, max_new_tokens=8)
    assert output.prompt_token_ids == [start, *begin]
    assert output.outputs[0].text == one.text(answer, [start, *begin])
    assert output.prompt is None
    vllms = {"encoder_prompt": {"prompt_token_ids": encoder}, "decoder_prompt": "winter with you"}
    assert llm.generate(vllms, params[1])[0].outputs == output.outputs
    llm.engine.check_integrity()
    llm.close()


# ---------------------------------------------------------------- languages


@pytest.mark.parametrize(
    ("write", "codes", "count"),
    [
        (mbart50_tokenizer, ("ro_RO", "en_XX", "zh_CN"), 52),
        (mbart_tokenizer, ("ro_RO", "en_XX"), 25),
        (nllb_tokenizer, ("zho_Hans", "eng_Latn"), 4),
        (m2m100_tokenizer, ("zu", "en"), 100),
    ],
)
def test_a_source_language_stands_where_the_tokenizer_puts_it(
    write: Callable[[Path], None], codes: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    write(tmp_path)
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    mine = load_tokenizer(tmp_path)
    assert mine is not None
    assert len(mine.languages.ids) == count
    for text in ("a b", "", "sea"):
        assert mine.encode(text) == hf(text).input_ids
        for code in codes:
            hf.src_lang = code
            assert mine.encode(text, src_lang=code) == hf(text).input_ids
            written = f"__{code}__" if write is m2m100_tokenizer else code
            assert mine.languages.id(code, "tgt_lang") == hf.convert_tokens_to_ids(written)
        hf.src_lang = codes[1]
    with pytest.raises(InvalidRequestError, match="does not have the language 'xx_XX'; it has") as unknown:
        mine.encode("a", src_lang="xx_XX")
    assert unknown.value.param == "src_lang"


def test_special_tokens_that_only_look_like_languages(tmp_path: Path) -> None:
    rust = RustTokenizer(models.WordLevel({"</s>": 0, "a": 1, "en_XX": 2, "<unk>": 3}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="</s>", unk_token="<unk>", extra_special_tokens=["en_XX"]
    )
    hf.save_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    assert mine is not None
    assert mine.languages == Languages()
    assert (mine.token_id("a"), mine.token_id("b")) == (1, None)
    with pytest.raises(InvalidRequestError, match="no language tokens"):
        mine.encode("a", src_lang="en_XX")


def test_marian_has_a_vocabulary_a_side(tmp_path: Path) -> None:
    """The two sides cut a text differently; the switch of one thread does not reach the other."""
    one = make_text_checkpoint("marian", tmp_path)
    mine = load_tokenizer(tmp_path)
    assert mine is not None
    text = "young winter wind"
    assert mine.encode(text, add_special_tokens=False) != mine.encode_answer(text)
    assert mine.encode(text) == one.encode(text)
    assert mine.token_id("</s>") == 0
    assert mine.token_id("no such piece") is None


# ---------------------------------------------------------------- decoder-only models


@pytest.fixture
def plain() -> Api:
    return Api()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decoder_prompt": "b"}, "end the prompt with"),
        ({"forced_bos_token": 5}, "remove it"),
        ({"src_lang": "en_XX"}, "describe the task in the prompt"),
        ({"tgt_lang": "de_DE"}, "describe the task in the prompt"),
    ],
)
def test_decoder_only_models_refuse_what_is_for_the_others(plain: Api, fields: dict[str, Any], words: str) -> None:
    (name,) = fields
    found = error(plain.complete(prompt="a", **fields))
    assert (found["param"], found["code"]) == (name, "unsupported_parameter")
    assert "decoder-only model" in found["message"]
    assert words in found["message"]
    assert plain.complete(prompt="a", **{name: None}).status_code == 200
    refused = error(ChatApi().chat(**fields))
    assert (refused["param"], refused["code"]) == (name, "unsupported_parameter")
    assert len(plain.client.asked) == 1


def test_marian_with_a_tokenizer_json_alone(tmp_path: Path) -> None:
    """Its class in the reference reads SentencePiece's files only."""
    t5_tokenizer(tmp_path)
    expected = load_tokenizer(tmp_path)
    settings = {"tokenizer_class": "MarianTokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    mine = load_tokenizer(tmp_path)
    assert mine is not None
    assert expected is not None
    assert mine.encode("the sea") == [*mine.encode_answer("the sea"), 1] == expected.encode("the sea")
    assert mine.decode([0, *mine.encode("the sea")]) == "the sea"


@pytest.mark.slow
def test_a_missing_sentencepiece_is_named(tmp_path: Path) -> None:
    marian_tokenizer(tmp_path)
    code = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        f"from engine.text.processor import load_tokenizer\ntry: load_tokenizer({str(tmp_path)!r})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("ModelLoadError")
    assert "pip install sentencepiece" in shown


def asked_of(tokenizer: Tokenizer, start: int, body: dict[str, Any]) -> tuple[Call, list[Any]]:
    """The answer of an encoder-decoder model whose decoder begins with `start`, and what its engine was asked."""

    async def ask() -> tuple[Call, list[Any]]:
        client = FakeClient(lambda request_id, source, params: say(request_id, ["a"], params))
        facts = {"max_encoder_len": 32, "encoder_vocab_size": VOCAB_SIZE, "decoder_start_token_id": start}
        client.info = replace(client.info, **facts)
        call = Call(create_app(client, tokenizer, "fake"), "/v1/completions", body)
        async with asyncio.timeout(20):
            await call.wait_end()
        return call, list(client.asked.values())

    return asyncio.run(ask())


def test_a_language_that_the_decoder_begins_with(tmp_path: Path) -> None:
    """mBART's first models begin with the target's language, where mBART-50 forces it behind the start token."""
    mbart_tokenizer(tmp_path)
    mine = load_tokenizer(tmp_path)
    assert mine is not None
    english, romanian = (mine.languages.id(code, "tgt_lang") for code in ("en_XX", "ro_RO"))
    for asked, start in (("ro_RO", romanian), ("en_XX", english)):
        call, ((_, params),) = asked_of(mine, romanian, {"prompt": "a", "tgt_lang": asked})
        assert call.status == 200
        assert (params.decoder_start_token_id, params.forced_bos_token_id) == (start, None)
    call, ((_, params),) = asked_of(mine, 2, {"prompt": "a", "tgt_lang": "en_XX"})
    assert (params.decoder_start_token_id, params.forced_bos_token_id) == (None, english)
    body = {"prompt": "a", "tgt_lang": "en_XX", "decoder_start_token_id": 5}
    call, asked_for = asked_of(mine, romanian, body)
    assert (call.status, asked_for) == (400, [])
    call, ((_, params),) = asked_of(mine, 2, body)
    assert (params.decoder_start_token_id, params.forced_bos_token_id) == (5, english)


def test_what_the_decoder_begins_with() -> None:
    facts = FakeClient(lambda *_: []).info
    own, given = SamplingParams(), SamplingParams(decoder_start_token_id=5)
    assert decoder_start(own, facts) is None
    with pytest.raises(InvalidRequestError, match="decoder-only model") as refused:
        decoder_start(given, facts)
    assert (refused.value.param, refused.value.code) == ("decoder_start_token_id", "unsupported_parameter")
    info = replace(facts, max_encoder_len=8, encoder_vocab_size=VOCAB_SIZE)
    assert [decoder_start(params, info) for params in (own, given)] == [None, 5]
    assert [decoder_start(params, replace(info, decoder_start_token_id=0)) for params in (own, given)] == [0, 5]
    with pytest.raises(InvalidRequestError, match="0 to 256"):
        decoder_start(SamplingParams(decoder_start_token_id=VOCAB_SIZE), info)
    with pytest.raises(InvalidRequestError, match="does not say what its decoder begins with") as refused:
        read_input([1], info, start=None)
    assert refused.value.param == "decoder_prompt"
    assert read_input(Seq2SeqInput([1], [2]), info, start=None) == ReadInput((2,), encoder_token_ids=(1,))


# ---------------------------------------------------------------- admission


def test_waiting_tokens_of_encoder_and_decoder_count() -> None:
    """Until the first token has come; an input that is far too long counts as what the encoder takes."""

    async def waiting(**body: Any) -> int:
        begin = asyncio.Event()

        def script(request_id: str, source: Any, params: SamplingParams) -> list[Any]:
            return [begin, *say(request_id, ["ab"], params)]

        client = FakeClient(script)
        facts = {"max_encoder_len": 32, "encoder_vocab_size": VOCAB_SIZE, "decoder_start_token_id": 0}
        client.info = replace(client.info, **facts)
        app = create_app(client, byte_tokenizer(), "fake")
        call = Call(app, "/v1/completions", body)
        async with asyncio.timeout(20):
            while not client.asked and not call.task.done():
                await asyncio.sleep(0)
        admission = app.state.service.admission
        waits = admission.num_queued_tokens
        assert all(isinstance(source, (TokenInput, Seq2SeqInput)) for source, _ in client.asked.values())
        begin.set()
        await call.wait_end()
        assert admission.num_queued_tokens == admission.num_prompts == 0
        assert call.status == 200 or not waits
        return int(waits)

    assert asyncio.run(waiting(prompt="abcde")) == 5
    assert asyncio.run(waiting(prompt=["abcde", "fg"], decoder_prompt="xyz")) == 5 + 2 + 2 * 3
    assert asyncio.run(waiting(prompt="abc", decoder_prompt=[1, 2], forced_bos_token=1)) == 5
    assert asyncio.run(waiting(prompt="abc", decoder_prompt="de", forced_bos_token="x")) == 3 + 3
    assert asyncio.run(waiting(prompt="a" * 65)) == 32


def test_a_malformed_input_names_its_field() -> None:
    for input, param in ((Seq2SeqInput(["a"], [1]), "prompt"), (Seq2SeqInput([1], ["a"]), "decoder_prompt")):  # type: ignore[list-item]
        found = decode_command(encode_add("r", input, SamplingParams()))
        assert isinstance(found, tuple)
        assert found[1].param == param
