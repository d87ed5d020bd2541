//! NCCL: communicators of one real and many pretended ranks.
//!
//! There is no wire. A communicator knows how many ranks it has and which one this process is.
//! Every collective acts as if each rank held what this one holds (see `collective`). So one
//! process can be rank 3 of 8, and two processes that torchrun starts do the same without
//! noticing each other. That is right for memory: what a rank needs doesn't depend on its
//! peers' data, as far as shapes don't.
//!
//! *Splitting*: how many ranks share a colour is only known to all of them together. Ranks that
//! exist exchange it (see `rendezvous`). Where some are pretended, the new communicator is taken to
//! be as large as the old one, unless the program has given the number just before
//! (`memtrace_virtual_split_ranks`). PyTorch keeps its own count of a group's ranks and allocates
//! by that. What NCCL itself takes from the device is an estimate (see `memory`).

pub(super) mod collective;
pub(super) mod group;
pub(crate) mod memory;
mod rendezvous;

use super::{Library, Status, versions};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use crate::gpu::{self, log};
use crate::{driver, runtime};
use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use rendezvous::Rendezvous;

const NCCL: Library = Library::Nccl;

/// A communicator.
#[derive(Clone, Copy)]
struct Comm {
    ranks: i32,
    rank: i32,
    device: usize,
}

static COMMS: Registry<(Comm, Rendezvous)> = Registry::new(42);
/// Registered buffers and windows; what they hold is of no consequence.
static REGISTRATIONS: Registry<()> = Registry::new(43);

/// What ranks exchange to find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId([u8; 128]);

#[cfg(test)]
memtrace_layouts::same_layout!(UniqueId = cudarc::nccl::sys::ncclUniqueId { 0: internal });
const _: () = assert!(size_of::<UniqueId>() == crate::layout::all::ncclUniqueId::SIZE);

fn comm(handle: *mut c_void) -> Status<Comm> {
    COMMS.with(handle, |(comm, _)| *comm).ok_or(NCCL.bad_value())
}

/// Makes a communicator and answers its handle, unless there is no memory for it.
fn give_new(out: Out<*mut c_void>, comm: Comm, rendezvous: Rendezvous) -> Status {
    let handle = COMMS.insert((comm, rendezvous));
    if let Err(code) = memory::begin(handle, comm) {
        destroy(handle)?;
        return Err(code);
    }
    NCCL.give(out, handle)
}

