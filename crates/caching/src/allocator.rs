//! The allocator of one device: requests, and what follows from each, in PyTorch's order.
//!
//! This is PyTorch's caching allocator (the `native` backend of 2.15) over any [`Driver`]. The
//! same requests and the same answers of the device give the same addresses, events, order and
//! statistics. It is one state machine behind `&mut self`. Whoever shares it between threads
//! puts one lock around each device's.
//!
//! A request first finishes frees that waited ([`crate::deferred`]). Its size is rounded,
//! and the best fit is looked for ([`crate::fit`]). Else it gets a new segment, for which
//! others are given back if need be ([`crate::segments`], [`crate::expandable`]). The
//! block is split, and the event reported.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use memtrace_format::snapshot::PoolId;

use crate::blocks::{BlockId, BlockIndex, Blocks, Uses};
use crate::deferred::Waiting;
use crate::driver::Driver;
use crate::event::{Action, Event, Sink};
use crate::expandable::Reservation;
use crate::pool::{LARGE, Pool, Private, SMALL};
use crate::settings::Settings;
use crate::sizes;
use crate::stats::{ByPool, Stats};
use crate::visit::PyTorchMap;

/// What was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its name, for [`Allocator::free`].
    pub id: BlockId,
    /// Device address.
    pub addr: u64,
    /// Size of the block, which is at least what was asked for.
    pub size: u64,
}

/// No memory; the numbers are those of PyTorch's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// What the program asked for.
    pub requested: u64,
    /// The block it would have been.
    pub rounded: u64,
    /// What was asked of the device.
    pub segment: u64,
    /// What the device had free, of its total.
    pub device_free: u64,
    /// The device's total.
    pub device_total: u64,
    /// Bytes in blocks that are handed out.
    pub allocated: u64,
    /// Bytes from the device.
    pub reserved: u64,
    /// The limit that a memory fraction sets.
    pub limit: Option<u64>,
    /// Why.
    pub why: FailureCause,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// Nothing helped.
    Exhausted,
    /// `throw_on_cudamalloc_oom`: refused at once.
    Rejected,
    /// 2^60 bytes or more: not even tried.
    Absurd,
    /// It was not for want of memory: the device has failed.
    Broken,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.why == FailureCause::Absurd {
            return f.write_str("CUDA out of memory. Tried to allocate more than 1EB memory.");
        }
        write!(
            f,
            "CUDA out of memory. Tried to allocate {} bytes: {} of {} bytes are free on the device, {} are reserved, \
             {} of them allocated",
            self.requested, self.device_free, self.device_total, self.reserved, self.allocated
        )?;
        match self.limit {
            Some(limit) => write!(f, "; the memory fraction allows {limit}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for OutOfMemory {}

/// Something that a correct program does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// The block is not handed out (any more).
    NotAllocated,
    /// No block was handed out at this address.
    UnknownAddress(u64),
    /// There is no such pool.
    UnknownPool(PoolId),
    /// Allocations go to this pool already.
    AlreadyAllocating(PoolId),
    /// No allocations go to this pool.
    NotAllocating(PoolId),
    /// The pool is not held by anybody.
    NotHeld(PoolId),
    /// A fraction outside 0 to 1.
    Fraction,
    /// An address that no block can begin at.
    Unaligned(u64),
    /// Not all of what was asked for is free at this address.
    NotFree(u64),
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Misuse::NotAllocated => f.write_str("the block was given back already"),
            Misuse::UnknownAddress(addr) => write!(f, "invalid device pointer: {addr:#x}"),
            Misuse::UnknownPool((a, b)) => write!(f, "there is no memory pool ({a}, {b})"),
            Misuse::AlreadyAllocating((a, b)) => {
                write!(f, "beginAllocateToPool: already recording to mempool_id ({a}, {b})")
            }
            Misuse::NotAllocating((a, b)) => {
                write!(f, "endAllocatePool: not currently recording to mempool_id ({a}, {b})")
            }
            Misuse::NotHeld((a, b)) => write!(f, "memory pool ({a}, {b}) was released already"),
            Misuse::Unaligned(addr) => write!(
                f,
                "mallocWithAddress: addr must be aligned to kMinBlockSize (512 bytes), got {addr:#x}"
            ),
            Misuse::NotFree(addr) => {
                write!(f, "Could not allocate CUDA storage at exact address {addr:#x}")
            }
            Misuse::Fraction => f.write_str("invalid fraction. Please set within [0, 1]"),
        }
    }
}

impl std::error::Error for Misuse {}

/// One request on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Rounded.
    pub size: u64,
    /// What the driver is asked for.
    pub segment: u64,
    pub stream: u64,
    pub pool: BlockIndex,
    /// Blocks of expandable segments will do.
    pub expandable: bool,
}

