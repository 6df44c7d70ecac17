"""What is pooled of images, of texts by an encoder and a decoder, and in other ways than by one vector or class of a
text, served as requests come: all in one step, with weights of few bits, and, where there are pages, on few of them,
preempted, and with pages of int8. Each request gets what it gets alone.

That these answers are right the goldens say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.driving import check_idle, preempt_all, watching
from support.encoder_text import CORPUS, save_model, t5, xlmr
from support.entities import make_gliner
from support.family_shape import fill_randomly
from support.image_text import data_url, make_image_model, picture
from support.late_interaction import pylate
from support.local_client import LocalClient
from support.sentence import NORMALIZE, pipeline_folder, pooling
from support.seq2seq_shapes import BART, T5
from support.speech import nearly
from support.text_encoders import TEXTS, make_text_encoder
from support.together import posted
from test_every_family import COMMON, FORMATS

from engine import Engine, EngineConfig
from engine.text.processor import load_tokenizer
from server.app import create_app
from server.workers.pool import WorkerPool

pytestmark = [pytest.mark.slow, pytest.mark.whole]

Asked = Sequence[tuple[str, dict[str, Any]]]

# By how much answers differ together from those in float32, as a part of their size. Measured were 0.035, 0.34 and
# 0.004: steps between weights of 4 bits are 17 times as wide as between those of 8.
NEAR = {"weights of int8": 0.1, "weights of int4": 0.5, "pages of int8": 0.02}
# A text is read in several steps, and three do not fit at once.
FEW_PAGES: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 28, "max_num_batched_tokens": 38}

EMBED, CLASSIFY, POOL, SCORE = "/v1/embeddings", "/v1/classify", "/pooling", "/v1/score"
IMAGES = [{"image": data_url(picture(seed, 40 + 7 * seed))} for seed in range(4)]


def of_images(path: str) -> Asked:
    """Requests of a model that reads nothing else."""
    other = {"top_k": 2} if path == CLASSIFY else {"dimensions": 9}
    return [(path, {"input": IMAGES[0]}), (path, {"input": IMAGES[1:3]} | other), (path, {"input": [IMAGES[3]]})]


OF_BOTH: Asked = [
    (EMBED, {"input": [IMAGES[0], "a cat"]}),
    (EMBED, {"input": "ships at sea", "dimensions": 9}),
    (EMBED, {"input": [{"text": "a long day"}, IMAGES[1], IMAGES[2]], "normalize": False}),
]
OF_PAIRS: Asked = [
    (CLASSIFY, {"input": {"text": CORPUS[1], "text_pair": "nobody walked"}}),
    (CLASSIFY, {"input": [CORPUS[3], "Ada Lovelace wrote"], "use_activation": False}),
    (CLASSIFY, {"input": [CORPUS[4], CORPUS[0]], "top_k": 2}),
]
# Texts none of whose spans cross, so that each of these has a score, whatever the others have.
NAMES = ["Ada Lovelace", "red boats", "Charles Babbage", "the engine"]
ALL_SPANS: dict[str, Any] = {"threshold": 0, "flat_ner": False, "multi_label": True}


def save_joint(name: str, settings: Mapping[str, Any], folder: Path) -> Path:
    """A classifier over an encoder and a decoder."""
    tokenizer = t5()
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "num_labels": 3}
    kind = getattr(transformers, f"{name}ForSequenceClassification")
    model = kind(kind.config_class(**(settings | special | {"vocab_size": len(tokenizer)})))
    fill_randomly(model, 3)
    with torch.no_grad():
        for matrix, weight in model.named_parameters():
            if matrix.endswith(".q.weight"):  # T5 does not divide scores by the root of a head's size: its weights do
                weight.mul_(0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_bge(folder: Path) -> Path:
    """bge-m3's two layers beside XLM-R."""
    tokenizer = xlmr()
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, type_vocab_size=1,
    )  # fmt: skip
    save_model(transformers.XLMRobertaModel, config, tokenizer, folder / "plain")
    for name, width in {"sparse_linear.pt": 1, "colbert_linear.pt": 24}.items():
        torch.save(torch.nn.Linear(32, width).state_dict(), folder / "plain" / name)
    return pipeline_folder(folder / "m", folder / "plain", [pooling("cls"), NORMALIZE])


