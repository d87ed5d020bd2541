//! Which of the calls out of PyTorch's allocator library are the allocator's.
//!
//! `libc10_cuda.so` also has `c10::cuda::impl::CUDAGuardImpl`. With the same runtime calls it
//! records and queries events of the program's (`torch.Event`, autograd's joins of streams). But
//! only the allocator's events decide when a block is free again. So the function that a call
//! stands in must be known. The library's own symbol table is looked at once for each call site, of
//! which there is a handful, and the answer is remembered.
//!
//! A library that was stripped of its symbols leaves that open. Then every call counts as the
//! allocator's, which is right for all programs but those that record such events.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_symbols::names_at;

use crate::libraries::loaded;
use crate::os::signals;
use crate::pytorch::allocator;
use crate::pytorch::names::{C10_CUDA, PROGRAMS};
use crate::record::guard;

/// Call sites that are remembered: the return address, with the lowest bit
/// of the entry after it for the answer.
const SITES: usize = 32;
static KNOWN: [[AtomicUsize; 2]; SITES] = [const { [const { AtomicUsize::new(0) }; 2] }; SITES];

/// Is the call that returns to this address the allocator's own?
pub fn is_allocator(address: usize) -> bool {
    allocator::is_caller(address) && !is_programs(address)
}

fn is_programs(address: usize) -> bool {
    for [site, answer] in &KNOWN {
        match site.load(Ordering::Acquire) {
            0 => break,
            known if known == address => return answer.load(Ordering::Relaxed) == 1,
            _ => {}
        }
    }
    // Opens a file: what that calls is not the program's doing, and a
    // cancelled thread must not end in it.
    let programs = guard::nested(|| signals::uncancelled(|| look_up(address).unwrap_or(false)));
    // Two threads may note the same site twice; a full table looks it up again.
    if let Some([site, answer]) = KNOWN.iter().find(|[site, _]| {
        // Reserved by an address that no call returns to, until the answer is in place.
        site.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }) {
        answer.store(usize::from(programs), Ordering::Relaxed);
        site.store(address, Ordering::Release);
    }
    programs
}

fn look_up(address: usize) -> Option<bool> {
    let library = loaded::loaded(C10_CUDA)?;
    let path = Path::new(OsStr::from_bytes(library.path.as_bytes()));
    // The call lies before the address that it returns to.
    let place = (address - 1).checked_sub(library.base)? as u64;
    let name = names_at(path, &[], &[place])?.pop()??;
    Some(name.contains(PROGRAMS))
}
