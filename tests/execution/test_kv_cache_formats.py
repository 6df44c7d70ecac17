"""The cache's formats: how vectors become int8 or fp8, attention over such pages, and answers in every format."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.checkpoints import Checkpoint
from support.driving import Job, Strikes, Tokens, add, finish, make_engine, run, run_alone, watching
from support.jobs import CHECKPOINT, MIXED, beams, greedy, prompt
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from torch import Tensor

from engine import LLM, Engine, EngineConfig, SamplingParams
from engine.backends.attention import formats
from engine.backends.attention.base import AttentionMetadata, AttentionPart, Window
from engine.backends.attention.formats import (
    FP8,
    LARGEST,
    SCALE,
    PageShape,
    convert,
    dequantise,
    format_named,
    movable,
    quantise,
)
from engine.backends.attention.selection import select
from engine.backends.torch.attention import TorchReference
from engine.errors import ConfigError
from engine.execution.calibration import mean_keys
from engine.execution.kv_cache import KVCache, page_bytes
from engine.inspection import inspect_model

CPU = torch.device("cpu")
BACKEND = TorchReference()
FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8")
TRAINED = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k" / "hf"


# ------------------------------------------------------------------ vectors


@settings(deadline=None)
@given(
    dim=st.integers(1, 96),
    seed=st.integers(0, 2**32),
    magnitude=st.floats(-44.0, 37.0),
    spread=st.floats(0.0, 6.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from([torch.int8, FP8]),
)
def test_the_error_is_bounded(
    dim: int, seed: int, magnitude: float, spread: float, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Half a scale at most in int8, a 16th of a number or 1/1024 of a scale in fp8.

    Whatever the size of the numbers, subnormal ones included, and however far they lie apart.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, dim, generator=generator, dtype=torch.float64)
    x *= 10.0 ** (magnitude - spread * torch.rand(7, dim, generator=generator, dtype=torch.float64))
    vectors = x.to(dtype)
    steps, scales = quantise(vectors, kind)
    assert (steps.dtype, scales.dtype) == (kind, SCALE)
    assert steps.double().abs().max() <= LARGEST[kind], "symmetric"
    exact = steps.double() * scales.double().unsqueeze(-1)
    back = dequantise(steps, scales)
    assert torch.equal(back.double(), exact), "the product is exact"
    wrong = (back.double() - vectors.double()).abs()
    widths = scales.double().unsqueeze(-1)
    bound = 0.5 * widths if kind == torch.int8 else torch.maximum(vectors.double().abs() / 16, widths / 1024)
    assert bool((wrong <= 1.0000002 * bound).all())
    largest = vectors.double().abs().amax(-1) / LARGEST[kind]
    assert bool((scales.double() <= torch.maximum(largest * (1 + 2**-8), torch.tensor(2.0**-126))).all())
    for row in range(7):  # a vector's numbers depend on no other
        alone = quantise(vectors[row], kind)
        assert torch.equal(alone[0].double(), steps[row].double())
        assert torch.equal(alone[1], scales[row])


@pytest.mark.parametrize(("kind", "largest"), LARGEST.items())
def test_zeros_stay_zeros(kind: torch.dtype, largest: float) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [0.0, largest, -largest]])
    assert torch.equal(dequantise(*quantise(x, kind)), x)


def test_the_largest_number_under_a_scale_that_was_rounded_down() -> None:
    """Its step would be up to 449.75, which fp8 has not; and fp8's smallest steps are right."""
    x = torch.tensor([448.0 * (1 + 2**-9 + 2**-20), 2.0**-9, 2.0**-10, 2.0**-10 * 1.01, 1.5 * 2.0**-9, -17.0, -19.0])
    steps, scale = quantise(x, FP8)
    assert float(scale) == 1.0
    assert steps.view(torch.uint8).tolist() == [0x7E, 1, 0, 1, 2, 0xD8, 0xDA]


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(bad: float, kind: torch.dtype) -> None:
    """The whole vector becomes NaN, and no other does."""
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    x[1, 2, 5] = bad
    back = dequantise(*quantise(x, kind))
    assert bool(back[1, 2].isnan().all())
    back[1, 2] = 0.0
    assert bool(back.isfinite().all())


