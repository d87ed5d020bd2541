//! The C functions for programs and for the Python package.
//!
//! `include/memtrace.h` and `python/memtrace/_interface.py` are written from here, words and types.
//! The text above each function (without `# Safety`) is taken, and the lines between `---`, which
//! begin a section. `tests/interface.rs` writes both, and fails where they are of another day.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use memtrace_format::event::Point;
use memtrace_format::labels::LabelKind;

use crate::os::message;
use crate::os::signals;
use crate::process;
use crate::process::dump;
use crate::process::dump::Reason;
use crate::record::guard;
use crate::stack::on_a_large_one;
use crate::{gauges, labels, pytorch};

/// Writes a snapshot of now. `path` null: the next free name in `MEMTRACE_OUT`. A path that ends in
/// `.json` gets JSON, in `.pickle` or `.pkl` a pickle, any other what `MEMTRACE_FORMAT` says; a
/// file of that name is replaced. Returns 0; 1 if nothing was recorded because no CUDA call has
/// been made; 2 if the file could not be written (the reason is on stderr).
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_dump(path: *const c_char) -> c_int {
    let Some(process) = process::current() else { return 1 };
    let dump = || {
        if path.is_null() {
            return if dump::to_folder(process, dump::NOW, Reason::Request).is_some() {
                0
            } else {
                2
            };
        }
        // SAFETY: promised by the caller.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        match dump::to_path(process, path) {
            Ok(()) => 0,
            Err(e) => {
                message!("cannot write {}: {e}", path.display());
                2
            }
        }
    };
    guard::nested(|| on_a_large_one(|| signals::uncancelled(dump)))
}

/// 1 if memtrace is recording in this process, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_active() -> c_int {
    c_int::from(crate::record::switch::recorder().is_some())
}

/// The version (`0.1.0`), as a C string that lives for ever.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

// --- Labels: what the calling thread is doing. What it allocates carries
// the label; ranges are of a thread. ---

/// The bytes of a C string; none of null.
unsafe fn bytes<'a>(text: *const c_char) -> &'a [u8] {
    // SAFETY: the callers below are promised null or a C string.
    if text.is_null() { b"" } else { unsafe { CStr::from_ptr(text) }.to_bytes() }
}

/// Opens a named range inside those that are open; returns how many were open.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_push(name: *const c_char) -> c_int {
    // SAFETY: promised by the caller.
    labels::push(unsafe { bytes(name) }) as c_int
}

/// The same for a module that is called, by its full name: beside the
/// module around it, inside all else.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_push_module(name: *const c_char) -> c_int {
    // SAFETY: promised by the caller.
    labels::push_module(unsafe { bytes(name) }) as c_int
}

/// The same for a phase of training (`forward`), whose beginning and end are written down, too.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_push_phase(name: *const c_char) -> c_int {
    // SAFETY: promised by the caller.
    labels::push_phase(unsafe { bytes(name) }) as c_int
}

/// Closes the innermost range; returns how many are still open, −1 if there was none.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_pop() -> c_int {
    labels::pop().map_or(-1, |open| open as c_int)
}

/// Closes ranges until `depth` are open: those that an exception left behind.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_unwind(depth: c_int) {
    labels::unwind(u32::try_from(depth).unwrap_or(0));
}

/// The number of a label: a name inside the label `parent` (0: inside nothing), of a
/// sort (0 range, 1 phase, 2 module, 3 operator). The same each time; `parent`
/// itself if there is no room for more.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_label(parent: u32, sort: c_int, name: *const c_char) -> u32 {
    let sort = u8::try_from(sort).ok().and_then(LabelKind::from_u8).unwrap_or_default();
    // SAFETY: promised by the caller.
    labels::named(parent, sort, unsafe { bytes(name) })
}

/// Gives the calling thread this label (0: none) and returns the one it had, to be
/// given back at the end of the range.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_enter(label: u32) -> u32 {
    labels::enter(label)
}

/// The calling thread's label.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_current() -> u32 {
    labels::current()
}

/// The sort of a label, as in [`memtrace_label`]; 0 if there is none of this number.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_label_sort(label: u32) -> c_int {
    labels::store::existing().filter(|s| s.has(label)).map_or(0, |s| s.kind(label) as c_int)
}

/// The label that a label is inside of; 0 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_label_parent(label: u32) -> u32 {
    labels::store::existing().filter(|s| s.has(label)).map_or(0, |s| s.parent(label))
}

