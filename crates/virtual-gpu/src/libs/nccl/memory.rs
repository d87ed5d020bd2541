//! The memory that NCCL takes of a device: an estimate, by NVIDIA/nccl's
//! public sources and what people measured.
//!
//! * *A connection* of one channel to a peer on the same machine has a buffer for each protocol,
//!   LL, LL128 and Simple, at the receiver, and little at the sender (`src/transport/p2p.cc`). The
//!   sizes are in `src/init.cc`; NCCL's variables change them. Both are rounded up to 2 MiB. Where
//!   the receiver reads (Ampere with NVLink), Simple's lies at the sender.
//! * *Rings* connect each channel to the next and from the previous rank; with three ranks and
//!   more, *trees* connect it once more from a peer. NCCL does that at the first operation.
//! * *Send and receive* connect to each peer anew, over as many channels as there are for a peer.
//! * *A pool for the network* is there from the beginning, used or not: 16 pieces for each
//!   channel of sends (`src/transport/net.cc`).
//!
//! How many channels there are NCCL finds out from the wires. Here: two for each link of an A100 or
//! B200, 24 with an H100, as its logs say; four over PCIe. With that, two of four A100 come to the
//! 544 MiB that were measured, and four of them to 688 (NVIDIA/nccl issue 964). An exchange of
//! eight H100 comes to 3.39 GiB, where "3.28 GB" were measured (issue 1685). Not there: NVLink
//! SHARP's buffers, `CollNet`'s, what a new kernel brings, and pinned host memory.

use super::{Comm, Status, by_symbol, ncclMemAlloc, ncclMemFree, versions};
use crate::constants as c;
use crate::gpu::{self, boundary::Out};
use core::ffi::{CStr, c_void};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where the figures come from.
pub const SOURCE: &str =
    "estimate: NCCL's public sources (p2p.cc, net.cc, init.cc), nccl issues 964 and 1685";

const MIB: u64 = 1 << 20;
/// What connections are rounded up to.
const UNIT: u64 = 2 * MIB;
/// Ranks of one machine.
const MACHINE: i32 = 8;

/// What NCCL would find out about the wires.
#[derive(Clone, Copy)]
struct Wires {
    /// Channels of collectives.
    channels: u64,
    /// Channels of sends, in all and to one peer.
    sends: u64,
    to_peer: u64,
    /// The receiver reads from the sender's memory.
    reads: bool,
    /// A piece of the pool for the network.
    chunk: u64,
}

/// A number that the user gives NCCL in its own variable. No buffer is larger
/// than a terabyte, which no card has.
fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok().map(|number: u64| number.min(1 << 40))
}

fn wires(sm: u32, linked: bool) -> Wires {
    let channels = match sm {
        _ if !linked => 4,
        ..80 => 12,
        80..100 => 24,
        _ => 36,
    };
    let least = variable("NCCL_MIN_NCHANNELS").or_else(|| variable("NCCL_MIN_CTAS")).unwrap_or(1);
    let most = variable("NCCL_MAX_NCHANNELS").or_else(|| variable("NCCL_MAX_CTAS")).unwrap_or(64);
    let channels = channels.min(most.max(1)).max(least.min(64));
    let sends = channels.next_power_of_two();
    Wires {
        channels,
        sends,
        to_peer: if linked { sends } else { sends.min(2) },
        reads: linked && sm == 80,
        chunk: if linked { 512 << 10 } else { 128 << 10 },
    }
}

/// Bytes of one connection: at the sender and at the receiver.
fn connection(reads: bool) -> (u64, u64) {
    /// Heads, tails and flags.
    const HEADER: u64 = 2 * 4096;
    let simple = variable("NCCL_BUFFSIZE").unwrap_or(4 * MIB);
    let low_latency = variable("NCCL_LL_BUFFSIZE").unwrap_or(512 << 10)
        + variable("NCCL_LL128_BUFFSIZE").unwrap_or(120 * 640 * 8 * 8);
    let (sender, receiver) = if reads { (simple, low_latency) } else { (0, low_latency + simple) };
    let rounded = |bytes: u64| (bytes + HEADER).next_multiple_of(UNIT);
    (rounded(sender), rounded(receiver))
}

/// The pool for the network.
fn pool(wires: Wires, ranks: i32) -> u64 {
    const PIECES: u64 = 16;
    // Who is alone in its communicator has had one since 2.28 (nccl issue 2363).
    let [major, minor, _] = versions::nccl();
    if ranks > 1 || (major, minor) >= (2, 28) { wires.sends * PIECES * wires.chunk } else { 0 }
}

/// Rings and trees.
fn rings(wires: Wires, ranks: i32) -> u64 {
    let (sender, receiver) = connection(wires.reads);
    match ranks {
        ..2 => 0,
        2 => wires.channels * (sender + receiver),
        _ => wires.channels * (sender + 2 * receiver),
    }
}

