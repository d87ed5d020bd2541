//! Stream-ordered allocation: `cudaMallocAsync` and its pools.
//!
//! A pool holds physical memory (*reserved*) and gives parts of it out (*used*). It grows in steps
//! of 32 MiB, or by less when the device has no such step left. It gives memory back when it is
//! trimmed, and at the next synchronisation, down to its release threshold. The driver can put any
//! of a pool's pages under any address, so a pool does not fragment: counters are enough.

use super::{Account, CHUNK, Error, GRAIN, GraphState, Ledger, Origin, Result};

/// By how much a pool grows and shrinks.
const STEP: u64 = 32 << 20;

/// One pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pool {
    /// The device that its memory belongs to.
    pub device: usize,
    /// Who pays; nobody for a pool of host memory.
    account: Option<Account>,
    /// Bytes given out.
    pub used: u64,
    /// Bytes held.
    pub reserved: u64,
    /// The most that was given out since the mark was reset.
    pub used_high: u64,
    /// The most that was held since the mark was reset.
    pub reserved_high: u64,
    /// Bytes that stay reserved across synchronisations.
    pub threshold: u64,
    /// The three reuse policies, which need no act of ours: all work is over at once.
    pub reuse: [i32; 3],
    /// Which other devices may reach it, one bit each.
    pub peers: u64,
    /// Destroyed, but something of it still lives.
    doomed: bool,
}

impl Pool {
    /// An empty pool of a device's memory.
    pub fn on_device(device: usize, account: Account) -> Self {
        Self { device, account: Some(account), ..Self::on_host() }
    }

    /// An empty pool of host memory.
    pub fn on_host() -> Self {
        Self { reuse: [1; 3], ..Self::default() }
    }

    fn hold(&mut self, reserved: u64) -> Result {
        if let Some(account) = self.account {
            if reserved > self.reserved {
                account.take(reserved - self.reserved)?;
            } else {
                account.give(self.reserved - reserved);
            }
        }
        self.reserved = reserved;
        self.reserved_high = self.reserved_high.max(reserved);
        Ok(())
    }

    /// Gives back what neither is used nor must be kept.
    fn shrink(&mut self, keep: u64, step: u64) {
        let wanted = self.used.max(keep);
        if let Some(wanted) = wanted.checked_next_multiple_of(step)
            && wanted < self.reserved
        {
            // Holding less can't fail.
            let _ = self.hold(wanted);
        }
    }

    fn take(&mut self, bytes: u64) -> Result {
        let used = self.used.checked_add(bytes).ok_or(Error::OUT_OF_MEMORY)?;
        if used > self.reserved {
            let grow = |step| used.checked_next_multiple_of(step).ok_or(Error::OUT_OF_MEMORY);
            let (by_step, by_chunk) = (grow(STEP)?, grow(CHUNK)?);
            self.hold(by_step).or_else(|_| self.hold(by_chunk))?;
        }
        self.used = used;
        self.used_high = self.used_high.max(used);
        Ok(())
    }
}

impl Ledger {
    /// A new pool.
    pub fn create_pool(&mut self, pool: Pool) -> u64 {
        self.pools.insert(pool)
    }

    /// The pool behind a handle.
    pub fn pool(&mut self, handle: u64) -> Result<&mut Pool> {
        self.pools.get_mut(handle).filter(|pool| !pool.doomed).ok_or(Error::INVALID_VALUE)
    }

    /// A device's own pool, which can't be destroyed.
    pub fn default_pool(&mut self, device: usize) -> Result<u64> {
        self.ranges(device).map(|ranges| ranges.default_pool)
    }

    /// The pool that `cudaMallocAsync` takes from.
    pub fn current_pool(&mut self, device: usize) -> Result<u64> {
        self.ranges(device).map(|ranges| ranges.current_pool)
    }

    /// Makes a pool the one that `cudaMallocAsync` takes from.
    pub fn set_current_pool(&mut self, device: usize, pool: u64) -> Result {
        if self.pool(pool)?.device != device {
            return Err(Error::INVALID_VALUE);
        }
        self.ranges(device)?.current_pool = pool;
        Ok(())
    }

    /// Destroys a pool; what is still allocated from it lives until it is freed.
    pub fn destroy_pool(&mut self, handle: u64) -> Result {
        let device = self.pool(handle)?.device;
        let ranges = self.ranges(device)?;
        if ranges.default_pool == handle {
            return Err(Error::INVALID_VALUE);
        }
        if ranges.current_pool == handle {
            ranges.current_pool = ranges.default_pool;
        }
        let pool = self.pool(handle)?;
        pool.doomed = true;
        pool.threshold = 0;
        pool.shrink(0, CHUNK);
        if pool.used == 0 {
            self.pools.remove(handle);
        }
        Ok(())
    }

    /// Memory from a pool.
    pub fn allocate_from_pool(&mut self, handle: u64, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let span = size.checked_next_multiple_of(GRAIN).ok_or(Error::OUT_OF_MEMORY)?;
        let pool = self.pool(handle)?;
        pool.take(span)?;
        let device = pool.device;
        let Some(start) = self.ranges(device)?.pools.take(span, GRAIN) else {
            self.pool(handle)?.used -= span;
            return Err(Error::OUT_OF_MEMORY);
        };
        self.enter(start, size, span, 0, device, Origin::Pool(handle));
        Ok(start)
    }

