//! The map of addresses that the virtual GPU hands out.
//!
//! ```text
//! 0x0400_0000_0000   handles (numbers only, nothing is mapped)
//! 0x0800_0000_0000   host memory that CUDA allocates: pinned and managed       4 TiB
//! 0x1000_0000_0000   the devices, 4 TiB each:
//!                      heap 2 TiB | pools 1.5 TiB | module variables 0.5 TiB
//! 0x5800_0000_0000   reserved ranges of virtual memory management             32 TiB
//! ```
//!
//! The ranges are the same in every run, so addresses are. They keep clear of where Linux puts
//! position-independent programs (0x55…) and shared libraries (0x7f…). Device addresses are
//! reserved as inaccessible pages. They cost no memory, and nothing else gets mapped there. A
//! host that touches device memory faults as it does with a card. If a range is taken, another
//! is used and only the equality between runs is lost. Only as many devices' ranges are
//! reserved as there are devices. There must be room beside a sanitizer's shadow memory, and
//! where shared libraries lie low (`ulimit -s unlimited`). Under valgrind, which has a record
//! for each page of a range, none is reserved.

use core::ptr::{null_mut, without_provenance_mut};
use std::sync::OnceLock;

const TIB: u64 = 1 << 40;
/// The unit of the driver: physical memory comes in chunks of 2 MiB.
pub const CHUNK: u64 = 2 << 20;

/// Host memory that CUDA allocates.
pub const HOST: u64 = 0x0800_0000_0000;
const HOST_SIZE: u64 = 4 * TIB;
const DEVICES: u64 = 0x1000_0000_0000;
const DEVICE_SIZE: u64 = 4 * TIB;
const RESERVATIONS: u64 = 0x5800_0000_0000;
const RESERVATIONS_SIZE: u64 = 32 * TIB;

/// Offsets of a device's parts.
const POOLS: u64 = 2 * TIB;
const VARIABLES: u64 = 3 * TIB + TIB / 2;

/// A half-open range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
}

impl Range {
    fn contains(self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }
}

/// The ranges of this process.
pub struct Map {
    /// Pinned and managed memory.
    pub host: Range,
    devices: Range,
    /// Where `cuMemAddressReserve` takes from.
    pub reservations: Range,
}

impl Map {
    /// Ranges from `take`, which is asked with the start that we wish and the size.
    fn new(devices: usize, take: impl Fn(u64, u64) -> Range) -> Map {
        Map {
            host: take(HOST, HOST_SIZE),
            devices: take(DEVICES, DEVICE_SIZE * devices.max(1) as u64),
            reservations: take(RESERVATIONS, RESERVATIONS_SIZE),
        }
    }

    fn device(&self, device: usize, from: u64, to: u64) -> Range {
        let start = self.devices.start + device as u64 * DEVICE_SIZE;
        Range { start: start + from, end: start + to }
    }

    /// Where `cudaMalloc` takes from.
    pub fn heap(&self, device: usize) -> Range {
        self.device(device, 0, POOLS)
    }

    /// Where the stream-ordered pools take from.
    pub fn pools(&self, device: usize) -> Range {
        self.device(device, POOLS, VARIABLES)
    }

    /// Where the variables of loaded modules lie.
    pub fn variables(&self, device: usize) -> Range {
        self.device(device, VARIABLES, DEVICE_SIZE)
    }
}

static MAP: OnceLock<Map> = OnceLock::new();

/// Reserves the ranges for so many devices, once.
pub fn init(devices: usize) -> &'static Map {
    MAP.get_or_init(|| Map::new(devices, reserve))
}

/// The host may not touch this address: it is device memory.
pub fn is_device(addr: u64) -> bool {
    MAP.get().is_some_and(|map| map.devices.contains(addr) || map.reservations.contains(addr))
}

/// Does the program run under valgrind, whose library is preloaded?
fn under_valgrind() -> bool {
    std::env::var_os("LD_PRELOAD").is_some_and(|v| v.to_string_lossy().contains("/vgpreload_"))
}

fn reserve(wish: u64, size: u64) -> Range {
    if under_valgrind() {
        super::log::warn("under valgrind the addresses of device memory are not reserved");
        return Range { start: wish, end: wish + size };
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    for (place, extra) in
        [(without_provenance_mut(wish as usize), libc::MAP_FIXED_NOREPLACE), (null_mut(), 0)]
    {
        // SAFETY: a new anonymous mapping; NOREPLACE means it never lands on an existing one.
        let got =
            unsafe { libc::mmap(place, size as usize, libc::PROT_NONE, flags | extra, -1, 0) };
        let start = got.addr() as u64;
        if got == libc::MAP_FAILED {
            continue;
        }
        if !place.is_null() && start != wish {
            // A kernel without NOREPLACE takes the address as a hint.
            // SAFETY: unmaps what the line above mapped, which nobody knows yet.
            unsafe { libc::munmap(got, size as usize) };
            continue;
        }
        // A core dump must not walk terabytes of nothing. A kernel that can't do this only dumps
        // slower. SAFETY: concerns the mapping just made.
        unsafe { libc::madvise(got, size as usize, libc::MADV_DONTDUMP) };
        return Range { start, end: start + size };
    }
    super::log::warn(
        "the address range for device memory could not be reserved (is there a limit on \
         virtual memory, ulimit -v?); device pointers may collide with the program's own",
    );
    Range { start: wish, end: wish + size }
}

/// Makes `size` bytes at `place`, inside the host range, readable and writable zeros.
pub fn commit(place: u64, size: u64) -> bool {
    let at = without_provenance_mut(place as usize);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: `place` was taken from the ledger of the host range, so only
    // our reservation is replaced.
    let got = unsafe { libc::mmap(at, size as usize, access, flags, -1, 0) };
    got != libc::MAP_FAILED
}

/// Gives the memory of `commit` back and keeps the range reserved.
pub fn decommit(place: u64, size: u64) {
    let at = without_provenance_mut(place as usize);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces a mapping that `commit` made and whose owner has just given it up.
    unsafe { libc::mmap(at, size as usize, libc::PROT_NONE, flags, -1, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_devices_do_not_overlap() {
        let map = Map::new(16, |start, size| Range { start, end: start + size });
        let mut ranges = vec![map.host, map.reservations];
        for d in 0..16 {
            ranges.extend([map.heap(d), map.pools(d), map.variables(d)]);
        }
        ranges.sort_by_key(|r| r.start);
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
        assert!(
            map.devices.contains(map.variables(15).start) && !map.devices.contains(map.host.start)
        );
    }
}
