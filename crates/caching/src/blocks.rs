//! Blocks: pieces of segments, in a slab, linked to their neighbours in address order.

use crate::free::FreeKey;
use crate::visit::PyTorchMap;

/// Index into the slab.
pub(crate) type BlockIndex = u32;
/// No block, no reservation.
pub(crate) const NONE: BlockIndex = BlockIndex::MAX;

/// Names a block that was handed out. It stays wrong for ever once the block was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    pub(crate) index: BlockIndex,
    pub(crate) generation: u32,
}

/// A piece of a segment.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "they are independent facts about a block")]
pub(crate) struct Block {
    pub addr: u64,
    pub size: u64,
    /// What was asked for; stale once it is free, as in PyTorch.
    pub requested: u64,
    pub stream: u64,
    /// The number of its segment, or of its reservation: they are counted together.
    pub birth: u64,
    /// What the pool's counter said when this block became free.
    pub age_base: u64,
    pub prev: BlockIndex,
    pub next: BlockIndex,
    pub pool: BlockIndex,
    /// The reservation it is in, if it is expandable.
    pub reservation: BlockIndex,
    /// Events that its free waits for.
    pub events: u32,
    generation: u32,
    /// Handed out.
    pub allocated: bool,
    /// There is memory behind it.
    pub mapped: bool,
    /// Other streams use it: see [`Uses`].
    pub used: bool,
    /// Allocated, or given back and not complete yet.
    pub active: bool,
    live: bool,
}

impl Block {
    pub fn new(
        addr: u64,
        size: u64,
        stream: u64,
        pool: BlockIndex,
        reservation: BlockIndex,
    ) -> Block {
        Block {
            addr,
            size,
            requested: 0,
            stream,
            birth: 0,
            age_base: 0,
            prev: NONE,
            next: NONE,
            pool,
            reservation,
            events: 0,
            generation: 0,
            allocated: false,
            mapped: true,
            used: false,
            active: false,
            live: true,
        }
    }

    /// Its place among the free blocks.
    pub fn key(&self, ix: BlockIndex) -> FreeKey {
        FreeKey { stream: self.stream, size: self.size, birth: self.birth, addr: self.addr, ix }
    }

    pub fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    pub fn is_expandable(&self) -> bool {
        self.reservation != NONE
    }

    /// Nobody has it, or may still use it.
    pub fn is_idle(&self) -> bool {
        !self.allocated && self.events == 0 && !self.used
    }
}

/// The streams that use a block besides its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(pub PyTorchMap<()>);

/// All blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    slab: Vec<Block>,
    free: Vec<BlockIndex>,
}

impl std::ops::Index<BlockIndex> for Blocks {
    type Output = Block;
    #[inline]
    fn index(&self, ix: BlockIndex) -> &Block {
        &self.slab[ix as usize]
    }
}

impl std::ops::IndexMut<BlockIndex> for Blocks {
    #[inline]
    fn index_mut(&mut self, ix: BlockIndex) -> &mut Block {
        &mut self.slab[ix as usize]
    }
}

impl Blocks {
    pub fn add(&mut self, mut block: Block) -> BlockIndex {
        if let Some(ix) = self.free.pop() {
            let slot = &mut self.slab[ix as usize];
            block.generation = slot.generation;
            *slot = block;
            return ix;
        }
        self.slab.push(block);
        (self.slab.len() - 1) as BlockIndex
    }

    pub fn remove(&mut self, ix: BlockIndex) {
        let block = &mut self[ix];
        block.live = false;
        block.generation = block.generation.wrapping_add(1);
        self.free.push(ix);
    }

    pub fn id(&self, ix: BlockIndex) -> BlockId {
        BlockId { index: ix, generation: self[ix].generation }
    }

    /// What was handed out under this id is handed out no more.
    pub fn retire_id(&mut self, ix: BlockIndex) {
        let block = &mut self[ix];
        block.generation = block.generation.wrapping_add(1);
    }

    /// The allocated block with this id.
    pub fn find(&self, id: BlockId) -> Option<BlockIndex> {
        let block = self.slab.get(id.index as usize)?;
        (block.live && block.allocated && block.generation == id.generation).then_some(id.index)
    }

    pub fn iter(&self) -> impl Iterator<Item = (BlockIndex, &Block)> {
        self.slab.iter().enumerate().filter(|(_, b)| b.live).map(|(i, b)| (i as BlockIndex, b))
    }

    /// Puts `new` between two neighbours.
    pub fn link(&mut self, before: BlockIndex, new: BlockIndex, after: BlockIndex) {
        self[new].prev = before;
        self[new].next = after;
        if before != NONE {
            self[before].next = new;
        }
        if after != NONE {
            self[after].prev = new;
        }
    }
}
