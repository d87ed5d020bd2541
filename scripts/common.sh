# What the scripts share: where the checkout is, how they speak, and the Python
# environments inside it. Everything that a script installs is in the checkout (.venv*,
# target); nothing outside is changed.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=${MEMTRACE_BUILD:-${CARGO_TARGET_DIR:-$ROOT/target}/release}

# PyTorch must come from the checkout's own environment and from nowhere else.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1

# Prints the comment that a script begins with.
usage() {
    sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"
    exit 0
}

say() { printf '\n== %s\n' "$*"; }

# One line that says what is wrong and what to do; exit 2.
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# Prints the versions of CPython 3 whose frames are read, as the source has them.
known_pythons() {
    seq $(sed -nE 's/^pub const PYTHONS: .* = ([0-9]+)\.\.=([0-9]+);$/\1 \2/p' "$ROOT/crates/format/src/stacks.rs")
}

# Prints the first interpreter that has venv and pip and whose version ($1 to $2, such
# as 3.10 3.13) PyTorch has wheels for.
find_python() {
    local low=$1 high=$2 name
    for name in "${MEMTRACE_PYTHON:-python3.11}" python3.12 python3.13 python3.10 python3 "$HOME"/.pyenv/versions/3.1[0-3].*/bin/python; do
        if "$name" - "$low" "$high" 2>/dev/null <<'PY'
import ensurepip, sys, venv
low, high = (tuple(map(int, v.split("."))) for v in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] <= high)
PY
        then
            command -v "$name"
            return
        fi
    done
    return 1
}

# make_venv FOLDER REQUIREMENTS: the environment, unless it is there
# already with just these requirements.
make_venv() {
    local venv=$1 requirements=$2 python stamp
    stamp=$venv/.memtrace-requirements
    if cmp -s "$requirements" "$stamp"; then
        say "Python environment ${venv##*/}: there already"
    else
        python=$(find_python 3.10 3.13) ||
            die "no Python 3.10 to 3.13 with venv and pip was found: install one, or set MEMTRACE_PYTHON to it"
        say "Python environment ${venv##*/}: installing $(grep -E '^torch==' "$requirements") (several GB, some minutes)"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar off -r "$requirements" ||
            die "pip could not install $requirements: see above; a second run goes on where this one stopped"
        cp "$requirements" "$stamp"
    fi
    "$venv/bin/python" - "$venv" <<'PY' || die "${venv##*/} is damaged: remove the folder and run this again"
import pathlib, sys, torch
home, found = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(torch.__file__).resolve()
if home not in found.parents:
    sys.exit(f"PyTorch is imported from {found}, not from {home}")
if torch.version.cuda is None:
    sys.exit(f"PyTorch {torch.__version__} in {home} is built without CUDA")
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
PY
}

# Builds what the user runs: the command line tool and the libraries that are beside it.
build() {
    command -v cargo >/dev/null || die "cargo was not found: install Rust 1.95 or newer (rustup.rs)"
    say "Building memtrace (release)"
    (cd "$ROOT" && cargo build --release --workspace --locked)
}
