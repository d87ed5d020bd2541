//! The ledger of memory: what is allocated where, and what it costs the device.
//!
//! Nothing is stored here but addresses and sizes. A device has as many bytes as its profile says;
//! what does not fit is refused as the card would refuse it. The driver's rules that a program can
//! see:
//!
//! * physical memory comes in chunks of 2 MiB;
//! * a request above 1 MiB takes whole chunks; smaller ones share chunks, in units of 512 bytes,
//!   and a chunk that holds nothing any more goes back;
//! * freeing what is not the start of an allocation is an invalid
//!   argument, so a double free is one.
//!
//! One lock guards everything here ([`ledger`]). It is never held while a callback of the program
//! runs, nor while the lock of `work` is.

mod host;
mod ipc;
mod pool;
mod vmm;

pub use ipc::{EventTicket, MemoryTicket};
pub use pool::Pool;
pub use vmm::{Location, Physical};

use super::address::{self, CHUNK, Map};
use super::card;
use super::config::{Gpu, machine};
use super::contents::Contents;
use super::error::{Error, Result};
use super::handle::Table;
use super::heap::Heap;
use super::space::{GRAIN, Space};
use core::sync::atomic::AtomicU64;
use memtrace_devices::Placement;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use vmm::Mapping;

/// The largest request that shares a chunk.
const SMALL: u64 = 1 << 20;

/// How an allocation came to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// `cudaMalloc` and its relatives.
    Heap,
    /// `cudaMallocAsync`: the pool's handle.
    Pool(u64),
    /// Memory of a graph.
    Graph {
        /// Whether it exists just now.
        state: GraphState,
        /// Its graph or a copy of that still lives.
        owned: bool,
    },
    /// `cudaMallocManaged`.
    Managed,
    /// `cudaHostAlloc`, with its flags.
    Host(u32),
    /// `cudaHostRegister`, with its flags: the memory is the program's.
    Registered(u32),
    /// `cuMemAddressReserve`: addresses without memory.
    Reserved,
    /// Another process's allocation, opened here.
    Imported,
    /// A variable of a loaded module.
    Variable,
}

/// The life of a graph's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GraphState {
    /// The graph has never run.
    Fresh,
    /// The graph has allocated it.
    Live,
    /// The graph or the program has freed it.
    Freed,
}

/// One live allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// Its address.
    pub start: u64,
    /// The bytes that were asked for.
    pub size: u64,
    /// The addresses that it occupies.
    pub span: u64,
    /// What it costs the device on its own.
    pub charge: u64,
    /// The device, as CUDA numbers it.
    pub device: usize,
    /// The context that was current; 0 if none was.
    pub context: u64,
    /// How it came to be.
    pub origin: Origin,
    /// Different from that of every other allocation of this process, ever.
    pub id: u64,
    /// How many launches there had been.
    pub born: u64,
}

impl Allocation {
    /// It belongs to the device and to no context of it.
    fn is_devices(&self) -> bool {
        matches!(self.origin, Origin::Pool(_) | Origin::Graph { .. })
    }
}

/// The addresses of one device.
struct DeviceRanges {
    account: Account,
    heap: Heap,
    small: Space,
    pools: Space,
    variables: Space,
    default_pool: u64,
    current_pool: u64,
    graph_pool: Pool,
}

/// Everything that is allocated.
pub struct Ledger {
    devices: Vec<DeviceRanges>,
    host: Space,
    reservations: Space,
    allocations: BTreeMap<u64, Allocation>,
    pools: Table<Pool>,
    pools_to_trim: bool,
    physical: Table<Physical>,
    mappings: BTreeMap<u64, Mapping>,
    imports: BTreeMap<(u32, u64), (u64, u32)>,
    issued: u64,
    /// What is remembered of the bytes in device memory.
    pub contents: Contents,
}

/// The ledger, locked.
pub fn ledger() -> MutexGuard<'static, Ledger> {
    static LEDGER: OnceLock<Mutex<Ledger>> = OnceLock::new();
    let fresh = || {
        let accounts: Vec<Account> = machine().devices().map(Account::of).collect();
        Mutex::new(Ledger::new(address::init(machine().gpus.len()), &accounts, machine().placement))
    };
    LEDGER.get_or_init(fresh).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates device memory as `cudaMalloc` does.
pub fn alloc(device: usize, size: u64) -> Result<u64> {
    super::touch(device)?;
    ledger().allocate(device, size)
}

