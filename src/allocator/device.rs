//! A GPU, as the caching algorithm wants it.
//!
//! The algorithm knows only "there is memory" and "there isn't". Any other failure (of a broken
//! device, say) is kept for whoever made the request ([`Gpu::take_failure`]).

use std::collections::HashMap;
use std::ffi::{c_int, c_void};

use memtrace_caching::Driver;
use memtrace_format::snapshot::PoolId;

use super::cuda;
use crate::pytorch::pools::Function;
use crate::pytorch::{allocator, streams};
use crate::record::guard;

/// `void *(size_t, int device, cudaStream_t)`, as PyTorch wants it of an allocator.
pub type Malloc = unsafe extern "C-unwind" fn(usize, c_int, *mut c_void) -> *mut c_void;
/// `void (void *, size_t, int device, cudaStream_t)`.
pub type Free = unsafe extern "C-unwind" fn(*mut c_void, usize, c_int, *mut c_void);

/// An allocator that a pool has of its own.
#[derive(Clone, Copy)]
pub struct Source {
    /// Asked for memory.
    pub malloc: Malloc,
    /// Takes it back.
    pub free: Free,
}

/// Which allocations go to a pool: PyTorch's `std::function<bool(cudaStream_t)>`.
pub struct Filter(Function);

// SAFETY: PyTorch calls its filters, and lets them go, from whatever thread allocates.
unsafe impl Send for Filter {}

/// A GPU.
pub struct Gpu {
    ordinal: c_int,
    total: u64,
    /// Events that nobody waits for: they are never destroyed, as in PyTorch.
    events: Vec<u64>,
    /// By pool, in the order in which they came.
    filters: Vec<(PoolId, Filter)>,
    /// The pool that the filters chose for the request under way.
    chosen: Option<PoolId>,
    /// Pools with an allocator of their own.
    pub sources: HashMap<PoolId, Source>,
    /// PyTorch's ids of streams, by handle, as far as they were seen.
    streams: Vec<(u64, u64)>,
    /// Devices that may use memory which is mapped here.
    peers: Option<Vec<c_int>>,
    failure: Option<Failure>,
}

/// The code of a call that failed for another reason than a want of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// By the runtime.
    Runtime(c_int),
    /// By the driver.
    Driver(c_int),
}

/// Why there is nothing behind a range.
enum Unmapped {
    /// The device has none left. Only `cuMemCreate`'s answer counts: the same answer of
    /// another call is a failure, as in PyTorch.
    NoMemory,
    /// A call failed with this.
    Failed(c_int),
}

/// A number for a pool, as `Route::Ask` names it.
pub fn route(id: PoolId) -> u64 {
    (id.0 << 32) | (id.1 & 0xffff_ffff)
}

impl Gpu {
    /// The device with this ordinal. Makes no call about it yet.
    pub fn new(ordinal: c_int) -> Gpu {
        let (mut device, mut total) = (0, 0);
        // SAFETY: places of ours.
        unsafe {
            if cuda::cuDeviceGet(&raw mut device, ordinal) == cuda::SUCCESS {
                cuda::cuDeviceTotalMem_v2(&raw mut total, device);
            }
        }
        Gpu {
            ordinal,
            total: total as u64,
            events: Vec::new(),
            filters: Vec::new(),
            chosen: None,
            sources: HashMap::new(),
            streams: Vec::new(),
            peers: None,
            failure: None,
        }
    }

    /// Runs `f` with this device as the thread's.
    fn on_device<R>(&self, f: impl FnOnce() -> R) -> R {
        let mut before = self.ordinal;
        // SAFETY: a place of ours; a device that was chosen before can be chosen again.
        unsafe {
            cuda::cudaGetDevice(&raw mut before);
            if before == self.ordinal {
                return f();
            }
            cuda::cudaSetDevice(self.ordinal);
            let result = f();
            cuda::cudaSetDevice(before);
            result
        }
    }

    /// The code of a call that failed for another reason than a want of memory.
    pub fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    fn failed(&mut self, failure: Failure) {
        if failure != Failure::Runtime(cuda::OUT_OF_MEMORY) {
            self.failure = Some(failure);
        }
        // SAFETY: only words of this thread's. The program must not find
        // an error that it has no call for.
        unsafe { cuda::cudaGetLastError() };
    }

    /// Sends what `filter` wants to a pool.
    pub fn route(&mut self, id: PoolId, filter: Function) {
        self.filters.push((id, Filter(filter)));
    }

    /// Sends nothing there any more.
    pub fn unroute(&mut self, id: PoolId) {
        self.filters.retain(|(other, _)| *other != id);
    }