# What makes a checkpoint's folder, and the requests.
KINDS: dict[str, tuple[Callable[[Path], Path], Asked]] = {
    **{
        name: (lambda folder, name=name: make_image_model(name, folder).path, asked)
        for name, asked in {
            "vit": of_images(CLASSIFY),
            "vit-vectors": of_images(EMBED),
            "deit": of_images(CLASSIFY),
            "deit-teacher": of_images(CLASSIFY),
            "deit-vectors": of_images(EMBED),
            "clip": OF_BOTH,
            "siglip": OF_BOTH,
        }.items()
    },
    "t5-classes": (partial(save_joint, "T5", T5), OF_PAIRS),
    "bart-classes": (partial(save_joint, "Bart", BART), OF_PAIRS),
    "answers": (
        lambda folder: make_text_encoder("answers", folder).path,
        [
            ("/v1/answer", {"question": "who lives in Bergen?", "context": TEXTS[2:5], "top_k": 40}),
            ("/v1/answer", {"question": "water?", "context": " ".join(TEXTS), "top_k": 40, "doc_stride": 9}),
            ("/v1/answer", {"question": ["who?", "what is late?"], "context": TEXTS[3], "top_k": 40}),
        ],
    ),
    "splade": (
        lambda folder: make_text_encoder("masked", folder).path,
        [
            (POOL, {"task": "sparse_embed", "input": TEXTS[:3]}),
            (POOL, {"task": "token_embed", "input": TEXTS[3]}),
            (POOL, {"task": "sparse_embed", "input": TEXTS[4:]}),
            (EMBED, {"input": TEXTS[5]}),
        ],
    ),
    "bge-m3": (
        save_bge,
        [
            (EMBED, {"input": CORPUS[:2]}),
            (POOL, {"task": "sparse_embed", "input": CORPUS[2]}),
            (POOL, {"task": ["embed", "token_embed", "sparse_embed"], "input": CORPUS[1:3]}),
            (SCORE, {"text_1": CORPUS[0], "text_2": CORPUS[3:]}),
        ],
    ),
    "colbert": (
        lambda folder: pylate(folder / "m", {}).path,
        [
            ("/v1/rerank", {"query": "Snow!", "documents": TEXTS[:4]}),
            (SCORE, {"text_1": "is the old boat late?", "text_2": TEXTS[3:]}),
            (POOL, {"input": TEXTS[:2], "prompt_name": "query"}),
        ],
    ),
    "gliner": (
        lambda folder: make_gliner(folder).path,
        [
            ("/v1/entities", {"input": NAMES[:2], "labels": ["person", "city"]} | ALL_SPANS),
            ("/v1/entities", {"input": NAMES[2], "labels": ["engine part"]} | ALL_SPANS),
            ("/v1/entities", {"input": NAMES[1:], "labels": ["person", "rain", "night"]} | ALL_SPANS),
        ],
    ),
}


@dataclass(frozen=True)
class Served:
    """A model behind the API."""

    client: LocalClient
    make_app: Callable[[], Any]
    app: Any

    @property
    def engine(self) -> Engine:
        return self.client.engine

    def ask(self, asked: Asked, expected: int = 1) -> list[Any]:
        """What answers say, but for ids and times."""
        found = posted(self.client, self.app, [(path, {"json": body}) for path, body in asked], expected)
        return [{name: part for name, part in one.items() if name not in ("id", "created")} for one in found]

    def anew(self) -> Served:
        """An app that has seen no steps, whose sizes would limit how many inputs reach the engine before the next."""
        return Served(self.client, self.make_app, self.make_app())

    def alone(self, asked: Asked) -> tuple[list[Any], int]:
        """The answers to one after the other, and for how much the engine was asked."""
        answers, count = [], 0
        for one in asked:
            answers += self.ask([one])
            count += len(self.client.asked)
        return answers, count


