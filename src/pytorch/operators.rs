//! What was in use after each operator, while somebody asks: for `memtrace.MemoryTracker`.
//!
//! An operator leaves a record: which one, how deep inside others it ran, on which thread, and
//! what the allocator had when it was done. Most are seen as they begin
//! ([`crate::pytorch::quick`]). For the others there are two of PyTorch's callbacks (scope
//! *function*, see [`crate::pytorch::record_functions`]). Both are there only while a tracker
//! runs, so an operator costs nothing in between. Which operators a reader wants to see is worked
//! out afterwards, from the records of all.
//!
//! A bit says of an operator that no dispatch mode could see it, because its caller shut them out
//! (`torch.tensor` does). Another says that an exception ended it. Ranges of `record_function` are
//! recorded as those operators of PyTorch's that they are, which PyTorch itself doesn't report.
//!
//! It rests on two facts, which are checked for each record before use. The second kind of name
//! of a `RecordFunction`, at [`FUNCTION_AT`], leads to the operator's schema. And that begins
//! with two strings, the name and the overload. If the first is not the name that PyTorch itself
//! gives, the overload counts as unknown.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use memtrace_format::event::{LabelId, NO_LABEL};
use memtrace_format::labels::LabelKind;

use crate::gauges;
use crate::labels::store;
use crate::libraries::scopes;
use crate::os::address::Address;
use crate::os::sync::of_process;
use crate::pytorch::journal::Journal;
use crate::pytorch::names::{self, FUNCTION_AT, OPERATOR, SCHEMA};
use crate::pytorch::{backward, quick, record_functions};
use crate::record::guard::{self, Local};

/// The longest name that is taken for one.
const LONGEST: usize = 200;

/// Words of a record.
pub const WORDS: usize = 5;
of_process! {
    static JOURNAL: Journal<WORDS> = Journal::empty();
}
/// The number of the dispatch key by which dispatch modes are called.
static MODES: AtomicU32 = AtomicU32::new(0);
/// `c10::impl::tls_is_dispatch_key_excluded`, if there is one.
static IS_EXCLUDED: Address = Address::new();
/// PyTorch's handle of the callback while it is there, plus 1.
static HANDLE: AtomicU64 = AtomicU64::new(0);
static RUNNING: AtomicBool = AtomicBool::new(false);
/// Which module runs, in the caller's own numbering, and the device that is asked for.
/// Each of these words says all by itself.
static MODULE: AtomicU32 = AtomicU32::new(0);
static DEVICE: AtomicU32 = AtomicU32::new(0);
static THREADS: AtomicU32 = AtomicU32::new(0);

/// `std::uncaught_exceptions`, if there is one.
static EXCEPTIONS: Address = Address::new();

type Exceptions = unsafe extern "C" fn() -> c_int;
type IsExcluded = unsafe extern "C" fn(u16) -> bool;

/// Gets ready. `modes` is the dispatch key of dispatch modes, the others
/// those that [`quick`] needs.
pub fn prepare(device: u32, modes: u32, [below, views, autocast]: [u64; 3]) {
    stop();
    JOURNAL.begin();
    MODULE.store(0, Ordering::Relaxed);
    DEVICE.store(device, Ordering::Relaxed);
    MODES.store(modes, Ordering::Relaxed);
    let name = names::IS_KEY_EXCLUDED;
    let found = scopes::loaded_symbol(name.library, name.symbol);
    let found = found.map_or(std::ptr::null_mut(), NonNull::as_ptr);
    IS_EXCLUDED.set(found);
    let found = scopes::loaded_symbol("libstdc++.so.6", c"_ZSt19uncaught_exceptionsv");
    EXCEPTIONS.set(found.map_or(std::ptr::null_mut(), NonNull::as_ptr));
    quick::begin(below, views, autocast, begins, ends);
}

/// Begins, when an operator has run since [`prepare`]. Says how operators are seen; [`NOT`] if
/// PyTorch is not in this process, or not one whose callbacks we know.
pub fn start() -> u32 {
    if quick::end_of_trial() {
        RUNNING.store(true, Ordering::Release);
        return QUICKLY;
    }
    let Some(handle) = record_functions::add(OPERATOR, begins, ends) else { return NOT };
    HANDLE.store(handle + 1, Ordering::Release);
    RUNNING.store(true, Ordering::Release);
    BY_CALLBACKS
}

/// No operator is seen.
pub const NOT: u32 = 0;
/// PyTorch calls us around each.
pub const BY_CALLBACKS: u32 = 1;
/// See [`quick`].
pub const QUICKLY: u32 = 2;