    /// Asks the filters which pool an allocation on `stream` is for, last come first. They are
    /// PyTorch's code and may throw: so this is to be called where nothing of ours is half done.
    pub fn choose(&mut self, stream: u64) {
        self.chosen = None;
        for (id, Filter(filter)) in self.filters.iter().rev() {
            // SAFETY: a live function of PyTorch's.
            if unsafe { filter.call(stream as *mut c_void) } {
                self.chosen = Some(*id);
                return;
            }
        }
    }

    /// The thread's current stream.
    fn current_stream(&self) -> u64 {
        guard::local(|local| streams::current(local, self.ordinal as i8).0)
    }

    /// A stream that memory is asked for, or that will use some. One that is none of PyTorch's own
    /// is known by its handle, there as here.
    pub fn note_stream(&mut self, stream: u64) {
        if stream != 0 && !self.streams.iter().any(|(known, _)| *known == stream) {
            let id = streams::id(self.ordinal as i8, stream).unwrap_or(stream);
            self.streams.push((stream, id));
        }
    }

    fn peers(&mut self) -> &[c_int] {
        let ordinal = self.ordinal;
        self.peers.get_or_insert_with(|| {
            let mut count = 0;
            // SAFETY: places of ours.
            unsafe {
                cuda::cudaGetDeviceCount(&raw mut count);
                let reaches = |peer: &c_int| {
                    let mut can = 0;
                    *peer != ordinal
                        && cuda::cudaDeviceCanAccessPeer(&raw mut can, *peer, ordinal)
                            == cuda::SUCCESS
                        && can != 0
                };
                std::iter::once(ordinal).chain((0..count).filter(reaches)).collect()
            }
        })
    }

    /// Puts memory behind a range, or nothing of it.
    fn map_chunks(&mut self, addr: u64, size: u64, chunk: u64) -> Result<(), Unmapped> {
        let ok = |code| if code == cuda::SUCCESS { Ok(()) } else { Err(Unmapped::Failed(code)) };
        let mut rdma = 0;
        // SAFETY: places of ours, and a range that was reserved and has nothing behind it.
        unsafe {
            cuda::cuDeviceGetAttribute(&raw mut rdma, cuda::RDMA_WITH_MAPPINGS, self.ordinal);
            let properties = cuda::Properties {
                kind: 1,
                handles: 0,
                location: 1,
                device: self.ordinal,
                windows: std::ptr::null_mut(),
                compression: 0,
                rdma: u8::from(rdma != 0),
                usage: 0,
                reserved: [0; 4],
            };
            for at in (addr..addr + size).step_by(chunk as usize) {
                let mut handle = 0;
                let created = match cuda::cuMemCreate(
                    &raw mut handle,
                    chunk as usize,
                    &raw const properties,
                    0,
                ) {
                    cuda::OUT_OF_MEMORY => Err(Unmapped::NoMemory),
                    code => ok(code),
                };
                let mapped = created.and_then(|()| {
                    let mapped = cuda::cuMemMap(at, chunk as usize, 0, handle, 0);
                    // The mapping keeps the memory.
                    cuda::cuMemRelease(handle);
                    ok(mapped)
                });
                if mapped.is_err() {
                    unmap_chunks(addr, at - addr, chunk);
                    return mapped;
                }
            }
            let peers = self.peers();
            let access: Vec<cuda::Access> =
                peers.iter().map(|&device| cuda::Access { kind: 1, device, flags: 3 }).collect();
            ok(cuda::cuMemSetAccess(addr, size as usize, access.as_ptr(), access.len()))
                .inspect_err(|_| unmap_chunks(addr, size, chunk))
        }
    }
}

fn unmap_chunks(addr: u64, size: u64, chunk: u64) {
    for at in (addr..addr + size).step_by(chunk as usize) {
        // SAFETY: each chunk was mapped by a call of its own.
        unsafe { cuda::cuMemUnmap(at, chunk as usize) };
    }
}

impl Driver for Gpu {
    fn total(&self) -> u64 {
        self.total
    }

    fn free_now(&mut self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places of ours.
        self.on_device(|| unsafe { cuda::cudaMemGetInfo(&raw mut free, &raw mut total) });
        free as u64
    }

