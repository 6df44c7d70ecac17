"""Low-rank adapters: an answer with one equals that of the merged model, alone and beside others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.adapters import BART, BERT, LLAMA, make_adapter
from support.checkpoints import make_checkpoint, random_prompt
from support.driving import Job, add, finish, make_engine, preempt_all, run, run_alone, tokens_of, watching
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.executors import use_torch
from support.native import needs_native
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES

from engine import Engine, InvalidRequestError, PoolingParams, SamplingParams, Seq2SeqInput
from engine.config import EngineConfig
from engine.errors import AdapterError, ConfigError
from engine.execution.adapters import LoadedAdapters
from engine.model.adapter_slots import AdapterSlots
from engine.model.adapters import Adapter, LowRank

NAMES = [f"adapter-{seed}" for seed in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = random_prompt(307, 3, 40)


@dataclass(frozen=True)
class Subject:
    """A checkpoint, its model, eight adapters and the model with each of them merged."""

    path: Path
    model: Any
    adapters: list[Adapter]
    merged: list[Any]

    @property
    def eos(self) -> list[int]:
        return list(self.model.config.eos_token_id)

    def engine(self, **settings: Any) -> Engine:
        """An engine with all the adapters."""
        engine = make_engine(self.path, **({"max_loras": 8, "seed": 0} | settings))
        for adapter in self.adapters:
            engine.load_adapter(adapter.name, adapter)
        return engine


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    checkpoint = make_checkpoint("llama-grouped", tmp_path_factory.mktemp("adapters"))
    made = [make_adapter(checkpoint.model, LLAMA, seed, rank=1 + 2 * seed % 5) for seed in range(8)]
    return Subject(checkpoint.path, checkpoint.model, [one for one, _ in made], [merged for _, merged in made])


@pytest.fixture(scope="module")
def engine(subject: Subject) -> Iterator[Engine]:
    engine = subject.engine()
    yield engine
    engine.close()


def greedy(model: Any) -> list[int]:
    """The reference's answer, which no small error changes."""
    answer = reference.greedy(model, PROMPT, None, 12)
    assert answer.margin > 1e-4
    return list(answer.answers[0].tokens)