def test_what_a_format_cannot_hold_becomes_nan() -> None:
    x = torch.tensor([1.0, 65504.0, -65504.0, 70000.0, -1e30, math.inf, math.nan, 1e-9])
    half = convert(x, torch.float16)
    assert half.isnan().tolist() == [False, False, False, True, True, True, True, False]
    assert half[[0, 1, 2, 7]].tolist() == [1.0, 65504.0, -65504.0, 0.0]
    assert convert(x, torch.float32) is x, "in the model's own format everything is kept as it is"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "size"),
    [
        (64, "float32", 256),
        (64, "bfloat16", 128),
        (64, "int8", 66),
        (128, "int8", 130),
        (8, "int8", 10),
        (64, "fp8", 66),
    ],
)
def test_bytes_of_a_vector(head_dim: int, dtype: str, size: int) -> None:
    assert formats.vector_bytes(head_dim, format_named(dtype)) == size


# ------------------------------------------------------------------ pages


SHAPES = [PageShape(2, 16), PageShape(1, 8)]


def new_cache(dtype: torch.dtype, centred: bool = False) -> KVCache:
    generator = torch.Generator().manual_seed(1)
    centres = [torch.randn(*shape[:2], generator=generator) * 3 for shape in SHAPES] if centred else None
    return KVCache(SHAPES, 40, 5, dtype, CPU, centres)


@pytest.mark.parametrize("kind", LARGEST)
def test_copies_and_clearing_take_the_scales_along(kind: torch.dtype) -> None:
    cache = new_cache(kind)
    assert page_bytes(SHAPES, 5, kind) == sum(t[0].nbytes for layer in cache.layers for t in layer)
    for layer in cache.layers:
        assert [t.dtype for t in layer] == [kind, kind, SCALE, SCALE]
        for tensor in layer:
            for page in range(41):
                movable(tensor)[page] = page
    cache.copy_pages(np.array([(1, 2), (2, 1), (7, 9)], dtype=np.int32))
    want = torch.arange(41)
    want[[1, 2, 9]] = torch.tensor([2, 1, 7])
    for layer in cache.layers:
        for tensor in layer:
            assert torch.equal(movable(tensor).flatten(1)[:, 0].long(), want)
    cache.layers[0][2][0] = 9.0
    movable(cache.layers[1][1])[0] = 9
    cache.clear_scratch()
    assert not any(movable(tensor)[0].any() for layer in cache.layers for tensor in layer)


@pytest.mark.parametrize("dtype", [torch.float32, *LARGEST])
def test_one_vector_can_be_key_and_value(dtype: torch.dtype) -> None:
    """It is stored once, read back as both, and has no centre that a value would lack."""
    shapes = [PageShape(1, 6, 1), PageShape(2, 4)]
    cache = KVCache(shapes, 7, 5, dtype, CPU, [None, torch.ones(2, 4)] if dtype in LARGEST else None)
    scaled = dtype in LARGEST
    assert [len(layer) for layer in cache.layers] == ([2, 4] if scaled else [1, 2])
    assert page_bytes(shapes, 5, dtype) == sum(t[0].nbytes for layer in cache.layers for t in layer)
    single, pair = cache.paged(torch.tensor([[3]], dtype=torch.int32))
    assert single.values is single.keys
    assert single.value_scales is single.key_scales
    assert pair.values is not pair.keys
    vectors = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(2))
    single.write(torch.arange(15, 19), vectors, vectors)
    stored = (
        single.keys[3, :4] if single.key_scales is None else dequantise(single.keys[3, :4], single.key_scales[3, :4])
    )
    assert torch.equal(stored, read_back(vectors, dtype) if scaled else vectors)
    cache.copy_pages(np.array([(3, 5)], dtype=np.int32))
    assert torch.equal(movable(single.keys)[5], movable(single.keys)[3])


Row = tuple[Tensor, Tensor, Tensor]
# (queries, context): one that decodes, a whole prompt, one that continues.
LENGTHS = ((1, 90), (40, 40), (33, 61))


