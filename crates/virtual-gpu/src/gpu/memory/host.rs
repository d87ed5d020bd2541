//! Host memory that CUDA knows of: pinned, managed, registered.
//!
//! This memory is real, since the program reads and writes it. What CUDA allocates
//! comes from a range of its own, so that its addresses are the same in every run too.
//! Managed memory is not counted against a device: it may move away at any time, and
//! more of it may exist than a card has.

use super::{Error, Ledger, Origin, Result, address};

const PAGE: u64 = 4096;

impl Ledger {
    fn allocate_host_range(&mut self, size: u64, device: usize, origin: Origin) -> Result<u64> {
        if size == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let span = size.checked_next_multiple_of(PAGE).ok_or(Error::OUT_OF_MEMORY)?;
        let start = self.host.take(span, PAGE).ok_or(Error::OUT_OF_MEMORY)?;
        if !address::commit(start, span) {
            self.host.put(start, span);
            return Err(Error::OUT_OF_MEMORY);
        }
        self.enter(start, size, span, 0, device, origin);
        Ok(start)
    }

    fn free_host_range(&mut self, addr: u64) -> Result {
        let gone = self.leave(addr)?;
        address::decommit(gone.start, gone.span);
        self.host.put(gone.start, gone.span);
        Ok(())
    }

    /// Pinned memory.
    pub fn allocate_host(&mut self, device: usize, size: u64, flags: u32) -> Result<u64> {
        self.allocate_host_range(size, device, Origin::Host(flags))
    }

    /// Frees pinned memory.
    pub fn free_host(&mut self, addr: u64) -> Result {
        match self.allocations.get(&addr).map(|found| found.origin) {
            Some(Origin::Host(_)) => self.free_host_range(addr),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Managed memory.
    pub fn allocate_managed(&mut self, device: usize, size: u64) -> Result<u64> {
        self.allocate_host_range(size, device, Origin::Managed)
    }

    pub(super) fn free_managed(&mut self, addr: u64) -> Result {
        self.free_host_range(addr)
    }

    /// Pins memory of the program's own.
    pub fn register(&mut self, device: usize, addr: u64, size: u64, flags: u32) -> Result {
        if size == 0 || addr == 0 || addr.checked_add(size).is_none() || address::is_device(addr) {
            return Err(Error::INVALID_VALUE);
        }
        if self.overlaps(addr, size) {
            return Err(Error::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.enter(addr, size, size, 0, device, Origin::Registered(flags));
        Ok(())
    }

    /// Unpins it.
    pub fn unregister(&mut self, addr: u64) -> Result {
        match self.allocations.get(&addr).map(|found| found.origin) {
            Some(Origin::Registered(_)) => self.leave(addr).map(|_| ()),
            _ => Err(Error::HOST_MEMORY_NOT_REGISTERED),
        }
    }
}
