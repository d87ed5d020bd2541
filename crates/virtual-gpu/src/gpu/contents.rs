//! What is known of the bytes in device memory, though there is none.
//!
//! Programs put small things on the device and read them back: pointer tables, sizes, a scalar, a
//! counter that was set to zero. So what the host copies or sets, up to 64 KiB at a time, is
//! remembered as a *record* and comes back on reading.
//!
//! Kernels compute nothing, but they might have written anywhere. So a record holds for 32
//! launches if exactly it is read, and for 4 if a part of it is. In that case the block
//! has probably been reused: without the rule, PyTorch reads an old pointer table as a
//! size. Everything else reads as zeros.
//!
//! When a program reads something of the size of a number that nobody has written, it probably asks
//! for a result, such as how many elements passed a filter. It gets zero, and goes on with less
//! memory than it would have needed. That is reported once.

use super::memory::ledger;
use super::{address, launches};
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::BTreeMap;

/// The largest copy or set that is remembered.
pub const LIMIT: usize = 64 << 10;
/// For how many launches a record holds that is read exactly.
const KEEP: u64 = 32;
/// For how many launches a part of a record holds.
const KEEP_PART: u64 = KEEP / 8;
/// With more records or more bytes than this, those that hold no longer are thrown out. If that
/// doesn't help, nothing is added: a record is a help, and may be missing.
const MANY: usize = 1 << 16;
const MANY_BYTES: usize = 64 << 20;

static ZERO_READS: AtomicU64 = AtomicU64::new(0);

struct Record {
    bytes: Box<[u8]>,
    /// How many launches there had been.
    written: u64,
}

/// All records, by address. They never overlap.
#[derive(Default)]
pub struct Contents {
    records: BTreeMap<u64, Record>,
    /// The bytes of all records.
    size: usize,
    /// When old records were last thrown out.
    cleaned: u64,
}

impl Contents {
    /// Remembers bytes, if they are few. `now` counts launches.
    pub fn write(&mut self, addr: u64, bytes: &[u8], now: u64) {
        self.forget(addr, bytes.len() as u64);
        if bytes.is_empty() || bytes.len() > LIMIT {
            return;
        }
        if self.is_full() && now - self.cleaned > KEEP {
            self.cleaned = now;
            self.records.retain(|_, record| now - record.written <= KEEP);
            self.size = self.records.values().map(|record| record.bytes.len()).sum();
        }
        if !self.is_full() {
            self.insert(addr, Record { bytes: bytes.into(), written: now });
        }
    }

    fn is_full(&self) -> bool {
        self.records.len() >= MANY || self.size >= MANY_BYTES
    }

    fn insert(&mut self, addr: u64, record: Record) {
        self.size += record.bytes.len();
        self.records.insert(addr, record);
    }

    /// These bytes may be anything from now on. What sticks out of the range on either side stays.
    pub fn forget(&mut self, addr: u64, len: u64) {
        let end = addr.saturating_add(len);
        while let Some((&start, _)) = self.records.range(..end).next_back() {
            let last = start + self.records[&start].bytes.len() as u64;
            if last <= addr {
                break;
            }
            let Some(Record { bytes, written }) = self.records.remove(&start) else { break };
            self.size -= bytes.len();
            if last > end {
                let rest = bytes[(end - start) as usize..].into();
                self.insert(end, Record { bytes: rest, written });
            }
            if start < addr {
                let rest = bytes[..(addr - start) as usize].into();
                self.insert(start, Record { bytes: rest, written });
            }
        }
    }