def of(name: str | None, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> Job:
    return Job(prompt, params, {"adapter": name})


def test_greedy_tokens_equal_the_merged_models_alone_and_mixed(subject: Subject, engine: Engine) -> None:
    expected = [[greedy(model)] for model in [*subject.merged, subject.model]]
    assert len({tuple(answer[0]) for answer in expected}) == 9, "each adapter changes the answer"
    jobs = [of(name) for name in [*NAMES, None]]
    with watching(engine) as plans:
        assert run(engine, jobs) == expected
    assert any(len(set(plan.sides.get("adapter_slots", ()))) == 9 for plan in plans), "all of them share a step"
    engine.reset_prefix_cache()
    assert run_alone(engine, jobs) == expected


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_library_computes_adapters_in_its_call(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """torch and the library agree, and torch takes no part in the library's steps."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for by_torch in (True, False):
        engine = subject.engine(quantization=quantization)
        if by_torch:
            use_torch(engine.runner.model)
        else:
            monkeypatch.setattr(AdapterSlots, "add", None)
        for number, name in enumerate([*NAMES, None]):
            engine.add_request(str(number), PROMPT, params, adapter=name)
        outputs = finish(engine)
        entries = [entry for number in range(9) for entry in outputs[str(number)].prompt_logprobs or [] if entry]
        found.append(torch.tensor([one.logprob for entry in entries for one in entry.values()]))
        engine.close()
    # Kernels for 8 and 4 bits round activations, too: what differs in the last bits may be rounded otherwise.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4 if quantization is None else 5e-3)


@needs_native
def test_adapters_are_held_in_the_format_that_lora_dtype_names(subject: Subject) -> None:
    adapter = replace(subject.adapters[1], name="halves")
    adapter = replace(adapter, products={path: LowRank(one.down.half().float(), one.up) for path, one in
                                         adapter.products.items()})  # fmt: skip
    formats = {"auto": (torch.float16, torch.bfloat16), "float32": (torch.float16, torch.float32),
               "bfloat16": (torch.bfloat16, torch.bfloat16)}  # fmt: skip
    for name, (down, up) in formats.items():
        engine = make_engine(subject.path, max_loras=1, dtype="bfloat16", quantization="int8", lora_dtype=name)
        engine.load_adapter("halves", adapter)
        modules = dict(engine.runner.model.named_modules())
        held = {path: modules[path].adapters.table.matrices(1) for path in adapter.products}
        for path, one in adapter.products.items():
            assert torch.equal(held[path][0], one.down.to(down).float())
            assert torch.equal(held[path][1], one.up.to(up).float())
        engine.close()
    with pytest.raises(ConfigError, match="lora_dtype must be auto, float32, bfloat16 or float16, got 'int8'"):
        EngineConfig(model="m", lora_dtype="int8")  # type: ignore[arg-type]


def test_logits_equal_the_merged_models(subject: Subject, engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for number, name in enumerate([*NAMES, None]):
        engine.add_request(str(number), PROMPT, params, adapter=name)
    outputs = finish(engine)
    for number, model in enumerate([*subject.merged, subject.model]):
        expected = reference.logprobs(model, PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
        entries = outputs[str(number)].prompt_logprobs
        assert entries is not None
        found = [one.logprob for entry in entries if entry is not None for one in entry.values()]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_beams_equal_the_merged_models(subject: Subject, engine: Engine) -> None:
    params = SamplingParams(num_beams=3, n=2, max_tokens=8, temperature=0.0)
    wanted = {name: subject.merged[int(name[-1])] for name in NAMES[:3]}
    expected = []
    for model in wanted.values():
        answers = reference.beams(model, PROMPT, subject.eos, 8, num_beams=3, n=2)
        assert answers.margin > 1e-4
        expected.append([list(answer.tokens) for answer in answers.answers])
    assert run(engine, [of(name, params=params) for name in wanted]) == expected


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 16, "max_num_seqs": 16}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"},
     {"dtype": "bfloat16"}, {"async_scheduling": True}],
    ids=["chunked", "int8-pages", "int8-weights", "bfloat16", "ahead"],
)  # fmt: skip
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(subject: Subject, settings: dict[str, Any]) -> None:
    engine = subject.engine(**settings)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=10, n=2, logprobs=3)
    jobs = [of(name, random_prompt(307, number, 20 + 7 * number), params) for number, name in enumerate([*NAMES, None])]

    def outcome(outputs: dict[str, Any]) -> list[Any]:
        return [[(one.token_ids, one.logprobs) for one in outputs[str(i)].outputs] for i in range(len(outputs))]

    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    together = outcome(finish(engine))
    engine.reset_prefix_cache()
    alone = []
    for job in jobs:
        add(engine, "0", job)
        alone += outcome(finish(engine))
    assert together == alone
    engine.close()


def test_preempted_rows_go_on_with_their_adapters(subject: Subject, engine: Engine) -> None:
    engine.reset_prefix_cache()
    jobs = [of(name) for name in [*NAMES[:3], None]]
    expected = run(engine, jobs)
    hit = []
    again = run(engine, jobs, lambda step: hit.append(preempt_all(engine)) if step in (2, 5) else None)
    assert again == expected
    assert sum(hit) > 4


# ------------------------------------------------------------------ cached pages


def test_nothing_leaks_between_adapters(subject: Subject) -> None:
    """Pages are found again under the adapter that made them, whatever its slot and name, and under no other."""
    engine = subject.engine(max_loras=8)

    def cached(name: str | None) -> int:
        before = engine.stats().prompt_tokens_cached
        run(engine, [of(name)])
        return engine.stats().prompt_tokens_cached - before

    fresh = [run(engine, [of(name)]) for name in [*NAMES[:3], None]]
    assert engine.stats().prompt_tokens_cached == 0
    assert [cached(name) for name in [*NAMES[:3], None]] == [32] * 4
    assert [run(engine, [of(name)]) for name in [*NAMES[:3], None]] == fresh

    # Another adapter gets the name and the slot: it finds nothing, and its answer is its own.
    engine.unload_adapter(NAMES[0])
    for name in NAMES[4:]:
        engine.unload_adapter(name)
    old = engine.adapters[NAMES[1]].slot
    engine.unload_adapter(NAMES[1])
    taken = engine.load_adapter("another", subject.adapters[6])
    info = engine.load_adapter(NAMES[1], subject.adapters[7])
    assert {taken.slot, info.slot} == {1, old}
    before = engine.stats().prompt_tokens_cached
    assert run(engine, [of(NAMES[1])]) == [[greedy(subject.merged[7])]]
    assert engine.stats().prompt_tokens_cached == before

    # The first adapter comes back in another slot and under another name: its pages are its own.
    engine.load_adapter("again", subject.adapters[0])
    assert cached("again") == 32
    assert run(engine, [of("again")]) == fresh[0]
    engine.close()


def test_an_encoders_pages_belong_to_their_adapter(tmp_path: Path) -> None:
    checkpoint = make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["bart"], tmp_path)
    layers = checkpoint.model.config.encoder_layers
    made = [make_adapter(checkpoint.model, BART, seed, layers=layers) for seed in range(2)]
    engine = make_engine(tmp_path, max_loras=2)
    for number, (adapter, _) in enumerate(made):
        engine.load_adapter(f"adapter-{number}", adapter)
    case = checkpoint.cases()[1]
    params = SamplingParams(
        temperature=0.0, max_tokens=20, no_repeat_ngram_size=2, stop_token_ids=list(checkpoint.shape.eos)
    )
    input = Seq2SeqInput(list(case.source), list(case.begin))
    expected = [
        [list(replace(checkpoint, model=model).greedy(case).answers[0].tokens)]
        for model in [merged for _, merged in made] + [checkpoint.model]
    ]
    for _ in range(2):  # the second time from cached pages
        for number, name in enumerate(("adapter-0", "adapter-1", None)):
            engine.add_request(str(number), input, params, adapter=name)
        outputs = finish(engine)
        assert [tokens_of(outputs[str(number)]) for number in range(3)] == expected
    assert engine.stats().num_encoder_runs == 3
    assert engine.stats().num_encoder_hits == 3
    engine.close()


# ------------------------------------------------------------------ encoders, and heads of their own


@pytest.mark.parametrize("own", ["nothing", "output", "dense and output"])
def test_an_encoder_classifies_by_the_adapters_of_its_rows(tmp_path: Path, own: str) -> None:
    checkpoint = make_encoder_checkpoint(ENCODER_SHAPES["bert-classes"], tmp_path)
    engine = make_engine(tmp_path, max_loras=2)
    models = [checkpoint.model]
    for seed in range(2):
        adapter, merged = make_adapter(checkpoint.model, BERT, seed)
        replaced = {}
        if own != "nothing":
            torch.manual_seed(seed)
            parts = {"output": merged.classifier}
            if own == "dense and output":
                parts["dense"] = merged.bert.pooler.dense
            for name, linear in parts.items():
                for path, parameter in linear.named_parameters():
                    parameter.data.normal_()
                    replaced[f"head.{name}.{path}"] = parameter.data.clone()
        engine.load_adapter(str(seed), replace(adapter, replaced=replaced))
        models.append(merged)
    inputs = [random_prompt(checkpoint.shape.vocab, number, 5 + number) for number in range(6)]
    for number, ids in enumerate(inputs):
        params = PoolingParams(task="classify", use_activation=False)
        engine.add_request(str(number), ids, params, adapter=[None, "0", "1"][number % 3])
    with watching(engine) as plans:
        outputs = finish(engine)
    assert len(plans) == 1
    for number, ids in enumerate(inputs):
        with torch.no_grad():
            expected = models[number % 3](torch.tensor([ids])).logits[0]
        pooled = outputs[str(number)].pooled
        assert pooled is not None
        torch.testing.assert_close(torch.tensor(pooled.values()[0]), expected, atol=1e-4, rtol=0, check_dtype=False)
    engine.close()


def test_a_head_that_cannot_be_replaced_is_refused(subject: Subject, engine: Engine, tmp_path: Path) -> None:
    engine.unload_adapter(NAMES[7])
    with pytest.raises(AdapterError, match=r"replaces head.weight; only heads that classify or find answers can be"):
        engine.load_adapter("head", replace(subject.adapters[7], replaced={"head.weight": torch.ones(307, 32)}))
    engine.load_adapter(NAMES[7], subject.adapters[7])
    make_encoder_checkpoint(ENCODER_SHAPES["bert-classes"], tmp_path)
    encoder, weight = make_engine(tmp_path, max_loras=1), torch.ones(5, 32)
    for replaced, message in [
        ({"head.output.weight": weight}, "lacks or cannot replace head.output.bias"),
        ({"head.other.weight": weight}, "lacks or cannot replace head.other.weight"),
        ({"encoder.final_norm.weight": weight}, "replaces encoder.final_norm.weight, which is not part of the head"),
        (
            {"head.output.weight": weight[1:], "head.output.bias": weight[:, 0]},
            r"head.output.weight has the shape \[4, 32\], but the model's has \[5, 32\]",
        ),
    ]:
        with pytest.raises(AdapterError, match=message):
            encoder.load_adapter("bad", Adapter(name="", path="", digest=b"", products={}, replaced=replaced))
    encoder.close()


# ------------------------------------------------------------------ loading, unloading, refusing


def test_requests_of_an_unloaded_adapter_end_with_an_error(subject: Subject, engine: Engine) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.unload_adapter(NAMES[7])
    engine.load_adapter("leaving", subject.adapters[7])
    expected = run_alone(engine, [of(NAMES[0], params=long)])[0]
    engine.reset_prefix_cache()
    add(engine, "stays", of(NAMES[0], params=long))
    add(engine, "ends", of("leaving", params=long))
    for _ in range(4):
        engine.step()
    engine.unload_adapter("leaving")
    outputs = finish(engine)
    assert outputs["ends"].error == "the adapter 'leaving' was unloaded while the request ran."
    assert outputs["ends"].outputs[0].finish_reason == "error"
    assert tokens_of(outputs["stays"]) == expected
    with pytest.raises(InvalidRequestError, match=r"no adapter named 'leaving' is loaded. The loaded adapters are"):
        add(engine, "late", of("leaving"))
    engine.load_adapter(NAMES[7], subject.adapters[7])


def test_steps_run_while_an_adapter_is_read(subject: Subject, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go, read = threading.Event(), LoadedAdapters._read

    def held(*arguments: Any) -> Any:
        go.wait()
        return read(*arguments)

    monkeypatch.setattr(LoadedAdapters, "_read", held)
    engine.unload_adapter(NAMES[7])
    reading = engine.read_adapter("slow", subject.adapters[7])
    assert run(engine, [of(NAMES[0])]) == [[greedy(subject.merged[0])]]
    assert not reading.ready
    for name, message in (("slow", "'slow' is being loaded"), ("more", "8 adapters are loaded, and max_loras is 8")):
        with pytest.raises(AdapterError, match=message):
            engine.load_adapter(name, subject.adapters[7])
    with pytest.raises(InvalidRequestError, match="no adapter named 'slow' is loaded"):
        add(engine, "early", of("slow"))
    go.set()
    assert engine.finish_adapter("slow", reading).name == "slow"
    assert run(engine, [of("slow")]) == [[greedy(subject.merged[7])]]
    bad = replace(subject.adapters[6], products={})
    with pytest.raises(AdapterError, match="adds to no product"):
        engine.load_adapter("bad", bad, replacing="slow")
    assert "slow" in engine.adapters
    engine.load_adapter(NAMES[7], subject.adapters[7], replacing="slow")
    assert sorted(engine.adapters) == NAMES


def test_what_cannot_be_loaded_is_refused_by_name(subject: Subject, tmp_path: Path) -> None:
    engine = make_engine(subject.path, max_loras=1, max_lora_rank=4)
    good = subject.adapters[0]
    qkv, head = "decoder.blocks.0.attention.inner.qkv", LowRank(torch.ones(1, 32), torch.ones(307, 1))
    nan = LowRank(torch.full((1, 32), torch.nan), torch.ones(64, 1))
    for products, message in [
        ({}, "adds to no product"),
        ({"decoder.nothing": good.products[qkv]}, "adds to decoder.nothing, but the model has no such product"),
        ({"head": head}, "adds to head, which does not support adapters"),
        ({qkv: head}, r"matrices of \[1, 32\] and \[307, 1\] for decoder.blocks.0.attention.inner.qkv, which maps 32"),
        ({qkv: nan}, "infinite numbers or NaN for decoder.blocks.0.attention.inner.qkv"),
        ({qkv: LowRank(torch.ones(13, 32), torch.ones(64, 13))}, r"rank 13 .* at most 12 .*max_lora_rank is 4"),
    ]:
        with pytest.raises(AdapterError, match=message):
            engine.load_adapter("bad", replace(good, products=products))
    assert engine.adapters == {}
    engine.load_adapter("good", good)
    with pytest.raises(AdapterError, match=r"'good' is loaded. Unload it first"):
        engine.load_adapter("good", good)
    with pytest.raises(AdapterError, match=r"1 adapters are loaded, and max_loras is 1. Unload one, or raise"):
        engine.load_adapter("more", good)
    with pytest.raises(AdapterError, match=r"no adapter named 'more' is loaded. The loaded adapters are 'good'"):
        engine.unload_adapter("more")
    engine.close()
    engine = make_engine(subject.path, max_loras=1, dtype="float16")
    wide = replace(good, products={qkv: LowRank(torch.full((1, 32), 7e4), torch.ones(64, 1))})
    with pytest.raises(AdapterError, match=r"numbers for decoder.blocks.0.attention.inner.qkv above 65504, .* float16"):
        engine.load_adapter("wide", wide)
    engine.close()
    engine = make_engine(subject.path)
    with pytest.raises(AdapterError, match=r"max_loras is 0. Start the engine with --max-loras"):
        engine.load_adapter("good", good)
    with pytest.raises(InvalidRequestError, match=r"no adapter named 'good' is loaded. No adapters are loaded"):
        add(engine, "0", of("good"))
    engine.close()
    with pytest.raises(ConfigError, match=r"max_lora_rank must be at most 256, got 257"):
        EngineConfig(model="m", max_lora_rank=257)
