//! Loaded objects, by an address in them: where they are mapped, and where
//! the index of their unwind tables is.
//!
//! An address that was found on a stack may mean nothing, or a library that goes away this moment.
//! So nothing that an object says of itself is read here but through [`memtrace_os::checked`], not
//! even its program headers. They lie in its first page, which a program may have unmapped or
//! protected while the loader still lists it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;

use super::{list, next};
use memtrace_os::address::Address;
use memtrace_os::checked::{Process, Window};

/// A loaded object: where it is mapped and where the index of its unwind tables is.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// First mapped address.
    pub start: u64,
    /// Address after the last mapped one.
    pub end: u64,
    /// Address of `.eh_frame_hdr`.
    pub eh_frame_hdr: u64,
}

/// The loaded object that has `address`, and unwind tables.
///
/// glibc answers this without a lock since 2.35. Before, there is only the loop over all objects,
/// under the loader's lock; we take it once for every new address.
pub fn object_at(address: u64) -> Option<Object> {
    match dl_find_object() {
        Some(find) => {
            let found = find_with(find, address).filter(|found| found.eh_frame != 0)?;
            Some(Object { start: found.start, end: found.end, eh_frame_hdr: found.eh_frame })
        }
        None => search(address),
    }
}

/// The range of the library that an address lies in; without a lock where glibc
/// has such a search. `None`: no library.
pub fn library_at(address: u64) -> Option<Range<u64>> {
    let Some(find) = dl_find_object() else { return listed_at(address) };
    find_with(find, address).map(|found| found.start..found.end)
}

/// The same by the loader's list, under its lock.
fn listed_at(address: u64) -> Option<Range<u64>> {
    each(|object| {
        let (start, end) = object.range(|_| {});
        (start..end).contains(&address).then_some(start..end)
    })
}

/// Do both addresses lie in the same library?
pub fn is_one_library(one: usize, other: usize) -> bool {
    library_at(one as u64).is_some_and(|library| library.contains(&(other as u64)))
}

/// The object that this function is in, unless that is the program itself.
pub fn own_library() -> Option<Object> {
    let here = own_library as *const () as u64;
    // SAFETY: asks the kernel's notes to this process. The first header
    // that a program has is its own.
    let program = unsafe { libc::getauxval(libc::AT_PHDR) };
    object_at(here).filter(|own| !(own.start..own.end).contains(&program))
}

/// The name of the library that has this address, whose code is running; empty for the program.
pub fn name_at(address: u64) -> Option<&'static CStr> {
    /// The beginning of a `struct link_map`, as `link.h` has it.
    #[repr(C)]
    struct Link {
        base: u64,
        name: *const c_char,
    }
    let name = match dl_find_object() {
        Some(find) => {
            let found = find_with(find, address);
            // SAFETY: the loader's entry for a library that is in use.
            found.map(|found| unsafe { (*found.link.cast::<Link>()).name })
        }
        None => each(|object| {
            let (start, end) = object.range(|_| {});
            (start..end).contains(&address).then_some(object.name)
        }),
    }?;
    // SAFETY: the loader's names are C strings, which stay as long as the library does.
    Some(if name.is_null() { c"" } else { unsafe { CStr::from_ptr(name) } })
}

/// glibc's `struct dl_find_object`, as its manual has it for this architecture.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: u64,
    end: u64,
    link: *const c_void,
    eh_frame: u64,
    reserved: [u64; 7],
}

type FindObject = unsafe extern "C" fn(*const c_void, *mut FoundObject) -> c_int;

/// glibc's function, if it has it.
fn dl_find_object() -> Option<FindObject> {
    static FOUND: Address = Address::new();
    let absent = std::ptr::dangling_mut::<c_void>();
    let find = || next::in_c_library(c"_dl_find_object").map_or(absent, NonNull::as_ptr);
    let at = FOUND.get_or(find);
    // SAFETY: the function has had this prototype since glibc 2.35, which brought it.
    (at != absent).then(|| unsafe { std::mem::transmute::<*mut c_void, FindObject>(at) })
}

