//! Which of NCCL's communicators a thread is at work for.
//!
//! NCCL takes its memory inside its own public functions, some of it in threads that it starts
//! for the call and waits for. So those functions are hooked, and an allocation meanwhile is
//! charged to the communicator whose call is under way. That is the call in this thread if there
//! is one, or else in the process. If several are under way, the communicator is not known,
//! which is recorded as such ([`ONE_OF_SEVERAL`]). What a thread of NCCL's takes on its own
//! later belongs to no known communicator.
//!
//! Between `ncclGroupStart` and `ncclGroupEnd` calls are only collected, and `ncclGroupEnd` does
//! the work for all of them. A communicator has a number from the moment when its making begins,
//! because that is when most is taken.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_format::event::{
    CommunicatorEvent, Event, Kind, ONE_OF_SEVERAL, ObjectEvent, Pool, What,
};
use memtrace_format::world::World;

use crate::os::sync::{atomics, of_process};
use crate::pair::{FREE, Pair};
use crate::record::guard;
use crate::record::guard::event;
use crate::record::hook::{HookCall, got};
use crate::stack::Site;

/// `void **`: where a handle goes.
type Out = *mut *mut c_void;

/// `ncclUniqueId`: 128 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

#[cfg(test)]
memtrace_layouts::same_layout!(UniqueId = cudarc::nccl::sys::ncclUniqueId { 0: internal });

/// No communicator.
const NONE: u16 = 0;
/// How many communicators are known at a time; later ones get no number.
const PLACES: usize = 256;

thread_local! {
    /// The communicator for which this thread is at work.
    static HERE: Cell<u16> = const { Cell::new(NONE) };
    /// Groups that are open, one in the other, and for whom calls were collected in them.
    static GROUP: Cell<(u32, u16)> = const { Cell::new((0, NONE)) };
}

/// Calls under way in the process (from bit 16), and for whom: all in one word, which only
/// exchanges change, so no order of others' words matters.
static AT_WORK: AtomicU64 = AtomicU64::new(0);
/// The last number given.
static NUMBERS: AtomicU32 = AtomicU32::new(0);
of_process! {
    /// The communicators that are there, and their numbers.
    static KNOWN: [Pair; PLACES] = atomics![Pair::new(); PLACES];
}

/// The communicator of two pieces of work together: the one they share, or one of several.
fn merge(one: u16, other: u16) -> u16 {
    match (one, other) {
        (NONE, other) => other,
        (one, NONE) => one,
        (one, other) if one == other => one,
        _ => ONE_OF_SEVERAL,
    }
}

/// For which communicator memory is taken now, as an event says it.
#[inline]
pub fn at_work() -> u16 {
    match HERE.get() {
        NONE => AT_WORK.load(Ordering::Relaxed) as u16,
        here => here,
    }
}

/// Has NCCL come to one of its own public functions, inside a call of the program's?
fn is_inside() -> bool {
    HERE.get() != NONE
}

/// Makes a call for this communicator.
fn working<R>(number: u16, call: impl FnOnce() -> R) -> R {
    let add = |word: u64| {
        let number = if word == 0 { number } else { merge(word as u16, number) };
        ((word & !0xffff) + (1 << 16)) | u64::from(number)
    };
    // The last one to end leaves nobody.
    let end = |word: u64| if word >> 16 <= 1 { 0 } else { word - (1 << 16) };
    let _ = AT_WORK.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(add(word)));
    let before = HERE.replace(merge(HERE.get(), number));
    let result = call();
    HERE.set(before);
    let _ = AT_WORK.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| Some(end(word)));
    result
}

/// A forked child has none of its parent's threads.
pub fn forget_work() {
    AT_WORK.store(0, Ordering::Relaxed);
}

fn new_number() -> u16 {
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
    u16::try_from(number).unwrap_or(ONE_OF_SEVERAL)
}

fn number_of(handle: usize) -> u16 {
    KNOWN.iter().find_map(|known| known.get(handle as u64)).map_or(NONE, |number| number as u16)
}

