//! Expandable segments: a large range of addresses, with memory behind the part that is in use.
//!
//! One reservation belongs to one stream of one pool. Memory comes and goes in chunks of 2
//! MiB (small pool) or one large segment's size. A block without memory behind it is
//! *unmapped*, and is kept in a set of its own.

use crate::allocator::{Allocator, Request};
use crate::blocks::{Block, BlockIndex, NONE};
use crate::driver::Driver;
use crate::event::{Action, Sink};
use crate::settings::Reserve;
use crate::sizes::SMALL_SEGMENT;

/// A range of addresses.
#[derive(Clone, Debug)]
pub(crate) struct Reservation {
    pub base: u64,
    pub size: u64,
    pub chunk: u64,
}

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// A free block of at least the wanted size, in no pool, by mapping memory.
    pub(crate) fn expand(&mut self, r: &Request) -> Option<BlockIndex> {
        let mut at = self.find_room(r)?;
        if !self.blocks[at].mapped && !self.map(&mut at, r.size) {
            return None;
        }
        while self.blocks[at].size < r.size {
            let missing = r.size - self.blocks[at].size;
            let mut next = self.blocks[at].next;
            if !self.map(&mut next, missing) {
                return None;
            }
            at = next;
        }
        self.take_out(at);
        Some(at)
    }

    /// The first run of free and unmapped blocks that is long enough, by
    /// address; or a new reservation.
    fn find_room(&mut self, r: &Request) -> Option<BlockIndex> {
        let pool = &self.pools[r.pool as usize];
        let unmapped = pool.unmapped.range((r.stream, 0, 0)..).take_while(|k| k.0 == r.stream);
        for &(_, _, ix) in unmapped {
            let before = self.blocks[ix].prev;
            let start = if before != NONE && self.blocks[before].is_idle() { before } else { ix };
            if self.has_room(start, r.size) {
                return Some(start);
            }
        }
        let (small, id) = (pool.small, pool.id);
        let chunk = if small { SMALL_SEGMENT } else { self.settings.large_segment };
        let size = self.reservation_size(chunk);
        if size < r.size {
            // PyTorch reserves it, sees that it is too small, and gives it back.
            return None;
        }
        let base = self.device.reserve(size, chunk, r.stream, id)?;
        let reservation = Reservation { base, size, chunk };
        let free = self.reservations.iter().position(Option::is_none);
        let number = free.unwrap_or_else(|| {
            self.reservations.push(None);
            self.reservations.len() - 1
        });
        self.reservations[number] = Some(reservation);
        let mut block = Block::new(base, size, r.stream, r.pool, number as BlockIndex);
        block.mapped = false;
        block.birth = self.next_birth();
        let ix = self.blocks.add(block);
        self.pools[r.pool as usize].unmapped.insert((r.stream, base, ix));
        Some(ix)
    }

    fn has_room(&self, mut at: BlockIndex, wanted: u64) -> bool {
        let mut bytes = 0;
        while bytes < wanted && at != NONE && self.blocks[at].is_idle() {
            bytes += self.blocks[at].size;
            at = self.blocks[at].next;
        }
        bytes >= wanted
    }

    /// The device's memory and an eighth more, or what the settings say, in whole chunks.
    fn reservation_size(&self, chunk: u64) -> u64 {
        let total = self.device.total();
        let most = total.saturating_add(total / 8);
        let wanted = match self.settings.reserve {
            None => most,
            Some(Reserve::Bytes(bytes)) => bytes.min(most),
            Some(Reserve::Fraction(f)) => ((f * total as f64) as u64).min(most),
        };
        wanted.div_ceil(chunk).saturating_mul(chunk)
    }

    /// Maps memory behind the first `size` bytes of an unmapped block, which
    /// may become part of a free neighbour.
    fn map(&mut self, ix: &mut BlockIndex, size: u64) -> bool {
        let block = &self.blocks[*ix];
        let (addr, stream, pool, number) =
            (block.addr, block.stream, block.pool, block.reservation);
        let whole = block.size;
        let Some(chunk) = self.reservations[number as usize].as_ref().map(|r| r.chunk) else {
            return false;
        };
        let mapped =
            size.min(whole).checked_next_multiple_of(chunk).map_or(whole, |m| m.min(whole));
        if !self.device.map(addr, mapped, chunk, stream) {
            return false;
        }
        self.pools[pool as usize].unmapped.remove(&(stream, addr, *ix));
        self.blocks[*ix].mapped = true;
        if mapped < whole {
            let mut rest = Block::new(addr + mapped, whole - mapped, stream, pool, number);
            rest.mapped = false;
            rest.birth = self.blocks[*ix].birth;
            let rest = self.blocks.add(rest);
            let after = self.blocks[*ix].next;
            self.blocks.link(*ix, rest, after);
            self.pools[pool as usize].unmapped.insert((stream, addr + mapped, rest));
            self.blocks[*ix].size = mapped;
        }
        let (before, after) = (self.blocks[*ix].prev, self.blocks[*ix].next);
        self.merge(*ix, before);
        self.merge(*ix, after);
        self.insert(*ix);
        self.reserved += mapped;
        self.reserved_up(pool, mapped);
        self.stats.num_device_alloc += 1;
        let id = self.pools[pool as usize].id;
        self.emit(Action::SegmentMap, addr, mapped, stream, id);
        true
    }

    /// Takes the memory behind the whole chunks of a free block back; what
    /// is around them stays free.
    pub(crate) fn unmap(&mut self, ix: BlockIndex) {
        let block = &self.blocks[ix];
        let (addr, size, stream, pool, number) =
            (block.addr, block.size, block.stream, block.pool, block.reservation);
        let Some((base, chunk)) =
            self.reservations[number as usize].as_ref().map(|r| (r.base, r.chunk))
        else {
            return;
        };
        let start = base + (addr - base).next_multiple_of(chunk);
        let end = base + (addr + size - base) / chunk * chunk;
        if start >= end {
            return;
        }
        self.device.unmap(start, end - start, chunk, stream);
        self.take_out(ix);
        if start > addr {
            let mut before = Block::new(addr, start - addr, stream, pool, number);
            before.birth = self.blocks[ix].birth;
            let before = self.blocks.add(before);
            let prev = self.blocks[ix].prev;
            self.blocks.link(prev, before, ix);
            self.insert(before);
        }
        if end < addr + size {
            let mut after = Block::new(end, addr + size - end, stream, pool, number);
            after.birth = self.blocks[ix].birth;
            let after = self.blocks.add(after);
            let next = self.blocks[ix].next;
            self.blocks.link(ix, after, next);
            self.insert(after);
        }
        let block = &mut self.blocks[ix];
        block.addr = start;
        block.size = end - start;
        block.mapped = false;
        let (before, after) = (block.prev, block.next);
        self.merge(ix, before);
        self.merge(ix, after);
        let block = &self.blocks[ix];
        self.pools[pool as usize].unmapped.insert((stream, block.addr, ix));
        self.reserved -= end - start;
        self.reserved_down(pool, end - start);
        let id = self.pools[pool as usize].id;
        if let Some(private) = self.private.get_mut(&id) {
            private.segments = private.segments.saturating_sub(1);
        }
        self.stats.num_device_free += 1;
        self.emit(Action::SegmentUnmap, start, end - start, stream, id);
    }

    /// Nothing is mapped in it any more: the addresses go back.
    pub(crate) fn give_up_reservation(&mut self, ix: BlockIndex) {
        let block = &self.blocks[ix];
        let (stream, addr, pool, number) =
            (block.stream, block.addr, block.pool, block.reservation);
        if let Some(reservation) = self.reservations[number as usize].take() {
            self.device.unreserve(reservation.base, reservation.size);
        }
        self.pools[pool as usize].unmapped.remove(&(stream, addr, ix));
        self.blocks.remove(ix);
    }
}
