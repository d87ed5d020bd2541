//! What is known of code objects, copied once, at first sight.
//!
//! In the hook is the only moment at which a code object is known to be alive, because a frame
//! holds it. So its names and its raw line table are copied there and then, and a frame becomes an
//! id and a position.
//!
//! Addresses of dead code objects are reused at once (compiling 20,000 small functions reuses most
//! of them). So a record is found by address *and* fingerprint. From 3.12 on a code object has a
//! serial number. It may have run out (0), and each sub-interpreter counts for itself, so some
//! cheap fields go with it. Before 3.12 the fingerprint covers content: the hashes of the names,
//! the line table's length and ends. Two code objects that agree in all of that give the same names
//! and, but for the middle of a long table, the same lines.

use memtrace_format::stacks::{CODE_FIXED, CODE_LIMIT, CODE_MAGIC, HEADER, NO_CODE, RECORD_CUT};

use super::offsets::{BYTES_DATA, Layout, OB_SIZE, STR_HASH};
use super::read;
use super::text::{Text, read_word};
use crate::arena::Arena;
use crate::depot::mix;
use memtrace_os::space::Space;
use memtrace_os::sync::{AtomicU64, Ordering, Real, of_file, zeroed_words};

/// Longest run of taken slots that is searched.
const MAX_PROBES: usize = 64;
/// Longest line table that is kept: that of a function of some ten thousand lines.
const MAX_TABLE: usize = 256 << 10;

const MEMOS: usize = 256;

/// What a thread remembers of the code objects that it met. All zeros is nothing.
///
/// As long as no code object has died ([`super::deaths`]), an object that was checked once needs no
/// second look. Then its fingerprint is checked again, but the table needn't be searched.
#[repr(C)]
pub struct Memo {
    /// How many code objects had died when the walk began; never 0 while one is under way.
    deaths: u64,
    /// Tells the table that the ids are of from others.
    serial: u64,
    entries: [Known; MEMOS],
}

#[derive(Clone, Copy)]
struct Known {
    code: usize,
    mark: u64,
    checked: u64,
    id: u32,
    outermost: usize,
}

impl Memo {
    /// Where the outermost frame that runs a code object was last seen, if anything is known of it.
    #[inline]
    pub fn outermost(&mut self, code: usize) -> Option<&mut usize> {
        let known = &mut self.entries[memo_of(code)];
        (known.code == code).then_some(&mut known.outermost)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        for known in &mut self.entries {
            known.code = 0;
        }
    }

    /// A walk begins, with ids of the table with this serial number, at this count of deaths.
    #[inline]
    pub fn begin(&mut self, serial: u64, deaths: u64) {
        if self.serial != serial {
            self.clear();
            self.serial = serial;
        }
        self.deaths = deaths;
    }
}

#[inline]
fn memo_of(code: usize) -> usize {
    (code >> 4 ^ code >> 12) % MEMOS
}

/// The code objects seen so far.
pub struct CodeTable {
    arena: Arena,
    /// Ids by hash, as many as a power of two. They are in memory of the process's own: no reader
    /// needs them, and where the file has little room that is for what a reader needs.
    slots: &'static [AtomicU64],
}

impl CodeTable {
    /// An empty table in `words`, all of which must be 0. `None` if they are not, or are too few.
    pub fn new(words: &'static [Real], space: Space) -> Option<CodeTable> {
        CodeTable::over(of_file(words), space)
    }

    fn over(words: &'static [AtomicU64], space: Space) -> Option<CodeTable> {
        let words = words.get(..words.len().min(CODE_LIMIT as usize))?;
        let count = 1 << (words.len() / 32).checked_ilog2()?;
        let slots = Some(zeroed_words(count)).filter(|slots| slots.len() == count)?;
        Some(CodeTable { arena: Arena::new(words, CODE_MAGIC, HEADER, space)?, slots })
    }

    /// The region.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The id of a code object, [`NO_CODE`] if it is new and there is no room; and its fingerprint.
    ///
    /// # Safety
    /// `code` is a live code object of an interpreter with this layout, and has been alive since
    /// [`Memo::begin`].
    #[inline(always)]
    pub unsafe fn id(&self, layout: &Layout, code: usize, memo: &mut Memo) -> (u32, u64) {
        let now = memo.deaths;
        let known = &mut memo.entries[memo_of(code)];
        if known.code == code && known.checked == now {
            return (known.id, known.mark);
        }
        // SAFETY: as the caller promises.
        let mark = unsafe { fingerprint(layout, code) };
        if (known.code, known.mark) != (code, mark) {
            // SAFETY: as the caller promises.
            let id = self.find(code, mark, || unsafe { self.copy(layout, code, mark) });
            *known = Known { code, mark, checked: now, id, outermost: usize::MAX };
        }
        known.checked = now;
        (known.id, mark)
    }