/// No more records from here on; those that were made stay to be read.
pub fn stop() {
    RUNNING.store(false, Ordering::Release);
    quick::end();
    if let Some(handle) = HANDLE.swap(0, Ordering::AcqRel).checked_sub(1) {
        record_functions::remove(handle);
    }
}

/// From here on this module runs.
pub fn module(number: u32) {
    MODULE.store(number, Ordering::Relaxed);
}

/// The records before this number were read, or will not be. Where none is made any more, some
/// thread may still be writing one.
pub fn release(upto: u64) {
    if RUNNING.load(Ordering::Acquire) { JOURNAL.release(upto) } else { JOURNAL.leave(upto) }
}

/// See [`Journal::count`].
pub fn count() -> [u64; 2] {
    JOURNAL.count()
}

/// See [`Journal::read`].
pub fn read(from: u64, into: &mut [u64]) -> usize {
    JOURNAL.read(from, into)
}

unsafe extern "C" fn begins(result: *mut *mut c_void, function: *const u8) -> *mut *mut c_void {
    // SAFETY: PyTorch hands in a live `RecordFunction`, and room for an empty `unique_ptr`.
    unsafe {
        guard::local(|local| {
            let mine = &local.operators;
            mine.begun.exact();
            if schema(function).is_some() {
                mine.depth.set(mine.depth.get() + 1);
            }
        });
        result.write(std::ptr::null_mut());
    }
    result
}

unsafe extern "C" fn ends(function: *const u8, _: *mut c_void) {
    // SAFETY: PyTorch hands in a live `RecordFunction`.
    let Some(schema) = (unsafe { schema(function) }) else { return };
    // SAFETY: as above.
    let operator = known(schema).unwrap_or_else(|| unsafe { learn(schema, function) });
    guard::local(|local| {
        let depth = &local.operators.depth;
        depth.set(depth.get().saturating_sub(1));
        write(local, operator);
    });
}

/// Writes down that a range of `record_function` begins or ends.
pub fn range(begins: bool) {
    static NAMED: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
    if !RUNNING.load(Ordering::Relaxed) {
        return;
    }
    let named = &NAMED[usize::from(begins)];
    if named.load(Ordering::Relaxed) == 0 {
        let name: &[u8] = if begins {
            b"profiler::_record_function_enter_new.default"
        } else {
            b"profiler::_record_function_exit._RecordFunction"
        };
        named.store(crate::labels::named(NO_LABEL, LabelKind::Operator, name), Ordering::Relaxed);
    }
    guard::local(|local| write(local, named.load(Ordering::Relaxed)));
}

/// Can no dispatch mode see what the calling thread does?
fn shut_out() -> bool {
    let asked = IS_EXCLUDED.get();
    let modes = MODES.load(Ordering::Relaxed) as u16;
    // SAFETY: libc10 exports this name with this signature, of an
    // enumeration of 16 bits, in 2.6 to 2.15.
    !asked.is_null() && unsafe { std::mem::transmute::<*mut c_void, IsExcluded>(asked)(modes) }
}

/// Does an exception end what ends here?
fn failed() -> bool {
    let asked = EXCEPTIONS.get();
    // SAFETY: the C++ library's function of this name takes nothing and returns an `int`.
    !asked.is_null() && unsafe { std::mem::transmute::<*mut c_void, Exceptions>(asked)() } > 0
}

/// In the word of [`inside`]: the record of this number is that of an
/// operator which began last, and is not done.
const BEGUN: u64 = 1 << 15;

/// The operator that the calling thread is in, for a record of something else. The word has four
/// parts: how many are open that leave their records as they end (15 bits), [`BEGUN`], the thread's
/// number (from bit 16), and the number of a record (from bit 32). Of the records from there on
/// with this thread's number, the first of each smaller depth is of an operator that is open now.
/// The innermost is the one of that number itself, if it was seen as it began; else the number is
/// that of the next record. 0 outside operators, or if nobody asks for them.
#[inline]
pub fn inside(local: &Local) -> u64 {
    if !RUNNING.load(Ordering::Relaxed) {
        return 0;
    }
    let begun = quick::current(local);
    let depth = u64::from(local.operators.depth.get().min(0x7fff));
    if begun.is_none() && depth == 0 {
        return 0;
    }
    let flag = if begun.is_some() { BEGUN } else { 0 };
    let record = begun.unwrap_or_else(|| JOURNAL.count()[0]);
    depth | flag | u64::from(thread(local)) << 16 | record << 32
}

fn write(local: &Local, operator: LabelId) {
    add(local, operator, u64::from(failed()) << FAILED_AT | u64::from(shut_out()) << 46);
}

/// An operator begins that [`quick`] sees to; the number of its record.
#[inline]
pub fn seen(local: &Local, operator: LabelId) -> Option<u64> {
    add(local, operator, 0)
}

