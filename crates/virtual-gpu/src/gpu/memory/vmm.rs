//! Virtual memory management: addresses, physical memory, and what lies where.
//!
//! The three are separate ledgers. Reserving addresses costs nothing; creating physical memory
//! costs the device its size; mapping joins the two. Physical memory goes back when its last handle
//! has been released and its last mapping is gone, in whichever order.

use super::{Allocation, CHUNK, Error, Ledger, Origin, Result};

/// Where physical memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Location {
    /// On a device.
    Device(usize),
    /// In host memory, which is not counted.
    Host,
}

/// A piece of physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Physical {
    /// Bytes, a multiple of the granularity.
    pub size: u64,
    /// Where it lies.
    pub location: Location,
    /// The handle types that it may be exported as: bits of `CUmemAllocationHandleType`.
    pub exports: u32,
    /// Another process made it and pays for it.
    pub imported: bool,
    handles: u32,
    mappings: u32,
}

impl Physical {
    /// Memory with one handle.
    pub fn new(size: u64, location: Location, exports: u32, imported: bool) -> Self {
        Self { size, location, exports, imported, handles: 1, mappings: 0 }
    }

    fn charged_to(&self) -> Option<usize> {
        match self.location {
            Location::Device(device) if !self.imported => Some(device),
            _ => None,
        }
    }
}

/// Physical memory under addresses.
#[derive(Clone, Copy)]
pub(super) struct Mapping {
    size: u64,
    physical: u64,
    /// Devices that may read and write it, one bit each.
    access: u64,
}

fn whole_chunks(value: u64) -> Result {
    if value == 0 || !value.is_multiple_of(CHUNK) { Err(Error::INVALID_VALUE) } else { Ok(()) }
}