    fn alloc(&mut self, size: u64, pool: PoolId) -> Option<u64> {
        if let Some(source) = self.sources.get(&pool).copied() {
            let stream = self.current_stream() as *mut c_void;
            // SAFETY: the functions that the program gave for this pool,
            // with the signature that PyTorch wants.
            let addr = unsafe { (source.malloc)(size as usize, self.ordinal, stream) };
            return (!addr.is_null()).then_some(addr as u64);
        }
        let mut addr = 0;
        // SAFETY: places of ours. A thread that captures a graph may
        // allocate while it is relaxed about it.
        let code = self.on_device(|| unsafe {
            let mut mode = cuda::RELAXED;
            cuda::cudaThreadExchangeStreamCaptureMode(&raw mut mode);
            let code = cuda::cudaMalloc(&raw mut addr, size as usize);
            cuda::cudaThreadExchangeStreamCaptureMode(&raw mut mode);
            code
        });
        if code == cuda::SUCCESS {
            return Some(addr);
        }
        self.failed(Failure::Runtime(code));
        None
    }

    fn free(&mut self, addr: u64, size: u64, pool: PoolId) {
        if let Some(source) = self.sources.get(&pool).copied() {
            let stream = self.current_stream() as *mut c_void;
            // SAFETY: as in `alloc`.
            unsafe { (source.free)(addr as *mut c_void, size as usize, self.ordinal, stream) };
            return;
        }
        // SAFETY: a segment of ours that nothing lies in.
        self.on_device(|| unsafe { cuda::cudaFree(addr) });
    }

    fn reserve(&mut self, size: u64, _: u64, _: u64, _: PoolId) -> Option<u64> {
        let mut addr = 0;
        // SAFETY: a place of ours.
        let code = unsafe { cuda::cuMemAddressReserve(&raw mut addr, size as usize, 0, 0, 0) };
        if code == cuda::SUCCESS {
            allocator::remember_reservation(addr, size);
            return Some(addr);
        }
        self.failed(Failure::Driver(code));
        None
    }

    fn unreserve(&mut self, addr: u64, size: u64) {
        // SAFETY: a range that was reserved so.
        unsafe { cuda::cuMemAddressFree(addr, size as usize) };
    }

    fn map(&mut self, addr: u64, size: u64, chunk: u64, _: u64) -> bool {
        let mapped = self.map_chunks(addr, size, chunk);
        if let Err(Unmapped::Failed(code)) = mapped {
            self.failed(Failure::Driver(code));
        }
        mapped.is_ok()
    }

    fn unmap(&mut self, addr: u64, size: u64, chunk: u64, stream: u64) {
        // SAFETY: the stream that used the memory, which PyTorch never destroys.
        self.on_device(|| unsafe { cuda::cudaStreamSynchronize(stream) });
        unmap_chunks(addr, size, chunk);
    }

    fn broken(&self) -> bool {
        self.failure.is_some()
    }

    fn record(&mut self, stream: u64) -> u64 {
        let reused = self.events.pop();
        // SAFETY: places of ours, and a stream of the program's.
        self.on_device(|| unsafe {
            let mut event = reused.unwrap_or_default();
            if reused.is_none() {
                cuda::cudaEventCreateWithFlags(&raw mut event, cuda::DISABLE_TIMING);
            }
            cuda::cudaEventRecord(event, stream);
            event
        })
    }

    fn query(&mut self, event: u64) -> bool {
        const NOT_READY: c_int = 600;
        // SAFETY: an event of ours.
        let code = unsafe { cuda::cudaEventQuery(event) };
        if code == NOT_READY {
            // SAFETY: only words of this thread's.
            unsafe { cuda::cudaGetLastError() };
            return false;
        }
        // A device that has failed says so at the program's next call, too.
        self.events.push(event);
        true
    }

    fn synchronize(&mut self, event: u64) {
        // SAFETY: an event of ours.
        unsafe { cuda::cudaEventSynchronize(event) };
        self.events.push(event);
    }

    fn capturing(&mut self) -> bool {
        let stream = self.current_stream();
        let mut status = cuda::NOT_CAPTURING;
        // SAFETY: a place of ours.
        let code = unsafe { cuda::cudaStreamIsCapturing(stream, &raw mut status) };
        if code != cuda::SUCCESS {
            self.failed(Failure::Runtime(code));
        }
        status != cuda::NOT_CAPTURING
    }

    fn wants(&mut self, wanted: u64, _: u64) -> bool {
        self.chosen.is_some_and(|id| route(id) == wanted)
    }

    fn stream_hash(&self, stream: u64) -> u64 {
        // What PyTorch packs a stream into: type, device, id.
        let known = self.streams.iter().find(|(handle, _)| *handle == stream);
        let id = known.map_or(stream, |(_, id)| *id);
        1 << 56 | (self.ordinal as u64 & 0xff) << 48 | (id & 0xffff_ffff_ffff)
    }
}