/// Writes an event about a communicator. Outside the real call.
fn note(hook: HookCall, number: u16, said: Event) {
    guard::observe(|recorder, local| {
        let stack = match said.kind {
            Kind::Create => recorder.stacks.capture_call(&local.stacks, Site::Alloc, hook.caller),
            _ => recorder.stack_of_freeing_call(local, hook.caller),
        };
        let (api, pool) = (hook.api, Pool(number));
        recorder.write(&Event { api, pool, stack, ..event(local, said) });
    });
}

/// A communicator is there.
fn made(hook: HookCall, number: u16, handle: u64, ranks: c_int, rank: c_int) {
    if handle == 0 {
        return;
    }
    KNOWN.iter().find(|known| known.put(FREE, handle, u64::from(number)));
    defer_to_group(number);
    let (ranks, rank) = (ranks.max(0) as u64, rank.max(0) as u64);
    note(hook, number, CommunicatorEvent { handle, ranks, rank }.event());
}

fn gone(hook: HookCall, handle: usize) {
    let number = number_of(handle);
    if number == NONE {
        return;
    }
    let gone = ObjectEvent { handle: handle as u64, context: 0 }.event(Kind::Destroy);
    note(hook, number, Event { what: What::Communicator, ..gone });
    KNOWN.iter().filter(|known| known.remove(handle as u64)).count();
}

/// In an open group, the work is done at its end.
fn defer_to_group(number: u16) {
    let (depth, whose) = GROUP.get();
    if depth > 0 {
        GROUP.set((depth, merge(whose, number)));
    }
}

/// `ncclInProgress`: the call of a communicator that doesn't block goes on elsewhere.
const IN_PROGRESS: c_int = 7;

/// The process becomes one rank of several, if this call succeeded.
fn joined(code: c_int, ranks: c_int, rank: c_int) {
    if let (0 | IN_PROGRESS, Ok(ranks), Ok(rank)) =
        (code, u32::try_from(ranks), u32::try_from(rank))
    {
        guard::observe(|recorder, local| {
            let device = local.device.get();
            recorder.joined(World { rank, ranks, device, several: false });
        });
    }
}

// --- what calls do: the roles of NCCL's rows -----------------------------------------------------

