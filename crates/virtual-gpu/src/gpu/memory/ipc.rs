//! Handles that other processes can open.
//!
//! The interprocess handles of the APIs are 64 bytes that a program sends to another one as it
//! likes. Ours say everything themselves: which process, which allocation, how large, on which
//! device. The opener gets an address of the right size and pays nothing for it. The bytes behind
//! it read as zeros, as nothing that a kernel computed exists anyway.

use super::{CHUNK, Error, Ledger, Origin, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"memtrace");

/// The size of every interprocess handle.
pub const TICKET: usize = 64;

fn write(words: [u64; 7]) -> [u8; TICKET] {
    let mut bytes = [0; TICKET];
    let all = core::iter::once(MAGIC).chain(words);
    for (place, word) in bytes.chunks_exact_mut(8).zip(all) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn read(bytes: &[u8; TICKET]) -> Option<[u64; 7]> {
    let mut words = bytes.chunks_exact(8).map(|word| {
        u64::from_le_bytes([word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7]])
    });
    if words.next()? != MAGIC {
        return None;
    }
    let mut rest = [0; 7];
    rest.iter_mut().zip(words).for_each(|(place, word)| *place = word);
    Some(rest)
}

/// What a memory handle says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryTicket {
    /// The process that allocated it.
    pub pid: u32,
    /// The number of the GPU in the machine.
    pub gpu: usize,
    /// The allocation's id, or the physical memory's handle, in that process.
    pub id: u64,
    /// Its size in bytes.
    pub size: u64,
}

const MEMORY: u64 = 1;
const EVENT: u64 = 2;

impl MemoryTicket {
    /// The 64 bytes.
    pub fn to_bytes(self) -> [u8; TICKET] {
        write([MEMORY, self.pid.into(), self.gpu as u64, self.id, self.size, 0, 0])
    }

    /// Reads them back; `None` if they are not a memory handle of a virtual GPU.
    pub fn from_bytes(bytes: &[u8; TICKET]) -> Option<Self> {
        let [MEMORY, pid, gpu, id, size, ..] = read(bytes)? else { return None };
        Some(Self { pid: pid as u32, gpu: gpu as usize, id, size })
    }
}

/// What an event handle says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventTicket {
    /// The process that made it.
    pub pid: u32,
    /// The number of the GPU in the machine.
    pub gpu: usize,
    /// The event's handle in that process.
    pub id: u64,
}

impl EventTicket {
    /// The 64 bytes.
    pub fn to_bytes(self) -> [u8; TICKET] {
        write([EVENT, self.pid.into(), self.gpu as u64, self.id, 0, 0, 0])
    }

    /// Reads them back; `None` if they are not an event handle of a virtual GPU.
    pub fn from_bytes(bytes: &[u8; TICKET]) -> Option<Self> {
        let [EVENT, pid, gpu, id, ..] = read(bytes)? else { return None };
        Some(Self { pid: pid as u32, gpu: gpu as usize, id })
    }
}

impl Ledger {
    /// `cudaIpcGetMemHandle`: for heap memory.
    pub fn export(&self, addr: u64) -> Result<MemoryTicket> {
        let found = self.find(addr).filter(|found| found.origin == Origin::Heap);
        let found = found.ok_or(Error::INVALID_VALUE)?;
        let gpu = super::gpu(found.device)?.index;
        Ok(MemoryTicket { pid: std::process::id(), gpu, id: found.id, size: found.size })
    }

    /// `cudaIpcOpenMemHandle`: the same handle opened twice gives the same address.
    pub fn import(&mut self, device: usize, ticket: MemoryTicket) -> Result<u64> {
        if ticket.pid == std::process::id() {
            return Err(Error::INVALID_CONTEXT);
        }
        let key = (ticket.pid, ticket.id);
        if let Some((addr, opened)) = self.imports.get_mut(&key) {
            *opened += 1;
            return Ok(*addr);
        }
        let span =
            ticket.size.max(1).checked_next_multiple_of(CHUNK).ok_or(Error::INVALID_VALUE)?;
        let start = self.ranges(device)?.heap.take(span).ok_or(Error::OUT_OF_MEMORY)?;
        self.enter(start, ticket.size, span, 0, device, Origin::Imported);
        self.imports.insert(key, (start, 1));
        Ok(start)
    }

    /// `cudaIpcCloseMemHandle`.
    pub fn close_import(&mut self, addr: u64) -> Result {
        let key =
            *self.imports.iter().find(|(_, (at, _))| *at == addr).ok_or(Error::INVALID_VALUE)?.0;
        let opened = self.imports.get_mut(&key).map_or(0, |(_, opened)| {
            *opened -= 1;
            *opened
        });
        if opened == 0 {
            self.imports.remove(&key);
            let gone = self.leave(addr)?;
            self.ranges(gone.device)?.heap.put(gone.start, gone.span);
        }
        Ok(())
    }
}
