//! Libraries that bind past us, because they were opened so that their own
//! dependencies come first (`RTLD_DEEPBIND`).
//!
//! Such a library calls the driver, and the C library's `dlsym`, as if nothing were preloaded. Who
//! opens it asks for that so that it finds *its* functions, not to hide what it does; and the
//! driver is one. So the GOT slots in which such calls are bound are pointed at our hooks, as every
//! other library's are. The real functions behind the hooks are as before. Only slots of the
//! driver's functions and of `dlsym`, `dlvsym` and `dlclose` are changed, and only where they are
//! bound to the real ones. A runtime of the library's own stays its own.
//!
//! `dlopen` itself must be a jump (it looks at its caller for the search path), so nothing can
//! follow it. It leaves a note behind. Whoever opened the library asks for something in it, by
//! `dlsym`, which finds the note and looks which libraries are new. What a library does
//! before, in its constructors, is not seen.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::key::{BoundElsewhere, Kept};

use crate::cuda::answers::PENDING;
use crate::cuda::table::{self, ENTRY_POINTS, Hooks};
use crate::cuda::{resolve, routes, shared_names};
use crate::libraries::elf::{Binding, Tables};
use crate::libraries::loaded;
use crate::libraries::next;
use crate::libraries::scopes;
use crate::naked::{calling, jumping};
use crate::os::address::Address;

/// Enough for the opening thread to be among those that ask.
const LOOKS: u32 = 16;

static NEXT_DLOPEN: Address = Address::new();

/// `dlopen`: a jump, always.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "test esi, 0x108", // RTLD_GLOBAL, RTLD_DEEPBIND
        "jz 2f",
        calling!("note"),
        "2:",
        "mov dword ptr [rip + {pending}], {looks}",
        jumping!(),
        note = sym note,
        pending = sym PENDING,
        looks = const LOOKS,
        next = sym NEXT_DLOPEN,
        find = sym find_dlopen,
    )
}

extern "C" fn find_dlopen() -> *mut c_void {
    next::behind(&NEXT_DLOPEN, c"dlopen")
}

/// Notes how a library is about to be opened.
unsafe extern "C" fn note(file: *const c_char, flags: c_int) {
    if file.is_null() {
        return;
    }
    // SAFETY: the caller's argument, a C string.
    let file = unsafe { CStr::from_ptr(file) };
    if flags & libc::RTLD_GLOBAL != 0 {
        scopes::GLOBAL.note(file);
    }
    if flags & libc::RTLD_DEEPBIND != 0 {
        scopes::DEEP.note(file);
    }
}

/// Libraries that had been loaded when we last looked: a count. Who looks twice finds the same.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Has a library been opened so?
pub fn is_used() -> bool {
    scopes::DEEP.is_used()
}

/// Looks at the libraries that are new since the last time. `dlsyms`: our `dlsym` and `dlvsym`.
pub fn look(hooks: &Hooks, dlsyms: [usize; 2]) {
    let left = |n: u32| n.checked_sub(1);
    if PENDING.fetch_update(Ordering::AcqRel, Ordering::Relaxed, left).is_err() {
        return;
    }
    shared_names::look(hooks);
    let [loaded, _] = loaded::counts();
    if is_used() && SEEN.swap(loaded, Ordering::AcqRel) != loaded {
        let real = RealFunctions::find(hooks, dlsyms);
        let mut all_redirected = true;
        loaded::visit(|_, tables| {
            for binding in tables.bindings() {
                all_redirected &= real.redirect(&binding, tables);
            }
            false
        });
        if !all_redirected {
            SEEN.store(0, Ordering::Release); // the loader is at work on one of them
        }
    }
}

/// The real functions that calls go past us to. They are looked up before the loader's list is gone
/// through, because the loader must not be asked anything meanwhile.
struct RealFunctions<'a> {
    hooks: &'a Hooks,
    our_dlsyms: [usize; 2],
    dlsym: usize,
    dlvsym: usize,
    dlclose: usize,
    /// NVIDIA's libraries.
    nvidias: Vec<Tables>,
}

