//! What the allocator asks of a device.
//!
//! It has few calls and plain numbers, so that the same algorithm runs on a driver, on a
//! [`Counter`](crate::Counter) that only counts, or on a [`Script`](crate::Script) that answers as
//! a recorded driver did. A device never calls back.

use memtrace_format::snapshot::PoolId;

/// A block that was given back during a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AfterCapture {
    /// Where it is.
    pub addr: u64,
    /// It waits for nothing.
    pub done: bool,
}

/// A device, or whatever answers like one. Addresses are never 0.
pub trait Driver {
    /// Bytes of memory in all.
    fn total(&self) -> u64;

    /// Bytes that are free now, of everybody's memory (`cudaMemGetInfo`).
    fn free_now(&mut self) -> u64;

    /// A segment of `size` bytes for a pool (`cudaMalloc`); `None` if there is no memory.
    fn alloc(&mut self, size: u64, pool: PoolId) -> Option<u64>;

    /// Gives a segment back (`cudaFree`).
    fn free(&mut self, addr: u64, size: u64, pool: PoolId);

    /// Addresses without memory behind them (`cuMemAddressReserve`), for segments of a stream in a
    /// pool, to be mapped in chunks; `None` if that can't be.
    fn reserve(&mut self, size: u64, chunk: u64, stream: u64, pool: PoolId) -> Option<u64>;

    /// Gives addresses back (`cuMemAddressFree`).
    fn unreserve(&mut self, addr: u64, size: u64);

    /// Puts memory behind a range, `chunk` bytes a piece (`cuMemCreate`, `cuMemMap`); `false` if
    /// there is not enough, and then nothing of the range is mapped.
    fn map(&mut self, addr: u64, size: u64, chunk: u64, stream: u64) -> bool;

    /// Takes the memory behind a range back, once the work of `stream` is done.
    fn unmap(&mut self, addr: u64, size: u64, chunk: u64, stream: u64);

    /// Records an event on a stream and names it.
    fn record(&mut self, stream: u64) -> u64;

    /// Whether the work before an event is done.
    fn query(&mut self, event: u64) -> bool;

    /// Waits for an event.
    fn synchronize(&mut self, event: u64);

    /// Whether it was for another reason than a want of memory that the last [`Self::alloc`],
    /// [`Self::reserve`] or [`Self::map`] failed: then nothing else is tried.
    fn broken(&self) -> bool {
        false
    }

    /// Whether the calling thread's current stream is being captured into a graph.
    fn capturing(&mut self) -> bool;

    /// Whether an allocation on a stream is one of those that
    /// [`Route::Ask`](crate::Route::Ask) names.
    fn wants(&mut self, route: u64, stream: u64) -> bool {
        let _ = (route, stream);
        false
    }

    /// What PyTorch leaves to chance about the blocks that were given back during a capture, once
    /// it is over. Who knows what it was can say so. It looks at them in the order in which a hash
    /// of *its own* pointers puts them. Here that is the order of the frees. It also remembers
    /// streams named during a capture by such a pointer, even when what it points to has long gone.
    /// So a block may inherit those of another and not wait at all.
    fn after_capture(&mut self, blocks: &mut [AfterCapture]) {
        let _ = blocks;
    }

    /// What PyTorch hashes a stream by. It visits streams in the order of its
    /// hash table, so exactly equal histories need the same number. There it is
    /// (1 << 56 | device << 48 | stream id).
    fn stream_hash(&self, stream: u64) -> u64 {
        stream
    }
}
