"""Every family of the registry, served as requests come: all ways to decode in one batch over HTTP, on few pages,
preempted, with pages of int8, with weights of few bits. Each request gets what it gets alone.

That these answers are right the goldens say. Images, and texts that are pooled in other ways, have tests of their own
(test_every_pooling.py).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
from support.checkpoints import random_prompt
from support.driving import Job, finish, logprobs, make_engine, run, run_alone
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.local_client import LocalClient
from support.seq2seq import START, Seq2SeqShape, make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from support.speech import RATE, TEXTS, make_speech_checkpoint, nearly, noise
from support.speech import SHAPES as SPEECH_SHAPES
from support.together import posted

from engine import AudioInput, Engine, EngineConfig, PoolingParams, SamplingParams, Seq2SeqInput, TokenInput
from engine.backends.torch import attention_sparse
from engine.model import families
from engine.text.processor import load_tokenizer
from server.app import create_app

pytestmark = [pytest.mark.slow, pytest.mark.whole]

TOKENS = 8
LENGTHS = (30, 3, 21, 9)
DECODING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "ignore_eos": True},
    {"temperature": 1.2, "seed": 6, "top_k": 30, "n": 2, "ignore_eos": True},
    {"num_beams": 3, "n": 3, "length_penalty": 0.6},
)
COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "show_progress": False,
    "max_step_time": 0,
    "enable_prefix_caching": False,
    "quantization_cache": "off",
}
# One request after the other fits in these pages, all together do not.
FEW_PAGES: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 64}
# What log-probabilities may differ by from those in float32, as a part of how much they differ among each other.
NEAR = {"pages of int8": 0.05, "weights of int8": 0.15}
FORMATS: dict[str, dict[str, Any]] = {
    "pages of int8": {"kv_cache_dtype": "int8"},
    "weights of int8": {"quantization": "int8"},
    "weights of int4": {"quantization": "int4"},
}
# Where a family's attention to blocks sees short inputs whole, its blocks are smaller here than in the goldens.
BLOCKS: dict[str, dict[str, Any]] = {"bigbird-pegasus": {"block_size": 2}}
OF_INT4 = ("deepseek-v2", "falcon", "gpt2", "gpt-oss", "llama", "qwen2-moe", "t5")  # each with other kinds of matrices


def of_each_family(shapes: Mapping[str, Any], heads: Sequence[str] = ("",)) -> list[str]:
    """The first shape of each family, for each of these ends of architectures' names."""
    first: dict[tuple[str, str], str] = {}
    for name, shape in shapes.items():
        family = families.find(SimpleNamespace(architectures=[shape.architecture])).name
        for head in heads:
            if shape.architecture.endswith(head):
                first.setdefault((family, head), name)
    return [*first.values()]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of rows whose tokens see some blocks of the others alone."""
    lengths: list[int] = []
    attend = attention_sparse._attend_sparsely

    def spy(queries: torch.Tensor, *more: Any) -> torch.Tensor:
        lengths.append(queries.shape[1])
        return attend(queries, *more)

    monkeypatch.setattr(attention_sparse, "_attend_sparsely", spy)
    return lengths


GENERATING = {**FAMILY_SHAPES, **SEQ2SEQ_SHAPES}
# Others of a family that are served under names or by parts of their own.
BESIDE = ("longt5-sums", "plbart", "mvp")
ENCODERS = of_each_family(ENCODER_SHAPES, ("Model", "ForSequenceClassification"))


def test_what_has_no_shape_reads_images_or_sound() -> None:
    known = {shape.architecture for shape in (*GENERATING.values(), *ENCODER_SHAPES.values())}
    others = [family.name for family in families.FAMILIES if not known & set(family.architectures)]
    assert others == ["CLIP", "Florence-2", "SigLIP", "TrOCR, Donut", "ViT, DeiT", "Whisper"]


@dataclass(frozen=True)
class Subject:
    """A checkpoint and what is asked of it; the engine of `client` has few pages."""

    name: str
    path: Path
    settings: dict[str, Any]
    jobs: list[Job]
    scored: list[int] | Seq2SeqInput
    client: LocalClient


@pytest.fixture(scope="module", params=[*of_each_family(GENERATING), *BESIDE])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    shape, folder = GENERATING[request.param], tmp_path_factory.mktemp(request.param)
    vocab, settings = shape.vocab, COMMON | FEW_PAGES
    scored: list[int] | Seq2SeqInput = random_prompt(vocab, 9, 30)
    if isinstance(shape, Seq2SeqShape):
        own = {**shape.settings, **BLOCKS.get(request.param, {})}
        make_seq2seq_checkpoint(replace(shape, settings=own), folder)
        vocab = shape.encoder_vocab
        scored = Seq2SeqInput(random_prompt(vocab, 8, 15), [START, *random_prompt(shape.vocab, 9, 29)])
    else:
        make_family_checkpoint(shape, folder)
        settings["max_model_len"] = shape.max_model_len
    jobs = [
        Job(random_prompt(vocab, seed, length), SamplingParams(max_tokens=TOKENS, **fields))
        for seed, (length, fields) in enumerate(zip(LENGTHS, DECODING, strict=True))
    ]
    client = LocalClient(EngineConfig(model=str(folder), **settings))
    yield Subject(request.param, folder, settings, jobs, scored, client)
    client.engine.close()


def test_one_batch_over_http_on_few_pages(subject: Subject, cut: list[int]) -> None:
    """Requests are preempted, and choices have the tokens that the engine gives each alone. Blocks are reached."""
    engine = subject.client.engine
    alone = run_alone(engine, subject.jobs)
    assert engine.stats().num_preemptions == 0
    bodies = [
        {"prompt": list(job.prompt), "max_tokens": TOKENS, "return_token_ids": True, **fields}
        for job, fields in zip(subject.jobs, DECODING, strict=True)
    ]
    answers = together(subject.client, "/v1/completions", bodies)
    assert [[choice["token_ids"] for choice in answer["choices"]] for answer in answers] == alone
    assert engine.stats().num_preemptions > 0
    assert set(cut) == ({30, 21} if subject.name in BLOCKS else set())


def test_int8_pages_and_weights_of_few_bits(subject: Subject, cut: list[int]) -> None:
    """The same of the engine alone; and what the model says of a text stays near what it says in float32."""
    exact = logprobs(subject.client.engine, subject.scored)
    for name, form in FORMATS.items():
        if "int4" in name and subject.name not in OF_INT4:
            continue
        engine = make_engine(subject.path, **(subject.settings | form))
        found = logprobs(engine, subject.scored)
        alone = run_alone(engine, subject.jobs)
        assert engine.stats().num_preemptions == 0
        assert run(engine, subject.jobs) == alone, name
        assert engine.stats().num_preemptions > 0
        error = float((found - exact).abs().median() / exact.std())
        assert 0 < error < NEAR.get(name, 1.0), name
        engine.close()
    assert set(cut) == ({30, 21, 15} if subject.name in BLOCKS else set())


def together(client: LocalClient, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to requests that are all there before the engine's first step."""
    return posted(client, create_app(client, None, "tiny"), [(path, {"json": body}) for body in bodies], len(bodies))


