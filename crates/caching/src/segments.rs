//! Memory from the device and back: what is tried, and in which order, when no free block fits.

use crate::allocator::{Allocator, FailureCause, Request};
use crate::blocks::{Block, BlockIndex, NONE};
use crate::driver::Driver;
use crate::event::{Action, Sink};
use crate::free::FreeKey;
use crate::pool::{LARGE, SMALL};

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// A block for a request that no free block fits, by all means there are.
    pub(crate) fn make_room(&mut self, r: &mut Request) -> Result<BlockIndex, FailureCause> {
        if self.collects() {
            self.collect_garbage();
        }
        if let Some(found) = self.new_segment(r, false)? {
            return Ok(found);
        }
        if let Some(found) = self.borrow_from_pools(r) {
            return Ok(found);
        }
        if self.release_oversize(r)
            && let Some(found) = self.new_segment(r, false)?
        {
            return Ok(found);
        }
        if !self.capturing() {
            self.flush(None);
            if let Some(found) = self.new_segment(r, true)? {
                return Ok(found);
            }
        }
        Err(FailureCause::Exhausted)
    }

    /// One attempt to get a segment.
    fn new_segment(
        &mut self,
        r: &Request,
        retry: bool,
    ) -> Result<Option<BlockIndex>, FailureCause> {
        if retry {
            self.stats.num_alloc_retries += 1;
        }
        let wanted = self.reserved.saturating_add(r.segment);
        if self.limit.is_some_and(|limit| wanted > limit) {
            return Ok(None);
        }
        if self.settings.throw_on_oom {
            let allowed = (self.settings.memory_fraction * self.device.total() as f64) as u64;
            if wanted > allowed {
                return Err(FailureCause::Rejected);
            }
        }
        let pool = &self.pools[r.pool as usize];
        let (small, id) = (pool.small, pool.id);
        if r.expandable {
            let found = self.expand(r);
            if found.is_none() && self.device.broken() {
                return Err(FailureCause::Broken);
            }
            if found.is_some()
                && let Some(private) = self.private.get_mut(&id)
            {
                private.segments += 1;
            }
            return Ok(found);
        }
        let Some(addr) = self.device.alloc(r.segment, id) else {
            return if self.device.broken() { Err(FailureCause::Broken) } else { Ok(None) };
        };
        if let Some(private) = self.private.get_mut(&id) {
            private.segments += 1;
        }
        self.reserved += r.segment;
        let mut block = Block::new(addr, r.segment, r.stream, r.pool, NONE);
        block.birth = self.next_birth();
        let ix = self.blocks.add(block);
        self.stats.segment.up(small, 1);
        self.reserved_up(r.pool, r.segment);
        if r.segment >= self.settings.max_split_size {
            self.stats.oversize_segments.up(1);
        }
        self.stats.num_device_alloc += 1;
        self.emit(Action::SegmentAlloc, addr, r.segment, r.stream, id);
        Ok(Some(ix))
    }

    pub(crate) fn reserved_up(&mut self, pool: BlockIndex, size: u64) {
        let pool = &self.pools[pool as usize];
        self.stats.reserved_bytes.up(pool.small, size);
        if pool.is_private() {
            self.reserved_by_pool.entry(pool.id).or_default().up(pool.small, size);
        }
    }

    pub(crate) fn reserved_down(&mut self, pool: BlockIndex, size: u64) {
        let pool = &self.pools[pool as usize];
        self.stats.reserved_bytes.down(pool.small, size);
        if pool.is_private() {
            self.reserved_by_pool.entry(pool.id).or_default().down(pool.small, size);
        }
    }

    /// Gives the segment of a free block without neighbours back to the device.
    fn release(&mut self, key: FreeKey) {
        let block = &self.blocks[key.ix];
        let (addr, size, stream, pool) = (block.addr, block.size, block.stream, block.pool);
        let (small, id) = (self.pools[pool as usize].small, self.pools[pool as usize].id);
        self.emit(Action::SegmentFree, addr, size, stream, id);
        self.device.free(addr, size, id);
        self.reserved -= size;
        if let Some(private) = self.private.get_mut(&id) {
            private.segments = private.segments.saturating_sub(1);
        }
        self.stats.segment.down(small, 1);
        self.reserved_down(pool, size);
        self.stats.num_device_free += 1;
        if size >= self.settings.max_split_size {
            self.stats.oversize_segments.down(1);
        }
        self.pools[pool as usize].free.remove(&key);
        self.blocks.remove(key.ix);
    }

    /// Whether free segments grow old: there is a limit, and a threshold below it.
    pub(crate) fn collects(&self) -> bool {
        self.limit.is_some() && self.settings.garbage_collection_threshold > 0.0
    }

    /// Gives back the segments that have not been used for longest, down to the threshold.
    fn collect_garbage(&mut self) {
        let Some(limit) = self.limit else { return };
        let threshold = (self.settings.garbage_collection_threshold * limit as f64) as u64;
        if self.reserved <= threshold {
            return;
        }
        let wanted = self.reserved - threshold;
        let now = self.pools[LARGE as usize].searches;
        let whole = |b: &Block| !b.is_split();
        let mut ages = 0_u64;
        let mut count = 0_u64;
        for key in self.pools[LARGE as usize].free.iter() {
            let block = &self.blocks[key.ix];
            if whole(block) {
                ages += now - block.age_base;
                count += 1;
            }
        }
        let mut reclaimed = 0;
        let mut some = true;
        while reclaimed < wanted && some && count > 0 {
            let mean = ages as f64 / count as f64;
            some = false;
            let mut at = None;
            while let Some(key) = self.next_free(LARGE, at) {
                at = Some(key);
                let block = &self.blocks[key.ix];
                let age = now - block.age_base;
                if whole(block) && !block.is_expandable() && age as f64 >= mean {
                    some = true;
                    reclaimed += key.size;
                    ages -= age;
                    count -= 1;
                    self.release(key);
                }
            }
        }
    }

    /// With `max_split_size`: gives back just enough oversize segments of the
    /// stream, the one that fits or the largest.
    fn release_oversize(&mut self, r: &Request) -> bool {
        let max_split = self.settings.max_split_size;
        if max_split == u64::MAX {
            return false;
        }
        let wanted = r.size.max(max_split);
        let pool = &self.pools[r.pool as usize];
        let from = FreeKey::least(r.stream, wanted);
        // A split block can't go back. PyTorch does not look; there, blocks of this size are never
        // split unless the setting changed under way, and then the driver refuses.
        let can_go = |k: &FreeKey| {
            let block = &self.blocks[k.ix];
            !block.is_expandable() && !block.is_split()
        };
        let fits = pool.free.from(from).find(can_go);
        if let Some(key) = fits {
            self.release(key);
            return true;
        }
        let smaller = pool.free.before(from);
        let enough: Vec<FreeKey> = smaller
            .take_while(|k| k.size >= max_split)
            .filter(can_go)
            .scan(0_u64, |sum, k| {
                (*sum < wanted).then(|| {
                    *sum += k.size;
                    k
                })
            })
            .collect();
        let sum: u64 = enough.iter().map(|k| k.size).sum();
        for key in enough {
            self.release(key);
        }
        sum >= wanted
    }

    /// Gives everything cached back: all pools that nobody holds, or one of them.
    pub(crate) fn flush(&mut self, only: Option<memtrace_format::snapshot::PoolId>) {
        if only.is_none() {
            self.synchronize(None);
            self.release_all(LARGE);
            self.release_all(SMALL);
        }
        let mut slot = 0;
        while let Some((at, hash, key)) = self.freeable.next_from(slot) {
            slot = at + 1;
            let Some(&mut id) = self.freeable.get_mut(hash, key) else { continue };
            if only.is_some_and(|only| only != id) {
                continue;
            }
            if only.is_some() {
                self.synchronize(Some(id));
            }
            let Some(private) = self.private.get(&id) else { continue };
            let (small, large) = (private.small, private.large);
            self.release_all(small);
            self.release_all(large);
            if self.private.get(&id).is_some_and(|p| p.segments == 0) {
                self.private.remove(&id);
                self.freeable.remove(hash, key);
                // Those behind it may have moved up.
                slot = at;
            }
        }
    }

    fn release_all(&mut self, pool: BlockIndex) {
        let mut expandable = Vec::new();
        let mut at = None;
        while let Some(key) = self.next_free(pool, at) {
            at = Some(key);
            let block = &self.blocks[key.ix];
            if block.is_expandable() {
                expandable.push(key.ix);
            } else if !block.is_split() {
                self.release(key);
            }
        }
        for ix in expandable {
            self.unmap(ix);
            let block = &self.blocks[ix];
            if !block.mapped && !block.is_split() {
                self.give_up_reservation(ix);
            }
        }
    }
}
