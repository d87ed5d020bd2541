//! A random walk over the driver's memory calls, by a client that opens the driver
//! itself (`cudarc`, dynamic loading).
//!
//! Beside each call runs a model of what must then be alive, in the plainest possible terms. At a
//! few places the program asks for a snapshot and prints what the model says; the test compares.
//! Calls that must fail are part of the walk, too, and change nothing in the model.
//!
//! Arguments: the number of calls, and the seed. `CLIENT_OUT` is where snapshots go.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUresult, CUstream};

const MIB2: u64 = 2 << 20;
/// Things of each sort that are alive at most.
const MOST: usize = 150;

fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

fn refused(result: CUresult) {
    assert_ne!(result, CUresult::CUDA_SUCCESS, "this can't have worked");
}

/// xorshift64
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }
}

/// How a piece of memory came, and so how it goes.
#[derive(Clone, Copy, PartialEq)]
enum Sort {
    Plain,
    Rows,
    Managed,
    Ordered,
    Pinned,
    Registered,
}

#[derive(Clone, Copy)]
struct Piece {
    sort: Sort,
    addr: u64,
    size: u64,
    device: usize,
}

struct Physical {
    handle: u64,
    size: u64,
    device: usize,
    references: u32,
}

#[derive(Clone, Copy)]
struct Mapping {
    size: u64,
    offset: u64,
    handle: u64,
}

/// What is alive.
#[derive(Default)]
struct Model {
    pieces: Vec<Piece>,
    physical: Vec<Physical>,
    mappings: BTreeMap<u64, Mapping>,
    reservations: Vec<(u64, u64)>,
    pools: Vec<(sys::CUmemoryPool, usize)>,
}

impl Model {
    fn sum(&self, device: Option<usize>, sorts: &[Sort]) -> u64 {
        let of = |p: &&Piece| sorts.contains(&p.sort) && device.is_none_or(|d| d == p.device);
        self.pieces.iter().filter(of).map(|p| p.size).sum()
    }

    fn device_of(&self, handle: u64) -> usize {
        self.physical.iter().find(|p| p.handle == handle).expect("mapped memory is there").device
    }

    fn drop_unused(&mut self) {
        let mapped = |h: u64| self.mappings.values().any(|m| m.handle == h);
        let kept: Vec<bool> =
            self.physical.iter().map(|p| p.references > 0 || mapped(p.handle)).collect();
        let mut kept = kept.into_iter();
        self.physical.retain(|_| kept.next() == Some(true));
    }

    /// Segments that a snapshot must show: address, size, device; the host is −1.
    fn segments(&self) -> Vec<(u64, u64, i64)> {
        let host = [Sort::Pinned, Sort::Registered];
        let device = |p: &Piece| if host.contains(&p.sort) { -1 } else { p.device as i64 };
        let mut shown: Vec<_> = self.pieces.iter().map(|p| (p.addr, p.size, device(p))).collect();
        let mut taken: Vec<&Mapping> = Vec::new();
        for (addr, m) in &self.mappings {
            let meets = |o: &&&Mapping| {
                o.handle == m.handle && o.offset < m.offset + m.size && m.offset < o.offset + o.size
            };
            if taken.iter().find(meets).is_none() {
                taken.push(m);
                shown.push((*addr, m.size, self.device_of(m.handle) as i64));
            }
        }
        shown.sort_unstable();
        shown
    }

    fn print(&self, name: &str, path: &str) {
        let columns = |d: usize| {
            let physical: u64 =
                self.physical.iter().filter(|p| p.device == d).map(|p| p.size).sum();
            let mapped: u64 = self
                .mappings
                .values()
                .filter(|m| self.device_of(m.handle) == d)
                .map(|m| m.size)
                .sum();
            let [plain, ordered, managed] =
                [&[Sort::Plain, Sort::Rows][..], &[Sort::Ordered], &[Sort::Managed]]
                    .map(|sorts| self.sum(Some(d), sorts));
            format!("[{plain}, {ordered}, 0, {physical}, {mapped}, {managed}, 0, 0, 1, 0, 0]")
        };
        let [pinned, registered] =
            [Sort::Pinned, Sort::Registered].map(|sort| self.sum(None, &[sort]));
        let reserved: u64 = self.reservations.iter().map(|(_, size)| size).sum();
        let segments: Vec<_> =
            self.segments().iter().map(|(a, s, d)| format!("[{a}, {s}, {d}]")).collect();
        println!(
            "{{\"step\": \"{name}\", \"path\": \"{path}\", \"0\": {}, \"1\": {}, \
             \"-1\": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], \"host\": [{pinned}, {registered}], \
             \"reserved\": {reserved}, \"segments\": [{}]}}",
            columns(0),
            columns(1),
            segments.join(", ")
        );
    }
}