    /// The bytes, if they are known: one record, a part of one, or several in a row.
    pub fn read(&self, addr: u64, len: usize, now: u64) -> Option<Vec<u8>> {
        if len == 0 || len > LIMIT {
            return None;
        }
        let age = |record: &Record| now - record.written;
        let (&start, first) = self.records.range(..=addr).next_back()?;
        let offset = (addr - start) as usize;
        if offset > 0 || first.bytes.len() > len {
            let part = first.bytes.get(offset..offset + len)?;
            return (age(first) <= KEEP_PART).then(|| part.to_vec());
        }
        let mut all = Vec::with_capacity(len);
        for (&start, record) in self.records.range(addr..) {
            let next_to_it = start == addr + all.len() as u64;
            if !next_to_it || all.len() + record.bytes.len() > len || age(record) > KEEP {
                return None;
            }
            all.extend_from_slice(&record.bytes);
            if all.len() == len {
                return Some(all);
            }
        }
        None
    }
}

/// Remembers what is written to device memory, or writes host memory.
pub fn write(addr: u64, bytes: &[u8]) {
    if address::is_device(addr) {
        ledger().contents.write(addr, bytes, launches());
    } else {
        to_host(addr, bytes);
    }
}

/// What device memory holds, if it is known.
pub fn read(addr: u64, len: usize) -> Option<Vec<u8>> {
    ledger().contents.read(addr, len, launches())
}

/// Device memory that may hold anything from now on, because something computes it.
pub fn forget(addr: u64, len: u64) {
    ledger().contents.forget(addr, len);
}

/// `memset` of device or host memory.
pub fn fill(addr: u64, pattern: &[u8], count: u64) {
    let len = pattern.len() as u64 * count;
    match (address::is_device(addr), pattern) {
        // SAFETY: the program names this memory of its own as the place to fill.
        (false, &[byte]) => unsafe { host_mut(addr).write_bytes(byte, count as usize) },
        (false, _) => (0..count).for_each(|i| to_host(addr + i * pattern.len() as u64, pattern)),
        (true, _) if len <= LIMIT as u64 => write(addr, &pattern.repeat(count as usize)),
        (true, _) => forget(addr, len),
    }
}

/// Copies between any two places.
pub fn copy(dst: u64, src: u64, len: u64) {
    if len == 0 || dst == src {
        return;
    }
    let small = (len <= LIMIT as u64).then_some(len as usize);
    match (address::is_device(dst), address::is_device(src)) {
        (false, false) => {
            let (to, from) = (host_mut(dst), host(src));
            // SAFETY: both are the program's own memory, `len` bytes of it, as it says in its call.
            unsafe { core::ptr::copy(from, to, len as usize) }
        }
        (true, false) => match small {
            // SAFETY: the program's own memory, `len` bytes of it, as it says in its call.
            Some(n) => write(dst, unsafe { core::slice::from_raw_parts(host(src), n) }),
            None => forget(dst, len),
        },
        (true, true) => {
            let mut ledger = ledger();
            match small.and_then(|n| ledger.contents.read(src, n, launches())) {
                Some(bytes) => ledger.contents.write(dst, &bytes, launches()),
                None => ledger.contents.forget(dst, len),
            }
        }
        (false, true) => {
            if let Some(bytes) = small.and_then(|n| read(src, n)) {
                to_host(dst, &bytes);
            } else {
                // SAFETY: the program's own memory, `len` bytes of it, as it says in its call.
                unsafe { host_mut(dst).write_bytes(0, len as usize) };
                note_zero_read(src, len);
            }
        }
    }
}

/// How often a number was read that nothing had computed.
pub fn zero_reads() -> u64 {
    ZERO_READS.load(Relaxed)
}

fn note_zero_read(addr: u64, len: u64) {
    let computed = || ledger().find(addr).is_none_or(|found| found.born < launches());
    if ![4, 8].contains(&len) || !computed() {
        return;
    }
    ZERO_READS.fetch_add(1, Relaxed);
    super::log::warn_once(
        "the program reads back a value that no kernel computed, and gets 0; if it takes it for a size \
         (nonzero, unique, masks), what follows is a lower bound",
    );
}

fn host(addr: u64) -> *const u8 {
    with_exposed_provenance(addr as usize)
}

fn host_mut(addr: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(addr as usize)
}

