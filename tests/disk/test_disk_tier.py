"""Pages on disk: answers with the folder equal answers without it, and the pages really came from there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import random_prompt
from support.driving import BOTH_DEPTHS, Job, Tokens, add, finish, make_engine, run, run_alone, tokens_of
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.jobs import MIXED, VOCAB, beams, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES
from test_metamorphic_window import windowed_spec

from engine import Engine, EngineConfig, Seq2SeqInput
from engine.disk import tier as disk_tier
from engine.disk.opening import open_stores
from engine.disk.store import PageStore
from engine.disk.tier import longest
from engine.errors import ConfigError, EngineDeadError
from engine.execution.page_content import PageContent
from engine.scheduling.needs import SequenceNeeds

SMALL = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 16}
# 61 tokens: 15 full pages. Their children diverge.
TEXT = prompt(3, 61)
JOBS = [Job(TEXT, greedy(12)), Job([*TEXT[:50], *prompt(4, 20)], sampled(8, n=2)), Job(TEXT, beams(4, 6, min_tokens=6))]


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, Any]:
    return SMALL | {"kv_disk": str(tmp_path / "pages"), "kv_disk_size": "64MiB"}


def pages(kept: dict[str, Any]) -> list[Path]:
    return sorted(path for path in Path(kept["kv_disk"]).glob("*/*") if not path.name.startswith("."))


@BOTH_DEPTHS
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_answers_after_a_restart(engines: Callable[..., Engine], kept: dict[str, Any], kind: str) -> None:
    """A second engine computes none of the pages that the first one left behind, and answers as one without them."""
    kept["kv_cache_dtype"] = kind
    alone = [run(engines(**SMALL, kv_cache_dtype=kind), [job])[0] for job in JOBS]
    first = engines(**kept)
    assert run(first, JOBS[:1]) == alone[:1]
    first.close()
    assert len(pages(kept)) == 18  # of 61 + 12 - 1 tokens
    for job, answer, found in zip(JOBS, alone, (15, 12, 15), strict=True):
        second = engines(**kept)
        assert run(second, [job]) == [answer]
        stats = second.stats()
        assert (stats.disk_pages_read, stats.disk_hits, stats.prompt_tokens_cached) == (found, 1, 4 * found)
        assert stats.disk_errors == 0
        second.close()


@BOTH_DEPTHS
def test_in_a_crowd(engines: Callable[..., Engine], kept: dict[str, Any], mixed_answers: list[Tokens]) -> None:
    """Requests of all kinds, in a pool that has too few pages for them, so that some are preempted while the pages of
    others come from the disk; pages are counted after each step."""
    one = engines(**kept, num_gpu_blocks_override=40)
    for times in range(1, 4):
        assert run(one, MIXED) == mixed_answers
        one.keep_pages()
        assert one.reset_prefix_cache()
        assert one.stats().num_preemptions >= 1
        assert one.stats().disk_hits >= times - 1  # the first in each round finds a pool of free pages
    assert one.stats().disk_errors == 0


def test_evicted_pages_come_back(engines: Callable[..., Engine], kept: dict[str, Any]) -> None:
    """A pool that holds one request at a time finds the pages of the one before on the disk."""
    one, others = engines(**kept, num_gpu_blocks_override=24), [prompt(seed, 70) for seed in range(5, 9)]
    (answer,) = run(one, JOBS[:1])
    for other in others:
        run(one, [Job(other, greedy(4))])
    assert one.stats().disk_pages_read == 0
    one.keep_pages()
    assert run(one, JOBS[:1]) == [answer]
    stats = one.stats()
    assert stats.disk_hits == 1
    assert stats.disk_pages_read >= 10


def test_other_requests_go_on(engines: Callable[..., Engine], kept: dict[str, Any]) -> None:
    """While a request waits for a disk that does not answer, others are computed; it may be ended."""
    first = engines(**kept)
    (answer,) = run(first, JOBS[:1])
    first.close()
    with held_reader() as release:
        second = engines(**kept)
        add(second, "waits", JOBS[0])
        add(second, "ends", JOBS[0])
        add(second, "runs", Job(prompt(9, 30), greedy(3)))
        finished = {output.request_id for _ in range(12) for output in second.step() if output.finished}
        assert finished == {"runs"}
        assert second.stats().num_waiting == 2
        second.abort_request("ends")
        assert second.stats().num_waiting == 1
        release()
        assert [one.token_ids for one in finish(second)["waits"].outputs] == answer
    assert second.stats().disk_hits == 1


@contextmanager
def held_reader() -> Iterator[Callable[[], None]]:
    """Let no reader begin until the function is called."""
    gate, read = threading.Event(), disk_tier.DiskTier.read_one

    def wait(self: disk_tier.DiskTier) -> None:
        assert gate.wait(60)
        read(self)

    disk_tier.DiskTier.read_one = wait  # type: ignore[method-assign]
    try:
        yield gate.set
    finally:
        gate.set()
        disk_tier.DiskTier.read_one = read  # type: ignore[method-assign]


def test_a_damaged_page_is_computed(engines: Callable[..., Engine], kept: dict[str, Any]) -> None:
    """Pages before it are used; it is removed, and written again."""
    first = engines(**kept)
    (answer,) = run(first, JOBS[:1])
    names = [page_hash.hex() for page_hash in first.scheduler.pool.hashes()]  # in the order of the text
    first.close()
    (folder,) = {path.parent for path in pages(kept)}
    flipped, torn = folder / names[5], folder / names[9]
    whole = flipped.read_bytes()
    flipped.write_bytes(bytes([*whole[:-7], whole[-7] ^ 4, *whole[-6:]]))
    torn.write_bytes(torn.read_bytes()[:-1])
    for found in (5, 9, 15):
        engine = engines(**kept)
        assert run(engine, JOBS[:1]) == [answer]
        assert (engine.stats().disk_pages_read, engine.stats().disk_errors) == (found, int(found < 15))
        engine.close()
        assert flipped.read_bytes() == whole


def test_pages_of_others_are_not_found(engines: Callable[..., Engine], kept: dict[str, Any]) -> None:
    """Of another salt, in another format, of other weights, by other code."""
    first = engines(**kept)
    run(first, [Job(TEXT, greedy(1), {"cache_salt": "mine"})])
    first.close()

    def read(options: dict[str, Any], **settings: Any) -> int:
        engine = engines(**(kept | settings))
        run(engine, [Job(TEXT, greedy(1), options)])
        found = engine.stats().disk_pages_read
        engine._disk._pages.store.writable = False  # type: ignore[union-attr]
        engine.close()
        return found

    mine = {"cache_salt": "mine"}
    assert read({"cache_salt": "yours"}) == read({}) == 0
    assert read(mine, kv_cache_dtype="int8") == read(mine, block_size=8) == read(mine, dtype="bfloat16") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.disk.identity._code", lambda: "another")
        assert read(mine) == 0
    assert read(mine) == 15


def test_a_disk_that_fails_is_reported_once(
    engines: Callable[..., Engine],
    kept: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers stay, and nothing more is tried for a while."""
    alone = run_alone(engines(**SMALL), JOBS)

    def full(*_: Any) -> bool:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(PageStore, "write", full)
    one = engines(**kept)
    assert run_alone(one, JOBS) == alone
    one.keep_pages()
    one.keep_pages()
    assert one.stats().disk_errors == 1
    messages = [record.getMessage() for record in caplog.records if record.name == "octavo.disk"]
    assert [message for message in messages if "cannot be" in message] == [
        f"Pages cannot be written in {kept['kv_disk']}: No space left on device. Requests continue without them. Free "
        "some space, or lower --kv-disk-size. This is reported once."
    ]


