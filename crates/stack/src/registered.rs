//! Unwind tables that the program registered: which, and where they lie.
//!
//! Compilers in the process tell the C runtime of tables for what they generate (`__register_frame`
//! and its like, documented functions of libgcc). A tracer can't ask for its list of them, because
//! the search takes a lock. Until GCC 13 it also reads, sorts and believes every table that it
//! hasn't seen yet, whichever address it was asked about, with memory from `malloc`. A handler that
//! interrupted whoever holds that lock would wait for ever, and a table that went with its code is
//! a fault.
//!
//! So each of these functions first notes the pointer here and then *jumps* to the real one, which
//! sees its true caller. What the tables say is read as carefully as any other ([`super::tables`]),
//! and only when their code is met on a stack.
//!
//! Not seen: what a library registers with a libgcc that is linked into it statically, or that it
//! is bound to past us. Nothing leads out of such a frame.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memtrace_libraries::next;
use memtrace_os::address::Address;
use memtrace_os::sync::Word;

/// Tables that are noted at a time. Of more nobody knows.
const MOST: usize = 1 << 13;
/// How far the list was ever in use: it only grows, and each place says
/// itself whether anything is there.
static USED: AtomicUsize = AtomicUsize::new(0);
static LIST: [Place; MOST] = [const { Place::free() }; MOST];

/// A place in the list. The first three words are an address in the high 48 bits and, in the low
/// 16, how often the place was taken. So what was worked out for tables that are gone is not taken
/// for what the next ones have.
struct Place<W = AtomicU64> {
    /// Where the tables begin; or [`FREE`], or [`TAKEN`] while the place is filled in.
    tables: W,
    /// The code that they are about.
    from: W,
    to: W,
    /// What some encodings are relative to.
    text: W,
    data: W,
    is_list: W,
}

const FREE: u64 = 0;
const TAKEN: u64 = 1;
const COUNTED: u64 = (1 << 16) - 1;

/// Registered tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Where they begin.
    pub at: u64,
    /// It is a list of where they begin, which ends in null.
    pub is_list: bool,
    /// What some encodings are relative to.
    pub text: u64,
    /// The same, for data.
    pub data: u64,
}

impl Place {
    const fn free() -> Place {
        Place {
            tables: AtomicU64::new(FREE),
            from: AtomicU64::new(0),
            to: AtomicU64::new(0),
            text: AtomicU64::new(0),
            data: AtomicU64::new(0),
            is_list: AtomicU64::new(0),
        }
    }
}

impl<W: Word<Value = u64>> Place<W> {
    /// Puts tables here, if nobody does so at the same time.
    fn take(&self, before: u64, tables: &Registered) -> bool {
        let count = ((before + 1) & COUNTED).max(1);
        let taken = TAKEN << 16 | count;
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        if self.tables.compare_exchange(before, taken, order.0, order.1).is_err() {
            return false;
        }
        // Who reads one of these sees that the place was taken.
        self.text.store(tables.text, Ordering::Release);
        self.data.store(tables.data, Ordering::Release);
        self.is_list.store(u64::from(tables.is_list), Ordering::Release);
        self.tables.store(tables.at << 16 | count, Ordering::Release);
        true
    }

    /// The tables, and the word that stands for them.
    fn get(&self) -> Option<(u64, Registered)> {
        let word = self.tables.load(Ordering::Acquire);
        let at = word >> 16;
        if at == FREE || at == TAKEN {
            return None;
        }
        let is_list = self.is_list.load(Ordering::Acquire) != 0;
        let text = self.text.load(Ordering::Acquire);
        let data = self.data.load(Ordering::Acquire);
        // Others may have come in their place meanwhile.
        let is_whole = self.tables.load(Ordering::Relaxed) == word;
        is_whole.then_some((word, Registered { at, is_list, text, data }))
    }