/// What a communicator has taken.
#[derive(Default)]
struct Taken {
    blocks: Vec<u64>,
    connected: bool,
    /// To and from whom.
    peers: BTreeSet<(i32, bool)>,
}

/// By the communicator's handle.
fn all() -> MutexGuard<'static, BTreeMap<usize, Taken>> {
    static ALL: Mutex<BTreeMap<usize, Taken>> = Mutex::new(BTreeMap::new());
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wires_of(comm: Comm) -> Status<Wires> {
    let gpu = gpu::device(comm.device).map_err(|_| c::ncclUnhandledCudaError)?;
    Ok(wires(gpu.profile.sm, gpu.profile.nvlink))
}

/// A new communicator takes its pool.
pub(super) fn begin(handle: *mut c_void, comm: Comm) -> Status {
    all().insert(handle.addr(), Taken::default());
    take(handle, comm, pool(wires_of(comm)?, comm.ranks))
}

/// The first operation connects rings and trees.
pub(super) fn connect(handle: *mut c_void, comm: Comm) -> Status {
    let first =
        all().get_mut(&handle.addr()).is_some_and(|t| !core::mem::replace(&mut t.connected, true));
    if first { take(handle, comm, rings(wires_of(comm)?, comm.ranks)) } else { Ok(()) }
}

/// The first send to a peer, or the first receive from it, connects to it.
/// Peers on other machines use the pool.
pub(super) fn connect_peer(handle: *mut c_void, comm: Comm, peer: i32, receives: bool) -> Status {
    if peer == comm.rank || peer / MACHINE != comm.rank / MACHINE {
        return Ok(());
    }
    let first = all().get_mut(&handle.addr()).is_some_and(|t| t.peers.insert((peer, receives)));
    if !first {
        return Ok(());
    }
    let wires = wires_of(comm)?;
    let (sending, receiving) = connection(wires.reads);
    take(handle, comm, wires.to_peer * if receives { receiving } else { sending })
}

/// A communicator ends.
pub(super) fn end(handle: *mut c_void) {
    let gone = all().remove(&handle.addr());
    for block in gone.into_iter().flat_map(|taken| taken.blocks) {
        // It was taken and can be given back; a device that was reset has it already.
        let _ = ncclMemFree(block);
    }
}

/// Takes memory by NCCL's own public function, where a tool that watches memory sees the call, and
/// whose it is. A capture that is under way doesn't concern it.
fn take(handle: *mut c_void, comm: Comm, bytes: u64) -> Status {
    const RELAXED: i32 = 2;
    if bytes == 0 {
        return Ok(());
    }
    let device = gpu::current_device();
    if device != comm.device {
        call::<i32>(c"cudaSetDevice", comm.device as i32);
    }
    let (mut mode, mut block) = (RELAXED, 0u64);
    call::<*mut i32>(c"cudaThreadExchangeStreamCaptureMode", &raw mut mode);
    // SAFETY: a variable of ours, which outlives the call.
    let code = ncclMemAlloc(
        unsafe { Out::from_address((&raw mut block).expose_provenance() as u64) },
        bytes as usize,
    );
    call::<*mut i32>(c"cudaThreadExchangeStreamCaptureMode", &raw mut mode);
    if device != comm.device {
        call::<i32>(c"cudaSetDevice", device as i32);
    }
    if code != 0 {
        return Err(code);
    }
    all().entry(handle.addr()).or_default().blocks.push(block);
    Ok(())
}

/// A function of the runtime's with one argument, whose code nobody needs.
fn call<T>(name: &CStr, argument: T) {
    // SAFETY: the runtime's functions that are named above have one
    // argument of this type and answer a code.
    let function: extern "C" fn(T) -> i32 = unsafe { core::mem::transmute(by_symbol(name)) };
    function(argument);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_to_what_was_measured() {
        let a100 = wires(80, true);
        assert_eq!((pool(a100, 2) + rings(a100, 2)) / MIB, 544, "two A100: nccl issue 964");
        assert_eq!((pool(a100, 4) + rings(a100, 4)) / MIB, 688, "four A100: nccl issue 964");
        assert_eq!(connection(false), (2_097_152, 10_485_760), "the two sizes in nccl issue 1685");
        let h100 = wires(90, true);
        let (sender, receiver) = connection(h100.reads);
        let exchange = pool(h100, 8) + rings(h100, 8) + 7 * h100.to_peer * (sender + receiver);
        assert_eq!(
            7 * h100.to_peer * (sender + receiver) / MIB,
            2688,
            "32 channels to each, as there"
        );
        let measured = 3.28 * 1024.0; // or thousands: the issue doesn't say
        assert!((exchange as f64 / MIB as f64 / measured - 1.0).abs() < 0.04, "nccl issue 1685");
        assert_eq!(pool(wires(103, true), 2) / MIB, 512, "nccl issue 2363");
        assert!(rings(wires(75, false), 2) < 64 * MIB);
    }
}
