//! The stack of the calling thread, native and Python: taken in a hook, named later.
//!
//! # The problem
//!
//! A tracer sits inside somebody else's process and wants to know, thousands of times a second, who
//! has asked for memory. It is asked on any thread and in any state: under locks of PyTorch's, with
//! the GIL or without, while the interpreter shuts down. It is asked in signal handlers, in forked
//! children, and on fibers with a few hundred bytes of stack left. What debuggers and crash
//! reporters use is made for another place. The system's unwinder takes locks, allocates, and
//! believes what a table says. Asking Python needs the GIL. And all of them begin from nothing each
//! time, although most stacks of a thread are like its last one.
//!
//! # What this crate does
//!
//! [`Stacks::capture`] takes the calling thread's stack and returns a number. It writes down what
//! is cheap and certain, a word for each frame, and leaves names to whoever wants to read them:
//!
//! * Python frames are read from the interpreter's memory ([`python`]);
//! * native frames are unwound by rules that are worked out once for each return address
//!   ([`native`], [`rules`]);
//! * both are put together, and interned in a trie ([`depot`]) whose node is the stack's id;
//! * whoever has the three regions of [`Stacks::words`] can turn an id into frames, in this process
//!   or from a file that a dead one left. `memtrace_format::stacks` says what the words mean,
//!   `memtrace_symbols` finds names, files and lines.
//!
//! # What it must never do
//!
//! * *Take a lock, wait, or allocate* once a thread has taken its first stack. Nothing of Python's
//!   is called but "which thread state is mine" and "are you shutting down".
//! * *Fault.* A pointer is followed if it is proven. It leads to the part of the thread's own stack
//!   that is in use, or to an object that a frame keeps alive. Everything else (other stacks,
//!   unwind tables, code) is read through the kernel, which can't fault.
//! * *Guess.* Where a rule, a table or a version of Python is not known, the stack ends there, with
//!   the [reason](memtrace_format::stacks::Reason). A CPython without a layout of its own has
//!   native frames only.
//! * *Change what the program sees.* `errno` stays as it is, and signals and the GIL are left
//!   alone. Where the program's own stack has no room the work is done on one of ours ([`room`]).
//!
//! The caller, too, has duties. It calls [`memtrace_libraries::loading`] first, and
//! [`rules::forget_others`] in a forked child. It never begins a capture inside another one on the
//! same thread. It has [`closing`] around everything that unloads libraries.
//!
//! # How
//!
//! ```
//! use memtrace_symbols::{Namer, Splice};
//! use memtrace_stack::{Mine, Mode, Regions, Site, Stacks};
//!
//! thread_local!(static MINE: Mine = const { Mine::new() });
//!
//! fn show() -> Option<()> {
//!     memtrace_libraries::loading(); // once, before anything else
//!     let stacks = Stacks::new(Regions::anonymous()?)?;
//!     let id = MINE.with(|mine| stacks.capture(Mode::All, Site::Alloc, mine));
//!
//!     // Later, and elsewhere.
//!     let [depot, codes, modules] = stacks.words();
//!     let frames = Namer::new(depot, codes, modules, Splice::Evaluation).frames(id);
//!     for frame in &frames {
//!         println!("{} in {}", frame.name, frame.filename);
//!     }
//!     frames.iter().any(|frame| frame.name.contains("show")).then_some(())
//! }
//! # show().expect("a stack with this function");
//! ```
//!
//! `cargo run -p memtrace-stack --example stack` prints a stack, `cargo bench -p memtrace-stack`
//! says what one costs.
//!
//! Frames at the inner end that lie in the library that this crate is part of are left out. Where
//! it is part of the program itself, as there, nothing is.
//!
//! # The facts it rests on
//!
//! **A chain of frames stands still.** While a thread is in a hook, only it could change its own
//! frames. So they are read as they lie, with the GIL or without.
//!
//! **Where a Python frame belongs.** The interpreter's main loop keeps a record in its own native
//! frame. Since 3.12 that is a shim that ends each evaluation's Python frames, in 3.11 an entry of
//! a chain. Its address says which native frame runs which Python frames, whatever the function is
//! called and however the compiler has cut it up. Before 3.11 each main loop runs one Python frame,
//! and is known by the address of its code.
//!
//! **Most stacks are like the thread's last one.** A thread remembers its last one. Native and
//! Python frames that are certainly the same are not walked again: all that a walk would read is
//! compared ([`native`], [`python::walk`]). Only what differs from the last stack, counted from the
//! outermost frame, is put together and interned (`splice`).
//!
//! **A code object dies in one place** ([`python`]), **a library is unloaded in one**
//! ([`closing`]), and generated code registers its tables with libgcc ([`registered`]). So we are
//! at these places, and know when what is remembered is over. A program that this crate is linked
//! into exports the functions of libgcc that register tables, and hands each call on.
//!
//! **Deep stacks** keep both ends. **Empty or cut stacks** end in the reason.
//!
//! # A new CPython
//!
//! Its number goes into [`memtrace_format::stacks::PYTHONS`], which then wants a layout: an entry
//! of [`python::offsets::LAYOUTS`], with the numbers of its headers. The walk names each entry:
//! `python/walk.rs` doesn't compile otherwise. `tests/python_walk` compares what is read with the
//! interpreter itself.

