"""The native library: made where there is a compiler, found again, and not missed where there is none."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.native import STAND_INS
from test_wheel import layout

from engine.backends import native
from engine.backends.native import build as building
from engine.backends.native import loading
from engine.backends.native.build import (
    BuildError,
    Compiler,
    build,
    file_name,
    find_compiler,
    instruction_sets,
    supported_sets,
)
from engine.backends.native.norms import rms_norm
from engine.host.folders import cache_folder, make_spare

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
COMPILER = find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
# What a process tells about the library that it has found.
TELL = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
from engine.backends import native
found = native.current()
print(found and found.isa)
"""


@pytest.fixture(scope="module")
def portable() -> Path:
    """The portable library in the user's cache, compiled if need be."""
    assert COMPILER is not None
    native.load("portable")
    return cache_folder("native") / file_name("portable", COMPILER)


@pytest.fixture(scope="module")
def copier(portable: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that takes a second and gives a copy of the portable library: the tests ask where a library comes
    from, not how it is made."""
    path = tmp_path_factory.mktemp("copier") / "c++"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo copier && exit\n'
        "for last; do :; done\n"
        'case " $* " in\n'
        '    *" -c "*) touch "$last" ;;\n'
        f'    *) sleep 1; cp {shlex.quote(str(portable))} "$last" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return shlex.quote(str(path))


@pytest.fixture
def quick(copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", copier)


def start(cache: Path, code: str = TELL, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


@needs_compiler
@pytest.mark.usefixtures("quick")
def test_processes_that_start_at_once_make_one_library(tmp_path: Path) -> None:
    running = [start(tmp_path, OCTAVO_NATIVE_ISA="portable") for _ in range(2)]
    ended = [process.communicate(timeout=200) for process in running]
    assert [out.split() for out, _ in ended] == [["portable"]] * 2, ended
    assert sum("Compiling kernels" in errors for _, errors in ended) == 1, "the other one waited for it"
    assert len(libraries(tmp_path)) == 1
    assert not list(tmp_path.rglob(".building-*"))
    out, errors = start(tmp_path, OCTAVO_NATIVE_ISA="portable").communicate(timeout=100)
    assert out.split() == ["portable"]
    assert "Compiling" not in errors


def load_with(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **variables: str) -> list[str]:
    """What the log says while a library is looked for and not found."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "octavo.native"):
        assert loading._load() is None
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records if "ompil" not in record.msg]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OCTAVO_NATIVE": "off"}, "INFO OCTAVO_NATIVE=off"),
        ({"CXX": "no-such-compiler"}, "WARNING No native kernels"),
        ({"CXX": "false"}, "WARNING No native kernels"),
    ],
)
def test_without_a_library_the_log_says_what_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    said: str,
) -> None:
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    (line,) = load_with(monkeypatch, caplog, XDG_CACHE_HOME=str(tmp_path), **variables)
    assert line.startswith(said)
    assert "OCTAVO_NATIVE" in variables or "no C++ compiler was found" in line
    assert not libraries(tmp_path)


def test_what_would_be_loaded_is_told_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if COMPILER is not None:
        assert native.prospect() == (supported_sets()[0], "")
        monkeypatch.setenv("OCTAVO_NATIVE_ISA", "portable")
        assert native.prospect() == ("portable", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.prospect() == ("", loading._NO_COMPILER)
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    assert native.prospect() == ("", "OCTAVO_NATIVE=off")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "compiler"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "cannot do that" >&2; exit 1; }\n')
    broken.chmod(0o755)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    (line,) = load_with(monkeypatch, caplog, XDG_CACHE_HOME=str(tmp_path / "cache"), CXX=str(broken))
    assert line.startswith("WARNING No native kernels")
    assert not list((tmp_path / "cache").rglob(".building-*"))


def test_kernels_without_a_library_say_so() -> None:
    with native.use(None):
        assert not native.available()
        with pytest.raises(RuntimeError, match="no native library"):
            rms_norm(torch.ones(1, 4), None, 1e-5)


MAPPED = """
from pathlib import Path
import torch
from engine.backends import native
def mapped():
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
before = mapped()
assert native.current().threads() == torch.get_num_threads()
print(len(before), len(mapped() - before))
"""


