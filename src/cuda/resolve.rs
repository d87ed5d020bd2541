//! Where the real functions are.
//!
//! The first answer is whatever the loader would have found without us (`RTLD_NEXT`): the next
//! interposer, or CUDA's library in the global scope. Python opens PyTorch's libraries privately,
//! outside of that scope. So the caller's own scope is next. Only if that has nothing, the library
//! itself is found by its file name among the loaded ones.
//!
//! A function of CUDA's name is not always CUDA's. By symbol a library may mean its
//! own, and a look-up may have found one that does something else.
//! [`crate::cuda::routes`] decides that, and asks here.

use std::ffi::{CStr, c_int, c_void};

use crate::cuda::table::{ENTRY_POINTS, EntryPoint};
use crate::libraries::elf::{Tables, Version};
use crate::libraries::loaded;
use crate::libraries::scopes;
use crate::libraries::scopes::Libraries;
use crate::real::Real;

/// What CUDA's functions answer that are nowhere: both APIs have 500 for a symbol that was not
/// found (`cudaErrorSymbolNotFound`, `CUDA_ERROR_NOT_FOUND`).
pub const MISSING: c_int = 500;

/// The same for a function of this library: `CUBLAS_STATUS_NOT_INITIALIZED`, `ncclSystemError`.
pub fn missing_in(library: &str) -> c_int {
    match library {
        "libcublas.so" | "libcublasLt.so" => 1,
        "libnccl.so" => 2,
        _ => MISSING,
    }
}

/// The address of a function of CUDA's, looked up at its first use. What is behind us may be
/// somebody else's function of its name.
pub fn real(place: &Real, symbol: &str, library: &str) -> Option<*mut c_void> {
    place.find_where(symbol, library, |symbol, found| {
        let row = ENTRY_POINTS.iter().find(|row| row.name == symbol);
        row.is_none_or(|row| is_cudas(row, found))
    })
}

// --- what the loader would have found ------------------------------------------------------------

/// What a call of ours by symbol from this address would go to without us. Where the caller's
/// library names no such function, it has the address from another library, or that one has jumped
/// here. Then the call means what that one means.
pub fn behind(row: &EntryPoint, caller: usize) -> Option<usize> {
    let found = scopes::ask(|all| {
        let names = |tables: &Tables| tables.references().any(|word| word.name == row.symbol);
        if all.library(caller).is_some_and(|library| names(&library.tables)) {
            return bound_among(all, row, caller);
        }
        let others = all.each().filter(|l| !loaded::is_own(l.tables.start()) && names(&l.tables));
        let means: Vec<usize> =
            others.filter_map(|user| bound_among(all, row, user.tables.start())).collect();
        let of_cuda = means.iter().find(|f| is_cudas_among(all, row, **f));
        of_cuda.or(means.first()).copied()
    });
    found
        .flatten()
        .or_else(|| scopes::loaded_symbol(row.library, row.symbol).map(|f| f.as_ptr() as usize))
}

/// What the loader would have bound a row's name to for the library that has this
/// address, in the version that it wants.
pub fn bound_among(all: &Libraries<'_>, row: &EntryPoint, caller: usize) -> Option<usize> {
    let wanted = all.library(caller).and_then(|l| l.tables.version_wanted(row.symbol));
    all.bound(caller, row.symbol, wanted.map_or(Version::Default, Version::Wanted))
}

/// Is a function of a row's name CUDA's: in a library that has the name of one of NVIDIA's, or in
/// one that stands for it? Such a library is behind us for everybody. It either uses CUDA itself,
/// as another tool's library in between does, or is where everything of CUDA's begins. Nearly every
/// library asks for *some* function by name; one that stands for CUDA's asks for CUDA's.
pub fn is_cudas(row: &EntryPoint, function: usize) -> bool {
    scopes::ask(|all| is_cudas_among(all, row, function)) == Some(true)
}

/// The same where the libraries are at hand.
pub fn is_cudas_among(all: &Libraries<'_>, row: &EntryPoint, function: usize) -> bool {
    const BEGINNINGS: [&CStr; 3] = [c"cuInit", c"cudaGetDeviceCount", c"ncclGetUniqueId"];
    let Some(library) = all.library(function) else { return false };
    if is_one_of_nvidias(library.path, &library.tables) {
        return true;
    }
    let stands = |tables: &Tables| {
        let calls = |is_it: fn(&[u8]) -> bool| tables.bindings().any(|b| is_it(b.name.to_bytes()));
        BEGINNINGS.iter().any(|name| tables.symbol(name).is_some())
            || calls(|name| ENTRY_POINTS.iter().any(|row| row.name.as_bytes() == name))
            || calls(|name| matches!(name, b"dlsym" | b"dlvsym")) && asks_for(row, tables)
    };
    all.next(row.symbol) == Some(function) && stands(&library.tables)
}

/// Might a library that asks for functions by name ask for this one, or do with another one what
/// this one does? Then it has the name in its data, or that of another function that it stands for,
/// or that of a look-up function. Or it needs a library of NVIDIA's.
fn asks_for(row: &EntryPoint, tables: &Tables) -> bool {
    let base = [row.base().as_bytes(), b"\0"].concat();
    let stands_for = ENTRY_POINTS.iter().skip(1).filter(|row| tables.symbol(row.symbol).is_some());
    let mut names: Vec<&[u8]> = stands_for.map(|row| row.name.as_bytes()).collect();
    names.extend([&base, &b"cuGetProcAddress"[..], b"cudaGetDriverEntryPoint"]);
    tables.needed().iter().any(|name| is_nvidias_name(name.to_bytes())) || tables.says(&names)
}

/// Does this address lie in a library that has the name of one of NVIDIA's
/// that we know, as its file's or its own?
pub fn is_nvidias(address: usize) -> bool {
    loaded::with_library(address, is_one_of_nvidias) == Some(true)
}

/// Has the library such a name?
pub fn is_one_of_nvidias(path: &CStr, tables: &Tables) -> bool {
    is_nvidias_name(path.to_bytes()) || has_nvidias_name(tables)
}

/// Does the library call itself one of NVIDIA's?
fn has_nvidias_name(tables: &Tables) -> bool {
    tables.own_name().is_some_and(|name| is_nvidias_name(name.to_bytes()))
}

/// `libcudart.so.12`, and as it is called when it was packed into a Python
/// package: `libcudart-d0da41ae.so.12`.
pub fn is_nvidias_name(path: &[u8]) -> bool {
    let file = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    ENTRY_POINTS.iter().skip(1).any(|row| {
        let stem = row.library.trim_end_matches(".so").as_bytes();
        matches!(file.strip_prefix(stem), Some([b'.' | b'-', ..]))
    })
}

/// Is this function the one of a row's name in the library that it lies in?
pub fn beside(row: &EntryPoint, function: *mut c_void) -> bool {
    let found = loaded::in_tables(row.symbol, |_, tables| tables.contains(function as usize));
    found.is_some_and(|found| found.as_ptr() == function)
}
