//! Contexts: what a process holds on a device.
//!
//! Each device has a *primary* context, which the runtime makes at the first call that needs one
//! and the driver API shares by counted references. `cuCtxCreate` makes further ones. Every context
//! costs its device some memory before anything is allocated; how much is in the profile.

use super::error::{Error, Result};
use super::handle::Table;
use super::thread;
pub use super::thread::Current;
use super::{config::machine, kinds, memory};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Context {
    device: usize,
    id: u64,
    flags: u32,
}

#[derive(Clone, Copy, Default)]
struct Primary {
    context: u64,
    /// References that the driver API has taken.
    retained: u32,
    /// The runtime uses it, and keeps it until the device is reset.
    runtime: bool,
    active: bool,
    flags: u32,
}

struct Contexts {
    live: Table<Context>,
    primaries: Vec<Primary>,
    issued: u64,
    /// Pairs of devices (from, to) for which peer access is on.
    peers: Vec<(usize, usize)>,
}

static CONTEXTS: Mutex<Contexts> = Mutex::new(Contexts {
    live: Table::new(kinds::CONTEXT),
    primaries: Vec::new(),
    issued: 0,
    peers: Vec::new(),
});

/// One bit for each device whose primary context is active, for a look without the lock.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

fn contexts() -> MutexGuard<'static, Contexts> {
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if contexts.primaries.is_empty() {
        for device in 0..machine().count() {
            let context = contexts.enter(device, 0);
            contexts.primaries.push(Primary { context, ..Primary::default() });
        }
    }
    contexts
}

impl Contexts {
    fn enter(&mut self, device: usize, flags: u32) -> u64 {
        self.issued += 1;
        self.live.insert(Context { device, id: self.issued, flags })
    }

    fn primary(&mut self, device: usize) -> Result<&mut Primary> {
        self.primaries.get_mut(device).ok_or(Error::INVALID_DEVICE)
    }

    fn activate(&mut self, device: usize, runtime: bool) -> Result<Current> {
        let primary = self.primary(device)?;
        primary.runtime |= runtime;
        if !primary.active {
            account(device)?.take(context_bytes(device))?;
            primary.active = true;
            ACTIVE.fetch_or(1 << device, Relaxed);
        }
        Ok(Current { context: primary.context, device })
    }

    fn deactivate(&mut self, device: usize) -> Result {
        let primary = self.primary(device)?;
        (primary.retained, primary.runtime) = (0, false);
        if primary.active {
            primary.active = false;
            ACTIVE.fetch_and(!(1 << device), Relaxed);
            account(device)?.give(context_bytes(device));
        }
        Ok(())
    }
}

fn account(device: usize) -> Result<memory::Account> {
    super::device(device).map(memory::Account::of)
}

fn context_bytes(device: usize) -> u64 {
    machine().device(device).map_or(0, |gpu| gpu.profile.context_bytes())
}

/// The device's primary context exists.
pub fn is_active(device: usize) -> bool {
    device < 32 && ACTIVE.load(Relaxed) & (1 << device) != 0
}

/// Makes the primary context if it is not there.
pub fn touch(device: usize) -> Result {
    if is_active(device) { Ok(()) } else { contexts().activate(device, true).map(|_| ()) }
}

/// What a runtime call does first: some context is current, and it is on the device it gives.
pub fn bind() -> Result<usize> {
    let device = thread::current_device();
    if let Some(top) = thread::current()
        && (is_active(top.device) || contexts().live.get(top.context).is_some())
    {
        touch(top.device)?;
        return Ok(top.device);
    }
    let primary = contexts().activate(device, true)?;
    thread::with(|thread| thread.contexts.borrow_mut().set_top(Some(primary)));
    Ok(device)
}

/// `cudaSetDevice`.
pub fn set_device(device: usize) -> Result {
    let primary = contexts().activate(device, true)?;
    thread::with(|thread| {
        thread.device.set(device);
        thread.contexts.borrow_mut().set_top(Some(primary));
    });
    Ok(())
}

/// The current context of a driver call, which must have one.
pub fn current() -> Result<Current> {
    thread::current().ok_or(Error::INVALID_CONTEXT)
}

/// The context behind a handle, for `cuCtxSetCurrent` and `cuCtxPushCurrent`. None for no context.
pub fn find(context: u64) -> Result<Option<Current>> {
    if context == 0 {
        return Ok(None);
    }
    let contexts = contexts();
    let found = contexts.live.get(context).ok_or(Error::INVALID_CONTEXT)?;
    Ok(Some(Current { context, device: found.device }))
}

