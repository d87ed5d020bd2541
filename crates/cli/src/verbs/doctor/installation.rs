//! What can be said without a program of the user's: libraries, folders, Python, settings.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use memtrace_options::{QUIET, Quiet};
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, ElfFile64, FileHeader, Sym};

use super::{Check, Level, machine, recorded, scratch, settings, snapshots, this_program};
use crate::cards::CardsHere;
use crate::failure::Failure;
use crate::preloadable::find;
use crate::verbs::run::{RECORDER, VIRTUAL_GPU, find_library, out_folder};

/// Parts of the C library and of the compiler, all that the recorder may
/// need: it is loaded into every process.
const MAY_NEED: [&str; 7] = [
    "libc.so.6",
    "libgcc_s.so.1",
    "ld-linux",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
];

pub(super) fn checks(out: Option<&Path>, here: &CardsHere) -> Result<Vec<Check>, Failure> {
    let mut found = Vec::new();
    let recorder = find_library(RECORDER, "nothing can be recorded without it");
    match &recorder {
        Ok(path) => found.extend(library(path)),
        Err(failure) => found.push(Check::new(Level::Wrong, "library", failure.to_string())),
    }
    let folder = out_folder(out);
    found.push(match &folder {
        Ok(folder) => {
            Check::new(Level::Ok, "snapshots", format!("can be written into {}", folder.display()))
        }
        Err(failure) => Check::new(Level::Wrong, "snapshots", failure.to_string()),
    });
    found.push(machine::black_box(folder.ok().as_deref()));
    let virtual_gpu = find_library(VIRTUAL_GPU, "").is_ok();
    found.push(machine::driver(virtual_gpu)?);
    found.extend(machine::cards(here));
    if recorder.is_ok() {
        found.extend(python(virtual_gpu)?);
    }
    found.extend(settings::preloaded());
    found.extend(settings::settings());
    Ok(found)
}

/// The recorder: what it needs, and whether the loader takes it.
fn library(path: &Path) -> Vec<Check> {
    let mut found = Vec::new();
    let needed = fs::read(path).ok().and_then(|bytes| needed(&bytes)).unwrap_or_default();
    let strange: Vec<&str> = needed
        .iter()
        .map(String::as_str)
        .filter(|n| !MAY_NEED.iter().any(|known| n.starts_with(known)))
        .collect();
    found.push(if strange.is_empty() && !needed.is_empty() {
        Check::new(
            Level::Ok,
            "library",
            format!("{}, which needs {}", path.display(), needed.join(", ")),
        )
    } else if needed.is_empty() {
        Check::new(
            Level::Wrong,
            "library",
            format!("{} is damaged: install it again", path.display()),
        )
    } else {
        Check::new(
            Level::Wrong,
            "library",
            format!("{} needs {}: build it as the README says", path.display(), strange.join(", ")),
        )
    });
    // Loaded as any program would load it; the loader complains on standard error and goes on.
    let tried = this_program().map(|mut c| c.arg("--version").env("LD_PRELOAD", path).output());
    found.push(match tried {
        Ok(Ok(done)) if done.status.success() && done.stderr.is_empty() => {
            Check::new(Level::Ok, "loader", "takes it")
        }
        Ok(Ok(done)) => Check::new(
            Level::Wrong,
            "loader",
            format!(
                "refuses it: {}; build it on a machine with this C library or an older one",
                String::from_utf8_lossy(&done.stderr).trim()
            ),
        ),
        Ok(Err(e)) => Check::new(Level::Wrong, "loader", format!("cannot be tried: {e}")),
        Err(failure) => Check::new(Level::Wrong, "loader", failure.to_string()),
    });
    found
}

/// Does the program that is to run bring a CUDA runtime of its own along?
pub(super) fn program(command: &OsStr) -> Option<Check> {
    let path = find(command).ok()?;
    let bytes = fs::read(&path).ok()?;
    let file = ElfFile64::<object::Endianness>::parse(&*bytes).ok()?;
    has_runtime(&file)?.then(|| {
        let text = format!(
            "{} has the CUDA runtime linked into it: its calls of the runtime are seen at the driver's entry points, under \
             their names there; a virtual GPU can't run it. To see them as they are, link it with -cudart=shared",
            path.display()
        );
        Check::new(Level::Note, "program", text)
    })
}

/// A function of the runtime's that every program with a context calls is defined in the file
/// itself. Of a program that was stripped of its symbols that isn't known.
fn has_runtime(file: &ElfFile64) -> Option<bool> {
    let (elf, endian, data) = (file.elf_header(), file.endian(), file.data());
    let sections = elf.sections(endian, data).ok()?;
    let symbols = sections.symbols(endian, data, elf::SHT_SYMTAB).ok()?;
    let is_it = |s: &<FileHeader64<object::Endianness> as FileHeader>::Sym| {
        s.st_type() == elf::STT_FUNC
            && !s.is_undefined(endian)
            && s.name(endian, symbols.strings()).is_ok_and(|name| name == b"cudaGetDeviceCount")
    };
    Some(symbols.iter().any(is_it))
}

/// The libraries that a library names as needed.
fn needed(bytes: &[u8]) -> Option<Vec<String>> {
    let file = ElfFile64::<object::Endianness>::parse(bytes).ok()?;
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, bytes).ok()?;
    let (entries, link) = sections.dynamic(endian, bytes).ok()??;
    let strings = sections.strings(endian, bytes, link).ok()?;
    let names = entries.iter().filter(|e| e.d_tag(endian) == elf::DT_NEEDED);
    names
        .map(|e| Some(String::from_utf8_lossy(e.string(endian, strings).ok()?).into_owned()))
        .collect()
}

/// Lets the Python of this PATH take memory from a virtual GPU, and looks at
/// what the recorder made of its objects.
fn python(virtual_gpu: bool) -> Result<Vec<Check>, Failure> {
    let about = "Python";
    let Some(path) = ["python3", "python"].iter().find_map(|name| find(OsStr::new(name)).ok())
    else {
        return Ok(vec![Check::new(Level::Note, about, "no python3 is in PATH")]);
    };
    if !virtual_gpu {
        let text = format!("{}: not tried, {VIRTUAL_GPU} is not there", path.display());
        return Ok(vec![Check::new(Level::Note, about, text)]);
    }
    let out = scratch()?;
    let code = "import ctypes; ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096))";
    let mut command: Command = this_program()?;
    command.args(["run", "--virtual", "h100", "--stacks", "all", "--format", "pickle", "--out"]);
    command.arg(out.path()).arg("--").arg(&path).args(["-c", code]);
    let done = command.env(QUIET.variable, Quiet::Yes.name()).stdin(Stdio::null()).output();
    let said = done.map_or_else(
        |e| e.to_string(),
        |done| String::from_utf8_lossy(&done.stderr).trim().to_owned(),
    );
    let check = match snapshots(out.path()).first().map(|p| recorded::Process::of(p)) {
        Some(Ok(process)) => recorded::python(&process),
        Some(Err(failure)) => Check::new(Level::Wrong, about, failure.to_string()),
        None => Check::new(
            Level::Wrong,
            about,
            format!(
                "{} left no snapshot when it took memory: {said}; try memtrace run on it",
                path.display()
            ),
        ),
    };
    Ok(vec![Check { text: format!("{}: {}", path.display(), check.text), ..check }])
}
