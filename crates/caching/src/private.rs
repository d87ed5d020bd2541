//! Private pools: a graph's, or a user's `MemPool`, held by whoever uses it.

use std::collections::BTreeMap;

use memtrace_format::snapshot::PoolId;

use crate::allocator::{Allocation, Allocator, Misuse, OutOfMemory, Request, Route};
use crate::blocks::BlockIndex;
use crate::driver::Driver;
use crate::event::Sink;
use crate::pool::{LARGE, Pool, Private, SMALL};
use crate::stats::ByPool;

/// What PyTorch hashes a pool's id by.
fn hash(id: PoolId) -> u64 {
    if id.0 != 0 { id.0 } else { id.1 }
}

/// What represents an id in a table. Ids of users count up, and so do those
/// of graphs, so half a word is plenty.
fn key(id: PoolId) -> u64 {
    (id.0 << 32) | (id.1 & 0xffff_ffff)
}

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// Makes a pool, or holds it once more (`MemPool()`).
    ///
    /// # Errors
    /// It was released by everybody, and not everything in it has gone yet.
    pub fn hold_pool(&mut self, id: PoolId) -> Result<(), Misuse> {
        if id == (0, 0) {
            return Err(Misuse::UnknownPool(id));
        }
        if let Some(private) = self.private.get_mut(&id) {
            if private.uses == 0 {
                return Err(Misuse::NotHeld(id));
            }
            private.uses += 1;
            return Ok(());
        }
        self.make_pool(id);
        Ok(())
    }

    fn make_pool(&mut self, id: PoolId) -> &Private {
        let pools = &mut self.pools;
        self.private.entry(id).or_insert_with(|| {
            let small = pools.len() as BlockIndex;
            pools.push(Pool::new(true, id));
            pools.push(Pool::new(false, id));
            Private { small, large: small + 1, uses: 1, segments: 0, own_allocator: false }
        })
    }

    pub(crate) fn pool_of(&mut self, id: PoolId, small: bool) -> BlockIndex {
        if id == (0, 0) {
            return if small { SMALL } else { LARGE };
        }
        let private = self.make_pool(id);
        if small { private.small } else { private.large }
    }

    /// A block from this pool, whatever the routes say; the pool is made if it is
    /// not there. For a replay, which knows where a block came from but not what
    /// the program did to get it from there.
    ///
    /// # Errors
    /// There is no memory.
    pub fn malloc_in(
        &mut self,
        id: PoolId,
        size: u64,
        stream: u64,
    ) -> Result<Allocation, OutOfMemory> {
        if id == (0, 0) {
            let routes = std::mem::take(&mut self.routes);
            let result = self.malloc(size, stream);
            self.routes = routes;
            return result;
        }
        self.make_pool(id);
        self.routes.push((id, Route::All));
        let result = self.malloc(size, stream);
        self.routes.pop();
        result
    }

    /// Holds a pool and sends allocations there instead of to the default pools.
    ///
    /// # Errors
    /// They go there already, or the pool can't be held.
    pub fn begin_allocate_to_pool(&mut self, id: PoolId, route: Route) -> Result<(), Misuse> {
        if self.routes.iter().any(|(other, _)| *other == id) {
            return Err(Misuse::AlreadyAllocating(id));
        }
        self.hold_pool(id)?;
        self.routes.push((id, route));
        Ok(())
    }

    /// Allocations go there no more. The pool is still held.
    ///
    /// # Errors
    /// They did not go there.
    pub fn end_allocate_to_pool(&mut self, id: PoolId) -> Result<(), Misuse> {
        let at = self.routes.iter().position(|(other, _)| *other == id);
        self.routes.remove(at.ok_or(Misuse::NotAllocating(id))?);
        Ok(())
    }

    /// Holds a pool once less. When nobody does, its free segments may go back to the device.
    ///
    /// # Errors
    /// Nobody holds it.
    pub fn release_pool(&mut self, id: PoolId) -> Result<(), Misuse> {
        let private = self.private.get_mut(&id).ok_or(Misuse::UnknownPool(id))?;
        private.uses = private.uses.checked_sub(1).ok_or(Misuse::NotHeld(id))?;
        if private.uses == 0 {
            *self.freeable.entry(hash(id), key(id)) = id;
            self.on_oom.remove(hash(id), key(id));
        }
        Ok(())
    }

    /// Gives back what a pool that nobody holds has cached (the end of a `MemPool`).
    pub fn empty_pool(&mut self, id: PoolId) {
        self.flush(Some(id));
    }

    /// The pool may be asked when everything else failed (`MemPool(use_on_oom=True)`).
    ///
    /// # Errors
    /// There is no such pool.
    pub fn set_use_on_oom(&mut self, id: PoolId, on: bool) -> Result<(), Misuse> {
        if !self.private.contains_key(&id) {
            return Err(Misuse::UnknownPool(id));
        }
        if on {
            *self.on_oom.entry(hash(id), key(id)) = id;
        } else {
            self.on_oom.remove(hash(id), key(id));
        }
        Ok(())
    }

    /// Blocks of this pool are handed out whole (`MemPool(no_split=True)`).
    ///
    /// # Errors
    /// There is no such pool.
    pub fn set_no_split(&mut self, id: PoolId) -> Result<(), Misuse> {
        let private = self.private.get(&id).ok_or(Misuse::UnknownPool(id))?;
        for ix in [private.small, private.large] {
            self.pools[ix as usize].no_split = true;
        }
        Ok(())
    }

    /// Segments of this pool come from an allocator of its own
    /// (`MemPool(allocator=…)`), never from expandable segments.
    ///
    /// # Errors
    /// There is no such pool.
    pub fn set_own_allocator(&mut self, id: PoolId) -> Result<(), Misuse> {
        self.private.get_mut(&id).ok_or(Misuse::UnknownPool(id))?.own_allocator = true;
        Ok(())
    }

    /// How many hold a pool; `None` if there is none.
    pub fn pool_uses(&self, id: PoolId) -> Option<u64> {
        self.private.get(&id).map(|p| p.uses)
    }

    /// Bytes from the device by private pool: of all that ever had some.
    pub fn reserved_by_pool(&self) -> &BTreeMap<PoolId, ByPool> {
        &self.reserved_by_pool
    }

    /// The flat dictionary of `torch.cuda.memory_stats()`, private pools included.
    pub fn flat_stats(&self) -> BTreeMap<String, i64> {
        let mut flat = self.stats.flat();
        for ((a, b), reserved) in &self.reserved_by_pool {
            flat.extend(reserved.flat(&format!("reserved_bytes_by_private_pools.{a}_{b}")));
        }
        flat
    }

    /// A graph's capture begins: from now on the device is asked whether
    /// the current stream is being captured.
    pub fn capture_begins(&mut self) {
        self.captures += 1;
    }

    /// A graph's capture has ended.
    pub fn capture_ends(&mut self) {
        self.captures = self.captures.saturating_sub(1);
    }

    /// A free block of one of the pools that are for this. Not if the request is for a private pool
    /// anyway. PyTorch forgets expandable segments here: none of their blocks will do, and what is
    /// found is cut by the rule of other segments.
    pub(crate) fn borrow_from_pools(&mut self, r: &mut Request) -> Option<BlockIndex> {
        let small = self.pools[r.pool as usize].small;
        if self.pools[r.pool as usize].is_private() {
            return None;
        }
        for (hash, key) in self.on_oom.keys() {
            let id = *self.on_oom.get_mut(hash, key)?;
            let Some(private) = self.private.get(&id) else { continue };
            let pool = if small { private.small } else { private.large };
            let other = Request { pool, expandable: false, ..*r };
            if let Some(found) = self.best_fit(&other) {
                *r = other;
                return Some(found);
            }
        }
        None
    }
}
