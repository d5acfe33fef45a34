"""The one build step which pyproject.toml cannot say: compile the programs in C.

They are no Python extensions. `deltacr/interpreter.c` is a static ELF file without libc, which
the engine starts as template and as PID 1 of every sandbox; `deltacr/nat.c` is an ordinary
program, which carries the packets of `network="nat"`; `linux/bulk.c` is a library that ctypes
loads. So we compile them with plain `cc` and ship the results as package data next to their
sources. A wheel is therefore bound to a platform, but
to no Python version (`py3-none-linux_x86_64`).

`pip install .` puts the results into the wheel, `pip install -e .` and
`python setup.py build_interpreter --inplace` put them into `src/`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = Path("deltabox")
SOURCES = Path("src") / PACKAGE

FLAGS = ["-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-Werror"]
BARE = [
    "-ffreestanding",
    "-fno-builtin",
    "-fno-stack-protector",
    # The code copies itself elsewhere: nothing in it may depend on where it was linked.
    "-fpie",
    "-fno-jump-tables",
    # It runs with the registers of no one, and must not need the vector state saved.
    "-mgeneral-regs-only",
    "-fno-asynchronous-unwind-tables",
    "-fcf-protection=none",
    "-nostdlib",
    "-static",
    "-Wl,--build-id=none",
    "-Wl,-z,noexecstack",
    "-Wl,-z,norelro",
    # Below the range that interpreter.c keeps, so that the seed can unmap it in one call.
    "-Wl,-Ttext-segment=0x7000000000",
]


HARDENED = ["-fPIE", "-pie", "-fstack-protector-strong", "-Wl,-z,relro,-z,now"]

# program: (sources, compiler flags, libraries)
PROGRAMS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "deltacr/_interpreter": (["deltacr/interpreter.c"], BARE, []),
    "deltacr/_nat": (["deltacr/nat.c"], HARDENED, ["-ldl"]),
    "linux/_bulk": (
        ["linux/bulk.c", "linux/ask.c", "linux/stop.c", "linux/beside.c", "linux/pages.c"],
        ["-fPIC", "-shared", "-pthread"],
        [],
    ),
}


def compile_program(directory: Path, program: str) -> None:
    """Compile a program into `directory` with `$CC` (default `cc`); replaces it atomically."""
    sources, flags, libraries = PROGRAMS[program]
    output = directory / program
    compiler = os.environ.get("CC", "cc").split()
    if shutil.which(compiler[0]) is None:
        sys.exit(f"deltabox needs a C compiler to build: {compiler[0]!r} is not installed")
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(f"{output.name}.{os.getpid()}")
    command = [
        *compiler,
        *FLAGS,
        *flags,
        "-o",
        str(fresh),
        *(str(SOURCES / s) for s in sources),
        *libraries,
    ]
    print(" ".join(command), flush=True)
    try:
        subprocess.run(command, check=True)
        fresh.chmod(0o755)
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)


class BuildInterpreter(Command):
    """`build_interpreter`: a sub-command of `build`, after setuptools' SubCommand protocol."""

    description = "compile the parts in C"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        ("build-lib=", None, "directory to build into"),
        ("inplace", "i", "put the programs beside their sources"),
    ]
    boolean_options: ClassVar[list[str]] = ["inplace"]

    build_lib: str | None
    editable_mode: bool
    inplace: bool

    def initialize_options(self) -> None:
        self.build_lib = None
        self.editable_mode = False
        self.inplace = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        for program in PROGRAMS:
            compile_program(self._directory(), program)

    def _directory(self) -> Path:
        if self.inplace or self.editable_mode:
            return SOURCES
        assert self.build_lib is not None
        return Path(self.build_lib) / PACKAGE

    def get_source_files(self) -> list[str]:
        return sorted(str(p) for p in SOURCES.glob("*/*.[ch]"))

    def get_outputs(self) -> list[str]:
        return [str(self._directory() / program) for program in PROGRAMS]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_interpreter", None)]


class Wheel(bdist_wheel):
    """A wheel of this platform, for any Python 3."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_interpreter": BuildInterpreter, "bdist_wheel": Wheel},
)