@dataclass(frozen=True)
class Subject:
    """A checkpoint, its requests, and the numbers of their answers in float32.

    Attributes:
        workers: decode images.
    """

    path: Path
    asked: Asked
    workers: WorkerPool
    exact: dict[Any, float] = field(default_factory=dict)

    def serve(self, **settings: Any) -> Served:
        client = LocalClient(EngineConfig(model=str(self.path), **(COMMON | settings)))
        make_app = partial(self._make_app, client)
        return Served(client, make_app, make_app())

    def _make_app(self, client: LocalClient) -> Any:
        app = create_app(client, load_tokenizer(str(self.path)), "tiny")
        if (images := app.state.service.images) is not None:
            images._workers = self.workers
        return app


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    found = WorkerPool()
    yield found
    found.close()


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, workers: WorkerPool) -> Subject:
    make, asked = KINDS[request.param]
    found = Subject(make(tmp_path_factory.mktemp(request.param)), asked, workers)
    served = found.serve()
    found.exact.update(numbers(served.alone(asked)[0]))
    served.engine.close()
    return found


@pytest.mark.parametrize("form", ["as stored", "weights of int8", "weights of int4"])
def test_in_one_step(form: str, subject: Subject) -> None:
    served = subject.serve(**FORMATS.get(form, {}))
    alone, count = served.alone(subject.asked)
    with watching(served.engine) as plans:
        assert served.anew().ask(subject.asked, count) == nearly(alone)
    assert [plan.num_rows for plan in plans] == [count]
    assert count > len(subject.asked)
    assert_near(form, alone, subject.exact)
    served.engine.close()


@pytest.mark.parametrize("form", ["as stored", "pages of int8"])
@pytest.mark.parametrize("subject", ["t5-classes", "bart-classes"], indirect=True)
def test_on_few_pages(form: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are read in parts, some together, and lose their pages in the middle."""
    served = subject.serve(**(FEW_PAGES | FORMATS.get(form, {})))
    engine, step = served.engine, served.engine.step_deltas
    alone, _ = served.alone(subject.asked)
    assert engine.stats().num_preemptions == 0
    lost = [0]

    def struck() -> Any:
        found = step()
        engine.check_integrity()
        lost.append(preempt_all(engine) if lost[-1] == 0 and sum(lost) < 2 else 0)
        return found

    monkeypatch.setattr(engine, "step_deltas", struck)
    with watching(engine) as plans:
        assert served.anew().ask(subject.asked, 2) == nearly(alone, 1e-5)
    assert engine.stats().num_preemptions == sum(lost) >= 2
    assert any(row.start > 0 for plan in plans for row in plan.pooling)
    assert_near(form, alone, subject.exact)
    check_idle(engine)
    engine.close()


def assert_near(form: str, answers: list[Any], exact: Mapping[Any, float]) -> None:
    """What is in one of both is 0 in the other."""
    found = numbers(answers)
    differences = [found.get(place, 0.0) - exact.get(place, 0.0) for place in found.keys() | exact.keys()]
    error = float(torch.tensor(differences).norm() / torch.tensor([*exact.values()]).norm())
    assert 0 < error < NEAR[form] if form in FORMATS else error < 1e-5
    assert len({*exact.values()}) > len(exact) / 2


FIELDS = (("index",), ("start", "end", "label"), ("start", "end"), ("label",))


def numbers(answer: Any, place: tuple[Any, ...] = ()) -> dict[Any, float]:
    """The numbers of an answer by where they stand: in lists by what the entry is of."""
    if isinstance(answer, float):
        return {place: answer}
    parts: dict[Any, Any] = {}
    if isinstance(answer, dict):
        parts = answer
    elif isinstance(answer, list):
        parts = {_named(number, part): part for number, part in enumerate(answer)}
    return {key: value for name, part in parts.items() for key, value in numbers(part, (*place, name)).items()}


def _named(number: int, part: Any) -> Any:
    names = next((names for names in FIELDS if isinstance(part, dict) and set(names) <= part.keys()), ())
    return tuple(part[name] for name in names) or number