# ---------------------------------------------------------------- encoders


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_over_http_and_of_few_bits(name: str, tmp_path: Path, cut: list[int]) -> None:
    """Vectors and classes are the engine's, of inputs together as of each alone, and near those in float32."""
    checkpoint = make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path)
    inputs = [input for input in checkpoint.inputs() if len(input.token_ids) < 120]
    classes = checkpoint.shape.architecture.endswith("Classification")
    path, field = ("/v1/classify", "probs") if classes else ("/v1/embeddings", "embedding")
    params = PoolingParams(task="classify" if classes else "embed")
    vectors = []
    for form in ({}, FORMATS["weights of int8"], FORMATS["weights of int4"]):
        client = LocalClient(EngineConfig(model=str(tmp_path), **(COMMON | form)))
        alone = [pooled(client.engine, input, params) for input in inputs]
        bodies = [{"input": list(input.token_ids)} for input in inputs]
        for body, input in zip(bodies, inputs, strict=True):
            if input.bbox is not None:
                body["bbox"] = [list(box) for box in input.bbox]
        found = [answer["data"][0][field] for answer in together(client, path, bodies)]
        torch.testing.assert_close(torch.tensor(found), torch.stack(alone), rtol=1e-5, atol=1e-6)
        vectors.append(torch.stack(alone))
        client.engine.close()
    exact, of_int8, of_int4 = vectors
    assert 0 < float((of_int8 - exact).norm() / exact.norm()) < 0.2
    assert 0 < float((of_int4 - exact).norm() / exact.norm()) < 0.5
    assert any(input.bbox for input in inputs) == name.startswith("layoutlm")
    assert (113 in cut) == name.startswith("big-bird")