#![cfg_attr(not(test), warn(clippy::disallowed_types))]
#![allow(
    clippy::inline_always,
    reason = "a walk is compiled for each version, and its parts must be part of it"
)]

pub mod arena;
pub mod bytes;
pub mod deep;
pub mod depot;
mod epoch;
mod left;
pub mod line;
mod list;
pub mod modules;
pub mod native;
mod outside;
pub mod python;
pub mod registered;
pub mod registers;
pub mod room;
pub mod rules;
mod scratch;
mod splice;
pub mod tables;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::stacks::{NO_STACK, RawFrame, Reason, StackId};

use self::depot::Depot;
use self::modules::ModuleTable;
pub use self::outside::{each_frame, first_outside};
use self::python::code::CodeTable;
use self::python::offsets::{found, runtime};
use self::registers::{Registers, registers};
use self::room::Room;
use self::scratch::Scratch;
pub use self::scratch::{Mine, Site, aside, on_a_large_one};
pub use self::splice::Mode;
use self::splice::{Source, splice};
use memtrace_os::space::Space;
use memtrace_os::sync::of_file;

/// The memory that stacks are kept in: words that are 0 and live for ever, of a file or not.
#[derive(Clone, Copy)]
pub struct Regions {
    /// The trie; about 2.5 words a slot of its hash table.
    pub depot: &'static [AtomicU64],
    /// Python code objects; about 50 words each.
    pub codes: &'static [AtomicU64],
    /// Libraries; about 20 words each.
    pub modules: &'static [AtomicU64],
    /// What room for more of them is taken from.
    pub space: Space,
}

impl Regions {
    /// Words of regions that are ample for a training job: 786,431 nodes, some 40,000 code objects,
    /// 6,000 libraries. Memory is used as they fill.
    pub const WORDS: [usize; 3] = [(5 << 19) + 8, 1 << 21, 1 << 17];

    /// Regions of the usual size in memory of their own; `None` if there is no address space.
    pub fn anonymous() -> Option<Regions> {
        let [depot, codes, modules] = Regions::WORDS.map(anonymous);
        Some(Regions { depot: depot?, codes: codes?, modules: modules?, space: Space::MEMORY })
    }
}

fn anonymous(words: usize) -> Option<&'static [AtomicU64]> {
    // SAFETY: a fresh private mapping that is never unmapped.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            words * 8,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is zeroed, page-aligned and this long; zeros are valid atomics.
    Some(unsafe { std::slice::from_raw_parts(at.cast(), words) })
}

/// All stacks of a recorder.
#[repr(C)]
pub struct Stacks {
    /// Tells the stacks of this recorder from those of an earlier one (a parent's, after a fork).
    serial: u64,
    depot: Depot,
    codes: CodeTable,
    modules: ModuleTable,
}

