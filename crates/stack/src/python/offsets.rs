//! Where CPython keeps what a stack walk reads, by version, and the check that this interpreter is
//! like that.
//!
//! The structures are CPython's internal ones; within a minor version they don't change after its
//! first release. Every number below was checked by running its version (`tests/python_walk`).
//!
//! A build that differs (trace-refs, free-threaded, somebody's patch) must not be walked. So before
//! the first walk the sizes of two exported types are compared, which change with nearly every
//! field. From 3.13 on the interpreter itself publishes offsets at the start of `_PyRuntime`, and
//! these are compared, too. Anything unknown means: no Python frames, and a [`Reason`] that says
//! which check failed.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_format::stacks::{PYTHONS, Reason};

use super::read;
use crate::line::LINE;
use memtrace_libraries::scopes;

/// How a frame says where it is in its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// An `int`: offset in bytes; negative before the first instruction.
    Bytes,
    /// An `int`: offset in two-byte units; negative before the first instruction.
    Units,
    /// A pointer to the instruction.
    Pointer,
}

/// How evaluations (calls of the interpreter's main loop) are
/// distinguished along the chain of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evaluation {
    /// Each frame is an evaluation of its own.
    EachFrame,
    /// A byte in the frame marks the outermost of an evaluation. A chain of records on the C stack
    /// (offsets: current frame, previous record) has one for each.
    Marked {
        /// Offset of the mark.
        mark: usize,
        /// Offset, in a record, of the pointer to the next outer one.
        next: usize,
    },
    /// A frame that is not Python's, on the C stack, ends each evaluation.
    Shim,
}

/// Offsets in bytes, for one minor version.
#[derive(Debug)]
pub struct Layout {
    /// Minor version.
    pub minor: u8,
    /// `PyCode_Type.tp_basicsize`.
    pub code_size: usize,
    /// `PyFrame_Type.tp_basicsize`.
    pub frame_size: usize,
    /// Thread state: the current frame, or the record that has it.
    pub thread: usize,
    /// That record's pointer to the current frame.
    pub record: Option<usize>,
    /// Frame: the caller's.
    pub previous: usize,
    /// Frame: the code object.
    pub code: usize,
    /// Frame: where it is.
    pub at: usize,
    /// What that is.
    pub position: Position,
    /// Frame: whose it is, a byte.
    pub owner: Option<usize>,
    /// How evaluations are distinguished.
    pub evaluation: Evaluation,
    /// Code: first line, an `int`.
    pub first_line: usize,
    /// Code: file name.
    pub filename: usize,
    /// Code: name.
    pub name: usize,
    /// Code: qualified name.
    pub qualname: Option<usize>,
    /// Code: line table.
    pub lines: usize,
    /// Code: serial number, 32 bits.
    pub version: Option<usize>,
    /// Code: index of the first instruction of the function proper, an `int`.
    pub first_traceable: Option<usize>,
    /// Code: the instructions.
    pub instructions: usize,
    /// Characters of an ASCII string.
    pub ascii: usize,
    /// Characters of any other compact string.
    pub compact: usize,
    /// Interpreter: an `int` that is 1 from the moment when Python begins to end, before `atexit`
    /// handlers. Since 3.12, where the main interpreter is static memory, which may be read at any
    /// time.
    pub ending: Option<usize>,
}

impl Layout {
    /// A position is a pointer, which lies in the frame's own code, where no other code can be.
    #[inline(always)]
    pub const fn position_tells_code(&self) -> bool {
        matches!(self.position, Position::Pointer)
    }
}

/// The frame's position as it is in memory.
///
/// # Safety
/// `frame` is a live frame of an interpreter with this layout.
#[inline(always)]
pub(super) unsafe fn raw_position(layout: &Layout, frame: usize) -> u64 {
    // SAFETY: as the caller promises.
    unsafe {
        match layout.position {
            Position::Bytes | Position::Units => i64::from(read::<i32>(frame + layout.at)) as u64,
            Position::Pointer => read(frame + layout.at),
        }
    }
}

