//! Functions by name: a program that asks for one of CUDA's gets our hook.
//!
//! A program with a static CUDA runtime (NCCL, cuBLAS and most libraries have one) calls no symbol
//! of CUDA's. It asks `dlsym` for `cuGetProcAddress`, and asks that for everything else, itself
//! included. `ctypes` and whoever opens `libcuda.so.1` on his own ask `dlsym`, too. So these
//! look-ups are hooked like the other functions.
//!
//! `dlsym` and `dlvsym` are the most delicate ones: the C library answers `RTLD_NEXT` by
//! looking at who called. So everything that doesn't concern us must be no call but a *jump*:
//! the real function sees its caller as if we weren't here. Only a name that begins like one of
//! ours gets as far as Rust, and only where it is asked of a library's own handle, for which
//! the caller plays no part. `RTLD_DEFAULT` and `RTLD_NEXT` need nothing: the loader's own
//! order finds us, or whoever is next.
//!
//! `dlsym` is called before anything of ours has run: by the loader's helpers, by other preloaded
//! libraries, by Rust's standard library. So the real one is found by reading the C library's own
//! symbol table, with no state but one word.

use std::ffi::{CStr, c_char, c_void};

use crate::cuda::answers::{self, Question};
use crate::cuda::deepbind;
use crate::cuda::hooks::HOOKS;
use crate::cuda::resolve;
use crate::cuda::routes;
use crate::cuda::table::{Api, ENTRY_POINTS};
use crate::libraries::elf::Version;
use crate::libraries::loaded;
use crate::libraries::loaded::Next;
use crate::libraries::next;
use crate::libraries::scopes;
use crate::naked::{calling, jumping};
use crate::os::address::Address;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The `dlsym` behind ours, and the `dlvsym`.
static NEXT_DLSYM: Address = Address::new();
static NEXT_DLVSYM: Address = Address::new();

/// The body of `dlsym` and `dlvsym`: jumps to the real one unless the name (rsi) begins with "cu",
/// "nc" or "dl". A handle (rdi) goes to `ours`; `RTLD_DEFAULT` (0) and `RTLD_NEXT` (-1), which
/// depend on the caller, to `scope`, which may say to jump.
macro_rules! jump_or_look {
    ($next:ident, $find:ident, $ours:ident, $scope:ident) => {
        core::arch::naked_asm!(
            "cmp dword ptr [rip + {pending}], 0",
            "jne 5f",
            "6:",
            "test rsi, rsi",
            "jz 2f",
            "cmp byte ptr [rsi], 0x63", // c
            "je 3f",
            "cmp byte ptr [rsi], 0x6e", // n
            "je 7f",
            "cmp byte ptr [rsi], 0x64", // d
            "jne 2f",
            "cmp byte ptr [rsi + 1], 0x6c", // l
            "jne 2f",
            "lea rax, [rdi + 1]",
            "cmp rax, 1",
            "ja {ours}",
            "2:",
            jumping!(),
            "3:",
            "cmp byte ptr [rsi + 1], 0x75", // u
            "je 8f",
            "jmp 2b",
            "7:",
            "cmp byte ptr [rsi + 1], 0x63", // c
            "jne 2b",
            "8:",
            "lea rax, [rdi + 1]",
            "cmp rax, 1",
            "ja {ours}",
            "mov rcx, [rsp]", // who called
            calling!("scope"),
            "cmp rax, {undecided}",
            "je 2b",
            "ret",
            "5:",
            calling!("look"),
            "jmp 6b",
            pending = sym crate::cuda::answers::PENDING,
            look = sym look,
            next = sym $next,
            find = sym $find,
            ours = sym $ours,
            scope = sym $scope,
            undecided = const UNDECIDED,
        )
    };
}

/// `dlsym`.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    jump_or_look!(NEXT_DLSYM, find_dlsym, named, scoped)
}

/// `dlvsym`.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    jump_or_look!(NEXT_DLVSYM, find_dlvsym, versioned, scoped_versioned)
}

extern "C" fn look() {
    deepbind::look(&HOOKS, [dlsym as *const () as usize, dlvsym as *const () as usize]);
}

extern "C" fn find_dlsym() -> *mut c_void {
    next::behind(&NEXT_DLSYM, c"dlsym")
}

extern "C" fn find_dlvsym() -> *mut c_void {
    next::behind(&NEXT_DLVSYM, c"dlvsym")
}

unsafe extern "C" fn named(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments; a name is a C string.
    unsafe {
        let next: Dlsym = std::mem::transmute(find_dlsym());
        show(CStr::from_ptr(name), None, next(handle, name))
    }
}

unsafe extern "C" fn versioned(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: the caller's arguments; a name is a C string, and so is a version.
    unsafe {
        let next: Dlvsym = std::mem::transmute(find_dlvsym());
        let wanted = (!version.is_null()).then(|| CStr::from_ptr(version));
        show(CStr::from_ptr(name), wanted, next(handle, name, version))
    }
}

fn row_named(name: &CStr) -> Option<Api> {
    let found = ENTRY_POINTS.iter().position(|e| e.name.as_bytes() == name.to_bytes())?;
    Api::from_number(found)
}

