"""Token sides: a made-up one needs changes to four modules of the engine, and no module between the request and the
embedding names a side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, random_prompt
from support.driving import finish, make_engine, watching
from torch import Tensor, nn

from engine import Engine, InvalidRequestError, PoolingParams, SamplingParams, TokenInput
from engine.execution.recording import eager
from engine.interface.token_sides import SIDES, TokenSide, hashed, hashed_root
from engine.model import families, spec
from engine.model.embedding import TokenEmbedding
from engine.model.families.decoders import FAMILIES
from engine.model.table import Entry, WeightTable
from engine.scheduling.page_events import PagesStored

ENGINE = Path(__file__).parents[2] / "engine"
COLOURS, ANSWER = 5, 6


# ------------------------------------------------------------------ what a new side takes


# 1. engine/interface/token_sides.py
SIDE = TokenSide(name="token_colours", reads="Embed", goes_on=True)


# 2. engine/model/spec/embedding.py
@dataclass(frozen=True, slots=True, kw_only=True)
class ColouredTokens(spec.Tokens):
    token_colours: int = 0


# 3. engine/model/embedding.py
_build, _embed = TokenEmbedding.__init__, TokenEmbedding.forward


def build(self: Any, part: Any, place: Any, shared: nn.Parameter | None = None) -> None:
    _build(self, part, place, shared)
    self.colours = place.parameter(part.token_colours, part.width)


def embed(
    self: Any, token_ids: Tensor, positions: Tensor, metadata: Any, tokens: int, sides: Any, *others: Any
) -> Tensor:
    x = _embed(self, token_ids, positions, metadata, tokens, sides, *others)
    colours = sides.get("token_colours")
    return x + (self.colours[0] if colours is None else F.embedding(colours, self.colours))


# 4. LLaMA's row in engine/model/families/decoders.py
LLAMA = next(family for family in FAMILIES if family.name == "LLaMA")


def coloured_spec(config: Any) -> spec.ModelSpec:
    model = LLAMA.spec(config)
    assert model.decoder is not None
    tokens = model.decoder.embedding
    assert isinstance(tokens, spec.Tokens)
    settings = {name: getattr(tokens, name) for name in spec.Tokens.__dataclass_fields__}
    return replace(model, decoder=replace(model.decoder, embedding=ColouredTokens(**settings, token_colours=COLOURS)))


def coloured_weights(model: spec.ModelSpec) -> WeightTable:
    table = LLAMA.weights(model)
    colours = Entry("decoder.embedding.colours", ("model.embed_colours.weight",))
    return replace(table, entries=(*table.entries, colours))


# ------------------------------------------------------------------ that it works


@dataclass(frozen=True)
class Subject:
    """A checkpoint whose tokens have colours, and the reference."""

    path: Path
    model: Any
    table: Tensor

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], colours: Sequence[int]) -> list[int]:
        """The reference's answer, whose tokens have the prompt's last colour."""
        tokens, own = [*ids], [*colours]
        for _ in range(ANSWER):
            vectors = self.model.get_input_embeddings()(torch.tensor([tokens])) + self.table[torch.tensor([own])]
            tokens.append(int(self.model(inputs_embeds=vectors).logits[0, -1].argmax()))
            own.append(own[-1])
        return tokens[len(ids) :]

    @torch.no_grad()
    def mean(self, ids: Sequence[int], colours: Sequence[int]) -> Tensor:
        vectors = self.model.get_input_embeddings()(torch.tensor([[*ids]])) + self.table[torch.tensor([[*colours]])]
        hidden: Tensor = self.model.model(inputs_embeds=vectors).last_hidden_state[0]
        return hidden.mean(0)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    checkpoint = make_checkpoint("llama-grouped", tmp_path_factory.mktemp("colours"))
    file = checkpoint.path / "model.safetensors"
    table = torch.randn(COLOURS, checkpoint.model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    save_file(load_file(file) | {"model.embed_colours.weight": table}, file, {"format": "pt"})
    return Subject(checkpoint.path, checkpoint.model, table)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, SIDE.name, SIDE)
    monkeypatch.setattr(TokenEmbedding, "__init__", build)
    monkeypatch.setattr(TokenEmbedding, "forward", embed)
    family = replace(LLAMA, spec=coloured_spec, weights=coloured_weights)
    monkeypatch.setitem(families._BY_ARCHITECTURE, "LlamaForCausalLM", family)
    assert families.find(SimpleNamespace(architectures=["LlamaForCausalLM"])) is family


def prompt(seed: int, length: int) -> tuple[list[int], list[int]]:
    return random_prompt(60, seed, length), random_prompt(COLOURS, 100 + seed, length)


def ask(engine: Engine, *prompts: tuple[list[int], list[int] | None]) -> list[list[int]]:
    """Greedy answers to prompts that are there together."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for number, (ids, colours) in enumerate(prompts):
        given = TokenInput(ids, sides=None if colours is None else {"token_colours": colours})
        engine.add_request(str(number), given, params)
    outputs = finish(engine)
    return [outputs[str(number)].outputs[0].token_ids for number in range(len(prompts))]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 12, "enable_prefix_caching": False},
        {"recorded": True},
    ],
    ids=["chunks", "few pages", "recorded"],
)
def test_a_made_up_side_reaches_the_embedding(made_up: None, subject: Subject, settings: dict[str, Any]) -> None:
    """In chunks, after preemptions, and in recorded steps, beside a prompt without colours."""
    prompts = [prompt(1, 23), prompt(2, 9), prompt(3, 1), prompt(4, 17)]
    expected = [subject.greedy(*each) for each in prompts]
    plain = subject.greedy(prompts[3][0], [0] * 17)
    assert plain != expected[3]
    recorded = "recorded" in settings
    chosen = {name: value for name, value in settings.items() if name != "recorded"}
    engine = make_engine(subject.path, block_size=4, **chosen)
    if recorded:
        engine.runner.use_graphs(8, eager)
    assert engine.info.sides == {"token_colours": COLOURS}
    assert ask(engine, *prompts, (prompts[3][0], None)) == [*expected, plain]
    assert (engine.runner.graphs is not None and engine.runner.graphs.num_replayed > 2) == recorded
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
    engine.close()