impl RealFunctions<'_> {
    fn find(hooks: &Hooks, our_dlsyms: [usize; 2]) -> RealFunctions<'_> {
        let own = |name| next::in_c_library(name).map_or(0, |f| f.as_ptr() as usize);
        let mut nvidias = Vec::new();
        loaded::visit(|path, tables| {
            if resolve::is_one_of_nvidias(path, tables) {
                nvidias.push(tables.clone());
            }
            false
        });
        let (dlsym, dlclose) = (own(c"dlsym"), own(c"dlclose"));
        RealFunctions { hooks, our_dlsyms, dlsym, dlvsym: own(c"dlvsym"), dlclose, nvidias }
    }

    /// Where a call should go that goes to `target` now, or that the loader is yet to bind.
    fn of(&self, binding: &Binding, target: usize, is_bound: bool) -> Option<usize> {
        let ours = |real: usize, ours: usize| (!is_bound || target == real).then_some(ours);
        match binding.name.to_bytes() {
            b"dlsym" => ours(self.dlsym, self.our_dlsyms[0]),
            b"dlvsym" => ours(self.dlvsym, self.our_dlsyms[1]),
            b"dlclose" => ours(self.dlclose, crate::cuda::closing::dlclose as *const () as usize),
            name @ [b'c', b'u', ..] => {
                let (api, _) = table::of_driver().find(|(_, row)| row.name.as_bytes() == name)?;
                let is_its = |library: &Tables| {
                    library.symbol(binding.name).is_some_and(|f| f.as_ptr() as usize == target)
                };
                if !is_bound {
                    Some(self.hooks[api as usize].exported.0 as usize)
                } else if self.nvidias.iter().any(is_its) {
                    Some(routes::trampoline_for(self.hooks, api, target))
                } else {
                    None
                }
            }
            _ => None,
        }
    }

    /// Sends a call that goes past us where every other one goes. Says whether none does any more.
    fn redirect(&self, binding: &Binding, tables: &Tables) -> bool {
        let target = binding.target();
        if loaded::is_own(target) {
            return true;
        }
        // A stub of the library's own would ask the loader, which would
        // bind the call past us, or as any other.
        let is_bound = !tables.contains(target);
        let ours = self.of(binding, target, is_bound).filter(|ours| *ours != target);
        ours.is_none_or(|ours| binding.bind(ours))
    }
}

// --- what goes past us all the same --------------------------------------------------------------

/// Calls of libraries that are bound to another function of one of our names: another interposer's,
/// that of the library's own runtime, or the real one. As bound now; a call that the loader is yet
/// to bind is not among them. For a snapshot's `memtrace` key: allocates.
pub fn bound_elsewhere() -> Vec<BoundElsewhere> {
    let mut found: Vec<(String, &'static CStr, usize)> = Vec::new();
    loaded::visit(|path, tables| {
        if !tables.contains(bound_elsewhere as *const () as usize) {
            let library = path.to_string_lossy();
            let past_us = tables.bindings().filter(|binding| goes_past_us(binding, tables));
            found.extend(past_us.map(|b| (library.clone().into_owned(), b.name, b.target())));
        }
        false
    });
    let named = found.into_iter().map(|(library, function, target)| BoundElsewhere {
        library,
        function: function.to_str().unwrap_or_default().to_owned(),
        bound_to: loaded::library_of(target),
        kept: Kept::NOTHING,
    });
    named.collect()
}

fn goes_past_us(binding: &Binding, tables: &Tables) -> bool {
    let (name, target) = (binding.name.to_bytes(), binding.target());
    let is_row = || ENTRY_POINTS.iter().any(|e| e.name.as_bytes() == name);
    let is_elsewhere = target != 0 && !loaded::is_own(target) && !tables.contains(target);
    name.starts_with(b"cu") && is_elsewhere && is_row()
}
