#!/usr/bin/env python3
"""Sets Octavo up in .venv and runs it, with the standard library alone: a fresh machine needs only Python.

    python3 tools/setup.py serve [ARGS]     set up, then run `octavo serve ARGS`
    python3 tools/setup.py test [ARGS]      set up, then run `pytest ARGS`; without ARGS all but the slow tests
    python3 tools/setup.py test-all         set up with Ray (500 MB), then run all tests; ten failures end it
    python3 tools/setup.py test-real        set up with real models (420 MB), then run the tests that need them
    python3 tools/setup.py test-examples    set up, then run every example against a started server
    python3 tools/setup.py test-browser     set up, then try the playground in a browser (needs Node.js and Chromium)
    python3 tools/setup.py test-agents      set up, then try coding agents (needs Node.js and npm; 2.5 GB)
    python3 tools/setup.py lint             set up, then run ruff and mypy
    python3 tools/setup.py docs             set up, then write docs/families.md's table
    python3 tools/setup.py docs-site        set up, then build the documentation's site in build/site
    python3 tools/setup.py lock             set up, then write requirements/*.lock
    python3 tools/setup.py release          set up, then make what is published, in dist/
    python3 tools/setup.py install          set up for all of these

It is safe to run again at any moment: a stamp, written last, says what was completed, and a virtual environment
that an interruption left damaged is made again. TORCH_INDEX=URL takes torch from that package index.
"""

import sys

MINIMUM = (3, 11)


def version_problem(version: "tuple[int, ...]", minimum: "tuple[int, ...]" = MINIMUM) -> str:
    """A message for someone whose Python is too old; empty if it is not."""
    if tuple(version[:2]) >= minimum:
        return ""
    return "Octavo needs Python {}.{} or newer, and this is Python {}.{} ({}). Run it with a newer one: {}".format(
        minimum[0],
        minimum[1],
        version[0],
        version[1],
        sys.executable,
        "make PYTHON=python3.12 serve, or python3.12 tools/setup.py serve",
    )


# Before anything that an older Python could not even read or import.
if version_problem(sys.version_info[:2]):
    sys.exit(version_problem(sys.version_info[:2]))

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from early_kernels import compiling
from torch_source import PUBLIC_CPU_INDEX, Offer, SetupError, ask_pip, choose_torch, nvidia_driver, pinned_version

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "octavo-setup.json"
CLIENTS = Path("tests") / "clients"  # other clients' versions, which the tests run beside those of the constraints
SCALE = Path("tests") / "scale"  # Ray, which only its tests see
REAL = Path("tests") / "real"  # published models, likewise
# On several cores; a file's tests stay together: they share what is costly to make.
ALL_TESTS = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
# What `pytest` is told where no ARGS are given.
TESTS: dict[str, tuple[str, ...]] = {
    "test": (*ALL_TESTS, "-m", "not slow"),
    "test-all": (*ALL_TESTS, "-m", "not exhaustive", "--maxfail", "10"),
    "test-real": ("tests/pooled/test_real_embeddings.py", "tests/model/gguf/test_real_gguf.py"),
    "test-examples": ("tests/tooling/docs/test_examples.py",),
    "test-browser": ("tests/browser/test_browser.py",),
    "test-agents": ("tests/clients/test_agents.py",),
}
# What Node.js needs for these: a package-lock.json says it.
NODE_PACKAGES = {"test-browser": Path("tests") / "browser", "test-agents": CLIENTS / "agents"}
WINDOWS = os.name == "nt"
EXTRAS: dict[str, frozenset[str]] = {
    "serve": frozenset(),
    "test": frozenset({"test"}),
    "test-all": frozenset({"test"}),
    "test-real": frozenset({"test", "real-model"}),
    "test-examples": frozenset({"test"}),
    "test-browser": frozenset({"test"}),
    "test-agents": frozenset({"test"}),
    "lint": frozenset({"lint"}),
    "docs": frozenset(),
    "docs-site": frozenset({"docs"}),
    "lock": frozenset({"release"}),
    "release": frozenset({"release"}),
    "install": frozenset({"test", "lint"}),
}