/// What a position means.
pub(super) struct At {
    /// The index of the code unit, negative before the first.
    pub unit: i64,
    /// The frame has begun. If not, its arguments are still being put in place, and Python's own
    /// tracebacks leave it out unless it is a generator's.
    pub begun: bool,
}

/// # Safety
/// `code` is a live code object of an interpreter with this layout.
#[inline(always)]
pub(super) unsafe fn position(layout: &Layout, at: u64, code: usize) -> At {
    match layout.position {
        // An arithmetic shift: what is negative stays so.
        Position::Bytes => At { unit: at as i64 >> 1, begun: true },
        Position::Units => At { unit: at as i64, begun: true },
        Position::Pointer => {
            let first = (code + layout.instructions) as u64;
            // SAFETY: a field of a live code object.
            let begun = layout.first_traceable.map_or(0, |f| unsafe { read::<u32>(code + f) });
            At {
                unit: (at as i64).wrapping_sub(first as i64) >> 1,
                begun: at >= first + 2 * u64::from(begun),
            }
        }
    }
}

/// Frames with this owner belong to a generator.
pub const OWNER_GENERATOR: u8 = 1;
/// Frames with this owner or a higher one are not Python's.
pub const OWNER_SHIM: u8 = 3;

/// Object header: the type.
pub const OB_TYPE: usize = 8;
/// Header of objects of variable size: how many items.
pub const OB_SIZE: usize = 16;
/// String: length in characters, hash, state bits.
pub const STR_LENGTH: usize = 16;
/// See [`STR_LENGTH`].
pub const STR_HASH: usize = 24;
/// See [`STR_LENGTH`].
pub const STR_STATE: usize = 32;
/// Bytes object: the bytes.
pub const BYTES_DATA: usize = 32;
const TP_BASICSIZE: usize = 32;

/// The versions that can be walked, of [`PYTHONS`] each. A constant, so that a walk can be compiled
/// for each.
pub const LAYOUTS: [Layout; (*PYTHONS.end() - *PYTHONS.start() + 1) as usize] = [
    Layout {
        minor: 9,
        code_size: 176,
        frame_size: 368,
        thread: 24,
        record: None,
        previous: 24,
        code: 32,
        at: 104,
        position: Position::Bytes,
        owner: None,
        evaluation: Evaluation::EachFrame,
        first_line: 40,
        filename: 104,
        name: 112,
        qualname: None,
        lines: 120,
        version: None,
        first_traceable: None,
        instructions: 0,
        ascii: 48,
        compact: 72,
        ending: None,
    },
    Layout {
        minor: 10,
        code_size: 176,
        frame_size: 360,
        thread: 24,
        record: None,
        previous: 24,
        code: 32,
        at: 96,
        position: Position::Units,
        owner: None,
        evaluation: Evaluation::EachFrame,
        first_line: 40,
        filename: 104,
        name: 112,
        qualname: None,
        lines: 120,
        version: None,
        first_traceable: None,
        instructions: 0,
        ascii: 48,
        compact: 72,
        ending: None,
    },
    Layout {
        minor: 11,
        code_size: 184,
        frame_size: 120,
        thread: 56,
        record: Some(8),
        previous: 48,
        code: 32,
        at: 56,
        position: Position::Pointer,
        owner: Some(69),
        evaluation: Evaluation::Marked { mark: 68, next: 16 },
        first_line: 72,
        filename: 112,
        name: 120,
        qualname: Some(128),
        lines: 136,
        version: None,
        first_traceable: Some(168),
        instructions: 184,
        ascii: 48,
        compact: 72,
        ending: None,
    },
    Layout {
        minor: 12,
        code_size: 192,
        frame_size: 120,
        thread: 56,
        record: Some(0),
        previous: 8,
        code: 0,
        at: 56,
        position: Position::Pointer,
        owner: Some(70),
        evaluation: Evaluation::Shim,
        first_line: 68,
        filename: 112,
        name: 120,
        qualname: Some(128),
        lines: 136,
        version: Some(92),
        first_traceable: Some(176),
        instructions: 192,
        ascii: 40,
        compact: 56,
        ending: Some(44),
    },
    Layout {
        minor: 13,
        code_size: 200,
        frame_size: 136,
        thread: 72,
        record: None,
        previous: 8,
        code: 0,
        at: 56,
        position: Position::Pointer,
        owner: Some(70),
        evaluation: Evaluation::Shim,
        first_line: 68,
        filename: 112,
        name: 120,
        qualname: Some(128),
        lines: 136,
        version: Some(92),
        first_traceable: Some(184),
        instructions: 200,
        ascii: 40,
        compact: 56,
        ending: Some(INTERPRETER_ID_3_13 + 48),
    },
];