/// A call that makes one communicator.
pub unsafe fn makes(
    hook: HookCall,
    out: Out,
    ranks: c_int,
    rank: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    crate::record::switch::wake();
    if is_inside() {
        return call();
    }
    let number = new_number();
    let code = working(number, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    made(hook, number, unsafe { got(code, out) }, ranks, rank);
    joined(code, ranks, rank);
    code
}

/// One for each of this process's devices.
pub unsafe fn makes_all(
    hook: HookCall,
    out: Out,
    count: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    crate::record::switch::wake();
    if is_inside() {
        return call();
    }
    let first = new_number();
    let code = working(if count == 1 { first } else { ONE_OF_SEVERAL }, call);
    for i in 0..count {
        let number = if i == 0 { first } else { new_number() };
        // SAFETY: a successful call has filled so many places.
        let handle = unsafe { got(code, out.add(i as usize)) };
        made(hook, number, handle, count, i);
    }
    code
}

/// Neither the number of the new one's ranks nor which one this is, is said
/// by the call: 0 ranks are not known.
pub unsafe fn splits(hook: HookCall, out: Out, call: impl FnOnce() -> c_int) -> c_int {
    if is_inside() {
        return call();
    }
    let number = new_number();
    let code = working(number, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    made(hook, number, unsafe { got(code, out) }, 0, 0);
    code
}

/// A call that is the last one about a communicator.
pub unsafe fn ends(hook: HookCall, of: usize, call: impl FnOnce() -> c_int) -> c_int {
    let number = number_of(of);
    gone(hook, of);
    working(number, call)
}

/// A call that is for a communicator, and makes nothing.
pub unsafe fn works(_: HookCall, of: usize, call: impl FnOnce() -> c_int) -> c_int {
    working(number_of(of), call)
}

/// `ncclGroupStart`.
pub unsafe fn starts_group(_: HookCall, call: impl FnOnce() -> c_int) -> c_int {
    let code = call();
    if code == 0 && !is_inside() {
        let (depth, whose) = GROUP.get();
        GROUP.set((depth + 1, if depth == 0 { NONE } else { whose }));
    }
    code
}

/// `ncclGroupEnd`.
pub unsafe fn ends_group(_: HookCall, call: impl FnOnce() -> c_int) -> c_int {
    if is_inside() {
        return call();
    }
    let (depth, whose) = GROUP.get();
    GROUP.set((depth.saturating_sub(1), whose));
    if depth > 1 { call() } else { working(whose, call) }
}

/// A call that sends something: buffers and connections are made at the first.
pub unsafe fn sends(_: HookCall, of: usize, call: impl FnOnce() -> c_int) -> c_int {
    if is_inside() {
        return call();
    }
    let number = number_of(of);
    defer_to_group(number);
    working(number, call)
}

/// NCCL's rows of the table of entry points: put behind those that stand there already, and
/// handed on to the next macro of the list.
macro_rules! rows {
    ([$next:ident $($later:ident)*] { $($before:tt)* }) => {
        $next! { [$($later)*] {
            $($before)*
            "libnccl.so" Library nccl {
                ncclCommInitRank(out: Out, ranks: c_int, id: UniqueId, rank: c_int) => makes(out, ranks, rank);
                ncclCommInitRankConfig(out: Out, ranks: c_int, id: UniqueId, rank: c_int, config: Ptr) => makes(out, ranks, rank);
                ncclCommInitRankScalable(out: Out, ranks: c_int, rank: c_int, ids: c_int, id: Ptr, config: Ptr) => makes(out, ranks, rank);
                ncclCommInitAll(out: Out, count: c_int, devices: *const c_int) => makes_all(out, count);
                ncclCommSplit(of: Handle, color: c_int, key: c_int, out: Out, config: Ptr) => splits(out);
                ncclCommFinalize(of: Handle) => works(of);
                ncclCommDestroy(of: Handle) => ends(of);
                ncclCommAbort(of: Handle) => ends(of);
                ncclGroupStart() => starts_group();
                ncclGroupEnd() => ends_group();
                ncclAllReduce(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, of: Handle, stream: Handle) => sends(of);
                ncclReduce(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
                ncclReduceScatter(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, of: Handle, stream: Handle) => sends(of);
                ncclAllGather(from: *const c_void, to: Ptr, count: usize, kind: c_int, of: Handle, stream: Handle) => sends(of);
                ncclBroadcast(from: *const c_void, to: Ptr, count: usize, kind: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
                ncclBcast(at: Ptr, count: usize, kind: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
                ncclSend(from: *const c_void, count: usize, kind: c_int, peer: c_int, of: Handle, stream: Handle) => sends(of);
                ncclRecv(to: Ptr, count: usize, kind: c_int, peer: c_int, of: Handle, stream: Handle) => sends(of);
            }
        } }
    };
}
pub(crate) use rows;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_work_it_is_is_told_or_said_to_be_unknown() {
        let other = |f: fn() -> u16| std::thread::spawn(f).join().expect("it ends");
        assert_eq!(at_work(), NONE);
        working(7, || {
            assert_eq!(
                (at_work(), other(at_work)),
                (7, 7),
                "a thread of NCCL's works for the only one"
            );
            assert_eq!(other(|| working(8, at_work)), 8, "a thread knows its own");
            working(8, || assert_eq!(other(at_work), ONE_OF_SEVERAL));
            assert_eq!(other(at_work), ONE_OF_SEVERAL, "until all have ended");
        });
        assert_eq!((at_work(), other(at_work)), (NONE, NONE));
        for (one, two, expected) in
            [(0, 0, 0), (0, 3, 3), (3, 0, 3), (3, 3, 3), (3, 4, ONE_OF_SEVERAL)]
        {
            assert_eq!(merge(one, two), expected);
        }
        GROUP.set((1, NONE));
        defer_to_group(3);
        defer_to_group(3);
        assert_eq!(GROUP.get(), (1, 3));
        defer_to_group(4);
        assert_eq!(GROUP.replace((0, NONE)), (1, ONE_OF_SEVERAL));
        defer_to_group(5);
        assert_eq!(GROUP.get(), (0, NONE), "no group");
    }
}