def say(text: str) -> None:
    print(f"[octavo] {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what is done already


def stamp_key(root: Path, python: str, torch_label: str) -> str:
    """Changes when what has to be installed changes."""
    parts = [python, torch_label]
    files = [root / "pyproject.toml", root / "constraints.txt", *sorted((root / CLIENTS).glob("*.txt"))]
    parts += [file.read_text(encoding="utf-8") for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def torch_label(index: str | None, driver: bool, pin: str, previous: str) -> str:
    """Names the choice of torch. An index once chosen stays, so that a later plain run does not undo it."""
    if index:
        return f"{pin} index {index}"
    if previous.startswith(f"{pin} index "):
        return previous
    return f"{pin} {'default' if driver else 'cpu'}"


def index_of(label: str) -> str | None:
    return label.split(" index ", 1)[1] if " index " in label else None


def read_stamp(path: Path) -> dict[str, Any]:
    """The stamp's content, empty where there is none or it is unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_stamp(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(draft, path)


def half_installed(site_packages: Path) -> list[str]:
    """Packages that pip was writing, or removing, when it was stopped: it writes RECORD last."""
    found = [folder.name for folder in site_packages.glob("*.dist-info") if not (folder / "RECORD").exists()]
    return sorted(found + [left.name for left in site_packages.glob("~*")])


def decide(stamp: dict[str, Any], *, damage: str, key: str, root: str, wanted: frozenset[str]) -> str:
    """The next action for the virtual environment: "ready", "install" into it, or "build" it anew."""
    if damage or stamp.get("root", root) != root:
        return "build"
    if stamp.get("key") == key and wanted <= set(stamp.get("extras", [])):
        return "ready"
    return "install"


def program(name: str) -> Path:
    return VENV / ("Scripts" if WINDOWS else "bin") / (name + (".exe" if WINDOWS else ""))


PIP = (str(program("python")), "-m", "pip", "--disable-pip-version-check", "--no-input")


def pip_environment() -> dict[str, str]:
    """A user's `pip --user` default would break installs into a virtual environment."""
    return {**os.environ, "PIP_USER": "0"}


def venv_damage() -> str:
    """Why the virtual environment cannot be used as it is; empty where it can."""
    if not VENV.exists():
        return "there is none yet"
    # pip without its RECORD is a pip that was being installed.
    code = (
        "import sys, sysconfig, importlib.metadata as m; assert m.distribution('pip').read_text('RECORD'); "
        "print('%d.%d' % sys.version_info[:2], sysconfig.get_path('purelib'), sep='|')"
    )
    try:
        answer = subprocess.run(
            [program("python"), "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its Python does not run ({error})"
    if answer.returncode != 0:
        return "its Python or its pip does not work"
    version, site_packages = answer.stdout.strip().split("|", 1)
    if version != "{}.{}".format(*sys.version_info[:2]):
        return f"it has Python {version}, and this is {sys.version_info[0]}.{sys.version_info[1]}"
    broken = half_installed(Path(site_packages))
    if broken:
        return f"an interruption left {', '.join(broken[:3])} half installed"
    return ""


# ---------------------------------------------------------------- doing it


def stop_on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


@contextlib.contextmanager
def only_one() -> Iterator[int | None]:
    """Holds a lock on the checkout, which pip inherits: a set-up that was killed keeps it until its pip has ended."""
    try:
        import fcntl
    except ImportError:  # no such thing on Windows
        yield None
        return
    with (ROOT / "pyproject.toml").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work in this checkout: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            say(f"no lock is to be had here ({error}): going on without")
        yield file.fileno()


def run(command: Sequence[str], lock: int | None, problem: str) -> None:
    """Runs one step with its output shown, and ends it together with this script."""
    keep = () if lock is None else (lock,)
    process = subprocess.Popen(command, cwd=ROOT, env=pip_environment(), pass_fds=keep)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code != 0:
        raise SetupError(f"{problem} (exit status {code}; its own words are above). It is safe to run this again.")


def make_venv(lock: int | None) -> None:
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(
            f"{sys.executable} lacks the module {missing[0]}, so it cannot make a virtual environment with pip. "
            f"On Debian and Ubuntu: apt-get install {package} (or python3-venv). Then run this again."
        )
    if VENV.is_symlink():
        VENV.unlink()
    elif VENV.exists():
        STAMP.unlink(missing_ok=True)  # first: what is being removed must never look complete
        shutil.rmtree(VENV)
    run([sys.executable, "-m", "venv", str(VENV)], lock, f"could not make {VENV}")


def install_torch(pin: str, label: str, driver: bool, lock: int | None) -> None:
    def ask(seconds: float, *options: str) -> Offer | None:
        return ask_pip(PIP, pip_environment(), pin, options, seconds)

    source = choose_torch(
        pin,
        index=index_of(label),
        driver=driver,
        system=platform.system(),
        configured=lambda: ask(120),
        public=lambda: ask(15, "--index-url", PUBLIC_CPU_INDEX, "--timeout", "5", "--retries", "0"),
    )
    say(source.why)
    # Forced: another build of the same version would count as installed. What torch needs comes with octavo,
    # from pip's configured sources and not from an index that is meant for torch alone.
    command = [*PIP, "install", "--force-reinstall", "--no-deps", *source.options, source.requirement]
    run(command, lock, f"could not install {source.requirement}")


def install_clients(root: Path, venv: Path, lock: int | None, folder: Path = CLIENTS) -> None:
    """Each list of pins in `folder` into a folder of its own, .venv/clients/NAME, which only tests that ask for it
    see."""
    for pins in sorted((root / folder).glob("*.txt")):
        target = venv / "clients" / pins.stem
        done = target / "octavo-pins.txt"  # written last: what is complete is left alone
        if done.exists() and done.read_bytes() == pins.read_bytes():
            continue
        shutil.rmtree(target, ignore_errors=True)
        install = [*PIP, "install", "--no-deps", "--target", str(target), "--requirement", str(pins)]
        run(install, lock, f"could not install {pins.relative_to(root)}")
        shutil.copyfile(pins, done)


def install_node_packages(folder: Path) -> None:
    """Install the packages of a folder's package-lock.json into that folder. A stamp, written last, marks the end."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        raise SetupError(f"{' and '.join(missing)} not found. On Debian and Ubuntu: apt-get install nodejs npm.")
    pins, done = folder / "package-lock.json", folder / "node_modules" / "octavo-pins.json"
    if done.exists() and done.read_bytes() == pins.read_bytes():
        return
    say(f"what {folder.relative_to(ROOT)} needs: npm ci")
    run([str(shutil.which("npm")), "ci", "--no-audit", "--no-fund", "--prefix", str(folder)], None, "npm ci failed")
    shutil.copyfile(pins, done)


def set_up(command: str) -> None:
    """Brings .venv to what `command` needs. Quick when it is there already."""
    pin = pinned_version((ROOT / "constraints.txt").read_text(encoding="utf-8"), "torch")
    with only_one() as lock, contextlib.ExitStack() as beside:
        stamp, driver, wanted = read_stamp(STAMP), nvidia_driver(), EXTRAS[command]
        label = torch_label(os.environ.get("TORCH_INDEX"), driver, pin, str(stamp.get("torch", "")))
        python = "{}.{}".format(*sys.version_info[:2])
        key = stamp_key(ROOT, python, label)
        damage = venv_damage()
        step = decide(stamp, damage=damage, key=key, root=str(ROOT), wanted=wanted)
        if step == "ready" and program("octavo").exists():
            return
        if command not in ("lint", "docs", "lock", "release"):
            beside.enter_context(compiling(ROOT))
        if step == "build":
            say(f"1/3 making {VENV}" + (f" anew: {damage or 'the checkout has moved'}" if VENV.exists() else ""))
            make_venv(lock)
            stamp = {}
        wanted |= set(stamp.get("extras", []))
        # The stamp says what is complete; until the end that is torch alone.
        if stamp.get("torch") != label:
            write_stamp(STAMP, {"root": str(ROOT)})
            say(f"2/3 torch {pin}: choosing the build")
            install_torch(pin, label, driver, lock)
        write_stamp(STAMP, {"root": str(ROOT), "torch": label, "extras": sorted(wanted)})
        say("3/3 octavo and what it needs" + (f", with {', '.join(sorted(wanted))}" if wanted else ""))
        what = "." + (f"[{','.join(sorted(wanted))}]" if wanted else "")
        install = [*PIP, "install", "--constraint", "constraints.txt", "--editable", what]
        run(install, lock, "could not install octavo")
        if "test" in wanted:
            install_clients(ROOT, VENV, lock)
        write_stamp(STAMP, {"root": str(ROOT), "torch": label, "extras": sorted(wanted), "key": key})
        say(f"set up: {program('octavo')}")


def become(command: Sequence[str]) -> NoReturn:
    """Gives this process to the command, so that signals and the exit status are its own."""
    if WINDOWS:
        sys.exit(subprocess.call(command))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(command[0], list(command))


def lint() -> int:
    python = str(program("python"))
    checks = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])
    codes = []
    for check in checks:
        say(" ".join(check))
        codes.append(subprocess.call([python, "-m", *check], cwd=ROOT))
    return next((code for code in codes if code), 0)


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    command, extra = arguments[0], list(arguments[1:])
    if command not in EXTRAS:
        say(f"unknown command {command!r}; known: {', '.join(EXTRAS)} (see --help)")
        return 2
    if extra and command in ("lint", "docs", "docs-site", "install", "lock"):
        say(f"{command} takes no arguments, got {' '.join(extra)}")
        return 2
    signal.signal(signal.SIGTERM, stop_on_sigterm)
    try:
        set_up(command)
        if command in NODE_PACKAGES:
            install_node_packages(ROOT / NODE_PACKAGES[command])
        if beside := {"test-all": SCALE, "test-real": REAL, "test-agents": CLIENTS / "agents"}.get(command):
            with only_one() as lock:
                install_clients(ROOT, VENV, lock, beside)
        if command == "serve":
            become([str(program("octavo")), "serve", *extra])
        if command in TESTS:
            os.chdir(ROOT)
            become([str(program("python")), "-m", "pytest", *(extra or TESTS[command])])
        if command in ("lock", "release"):
            become([str(program("python")), str(ROOT / "tools" / f"{command}.py"), *extra])
        if command == "docs":
            become([str(program("python")), str(ROOT / "tools" / "families_table.py")])
        if command == "docs-site":
            os.chdir(ROOT)
            become([str(program("python")), "-m", "mkdocs", "build", "--strict"])
        return lint() if command == "lint" else 0
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; it is safe to run this again")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
