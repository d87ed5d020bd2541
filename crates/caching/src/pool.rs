//! Pools: the free blocks of one kind.

use std::collections::BTreeSet;

use memtrace_format::snapshot::PoolId;

use crate::blocks::BlockIndex;
use crate::free::FreeBlocks;

/// Free blocks, and addresses without memory.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub small: bool,
    /// (0, 0) for the default pools.
    pub id: PoolId,
    pub free: FreeBlocks,
    /// (stream, address, block)
    pub unmapped: BTreeSet<(u64, u64, BlockIndex)>,
    /// Searches so far, counted while garbage collection is on: the clock of a block's age.
    pub searches: u64,
    pub no_split: bool,
}

impl Pool {
    pub fn new(small: bool, id: PoolId) -> Pool {
        Pool {
            small,
            id,
            free: FreeBlocks::default(),
            unmapped: BTreeSet::new(),
            searches: 0,
            no_split: false,
        }
    }

    pub fn is_private(&self) -> bool {
        self.id != (0, 0)
    }
}

/// The default small pool.
pub(crate) const SMALL: BlockIndex = 0;
/// The default large pool.
pub(crate) const LARGE: BlockIndex = 1;

/// A pair of pools of a graph or a user.
#[derive(Clone, Debug)]
pub(crate) struct Private {
    pub small: BlockIndex,
    pub large: BlockIndex,
    /// Captures and users that hold it.
    pub uses: u64,
    /// Segments that it holds.
    pub segments: u64,
    /// Segments come from an allocator of its own: never expandable.
    pub own_allocator: bool,
}
