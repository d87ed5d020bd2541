//! Which devices this process has entered, and what the driver said of them to the program.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memtrace_format::event::{Event, Kind, Layer, MeasuredEvent};

use crate::cuda::under_way::write_measured;
use crate::cuda::{place, resolve};
use crate::real::Real;
use crate::record::guard;
use crate::record::guard::event;
use crate::record::hook::{HookCall, Tier};
use crate::stack::Site;

/// One bit for each device that this process has entered, which says all by itself.
static ENTERED: AtomicU64 = AtomicU64::new(0);

/// Has this process entered a device?
pub fn has_entered(device: i8) -> bool {
    (0..64).contains(&device) && ENTERED.load(Ordering::Relaxed) & (1 << device) != 0
}

/// Has it entered any?
pub fn any_entered() -> bool {
    ENTERED.load(Ordering::Relaxed) != 0
}

/// A forked child begins anew.
pub fn forget_entered() {
    ENTERED.store(0, Ordering::Relaxed);
}

/// This call has chosen a device or taken memory of it: its primary context is there
/// from now on, whoever makes it. The first such call is worth knowing, since a
/// context takes hundreds of megabytes.
pub(super) fn note_entered(hook: HookCall, device: i8) {
    if !(0..64).contains(&device) || has_entered(device) {
        return;
    }
    guard::observe(|recorder, local| {
        if ENTERED.fetch_or(1 << device, Ordering::Relaxed) & (1 << device) == 0 {
            let stack = recorder.stacks.capture_call(&local.stacks, Site::Alloc, hook.caller);
            let api = hook.api;
            recorder.write(&Event {
                api,
                device,
                stack,
                ..event(local, Event::new(Kind::Entered, Layer::Device))
            });
            recorder.mailbox.measure();
        }
    });
}

/// The program asked how much of the current device is free. `before`: [`at_rest`] before it asked.
pub(super) unsafe fn queries_free(
    hook: HookCall,
    code: c_int,
    (free, total): (*const usize, *const usize),
    before: Option<u64>,
) {
    if code != 0 || free.is_null() || total.is_null() {
        return;
    }
    // SAFETY: the caller's out-parameters, which a successful call has filled.
    let (free, total) = unsafe { (*free as u64, *total as u64) };
    guard::observe(|recorder, local| {
        let said = MeasuredEvent { used: total.saturating_sub(free), total, by: None };
        let (api, device) = (hook.api, place::current().device);
        let said = Event { api, device, ..event(local, said.event()) };
        write_measured(recorder, before, &said);
    });
}

/// Bytes that the current device has free, when a request has just failed and its
/// driver is asked anyway; 0 if it doesn't say. The only call of ours in a hook: a
/// later answer would be about another moment.
#[cold]
pub(super) fn free_now() -> u64 {
    type Ask = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
    static REAL: Real = Real::new();
    let Some(real) = resolve::real(&REAL, "cuMemGetInfo_v2", "libcuda.so") else { return 0 };
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver's function of that name has this signature; the places are ours.
    let code = unsafe {
        let ask: Ask = std::mem::transmute(real);
        ask(&raw mut free, &raw mut total)
    };
    if code == 0 { free as u64 } else { 0 }
}

/// The runtime has been used: it keeps primary contexts as long as it likes.
static RUNTIME: AtomicBool = AtomicBool::new(false);

/// Has the runtime been used, or a library above it?
pub fn is_runtime_used() -> bool {
    RUNTIME.load(Ordering::Relaxed)
}

/// Notes that this call was made.
pub(super) fn note_call(hook: HookCall) {
    if hook.tier != Tier::Driver && !RUNTIME.load(Ordering::Relaxed) {
        RUNTIME.store(true, Ordering::Relaxed);
    }
}
