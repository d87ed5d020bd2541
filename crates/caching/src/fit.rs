//! Finding a free block, cutting it, and putting it together again.

use crate::allocator::{Allocation, Allocator, Misuse, Request};
use crate::blocks::{Block, BlockIndex, NONE};
use crate::driver::Driver;
use crate::event::{Action, Sink};
use crate::free::FreeKey;
use crate::pool::Pool;
use crate::sizes::{ABSURD, MIN_BLOCK, SMALL_LIMIT};

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// Takes the smallest free block of the stream that is large enough out of its pool.
    pub(crate) fn best_fit(&mut self, r: &Request) -> Option<BlockIndex> {
        let collecting = self.collects();
        let pool = &mut self.pools[r.pool as usize];
        if collecting {
            pool.searches += 1;
        }
        let pool = &self.pools[r.pool as usize];
        let mut key = pool.free.first_from(&FreeKey::least(r.stream, r.size))?;
        if self.blocks[key.ix].is_expandable() {
            let mut others = pool.free.from(key).skip(1);
            if r.expandable {
                // Among expandable blocks: rather one that can't grow
                // much, as long as the next is better.
                for next in others {
                    if !self.blocks[key.ix].is_expandable()
                        || self.room(next.ix) >= self.room(key.ix)
                    {
                        break;
                    }
                    key = next;
                }
            } else {
                key = others.find(|k| !self.blocks[k.ix].is_expandable())?;
            }
        }
        let max_split = self.settings.max_split_size;
        if r.size < max_split && key.size >= max_split {
            return None;
        }
        if r.size >= max_split
            && key.size >= r.size.saturating_add(self.settings.max_non_split_rounding)
        {
            return None;
        }
        self.pools[r.pool as usize].free.remove(&key);
        Some(key.ix)
    }

    /// A block at exactly this address, out of one free block of the stream
    /// (`UntypedStorage._resize_with_addr_`). What is before it there is handed out first and given
    /// back afterwards. Looks at all free blocks of the stream.
    ///
    /// # Errors
    /// No block can begin there, or not all of it is free.
    pub fn malloc_at(&mut self, size: u64, stream: u64, addr: u64) -> Result<Allocation, Misuse> {
        if !addr.is_multiple_of(MIN_BLOCK) {
            return Err(Misuse::Unaligned(addr));
        }
        if size >= ABSURD {
            return Err(Misuse::NotFree(addr));
        }
        if !self.capturing() {
            self.finish_waiting();
        }
        let request = self.request(size, stream);
        let from = FreeKey::least(stream, request.size);
        let holds = |k: &FreeKey| k.addr <= addr && addr - k.addr <= k.size - request.size;
        let found = self.pools[request.pool as usize].free.from(from).find(holds);
        let key = found.ok_or(Misuse::NotFree(addr))?;
        let before = addr - key.addr;
        let prefix = Request { size: before, ..request };
        if before > 0
            && !self.should_split(&prefix, &self.pools[request.pool as usize], &self.blocks[key.ix])
        {
            return Err(Misuse::NotFree(addr));
        }
        self.pools[request.pool as usize].free.remove(&key);
        self.with_address = true;
        // The rest of the block keeps its index when its head is cut off.
        let prefix = (before > 0).then(|| self.hand_out(&prefix, key.ix, before));
        if prefix.is_some() {
            self.take_out(key.ix);
        }
        let got = self.hand_out(&request, key.ix, size);
        let freed = prefix.map_or(Ok(()), |prefix| self.free(prefix.id));
        self.with_address = false;
        freed.map(|()| got)
    }

    /// The size of a block with what it could still grow by.
    fn room(&self, ix: BlockIndex) -> u64 {
        let block = &self.blocks[ix];
        let next = (block.next != NONE).then(|| &self.blocks[block.next]);
        block.size + next.filter(|n| !n.mapped).map_or(0, |n| n.size)
    }

    fn should_split(&self, r: &Request, pool: &Pool, block: &Block) -> bool {
        let rest = block.size - r.size;
        if pool.no_split {
            false
        } else if pool.small || r.expandable {
            rest >= MIN_BLOCK
        } else {
            r.size < self.settings.max_split_size && rest > SMALL_LIMIT
        }
    }

    /// Hands out a block that is in no pool; what it does not need goes back.
    pub(crate) fn hand_out(
        &mut self,
        r: &Request,
        found: BlockIndex,
        requested: u64,
    ) -> Allocation {
        let mut ix = found;
        let pool = &self.pools[r.pool as usize];
        let small = pool.small;
        let id = pool.id;
        let was_split = self.blocks[found].is_split();
        let counts = !self.blocks[found].is_expandable();
        if self.should_split(r, pool, &self.blocks[found]) {
            ix = self.cut(found, r.size);
            let rest = self.blocks[found].size;
            self.insert(found);
            if counts && was_split {
                self.stats.inactive_split_bytes.down(small, r.size);
            } else if counts {
                self.stats.inactive_split_bytes.up(small, rest);
                self.stats.inactive_split.up(small, 1);
            }
        } else if was_split && counts {
            let size = self.blocks[found].size;
            self.stats.inactive_split_bytes.down(small, size);
            self.stats.inactive_split.down(small, 1);
        }
        let block = &mut self.blocks[ix];
        block.allocated = true;
        block.active = true;
        block.requested = requested;
        let (addr, size, stream) = (block.addr, block.size, block.stream);
        let event = self.saying(Action::Alloc, addr, requested, stream, id);
        self.sink.handed_out(&event, size);
        self.stats.allocation.up(small, 1);
        self.stats.allocated_bytes.up(small, size);
        self.stats.active.up(small, 1);
        self.stats.active_bytes.up(small, size);
        self.stats.requested_bytes.up(small, requested);
        if size >= self.settings.max_split_size {
            self.stats.oversize_allocations.up(1);
        }
        Allocation { id: self.blocks.id(ix), addr, size }
    }

    /// Cuts the first `size` bytes off a block that is in no pool: they are a block of their own.
    fn cut(&mut self, ix: BlockIndex, size: u64) -> BlockIndex {
        let rest = &mut self.blocks[ix];
        let (before, addr) = (rest.prev, rest.addr);
        let mut head = Block::new(addr, size, rest.stream, rest.pool, rest.reservation);
        head.birth = rest.birth;
        rest.addr += size;
        rest.size -= size;
        let head = self.blocks.add(head);
        self.blocks.link(before, head, ix);
        head
    }

    /// The free is complete: the block joins its free neighbours and waits for the next request.
    pub(crate) fn complete(&mut self, ix: BlockIndex) {
        let block = &mut self.blocks[ix];
        let (addr, size, requested, stream) =
            (block.addr, block.size, block.requested, block.stream);
        let (before, after) = (block.prev, block.next);
        let counts = !block.is_expandable();
        block.active = false;
        let pool = &self.pools[block.pool as usize];
        let (small, id) = (pool.small, pool.id);
        self.emit(Action::FreeCompleted, addr, requested, stream, id);
        let mut split_blocks = 0_i64;
        let mut split_bytes = 0_i64;
        for neighbour in [before, after] {
            let subsumed = self.merge(ix, neighbour);
            if subsumed > 0 {
                split_blocks -= 1;
                split_bytes -= subsumed as i64;
            }
        }
        self.insert(ix);
        let block = &self.blocks[ix];
        if block.is_split() {
            split_blocks += 1;
            split_bytes += block.size as i64;
        }
        if counts {
            self.stats.inactive_split.change(small, split_blocks);
            self.stats.inactive_split_bytes.change(small, split_bytes);
        }
        self.stats.active.down(small, 1);
        self.stats.active_bytes.down(small, size);
        self.stats.requested_bytes.down(small, requested);
    }

    /// Makes `from`, a neighbour, part of `into`, if both are free and of
    /// one kind. Gives the bytes won.
    pub(crate) fn merge(&mut self, into: BlockIndex, from: BlockIndex) -> u64 {
        if from == NONE {
            return 0;
        }
        let other = &self.blocks[from];
        if !other.is_idle() || other.mapped != self.blocks[into].mapped {
            return 0;
        }
        let (stream, addr, size, pool) =
            (other.stream, other.addr, other.size, other.pool as usize);
        let (prev, next, mapped) = (other.prev, other.next, other.mapped);
        if mapped {
            self.pools[pool].free.remove(&other.key(from));
        } else {
            self.pools[pool].unmapped.remove(&(stream, addr, from));
        }
        if self.blocks[into].prev == from {
            self.blocks[into].addr = addr;
            let next = self.blocks[into].next;
            self.blocks.link(prev, into, next);
        } else {
            let prev = self.blocks[into].prev;
            self.blocks.link(prev, into, next);
        }
        self.blocks[into].size += size;
        self.blocks.remove(from);
        size
    }

    /// Puts a free block into its pool.
    pub(crate) fn insert(&mut self, ix: BlockIndex) {
        let block = &mut self.blocks[ix];
        let pool = &mut self.pools[block.pool as usize];
        block.age_base = pool.searches;
        pool.free.insert(block.key(ix));
    }

    /// Takes a free block out of its pool.
    pub(crate) fn take_out(&mut self, ix: BlockIndex) {
        let block = &self.blocks[ix];
        self.pools[block.pool as usize].free.remove(&block.key(ix));
    }

    /// The free blocks of a pool behind a key, for walks during which blocks go.
    pub(crate) fn next_free(&self, pool: BlockIndex, after: Option<FreeKey>) -> Option<FreeKey> {
        self.pools[pool as usize].free.after(after.as_ref())
    }
}