def test_an_engine_whose_runner_has_ended_is_closed(
    engines: Callable[..., Engine], kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are gone with the runner's process."""

    def gone(*_: Any) -> None:
        raise EngineDeadError("the runner's process has ended")

    one = engines(**kept)
    run(one, JOBS[:1])
    monkeypatch.setattr(PageContent, "read", gone)
    one.close()
    assert not hasattr(one, "executor")


def test_an_encoder_without_a_decoder_keeps_nothing(kept: dict[str, Any]) -> None:
    """It is served without the folder, which is not made."""
    facts = SimpleNamespace(info=SimpleNamespace(encoder_only=True), needs=SequenceNeeds(paged=False))
    assert open_stores(EngineConfig(model="m", **kept), SimpleNamespace(facts=facts)) == []  # type: ignore[arg-type]
    assert not Path(kept["kv_disk"]).exists()


def test_an_encoder_does_not_run_again(kept: dict[str, Any], tmp_path: Path) -> None:
    """All pages of its input come back, with those of the decoder's prompt; if one is damaged, it runs."""
    path = tmp_path / "bart"
    vocab = make_seq2seq_checkpoint(SHAPES["bart"], path).shape.vocab
    input = Seq2SeqInput(random_prompt(vocab, 1, 30), random_prompt(vocab, 2, 10))

    def ask(**settings: Any) -> tuple[Tokens, tuple[int, ...]]:
        engine = make_engine(path, max_model_len=100, **settings)
        engine.add_request("r", input, beams(2, 6))
        answer, stats = tokens_of(finish(engine)["r"]), engine.stats()
        engine.close()
        return answer, (stats.num_encoder_runs, stats.disk_pages_read, stats.prompt_tokens_cached)

    (answer, found) = ask(**SMALL)
    assert found == (1, 0, 0)
    assert ask(**kept) == (answer, (1, 0, 0))
    assert ask(**kept) == (answer, (0, 8 + 2, 30 + 8))
    for path_ in pages(kept):
        path_.write_bytes(path_.read_bytes()[:-1])
    assert ask(**kept) == (answer, (1, 0, 0))


@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1"])
def test_states_after_a_restart(family: str, kept: dict[str, Any], tmp_path: Path) -> None:
    """A prompt continues from the last page whose state is known, too."""
    make_family_checkpoint(replace(FAMILY_SHAPES[family], vocab=VOCAB), tmp_path / family)

    def ask(job: Job, **settings: Any) -> tuple[Tokens, tuple[int, ...]]:
        engine = make_engine(tmp_path / family, max_model_len=100, **settings)
        (answer,), stats = run(engine, [job]), engine.stats()
        engine.close()
        return answer, (stats.disk_pages_read, stats.prompt_tokens_cached, stats.disk_errors)

    whole, other = JOBS[0], JOBS[1]  # their first 50 tokens are equal, but the state is known after 60
    longer = Job([*TEXT[:60], *prompt(4, 20)], greedy(5))
    alone = [ask(job, **SMALL)[0] for job in (whole, other, longer)]
    assert ask(whole, **kept) == (alone[0], (0, 0, 0))
    assert ask(other, **kept) == (alone[1], (0, 0, 0))
    assert ask(longer, **kept) == (alone[2], (15 + 1, 60, 0))


@pytest.mark.slow
def test_pages_of_a_runner_in_its_own_process(engines: Callable[..., Engine], kept: dict[str, Any]) -> None:
    """It finds the pages of an engine in one process, and leaves some for it."""
    (alone,) = run(engines(**SMALL), JOBS[:1])
    for apart, read in (("mp", 0), ("mp", 15), ("uni", 15)):
        one = engines(**kept, distributed_executor_backend=apart)
        assert run(one, JOBS[:1]) == [alone]
        assert (one.stats().disk_pages_read, one.stats().disk_errors) == (read, 0)
        one.close()
        assert len(pages(kept)) == 18


def test_settings_that_contradict_it(engines: Callable[..., Engine], kept: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is false"):
        engines(**kept, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"kv_disk_size is 100 bytes, but one page takes \d+. Raise --kv-disk-size."):
        engines(**kept | {"kv_disk_size": 100})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"pages cannot be kept there: (Not a|File)"):
        engines(**kept | {"kv_disk": str(tmp_path / "file")})


def test_a_window_needs_its_pages_alone(
    engines: Callable[..., Engine], kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 22 full pages, a query of a model whose window has 18 tokens sees 5."""
    monkeypatch.setattr("engine.execution.starting.build_spec", windowed_spec)
    job = Job(prompt(30, 90), greedy(20))
    (answer,) = run(engines(**SMALL), [job])
    first = engines(**kept)
    assert run(first, [job]) == [answer]
    first.close()
    second = engines(**kept)
    assert run(second, [job]) == [answer]
    assert (second.stats().disk_pages_read, second.stats().prompt_tokens_cached) == (5, 88)


def test_the_pages_that_a_window_needs() -> None:
    """A beginning needs only the pages that its next query sees."""
    hashes = [bytes([number]) for number in range(10)]
    known = {hashes[number] for number in (0, 1, 4, 5, 6)}
    assert longest(hashes, None, known.__contains__) == (0, 2)
    assert longest(hashes, 3, known.__contains__) == (4, 7)
    assert longest(hashes, 4, known.__contains__) == (0, 2)
    assert longest(hashes[2:4], 3, known.__contains__) == (0, 0)


def test_a_disk_that_hangs_is_not_waited_for(
    engines: Callable[..., Engine], kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that has begun to wait is computed, and later ones do not wait at all."""
    first = engines(**kept)
    (answer,) = run(first, JOBS[:1])
    first.close()
    gate, read = threading.Event(), PageStore.read

    def hang(*arguments: Any) -> bool:
        assert gate.wait(60)
        return read(*arguments)

    monkeypatch.setattr(PageStore, "read", hang)
    monkeypatch.setattr(disk_tier, "_HANGING", 0.0)
    second = engines(**kept)
    assert run(second, JOBS[:1]) == [answer]
    assert second.reset_prefix_cache()
    assert run(second, JOBS[:1]) == [answer]
    assert second.stats().disk_pages_read == 0
    gate.set()