@needs_compiler
def test_only_torchs_threads_are_in_the_process() -> None:
    """Two pools on the same cores would wait for each other. (Other packages may bring a pool of their own.)"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("the system does not tell what is mapped")
    assert native.available()
    out, errors = start(cache_folder("native").parents[1], MAPPED).communicate(timeout=100)
    assert out.split() == ["1", "0"], errors


@needs_compiler
def test_nothing_but_c_is_linked(portable: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    dynamic = subprocess.run(["readelf", "-d", str(portable)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(\w+)", dynamic)) <= {"libc", "libm"}


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_have_as_many_threads_as_torch(threads: int) -> None:
    before = torch.get_num_threads()
    found = native.current()
    assert found is not None
    try:
        torch.set_num_threads(threads)
        assert found.threads() == threads
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("late", [-1, 0, 1, 2])
@pytest.mark.parametrize(("count", "some"), [(0, 1), (2, 1), (64, 3), (1000, 8), (7, 100)])
def test_the_work_of_a_thread_that_comes_late_is_done_by_the_others(count: int, some: int, late: int) -> None:
    before, takers = torch.get_num_threads(), torch.zeros(count, dtype=torch.int64)
    found = native.current()
    assert found is not None
    try:
        torch.set_num_threads(3)
        found.function("take_pieces", "piii")(takers.data_ptr(), count, some, late)
    finally:
        torch.set_num_threads(before)
    assert all(100 <= taker < 103 for taker in takers.tolist()), "each piece is taken once"
    assert 100 + late not in takers.tolist()


@needs_compiler
def test_on_crowded_cores_a_thread_sleeps_until_a_late_one_comes() -> None:
    before, used = torch.get_num_threads(), torch.zeros(3, dtype=torch.int64)
    found = native.current()
    assert found is not None
    try:
        torch.set_num_threads(3)
        found.function("wait_for_late", "pi")(used.data_ptr(), 100_000_000)
    finally:
        torch.set_num_threads(before)
    assert 0 < used.max() < 20_000_000, "CPU time in nanoseconds, of 100 ms"


@needs_compiler
def test_a_prebuilt_library_is_taken(portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    shutil.copyfile(portable, tmp_path / file_name("portable"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = native.load("portable")
    assert found.isa == "portable"
    with native.use(found):
        assert torch.equal(rms_norm(torch.full((1, 4), 2.0), None, 0.0), torch.ones(1, 4))


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_name("portable")
    shutil.copytree(building.SOURCES, tmp_path / "src")
    monkeypatch.setattr(building, "SOURCES", tmp_path / "src")
    assert file_name("portable") == before
    with (tmp_path / "src/common.h").open("a") as file:
        file.write("\n")
    assert file_name("portable") != before


@needs_compiler
@pytest.mark.usefixtures("quick")
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there would be loaded into this process."""
    folder = tmp_path / "octavo" / "native"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"octavo-{os.geteuid()}").write_text("")  # nor is there another place
    assert loading._cache() == (folder, "")
    folder.chmod(0o777)
    cache, problem = loading._cache()
    assert cache is None
    assert "other users can write to" in problem
    assert native.load("portable").isa == "portable"
    assert not libraries(tmp_path)


@needs_compiler
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("why", ["no folder can be made", "read-only"])
def test_where_the_cache_cannot_be_written_to_another_place_is_found_and_named(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A home that cannot be used, such as a service's user may have, must not mean that each start compiles."""
    if why == "read-only":
        real = os.access
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(os, "access", lambda path, mode: "home" not in str(path) and real(path, mode))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    with caplog.at_level(logging.INFO, "octavo.native"):
        assert native.load("portable").isa == "portable"
    spare = tmp_path / f"octavo-{os.geteuid()}" / "native"
    (made,) = libraries(tmp_path)
    assert made.parent == spare
    assert spare.parent.stat().st_mode & 0o077 == 0
    warning, compiling = (record.getMessage() for record in caplog.records)
    assert "home" in warning
    assert str(spare) in warning
    assert "XDG_CACHE_HOME" in warning
    assert compiling.startswith("Compiling kernels for portable;")
    caplog.clear()
    before = made.stat().st_ino
    with caplog.at_level(logging.INFO, "octavo.native"):
        assert native.load("portable").isa == "portable"
    assert (caplog.records, made.stat().st_ino) == ([], before), "the second start compiles nothing"


@needs_compiler
@pytest.mark.usefixtures("quick")
def test_a_library_in_a_cache_that_cannot_be_written_to_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    native.load("portable")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "octavo" / "native" and real(path, mode))
    with caplog.at_level(logging.INFO, "octavo.native"):
        native.load("portable")
    assert not caplog.records
    assert len(libraries(tmp_path)) == 1


