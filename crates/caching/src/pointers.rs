//! The allocator by address, for callers that know nothing else: a pointer in, a pointer out.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::allocator::{Allocation, Allocator, Misuse, OutOfMemory};
use crate::blocks::BlockId;
use crate::driver::Driver;
use crate::event::Sink;

/// Addresses are multiples of 512: one multiplication spreads them.
#[derive(Clone, Copy, Debug, Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(self.0 ^ u64::from(*b));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let spread = (n >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ (spread >> 32);
    }
}

/// Blocks by the address at which they were handed out.
#[derive(Debug, Default)]
pub struct Pointers {
    /// The last one, which is the likeliest to be given back first, and not among the others.
    last: Option<(u64, BlockId)>,
    others: HashMap<u64, BlockId, BuildHasherDefault<AddressHasher>>,
}

impl Pointers {
    /// A block at an address; none for a request of no bytes, which leaves no trace.
    ///
    /// # Errors
    /// There is no memory.
    pub fn malloc<D: Driver, S: Sink>(
        &mut self,
        allocator: &mut Allocator<D, S>,
        size: u64,
        stream: u64,
    ) -> Result<Option<Allocation>, OutOfMemory> {
        if size == 0 {
            return Ok(None);
        }
        let block = allocator.malloc(size, stream)?;
        if let Some((addr, id)) = self.last.replace((block.addr, block.id)) {
            self.others.insert(addr, id);
        }
        Ok(Some(block))
    }

    /// Gives back what was handed out at an address, and says how large it
    /// was; address 0 is nothing.
    ///
    /// # Errors
    /// Nothing is handed out there: never was, or not any more, or it is the middle of a block.
    pub fn free<D: Driver, S: Sink>(
        &mut self,
        allocator: &mut Allocator<D, S>,
        addr: u64,
    ) -> Result<u64, Misuse> {
        if addr == 0 {
            return Ok(0);
        }
        let id = match self.last.take_if(|(last, _)| *last == addr) {
            Some((_, id)) => id,
            None => self.others.remove(&addr).ok_or(Misuse::UnknownAddress(addr))?,
        };
        let size = allocator.allocation(id).map_or(0, |block| block.size);
        allocator.free(id).map(|()| size)
    }

    /// Another stream uses what is at an address. Memory that is not ours is
    /// none of our business, as in PyTorch.
    pub fn record_stream<D: Driver, S: Sink>(
        &self,
        allocator: &mut Allocator<D, S>,
        addr: u64,
        stream: u64,
    ) {
        if let Some(id) = self.get(addr) {
            let _ = allocator.record_stream(id, stream);
        }
    }

    /// The block at an address.
    pub fn get(&self, addr: u64) -> Option<BlockId> {
        let last = self.last.filter(|(last, _)| *last == addr);
        last.map(|(_, id)| id).or_else(|| self.others.get(&addr).copied())
    }
}
