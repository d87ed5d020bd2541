//! The state as a snapshot has it: segments with their blocks. And the other way round: an
//! allocator that begins with the segments of a snapshot.

use memtrace_format::snapshot::{self, BlockState, Segment};

use crate::allocator::Allocator;
use crate::blocks::{Block, BlockId, BlockIndex, NONE};
use crate::driver::Driver;
use crate::event::Sink;
use crate::expandable::Reservation;
use crate::sizes::SMALL_SEGMENT;

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// All segments by address, as `torch.cuda.memory._snapshot()` lists them: of
    /// an expandable one each mapped range.
    pub fn segments(&self, device: i64) -> Vec<Segment> {
        let begins = |b: &Block| b.mapped && (b.prev == NONE || !self.blocks[b.prev].mapped);
        let mut heads: Vec<BlockIndex> =
            self.blocks.iter().filter(|(_, b)| begins(b)).map(|(ix, _)| ix).collect();
        heads.sort_unstable_by_key(|ix| self.blocks[*ix].addr);
        heads.into_iter().map(|head| self.segment(head, device)).collect()
    }

    fn segment(&self, head: BlockIndex, device: i64) -> Segment {
        let first = &self.blocks[head];
        let pool = &self.pools[first.pool as usize];
        let mut segment = Segment {
            device,
            address: first.addr,
            total_size: 0,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: first.stream,
            small: pool.small,
            pool_id: pool.id,
            is_expandable: first.is_expandable(),
            frames: None,
            blocks: Vec::new(),
        };
        let mut at = head;
        while at != NONE && self.blocks[at].mapped {
            let block = &self.blocks[at];
            let state = if block.allocated {
                BlockState::ActiveAllocated
            } else if block.active {
                BlockState::ActivePendingFree
            } else {
                BlockState::Inactive
            };
            segment.total_size += block.size;
            if block.allocated {
                segment.allocated_size += block.size;
            }
            if block.active {
                segment.active_size += block.size;
                segment.requested_size += block.requested;
            }
            segment.blocks.push(snapshot::Block {
                address: block.addr,
                size: block.size,
                requested_size: block.requested,
                state,
                frames: None,
            });
            at = block.next;
        }
        segment
    }

    /// Begins with these segments: what a program had when recording began. Expandable ones are in
    /// `reservations` (base, size); one that is in none is left out. Gives the blocks that are
    /// in use. Statistics begin with them.
    pub fn begin_with(
        &mut self,
        segments: &[Segment],
        reservations: &[(u64, u64)],
    ) -> Vec<(u64, BlockId)> {
        let mut in_use = Vec::new();
        for segment in segments.iter().filter(|s| !s.is_expandable) {
            self.begin_chain(segment, NONE, NONE, &mut in_use);
            let inactive = |b: &&snapshot::Block| b.state == BlockState::Inactive;
            if segment.blocks.len() > 1 {
                for b in segment.blocks.iter().filter(inactive) {
                    self.stats.inactive_split.up(segment.small, 1);
                    self.stats.inactive_split_bytes.up(segment.small, b.size);
                }
            }
            self.stats.segment.up(segment.small, 1);
            if segment.total_size >= self.settings.max_split_size {
                self.stats.oversize_segments.up(1);
            }
        }
        for &(base, size) in reservations {
            let lies =
                |s: &&Segment| s.is_expandable && s.address >= base && s.address - base < size;
            let mut inside: Vec<&Segment> = segments.iter().filter(lies).collect();
            inside.sort_unstable_by_key(|s| s.address);
            self.begin_reservation(base, size, &inside, &mut in_use);
        }
        in_use
    }

    fn begin_reservation(
        &mut self,
        base: u64,
        size: u64,
        inside: &[&Segment],
        in_use: &mut Vec<(u64, BlockId)>,
    ) {
        let Some(first) = inside.first() else { return };
        let chunk = if first.small { SMALL_SEGMENT } else { self.settings.large_segment };
        let number = self.reservations.len() as BlockIndex;
        self.reservations.push(Some(Reservation { base, size, chunk }));
        let pool = self.pool_of(first.pool_id, first.small);
        let (mut at, mut before) = (base, NONE);
        for segment in inside {
            before = self.begin_gap(at, segment.address, first.stream, pool, number, before);
            before = self.begin_chain(segment, number, before, in_use);
            at = segment.address + segment.total_size;
        }
        self.begin_gap(at, base + size, first.stream, pool, number, before);
    }

    /// Addresses without memory.
    fn begin_gap(
        &mut self,
        from: u64,
        to: u64,
        stream: u64,
        pool: BlockIndex,
        number: BlockIndex,
        before: BlockIndex,
    ) -> BlockIndex {
        if from >= to {
            return before;
        }
        let mut block = Block::new(from, to - from, stream, pool, number);
        block.mapped = false;
        let ix = self.blocks.add(block);
        self.blocks.link(before, ix, NONE);
        self.pools[pool as usize].unmapped.insert((stream, from, ix));
        ix
    }

    /// The blocks of a segment, behind `before`; gives the last.
    fn begin_chain(
        &mut self,
        segment: &Segment,
        number: BlockIndex,
        mut before: BlockIndex,
        in_use: &mut Vec<(u64, BlockId)>,
    ) -> BlockIndex {
        let pool = self.pool_of(segment.pool_id, segment.small);
        for b in &segment.blocks {
            let mut block = Block::new(b.address, b.size, segment.stream, pool, number);
            block.requested = b.requested_size;
            block.active = b.state != BlockState::Inactive;
            block.allocated = block.active;
            let ix = self.blocks.add(block);
            self.blocks.link(before, ix, NONE);
            before = ix;
            if b.state == BlockState::Inactive {
                self.insert(ix);
            } else {
                in_use.push((b.address, self.blocks.id(ix)));
                self.count_in_use(ix, segment.small);
            }
        }
        self.reserved += segment.total_size;
        self.reserved_up(pool, segment.total_size);
        if let Some(private) = self.private.get_mut(&segment.pool_id) {
            private.segments += 1;
        }
        before
    }

    fn count_in_use(&mut self, ix: BlockIndex, small: bool) {
        let block = &self.blocks[ix];
        let (size, requested) = (block.size, block.requested);
        self.stats.allocation.up(small, 1);
        self.stats.allocated_bytes.up(small, size);
        self.stats.active.up(small, 1);
        self.stats.active_bytes.up(small, size);
        self.stats.requested_bytes.up(small, requested);
        if size >= self.settings.max_split_size {
            self.stats.oversize_allocations.up(1);
        }
    }

    /// The segment that a block is in: of an expandable one, the mapped range.
    pub fn segment_of(&self, id: BlockId) -> Option<(u64, u64)> {
        let mut head = self.blocks.find(id)?;
        while let Some(before) = self.mapped(self.blocks[head].prev) {
            head = before;
        }
        let (mut size, mut at) = (0, Some(head));
        while let Some(ix) = at {
            size += self.blocks[ix].size;
            at = self.mapped(self.blocks[ix].next);
        }
        Some((self.blocks[head].addr, size))
    }

    fn mapped(&self, ix: BlockIndex) -> Option<BlockIndex> {
        (ix != NONE && self.blocks[ix].mapped).then_some(ix)
    }

    /// Bytes in free blocks of private pools: what PyTorch's message about
    /// a failure calls allocated in them.
    pub fn cached_in_private_pools(&self) -> u64 {
        let pools = self.pools.iter().filter(|p| p.is_private());
        pools.flat_map(|p| p.free.iter()).map(|key| key.size).sum()
    }

    /// Bytes from the device.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Looks at everything and says what is inconsistent; nothing ever is.
    ///
    /// # Errors
    /// The first thing that is not as it must be.
    pub fn check(&self) -> Result<(), String> {
        crate::check::check(self)
    }

    /// The block that is handed out at an address. Slow: it looks at all.
    pub fn find(&self, addr: u64) -> Option<BlockId> {
        let found = self.blocks.iter().find(|(_, b)| b.addr == addr && b.allocated);
        found.map(|(ix, _)| self.blocks.id(ix))
    }
}