struct Walk {
    random: Random,
    model: Model,
    contexts: [sys::CUcontext; 2],
    /// The context of each level that is pushed; the last one is current.
    pushed: Vec<usize>,
    streams: [CUstream; 2],
    /// Memory of our own to register, one page a place.
    pages: Vec<u8>,
}

impl Walk {
    fn device(&self) -> usize {
        *self.pushed.last().expect("one is always current")
    }

    fn any<T>(random: &mut Random, list: &[T]) -> Option<usize> {
        (!list.is_empty()).then(|| random.below(list.len()))
    }

    unsafe fn context(&mut self) {
        let to = self.random.below(2);
        // SAFETY: contexts of ours.
        unsafe {
            match self.random.below(3) {
                0 if self.pushed.len() < 8 => {
                    ok(sys::cuCtxPushCurrent_v2(self.contexts[to]));
                    self.pushed.push(to);
                }
                1 if self.pushed.len() > 1 => {
                    let mut popped = null_mut();
                    ok(sys::cuCtxPopCurrent_v2(&raw mut popped));
                    let was = self.pushed.pop().expect("more than one");
                    assert_eq!(popped, self.contexts[was]);
                }
                _ => {
                    ok(sys::cuCtxSetCurrent(self.contexts[to]));
                    *self.pushed.last_mut().expect("one") = to;
                }
            }
        }
    }

    unsafe fn take(&mut self) {
        if self.model.pieces.len() >= MOST {
            return;
        }
        let mut addr = 0_u64;
        let mut size = 1 + self.random.below(3 << 20) as u64;
        let mut device = self.device();
        // SAFETY: out-parameters of ours.
        let sort = unsafe {
            match self.random.below(8) {
                0 | 1 => {
                    ok(sys::cuMemAlloc_v2(&raw mut addr, size as usize));
                    Sort::Plain
                }
                2 => {
                    let (mut pitch, rows) = (0, 1 + self.random.below(20));
                    let width = 1 + self.random.below(5000);
                    ok(sys::cuMemAllocPitch_v2(&raw mut addr, &raw mut pitch, width, rows, 4));
                    size = (pitch * rows) as u64;
                    Sort::Rows
                }
                3 => {
                    ok(sys::cuMemAllocManaged(&raw mut addr, size as usize, 1));
                    Sort::Managed
                }
                4 => {
                    device = self.random.below(2);
                    let stream = self.streams[device];
                    ok(sys::cuMemAllocAsync(&raw mut addr, size as usize, stream));
                    Sort::Ordered
                }
                5 => {
                    let Some(i) = Self::any(&mut self.random, &self.model.pools) else { return };
                    let pool;
                    (pool, device) = self.model.pools[i];
                    ok(sys::cuMemAllocFromPoolAsync(
                        &raw mut addr,
                        size as usize,
                        pool,
                        self.streams[device],
                    ));
                    Sort::Ordered
                }
                6 => {
                    let mut at = null_mut::<c_void>();
                    ok(sys::cuMemHostAlloc(&raw mut at, size as usize, 0));
                    addr = at as u64;
                    Sort::Pinned
                }
                _ => {
                    let place = self.random.below(self.pages.len() / 4096) * 4096;
                    addr = &raw const self.pages[place] as u64;
                    size = 4096;
                    if self.model.pieces.iter().any(|p| p.addr == addr) {
                        refused(sys::cuMemHostRegister_v2(addr as *mut c_void, 4096, 0));
                        return;
                    }
                    ok(sys::cuMemHostRegister_v2(addr as *mut c_void, 4096, 0));
                    Sort::Registered
                }
            }
        };
        self.model.pieces.push(Piece { sort, addr, size, device });
    }

