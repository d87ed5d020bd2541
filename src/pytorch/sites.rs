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

use memtrace_symbols::names_at;

use crate::libraries::loaded;
use crate::os::signals;
use crate::os::sync::{atomics, of_process};
use crate::pair::{FREE, Pair};
use crate::pytorch::allocator;
use crate::pytorch::names::{C10_CUDA, PROGRAMS};
use crate::record::guard;

/// Call sites that are remembered: the return address, and whether it is the program's.
const SITES: usize = 32;
of_process! {
    static KNOWN: [Pair; SITES] = atomics![Pair::new(); SITES];
}

/// Is the call that returns to this address the allocator's own?
pub fn is_allocator(address: usize) -> bool {
    allocator::is_caller(address) && !is_programs(address)
}

fn is_programs(address: usize) -> bool {
    if let Some(answer) = KNOWN.iter().find_map(|site| site.get(address as u64)) {
        return answer == 1;
    }
    // Opens a file: what that calls is not the program's doing, and a
    // cancelled thread must not end in it.
    let programs = guard::nested(|| signals::uncancelled(|| look_up(address).unwrap_or(false)));
    // Two threads may note the same site twice; a full table looks it up again.
    KNOWN.iter().find(|site| site.put(FREE, address as u64, u64::from(programs)));
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