impl Ledger {
    /// `cuMemAddressReserve`. A hint that is free is taken.
    pub fn reserve(&mut self, size: u64, align: u64, hint: u64, device: usize) -> Result<u64> {
        whole_chunks(size)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(Error::INVALID_VALUE);
        }
        let align = align.max(CHUNK);
        let start = if hint.is_multiple_of(align) && self.reservations.take_at(hint, size) {
            hint
        } else {
            self.reservations.take(size, align).ok_or(Error::OUT_OF_MEMORY)?
        };
        self.enter(start, size, size, 0, device, Origin::Reserved);
        Ok(start)
    }

    /// `cuMemAddressFree`: the whole reservation, with nothing mapped.
    pub fn unreserve(&mut self, addr: u64, size: u64) -> Result {
        let whole = |found: &&Allocation| found.origin == Origin::Reserved && found.span == size;
        self.allocations.get(&addr).filter(whole).ok_or(Error::INVALID_VALUE)?;
        if self.mappings.range(addr..addr + size).next().is_some() {
            return Err(Error::INVALID_VALUE);
        }
        self.leave(addr)?;
        self.reservations.put(addr, size);
        Ok(())
    }

    /// `cuMemCreate`, or the import of what another process created.
    pub fn create(&mut self, physical: Physical) -> Result<u64> {
        whole_chunks(physical.size)?;
        if let Some(device) = physical.charged_to() {
            self.account(device)?.take(physical.size)?;
        }
        Ok(self.physical.insert(physical))
    }

    /// The physical memory behind a handle that has not been released.
    pub fn physical(&mut self, handle: u64) -> Result<&mut Physical> {
        self.physical.get_mut(handle).filter(|found| found.handles > 0).ok_or(Error::INVALID_VALUE)
    }

    /// One more handle.
    pub fn retain(&mut self, handle: u64) -> Result {
        self.physical(handle)?.handles += 1;
        Ok(())
    }

    /// `cuMemRelease`.
    pub fn release(&mut self, handle: u64) -> Result {
        self.physical(handle)?.handles -= 1;
        self.drop_unused(handle);
        Ok(())
    }

    fn drop_unused(&mut self, handle: u64) {
        let unused = |found: &Physical| found.handles == 0 && found.mappings == 0;
        if self.physical.get(handle).is_some_and(unused)
            && let Some(gone) = self.physical.remove(handle)
            && let Some(device) = gone.charged_to()
            && let Ok(account) = self.account(device)
        {
            account.give(gone.size);
        }
    }

    /// `cuMemMap`.
    pub fn map(&mut self, addr: u64, size: u64, offset: u64, handle: u64) -> Result {
        whole_chunks(size)?;
        let inside = self.find(addr).is_some_and(|found| {
            found.origin == Origin::Reserved && addr - found.start + size <= found.span
        });
        let taken = self
            .mappings
            .range(..addr.saturating_add(size))
            .next_back()
            .is_some_and(|(&at, mapping)| at + mapping.size > addr);
        if !inside || taken || !addr.is_multiple_of(CHUNK) {
            return Err(Error::INVALID_VALUE);
        }
        let physical = self.physical(handle)?;
        if offset.checked_add(size).is_none_or(|end| end > physical.size) {
            return Err(Error::INVALID_VALUE);
        }
        physical.mappings += 1;
        self.mappings.insert(addr, Mapping { size, physical: handle, access: 0 });
        Ok(())
    }

    /// The mappings that make up a range, if they make up all of it and nothing else.
    fn whole_mappings(&self, addr: u64, size: u64) -> Result<Vec<u64>> {
        let end = addr.checked_add(size).ok_or(Error::INVALID_VALUE)?;
        let (mut starts, mut next) = (Vec::new(), addr);
        for (&start, mapping) in self.mappings.range(addr..end) {
            if start != next {
                return Err(Error::INVALID_VALUE);
            }
            starts.push(start);
            next += mapping.size;
        }
        if next == end && size > 0 { Ok(starts) } else { Err(Error::INVALID_VALUE) }
    }

    /// `cuMemUnmap`: whole mappings only.
    pub fn unmap(&mut self, addr: u64, size: u64) -> Result {
        for start in self.whole_mappings(addr, size)? {
            if let Some(gone) = self.mappings.remove(&start) {
                if let Some(physical) = self.physical.get_mut(gone.physical) {
                    physical.mappings -= 1;
                }
                self.drop_unused(gone.physical);
            }
        }
        self.contents.forget(addr, size);
        Ok(())
    }

    /// `cuMemSetAccess` for one device.
    pub fn set_access(&mut self, addr: u64, size: u64, device: usize, allowed: bool) -> Result {
        for start in self.whole_mappings(addr, size)? {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                let bit = 1 << device;
                mapping.access = if allowed { mapping.access | bit } else { mapping.access & !bit };
            }
        }
        Ok(())
    }

    fn mapping(&self, addr: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=addr).next_back()?;
        (addr - start < mapping.size).then_some((start, mapping))
    }

    /// `cuMemGetAccess`.
    pub fn access(&self, addr: u64, device: usize) -> Result<bool> {
        let (_, mapping) = self.mapping(addr).ok_or(Error::INVALID_VALUE)?;
        Ok(mapping.access & (1 << device) != 0)
    }

    /// Physical memory lies under all of these bytes.
    pub(super) fn mapped(&self, addr: u64, len: u64) -> bool {
        let Some(end) = addr.checked_add(len) else { return false };
        let mut next = addr;
        while next < end {
            let Some((start, mapping)) = self.mapping(next) else { return false };
            next = start + mapping.size;
        }
        true
    }

    /// The physical memory under an address: its handle, and the range that is mapped there.
    pub fn mapped_at(&self, addr: u64) -> Option<(u64, &Physical, u64, u64)> {
        let (start, mapping) = self.mapping(addr)?;
        let physical = self.physical.get(mapping.physical)?;
        Some((mapping.physical, physical, start, mapping.size))
    }

    /// The device whose memory is mapped at an address.
    pub fn device_mapped_at(&self, addr: u64) -> Option<usize> {
        match self.mapped_at(addr)?.1.location {
            Location::Device(device) => Some(device),
            Location::Host => None,
        }
    }

    /// `cuMemRetainAllocationHandle`: a handle to what is mapped at an address, even if all others
    /// have been released.
    pub fn retain_mapped(&mut self, addr: u64) -> Result<u64> {
        let handle = self.mapping(addr).ok_or(Error::INVALID_VALUE)?.1.physical;
        self.physical.get_mut(handle).ok_or(Error::INVALID_VALUE)?.handles += 1;
        Ok(handle)
    }
}