def pooled(engine: Engine, input: TokenInput, params: PoolingParams) -> torch.Tensor:
    """The engine's answer to an input alone; HTTP reads ids without segments."""
    engine.add_request("one", TokenInput(input.token_ids, bbox=input.bbox), params)
    answer = finish(engine)["one"].pooled
    assert answer is not None
    return torch.tensor(answer.values()[0])


# ---------------------------------------------------------------- sound

# A window's text by four beams, and the question whether it is silent, fit in these pages; those of all sounds do not.
SPEECH_PAGES: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 90, "max_num_batched_tokens": 128}
TRANSCRIBING: tuple[dict[str, Any], ...] = (
    {},
    {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]},
    {"response_format": "verbose_json", "num_beams": "4"},
    {"temperature": "0.8", "seed": "5", "response_format": "verbose_json", "timestamp_granularities[]": "word"},
    {"num_beams": "3", "prompt": "the tone"},
)
# Answers of random weights are taken as they are.
TAKEN = {"compression_ratio_threshold": "1000", "logprob_threshold": "-1000", "no_speech_threshold": "1"}


@dataclass(frozen=True)
class Speech:
    """A checkpoint, a window with tokens, and what the model says of these in float32."""

    path: Path
    window: AudioInput
    logprobs: torch.Tensor
    positions: torch.Tensor


@pytest.fixture(scope="module", params=SPEECH_SHAPES)
def speech(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Speech:
    checkpoint = make_speech_checkpoint(request.param, tmp_path_factory.mktemp(request.param), max_length=32)
    window = AudioInput(checkpoint.log_mel.features(noise(1.4)), random_prompt(TEXTS, 9, 30))
    engine = make_engine(checkpoint.path, **(COMMON | SPEECH_PAGES))
    found = Speech(checkpoint.path, window, logprobs(engine, window), positions(engine, window))
    engine.close()
    return found


@pytest.mark.parametrize("name", ["as stored", *FORMATS])
def test_speech_over_http_on_few_pages(name: str, speech: Speech) -> None:
    """Texts, segments and words of sounds together, preempted, are those of each alone. In pages of int8 and with
    weights of few bits the model says nearly what it says in float32, with 8 bits at nearly the same times."""
    client = LocalClient(EngineConfig(model=str(speech.path), **(COMMON | SPEECH_PAGES | FORMATS.get(name, {}))))
    app = create_app(client, load_tokenizer(str(speech.path)), "tiny")
    path, asked = "/v1/audio/transcriptions", []
    for number, fields in enumerate(TRANSCRIBING):
        file = io.BytesIO()
        soundfile.write(file, noise(1.4, number), RATE, format="WAV", subtype="FLOAT")
        data = TAKEN | {"language": "de"} | fields
        asked.append((path, {"data": data, "files": {"file": ("a.wav", file.getvalue())}}))
    # Of each sound the engine is asked two things: what is said, and whether any is.
    alone = [posted(client, app, [one], 2)[0] for one in asked]
    assert client.engine.stats().num_preemptions == 0
    assert posted(client, app, asked, 2 * len(asked)) == nearly(alone, 1e-3 if name in FORMATS else 1e-6)
    assert client.engine.stats().num_preemptions > 0
    client.engine.check_integrity()
    assert len({answer["text"] for answer in alone}) == len(alone)
    assert [bool(answer.get("words")) for answer in alone] == ["word" in str(fields) for fields in TRANSCRIBING]
    if name in FORMATS:
        error = (logprobs(client.engine, speech.window) - speech.logprobs).abs().median() / speech.logprobs.std()
        assert 0 < float(error) < NEAR.get(name, 1.0)
        assert len(speech.positions.unique()) > 8
        moved = float((positions(client.engine, speech.window) - speech.positions).abs().mean())
        assert moved < (3 if name in NEAR else 50)  # random weights of 4 bits lead to another path
    client.engine.close()


def positions(engine: Engine, window: AudioInput) -> torch.Tensor:
    """Where the tokens of a window are said."""
    engine.add_request("times", window, PoolingParams(task="align", skip_tokens=4))
    answer = finish(engine)["times"].pooled
    assert answer is not None
    return torch.tensor(answer.values()[:, 0])