def test_pages_are_found_by_tokens_of_the_same_sides(made_up: None, subject: Subject) -> None:
    ids, colours = prompt(5, 22)
    other = [*colours[:10], *((colour + 1) % COLOURS for colour in colours[10:])]
    engine = make_engine(subject.path, block_size=4)
    events = engine.scheduler.record_events()

    def cached(*given: list[int] | None) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        found = []
        for own in given:
            engine.add_request("a", TokenInput(ids, sides=None if own is None else {"token_colours": own}), params)
            found.append(finish(engine)["a"].num_cached_tokens)
        return found

    assert cached(colours, colours, other, other, None, [0] * 22) == [0, 20, 8, 20, 0, 20]
    assert ask(engine, (ids, other)) == [subject.greedy(ids, other)]
    # A router must not take pages of colours for pages of the tokens alone.
    stored = [event for event in events.take() if isinstance(event, PagesStored)]
    assert [[*event.beside] for event in stored[:3]] == [[0, 1, 2, 3, 4], [0, 1, 2], []]
    assert len({digest for event in stored[:2] for digest in event.beside.values()}) == 8
    engine.close()


def test_sides_of_pooled_inputs(made_up: None, subject: Subject) -> None:
    engine = make_engine(subject.path, max_num_batched_tokens=16)
    prompts = [prompt(6, 21), prompt(7, 3)]
    with watching(engine) as plans:
        for number, (ids, colours) in enumerate(prompts):
            given = TokenInput(ids, sides={"token_colours": colours})
            engine.add_request(str(number), given, PoolingParams(pooling="mean", normalize=False))
        outputs = finish(engine)
    assert all(plan.sides["token_colours"].dtype == np.int32 for plan in plans)
    for number, each in enumerate(prompts):
        pooled = outputs[str(number)].pooled
        assert pooled is not None
        torch.testing.assert_close(
            torch.tensor(pooled.values()[0]), subject.mean(*each), rtol=1e-4, atol=1e-5, check_dtype=False
        )
    engine.close()


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"token_colours": [0, 1]}, "token_colours has 2 entries for 3 tokens"),
        (
            {"token_colours": [0, 1, COLOURS]},
            f"token_colours holds {COLOURS}, but the model has ids 0 to {COLOURS - 1}",
        ),
        ({"token_colours": [0, 1, True]}, "token_colours must hold integers"),
        ({"token_colours": 5}, "token_colours must be a list of integers, got 5"),
        ({"colour": [0, 1, 2]}, "a token has no 'colour'. The known sides are token_types, boxes, token_colours"),
        ({"rotary_offsets": [0, 1, 2]}, "a token has no 'rotary_offsets'"),
        ({"boxes": [[0, 0, 1, 1]] * 3}, "this model does not read boxes. Remove bbox"),
    ],
)
def test_what_is_no_side_is_refused(made_up: None, subject: Subject, sides: Any, message: str) -> None:
    engine = make_engine(subject.path)
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        engine.add_request("a", TokenInput([1, 2, 3], sides=sides), SamplingParams())
    engine.close()