@pytest.mark.parametrize("what", ["a link", "someone else's", "others can read", "no sticky bit", "a file"])
def test_another_place_is_this_users_alone(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder in which all users may make files."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o777 if what == "no sticky bit" else 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    folder, uid = place / f"octavo-{os.geteuid()}", os.geteuid()
    match what:
        case "a link":
            (tmp_path / "mine").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "mine")
        case "someone else's":
            folder.mkdir(mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
            folder.rename(place / f"octavo-{uid + 1}")
        case "others can read":
            folder.mkdir()
            folder.chmod(0o750)
        case "a file":
            folder.write_text("")
    with pytest.raises(OSError, match=r"octavo-\d+|sticky"):
        make_spare("native")
    assert not list(tmp_path.rglob("native"))


@needs_compiler
@pytest.mark.usefixtures("quick")
def test_old_libraries_are_removed_when_a_new_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    folder, _ = loading._cache()
    assert folder is not None
    kept, old, killed = folder / "octavo-kept.so", folder / "octavo-old.so", folder / ".building-killed"
    killed.mkdir()
    for path in (kept, old, killed / "a.o"):
        path.write_text("")
    month = 31 * 24 * 3600
    for path in (old, killed):
        os.utime(path, (path.stat().st_atime - month, path.stat().st_mtime - month))
    native.load("portable")
    assert kept.exists()
    assert not old.exists()
    assert not killed.exists()
    assert len(libraries(tmp_path)) == 2


def test_a_build_that_cannot_write_says_where(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file"):
        build("portable", COMPILER, tmp_path / "file" / "library.so")


def test_instruction_sets_are_chosen_by_what_the_cpu_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    everything = sorted(instruction_sets()["avx512"].features)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu " + " ".join(everything) + "\n")
    assert supported_sets(cpuinfo) == ["avx512", "avx512-vnni", "avx2", "portable"]
    cpuinfo.write_text("flags\t\t: " + " ".join(set(everything) - {"avx512_bf16"}) + "\n")
    assert supported_sets(cpuinfo) == ["avx512-vnni", "avx2", "portable"]
    cpuinfo.write_text("flags\t\t: " + " ".join(set(everything) - {"avx512_vnni"}) + "\n")
    assert supported_sets(cpuinfo) == ["avx2", "portable"]
    cpuinfo.write_text("flags\t\t: fpu sse2\n")
    assert supported_sets(cpuinfo) == ["portable"]
    assert supported_sets(tmp_path / "none") == ["portable"]


def test_instruction_sets_of_arm_are_chosen_by_what_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines as Linux writes them for Cortex-A72, Neoverse N1 and Neoverse N2."""
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    cpuinfo = tmp_path / "cpuinfo"
    features = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
    expected = ["neon", "portable"]
    assert supported_sets(tmp_path / "none") == expected
    more = ["", " atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs", " sve i8mm bf16 dgh rng"]
    for name, added in zip(["neon", "neon-dotprod", "neon-i8mm"], more, strict=True):
        features += added
        expected = [name, *expected] if name not in expected else expected
        cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\n")
        assert supported_sets(cpuinfo) == expected
    with cpuinfo.open("a") as file:
        file.write("\nprocessor\t: 1\nFeatures\t: fp asimd atomics asimddp\n")
    assert supported_sets(cpuinfo) == ["neon-dotprod", "neon", "portable"], "a smaller core lacks the rest"


@pytest.mark.parametrize("command", ["zig c++", "python3 -m ziglang c++"])
def test_zig_is_told_of_extensions_in_its_own_words(command: str) -> None:
    flags = ("-march=armv8.2-a+dotprod+i8mm", "-DX")
    assert building._spelled(flags, Compiler(("g++",), "")) == flags
    zig = building._spelled(flags, Compiler(tuple(command.split()), ""))
    assert zig == ("-mcpu=generic+v8_2a+dotprod+i8mm", "-DX")


@pytest.mark.parametrize("name", ["avx1024", building.EMULATED_TILES])
def test_an_instruction_set_that_is_not_there_is_not_taken(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor one that is for tests alone."""
    monkeypatch.setenv("OCTAVO_NATIVE_ISA", name)
    with caplog.at_level(logging.WARNING, "octavo.native"):
        found = loading._load()
    assert f"OCTAVO_NATIVE_ISA={name} is ignored" in caplog.text
    if COMPILER is not None:
        assert found is not None
        assert found.isa == supported_sets()[0]


def test_the_sources_are_part_of_the_package() -> None:
    patterns = layout().DATA["engine"]
    names = [str(path.relative_to(ROOT / "engine")) for path in building.SOURCES.iterdir()]
    assert len(names) > 3
    for name in names:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


@needs_compiler
@pytest.mark.usefixtures("quick")
def test_all_instruction_sets_are_made_ahead(tmp_path: Path) -> None:
    """As the container's build does: with the standard library alone."""
    script = str(ROOT / "engine/backends/native/build.py")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in libraries(tmp_path)} == {file_name(name) for name in instruction_sets()}


@needs_compiler
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are included that no other test loads."""
    assert COMPILER is not None
    if name in set(supported_sets()) - STAND_INS.keys():
        native.load(name)
        path = cache_folder("native") / file_name(name, COMPILER)
    else:
        monkeypatch.setattr(building, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in building._FLAGS))
        path = tmp_path / "library.so"
        build(name, COMPILER, path)
    assert (b"octavo_gemm_amx_int8" in path.read_bytes()) or name != "avx512", "no matrix tiles"
