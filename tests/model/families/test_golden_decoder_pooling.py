"""Decoders that answer with vectors and classes, every family against `transformers` in float32.

Inputs are computed in chunks, taken off the pages in the middle, found in the prefix cache, and run beside requests
that generate; each test sees to it that this did happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoder_classes import LABELS, classifier_of, logits, make_classifier, padded
from support.driving import check_idle, make_engine, preempt_all, watching
from support.everyday import everyday
from support.families import FAMILY_SHAPES, FamilyCheckpoint, make_family_checkpoint
from support.pages import close
from torch import Tensor

from engine import Engine, InvalidRequestError, PoolingParams, RequestOutput, SamplingParams, UnsupportedModelError
from engine.scheduling.plan import StepPlan

BUDGET = 13  # tokens of a step: no multiple of a page's
MODES = ("last", "mean")

# The first shape of each architecture, and one whose hidden states have other features than its residual stream. That
# hidden states are right in every shape is for the goldens of generation; here it is what is made of them.
SHAPES = [
    *{shape.architecture: name for name, shape in reversed(FAMILY_SHAPES.items())}.values(),
    "opt-norms-after-projected",
]


@pytest.fixture(scope="module", params=everyday(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    """Each shape in turn."""
    return make_family_checkpoint(FAMILY_SHAPES[request.param], tmp_path_factory.mktemp(request.param))


def small_engine(model: FamilyCheckpoint, path: Path | None = None, **settings: Any) -> Engine:
    defaults = {"max_model_len": model.shape.max_model_len, "block_size": 4, "max_num_batched_tokens": BUDGET}
    return make_engine(path or model.path, **(defaults | {"max_num_seqs": 8} | settings))


def answers(
    engine: Engine, jobs: Sequence[tuple[list[int], PoolingParams | SamplingParams]], *, strikes: int = 0
) -> tuple[list[RequestOutput], list[StepPlan]]:
    """Run the jobs together; so often, after every second step, all of them lose their pages."""
    for number, (prompt, params) in enumerate(jobs):
        engine.add_request(str(number), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    with watching(engine) as plans:
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
            engine.check_integrity()
            if strikes and len(plans) % 2 == 0:
                strikes -= 1
                preempt_all(engine)
    check_idle(engine)
    assert strikes == 0
    assert all(output.finished for output in outputs.values())
    return [outputs[str(number)] for number in range(len(jobs))], plans


def values(output: RequestOutput) -> Tensor:
    assert output.pooled is not None
    assert not output.outputs
    return torch.tensor(output.pooled.values())


def chunks(plans: Sequence[StepPlan]) -> int:
    """Pooling rows that go on from an earlier step's."""
    return sum(row.start > 0 and row.before is not None for plan in plans for row in plan.pooling)


def embeddings(prompts: Sequence[list[int]]) -> list[tuple[list[int], PoolingParams | SamplingParams]]:
    """Every prompt by every mode; the first three requests write, so that there is a step of both kinds."""
    writing = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    written = [(prompt[:30], writing) for prompt in prompts[:3]]
    pooled = [
        (prompt, PoolingParams(pooling=mode, normalize=False))  # type: ignore[arg-type]
        for prompt in prompts
        for mode in MODES
    ]
    return [*written, *pooled]


def check_vectors(found: Sequence[RequestOutput], hidden: Sequence[Tensor]) -> None:
    expected = [vector for states in hidden for vector in (states[-1], states.double().mean(0).float())]
    for output, vector in zip(found, expected, strict=True):
        close(values(output), vector[None])


def test_vectors_equal_reference(model: FamilyCheckpoint) -> None:
    prompts = model.ragged()
    hidden = [model.hidden(prompt)[0] for prompt in prompts]
    jobs = embeddings(prompts)
    engine = small_engine(model)
    assert engine.info.tasks == ("generate", "embed")
    assert engine.info.pooling_modes == ("last",)
    assert engine.info.embedding_size == engine.info.hidden_size == hidden[0].shape[1]
    found, plans = answers(engine, jobs)
    check_vectors(found[3:], hidden)
    assert chunks(plans) > 2
    assert any(plan.pooling and plan.sampling is not None for plan in plans)
    written = [output.outputs[0].token_ids for output in found[:3]]
    assert {len(tokens) for tokens in written} == {4}
    # Once more: what "last" asks for may come from the cache, what needs all hidden states may not.
    hits = engine.stats().prefix_hits
    found, plans = answers(engine, jobs, strikes=4)
    check_vectors(found[3:], hidden)
    assert [output.outputs[0].token_ids for output in found[:3]] == written
    assert engine.stats().prefix_hits > hits
    assert engine.stats().num_preemptions > 3
    cached = {(len(prompt), output.num_cached_tokens) for prompt, output in zip(prompts, found[3::2], strict=True)}
    assert max(count for _, count in cached) > 0
    assert {output.num_cached_tokens for output in found[4::2]} == {0}
    engine.close()