const _: () = {
    let mut which = 0;
    while which < LAYOUTS.len() {
        assert!(
            LAYOUTS[which].minor == *PYTHONS.start() + which as u8,
            "of each version, in order"
        );
        which += 1;
    }
};

/// The interpreter of this process; what every stack needs, first.
#[repr(C, align(64))]
pub struct Runtime {
    /// Which of [`LAYOUTS`] it has.
    pub which: usize,
    thread_state: unsafe extern "C" fn() -> usize,
    finalizing: unsafe extern "C" fn() -> c_int,
    /// Where the word is that [`Layout::ending`] is about; 0 if that is not known.
    ending: usize,
    /// Where things are.
    pub layout: &'static Layout,
    /// Address of `PyCode_Type`.
    pub code_type: usize,
    /// Code of the interpreter's main loop; empty if its size is not known.
    pub eval: Range<usize>,
    /// The version, as in the interpreter's `PY_VERSION_HEX`.
    pub version: u32,
}

/// The interpreter, if one has been found already.
#[inline]
pub fn found() -> Option<&'static Runtime> {
    // SAFETY: the pointer is null or a leaked runtime.
    unsafe { LINE.python.load(Ordering::Acquire).as_ref() }
}

impl Runtime {
    /// The calling thread's state, 0 if Python never saw the thread.
    #[inline]
    pub fn thread_state(&self) -> usize {
        // SAFETY: `PyGILState_GetThisThreadState` reads a thread-specific slot; it needs no GIL and
        // is defined before the interpreter starts and after it ended.
        unsafe { (self.thread_state)() }
    }

    /// Is the interpreter shutting down?
    #[inline]
    pub fn finalizing(&self) -> bool {
        // SAFETY: reads one word of the runtime; needs no GIL.
        unsafe { (self.finalizing)() != 0 }
    }
}

impl Runtime {
    /// Is the interpreter at its end: running its `atexit` handlers, or taken apart? The handlers
    /// count on the main thread; others may have work to do until they are waited for.
    #[inline]
    pub fn ending(&self, main_thread: bool) -> bool {
        match self.ending {
            0 => self.finalizing(),
            // SAFETY: a word of the interpreter's static memory.
            at => (unsafe { read::<c_int>(at) }) == 1 && (main_thread || self.finalizing()),
        }
    }
}

/// Why there is none; 0 if nobody looked yet. It and the next one say all by themselves.
static WHY: AtomicU32 = AtomicU32::new(0);
/// How often somebody wanted it in vain.
static MISSED: AtomicU32 = AtomicU32::new(0);

/// Why an interpreter that was found is not walked. Looks nothing up.
pub fn refused() -> Option<Reason> {
    Reason::from_u8(WHY.load(Ordering::Relaxed) as u8).filter(|why| *why != Reason::NoPython)
}

