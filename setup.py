"""The layout of wheels: `engine`, `server` and `cli` become `octavo.engine`, `octavo.server` and `octavo.cli`, since
those names are common ones. In a checkout, and where that is installed to be edited, they stay as they are."""

from __future__ import annotations

import ast
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

OURS = ("engine", "server", "cli")
MACHINES = ("x86_64", "aarch64")
KERNELS = os.environ.get("OCTAVO_KERNELS", "")  # of MACHINES: a wheel that needs no compiler there


def moved(source: str, name: str) -> str:
    """A module's source, whose imports of our packages name them in `octavo`.

    Raises:
        ValueError: an import binds one of these names themselves, so that uses of it would have to change, too.
    """
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in OURS:
            at = node.lineno - 1
            before, word, rest = lines[at].partition(f"from {node.module}")
            if not word:
                raise ValueError(f"{name}:{node.lineno}: the module's name must stand beside 'from'")
            lines[at] = f"{before}from octavo.{node.module}{rest}"
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in OURS for alias in node.names):
            raise ValueError(f"{name}:{node.lineno}: write 'from package import module'")
    return "\n".join(lines)


def platform_tag(kernels: str) -> str:
    """Of a wheel with compiled kernels: they need the C library of manylinux_2_28 and nothing of Python."""
    if kernels not in MACHINES:
        raise SystemExit(f"OCTAVO_KERNELS is {kernels!r}; kernels are compiled for {', '.join(MACHINES)}, on Linux")
    return f"manylinux_2_28_{kernels}"


def compile_kernels(kernels: str, package: Path) -> None:
    """Compile all instruction sets of a kind of machine, from any, by Zig's C++ compiler."""
    spec = spec_from_file_location("octavo_build", Path("engine/backends/native/build.py").absolute())
    assert spec is not None
    assert spec.loader is not None
    build = module_from_spec(spec)
    sys.modules[spec.name] = build  # dataclasses look it up
    spec.loader.exec_module(build)
    build.machine = lambda: kernels
    command = (sys.executable, "-m", "ziglang", "c++", "-target", f"{kernels}-linux-gnu.2.28", "-g0")
    for name in build.instruction_sets():
        build.build(
            name, build.Compiler(command, ""), package / "engine/backends/native/prebuilt" / build.file_name(name)
        )


class BuildMoved(build_py):
    """Copies modules as `moved` makes them, without what is for checkouts alone, and compiles kernels if asked to."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [each for each in found if self.editable_mode or each[:2] != ("octavo", "checkout")]

    def build_module(self, module: str, module_file: str, package: str | list[str]) -> tuple[str, bool]:
        target, copied = super().build_module(module, module_file, package)
        if not self.editable_mode:
            Path(target).write_text(moved(Path(module_file).read_text("utf-8"), module_file), "utf-8")
        return target, copied

    def run(self) -> None:
        super().run()
        if KERNELS and not self.editable_mode:
            compile_kernels(KERNELS, Path(self.build_lib) / "octavo")


class Compiled(Distribution):
    """Tells whether the wheel is of one kind of machine."""

    def has_ext_modules(self) -> bool:
        return bool(KERNELS)


class TagWheel(bdist_wheel):
    """Says what machine compiled kernels are for."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", platform_tag(KERNELS)) if KERNELS else super().get_tag()


def layout() -> dict[str, object]:
    """What packages there are, and where they lie."""
    inner = find_packages(include=[pattern for name in OURS for pattern in (name, f"{name}.*")])
    if "editable_wheel" in sys.argv:
        return {"packages": ["octavo", *inner]}
    return {
        "packages": ["octavo", *(f"octavo.{package}" for package in inner)],
        "package_dir": {f"octavo.{name}": name for name in OURS},
    }


DATA = {
    "engine": ["py.typed", "backends/native/src/*", "backends/native/prebuilt/*", "text/chat_templates/*.jinja"],
    "server": ["py.typed", "answering/*_formats/*.json", "demo/*/*", "playground/*", "playground/vendor/*"],
    "cli": ["py.typed", "commands/families.json"],
}

if __name__ == "__main__":
    prefix = "" if "editable_wheel" in sys.argv else "octavo."
    setup(
        **layout(),
        package_data={f"{prefix}{name}": files for name, files in DATA.items()},
        distclass=Compiled,
        setup_requires=["ziglang==0.17.1"] if KERNELS else [],
        cmdclass={"build_py": BuildMoved, "bdist_wheel": TagWheel},
    )