/// Writes the names of a label, outermost first and with `/` between them, as a C string of at most
/// `size` bytes. Returns the length of the whole.
///
/// # Safety
/// `into` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_label_path(label: u32, into: *mut c_char, size: usize) -> usize {
    let store = labels::store::existing();
    let path = store.and_then(|s| memtrace_format::labels::path(s.words(), label));
    // SAFETY: promised by the caller.
    unsafe { answer(&path.unwrap_or_default(), into, size) }
}

/// Writes a text as a C string of at most `size` bytes. Returns the length of the whole.
unsafe fn answer(text: &str, into: *mut c_char, size: usize) -> usize {
    if let Some(room) = size.checked_sub(1) {
        let length = text.len().min(room);
        // SAFETY: the caller promises `size` bytes, which is at least one more than these.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), length);
            into.add(length).write(0);
        }
    }
    text.len()
}

/// Writes down that the program passed a point. `sort`: 1 a moment, 2 a step of the training loop
/// (`number` is which), 3 and 4 begin and end of a phase. Nothing if nothing is recorded yet.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_mark(name: *const c_char, sort: c_int, number: u64) {
    if let Some(sort) = u64::try_from(sort).ok().and_then(Point::from_u64) {
        // SAFETY: promised by the caller.
        labels::mark(unsafe { bytes(name) }, sort, number);
    }
}

// --- Modules that are called: for the Python package ---

/// How Python calls (vectorcall) the function that stands for
/// `torch.nn.Module._compiled_call_impl`: says which module is called and goes on.
///
/// # Safety
/// Called by Python, after [`memtrace_calls_begin`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_module_called(
    function: *mut c_void,
    arguments: *const *mut c_void,
    count: usize,
    keywords: *mut c_void,
) -> *mut c_void {
    // SAFETY: promised by the caller.
    unsafe { pytorch::modules::called(function, arguments, count, keywords) }
}

/// Python's `PyObject_VectorcallMethod`, and the name (a string of Python's that lives for ever) of
/// the method with which [`memtrace_module_called`] goes on.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_calls_begin(call: *mut c_void, method: *mut c_void) {
    pytorch::modules::begin(call, method);
}

/// Whenever the module at this address is called, until `watch` is removed, one of three things is
/// noted. With `sort` 0 the phase `forward` begins. With 1 the module of this name runs. With 2 the
/// module of this number runs, for the records of operators.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_calls_add(
    module: *const c_void,
    watch: u32,
    sort: c_int,
    name: *const c_char,
    number: u32,
) {
    let action = match sort {
        0 => pytorch::modules::Action::Forward,
        // SAFETY: promised by the caller.
        1 => pytorch::modules::Action::Module(unsafe { bytes(name) }.into(), AtomicU64::default()),
        _ => pytorch::modules::Action::Number(number),
    };
    pytorch::modules::add(module.addr(), watch, action);
}

/// Ends all that `watch` has added.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_calls_remove(watch: u32) {
    pytorch::modules::remove(watch);
}

/// The module at this address is gone.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_calls_forget(module: *const c_void) {
    pytorch::modules::forget(module.addr());
}

// --- Numbers ---

/// What PyTorch's allocator has on a device, four numbers of bytes: allocated, reserved, and
/// the most of each since [`memtrace_restart_peak`] or the beginning. Returns 1 if that is
/// known, else 0 and `into` is as it was.
///
/// # Safety
/// `into` has room for four numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_memory(device: c_int, into: *mut u64) -> c_int {
    let Some(gauge) = usize::try_from(device).ok().and_then(gauges::of) else { return 0 };
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(gauge.read().as_ptr(), into, 4) };
    1
}

/// From here on the most that was allocated is counted anew, as [`memtrace_memory`] says it.
/// PyTorch's own statistics stay as they are.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_restart_peak(device: c_int) {
    if let Some(gauge) = usize::try_from(device).ok().and_then(gauges::of) {
        gauge.restart();
    }
}

/// The most was at least that: what was known before
/// [`memtrace_restart_peak`], for whoever counted before.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_raise_peak(device: c_int, allocated: u64, reserved: u64) {
    if let Some(gauge) = usize::try_from(device).ok().and_then(gauges::of) {
        gauge.raise(allocated, reserved);
    }
}

// --- Operators of PyTorch's: a record at the end of each, while asked for ---

/// What must be known of operators before they can be seen as they begin. Each is a line
/// with three parts and tabs between them: the name of its C++ structure (`add_Tensor`),
/// its own name (`aten::add.Tensor`), and a digit. The digit is 1 if the operator is
/// made of others, and 2 if its autograd kernel excludes autograd while it works. It is
/// 4 more if autocast has a kernel for it.
///
/// # Safety
/// `text` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_operators_learn(text: *const c_char) {
    // SAFETY: promised by the caller.
    pytorch::quick::learn(unsafe { bytes(text) });
}