    pub(super) fn free_to_pool(&mut self, addr: u64) -> Result {
        let gone = self.leave(addr)?;
        self.ranges(gone.device)?.pools.put(gone.start, gone.span);
        let Origin::Pool(handle) = gone.origin else { return Err(Error::INVALID_VALUE) };
        let pool = self.pools.get_mut(handle).ok_or(Error::INVALID_VALUE)?;
        pool.used -= gone.span;
        self.pools_to_trim = true;
        if pool.doomed {
            pool.shrink(0, CHUNK);
            if pool.used == 0 {
                self.pools.remove(handle);
            }
        }
        Ok(())
    }

    /// `cudaMemPoolTrimTo`.
    pub fn trim_pool(&mut self, handle: u64, keep: u64) -> Result {
        self.pool(handle)?.shrink(keep, CHUNK);
        Ok(())
    }

    /// The host has waited: pools go down to their thresholds.
    pub fn synchronize_pools(&mut self) {
        if core::mem::take(&mut self.pools_to_trim) {
            for pool in self.pools.values_mut() {
                pool.shrink(pool.threshold, STEP);
            }
        }
    }

    /// Addresses for memory of a graph. They cost nothing until the graph runs.
    pub fn allocate_graph_range(&mut self, device: usize, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let span = size.checked_next_multiple_of(GRAIN).ok_or(Error::OUT_OF_MEMORY)?;
        let start = self.ranges(device)?.pools.take(span, GRAIN).ok_or(Error::OUT_OF_MEMORY)?;
        self.enter(
            start,
            size,
            span,
            0,
            device,
            Origin::Graph { state: GraphState::Fresh, owned: true },
        );
        Ok(start)
    }

    /// The graph and all its copies are gone. What it has allocated and not freed lives
    /// on, as CUDA says, until the program frees it. A program may also free what a graph
    /// that never ran would have allocated.
    pub fn disown_graph_range(&mut self, addr: u64) -> Result {
        let (state, owned) = self.graph_range(addr)?;
        *owned = false;
        if *state == GraphState::Freed { self.free_graph_range(addr) } else { Ok(()) }
    }

    fn free_graph_range(&mut self, addr: u64) -> Result {
        let gone = self.leave(addr)?;
        self.ranges(gone.device)?.pools.put(gone.start, gone.span);
        Ok(())
    }

    fn graph_range(&mut self, addr: u64) -> Result<(&mut GraphState, &mut bool)> {
        match self.allocations.get_mut(&addr).map(|found| &mut found.origin) {
            Some(Origin::Graph { state, owned }) => Ok((state, owned)),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Memory of a graph begins to exist. It comes from the device's pool for graphs, which
    /// keeps what it has until it is trimmed.
    pub fn materialise(&mut self, addr: u64) -> Result {
        let found = *self.allocations.get(&addr).ok_or(Error::INVALID_VALUE)?;
        if *self.graph_range(addr)?.0 == GraphState::Live {
            return Ok(());
        }
        self.graph_pool(found.device)?.take(found.span)?;
        *self.graph_range(addr)?.0 = GraphState::Live;
        Ok(())
    }

    /// Memory of a graph ceases to exist; its addresses stay with the graph as long as that lives.
    pub fn dematerialise(&mut self, addr: u64) -> Result {
        let found = *self.allocations.get(&addr).ok_or(Error::INVALID_VALUE)?;
        let (state, owned) = self.graph_range(addr)?;
        let (before, owned) = (*state, *owned);
        if before == GraphState::Freed {
            return Err(Error::INVALID_VALUE);
        }
        if before == GraphState::Live {
            *state = GraphState::Freed;
            self.graph_pool(found.device)?.used -= found.span;
            self.contents.forget(addr, found.span);
        }
        if owned { Ok(()) } else { self.free_graph_range(addr) }
    }

    /// The pool that a device's graphs take their memory from.
    pub fn graph_pool(&mut self, device: usize) -> Result<&mut Pool> {
        self.ranges(device).map(|ranges| &mut ranges.graph_pool)
    }

    /// `cudaDeviceGraphMemTrim`.
    pub fn trim_graph_pool(&mut self, device: usize) -> Result {
        self.graph_pool(device)?.shrink(0, CHUNK);
        Ok(())
    }

    pub(super) fn reset_pools(&mut self, device: usize) {
        let Ok((default, own)) = self.ranges(device).map(|ranges| {
            ranges.current_pool = ranges.default_pool;
            ranges.graph_pool.shrink(0, CHUNK);
            (ranges.default_pool, Pool::on_device(device, ranges.account))
        }) else {
            return;
        };
        for (handle, pool) in self.pools.iter_mut().filter(|(_, pool)| pool.device == device) {
            pool.threshold = 0;
            pool.shrink(0, CHUNK);
            if handle == default {
                *pool = own;
            }
        }
        self.pools.retain(|handle, pool| pool.device != device || handle == default);
    }
}
