//! The invariants of the allocator, checked from scratch. For tests.

use std::collections::BTreeMap;

use crate::allocator::Allocator;
use crate::blocks::{Block, BlockIndex, NONE};
use crate::stats::{ByPool, Stats};

/// The first thing that does not hold.
pub(crate) fn check<D, S>(a: &Allocator<D, S>) -> Result<(), String> {
    let mut by_addr: BTreeMap<u64, u64> = BTreeMap::new();
    let mut recount = Stats::default();
    let mut reserved = 0;
    let (mut free, mut unmapped) = (0, 0);
    for (ix, block) in a.blocks.iter() {
        let at = block.addr;
        if block.size == 0 {
            return Err(format!("block at {at:#x} has no bytes"));
        }
        if by_addr.insert(at, block.size).is_some() {
            return Err(format!("two blocks at {at:#x}"));
        }
        neighbours(a, ix, block)?;
        let pool = &a.pools[block.pool as usize];
        let idle = !block.active;
        if pool.free.contains(&block.key(ix)) != (idle && block.mapped) {
            return Err(format!(
                "block at {at:#x} is in the free set, or is not, and should not, or should"
            ));
        }
        if pool.unmapped.contains(&(block.stream, at, ix)) == block.mapped {
            return Err(format!(
                "block at {at:#x} is among the unmapped, or is not, and should not, or should"
            ));
        }
        free += usize::from(idle && block.mapped);
        unmapped += usize::from(!block.mapped);
        if block.allocated && !block.active {
            return Err(format!("block at {at:#x} is allocated and not active"));
        }
        if block.active == block.is_idle() {
            return Err(format!("block at {at:#x} is active and idle, or neither"));
        }
        if block.mapped {
            reserved += block.size;
        }
        count(&mut recount, block, pool.small);
    }
    if free != a.pools.iter().map(|p| p.free.len()).sum::<usize>() {
        return Err("a free set holds blocks that are not there".to_owned());
    }
    if unmapped != a.pools.iter().map(|p| p.unmapped.len()).sum::<usize>() {
        return Err("an unmapped set holds blocks that are not there".to_owned());
    }
    let mut end = 0;
    for (addr, size) in by_addr {
        if addr < end {
            return Err(format!("the block at {addr:#x} overlaps the one before"));
        }
        end = addr + size;
    }
    if reserved != a.reserved || a.stats.reserved_bytes.all.current as u64 != reserved {
        return Err(format!("{reserved} bytes are reserved, {} are counted", a.reserved));
    }
    same(&a.stats, &recount)
}

fn neighbours<D, S>(a: &Allocator<D, S>, ix: BlockIndex, block: &Block) -> Result<(), String> {
    let at = block.addr;
    if block.next != NONE {
        let next = &a.blocks[block.next];
        if next.prev != ix || next.addr != at + block.size {
            return Err(format!("block at {at:#x} and its next do not fit together"));
        }
        if (next.stream, next.pool, next.reservation)
            != (block.stream, block.pool, block.reservation)
        {
            return Err(format!("block at {at:#x} and its next are of different segments"));
        }
        if block.is_idle() && next.is_idle() && block.mapped == next.mapped {
            return Err(format!("block at {at:#x} and its next are both free and not merged"));
        }
    }
    if block.prev != NONE && a.blocks[block.prev].next != ix {
        return Err(format!("block at {at:#x} is not the next of its previous"));
    }
    Ok(())
}

fn count(stats: &mut Stats, block: &Block, small: bool) {
    if block.allocated {
        stats.allocation.up(small, 1);
        stats.allocated_bytes.up(small, block.size);
    }
    if block.active {
        stats.active.up(small, 1);
        stats.active_bytes.up(small, block.size);
        stats.requested_bytes.up(small, block.requested);
    } else if block.mapped && block.is_split() && !block.is_expandable() {
        stats.inactive_split.up(small, 1);
        stats.inactive_split_bytes.up(small, block.size);
    }
    if block.mapped {
        stats.reserved_bytes.up(small, block.size);
    }
    if block.prev == NONE && !block.is_expandable() {
        stats.segment.up(small, 1);
    }
}

/// The current values, which are all that a recount can know.
fn same(counted: &Stats, recount: &Stats) -> Result<(), String> {
    let current = |b: &ByPool| [b.all.current, b.small_pool.current, b.large_pool.current];
    for (name, kept, again) in [
        ("allocation", &counted.allocation, &recount.allocation),
        ("allocated_bytes", &counted.allocated_bytes, &recount.allocated_bytes),
        ("active", &counted.active, &recount.active),
        ("active_bytes", &counted.active_bytes, &recount.active_bytes),
        ("requested_bytes", &counted.requested_bytes, &recount.requested_bytes),
        ("inactive_split", &counted.inactive_split, &recount.inactive_split),
        ("inactive_split_bytes", &counted.inactive_split_bytes, &recount.inactive_split_bytes),
        ("reserved_bytes", &counted.reserved_bytes, &recount.reserved_bytes),
        ("segment", &counted.segment, &recount.segment),
    ] {
        if current(kept) != current(again) {
            return Err(format!(
                "{name} is counted as {:?} and is {:?}",
                current(kept),
                current(again)
            ));
        }
    }
    Ok(())
}