    /// The id of the code object with this address and fingerprint; `copy` writes its record.
    fn find(&self, code: usize, mark: u64, copy: impl Fn() -> u32) -> u32 {
        let tag = mark >> 32 << 32;
        let last = self.slots.len() - 1;
        let mut slot = (mark as usize ^ code >> 4) & last;
        let mut made = 0;
        for _ in 0..MAX_PROBES {
            let Some(cell) = self.slots.get(slot) else { break };
            let mut seen = cell.load(Ordering::Acquire);
            if seen == 0 {
                if made == 0 {
                    made = match copy() {
                        NO_CODE => return NO_CODE,
                        id => id,
                    };
                }
                let entry = tag | u64::from(made);
                match cell.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return made,
                    Err(other) => seen = other,
                }
            }
            if u32::try_from(seen ^ tag).is_ok()
                && let Some([_, address, print]) = self.arena.record(seen as u32)
                && address.load(Ordering::Relaxed) == code as u64
                && print.load(Ordering::Relaxed) == mark
            {
                return seen as u32;
            }
            slot = (slot + 1) & last;
        }
        NO_CODE
    }

    /// Writes the record of a code object.
    ///
    /// # Safety
    /// As for [`CodeTable::id`].
    #[cold]
    unsafe fn copy(&self, layout: &Layout, code: usize, mark: u64) -> u32 {
        // SAFETY: fields of a live code object, and the strings and bytes that it owns.
        unsafe {
            let text = |offset: usize| Text::at(layout, read(code + offset));
            let empty = Text::at(layout, 0);
            let texts =
                [text(layout.name), layout.qualname.map_or(empty, text), text(layout.filename)];
            let table: usize = read(code + layout.lines);
            let length = if table == 0 { 0 } else { read::<usize>(table + OB_SIZE) };
            let (length, cut) = if length > MAX_TABLE { (0, RECORD_CUT) } else { (length, 0) };
            let [name, qualname, filename] = texts.map(Text::utf8_len);
            let Some(mut record) =
                self.arena.reserve(CODE_FIXED, name + qualname + filename + length)
            else {
                return NO_CODE;
            };
            record.set(1, code as u64);
            record.set(2, mark);
            record.set(3, u64::from(read::<u32>(code + layout.first_line)));
            record.set(4, name as u64 | (qualname as u64) << 32);
            record.set(5, filename as u64 | (length as u64) << 32);
            let mut buffer = [0; 4];
            for c in texts.into_iter().flat_map(Text::chars) {
                record.bytes(c.encode_utf8(&mut buffer).as_bytes());
            }
            for i in 0..length {
                record.byte(read(table + BYTES_DATA + i));
            }
            record.finish(u64::from(layout.minor) << 32 | cut) as u32
        }
    }
}

/// A number that changes when another code object takes the address of a dead one.
///
/// # Safety
/// `code` is a live code object of an interpreter with this layout.
#[inline(always)]
pub(super) unsafe fn fingerprint(layout: &Layout, code: usize) -> u64 {
    // SAFETY: fields of a live code object, and the strings and bytes that it owns.
    unsafe {
        let field = |offset: usize| read::<u64>(code + offset);
        let (filename, name, table) =
            (field(layout.filename), field(layout.name), field(layout.lines));
        let first_line = u64::from(read::<u32>(code + layout.first_line));
        let version = layout.version.map_or(0, |at| read::<u32>(code + at));
        let pointers = filename ^ name.rotate_left(21) ^ table.rotate_left(42);
        let cheap = mix(pointers, first_line << 32 | u64::from(version));
        if version != 0 {
            return cheap;
        }
        let names =
            content(layout, name as usize) ^ content(layout, filename as usize).rotate_left(1);
        if table == 0 {
            return cheap ^ names;
        }
        let (length, data) = (read::<usize>(table as usize + OB_SIZE), table as usize + BYTES_DATA);
        let lines = if length >= 16 {
            let end = data + length;
            read_word(data).rotate_left(7)
                ^ read_word(data + 8).rotate_left(19)
                ^ read_word(end - 16).rotate_left(31)
                ^ read_word(end - 8)
        } else {
            (0..length).fold(0, |h, i| h << 8 ^ h >> 56 ^ u64::from(read::<u8>(data + i)))
        };
        cheap ^ mix(names ^ length as u64, lines)
    }
}

/// A number for the content of a string.
///
/// # Safety
/// `text` is 0 or a live string object.
#[inline(always)]
unsafe fn content(layout: &Layout, text: usize) -> u64 {
    if text == 0 {
        return 0;
    }
    // SAFETY: fields of a live string.
    let hash = unsafe { read::<u64>(text + STR_HASH) };
    if hash != u64::MAX {
        return hash;
    }
    // Not hashed yet. When it is, the code object gets a second record; nothing else happens.
    // SAFETY: as above.
    unsafe { Text::at(layout, text) }.glimpse()
}

#[cfg(all(test, loom))]
mod tests {
    /// Seen red: with `Relaxed` where an id is shown or found.
    mod model {
        use super::super::*;
        use loom::sync::Arc;
        use loom::thread;

        /// Two threads see one code object, and one of them another one that meets it in the table.
        #[test]
        fn a_code_object_has_one_id_whoever_sees_it_first() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(2);
            builder.check(|| {
                let words = zeroed_words(HEADER + 72);
                let table = Arc::new(CodeTable::over(words, Space::MEMORY).expect("large enough"));
                let id = |table: &CodeTable, code: usize| {
                    let copy = || {
                        let record = table.arena.reserve(CODE_FIXED, 0).expect("room");
                        record.set(1, code as u64);
                        record.set(2, 3 << 32);
                        record.finish(0) as u32
                    };
                    let id = table.find(code, 3 << 32, copy);
                    let [head, address, _] = table.arena.record(id).expect("a record");
                    assert_eq!(address.load(Ordering::Relaxed), code as u64);
                    assert_ne!(head.load(Ordering::Relaxed), 0);
                    id
                };
                let other = table.clone();
                let other = thread::spawn(move || [16, 24].map(|code| id(&other, code)));
                let here = id(&table, 16);
                let [there, own] = other.join().unwrap();
                assert_eq!((here, [16, 24].map(|code| id(&table, code))), (there, [there, own]));
                assert_ne!(there, own);
            });
        }
    }
}