    unsafe fn give(&mut self) {
        let Some(i) = Self::any(&mut self.random, &self.model.pieces) else { return };
        let Piece { sort, addr, device, .. } = self.model.pieces[i];
        // SAFETY: each piece goes once, by the call that is its own; the
        // wrong ones must be refused.
        unsafe {
            if self.random.below(8) == 0 {
                match sort {
                    Sort::Pinned | Sort::Registered => refused(sys::cuMemFree_v2(addr)),
                    _ => refused(sys::cuMemFreeHost(addr as *mut c_void)),
                }
                return;
            }
            match sort {
                Sort::Plain | Sort::Rows | Sort::Managed => ok(sys::cuMemFree_v2(addr)),
                Sort::Ordered if self.random.below(2) == 0 => ok(sys::cuMemFree_v2(addr)),
                Sort::Ordered => ok(sys::cuMemFreeAsync(addr, self.streams[device])),
                Sort::Pinned => ok(sys::cuMemFreeHost(addr as *mut c_void)),
                Sort::Registered => ok(sys::cuMemHostUnregister(addr as *mut c_void)),
            }
        }
        self.model.pieces.swap_remove(i);
    }

    unsafe fn pools(&mut self) {
        // SAFETY: records and out-parameters of ours.
        unsafe {
            if self.model.pools.len() < 6 {
                let device = self.random.below(2);
                let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
                properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
                properties.location.id = device as c_int;
                let mut pool = null_mut();
                ok(sys::cuMemPoolCreate(&raw mut pool, &raw const properties));
                self.model.pools.push((pool, device));
            } else if self.random.below(50) == 0 {
                // What was taken from it stays.
                let i = self.random.below(self.model.pools.len());
                let (pool, _) = self.model.pools.swap_remove(i);
                ok(sys::cuMemPoolDestroy(pool));
            }
        }
    }

    unsafe fn physical(&mut self) {
        let random = &mut self.random;
        // SAFETY: records and out-parameters of ours.
        unsafe {
            match random.below(4) {
                0 if self.model.physical.len() < MOST => {
                    let (size, device) = (MIB2 * (1 + random.below(4) as u64), random.below(2));
                    let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
                    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
                    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
                    properties.location.id = device as c_int;
                    let mut handle = 0;
                    let wanted = &raw const properties;
                    ok(sys::cuMemCreate(&raw mut handle, size as usize, wanted, 0));
                    self.model.physical.push(Physical { handle, size, device, references: 1 });
                }
                1 => {
                    let Some(i) = Self::any(random, &self.model.physical) else { return };
                    let it = &mut self.model.physical[i];
                    if it.references == 0 {
                        return;
                    }
                    ok(sys::cuMemRelease(it.handle));
                    it.references -= 1;
                    self.model.drop_unused();
                }
                2 => {
                    let mapped: Vec<u64> = self.model.mappings.keys().copied().collect();
                    let Some(i) = Self::any(random, &mapped) else { return };
                    let mut handle = 0;
                    ok(sys::cuMemRetainAllocationHandle(&raw mut handle, mapped[i] as *mut c_void));
                    assert_eq!(handle, self.model.mappings[&mapped[i]].handle);
                    let known = self.model.physical.iter_mut().find(|p| p.handle == handle);
                    known.expect("mapped memory is there").references += 1;
                }
                _ => {
                    let Some(i) = Self::any(random, &self.model.physical) else { return };
                    let it = &mut self.model.physical[i];
                    if it.references == 0 {
                        return;
                    }
                    // Back to one reference, so that it goes some day.
                    while it.references > 1 {
                        ok(sys::cuMemRelease(it.handle));
                        it.references -= 1;
                    }
                }
            }
        }
    }

    unsafe fn map(&mut self) {
        let Some(i) = Self::any(&mut self.random, &self.model.physical) else { return };
        let Some(r) = Self::any(&mut self.random, &self.model.reservations) else { return };
        let Physical { handle, size: whole, references, .. } = self.model.physical[i];
        let (start, length) = self.model.reservations[r];
        let chunks = (whole / MIB2) as usize;
        let offset = MIB2 * self.random.below(chunks) as u64;
        let size = MIB2 * (1 + self.random.below(chunks) as u64);
        let addr = start + MIB2 * self.random.below((length / MIB2) as usize) as u64;
        let meets = |(a, m): (&u64, &Mapping)| *a < addr + size && addr < a + m.size;
        let can = references > 0
            && offset + size <= whole
            && addr + size <= start + length
            && !self.model.mappings.iter().any(meets);
        // SAFETY: addresses and handles of ours; what can't be mapped must be refused.
        let result = unsafe { sys::cuMemMap(addr, size as usize, offset as usize, handle, 0) };
        if can {
            ok(result);
            self.model.mappings.insert(addr, Mapping { size, offset, handle });
        } else {
            refused(result);
        }
    }