fn to_host(addr: u64, bytes: &[u8]) {
    // SAFETY: the program names this memory of its own as the place to write to.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), host_mut(addr), bytes.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_neighbours_and_holes() {
        let mut contents = Contents::default();
        contents.write(100, &[1, 2, 3, 4], 0);
        contents.write(104, &[5, 6], 0);
        assert_eq!(contents.read(100, 6, 0).as_deref(), Some(&[1, 2, 3, 4, 5, 6][..]));
        assert_eq!(contents.read(101, 2, 0).as_deref(), Some(&[2, 3][..]));
        assert_eq!(contents.read(103, 2, 0), None, "two halves of different records");
        contents.write(101, &[9, 9], 0);
        assert_eq!(contents.read(100, 6, 0).as_deref(), Some(&[1, 9, 9, 4, 5, 6][..]));
        contents.forget(102, 1);
        assert_eq!(contents.read(100, 6, 0), None);
        assert_eq!(contents.read(100, 2, 0).as_deref(), Some(&[1, 9][..]));
        assert_eq!(contents.read(100, 0, 0), None);
        assert_eq!(contents.read(99, 2, 0), None);
    }

    #[test]
    fn records_age_by_launches() {
        let mut contents = Contents::default();
        contents.write(0, &[1, 2, 3, 4], 10);
        assert!(contents.read(0, 4, 10 + KEEP).is_some());
        assert!(contents.read(0, 4, 11 + KEEP).is_none());
        assert!(contents.read(1, 2, 10 + KEEP_PART).is_some());
        assert!(contents.read(1, 2, 11 + KEEP_PART).is_none());
        contents.write(4, &[5], 10 + KEEP);
        assert!(contents.read(0, 5, 10 + KEEP).is_some());
        assert!(contents.read(0, 5, 11 + KEEP).is_none(), "one of the two is too old");
    }

    #[test]
    fn memory_is_bounded_and_old_records_make_room() {
        let mut contents = Contents::default();
        let place = |i: usize| (i * LIMIT) as u64;
        let most = MANY_BYTES / LIMIT;
        let bytes = vec![1; LIMIT];
        for i in 0..2 * most {
            contents.write(place(i), &bytes, 1);
        }
        assert_eq!(contents.size, MANY_BYTES);
        assert!(contents.read(place(most - 1), LIMIT, 1).is_some());
        assert!(contents.read(place(most), LIMIT, 1).is_none());
        contents.write(0, &bytes, 2 + KEEP);
        contents.write(place(most), &bytes, 2 + KEEP);
        contents.forget(0, LIMIT as u64);
        assert_eq!((contents.size, contents.records.len()), (LIMIT, 1));
        contents.forget(place(most) + 10, 10);
        assert_eq!((contents.size, contents.records.len()), (LIMIT - 10, 2));
    }

    #[test]
    fn large_writes_are_not_remembered_but_wipe() {
        let mut contents = Contents::default();
        contents.write(64, &[1; 8], 0);
        contents.write(0, &vec![7; LIMIT + 1], 0);
        assert_eq!(contents.read(64, 8, 0), None);
    }

    proptest! {
        /// What is read back is what was last written there; never anything older.
        #[test]
        fn never_stale(steps in prop::collection::vec((0u64..64, 1usize..16, any::<Option<u8>>()), 1..100)) {
            let mut contents = Contents::default();
            let mut model = [None; 80];
            for (addr, len, value) in steps {
                match value {
                    Some(value) => contents.write(addr, &vec![value; len], 0),
                    None => contents.forget(addr, len as u64),
                }
                model[addr as usize..addr as usize + len].fill(value);
                for at in 0..80u64 {
                    for n in 1..8.min(80 - at as usize) {
                        if let Some(bytes) = contents.read(at, n, 0) {
                            let known: Option<Vec<u8>> = model[at as usize..][..n].iter().copied().collect();
                            prop_assert_eq!(Some(bytes), known);
                        }
                    }
                }
                let known = model[addr as usize..][..len].iter().copied().collect::<Option<Vec<u8>>>();
                prop_assert_eq!(contents.read(addr, len, 0), known);
            }
        }
    }
}