/// Frees what [`alloc`] gave.
pub fn free(addr: u64) -> Result {
    ledger().free(addr)
}

fn gpu(device: usize) -> Result<&'static Gpu> {
    machine().device(device).ok_or(Error::INVALID_DEVICE)
}

/// How much of a device is taken. Everybody who takes memory pays here.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    used: &'static AtomicU64,
    total: u64,
    /// The card's number in the machine, by which processes share it; none for a test's own.
    card: Option<usize>,
}

impl Account {
    /// The account of a GPU.
    pub fn of(gpu: &'static Gpu) -> Self {
        Self { used: &gpu.used, total: gpu.total(), card: Some(gpu.index) }
    }

    /// Takes `bytes`, or refuses.
    pub fn take(self, bytes: u64) -> Result {
        card::take(self.card, self.used, bytes, self.total)
    }

    /// Gives `bytes` back.
    pub fn give(self, bytes: u64) {
        card::give(self.card, self.used, bytes);
    }
}

impl Ledger {
    fn new(map: &Map, accounts: &[Account], placement: Placement) -> Self {
        let space = |range: address::Range| Space::new(range.start, range.end);
        let mut pools = Table::new(super::kinds::POOL);
        let devices = accounts
            .iter()
            .enumerate()
            .map(|(device, &account)| {
                let default_pool = pools.insert(Pool::on_device(device, account));
                DeviceRanges {
                    account,
                    heap: Heap::new(map.heap(device), placement),
                    small: Space::paged(CHUNK),
                    pools: space(map.pools(device)),
                    variables: space(map.variables(device)),
                    default_pool,
                    current_pool: default_pool,
                    graph_pool: Pool::on_device(device, account),
                }
            })
            .collect();
        Self {
            devices,
            host: space(map.host),
            reservations: space(map.reservations),
            allocations: BTreeMap::new(),
            pools,
            pools_to_trim: false,
            physical: Table::new(super::kinds::PHYSICAL),
            mappings: BTreeMap::new(),
            imports: BTreeMap::new(),
            issued: 0,
            contents: Contents::default(),
        }
    }

    fn ranges(&mut self, device: usize) -> Result<&mut DeviceRanges> {
        self.devices.get_mut(device).ok_or(Error::INVALID_DEVICE)
    }

    /// Enters an allocation. `charge` has been taken already.
    fn enter(
        &mut self,
        start: u64,
        size: u64,
        span: u64,
        charge: u64,
        device: usize,
        origin: Origin,
    ) {
        self.issued += 1;
        let (id, born) = (self.issued, super::launches());
        let context = super::thread::current().map_or(0, |current| current.context);
        let allocation =
            Allocation { start, size, span, charge, device, context, origin, id, born };
        self.allocations.insert(start, allocation);
        super::log::debug(2, || {
            format!("{origin:?} {start:#x} {size} bytes ({span}) on device {device}")
        });
    }

    /// The account of a device.
    pub fn account(&mut self, device: usize) -> Result<Account> {
        self.ranges(device).map(|ranges| ranges.account)
    }

    /// The allocation that an address lies in.
    pub fn find(&self, addr: u64) -> Option<&Allocation> {
        let (start, allocation) = self.allocations.range(..=addr).next_back()?;
        (addr - start < allocation.span).then_some(allocation)
    }

    /// An allocation touches these bytes.
    fn overlaps(&self, start: u64, size: u64) -> bool {
        self.allocations
            .range(..start.saturating_add(size))
            .next_back()
            .is_some_and(|(&at, found)| at + found.span > start)
    }

    /// Device memory, as `cudaMalloc` gives it.
    pub fn allocate(&mut self, device: usize, size: u64) -> Result<u64> {
        self.allocate_as(device, size, Origin::Heap)
    }

    fn allocate_as(&mut self, device: usize, size: u64, origin: Origin) -> Result<u64> {
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        if size <= SMALL {
            let span = size.next_multiple_of(GRAIN);
            let start = self.allocate_small(device, span)?;
            self.enter(start, size, span, 0, device, origin);
            return Ok(start);
        }
        let span = size.checked_next_multiple_of(CHUNK).ok_or(Error::OUT_OF_MEMORY)?;
        let ranges = self.ranges(device)?;
        ranges.account.take(span)?;
        let Some(start) = ranges.heap.take(span) else {
            ranges.account.give(span);
            return Err(Error::OUT_OF_MEMORY);
        };
        self.enter(start, size, span, span, device, origin);
        Ok(start)
    }

