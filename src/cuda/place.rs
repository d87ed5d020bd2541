//! Which device and which context a call is about.
//!
//! A call about memory rarely says it: it goes to the calling thread's current context, or to the
//! device of a stream or a pool. Earlier calls have said all of that: those that choose a device,
//! push a context or make a stream. So it is remembered here, and CUDA need not be asked. What no
//! call has said is unknown (−1), never guessed.
//!
//! The table of handles has a fixed size, no lock and one word for an entry, which says all by
//! itself. If it is full, what comes later is unknown.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::record::guard;

/// A device that no call has named.
pub const UNKNOWN: i8 = -1;

/// A context: its handle, 0 if no call has named it, and its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The handle.
    pub handle: usize,
    /// The device.
    pub device: i8,
}

/// How many contexts that a thread has pushed onto one another are remembered.
const DEPTH: usize = 16;

struct Contexts {
    top: Cell<usize>,
    stack: [Cell<Context>; DEPTH],
    /// The device that the runtime takes when the driver has no context current.
    runtime: Cell<i8>,
}

thread_local! {
    // Without a destructor, as all words of a thread here.
    static CONTEXTS: Contexts = const {
        Contexts {
            top: Cell::new(0),
            stack: [const { Cell::new(Context { handle: 0, device: 0 }) }; DEPTH],
            runtime: Cell::new(0),
        }
    };
}

fn change(f: impl FnOnce(&Contexts)) {
    CONTEXTS.with(f);
    let device = current().device;
    guard::local(|l| l.device.set(device));
}

/// The calling thread's current context.
pub fn current() -> Context {
    CONTEXTS.with(|c| {
        c.stack.get(c.top.get()).map_or(Context { handle: 0, device: UNKNOWN }, Cell::get)
    })
}

fn set_top(c: &Contexts, context: Context) {
    if let Some(top) = c.stack.get(c.top.get()) {
        top.set(context);
    }
}

/// The runtime chose a device: its primary context is current.
pub fn set_device(device: i8) {
    change(|c| {
        c.runtime.set(device);
        set_top(c, Context { handle: primary(device), device });
    });
}

fn of_context(handle: usize) -> Option<Context> {
    let device = device_of(handle);
    (handle != 0).then_some(Context { handle, device })
}

/// `cuCtxSetCurrent`; 0 takes the current one away.
pub fn set_context(handle: usize) {
    change(|c| {
        let none = Context { handle: 0, device: c.runtime.get() };
        set_top(c, of_context(handle).unwrap_or(none));
    });
}

/// `cuCtxPushCurrent`.
pub fn push(handle: usize) {
    change(|c| {
        c.top.set(c.top.get() + 1);
        set_top(c, of_context(handle).unwrap_or(Context { handle: 0, device: UNKNOWN }));
    });
}

/// `cuCtxPopCurrent`. What was below a thread's first context is no context.
pub fn pop() {
    change(|c| match c.top.get() {
        0 => set_top(c, Context { handle: 0, device: c.runtime.get() }),
        n => c.top.set(n - 1),
    });
}

// --- handles -------------------------------------------------------------------------------------

/// Handles that are remembered at a time: contexts, streams, pools.
const SLOTS: usize = 8192;
/// Slots that one handle may stand in.
const REACH: usize = 64;
/// A slot that has been used.
const FREE_AGAIN: u64 = u64::MAX;
/// A slot holds a handle, with its device above it.
const DEVICE: u32 = 56;
static HANDLES: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];

fn slots(handle: usize) -> impl Iterator<Item = &'static AtomicU64> {
    let first = (handle as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..REACH).map(move |i| &HANDLES[(first as usize + i) % SLOTS])
}

/// Values below are no handles: none, the legacy default stream, the thread's default stream.
fn is_handle(handle: usize) -> bool {
    (3..1 << DEVICE).contains(&handle)
}