/// The allocator of one device.
#[derive(Clone, Debug)]
pub struct Allocator<D, S> {
    pub(crate) device: D,
    pub(crate) sink: S,
    pub(crate) settings: Settings,
    pub(crate) stats: Stats,
    pub(crate) blocks: Blocks,
    pub(crate) pools: Vec<Pool>,
    pub(crate) private: BTreeMap<PoolId, Private>,
    pub(crate) reserved_by_pool: BTreeMap<PoolId, ByPool>,
    /// Pools that nobody holds, in PyTorch's order.
    pub(crate) freeable: PyTorchMap<PoolId>,
    /// Pools that are asked before giving up.
    pub(crate) on_oom: PyTorchMap<PoolId>,
    /// Where allocations go instead of the default pools: the last that wants a stream gets it.
    pub(crate) routes: Vec<(PoolId, Route)>,
    /// Captures that have been announced.
    pub(crate) captures: u32,
    pub(crate) reservations: Vec<Option<Reservation>>,
    pub(crate) uses: HashMap<BlockIndex, Uses>,
    /// Streams that were named for a block during a capture. As in PyTorch, they stay with the
    /// block if it is not given back during a capture, and count for whoever has it then.
    pub(crate) captured_uses: HashMap<BlockIndex, Vec<u64>>,
    pub(crate) waiting: Waiting,
    /// Segments and reservations so far.
    pub(crate) births: u64,
    pub(crate) ignore_age: bool,
    /// Bytes from the device.
    pub(crate) reserved: u64,
    pub(crate) limit: Option<u64>,
    fraction: f64,
    /// The event is part of an allocation at a wanted address.
    pub(crate) with_address: bool,
}

