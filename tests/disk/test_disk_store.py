"""The folder of pages against a naive model: two processes, kills at any moment, damage by others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.disk import store as module
from engine.disk.store import PageStore

SIZE = 5000  # bytes of a page: a file takes 8192
COST = 8192
MODEL, OTHER = b"m" * 16, b"o" * 16
CHANGES = ("open", "mkdir", "write", "pwrite", "rename", "unlink")


def named(number: int) -> bytes:
    return bytes([number]) * 16


def content(number: int, model: bytes = MODEL) -> np.ndarray[Any, Any]:
    return np.random.default_rng([number, model[0]]).integers(0, 256, SIZE, dtype=np.uint8)


class Killed(BaseException):
    """The process is no more."""


class Mortal:
    """`os` for a process that is killed at its n-th change of the disk, or whose n-th one fails and all after it."""

    def __init__(self, left: int, error: Callable[[], BaseException]):
        self._left, self._error = left, error

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in CHANGES:
            return function

        def change(*arguments: Any, **more: Any) -> Any:
            if self._left <= 0:
                raise self._error()
            self._left -= 1
            if name == "write" and not self._left:  # a part of it arrives
                return function(arguments[0], arguments[1][: max(len(arguments[1]) // 2, 1)])
            return function(*arguments, **more)

        return change


@contextmanager
def dying(left: int, error: Callable[[], BaseException] = Killed) -> Iterator[None]:
    module.os = Mortal(left, error)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        module.os = os  # type: ignore[attr-defined]


class StoreMachine(RuleBasedStateMachine):
    """Two processes with one model, and a third with another, write into one folder with room for four pages."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.limit = 4 * COST + 100
        self.stores: list[PageStore | None] = [None] * 3
        self.damaged: set[Path] = set()

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            if store is not None:
                store.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def store(self, which: int) -> PageStore:
        found = self.stores[which]
        if found is None:
            found = self.stores[which] = PageStore(self.folder, self.limit, self.model(which), SIZE)
        return found

    def model(self, which: int) -> bytes:
        return OTHER if which == 2 else MODEL

    def path(self, which: int, number: int) -> Path:
        return self.folder / self.model(which).hex() / named(number).hex()

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.parent != self.folder]

    which, numbers = st.integers(0, 2), st.integers(0, 6)

    @rule(which=which, number=numbers)
    def write(self, which: int, number: int) -> None:
        path, store = self.path(which, number), self.store(which)
        was_there = path.exists()
        if not store.write(named(number), content(number, self.model(which))):
            assert was_there
        else:
            self.damaged.discard(path)
        assert path.exists()
        assert named(number) in store.known

    @rule(which=which, number=numbers, left=st.integers(0, 8))
    def is_killed_while_it_writes(self, which: int, number: int, left: int) -> None:
        path, store = self.path(which, number), self.store(which)
        was_there = path.exists()
        try:
            with dying(left):
                store.write(named(number), content(number, self.model(which)))
        except Killed:
            assert sum(-(-file.stat().st_size // 4096) * 4096 for file in self.files()) <= self.limit
        if not was_there:
            self.damaged.discard(path)
        store.close()
        self.stores[which] = None

    @rule(which=which, number=numbers, left=st.integers(0, 8), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def fails(self, which: int, number: int, left: int, code: int) -> None:
        path, store = self.path(which, number), self.store(which)
        was_there = path.exists()
        with contextlib.suppress(OSError), dying(left, lambda: OSError(code, os.strerror(code))):
            store.write(named(number), content(number, self.model(which)))
        if not was_there:
            self.damaged.discard(path)

    @rule(which=which, number=numbers)
    def read(self, which: int, number: int) -> None:
        path, store, found = self.path(which, number), self.store(which), np.zeros(SIZE, dtype=np.uint8)
        expected = path.exists() and path not in self.damaged
        assert store.read(named(number), found) == expected
        if expected:
            assert np.array_equal(found, content(number, self.model(which)))
        elif path in self.damaged:
            assert not path.exists()
            self.damaged.discard(path)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        files = sorted(path for path in self.files() if not path.name.startswith("."))
        if not files:
            return
        path, how = data.draw(st.sampled_from(files)), data.draw(st.sampled_from(["flip", "cut", "swap", "empty"]))
        held = bytearray(path.read_bytes())
        if how == "flip" and held:
            held[data.draw(st.integers(0, len(held) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "swap":
            other = data.draw(st.sampled_from(files))
            if other == path:
                return
            held = bytearray(other.read_bytes())
        else:
            held = held[: len(held) // 2 if how == "cut" else 0]
        path.write_bytes(held)
        self.damaged.add(path)  # whatever was done to it before: one that is right again would be a coincidence
        if data.draw(st.booleans()):
            self.read(2 if path.parent.name == OTHER.hex() else 0, bytes.fromhex(path.name)[0])

    @rule(which=which)
    def restart(self, which: int) -> None:
        if (store := self.stores[which]) is not None:
            store.close()
        self.stores[which] = None

    @rule(which=which)
    def sees_the_others(self, which: int) -> None:
        store = self.store(which)
        store.refresh()
        own = self.folder / self.model(which).hex()
        there = {bytes.fromhex(path.name) for path in own.glob("*") if not path.name.startswith(".")}
        assert there <= store.known or self.damaged  # what others have damaged is removed unnoticed

    @invariant()
    def never_takes_more_than_the_limit(self) -> None:
        if hasattr(self, "folder"):
            assert sum(-(-file.stat().st_size // 4096) * 4096 for file in self.files()) <= self.limit

    @invariant()
    def all_is_private(self) -> None:
        if hasattr(self, "folder"):
            for path in self.folder.rglob("*"):
                expected = 0o700 if path.is_dir() else 0o600
                assert stat.S_IMODE(path.stat().st_mode) == expected


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def make(folder: Path, pages: int = 4, model: bytes = MODEL) -> PageStore:
    return PageStore(folder, pages * COST, model, SIZE)


def test_least_recently_used_pages_make_room(tmp_path: Path) -> None:
    """Across models; the last pages of a prompt that was used go before its first ones."""
    one, other = make(tmp_path), make(tmp_path, model=OTHER)
    other.write(named(9), content(9, OTHER))
    for number in (1, 2, 3):
        one.write(named(number), content(number))
    for age, number in enumerate((9, 1, 2, 3)):
        os.utime(next(tmp_path.glob(f"*/{named(number).hex()}")), ns=(age + 1, age + 1))
    one.touch([named(1), named(2)])
    one.refresh()
    for number, left in ((4, {1, 2, 3}), (5, {1, 2, 4}), (6, {1, 4, 5})):
        one.write(named(number), content(number))
        assert {path.name for path in tmp_path.glob(f"{MODEL.hex()}/*")} == {named(n).hex() for n in left | {number}}


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """One finds what another one wrote, once it has looked, and has the same hashes."""
    one, other = make(tmp_path), make(tmp_path)
    assert one.hash_key == other.hash_key != make(tmp_path, model=OTHER).hash_key
    one.write(named(1), content(1))
    assert not other.known
    other.refresh()
    found = np.zeros(SIZE, dtype=np.uint8)
    assert other.known == {named(1)}
    assert other.read(named(1), found)
    assert np.array_equal(found, content(1))


def test_a_folder_that_was_emptied(tmp_path: Path) -> None:
    """Both processes go on, with a new lock that they share."""
    one, other = make(tmp_path), make(tmp_path)
    one.write(named(1), content(1))
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    one.write(named(2), content(2))
    other.write(named(3), content(3))
    assert one.bytes_used == COST
    assert other.bytes_used == 2 * COST


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / named(1).hex()).write_text("mine")
    one = make(tmp_path, pages=1)
    for number in range(3):
        one.write(named(number), content(number))
    assert (tmp_path / "notes").read_text() == (tmp_path / "folder" / named(1).hex()).read_text() == "mine"
    assert one.bytes_used == COST


def test_a_key_that_is_not_whole_is_replaced(tmp_path: Path) -> None:
    key = make(tmp_path).key
    (tmp_path / "key").write_bytes(key[:20])
    assert make(tmp_path).key not in (key, key[:20])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    make(tmp_path).write(named(1), content(1))
    tmp_path.chmod(0o500)
    (tmp_path / "lock").chmod(0o400)
    one = make(tmp_path)
    assert not one.writable
    assert one.known == {named(1)}
    assert one.read(named(1), np.zeros(SIZE, dtype=np.uint8))
    assert not one.write(named(2), content(2))


def test_a_page_in_the_place_of_another(tmp_path: Path) -> None:
    """Its own hash and its own model are part of the checksum."""
    one, other, found = make(tmp_path), make(tmp_path, model=OTHER), np.zeros(SIZE, dtype=np.uint8)
    for number in (1, 2, 3):
        one.write(named(number), content(number))
    other.write(named(3), content(3, OTHER))
    own = tmp_path / MODEL.hex()
    shutil.copy(own / named(1).hex(), own / named(2).hex())
    shutil.copy(own / named(3).hex(), tmp_path / OTHER.hex() / named(3).hex())
    assert not one.read(named(2), found)
    assert not other.read(named(3), found)
    assert one.read(named(1), found)
    assert (one.damaged, other.damaged) == (1, 1)