fn slot_of(handle: usize) -> Option<(&'static AtomicU64, u64)> {
    slots(handle)
        .map(|slot| (slot, slot.load(Ordering::Acquire)))
        .take_while(|(_, word)| *word != 0)
        .find(|(_, word)| *word != FREE_AGAIN && (*word & ((1 << DEVICE) - 1)) == handle as u64)
}

/// The device of a context, a stream or a pool.
pub fn of(handle: usize) -> Option<i8> {
    if !is_handle(handle) {
        return None;
    }
    slot_of(handle).map(|(_, word)| (word >> DEVICE) as i8)
}

/// The same; [`UNKNOWN`] where no call has said it.
pub fn device_of(handle: usize) -> i8 {
    of(handle).unwrap_or(UNKNOWN)
}

/// This handle belongs to that device.
pub fn remember(handle: usize, device: i8) {
    if !is_handle(handle) {
        return;
    }
    let new = handle as u64 | u64::from(device as u8) << DEVICE;
    if let Some((slot, _)) = slot_of(handle) {
        slot.store(new, Ordering::Release);
        return;
    }
    for slot in slots(handle) {
        let old = slot.load(Ordering::Relaxed);
        let free = old == 0 || old == FREE_AGAIN;
        if free && slot.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// The handle is gone.
pub fn forget(handle: usize) {
    if is_handle(handle)
        && let Some((slot, word)) = slot_of(handle)
    {
        let _ = slot.compare_exchange(word, FREE_AGAIN, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The device of a stream; the current one for a default stream, and for
/// one that no call has made known.
pub fn of_stream(stream: usize) -> i8 {
    of(stream).unwrap_or_else(|| current().device)
}

// --- primary contexts ----------------------------------------------------------------------------

/// Handles by device: a word each, which says all by itself.
static PRIMARY: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// The handle of a device's primary context, 0 if no call has made it known.
pub fn primary(device: i8) -> usize {
    let slot = usize::try_from(device).ok().and_then(|d| PRIMARY.get(d));
    slot.map_or(0, |slot| slot.load(Ordering::Acquire) as usize)
}

/// Is this the handle of a primary context?
pub fn is_primary(handle: usize) -> bool {
    handle != 0 && of(handle).is_some_and(|device| primary(device) == handle)
}

/// This is the handle of a device's primary context.
pub fn remember_primary(handle: usize, device: i8) {
    remember(handle, device);
    if let Some(slot) = usize::try_from(device).ok().and_then(|d| PRIMARY.get(d)) {
        slot.store(handle as u64, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_device_follows_its_contexts() {
        std::thread::spawn(|| {
            assert_eq!(current(), Context { handle: 0, device: 0 });
            remember(0x7000, 1);
            remember_primary(0x8000, 2);
            set_context(0x7000);
            assert_eq!(current(), Context { handle: 0x7000, device: 1 });
            push(0x8000);
            assert_eq!(current(), Context { handle: 0x8000, device: 2 });
            push(0x9000);
            assert_eq!(current(), Context { handle: 0x9000, device: UNKNOWN }, "not guessed");
            pop();
            pop();
            assert_eq!(current().device, 1);
            set_device(2);
            assert_eq!(current(), Context { handle: 0x8000, device: 2 });
            set_context(0);
            assert_eq!(current(), Context { handle: 0, device: 2 });
            for _ in 0..2 * DEPTH {
                push(0x7000);
            }
            assert_eq!(current().device, UNKNOWN, "too deep to know");
            for _ in 0..2 * DEPTH {
                pop();
            }
            assert_eq!(current(), Context { handle: 0, device: 2 });
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn handles_come_and_go() {
        for h in 1..1000 {
            remember(0x10_0000 + h * 64, (h % 7) as i8);
        }
        for h in (1..1000).step_by(2) {
            forget(0x10_0000 + h * 64);
        }
        for h in 1..1000 {
            let expected = (h % 2 == 0).then_some((h % 7) as i8);
            assert_eq!(of(0x10_0000 + h * 64), expected, "{h}");
        }
        assert_eq!((of(0), of(1), of(2)), (None, None, None));
        assert!(!is_primary(0) && !is_primary(0x10_0080));
    }
}