/// What the allocator has now belongs to this record, too.
#[inline]
pub fn update(record: u64) {
    if let Some(words) = JOURNAL.record(record) {
        let now = memory();
        for i in 0..now.len() {
            words[i + 2].store(now[i], Ordering::Relaxed);
        }
    }
}

/// This operator fails.
pub fn fail(record: u64) {
    if let Some(words) = JOURNAL.record(record) {
        words[0].fetch_or(1 << FAILED_AT, Ordering::Relaxed);
    }
}

const FAILED_AT: u32 = 45;

fn add(local: &Local, operator: LabelId, bits: u64) -> Option<u64> {
    let label = local.label.get();
    let depth = local.operators.depth.get();
    let backward = u64::from(backward::in_backward());
    let first = u64::from(operator)
        | u64::from(depth.min(0x1fff)) << 32
        | bits
        | backward << 47
        | u64::from(thread(local)) << 48;
    let module = u64::from(MODULE.load(Ordering::Relaxed));
    let [allocated, reserved, waiting] = memory();
    JOURNAL.write([first, module | u64::from(label) << 32, allocated, reserved, waiting])
}

/// Allocated, reserved, and waiting for other streams.
#[inline]
fn memory() -> [u64; 3] {
    let device = DEVICE.load(Ordering::Relaxed) as usize;
    let [allocated, reserved, ..] = gauges::of(device).map_or([0; 4], gauges::Gauge::read);
    [allocated, reserved, gauges::waiting::of(device)]
}

fn thread(local: &Local) -> u32 {
    let mine = &local.operators.thread;
    if mine.get() == 0 {
        mine.set(THREADS.fetch_add(1, Ordering::Relaxed) % 0xffff + 1);
    }
    mine.get()
}

/// Where the operator's schema is, if what begins or ends is an operator.
unsafe fn schema(function: *const u8) -> Option<*const u8> {
    // SAFETY: the caller has a `RecordFunction`, which is longer than these offsets.
    unsafe {
        if *function.add(FUNCTION_AT + record_functions::string_size()) != SCHEMA {
            return None;
        }
        let schema = function.add(FUNCTION_AT).cast::<*const u8>().read_unaligned();
        (!schema.is_null()).then_some(schema)
    }
}

// --- the names of operators ----------------------------------------------------------------------

const SLOTS: usize = 1 << 13;
/// Schema, which never goes, and the label that has the operator's name: a word that says all by
/// itself, and the same whoever writes it.
static NAMES: [[AtomicU64; 2]; SLOTS] = [const { [const { AtomicU64::new(0) }; 2] }; SLOTS];
const PROBES: usize = 64;

fn slots(schema: *const u8) -> impl Iterator<Item = &'static [AtomicU64; 2]> {
    let first = (schema as u64 >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..PROBES).map(move |i| &NAMES[(first as usize + i) % SLOTS])
}

#[inline]
fn known(schema: *const u8) -> Option<LabelId> {
    for slot in slots(schema) {
        match slot[0].load(Ordering::Acquire) {
            0 => return None,
            found if found == schema as u64 => {
                let label = slot[1].load(Ordering::Acquire) as LabelId;
                return (label != NO_LABEL).then_some(label);
            }
            _ => {}
        }
    }
    None
}

/// Names an operator as PyTorch's Python side does: `aten::add.Tensor`, and
/// `aten::relu.default` without an overload.
#[cold]
unsafe fn learn(schema: *const u8, function: *const u8) -> LabelId {
    // SAFETY: the caller has a `RecordFunction` and its schema.
    let (name, overload) = unsafe {
        let said = record_functions::name(function);
        let name = record_functions::string(schema);
        let overload = schema.add(record_functions::string_size());
        (said, (name.0 == said.as_ptr().cast()).then(|| record_functions::string(overload)))
    };
    let mut whole = name.to_bytes().to_vec();
    whole.push(b'.');
    match overload {
        Some((at, length)) if length > 0 && length < LONGEST => {
            // SAFETY: the two strings stand side by side, and the first is one.
            whole.extend_from_slice(unsafe { std::slice::from_raw_parts(at.cast(), length) });
        }
        _ => whole.extend_from_slice(b"default"),
    }
    let label =
        store::store().and_then(|s| s.intern(NO_LABEL, LabelKind::Operator, &whole)).unwrap_or(1);
    for slot in slots(schema) {
        let free = slot[0].compare_exchange(0, schema as u64, Ordering::AcqRel, Ordering::Acquire);
        if free.is_ok() || free == Err(schema as u64) {
            slot[1].store(u64::from(label), Ordering::Release);
            break;
        }
    }
    label
}