/// Ours instead of what a library's handle gave, if that is CUDA's. A program may have a second
/// runtime (bundled, or linked statically into a library), with errors and streams of its own. It
/// keeps it, and is seen at the driver's hooks. Nothing that fails is asked of the loader after a
/// look-up that was successful: what `dlerror` says is about the program's.
fn show(name: &CStr, version: Option<&CStr>, found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        return found;
    }
    let Some(api) = row_named(name) else {
        return match name.to_bytes() {
            b"dlsym" => dlsym as *mut c_void,
            b"dlvsym" => dlvsym as *mut c_void,
            // Another interposer's, which comes to ours in its turn, is what was asked for.
            b"dlclose" if next::in_c_library(name).is_some_and(|own| own.as_ptr() == found) => {
                crate::cuda::closing::dlclose as *mut c_void
            }
            _ => found,
        };
    };
    let instead = || Some(shown(api, name, version, found as usize));
    let known = match version {
        None => answers::known(Question::Instead, api, found as usize, instead),
        Some(_) => instead(),
    };
    known.unwrap_or_default() as *mut c_void
}

fn shown(api: Api, name: &CStr, version: Option<&CStr>, found: usize) -> usize {
    let row = &ENTRY_POINTS[api as usize];
    if !loaded::is_own(found) {
        return trampoline_if(resolve::is_nvidias(found), api, found);
    }
    // The handle is for the scope that all have in common, and us in it.
    // SAFETY: a look-up by name.
    let next = unsafe { next::really(libc::RTLD_NEXT, name, version) } as usize;
    trampoline_if(next != 0 && resolve::is_cudas(row, next), api, next)
}

fn trampoline_if(is_cudas: bool, api: Api, found: usize) -> usize {
    if is_cudas { routes::trampoline_for(&HOOKS, api, found) } else { found }
}

/// The answer to a look-up that depends on its caller, where it is the
/// loader's to say. No function has this address.
const UNDECIDED: isize = -1;

unsafe extern "C" fn scoped(
    handle: *mut c_void,
    name: *const c_char,
    _: usize,
    caller: usize,
) -> isize {
    // SAFETY: the caller's argument, a C string.
    answer(handle, unsafe { CStr::from_ptr(name) }, None, caller)
}

unsafe extern "C" fn scoped_versioned(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: usize,
) -> isize {
    // SAFETY: the caller's arguments, C strings.
    unsafe {
        let version = (!version.is_null()).then(|| CStr::from_ptr(version));
        answer(handle, CStr::from_ptr(name), version, caller)
    }
}

fn answer(handle: *mut c_void, name: &CStr, version: Option<&CStr>, caller: usize) -> isize {
    let found = row_named(name).and_then(|api| {
        let find = || in_scope(handle, api, name, version, caller);
        if version.is_some() {
            return find();
        }
        let question = if handle == libc::RTLD_DEFAULT { Question::First } else { Question::Next };
        let found = answers::known(question, api, caller, find)?;
        if found != 0 {
            // SAFETY: a look-up by name, of what is there: the loader forgets what it
            // may have had to say of an earlier one.
            unsafe { next::really(libc::RTLD_DEFAULT, name, None) };
        }
        Some(found)
    });
    found.map_or(UNDECIDED, |found| found as isize)
}

fn in_scope(
    handle: *mut c_void,
    api: Api,
    name: &CStr,
    version: Option<&CStr>,
    caller: usize,
) -> Option<usize> {
    let found = if handle == libc::RTLD_DEFAULT {
        in_default_scope(name, version, caller)?
    } else {
        next_in_scope(name, version, caller)?
    };
    let is_cudas = || resolve::is_cudas(&ENTRY_POINTS[api as usize], found);
    Some(trampoline_if(found != 0 && !loaded::is_own(found) && is_cudas(), api, found))
}

/// `RTLD_DEFAULT`: the scope that all have in common, then the caller's own. 0 is
/// nothing, `None` that we are not in the way.
fn in_default_scope(name: &CStr, version: Option<&CStr>, caller: usize) -> Option<usize> {
    // SAFETY: a look-up by name.
    let first = unsafe { next::really(libc::RTLD_DEFAULT, name, version) } as usize;
    if !loaded::is_own(first) {
        return None;
    }
    // A library that was opened so that its own come first: the loader knows best,
    // unless that is a function of CUDA's.
    let wanted = version.map_or(Version::Default, Version::Wanted);
    if let Some(own) = scopes::deep(caller, name, wanted) {
        return resolve::is_nvidias(own).then_some(own);
    }
    // SAFETY: a look-up by name.
    let find = |handle| unsafe { next::really(handle, name, version) } as usize;
    let next = find(libc::RTLD_NEXT);
    if next != 0 {
        loaded::stays(next);
        return Some(next);
    }
    // If it is nowhere, the loader says so.
    Some(loaded::in_own_scope(caller, find).unwrap_or_else(|| find(libc::RTLD_NEXT)))
}

/// `RTLD_NEXT`: whoever is in front of us has us next, unless there is nobody behind
/// us. A library that was opened later looks among those that it needs; what is
/// there and NVIDIA's is shown as ours.
fn next_in_scope(name: &CStr, version: Option<&CStr>, caller: usize) -> Option<usize> {
    match loaded::next_after(caller, name) {
        // SAFETY: a look-up by name; if it fails the loader says so.
        Next::Us => Some(unsafe { next::really(libc::RTLD_NEXT, name, version) } as usize),
        Next::Needed(libraries) => {
            // SAFETY: a look-up by name.
            let find = |handle| unsafe { next::really(handle, name, version) } as usize;
            let look = |library: &&CStr| loaded::in_scope_of(library, find);
            libraries.iter().find_map(look).filter(|found| resolve::is_nvidias(*found))
        }
        Next::Other => None,
    }
}