def make_rows() -> list[Row]:
    """q [context, 4, 16], k and v [context, 2, 16] of rows; keys have a feature that is large everywhere."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _, context in LENGTHS:
        q, k, v = (torch.randn(context, heads, 16, generator=generator) for heads in (4, 2, 2))
        k[..., 3] += 9.0
        rows.append((q, k, v))
    return rows


def attend(rows: Sequence[Row], lengths: Sequence[int], cache: KVCache, **how: Any) -> list[Tensor]:
    """Results of each row's last queries over layer 0's pages, in which all that belongs to no row is NaN."""
    for tensor in cache.layers[0]:
        if tensor.is_floating_point() and tensor.dtype != FP8:  # scales that are NaN poison what has them
            tensor.fill_(math.nan)
    tables = torch.zeros(len(rows), 20, dtype=torch.int32)
    free = iter((torch.randperm(40, generator=torch.Generator().manual_seed(4)) + 1).tolist())
    slots = []
    for table, (_, k, _) in zip(tables, rows, strict=True):
        for page in range(-(-len(k) // cache.block_size)):
            table[page] = next(free)
        position = torch.arange(len(k))
        slots.append(table[position // cache.block_size].long() * cache.block_size + position % cache.block_size)
    kv = cache.paged(tables)[0]
    kv.write(torch.cat(slots), torch.cat([k for _, k, _ in rows]), torch.cat([v for _, _, v in rows]))
    metadata = AttentionMetadata.build(list(lengths), [len(k) for _, k, _ in rows], CPU)
    q = torch.cat([q[len(q) - n :] for (q, _, _), n in zip(rows, lengths, strict=True)])
    return list(torch.split(BACKEND.attend(q, kv, metadata, scale=0.25, **how), list(lengths)))


QUERIES = [queries for queries, _ in LENGTHS]


def read_back(x: Tensor, kind: torch.dtype, centre: Tensor | None = None) -> Tensor:
    if centre is None:
        return dequantise(*quantise(x, kind))
    return dequantise(*quantise(x - centre, kind)) + centre


@pytest.mark.parametrize("how", [{}, {"window": Window(20)}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", LARGEST)
def test_attention_over_8_bits_is_attention_over_what_they_stand_for(
    kind: torch.dtype, centred: bool, how: dict[str, Any]
) -> None:
    """To the bit; and it is near attention over the numbers themselves."""
    rows = make_rows()
    cache = new_cache(kind, centred)
    got = attend(rows, QUERIES, cache, **how)
    stands_for = [(q, read_back(k, kind, cache.key_centres[0]), read_back(v, kind)) for q, k, v in rows]
    assert all(map(torch.equal, got, attend(stands_for, QUERIES, new_cache(torch.float32), **how)))
    exact = attend(rows, QUERIES, new_cache(torch.float32), **how)
    assert 1e-4 < max(float((a - b).abs().max()) for a, b in zip(got, exact, strict=True)) < 0.2


@pytest.mark.parametrize("kind", LARGEST)
def test_a_centre_of_what_keys_share_makes_the_error_smaller(kind: torch.dtype) -> None:
    rows = make_rows()
    exact = attend(rows, QUERIES, new_cache(torch.float32))
    shared = torch.zeros(2, 16)
    shared[:, 3] = 9.0
    errors = []
    for centres in (None, [shared, torch.zeros(1, 8)]):
        got = attend(rows, QUERIES, KVCache(SHAPES, 40, 5, kind, CPU, centres))
        errors.append(torch.cat([a - b for a, b in zip(got, exact, strict=True)]).square().mean().sqrt())
    assert errors[1] < (0.5 if kind == torch.int8 else 1.0) * errors[0]


@pytest.mark.parametrize("kind", LARGEST)
def test_rows_of_8_bits_do_not_depend_on_the_batch(kind: torch.dtype) -> None:
    rows = make_rows()
    crowd = attend(rows, QUERIES, new_cache(kind, True))
    for row, queries, together in zip(rows, QUERIES, crowd, strict=True):
        (alone,) = attend([row], [queries], new_cache(kind, True))
        assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", [torch.int8, FP8, torch.float16, torch.bfloat16])
def test_nan_reaches_the_row_that_has_it_and_no_other(dtype: torch.dtype) -> None:
    rows = make_rows()
    clean = attend(rows, QUERIES, new_cache(dtype))
    bad = rows[1][1].clone()
    bad[0, 0, 2] = math.nan if dtype != torch.float16 else 1e9  # beyond float16
    sick = attend([rows[0], (rows[1][0], bad, rows[1][2]), rows[2]], QUERIES, new_cache(dtype))
    assert bool(sick[1][:, :2].isnan().all()), "the heads that read it"
    assert bool(sick[1][:, 2:].isfinite().all())
    assert torch.equal(sick[0], clean[0])
    assert torch.equal(sick[2], clean[2])


class Picky(TorchReference):
    """A backend without int8."""

    name = "picky"

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        return [f"no {cache_dtype} pages"] if cache_dtype == torch.int8 else []


def test_a_backend_may_refuse_a_format(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checkpoint: Callable[[str], Checkpoint]
) -> None:
    monkeypatch.setattr("engine.backends.attention.selection.BACKENDS", (Picky, TorchReference))
    plain = make_engine(checkpoint(CHECKPOINT).path)
    with caplog.at_level(logging.INFO, logger="octavo.attention"):
        one = make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8")
    assert type(plain.runner.model.decoder.blocks[0].attention.inner.backend) is Picky  # type: ignore[union-attr]
    assert type(one.runner.model.decoder.blocks[0].attention.inner.backend) is TorchReference  # type: ignore[union-attr]
    assert "not usable: picky (no torch.int8 pages)" in caplog.text
    part = one.runner.model.spec.decoder.blocks[0].attention  # type: ignore[union-attr]
    plain.close()
    one.close()
    monkeypatch.setattr("engine.backends.attention.selection.BACKENDS", (TorchReference,))
    with pytest.raises(ConfigError, match=r"torch attention does not read int16 pages.*--kv-cache-dtype"):
        select("cpu", [part], torch.int16)


# ------------------------------------------------------------------ engines


def test_how_many_tokens_fit(checkpoint: Callable[[str], Checkpoint]) -> None:
    """The scale's 2 bytes count: with heads of 8 numbers, int8 takes 10 bytes where float16 takes 16."""
    path = str(checkpoint(CHECKPOINT).path)
    pages, infos = {}, {}
    for name in FORMATS:
        config = EngineConfig(
            model=path, device="cpu", dtype="float32", kv_cache_dtype=name, kv_cache_memory="1MiB", show_progress=False
        )  # type: ignore[arg-type]
        one = Engine(config)
        facts = inspect_model(config)
        pages[name], infos[name] = one.info.num_blocks + 1, (one.info.dtype, one.info.kv_cache_dtype)
        size = sum(t.nbytes for layer in one.runner.cache.layers for t in layer)
        assert (facts.num_blocks, facts.pages, facts.kv_cache_dtype) == (one.info.num_blocks, size, name)
        assert 2**20 - size < size / pages[name], "not a page more would fit"
        one.close()
    assert infos == {name: ("float32", name) for name in FORMATS}
    assert pages["bfloat16"] == pages["float16"] == pytest.approx(2 * pages["float32"], abs=1)
    assert pages["int8"] == pages["fp8"] == pytest.approx(pages["float16"] * 16 / 10, abs=2)
    assert pages["int8"] == pytest.approx(pages["float32"] * 32 / 10, abs=4)