/// The interpreter, or why there is none to walk. Looks it up at the first call. Where there was no
/// Python it does so again at the second, fourth, eighth … call, because a program may load it
/// later.
///
/// # Errors
/// The reason why this process has no Python that can be walked.
pub fn runtime() -> Result<&'static Runtime, Reason> {
    if let Some(found) = found() {
        return Ok(found);
    }
    let why = Reason::from_u8(WHY.load(Ordering::Relaxed) as u8);
    let look = match why {
        None => true,
        Some(Reason::NoPython) => {
            // Not exact between threads, which is good enough for "now and
            // then" and costs no contention.
            let n = MISSED.load(Ordering::Relaxed).wrapping_add(1);
            MISSED.store(n, Ordering::Relaxed);
            n.is_power_of_two()
        }
        Some(_) => false,
    };
    if !look {
        return Err(why.unwrap_or(Reason::NoPython));
    }
    match find(&symbol) {
        Ok(found) => {
            let new = Box::into_raw(Box::new(found));
            let old = std::ptr::null_mut();
            let winner =
                LINE.python.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
            // SAFETY: `new` came from a box that nobody else has seen if the exchange failed; both
            // the winner and `new` otherwise live for ever.
            unsafe {
                match winner {
                    Ok(_) => Ok(&*new),
                    Err(other) => {
                        drop(Box::from_raw(new));
                        Ok(&*other)
                    }
                }
            }
        }
        Err(why) => {
            WHY.store(why as u32, Ordering::Relaxed);
            Err(why)
        }
    }
}

/// Finds what has a name, as everybody in the process does.
type Symbols<'a> = &'a dyn Fn(&CStr) -> Option<*mut c_void>;

/// The interpreter, if it is of a version that is known and lays its objects out as
/// that does. Nothing is guessed from a version that is like it, and nothing is
/// called but what says which version it is.
fn find(symbol: Symbols<'_>) -> Result<Runtime, Reason> {
    let version = version(symbol).ok_or(Reason::NoPython)?;
    let minor = (version >> 16) as u8;
    if version >> 24 != 3 {
        return Err(Reason::VersionUnknown);
    }
    let which = LAYOUTS.iter().position(|l| l.minor == minor).ok_or(Reason::VersionUnknown)?;
    let layout = const { &LAYOUTS }.get(which).ok_or(Reason::VersionUnknown)?;
    let need = |name| symbol(name).ok_or(Reason::LayoutCheckFailed);
    let thread_state = need(c"PyGILState_GetThisThreadState")?;
    let code_type = need(c"PyCode_Type")? as usize;
    let frame_type = need(c"PyFrame_Type")? as usize;
    let finalizing = need(c"Py_IsFinalizing").or_else(|_| need(c"_Py_IsFinalizing"))?;
    if minor >= 13 {
        published(symbol, layout, version)?;
    }
    // SAFETY: both are static type objects of the interpreter, whose size
    // is far larger than the offset.
    let (code_size, frame_size) = unsafe {
        (read::<usize>(code_type + TP_BASICSIZE), read::<usize>(frame_type + TP_BASICSIZE))
    };
    if (code_size, frame_size) != (layout.code_size, layout.frame_size) {
        return Err(Reason::LayoutCheckFailed);
    }
    // SAFETY: the type object whose size has just been checked.
    unsafe { super::deaths::watch(code_type) };
    // SAFETY: the two functions have had these prototypes in all supported versions.
    let (thread_state, finalizing) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> usize>(thread_state),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(finalizing),
        )
    };
    let ending = ending(symbol, layout, finalizing).unwrap_or(0);
    Ok(Runtime {
        layout,
        which,
        code_type,
        eval: eval(),
        version,
        thread_state,
        finalizing,
        ending,
    })
}

/// Offset of an interpreter's number in 3.13, which is published.
const INTERPRETER_ID_3_13: usize = 7272;

/// Where the word of [`Layout::ending`] is in the main interpreter. It must be in static memory,
/// since a hook may read it when Python has ended, and say what `finalizing` says so far.
fn ending(
    symbol: Symbols<'_>,
    layout: &Layout,
    finalizing: unsafe extern "C" fn() -> c_int,
) -> Option<usize> {
    let runtime = scopes::default_extent(c"_PyRuntime")?;
    let main = symbol(c"PyInterpreterState_Main")?;
    // SAFETY: takes nothing, needs no GIL, and has had this prototype since 3.7.
    let main =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> usize>(main)() };
    let at = main.checked_add(layout.ending?)?;
    let inside = runtime.contains(&at);
    // SAFETY: a word of `_PyRuntime`; the function reads a word of it, too.
    (inside && unsafe { read::<c_int>(at) == finalizing() }).then_some(at)
}

