"""What developers keep a machine busy with: a C project, packages to install, a library's tests.

All of it comes from files, because a sandbox reaches no network, and prints the same every time.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile

from deltabox import Sandbox
from deltabox.demo import library

HOME = "/root/work"

_MAKEFILE = """
CFLAGS = -O1
parts = $(patsubst %.c,%.o,$(wildcard *.c))
program: $(parts)
\tcc -o $@ $^
clean:
\trm -f program *.o
.PHONY: clean
"""

# A build back end of its own (PEP 517), so that building needs nothing but pip.
_BACKEND = """
import base64, hashlib, os, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    name = "NAME-VERSION-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        for path in sorted(os.listdir("NAME")):
            wheel.write(os.path.join("NAME", path))
        about = "NAME-VERSION.dist-info/"
        wheel.write("PKG-INFO", about + "METADATA")
        wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(about + "RECORD", "")
    return name
"""


def _modules(name: str, version: str, count: int) -> dict[str, str]:
    modules = {f"{name}/part{n}.py": f"VALUE = {n}\nTEXT = {'x' * 500!r}\n" for n in range(count)}
    parts = "".join(f"from . import part{n}\n" for n in range(count))
    total = " + ".join(["0", *(f"part{n}.VALUE" for n in range(count))])
    modules[f"{name}/__init__.py"] = f"{parts}VERSION = {version!r}\nTOTAL = {total}\n"
    return modules


def wheel(name: str, version: str, modules: int) -> tuple[str, bytes]:
    """A wheel's file name and content."""
    about = f"{name}-{version}.dist-info"
    files = _modules(name, version, modules)
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record += f"{path},sha256={digest.rstrip('=')},{len(text)}\n"
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for path, text in files.items():
            out.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", packed.getvalue()


def source(name: str, version: str, modules: int) -> tuple[str, bytes]:
    """A source distribution's file name and content."""
    files = _modules(name, version, modules)
    files["PKG-INFO"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files["backend.py"] = _BACKEND.replace("NAME", name).replace("VERSION", version)
    files["pyproject.toml"] = (
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size, entry.mtime = len(text), 1_000_000_000
            out.addfile(entry, io.BytesIO(text.encode()))
    return f"{name}-{version}.tar.gz", packed.getvalue()


def c_project(sandbox: Sandbox, directory: str, *, files: int, functions: int) -> None:
    """A C project for make: each file takes the compiler a moment; `program` prints a number."""
    sandbox.run(["mkdir", "-p", directory], check=True)
    for n in range(files):
        body = "".join(
            f"long f{n}_{i}(long x) {{ for (long k = 0; k < {i + 2}; k++) x = x * 31 + k % {n + 3};"
            " return x & 0xffffff; }\n"
            for i in range(functions)
        )
        calls = " + ".join(f"f{n}_{i}(x + {i})" for i in range(functions))
        sandbox.files.write_text(
            f"{directory}/part{n}.c", f"{body}long part{n}(long x) {{ return {calls}; }}\n"
        )
    sandbox.files.write_text(
        f"{directory}/main.c",
        "#include <stdio.h>\n"
        + "".join(f"long part{n}(long);\n" for n in range(files))
        + "int main(void) { long sum = 0;\n"
        + "".join(f"sum = sum * 7 % 1000003 + part{n}(sum);\n" for n in range(files))
        + 'printf("%ld\\n", sum); return 0; }\n',
    )
    sandbox.files.write_text(f"{directory}/Makefile", _MAKEFILE)


def packages(sandbox: Sandbox, directory: str, *made: tuple[str, bytes]) -> None:
    sandbox.run(["mkdir", "-p", directory], check=True)
    for name, content in made:
        sandbox.files.write(f"{directory}/{name}", content)


def virtual_environment(sandbox: Sandbox, directory: str) -> None:
    sandbox.run(["python3", "-m", "venv", directory], check=True, timeout=60)


def library_and_pytest(sandbox: Sandbox, directory: str) -> None:
    """`boltons/`, a library with its tests, and `site/`, a pytest to run them with."""
    cache = library.default_cache()
    library.fetch(cache)
    sandbox.run(["mkdir", "-p", directory], check=True)
    sandbox.run(
        ["tar", "x", "-C", directory], input=library.archive(cache).read_bytes(), check=True
    )
