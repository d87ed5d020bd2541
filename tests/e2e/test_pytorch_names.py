"""What src/pytorch/names.rs says of a release is so: the one that the tests run with has
the names that are listed for it."""

import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess

import support

RELEASE = ".".join(importlib.metadata.version("torch").split(".")[:2])
LIBRARIES = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib"
SOURCE = (support.ROOT / "src/pytorch/names.rs").read_text()


def listed():
    """Each name, its library, and the releases that it is listed for."""
    library = dict(re.findall(r'pub const (\w+): &str = "(lib\w+\.so)";', SOURCE))
    every = re.findall(r'"([\d.]+)"', re.search(r"RELEASES: .*? = \[(.*?)\];", SOURCE)[1])
    names = re.findall(r'=\s*"(_Z\w+)" in (\w+), (RELEASES|\[[^\]]*\]);', SOURCE)
    return [(name, library[of], every if which == "RELEASES" else re.findall(r'"([\d.]+)"', which)) for name, of, which in names]


def symbols(library, *options):
    return subprocess.run(["nm", *options, LIBRARIES / library], capture_output=True, text=True, check=True).stdout


def test_a_release_has_the_names_that_are_listed_for_it_and_no_others():
    names = listed()
    assert len(names) == len(re.findall(r'=\s*"_Z', SOURCE))  # none is overlooked
    exported = {}
    wrong = []
    for name, library, releases in names:
        if library not in exported:
            exported[library] = {line.split()[-1] for line in symbols(library, "-D", "--defined-only").splitlines()}
        if (name in exported[library]) != (RELEASE in releases):
            wrong.append(f"PyTorch {RELEASE}: {library} {'has' if name in exported[library] else 'does not have'} {name}")
    assert wrong == []


def test_the_functions_of_the_allocators_table_are_known_by_these_names():
    text = symbols("libc10_cuda.so", "-C")
    const = dict(re.findall(r'pub const (\w+): &str = "([\w:]+)";', SOURCE))
    captures = ("BEGIN_CAPTURE", "END_CAPTURE") if tuple(map(int, RELEASE.split("."))) >= (2, 13) else ()
    for method in ("BEGIN_POOL", "END_POOL", "RECORD_STREAM", *captures):
        assert f"{const['CLASS']}{const[method]}(" in text, const[method]
    assert const["PROGRAMS"] in text
