"""The rules of the house: which packages import which, what computes, and what reads the wall clock."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    "engine.errors": 0,
    "engine.audio": 1,
    "engine.config": 1,
    "engine.configs": 1,
    "engine.host": 1,
    "engine.interface": 1,
    "engine.backends": 2,
    "engine.scheduling": 2,
    "engine.text": 2,
    "engine.images": 3,
    "engine.model": 3,
    "engine.disk": 4,
    "engine.execution": 4,
    "engine.pooled": 4,
    "engine.engine": 5,
    "engine.inspection": 5,
    "engine.process": 5,
    "engine.stepping": 5,
    "engine.offline": 6,
    "engine": 7,
    "server": 8,
    "cli": 9,
}
PACKAGES = ("engine", "server", "cli")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(path for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
MODULES = {module_of(path) for path in FILES}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """All modules a file imports, wherever in the file; `from package import module` gives the module."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            module = node.module or ""
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield name if name in MODULES else module


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    while module not in LAYERS:
        assert "." in module, f"{module} has no place in the layers: give it one in LAYERS"
        module = module.rpartition(".")[0]
        # A new file directly under engine/ must not pass as the package itself.
        assert module != "engine", "a module under engine/ has no place in the layers: give it one in LAYERS"
    return LAYERS[module]


def each_file(*packages: str, but: tuple[str, ...] = ()) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes a check of one file the test of all files of these packages, which names each that fails."""
    chosen = [
        path
        for path in FILES
        if any(below(module_of(path), package) for package in packages)
        and not any(below(module_of(path), package) for package in but)
    ]
    assert chosen

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            problems = []
            for path in chosen:
                try:
                    check(path)
                except AssertionError as problem:
                    problems.append(f"{path.relative_to(ROOT)}: {problem}")
            assert not problems, "\n".join(problems)

        test.__doc__ = check.__doc__
        return test

    return decorate


def offenders(path: Path, *forbidden: str) -> list[str]:
    return [name for name in imports(path) if any(below(name, package) for package in forbidden)]


@each_file(*PACKAGES)
def test_imports_run_downwards(path: Path) -> None:
    own = module_of(path)
    for name in imports(path):
        if name.partition(".")[0] in PACKAGES:
            same_package = own.rpartition(".")[0] == name.rpartition(".")[0] and own.count(".") > 1
            inside = below(own, name) or below(name, own) or same_package
            if not inside:
                assert layer(name) <= layer(own), f"{own} must not import {name}: it is above"


def test_no_circles() -> None:
    """What a file imports never imports that file, whatever for and by however many others. A package's own file, which
    collects what is in it, does not count."""
    own_files = {module_of(path) for path in FILES if path.name == "__init__.py"}
    edges = {module_of(path): {*imports(path)} & MODULES - own_files for path in FILES}
    for start in edges.keys() - own_files:
        reached, new = set(), edges[start]
        while new:
            assert start not in new, f"{start} is imported by {', '.join(m for m in reached if start in edges[m])}"
            reached |= new
            new = set().union(*(edges[module] for module in new)) - reached


@each_file("engine.scheduling")
def test_scheduling_knows_no_torch_and_no_model(path: Path) -> None:
    assert not offenders(path, "torch", "transformers", "engine.backends.attention", "engine.model", "engine.execution")


@each_file("engine.model", "engine.backends.attention")
def test_the_other_tower_knows_no_scheduling(path: Path) -> None:
    assert not offenders(path, "engine.scheduling", "engine.execution")


@each_file("engine.backends.attention")
def test_attention_knows_no_model(path: Path) -> None:
    assert not offenders(path, "engine.model", "transformers")


@each_file("engine")
def test_the_engine_knows_no_web(path: Path) -> None:
    assert not offenders(
        path,
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "prometheus_client",
        "structlog",
        "httpx",
        "requests",
        "aiohttp",
        "server",
        "cli",
    )


@each_file("server", "cli")
def test_server_and_command_line_use_some_doors_of_the_engine(path: Path) -> None:
    inner = [name for name in imports(path) if below(name, "engine")]
    assert set(inner) <= {
        "engine",
        "engine.audio",
        "engine.audio.decoding",
        "engine.process.client",
        "engine.process.known",
        "engine.process.predict",
        "engine.host.children",
        "engine.host.frames",
        "engine.host.gpus",
        "engine.host.loading",
        "engine.host.logs",
        "engine.host.resident",
        "engine.images",
        "engine.pooled",
        "engine.pooled.vectors",
        "engine.text.conversations",
        "engine.text.fitting",
        "engine.text.grammar_tokens",
        "engine.text.grammars",
        "engine.text.image_tasks",
        "engine.text.pictures",
        "engine.text.processor",
        "engine.text.writing",
    }


# Counting the signs of a body is no model's work, and transformers parses answers by templates.
COUNTS, PARSES = "server.api.structure", "server.answering.parsing"


@each_file("server", "cli", but=(COUNTS, PARSES))
def test_server_and_command_line_compute_nothing(path: Path) -> None:
    assert not offenders(path, "torch", "transformers", "safetensors", "numpy")


# What reads or writes JSON, or packs values, is no message; workers have messages of their own.
MESSENGERS = (
    "engine.process.main", "engine.process.connection", "engine.process.messages", "engine.process.runner",
    "engine.process.kv_events",
    "engine.pooled.vectors", "server.answering.packing", "server.api.reading", "server.processes.messages",
    "server.response_store", "server.conversation_store",
    "server.workers.child", "server.workers.frames", "server.workers.images", "server.workers.pool",
    "server.workers.sound", "server.workers.templates", "server.workers.texts",
)  # fmt: skip


@each_file(*PACKAGES, but=MESSENGERS)
def test_messages_between_processes_have_one_place(path: Path) -> None:
    assert not offenders(path, "zmq", "msgspec")


@each_file("engine")
def test_transformers_computes_nothing_for_us(path: Path) -> None:
    """No call of transformers' generate, and none of its model classes. (`LLM.generate` and the client's are
    ours; nothing under engine/ calls a method of that name, except on such a client.)"""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "generate", f"{path}:{node.lineno} calls .generate()"
        names = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and below(node.module or "", "transformers"):
            names = [alias.name for alias in node.names]
            assert not below(node.module or "", "transformers.models"), f"{path}:{node.lineno}"
            assert not below(node.module or "", "transformers.generation"), f"{path}:{node.lineno}"
        for name in names:
            is_model = name.startswith("AutoModel") or name.endswith(
                ("ForCausalLM", "ForConditionalGeneration", "ForSeq2SeqLM", "PreTrainedModel", "GenerationMixin")
            )
            assert not is_model, f"{path}:{getattr(node, 'lineno', '?')} uses {name}"


def runs_of_words(name: str) -> set[str]:
    """Each word of a name, and neighbouring ones joined: an "mpt" is no part of "new_empty"."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return {"".join(words[i:j]).lower() for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def test_words_of_names() -> None:
    assert "mpt" not in runs_of_words("new_empty")
    for name, family in (
        ("Gemma2Norm", "gemma2"),
        ("is_llama", "llama"),
        ("GPTBigCodeBlock", "gptbigcode"),
        ("T5", "t5"),
    ):
        assert family in runs_of_words(name)


