"""The wheel's build backend: maturin, after the libraries have been built.

maturin builds one crate, the command; the wheel also holds the two libraries that the command
preloads and the package calls. They are built here, are in the package while maturin packs it, and
are taken away again, so that a checkout never uses yesterday's.
"""

import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401 - the rest of the interface is maturin's own
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libmemtrace.so", "libmemtrace_virtual.so")
PLACE = ROOT / "python" / "memtrace" / "lib"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    command = ["cargo", "build", "--release", "--locked", "-p", "memtrace", "-p", "memtrace-virtual-gpu"]
    subprocess.run(command, cwd=ROOT, check=True)
    target = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
    PLACE.mkdir(exist_ok=True)
    try:
        for library in LIBRARIES:
            shutil.copy2(target / library, PLACE / library)
            subprocess.run(["strip", "--strip-debug", PLACE / library], check=False)  # where there is such a tool
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    finally:
        shutil.rmtree(PLACE)
