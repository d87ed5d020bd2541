//! Libraries that bind past us, because they were opened so that their own dependencies come first (`RTLD_DEEPBIND`).
//!
//! Such a library calls the driver, and the C library's `dlsym`, as if nothing were preloaded. Who opens it asks for
//! that so that it finds *its* functions, not to hide what it does; and the driver is one. So the words in which such
//! calls are bound are sent to where every other library's go, with the real functions behind it as before. Only
//! functions of the driver's and `dlsym` and `dlvsym` are, and only where they are bound to the real ones: a runtime of
//! the library's own stays its own.
//!
//! `dlopen` itself must be a jump (it looks at its caller for the search path), so nothing can follow it. What it leaves
//! behind is a note, and the next `dlsym` (whoever opened the library asks for something in it) finds that and looks
//! which libraries are new. What a library does before, in its constructors, is not seen.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use serde_json::{Value, json};

use super::elf::{Binding, Tables};
use super::lookup;
use super::resolve::{self, Real};
use super::table::{Api, ENTRY_POINTS, EntryPoint, ROWS};

/// How many more look-ups shall look for new libraries.
pub static PENDING: AtomicU32 = AtomicU32::new(0);
/// Enough for the opening thread to be among those that ask.
const LOOKS: u32 = 16;

/// The first row of the driver's.
const FIRST: usize = Api::cuCtxCreate as usize;

static NEXT_DLOPEN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `dlopen`: a jump, always.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "test esi, 8", // RTLD_DEEPBIND
        "jz 2f",
        "mov dword ptr [rip + {pending}], {looks}",
        "2:",
        "mov rax, qword ptr [rip + {next}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "push rdi",
        "push rsi",
        "push rsi", // for the alignment
        "call {find}",
        "pop rsi",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        pending = sym PENDING,
        looks = const LOOKS,
        next = sym NEXT_DLOPEN,
        find = sym find_dlopen,
    )
}

extern "C" fn find_dlopen() -> *mut c_void {
    lookup::next(&NEXT_DLOPEN, c"dlopen")
}

/// Libraries that had been loaded when we last looked.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Looks at the libraries that are new since the last time.
pub extern "C" fn look() {
    let left = |n: u32| n.checked_sub(1);
    if PENDING.fetch_update(Ordering::AcqRel, Ordering::Relaxed, left).is_err() {
        return;
    }
    let mut adds = 0_u64;
    // SAFETY: the callback matches the prototype and the counter outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut adds).cast()) };
    if SEEN.swap(adds, Ordering::AcqRel) != adds {
        let mut doors = Doors::find();
        // SAFETY: the callback matches the prototype and the doors outlive the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut doors).cast()) };
    }
}

unsafe extern "C" fn count(info: *mut libc::dl_phdr_info, _: usize, adds: *mut c_void) -> c_int {
    // SAFETY: the loader hands in a valid record and our own counter.
    unsafe { *adds.cast::<u64>() = (*info).dlpi_adds };
    1
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, doors: *mut c_void) -> c_int {
    // SAFETY: the loader hands in a valid record of a loaded library, and our own doors.
    unsafe {
        let doors = &*doors.cast::<Doors>();
        if let Some(tables) = Tables::of(&*info) {
            for binding in tables.bindings() {
                doors.lead(&binding, &tables);
            }
        }
    }
    0
}

/// The real functions behind our doors; 0 where there is none. Looked up before the loader's list is gone through, in
/// which it must not be asked anything.
struct Doors {
    dlsym: usize,
    dlvsym: usize,
    driver: [usize; ROWS],
}

impl Doors {
    fn find() -> Doors {
        let own = |name| resolve::in_c_library(name).map_or(0, |f| f.as_ptr() as usize);
        let mut driver = [0; ROWS];
        for (i, real) in driver.iter_mut().enumerate().skip(FIRST) {
            let found = Api::from_number(i).and_then(|api| Real::of(api).find_row(api));
            *real = found.map_or(0, |f| f as usize);
        }
        Doors { dlsym: own(c"dlsym"), dlvsym: own(c"dlvsym"), driver }
    }

    /// Ours and the real one, for a function that we stand for.
    fn of(&self, name: &CStr) -> Option<(usize, usize)> {
        match name.to_bytes() {
            b"dlsym" => Some((lookup::dlsym as *const () as usize, self.dlsym)),
            b"dlvsym" => Some((lookup::dlvsym as *const () as usize, self.dlvsym)),
            name @ [b'c', b'u', ..] => {
                let row = |e: &EntryPoint| e.name.as_bytes() == name;
                let i = FIRST + ENTRY_POINTS[FIRST..].iter().position(row)?;
                Some((ENTRY_POINTS[i].exported.0 as usize, self.driver[i]))
            }
            _ => None,
        }
    }

    /// Sends a call that goes past us where every other one goes.
    fn lead(&self, binding: &Binding, tables: &Tables) {
        let Some((ours, real)) = self.of(binding.name) else { return };
        let target = binding.target();
        // A stub of the library's own would ask the loader, which would bind the call past us, or as any other.
        if real != 0 && target != ours && (target == real || tables.contains(target)) {
            binding.bind(ours);
        }
    }
}

// --- what goes past us all the same ----------------------------------------------------------------------

/// Calls of libraries that are bound to somebody else's function of one of our names: another interposer's, a runtime of
/// the library's own, the real one. As bound now; a call that the loader is yet to bind is not among them. For a snapshot's
/// `memtrace` key: allocates.
pub fn bound_elsewhere() -> Vec<Value> {
    let mut found: Vec<(String, &'static CStr, usize)> = Vec::new();
    // SAFETY: the callback matches the prototype and the list outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut found).cast()) };
    let named = found.into_iter().map(|(library, function, target)| {
        json!({
            "library": library,
            "function": function.to_str().unwrap_or_default(),
            "bound_to": resolve::library_of(target),
        })
    });
    named.collect()
}

unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, list: *mut c_void) -> c_int {
    // SAFETY: the loader hands in a valid record of a loaded library, and our own list.
    unsafe {
        let found = &mut *list.cast::<Vec<(String, &'static CStr, usize)>>();
        let info = &*info;
        let Some(tables) = Tables::of(info) else { return 0 };
        if tables.contains(collect as *const () as usize) || info.dlpi_name.is_null() {
            return 0;
        }
        let library = CStr::from_ptr(info.dlpi_name).to_string_lossy();
        for binding in tables.bindings() {
            let name = binding.name.to_bytes();
            if !name.starts_with(b"cu") {
                continue;
            }
            let Some(row) = ENTRY_POINTS.iter().find(|e| e.name.as_bytes() == name) else {
                continue;
            };
            let target = binding.target();
            let ours = [row.exported.0 as usize, row.export.0 as usize].contains(&target);
            if target != 0 && !ours && !tables.contains(target) {
                found.push((library.clone().into_owned(), binding.name, target));
            }
        }
    }
    0
}