def test_headless_checkpoints(model: FamilyCheckpoint, tmp_path: Path) -> None:
    """Saved by the class without a head: vectors, and text as well where the head is the table of tokens alone."""
    writes, ties = (
        not model.shape.architecture.startswith(name) for name in ("ModernBertDecoder", ("Dbrx", "NemotronH"))
    )
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    base = model.model.base_model
    if base is model.model:  # Llama 4 names a part that it has within a larger model alone
        base = base.model
    stored = base.config.tie_word_embeddings
    folders = (tied, untied) if ties else (untied,)
    for folder in folders:
        base.config.tie_word_embeddings = folder is tied
        base.save_pretrained(folder)
    base.config.tie_word_embeddings = stored
    prompts = model.ragged()
    hidden = [model.hidden(prompt)[0] for prompt in prompts]
    for folder in folders:
        generates = writes and folder is tied
        engine = small_engine(model, folder)
        assert engine.info.tasks == (("generate", "embed") if generates else ("embed",))
        if not generates:
            with pytest.raises(InvalidRequestError, match="cannot serve generate: it has no language-model head"):
                engine.add_request("answer", prompts[0], SamplingParams(max_tokens=1))
        found, plans = answers(engine, embeddings(prompts)[0 if generates else 3 :])
        check_vectors(found[-2 * len(prompts) :], hidden)
        assert chunks(plans) > 2
        engine.close()


# In transformers.
NO_CLASSES = (
    *("Apertus", "CodeGen", "Cohere", "Dbrx", "Dots1", "Ernie4_5", "Glm4Moe", "Granite", "Llama4"),
    *("MiniMaxM2", "NanoChat"),
    *("OlmoFor", "Olmoe", "VaultGemma", "XGLM"),
    *("Afmoe", "Cwm", "ExaoneMoe", "FlexOlmo", "Gemma3n", "Gemma4", "HYV3", "HyperCLOVAX", "Jais2", "Laguna", "Lfm2"),
    *("Bamba", "FalconH1", "Mellum", "NemotronH", "OlmoHybrid", "Qwen3_5Moe", "SolarOpen", "Youtu"),
    *("AriaText", "Flint", "Kimi", "Kolibri", "Lfm3", "RecurrentGemma"),
)
NO_TOKEN_CLASSES = (
    *NO_CLASSES,
    *("CTRL", "DeepseekV2", "GPTJ", "OPT", "Gemma3", "HunYuan", "ModernBertDecoder", "Olmo", "OpenAIGPT", "Phimoe"),
    *("Doge", "Jamba", "JetMoe", "MiniCPM3", "Qwen3_5"),
)


@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_classes_equal_reference(model: FamilyCheckpoint, task: Any, tmp_path: Path) -> None:
    """Alone and whole, all together in chunks, and taken off their pages in between."""
    model_class = classifier_of(model, task)
    if model_class is None:
        assert model.shape.architecture.startswith(
            (*NO_CLASSES, *(NO_TOKEN_CLASSES if task == "token_classify" else ()))
        )
        return
    classifier = make_classifier(model.shape, model_class, tmp_path)
    if model.shape.architecture.startswith("ModernBertDecoder"):
        with pytest.raises(UnsupportedModelError, match="its layer before the class scores is not implemented"):
            small_engine(classifier)
        return
    prompts = padded(model.ragged())
    expected = [logits(classifier, prompt) for prompt in prompts]
    assert [len(numbers) for numbers in expected] == [len(p) if task == "token_classify" else 1 for p in prompts]
    jobs = [(prompt, PoolingParams(task=task, use_activation=use)) for prompt in prompts for use in (False, True)]
    engine = small_engine(classifier)
    assert engine.info.tasks == (task,)
    assert len(engine.info.labels) == LABELS
    for strikes in (0, 4):
        found, plans = answers(engine, jobs, strikes=strikes)
        for numbers, plain, likely in zip(expected, found[::2], found[1::2], strict=True):
            close(values(plain), numbers)
            close(values(likely), numbers.softmax(-1))
        assert chunks(plans) > 5
        assert (engine.stats().num_preemptions > 3) == (strikes > 0)
    engine.close()