/// A context's id, which no other context of the process has had.
pub fn id(context: u64) -> Result<u64> {
    contexts().live.get(context).map(|found| found.id).ok_or(Error::INVALID_CONTEXT)
}

/// A context's flags.
pub fn flags(context: u64) -> Result<u32> {
    contexts().live.get(context).map(|found| found.flags).ok_or(Error::INVALID_CONTEXT)
}

/// The handle of a device's primary context, active or not.
pub fn primary(device: usize) -> Result<u64> {
    contexts().primary(device).map(|primary| primary.context)
}

/// `cuDevicePrimaryCtxRetain`.
pub fn retain(device: usize) -> Result<u64> {
    let mut contexts = contexts();
    let primary = contexts.activate(device, false)?;
    contexts.primary(device)?.retained += 1;
    Ok(primary.context)
}

/// `cuDevicePrimaryCtxRelease`. The last reference takes the context with it.
pub fn release(device: usize) -> Result {
    let last = {
        let mut contexts = contexts();
        let primary = contexts.primary(device)?;
        primary.retained = primary.retained.checked_sub(1).ok_or(Error::INVALID_CONTEXT)?;
        primary.retained == 0 && !primary.runtime
    };
    if last { reset(device) } else { Ok(()) }
}

/// `cudaDeviceReset`, `cuDevicePrimaryCtxReset`: everything on the device goes.
pub fn reset(device: usize) -> Result {
    super::work::reset(device);
    let primary = primary(device)?;
    memory::ledger().reset(device, primary);
    contexts().deactivate(device)
}

/// `cuDevicePrimaryCtxGetState`: flags and whether it is active.
pub fn primary_state(device: usize) -> Result<(u32, bool)> {
    contexts().primary(device).map(|primary| (primary.flags, primary.active))
}

/// `cuDevicePrimaryCtxSetFlags`, `cudaSetDeviceFlags`.
pub fn set_primary_flags(device: usize, flags: u32) -> Result {
    let mut contexts = contexts();
    let primary = contexts.primary(device)?;
    primary.flags = flags;
    let context = primary.context;
    if let Some(found) = contexts.live.get_mut(context) {
        found.flags = flags;
    }
    Ok(())
}

/// `cuCtxCreate`: a further context on a device, current in this thread.
pub fn create(device: usize, flags: u32) -> Result<u64> {
    account(device)?.take(context_bytes(device))?;
    let context = contexts().enter(device, flags);
    push(Some(Current { context, device }))?;
    Ok(context)
}

/// `cuCtxDestroy`: not for primary contexts.
pub fn destroy(context: u64) -> Result {
    let mut contexts = contexts();
    if contexts.primaries.iter().any(|primary| primary.context == context) {
        return Err(Error::INVALID_CONTEXT);
    }
    let gone = contexts.live.remove(context).ok_or(Error::INVALID_CONTEXT)?;
    account(gone.device)?.give(context_bytes(gone.device));
    drop(contexts);
    memory::ledger().destroy(context);
    if thread::current().is_some_and(|top| top.context == context) {
        pop()?;
    }
    Ok(())
}

/// `cuCtxPushCurrent`.
pub fn push(context: Option<Current>) -> Result {
    let pushed = thread::with(|thread| thread.contexts.borrow_mut().push(context));
    if pushed { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

/// `cuCtxPopCurrent`.
pub fn pop() -> Result<Option<Current>> {
    thread::with(|thread| thread.contexts.borrow_mut().pop()).ok_or(Error::INVALID_CONTEXT)
}

/// `cuCtxSetCurrent`.
pub fn set_current(context: Option<Current>) {
    thread::with(|thread| thread.contexts.borrow_mut().set_top(context));
}

/// Turns access from one device to another on.
pub fn enable_peer(from: usize, to: usize) -> Result {
    super::device(to)?;
    let mut contexts = contexts();
    if from == to {
        Err(Error::INVALID_DEVICE)
    } else if contexts.peers.contains(&(from, to)) {
        Err(Error::PEER_ACCESS_ALREADY_ENABLED)
    } else {
        contexts.peers.push((from, to));
        Ok(())
    }
}

/// Turns access from one device to another off.
pub fn disable_peer(from: usize, to: usize) -> Result {
    super::device(to)?;
    let mut contexts = contexts();
    let place = contexts.peers.iter().position(|pair| *pair == (from, to));
    contexts.peers.remove(place.ok_or(Error::PEER_ACCESS_NOT_ENABLED)?);
    Ok(())
}