@each_file("engine.model", "engine.backends.attention", but=("engine.model.families", "engine.model.gguf"))
def test_no_family_is_named_in_the_transformer(path: Path) -> None:
    """Families live in families/, and what llama.cpp calls them in gguf/; the parts and the stack know none of them."""
    listed = json.loads((ROOT / "cli/commands/families.json").read_text(encoding="utf-8"))
    names = (name for family in listed for name in family["architectures"])
    families = {re.sub(r"(For[A-Z].*|LMHeadModel|MTModel|Model)$", "", name).lower() for name in names}
    assert {"llama", "gpt2", "bert", "t5"} <= families
    families -= {"clip", "hf_colbert"}  # also a setting of attention, and the name in ColBERT's files
    words = {
        node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    }
    names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    for family in families:
        assert not [word for word in words - docstrings if word.lower() == family]
        assert not [name for name in names if family.replace("_", "") in runs_of_words(name)]


PROBE = """
import sys
import {modules}
loaded = sorted(name for name in {forbidden!r} if name in sys.modules)
print(",".join(loaded))
"""


def loaded(modules: list[str], forbidden: list[str]) -> str:
    code = PROBE.format(modules=", ".join(modules), forbidden=forbidden)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_every_module_of_scheduling_runs_without_torch() -> None:
    """What the files import themselves is half of it: what those import counts, too. `engine/__init__` is
    imported from outside and holds the engine, so the package is made without running it."""
    scheduling = sorted(module for module in MODULES if below(module, "engine.scheduling"))
    code = f"""
import importlib, sys, types
package = types.ModuleType("engine")
package.__path__ = [{str(ROOT / "engine")!r}]
sys.modules["engine"] = package
for name in {scheduling!r}:
    importlib.import_module(name)
assert "engine.scheduling.scheduler" in sys.modules
print(",".join(name for name in ("torch", "transformers", "fastapi", "pydantic") if name in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_the_engine_needs_no_package_of_the_server() -> None:
    """`LLM` runs where nothing is installed that only the server and its messages need."""
    absent = ["fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "zmq", "msgspec"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # each fails to be imported from now on
import engine.offline.llm
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_the_engine_loads_no_web_framework() -> None:
    assert loaded(["engine", "engine.process.client"], ["fastapi", "starlette", "uvicorn", "prometheus_client"]) == ""


def test_only_dates_are_read_from_the_wall_clock() -> None:
    """All that waits or measures goes by a clock that does not jump."""
    dates = {
        "engine/model/gguf/folder.py",  # ages of files
        "engine/model/quantised_cache.py",
        "engine/backends/native/loading.py",
        "engine/process/kv_events.py",  # when events were published
        "server/answering/answer.py",  # `created`
        "server/answering/pooling.py",
        "server/answering/response_events.py",  # `completed_at`
        "server/app.py",
        "server/models/served.py",  # when models were loaded and will be unloaded
        "cli/talking/served.py",
        "server/metrics/info.py",  # when it was started
        "server/processes/service.py",
        "server/tracing/request.py",  # when a span began
    }
    found = {
        str(path.relative_to(ROOT))
        for part in PACKAGES
        for path in (ROOT / part).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(", path.read_text())
    }
    assert found == dates


@functools.cache
def top_names(path: Path) -> set[str]:
    """The names that a module defines or imports, wherever in it."""
    names = set[str]()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_benchmarks_import_names_that_exist() -> None:
    """From each other; no test runs most of them."""
    missing, count = [], 0
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            module = ROOT / "benchmarks" / f"{node.module.replace('.', '/')}.py"
            if module.is_file():
                count += 1
                lacking = sorted({alias.name for alias in node.names} - top_names(module))
                missing += [f"{path.name}: {node.module}.{name}" for name in lacking]
    assert count > 20
    assert missing == []