    /// These tables are gone, if they were here.
    fn end(&self, at: u64) {
        let word = self.tables.load(Ordering::Relaxed);
        if at > TAKEN && word >> 16 == at {
            let free = FREE << 16 | word & COUNTED;
            let _ = self.tables.compare_exchange(word, free, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Which code the tables that this word stands for are about, if that was worked out.
    fn code(&self, word: u64) -> Option<(u64, u64)> {
        let (from, to) = (self.from.load(Ordering::Relaxed), self.to.load(Ordering::Relaxed));
        let count = word & COUNTED;
        ((from & COUNTED, to & COUNTED) == (count, count)).then_some((from >> 16, to >> 16))
    }
}

/// Shows the tables that may be about this address, until there is an answer. `range` works out
/// which code some are about (from the first address to the one after the last), once for each.
/// `spend` is asked whether so many may be looked at.
pub fn each<T>(
    address: u64,
    spend: impl Fn(u32) -> Option<()>,
    range: impl Fn(&Registered) -> Option<(u64, u64)>,
    mut visit: impl FnMut(&Registered) -> Option<T>,
) -> Option<T> {
    let used = USED.load(Ordering::Acquire);
    spend(used as u32)?;
    LIST[..used].iter().find_map(|place| {
        let (word, tables) = place.get()?;
        let code = place.code(word);
        let (from, to) = if let Some(known) = code {
            known
        } else {
            let (from, to) = range(&tables)?;
            place.from.store(from << 16 | word & COUNTED, Ordering::Relaxed);
            place.to.store(to << 16 | word & COUNTED, Ordering::Relaxed);
            (from, to)
        };
        (from..to).contains(&address).then(|| visit(&tables))?
    })
}

/// Notes tables. One of these functions may call another: what is noted already is looked at anew.
fn add(tables: &Registered) {
    if tables.at <= TAKEN || tables.at >> 48 != 0 {
        return;
    }
    let has = |place: &&Place, at| place.tables.load(Ordering::Relaxed) >> 16 == at;
    let used = USED.load(Ordering::Acquire);
    let known = LIST[..used].iter().find(|place| has(place, tables.at));
    let free = LIST.iter().filter(|place| has(place, FREE));
    let taken = known.into_iter().chain(free).find(|place| {
        let before = place.tables.load(Ordering::Relaxed);
        [FREE, tables.at].contains(&(before >> 16)) && place.take(before, tables)
    });
    if let Some(place) = taken {
        let i = (&raw const *place as usize - LIST.as_ptr() as usize) / size_of::<Place>();
        USED.fetch_max(i + 1, Ordering::AcqRel);
    }
}

/// Forgets them.
fn remove(at: u64) {
    LIST[..USED.load(Ordering::Acquire)].iter().for_each(|place| place.end(at));
}

/// Each function: its name, and what is noted of its arguments.
macro_rules! registry {
    ($( $name:ident, $note:ident($at:ident, $text:ident, $data:ident) => $what:expr; )*) => {
        $(
            /// The function of libgcc that has this name: noted, and passed on.
            ///
            /// # Safety
            /// As libgcc has it.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8",
                    "call {note}",
                    "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "jmp rax",
                    note = sym $note,
                )
            }

            /// Notes it, and says where the real function is.
            extern "C" fn $note($at: u64, _object: u64, $text: u64, $data: u64) -> *mut c_void {
                static NEXT: Address = Address::new();
                $what;
                next(&NEXT, concat!(stringify!($name), "\0"))
            }
        )*

        /// Looks for the real functions while it may be done.
        pub fn loading() {
            $( $note(0, 0, 0, 0); )*
        }
    };
}

registry! {
    __register_frame, note_frame(at, _text, _data) => note(at, false, 0, 0);
    __register_frame_info, note_info(at, _text, _data) => note(at, false, 0, 0);
    __register_frame_info_bases, note_bases(at, text, data) => note(at, false, text, data);
    __register_frame_table, note_table(at, _text, _data) => note(at, true, 0, 0);
    __register_frame_info_table, note_info_table(at, _text, _data) => note(at, true, 0, 0);
    __register_frame_info_table_bases, note_table_bases(at, text, data) => note(at, true, text, data);
    __deregister_frame, note_end(at, _text, _data) => remove(at);
    __deregister_frame_info, note_info_end(at, _text, _data) => remove(at);
    __deregister_frame_info_bases, note_bases_end(at, _text, _data) => remove(at);
}

fn note(at: u64, is_list: bool, text: u64, data: u64) {
    add(&Registered { at, is_list, text, data });
}

fn next(place: &Address, name: &str) -> *mut c_void {
    /// Where nobody has the function nobody can have been bound to it but by us.
    extern "C" fn nothing() -> usize {
        0
    }
    let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default();
    let found = next::behind(place, name);
    if found.is_null() { nothing as *mut c_void } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: without the second look at the place, and where what is relative to is written
    /// `Relaxed`.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicU64 as Modelled;
        use loom::thread;

        #[test]
        fn tables_are_read_with_what_they_were_registered_with() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let [tables, from, to, text, data, is_list] = [0; 6].map(Modelled::new);
                let place = Arc::new(Place { tables, from, to, text, data, is_list });
                let table = |at: u64| Registered { at, is_list: at == 8, text: at, data: at };
                assert!(place.take(0, &table(7)));
                let changes = place.clone();
                let changes = thread::spawn(move || {
                    changes.end(7);
                    let free = changes.tables.load(Ordering::Relaxed);
                    assert!(changes.take(free, &table(8)));
                });
                if let Some((_, found)) = place.get() {
                    assert_eq!(found, table(found.at));
                }
                changes.join().unwrap();
                assert_eq!(place.get().map(|(_, found)| found), Some(table(8)));
            });
        }
    }

    /// Asks about an address; says of which tables, and how often their range was worked out.
    fn ask(address: u64, range: (u64, u64)) -> (Option<u64>, u32) {
        let asked = std::cell::Cell::new(0);
        let found = each(
            address,
            |_| Some(()),
            |tables| {
                // Other tests' tables are about other code.
                asked.set(asked.get() + u32::from(tables.at >> 32 == 0x1234));
                (tables.at >> 32 == 0x1234).then_some(range)
            },
            |tables| Some(tables.at),
        );
        (found, asked.get())
    }

    #[test]
    fn what_was_worked_out_for_tables_ends_with_them() {
        const A: u64 = 0x1234_0000_1000;
        const B: u64 = 0x1234_0000_2000;
        note(A, false, 0, 0);
        assert_eq!(ask(0x77_0010, (0x77_0000, 0x77_0020)), (Some(A), 1));
        assert_eq!(ask(0x77_0010, (0, 0)), (Some(A), 0), "once");
        assert_eq!(ask(0x77_0020, (0, 0)), (None, 0));
        remove(A);
        assert_eq!(ask(0x77_0010, (0, 0)), (None, 0));
        // The same place, other tables.
        note(B, false, 0, 0);
        assert_eq!(ask(0x77_0010, (0x77_0100, 0x77_0200)), (None, 1));
        assert_eq!(ask(0x77_0100, (0, 0)), (Some(B), 0));
        // Noted again: they may have changed.
        note(B, false, 0, 0);
        assert_eq!(ask(0x77_0100, (0x77_0100, 0x77_0200)), (Some(B), 1));
        assert_eq!(ask(0x77_0100, (0, 0)), (Some(B), 0), "it is in the list once");
        remove(B);
        remove(B);
        assert_eq!(ask(0x77_0100, (0, 0)), (None, 0));
    }
}