fn new_comm(out: Out<*mut c_void>, ranks: i32, rank: i32, id: Option<UniqueId>) -> i32 {
    NCCL.answer(|| {
        if out.is_null() || ranks < 1 || !(0..ranks).contains(&rank) {
            return Err(NCCL.bad_value());
        }
        let device = gpu::current_device();
        gpu::touch(device).map_err(|_| c::ncclUnhandledCudaError)?;
        let rendezvous = match id.and_then(UniqueId::name) {
            Some(name) => Rendezvous::join(&name, rank, ranks),
            None => Rendezvous::alone(),
        };
        give_new(out, Comm { ranks, rank, device }, rendezvous)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(out: Out<i32>) -> i32 {
    let [major, minor, patch] = versions::nccl();
    NCCL.answer(|| NCCL.give(out, (major * 10_000 + minor * 100 + patch) as i32))
}

impl UniqueId {
    /// Good for a file name, if it is one of ours. PyTorch's test stores answer with zeros.
    fn name(self) -> Option<String> {
        let text = self.0.strip_prefix(ID_MARK)?;
        let end = text.iter().position(|byte| *byte == 0)?;
        let name = core::str::from_utf8(&text[..end]).ok()?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        name.bytes().all(plain).then(|| name.to_owned())
    }
}

const ID_MARK: &[u8] = b"memtrace virtual NCCL ";

/// Another one in each process and at each time, so that a file left by a crash is nobody's.
pub(super) fn unique_id() -> UniqueId {
    static ISSUED: AtomicU64 = AtomicU64::new(0);
    let number = ISSUED.fetch_add(1, Relaxed);
    let time = std::time::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos());
    let name = format!("{}-{time:x}-{number}", std::process::id());
    let mut id = UniqueId([0; 128]);
    let mut place = &mut id.0[..];
    for part in [ID_MARK, name.as_bytes()] {
        place[..part.len()].copy_from_slice(part);
        place = &mut place[part.len()..];
    }
    id
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(out: Out<UniqueId>) -> i32 {
    NCCL.answer(|| NCCL.give(out, unique_id()))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetUniqueId(handle: *mut c_void, out: Out<UniqueId>) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        NCCL.give(out, unique_id())
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn ncclCommInitRank(
    out: Out<*mut c_void>,
    ranks: i32,
    id: UniqueId,
    rank: i32,
) -> i32 {
    new_comm(out, ranks, rank, Some(id))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    out: Out<*mut c_void>,
    ranks: i32,
    id: UniqueId,
    rank: i32,
    _config: *mut c_void,
) -> i32 {
    new_comm(out, ranks, rank, Some(id))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankScalable(
    out: Out<*mut c_void>,
    ranks: i32,
    rank: i32,
    _id_count: i32,
    ids: In<UniqueId>,
    _config: *mut c_void,
) -> i32 {
    new_comm(out, ranks, rank, ids.get().ok())
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(out: Out<*mut c_void>, count: i32, devices: In<i32>) -> i32 {
    NCCL.answer(|| {
        if out.is_null() || count < 1 {
            return Err(NCCL.bad_value());
        }
        let given = devices.list(count as usize);
        for rank in 0..count {
            let device = given.get(rank as usize).copied().unwrap_or(rank);
            let device = usize::try_from(device).map_err(|_| NCCL.bad_value())?;
            gpu::device(device).map_err(|_| NCCL.bad_value())?;
            gpu::touch(device).map_err(|_| c::ncclUnhandledCudaError)?;
            let comm = Comm { ranks: count, rank, device };
            let handle = COMMS.insert((comm, Rendezvous::alone()));
            memory::begin(handle, comm)?;
            out.at(rank as usize * size_of::<*mut c_void>()).give(handle);
        }
        Ok(())
    })
}

static SPLIT_RANKS: AtomicI32 = AtomicI32::new(0);

/// Says how many ranks the communicator will have that `ncclCommSplit` makes next.
#[unsafe(no_mangle)]
extern "C" fn memtrace_virtual_split_ranks(ranks: i32) {
    SPLIT_RANKS.store(ranks.max(0), Relaxed);
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(
    handle: *mut c_void,
    colour: i32,
    key: i32,
    out: Out<*mut c_void>,
    _config: *mut c_void,
) -> i32 {
    NCCL.answer(|| {
        let parent = comm(handle)?;
        // Not under the registry's lock: it waits for other processes.
        let mut rendezvous = COMMS.with(handle, |(_, m)| m.clone()).ok_or(NCCL.bad_value())?;
        let choices = rendezvous.split(colour, key);
        let child = rendezvous.child(colour);
        COMMS.with(handle, |(_, m)| *m = rendezvous);
        let told = SPLIT_RANKS.swap(0, Relaxed);
        if colour < 0 {
            return NCCL.give(out, core::ptr::null_mut());
        }
        let place = choices.and_then(|all| rendezvous::place(&all, parent.rank));
        let (ranks, rank) = place.unwrap_or_else(|| {
            let ranks = if told > 0 { told.min(parent.ranks) } else { parent.ranks };
            log::debug(1, || format!("ncclCommSplit: taken to make {ranks} ranks"));
            (ranks, if (0..ranks).contains(&key) { key } else { parent.rank % ranks })
        });
        let rendezvous = Rendezvous::join(&child, rank, ranks);
        give_new(out, Comm { ranks, rank, ..parent }, rendezvous)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommShrink(
    handle: *mut c_void,
    excluded: In<i32>,
    count: i32,
    out: Out<*mut c_void>,
    _config: *mut c_void,
    _flags: i32,
) -> i32 {
    NCCL.answer(|| {
        let parent = comm(handle)?;
        let excluded = excluded.list(count.max(0) as usize);
        if excluded.contains(&parent.rank) || excluded.len() as i32 >= parent.ranks {
            return Err(NCCL.bad_value());
        }
        let before = excluded.iter().filter(|r| **r < parent.rank).count() as i32;
        let ranks = parent.ranks - excluded.len() as i32;
        let comm = Comm { ranks, rank: parent.rank - before, ..parent };
        give_new(out, comm, Rendezvous::alone())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGrow(
    handle: *mut c_void,
    ranks: i32,
    id: In<UniqueId>,
    rank: i32,
    out: Out<*mut c_void>,
    _config: *mut c_void,
) -> i32 {
    // A rank that was there before keeps its number and passes -1.
    let rank = comm(handle).map_or(rank, |parent| if rank < 0 { parent.rank } else { rank });
    new_comm(out, ranks, rank, id.get().ok())
}

fn destroy(handle: *mut c_void) -> Status {
    let (_, rendezvous) = COMMS.remove(handle).ok_or(NCCL.bad_value())?;
    memory::end(handle);
    rendezvous.leave();
    Ok(())
}

fn end(handle: *mut c_void) -> i32 {
    NCCL.answer(|| destroy(handle))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(handle: *mut c_void) -> i32 {
    end(handle)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: *mut c_void) -> i32 {
    end(handle)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(handle: *mut c_void) -> i32 {
    NCCL.answer(|| comm(handle).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, out: Out<i32>) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        NCCL.give(out, c::ncclSuccess)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCount(handle: *mut c_void, out: Out<i32>) -> i32 {
    NCCL.answer(|| NCCL.give(out, comm(handle)?.ranks))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommUserRank(handle: *mut c_void, out: Out<i32>) -> i32 {
    NCCL.answer(|| NCCL.give(out, comm(handle)?.rank))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCuDevice(handle: *mut c_void, out: Out<i32>) -> i32 {
    NCCL.answer(|| NCCL.give(out, comm(handle)?.device as i32))
}

/// The names of results, as texts: NCCL's are sentences, these say as much.
fn result_text(result: i32) -> &'static CStr {
    match result {
        c::ncclSuccess => c"no error",
        c::ncclUnhandledCudaError => c"unhandled cuda error",
        c::ncclSystemError => c"unhandled system error",
        c::ncclInternalError => c"internal error",
        c::ncclInvalidArgument => c"invalid argument",
        c::ncclInvalidUsage => c"invalid usage",
        c::ncclRemoteError => c"remote error",
        c::ncclInProgress => c"in progress",
        _ => c"unknown result code",
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(result: i32) -> *const c_char {
    result_text(result).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_handle: *mut c_void) -> *const c_char {
    c"".as_ptr()
}

// Not inlined: by its name a tool that watches memory knows whose call it is.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn ncclMemAlloc(out: Out<u64>, size: usize) -> i32 {
    type Malloc = extern "C" fn(Out<u64>, usize) -> i32;
    if out.is_null() {
        return NCCL.bad_value();
    }
    let malloc = by_symbol(c"cudaMalloc");
    // SAFETY: whoever defines the symbol, its signature is the runtime's.
    let malloc: Malloc = unsafe { std::mem::transmute(malloc) };
    if malloc(out, size) == 0 { 0 } else { c::ncclUnhandledCudaError }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn ncclMemFree(addr: u64) -> i32 {
    type Free = extern "C" fn(u64) -> i32;
    let free = by_symbol(c"cudaFree");
    // SAFETY: as for `cudaMalloc`.
    let free: Free = unsafe { std::mem::transmute(free) };
    if free(addr) == 0 { 0 } else { c::ncclUnhandledCudaError }
}

/// A function of the runtime as the real NCCL, another library, finds it. A tool
/// that watches memory then sees the call, and that it is NCCL's. Not this library's
/// own scope, which begins with itself.
fn by_symbol(name: &CStr) -> *mut c_void {
    // SAFETY: looks only.
    let found =
        unsafe { libc::dlsym(libc::dlopen(core::ptr::null(), libc::RTLD_LAZY), name.as_ptr()) };
    if !found.is_null() {
        return found;
    }
    // Nobody has it where this library was not preloaded.
    match name.to_bytes() {
        b"cudaMalloc" => runtime::memory::cudaMalloc as *mut c_void,
        b"cudaFree" => driver::memory::cudaFree as *mut c_void,
        b"cudaSetDevice" => runtime::device::cudaSetDevice as *mut c_void,
        _ => driver::stream::cudaThreadExchangeStreamCaptureMode as *mut c_void,
    }
}

fn register(handle: *mut c_void, out: Out<*mut c_void>) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        NCCL.give(out, REGISTRATIONS.insert(()))
    })
}

fn deregister(handle: *mut c_void, registration: *mut c_void) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        let found = registration.is_null() || REGISTRATIONS.remove(registration).is_some();
        if found { Ok(()) } else { Err(NCCL.bad_value()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommRegister(
    handle: *mut c_void,
    _buffer: *mut c_void,
    _size: usize,
    out: Out<*mut c_void>,
) -> i32 {
    register(handle, out)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDeregister(handle: *mut c_void, registration: *mut c_void) -> i32 {
    deregister(handle, registration)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommWindowRegister(
    handle: *mut c_void,
    _buffer: *mut c_void,
    _size: usize,
    out: Out<*mut c_void>,
    _flags: i32,
) -> i32 {
    register(handle, out)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommWindowDeregister(handle: *mut c_void, window: *mut c_void) -> i32 {
    deregister(handle, window)
}

/// Operators beyond the built-in ones only get a number: what they compute is not known.
static OPERATORS: AtomicI32 = AtomicI32::new(c::ncclNumOps);

#[unsafe(no_mangle)]
extern "C" fn ncclRedOpCreatePreMulSum(
    out: Out<i32>,
    _scalar: *mut c_void,
    _data_type: i32,
    _residence: i32,
    handle: *mut c_void,
) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        NCCL.give(out, OPERATORS.fetch_add(1, Relaxed))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRedOpDestroy(operator: i32, handle: *mut c_void) -> i32 {
    NCCL.answer(|| {
        comm(handle)?;
        let own = (c::ncclNumOps..OPERATORS.load(Relaxed)).contains(&operator);
        if own { Ok(()) } else { Err(NCCL.bad_value()) }
    })
}