// Where the parts of the published block begin, in words, in 3.13. They are cookie, version and
// free-threaded; 3 words of the runtime; 13 of an interpreter; 9 of a thread; 6 of a frame; then a
// code object.
const INTERPRETER: usize = 3 + 3;
const THREAD: usize = INTERPRETER + 13;
const FRAME: usize = THREAD + 9;
const CODE: usize = FRAME + 6;

/// Which words of the published block say what our table has, and what that is.
fn published_offsets(layout: &Layout) -> [(usize, usize); 13] {
    [
        (INTERPRETER + 1, INTERPRETER_ID_3_13),
        (THREAD + 4, layout.thread),
        (FRAME + 1, layout.previous),
        (FRAME + 2, layout.code),
        (FRAME + 3, layout.at),
        (FRAME + 5, layout.owner.unwrap_or(0)),
        (CODE, layout.code_size),
        (CODE + 1, layout.filename),
        (CODE + 2, layout.name),
        (CODE + 3, layout.qualname.unwrap_or(0)),
        (CODE + 4, layout.lines),
        (CODE + 5, layout.first_line),
        (CODE + 9, layout.instructions),
    ]
}

/// Compares our table with the offsets that the interpreter publishes (3.13 and later).
fn published(symbol: Symbols<'_>, layout: &Layout, version: u32) -> Result<(), Reason> {
    let block = symbol(c"_PyRuntime").ok_or(Reason::LayoutCheckFailed)? as usize;
    // SAFETY: `_PyRuntime` begins with this block and is many kilobytes long.
    let word = |i: usize| unsafe { read::<u64>(block + 8 * i) };
    if word(0) != u64::from_le_bytes(*b"xdebugpy") || word(1) != u64::from(version) {
        return Err(Reason::LayoutCheckFailed);
    }
    if word(2) != 0 {
        return Err(Reason::FreeThreaded);
    }
    // The published size of a code object counts its first instruction, and padding.
    let same = |(i, offset): (usize, usize)| {
        word(i) == offset as u64 || i == CODE && (word(i) as usize).abs_diff(offset) <= 8
    };
    if published_offsets(layout).into_iter().all(same) {
        Ok(())
    } else {
        Err(Reason::LayoutCheckFailed)
    }
}

/// The interpreter's version as a number: 0x030b07f0 is 3.11.7.
fn version(symbol: Symbols<'_>) -> Option<u32> {
    if let Some(at) = symbol(c"Py_Version") {
        // SAFETY: an `unsigned long` constant.
        return Some(unsafe { read::<u64>(at as usize) } as u32);
    }
    let get = symbol(c"Py_GetVersion")?;
    // SAFETY: `Py_GetVersion` takes nothing, needs no GIL, and returns a
    // string that is never freed.
    let text = unsafe {
        let get: unsafe extern "C" fn() -> *const c_char = std::mem::transmute(get);
        let text = get();
        if text.is_null() {
            return None;
        }
        CStr::from_ptr(text)
    };
    let mut numbers = text.to_str().ok()?.split(|c: char| !c.is_ascii_digit());
    let (major, minor) = (numbers.next()?.parse::<u32>().ok()?, numbers.next()?.parse().ok()?);
    let micro = numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    Some(major << 24 | u32::min(minor, 255) << 16 | u32::min(micro, 255) << 8)
}

/// The code of the interpreter's main loop.
fn eval() -> Range<usize> {
    scopes::default_extent(c"_PyEval_EvalFrameDefault").unwrap_or(0..0)
}

/// What everybody finds under this name: the interpreter's, whether it is a library or linked into
/// the program, which exports its API for extension modules.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    scopes::default(name).map(|at| at as *mut c_void)
}

#[cfg(test)]
mod tests;