/// Which allocations go to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// All.
    All,
    /// Those on this stream.
    Stream(u64),
    /// Those that the device says belong to this number: the streams of a
    /// capture, which grow under way.
    Ask(u64),
}

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// An allocator that has nothing yet.
    pub fn new(device: D, settings: Settings, sink: S) -> Self {
        let mut new = Allocator {
            device,
            sink,
            stats: Stats { max_split_size: max_split(&settings), ..Stats::default() },
            settings,
            blocks: Blocks::default(),
            pools: vec![Pool::new(true, (0, 0)), Pool::new(false, (0, 0))],
            private: BTreeMap::new(),
            reserved_by_pool: BTreeMap::new(),
            freeable: PyTorchMap::default(),
            on_oom: PyTorchMap::default(),
            routes: Vec::new(),
            captures: 0,
            reservations: Vec::new(),
            uses: HashMap::new(),
            captured_uses: HashMap::new(),
            waiting: Waiting::default(),
            births: 0,
            ignore_age: false,
            reserved: 0,
            limit: None,
            fraction: 1.0,
            with_address: false,
        };
        new.set_limit(new.settings.memory_fraction);
        new
    }

    /// From now on, free blocks of one size are ordered by their addresses alone, whatever the age
    /// of their segments, as in older releases of PyTorch.
    pub fn ignore_age(&mut self) {
        self.ignore_age = true;
    }

    pub(crate) fn next_birth(&mut self) -> u64 {
        if !self.ignore_age {
            self.births += 1;
        }
        self.births
    }

    /// The device, to query or set it.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whoever listens.
    pub fn sink_mut(&mut self) -> &mut S {
        &mut self.sink
    }

    /// The device and the listener, when all is over.
    pub fn into_parts(self) -> (D, S) {
        (self.device, self.sink)
    }

    /// The statistics.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The statistics, to reset them.
    pub fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Other settings from now on (`torch._C._accelerator_setAllocatorSettings`). The memory
    /// fraction is not among them: it counts when a device comes up, and afterwards by
    /// [`Allocator::set_memory_fraction`].
    pub fn set_settings(&mut self, settings: Settings) {
        self.stats.max_split_size = max_split(&settings);
        self.settings = settings;
    }

    /// `torch.cuda.set_per_process_memory_fraction`.
    ///
    /// # Errors
    /// A fraction outside 0 to 1.
    pub fn set_memory_fraction(&mut self, fraction: f64) -> Result<(), Misuse> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Misuse::Fraction);
        }
        self.set_limit(fraction);
        Ok(())
    }

    /// The fraction in force.
    pub fn memory_fraction(&self) -> f64 {
        self.fraction
    }

    fn set_limit(&mut self, fraction: f64) {
        self.fraction = fraction;
        self.limit = (fraction < 1.0).then(|| (fraction * self.device.total() as f64) as u64);
    }

    /// A block of at least `size` bytes for `stream`. (Requests of no bytes never get here in
    /// PyTorch; a block of the least size is what they get here.)
    ///
    /// # Errors
    /// There is no memory.
    pub fn malloc(&mut self, size: u64, stream: u64) -> Result<Allocation, OutOfMemory> {
        if size >= sizes::ABSURD {
            return Err(self.out_of_memory(size, size, 0, FailureCause::Absurd));
        }
        if !self.capturing() {
            self.finish_waiting();
        }
        let mut request = self.request(size, stream);
        let rounded = request.size;
        let found = match self.best_fit(&request) {
            Some(found) => Ok(found),
            None => self.make_room(&mut request),
        };
        match found {
            Ok(found) => Ok(self.hand_out(&request, found, size)),
            Err(FailureCause::Rejected) => {
                self.stats.num_oom_rejections += 1;
                Err(self.out_of_memory(size, rounded, request.segment, FailureCause::Rejected))
            }
            Err(FailureCause::Broken) => {
                Err(self.out_of_memory(size, rounded, request.segment, FailureCause::Broken))
            }
            Err(why) => {
                let failure = self.out_of_memory(size, rounded, request.segment, why);
                let pool = self.pools[request.pool as usize].id;
                self.emit(Action::Oom, failure.device_free, rounded, stream, pool);
                self.stats.num_ooms += 1;
                Err(failure)
            }
        }
    }

    /// What a request comes to: which pool, how large.
    pub(crate) fn request(&mut self, size: u64, stream: u64) -> Request {
        let rounded = sizes::round(&self.settings, size);
        let pool = self.pool_for(rounded, stream);
        let own_allocator =
            self.private.get(&self.pools[pool as usize].id).is_some_and(|p| p.own_allocator);
        Request {
            size: rounded,
            segment: sizes::segment(&self.settings, rounded),
            stream,
            pool,
            expandable: self.settings.expandable_segments && !own_allocator,
        }
    }

    fn out_of_memory(
        &mut self,
        requested: u64,
        rounded: u64,
        segment: u64,
        why: FailureCause,
    ) -> OutOfMemory {
        OutOfMemory {
            requested,
            rounded,
            segment,
            device_free: self.device.free_now(),
            device_total: self.device.total(),
            allocated: self.stats.allocated_bytes.all.current as u64,
            reserved: self.reserved,
            limit: self.limit,
            why,
        }
    }

    /// Gives a block back.
    ///
    /// # Errors
    /// It is not handed out.
    pub fn free(&mut self, id: BlockId) -> Result<(), Misuse> {
        let ix = self.blocks.find(id).ok_or(Misuse::NotAllocated)?;
        self.blocks.retire_id(ix);
        let block = &mut self.blocks[ix];
        block.allocated = false;
        let (addr, size, requested, stream) =
            (block.addr, block.size, block.requested, block.stream);
        let (used, pool) = (block.used, block.pool as usize);
        let Pool { small, id, .. } = self.pools[pool];
        self.stats.allocation.down(small, 1);
        self.stats.allocated_bytes.down(small, size);
        let event = self.saying(Action::FreeRequested, addr, requested, stream, id);
        self.sink.given_back(&event, size, used);
        if size >= self.settings.max_split_size {
            self.stats.oversize_allocations.down(1);
        }
        if used {
            self.free_later(ix);
        } else {
            self.complete(ix);
        }
        Ok(())
    }

    /// Another stream uses the block: its free waits for the work of that stream.
    ///
    /// # Errors
    /// It is not handed out.
    pub fn record_stream(&mut self, id: BlockId, stream: u64) -> Result<(), Misuse> {
        let ix = self.blocks.find(id).ok_or(Misuse::NotAllocated)?;
        if self.blocks[ix].stream == stream {
            return Ok(());
        }
        let capturing = self.capturing();
        let hash = self.device.stream_hash(stream);
        self.blocks[ix].used = true;
        self.uses.entry(ix).or_default().0.entry(hash, stream);
        if capturing {
            self.captured_uses.entry(ix).or_default().push(stream);
        }
        Ok(())
    }

    /// Gives everything cached back to the device (`torch.cuda.empty_cache`).
    pub fn empty_cache(&mut self) {
        self.flush(None);
    }

    /// Where a block is.
    pub fn allocation(&self, id: BlockId) -> Option<Allocation> {
        let ix = self.blocks.find(id)?;
        let block = &self.blocks[ix];
        Some(Allocation { id, addr: block.addr, size: block.size })
    }

    pub(crate) fn capturing(&mut self) -> bool {
        self.captures > 0 && self.device.capturing()
    }

    fn pool_for(&mut self, rounded: u64, stream: u64) -> BlockIndex {
        let small = sizes::is_small(rounded);
        for (id, route) in self.routes.iter().rev() {
            let goes = match *route {
                Route::All => true,
                Route::Stream(only) => only == stream,
                Route::Ask(route) => self.device.wants(route, stream),
            };
            if goes && let Some(private) = self.private.get(id) {
                return if small { private.small } else { private.large };
            }
        }
        if small { SMALL } else { LARGE }
    }

    pub(crate) fn emit(&mut self, action: Action, addr: u64, size: u64, stream: u64, pool: PoolId) {
        self.sink.event(&self.saying(action, addr, size, stream, pool));
    }

    pub(crate) fn saying(
        &self,
        action: Action,
        addr: u64,
        size: u64,
        stream: u64,
        pool: PoolId,
    ) -> Event {
        Event { action, addr, size, stream, pool, with_address: self.with_address }
    }
}

fn max_split(settings: &Settings) -> i64 {
    // As PyTorch shows it: −1 is none.
    settings.max_split_size as i64
}