/// Gets ready for operators to leave records with what `device` has. `modes` is the number of
/// PyTorch's dispatch key for dispatch modes. The others are keys as bits: `below` those that are
/// excluded below autograd, `views` those that may be, too, and `autocast` those of autocast. An
/// operator must run before [`memtrace_operators_start`].
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_operators_prepare(
    device: c_int,
    modes: u32,
    below: u64,
    views: u64,
    autocast: u64,
) {
    let device = u32::try_from(device).unwrap_or(0);
    pytorch::callbacks::attach();
    pytorch::operators::prepare(device, modes, [below, views, autocast]);
}

/// From here on every operator leaves a record. Returns 0 if PyTorch is not there or does not say
/// its operators, 1 if it says them by callbacks, 2 if they are seen as they begin.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_operators_start() -> c_int {
    pytorch::callbacks::attach();
    pytorch::operators::start() as c_int
}

/// No more records; those that were made can still be read.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_operators_stop() {
    pytorch::operators::stop();
}

/// Operators from here on belong to this module, in the caller's own numbering.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_operators_module(number: u32) {
    pytorch::operators::module(number);
}

/// The number of the next record. `lost`, if not null, gets how many found no room so far.
///
/// # Safety
/// `lost` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_operators_count(lost: *mut u64) -> u64 {
    let [count, none] = pytorch::operators::count();
    if !lost.is_null() {
        // SAFETY: promised by the caller.
        unsafe { lost.write(none) };
    }
    count
}

/// Copies up to so many records from number `from` on; returns how many. Each is five words.
/// The first has the operator's label and how deep it was inside others (from bit 32). It also
/// says whether an exception ended it (bit 45), whether no dispatch mode could see it (bit 46),
/// and whether a node of autograd's ran it (bit 47). From bit 48 it has the thread. The second
/// has the module and (from bit 32) the thread's label. The others are bytes allocated,
/// reserved, and waiting for other streams.
///
/// # Safety
/// `into` has room for five words for each record.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_operators_read(
    from: u64,
    records: usize,
    into: *mut u64,
) -> usize {
    let words = pytorch::operators::WORDS;
    // SAFETY: promised by the caller.
    let into = unsafe { std::slice::from_raw_parts_mut(into, records * words) };
    pytorch::operators::read(from, into) / words
}

/// Records before this number will not be read again.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_operators_release(upto: u64) {
    pytorch::operators::release(upto);
}

// --- Changes of what is allocated: a record of each, while asked for ---

/// With `on`, one tracker more: every block that PyTorch's allocator hands out or takes back and
/// every change of a thread's label leaves a record; without, one less.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_changes_ask(on: c_int) {
    pytorch::callbacks::attach();
    pytorch::changes::ask(on != 0);
}

/// The number of the next record. `lost`, if not null, gets how many found no room so far.
///
/// # Safety
/// `lost` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_changes_count(lost: *mut u64) -> u64 {
    let [count, none] = pytorch::changes::count();
    if !lost.is_null() {
        // SAFETY: promised by the caller.
        unsafe { lost.write(none) };
    }
    count
}

/// Copies up to so many records from number `from` on, up to the first that isn't there;
/// returns how many. Each is four words. The first says what happened: 1 allocated, 2 freed, 3
/// labelled, 4 handed to cuBLAS as a workspace. From bit 4 it has the work it was part of: 1
/// backward, 2 computed again by a checkpoint, 3 a gradient is put into its place. It also has
/// the device (bit 8), the thread (bit 16) and the thread's label (bit 40). The second is the
/// address, the third the bytes. The fourth is there while operators are asked for. It says how
/// many of them are open on this thread, the thread's number in their records (bit 16) and the
/// number of their next record (bit 32).
///
/// # Safety
/// `into` has room for four words for each record.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_changes_read(from: u64, records: usize, into: *mut u64) -> usize {
    let words = pytorch::changes::WORDS;
    // SAFETY: promised by the caller.
    let into = unsafe { std::slice::from_raw_parts_mut(into, records * words) };
    pytorch::changes::read(from, into) / words
}

/// Records before this number will not be read again.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_changes_release(upto: u64) {
    pytorch::changes::release(upto);
}

// --- How recording goes ---

/// How recording goes, as JSON: a C string of at most `size` bytes.
/// Returns the length of the whole.
///
/// # Safety
/// `into` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_stats(into: *mut c_char, size: usize) -> usize {
    let text = on_a_large_one(|| dump::statistics(crate::record::switch::recorder()).to_string());
    // SAFETY: promised by the caller.
    unsafe { answer(&text, into, size) }
}