    unsafe fn unmap(&mut self) {
        let mapped: Vec<u64> = self.model.mappings.keys().copied().collect();
        let Some(i) = Self::any(&mut self.random, &mapped) else { return };
        let addr = mapped[i];
        let mut end = addr;
        for _ in 0..=self.random.below(3) {
            end += self.model.mappings.get(&end).map_or(0, |m| m.size);
        }
        // SAFETY: addresses of ours; half a mapping must be refused.
        unsafe {
            if self.random.below(5) == 0 {
                refused(sys::cuMemUnmap(addr, (end - addr + MIB2 / 2) as usize));
                return;
            }
            ok(sys::cuMemUnmap(addr, (end - addr) as usize));
        }
        self.model.mappings.retain(|a, _| !(addr..end).contains(a));
        self.model.drop_unused();
    }

    unsafe fn addresses(&mut self) {
        // SAFETY: out-parameters and addresses of ours; what is in use must be refused.
        unsafe {
            if self.model.reservations.len() < 12 {
                let size = MIB2 * (4 + self.random.below(60) as u64);
                let mut addr = 0;
                ok(sys::cuMemAddressReserve(&raw mut addr, size as usize, 0, 0, 0));
                self.model.reservations.push((addr, size));
            } else if self.random.below(20) == 0 {
                let i = self.random.below(self.model.reservations.len());
                let (addr, size) = self.model.reservations[i];
                let used = self.model.mappings.range(addr..addr + size).next().is_some();
                let result = sys::cuMemAddressFree(addr, size as usize);
                if used {
                    refused(result);
                } else {
                    ok(result);
                    self.model.reservations.swap_remove(i);
                }
            }
        }
    }

    unsafe fn nonsense(&mut self) {
        let mut out = 0;
        // SAFETY: an out-parameter of ours, and numbers that are nobody's.
        unsafe {
            match self.random.below(3) {
                0 => refused(sys::cuMemAlloc_v2(&raw mut out, 1 << 45)),
                1 => refused(sys::cuMemFree_v2(0x1234)),
                _ => refused(sys::cuMemFreeAsync(0x5678, self.streams[0])),
            }
        }
    }

    fn step(&mut self) {
        // SAFETY: see each.
        unsafe {
            match self.random.below(20) {
                0 | 1 => self.context(),
                2..=5 => self.take(),
                6..=9 => self.give(),
                10 => self.pools(),
                11 | 12 => self.physical(),
                13..=15 => self.map(),
                16 | 17 => self.unmap(),
                18 => self.addresses(),
                _ => self.nonsense(),
            }
        }
    }
}

fn main() {
    let number = |n: usize| std::env::args().nth(n).and_then(|a| a.parse::<u64>().ok());
    let (calls, seed) = (number(1).unwrap_or(10_000), number(2).unwrap_or(1));
    let out = std::env::var("CLIENT_OUT").expect("CLIENT_OUT is a folder");
    let mut contexts = [null_mut(); 2];
    let mut streams = [null_mut(); 2];
    // SAFETY: out-parameters of ours; the name is a function of memtrace's with this signature.
    let dump: unsafe extern "C" fn(*const c_char) -> c_int = unsafe {
        ok(sys::cuInit(0));
        for d in 0..2 {
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut contexts[d], d as c_int));
            ok(sys::cuCtxSetCurrent(contexts[d]));
            ok(sys::cuStreamCreate(&raw mut streams[d], 1));
        }
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"memtrace_dump".as_ptr());
        assert!(!found.is_null(), "this program is not recorded");
        std::mem::transmute(found)
    };
    let mut walk = Walk {
        random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
        model: Model::default(),
        contexts,
        pushed: vec![1],
        streams,
        pages: vec![0; 64 * 4096],
    };
    for n in 1..=calls {
        walk.step();
        if n % calls.div_ceil(8) == 0 || n == calls {
            let path = format!("{out}/step-{n}.json");
            let name = CString::new(path.clone()).expect("a path has no zero in it");
            // SAFETY: a C string.
            assert_eq!(unsafe { dump(name.as_ptr()) }, 0);
            walk.model.print(&format!("{n} calls"), &path);
        }
    }
}