    fn allocate_small(&mut self, device: usize, span: u64) -> Result<u64> {
        let ranges = self.ranges(device)?;
        if let Some(start) = ranges.small.take(span, GRAIN) {
            return Ok(start);
        }
        ranges.account.take(CHUNK)?;
        let Some(chunk) = ranges.heap.take(CHUNK) else {
            ranges.account.give(CHUNK);
            return Err(Error::OUT_OF_MEMORY);
        };
        ranges.small.put(chunk, CHUNK);
        ranges.small.take(span, GRAIN).ok_or(Error::OUT_OF_MEMORY)
    }

    /// `cudaFree`: heap, managed and pool memory.
    pub fn free(&mut self, addr: u64) -> Result {
        match self.allocations.get(&addr).map(|found| found.origin) {
            Some(Origin::Heap) => self.free_heap(addr),
            Some(Origin::Managed) => self.free_managed(addr),
            Some(Origin::Pool(_)) => self.free_to_pool(addr),
            Some(Origin::Graph { .. }) => self.dematerialise(addr),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn leave(&mut self, addr: u64) -> Result<Allocation> {
        let gone = self.allocations.remove(&addr).ok_or(Error::INVALID_VALUE)?;
        self.contents.forget(gone.start, gone.span);
        super::log::debug(2, || format!("{:?} {addr:#x} gone", gone.origin));
        Ok(gone)
    }

    fn free_heap(&mut self, addr: u64) -> Result {
        let gone = self.leave(addr)?;
        let ranges = self.ranges(gone.device)?;
        if gone.charge > 0 {
            ranges.heap.put(gone.start, gone.span);
        } else {
            let (start, end) = ranges.small.put(gone.start, gone.span);
            if end - start == CHUNK {
                ranges.small.remove(start);
                ranges.heap.put(start, CHUNK);
                ranges.account.give(CHUNK);
            }
        }
        ranges.account.give(gone.charge);
        Ok(())
    }

    /// A module's variable gets an address; its memory counts as part of the context.
    pub fn variable(&mut self, device: usize, size: u64) -> Result<u64> {
        let span = size.max(1).next_multiple_of(GRAIN);
        let start = self.ranges(device)?.variables.take(span, GRAIN).ok_or(Error::OUT_OF_MEMORY)?;
        self.enter(start, size, span, 0, device, Origin::Variable);
        Ok(start)
    }

    /// The module is gone, and so is its variable.
    pub fn free_variable(&mut self, addr: u64) -> Result {
        let gone = self.leave(addr)?;
        self.ranges(gone.device)?.variables.put(gone.start, gone.span);
        Ok(())
    }

    /// `len` bytes from a device address belong to something. Host addresses are not ours to judge.
    pub fn check(&self, addr: u64, len: u64) -> Result {
        if len == 0 || !address::is_device(addr) {
            return Ok(());
        }
        let found = self.find(addr).ok_or(Error::INVALID_VALUE)?;
        let inside = addr.checked_add(len).is_some_and(|end| end <= found.start + found.span);
        if !inside || (found.origin == Origin::Reserved && !self.mapped(addr, len)) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(())
    }

    /// Everything in a device's primary context goes: `cudaDeviceReset`. Reserved addresses and
    /// mappings stay, as they belong to the process.
    pub fn reset(&mut self, device: usize, primary: u64) {
        let inside = |found: &Allocation| [0, primary].contains(&found.context);
        self.free_all(|found| found.device == device && (found.is_devices() || inside(found)));
        self.reset_pools(device);
    }

    /// Frees what lies in a context that goes.
    pub fn destroy(&mut self, context: u64) {
        self.free_all(|found| found.context == context && !found.is_devices());
    }

    fn free_all(&mut self, goes: impl Fn(&Allocation) -> bool) {
        let all: Vec<Allocation> =
            self.allocations.values().filter(|found| goes(found)).copied().collect();
        for found in all {
            // None of these can fail: each was just read from the ledger.
            let _ = match found.origin {
                Origin::Heap | Origin::Managed | Origin::Pool(_) => self.free(found.start),
                Origin::Host(_) => self.free_host(found.start),
                Origin::Registered(_) => self.unregister(found.start),
                Origin::Variable => self.free_variable(found.start),
                Origin::Graph { .. } => self.dematerialise(found.start),
                Origin::Imported | Origin::Reserved => Ok(()),
            };
        }
    }
}

#[cfg(test)]
mod tests;