fn find_with(find: FindObject, address: u64) -> Option<FoundObject> {
    let mut found = std::mem::MaybeUninit::<FoundObject>::zeroed();
    // SAFETY: glibc's function, which fills the record if it returns 0;
    // all zeros are a valid record.
    unsafe {
        let missing = find(address as *const c_void, found.as_mut_ptr());
        (missing == 0).then(|| found.assume_init())
    }
}

/// The same by looking at all loaded objects.
fn search(address: u64) -> Option<Object> {
    each(|object| {
        let mut table = 0;
        let (start, end) = object.range(|h| {
            if h.p_type == libc::PT_GNU_EH_FRAME {
                table = object.base.wrapping_add(h.p_vaddr);
            }
        });
        let here = (start..end).contains(&address);
        here.then_some((table != 0).then_some(Object { start, end, eh_frame_hdr: table }))
    })
    .flatten()
}

/// An object as the loader lists it.
pub struct Listed<'a> {
    /// What is added to the addresses in its file.
    pub base: u64,
    /// Its name; null or empty for the program.
    pub name: *const c_char,
    /// How many objects were loaded and unloaded so far.
    pub counts: [u64; 2],
    headers: (u64, u16),
    window: &'a Window<'a>,
}

impl Listed<'_> {
    /// From its first to the address after its last mapped byte; `visit` sees each of its program
    /// headers. Empty if they can't be read.
    pub fn range(&self, mut visit: impl FnMut(&libc::Elf64_Phdr)) -> (u64, u64) {
        const SIZE: usize = size_of::<libc::Elf64_Phdr>();
        let (mut start, mut end) = (u64::MAX, 0);
        for i in 0..u64::from(self.headers.1) {
            let mut bytes = [0; SIZE];
            if self.window.bytes(self.headers.0 + i * SIZE as u64, &mut bytes).is_none() {
                break;
            }
            // SAFETY: a header is numbers, for which all bytes are valid.
            let h = unsafe { std::mem::transmute::<[u8; SIZE], libc::Elf64_Phdr>(bytes) };
            if h.p_type == libc::PT_LOAD {
                let at = self.base.wrapping_add(h.p_vaddr);
                start = start.min(at);
                end = end.max(at.wrapping_add(h.p_memsz));
            }
            visit(&h);
        }
        (start, end)
    }

    /// Bytes of its memory; `None` if they can't be read.
    pub fn bytes(&self, at: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.window.bytes(self.base.wrapping_add(at), &mut bytes)?;
        Some(bytes)
    }
}

/// Asks for each object that the loader lists, under the lock of its list,
/// until there is an answer.
pub fn each<T>(mut visit: impl FnMut(&Listed<'_>) -> Option<T>) -> Option<T> {
    let (process, mut found) = (Process::default(), None);
    iterate(&mut |info| {
        let object = Listed {
            base: info.dlpi_addr,
            name: info.dlpi_name,
            counts: [info.dlpi_adds, info.dlpi_subs],
            headers: (info.dlpi_phdr as u64, info.dlpi_phnum),
            window: &Window::new(&process),
        };
        found = visit(&object);
        found.is_some()
    });
    found
}

/// How many libraries the loader has loaded and unloaded so far.
pub fn counts() -> [u64; 2] {
    let mut counts = [0; 2];
    list::go_through(&mut |info| {
        counts = [info.dlpi_adds, info.dlpi_subs];
        true
    });
    counts
}

/// Shows what the loader lists until `visit` has seen enough. No handler of a signal runs
/// meanwhile: one that jumps away would leave the lock of that list held.
pub fn iterate(visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    // SAFETY: plain calls on records of ours. What the processor itself reports can't wait.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        list::go_through(visit);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}