# ------------------------------------------------------------------ the table, and who names its sides


def test_hashes_tell_sides_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are the default add nothing; the same numbers of another side, or in other places, are others."""
    monkeypatch.setitem(SIDES, SIDE.name, SIDE)
    types, boxes = SIDES["token_types"].array([0, 0, 0, 0, 1, 0]), SIDES["boxes"].array([[0, 0, 1, 1]])
    contents = [
        hashed({}, 0, 4),
        hashed({"token_types": types}, 0, 4),
        hashed({"token_types": types}, 4, 4),
        hashed({"token_types": types}, 3, 4),
        hashed({"token_colours": types}, 4, 4),
        hashed({"boxes": boxes}, 0, 4),
    ]
    laid = [[] if not content else np.concatenate(content).tolist() for content in contents]
    assert laid[:3] == [[], [], [-2, 1, 0, 0, 0]]
    assert len({tuple(content) for content in laid[1:]}) == 5
    shifts = {"rotary_offsets": SIDES["rotary_offsets"].array([9])}
    assert hashed(shifts, 0, 4) == []
    assert np.concatenate(hashed_root(shifts)).tolist() == [-4, 9]
    assert hashed_root({"token_types": types, "token_colours": types}) == []
    slots = {"adapter_slots": SIDES["adapter_slots"].array([3])}
    assert hashed_root(slots) == hashed(slots, 0, 4) == [], "a slot may hold another adapter later"


def test_only_what_makes_or_reads_a_side_names_it() -> None:
    """Whatever lies between the request and the operation carries sides without knowing them."""
    names = "|".join(word for side in SIDES.values() for word in {side.name, side.field})
    # They make rotary offsets, the slots of adapters, and those of images.
    makers = {"scheduling/needs.py", "execution/calibration.py", "execution/placed_angles.py", "scheduling/batch.py"}
    carriers = [
        path for part in ("scheduling", "execution", "backends", "process") for path in (ENGINE / part).rglob("*.py")
    ]
    carriers += [
        ENGINE / "engine.py",
        ENGINE / "stepping.py",
        ENGINE / "model/operations.py",
        ENGINE / "model/program.py",
    ]
    found = {
        str(path.relative_to(ENGINE)): named
        for path in carriers
        if (named := re.findall(rf"\b(?:{names})\b", path.read_text(encoding="utf-8")))
    }
    assert found.keys() == makers, found