@pytest.mark.parametrize(
    ("setting", "dtype", "found"),
    [("auto", "bfloat16", "bfloat16"), ("int8", "float16", "int8"), ("fp8", "float16", "fp8")],
)
def test_auto_is_the_models_format(
    setting: str, dtype: str, found: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """And a 16-bit model has pages of 8 bits, too."""
    one = make_engine(checkpoint(CHECKPOINT).path, dtype=dtype, kv_cache_dtype=setting)
    assert (one.info.dtype, one.info.kv_cache_dtype) == (dtype, found)
    assert one.runner.cache.layers[0][0].dtype == format_named(found)
    ((answer,),) = run(one, [Job(prompt(1, 19), greedy(8))])
    assert len(answer) == 8
    one.close()


class Narrow(transformers.DynamicCache):
    """transformers' cache, rounding what it is given as pages of a format do."""

    def __init__(self, name: str, centres: Sequence[Tensor | None]):
        super().__init__()
        self.name, self.centres = name, centres

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        dtype = format_named(self.name)
        if dtype not in LARGEST:
            key_states, value_states = key_states.to(dtype).float(), value_states.to(dtype).float()
        else:
            centre = self.centres[layer_idx]
            assert centre is not None
            key_states = self.rounded(key_states - centre.unsqueeze(1)) + centre.unsqueeze(1)
            value_states = self.rounded(value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def rounded(self, x: Tensor) -> Tensor:
        dtype = format_named(self.name)
        scale = (x.abs().amax(-1, keepdim=True) / LARGEST[dtype]).bfloat16().float()
        steps = torch.round(x / scale) if dtype == torch.int8 else (x / scale).clamp(-448, 448).to(dtype).float()
        return steps * scale


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2-tied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "fp8"])
def test_greedy_equals_transformers_with_such_a_cache(
    dtype: str, name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Token for token, with chunked prompts; and rounding K and V so does change what the model says."""
    model = checkpoint(name)
    one = make_engine(model.path, kv_cache_dtype=dtype, max_num_batched_tokens=16, max_num_seqs=8, block_size=4)
    centres = one.runner.cache.key_centres
    prompts = model.prompts()[:4]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    for number, ids in enumerate(prompts):
        add(one, str(number), Job(ids, params))
    outputs = finish(one)
    plain = []
    for number, ids in enumerate(prompts):
        cache = Narrow(dtype, centres)
        expected = reference.greedy(model.model, ids, None, 24, past_key_values=cache)
        assert expected.margin > reference.MIN_MARGIN
        answer = outputs[str(number)].outputs[0]
        assert answer.token_ids == expected.answers[0].tokens
        logprobs = [next(iter(entry.values())).logprob for entry in answer.logprobs or ()]
        rows = reference.logprobs(model.model, [*ids, *answer.token_ids])[len(ids) - 1 : -1]
        plain += [
            abs(row[token].item() - got) for row, token, got in zip(rows, answer.token_ids, logprobs, strict=True)
        ]
    assert 1e-4 < max(plain) < (0.8 if dtype == "fp8" else 0.5), "another cache, and nearly the same model"
    one.close()


def test_centres_depend_on_the_model_alone(checkpoint: Callable[[str], Checkpoint]) -> None:
    one = make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8")
    two = make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8", block_size=3, max_num_seqs=2, seed=4)
    for mine, other in zip(one.runner.cache.key_centres, two.runner.cache.key_centres, strict=True):
        assert mine is not None
        assert other is not None
        assert mine.shape == (2, 8)
        assert torch.equal(mine, other)
        assert bool(mine.any())
    assert make_engine(checkpoint(CHECKPOINT).path).runner.cache.key_centres == [None, None]
    with torch.no_grad():
        one.runner.model.decoder.embedding.tokens.fill_(math.nan)
    assert not any(mean.any() for mean in mean_keys(one.runner.model)), "what is not finite is left out"
    one.close()
    two.close()


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_ends_its_own_request(dtype: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    """A token whose vector is NaN: with every format its request ends, others go on, its pages harm no other."""
    one = make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype=dtype, num_gpu_blocks_override=20)
    good, bad = [Job([t for t in prompt(seed, 30) if t != 5], greedy(10, logit_bias={5: -100.0})) for seed in (1, 2)]
    (expected,) = run(one, [good])
    with torch.no_grad():
        one.runner.model.decoder.embedding.tokens[5] = math.nan
    add(one, "bad", replace(bad, prompt=[*bad.prompt[:9], 5, *bad.prompt[9:]]))
    add(one, "good", good)
    outputs = finish(one)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "not a number" in str(outputs["bad"].outputs[0].stop_reason)
    assert [answer.token_ids for answer in outputs["good"].outputs] == expected
    for _ in range(4):  # pages come back
        assert run(one, [good]) == [expected]
    one.close()


# ------------------------------------------------------------------ the same answer, under int8


@pytest.fixture
def int8_engines(checkpoint: Callable[[str], Checkpoint]) -> Iterator[Callable[..., Engine]]:
    """Makes engines with int8 pages and closes them."""
    made: list[Engine] = []

    def make(**how: Any) -> Engine:
        made.append(make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8", **how))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def int8_answers(checkpoint: Callable[[str], Checkpoint], mixed_answers: list[Tokens]) -> list[Tokens]:
    """What each of `MIXED` answers alone with int8 pages, nothing cached; some of it is not what float32 says."""
    one = make_engine(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8", enable_prefix_caching=False)
    result = run_alone(one, MIXED)
    assert one.stats().num_preemptions == one.stats().prefix_hits == 0
    assert result != mixed_answers
    one.close()
    return result


def test_batched_and_chunked_equal_alone(int8_engines: Callable[..., Engine], int8_answers: list[Tokens]) -> None:
    one = int8_engines(max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=False, block_size=4)
    with watching(one) as plans:
        assert run(one, MIXED) == int8_answers
    assert max(plan.num_rows for plan in plans) > 8
    assert sum(1 for plan in plans if plan.sampling is None or len(plan.sampling.rows) < plan.num_rows) >= 8


def test_prefix_cached_equals_fresh(int8_engines: Callable[..., Engine], int8_answers: list[Tokens]) -> None:
    one = int8_engines(block_size=4)
    assert run(one, MIXED) == int8_answers
    assert one.stats().prefix_hits == 0
    assert run(one, MIXED) == int8_answers
    assert one.stats().prefix_hits == sum(4 * ((len(job.prompt) - 1) // 4) for job in MIXED)


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_preempted_equals_undisturbed(
    caching: bool, int8_engines: Callable[..., Engine], int8_answers: list[Tokens]
) -> None:
    """By hand every third step, and by a pool for about two requests, beams with their copies included."""
    one = int8_engines(block_size=4, max_num_batched_tokens=64, enable_prefix_caching=caching)
    strike = Strikes(one, 3, 2)
    assert run(one, MIXED, strike) == int8_answers
    assert one.stats().num_preemptions == strike.count > 3 * len(MIXED)
    small = int8_engines(block_size=4, num_gpu_blocks_override=40, enable_prefix_caching=caching)
    assert run(small, MIXED) == int8_answers
    assert small.stats().num_preemptions > 3
    assert small.stats().num_page_copies > 0


def test_beams_that_copy_equal_beams_that_do_not(int8_engines: Callable[..., Engine]) -> None:
    """Pages of one token are full at once and never copied; larger ones are."""
    job = Job(prompt(80, 21), beams(4, 24, ignore_eos=True))
    without, copying = int8_engines(block_size=1), int8_engines(block_size=16)
    assert run(without, [job]) == run(copying, [job])
    assert without.stats().num_page_copies == 0
    assert copying.stats().num_page_copies > 8


# ------------------------------------------------------------------ a trained model


@pytest.mark.skipif(not TRAINED.is_dir(), reason="the trained test model is not here")
def test_a_trained_model_says_the_same() -> None:
    """Teacher-forced on stories that it told itself (greedily, from different beginnings): the most likely token
    is the same at 99% of the positions and more. `benchmarks/kv_cache_dtype.py` measures more."""

    def scored(name: str, texts: list[list[int]]) -> list[tuple[int, float]]:
        llm = LLM(str(TRAINED), device="cpu", dtype="float32", kv_cache_dtype=name, show_progress=False)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        found = []
        for output in llm.generate(texts, params, use_tqdm=False):
            for entry in (output.prompt_logprobs or [])[1:]:
                assert entry is not None
                best = next(token for token, scored in entry.items() if scored.rank == 1)
                found.append((best, next(iter(entry.values())).logprob))
        llm.close()
        return found

    llm = LLM(str(TRAINED), device="cpu", dtype="float32", show_progress=False)
    starts = ["Once upon a time", "One day", "Tim had a", "The dog", "Mom said", "A little bird", "The sun was", "Tom"]
    outputs = llm.generate(starts, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), use_tqdm=False)
    texts = [[*(output.prompt_token_ids or ()), *output.outputs[0].token_ids] for output in outputs]
    llm.close()
    truth = scored("float32", texts)
    assert len(truth) > 1500
    bounds = ("bfloat16", 0.99, 0.01), ("float16", 0.998, 0.002), ("int8", 0.99, 0.03), ("fp8", 0.95, 0.08)
    for name, least, apart in bounds:
        found = scored(name, texts)
        same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, truth, strict=True)) / len(truth)
        mean = sum(abs(ours[1] - theirs[1]) for ours, theirs in zip(found, truth, strict=True)) / len(truth)
        assert same >= least, name
        assert 0 < mean < apart, name


@pytest.mark.parametrize("name", ["t5gemma2", "prophetnet"])
def test_fp8_pages_of_attention_that_torch_computes(name: str, tmp_path: Path) -> None:
    """The library runs the rest of these programs, and has no code for such pages."""
    case = make_seq2seq_checkpoint(SEQ2SEQ_SHAPES[name], tmp_path).cases()[1]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for kind in ("auto", "fp8"):
        engine = make_engine(tmp_path, kv_cache_dtype=kind)
        found.append(run(engine, [Job(case.source, params)]))
        engine.close()
    assert found[0] == found[1]
