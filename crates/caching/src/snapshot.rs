//! The state as a snapshot has it: segments with their blocks. And the other way round: an allocator that begins with the
//! segments of a snapshot.

use memtrace_format::snapshot::{self, BlockState, Segment};

use crate::allocator::Allocator;
use crate::blocks::{Block, BlockId, Ix, NONE};
use crate::device::Device;
use crate::event::Sink;

impl<D: Device, S: Sink> Allocator<D, S> {
    /// All segments by address, as `torch.cuda.memory._snapshot()` lists them: of an expandable one each mapped range.
    pub fn segments(&self, device: i64) -> Vec<Segment> {
        let begins = |b: &Block| b.mapped && (b.prev == NONE || !self.blocks[b.prev].mapped);
        let mut heads: Vec<Ix> =
            self.blocks.iter().filter(|(_, b)| begins(b)).map(|(ix, _)| ix).collect();
        heads.sort_unstable_by_key(|ix| self.blocks[*ix].addr);
        heads.into_iter().map(|head| self.segment(head, device)).collect()
    }

    fn segment(&self, head: Ix, device: i64) -> Segment {
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

    /// An allocator that begins with these segments, none of them expandable: they are what a program had when recording
    /// began. Gives the blocks that are in use, in the order of the segments. Statistics begin with them.
    pub fn begin_with(&mut self, segments: &[Segment]) -> Vec<(u64, BlockId)> {
        let mut in_use = Vec::new();
        for segment in segments {
            let pool = self.pool_of(segment.pool_id, segment.small);
            let mut before = NONE;
            for b in &segment.blocks {
                let mut block = Block::new(b.address, b.size, segment.stream, pool, NONE);
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
            let counted = segment.blocks.len() > 1;
            for b in segment.blocks.iter().filter(|b| counted && b.state == BlockState::Inactive) {
                self.stats.inactive_split.up(segment.small, 1);
                self.stats.inactive_split_bytes.up(segment.small, b.size);
            }
            self.reserved += segment.total_size;
            self.reserved_up(pool, segment.total_size);
            self.stats.segment.up(segment.small, 1);
            if segment.total_size >= self.settings.max_split_size {
                self.stats.oversize_segments.up(1);
            }
            if let Some(private) = self.private.get_mut(&segment.pool_id) {
                private.segments += 1;
            }
        }
        in_use
    }

    fn count_in_use(&mut self, ix: Ix, small: bool) {
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