impl Stacks {
    /// Stacks in these regions. `None` if one of them is too small or has been used.
    pub fn new(regions: Regions) -> Option<Stacks> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let stacks = Stacks {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            depot: Depot::new(of_file(regions.depot), regions.space)?,
            codes: CodeTable::new(regions.codes, regions.space)?,
            modules: ModuleTable::new(regions.modules, regions.space)?,
        };
        stacks.modules.refresh();
        Some(stacks)
    }

    /// Takes the stack of the calling thread, whose variable `mine` is.
    #[inline]
    pub fn capture(&self, mode: Mode, site: Site, mine: &Mine) -> StackId {
        match mode {
            Mode::None => NO_STACK,
            Mode::Python => self.capture_with::<false>(site, mine),
            Mode::All => self.capture_with::<true>(site, mine),
        }
    }

    /// The same, with native frames or without.
    #[inline(never)]
    fn capture_with<const NATIVE: bool>(&self, site: Site, mine: &Mine) -> StackId {
        let here = if NATIVE { registers() } else { Registers::default() };
        let mode = if NATIVE { Mode::All } else { Mode::Python };
        let stack = mine.with(site, |scratch, room| match self.again(mode, here, scratch) {
            Some(id) => id,
            None => self.take(mode, here, scratch, room),
        });
        stack.unwrap_or_else(|| self.missing(Reason::NoMemory))
    }

    /// The last stack, if this is certainly the same. Apart from the walks, and short: what a
    /// program does between two stacks drives all code of ours out of the processor's nearest
    /// memory.
    #[inline(always)]
    fn again(&self, mode: Mode, here: Registers, scratch: &Scratch) -> Option<StackId> {
        let id = scratch.last.whole(self.serial, mode)?;
        let all = mode == Mode::All;
        let python = python::walk::is_unchanged(found()?, self.serial, &scratch.python, all);
        (python && (!all || scratch.native.is_unchanged(here))).then_some(id)
    }

    /// Takes the stack of a call that returns to `caller`. Whatever is wanted of stacks and
    /// whatever became of the walk, that address is in it: whose memory something is follows from
    /// it.
    pub fn capture_call(&self, mode: Mode, site: Site, mine: &Mine, caller: u64) -> StackId {
        let stack = self.capture(mode, site, mine);
        let innermost = self.depot.frame(stack).and_then(RawFrame::unpack);
        if matches!(innermost, Some(RawFrame::Native { .. })) {
            return stack;
        }
        let frame = RawFrame::Native { pc: caller, epoch: epoch::epoch() };
        self.depot.intern(stack, frame.pack())
    }

    /// The stack that says why there is none.
    pub fn missing(&self, reason: Reason) -> StackId {
        self.depot.intern(NO_STACK, RawFrame::Missing(reason).pack())
    }

    #[inline(never)]
    fn take(&self, mode: Mode, here: Registers, scratch: &mut Scratch, room: &Room) -> StackId {
        let Scratch { last, python, native, found, memo, words } = scratch;
        let runtime = runtime();
        let no_python = match runtime {
            Ok(runtime) => python::walk::walk(
                runtime,
                &self.codes,
                self.serial,
                memo,
                python,
                mode == Mode::All,
            ),
            Err(why) => {
                python.clear();
                Some(why)
            }
        };
        let cut = if mode == Mode::All { native::walk(room, here, native, found) } else { None };
        let source = Source {
            depot: &self.depot,
            serial: self.serial,
            runtime: runtime.ok(),
            mode,
            reasons: [no_python, cut],
        };
        splice(&source, python, native, last, words)
    }

    /// What a reader needs to turn ids into frames: the regions of stacks, code objects and
    /// libraries. Brings the list of libraries up to date: not for hooks.
    pub fn words(&self) -> [&'static [AtomicU64]; 3] {
        self.refresh();
        [self.depot.words(), self.codes.arena().words(), self.modules.arena().words()]
    }

    /// Brings the list of libraries up to date. Takes a lock and allocates: for the background
    /// thread, now and then. Costs 0.1 µs if nothing was loaded or unloaded.
    pub fn refresh(&self) {
        self.modules.refresh();
    }

    /// How full the regions are, and what found no room.
    pub fn status(&self) -> Status {
        let codes = self.codes.arena();
        Status {
            nodes: self.depot.usage(),
            code_words: codes.usage(),
            module_words: self.modules.arena().usage(),
            refused: self.depot.refused() + codes.refused() + self.modules.arena().refused(),
            python: runtime().map(|r| r.version),
        }
    }
}

/// State of the stacks, for reports.
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// Nodes of the trie in use, and how many there can be.
    pub nodes: (u64, u64),
    /// Words for code objects in use, and how many there are.
    pub code_words: (u64, u64),
    /// Words for libraries in use, and how many there are.
    pub module_words: (u64, u64),
    /// Stacks, code objects and libraries that found no room.
    pub refused: u64,
    /// The interpreter's version as in `PY_VERSION_HEX`, or why its frames can't be read.
    pub python: Result<u32, Reason>,
}

/// Runs `close`, which may unload libraries, so that nothing that was learnt from them is used
/// afterwards. This is what an interposed `dlclose` calls.
pub fn closing<T>(stacks: Option<&Stacks>, close: impl FnOnce() -> T) -> T {
    // What it loaded may be on recorded stacks, and not be listed yet.
    if let Some(stacks) = stacks {
        stacks.refresh();
    }
    rules::while_unloading(|| {
        let result = close();
        match stacks {
            Some(stacks) => stacks.refresh(),
            None => rules::forget(),
        }
        result
    })
}
