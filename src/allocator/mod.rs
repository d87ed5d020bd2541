//! memtrace as PyTorch's CUDA allocator.
//!
//! `torch.cuda.memory.CUDAPluggableAllocator` replaces PyTorch's allocator by two C
//! functions, and PyTorch gives up on statistics, snapshots, streams and the rest. Here
//! stands the same algorithm as its own ([`memtrace_caching`], exact to the address), over
//! the real device ([`device`]), telling the recorder what it does as it does it
//! ([`recording`]). So nothing changes for a program but that everything is recorded.
//! [`hooks`] has the functions that PyTorch calls, [`ask`] those by which the Python package
//! gives back what PyTorch refuses (`python/memtrace/allocator.py`).
//!
//! One lock for each device, as in PyTorch, and nothing wider. The stack is taken before it. What
//! PyTorch would throw is thrown ([`throw`]); a panic of ours ends at the boundary. PyTorch's
//! filters may throw, too, through frames of ours: they are asked before anything is begun.

pub mod ask;
pub mod cuda;
pub mod device;
pub mod failure;
pub mod hooks;
pub mod recording;
pub mod throw;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memtrace_caching::{Allocator, FailureCause, OutOfMemory, Pointers, Settings};
use memtrace_format::event::{NO_STACK, StackId};

use self::device::{Failure, Gpu};
use self::recording::Recording;
use crate::os::locks::{ForkLock, Guard};
use crate::os::message;
use crate::pytorch::{allocator, settings};
use crate::record::guard;
use crate::stack::Site;

/// PyTorch has room for so many devices, too.
pub const MOST_DEVICES: usize = 64;

/// The allocator of one device.
pub struct Owner {
    ordinal: c_int,
    /// The algorithm.
    pub allocator: Allocator<Gpu, Recording>,
    /// What it has handed out.
    pub pointers: Pointers,
}

type Slot = ForkLock<Option<Box<Owner>>>;
static OWNERS: [Slot; MOST_DEVICES] = [const { Slot::new(None) }; MOST_DEVICES];
/// Devices whose allocator has been made, a bit each.
static MADE: AtomicU64 = AtomicU64::new(0);
/// One of them had to be made anew ([`is_one_lost`]).
static LOST: AtomicBool = AtomicBool::new(false);
/// What devices begin with; none before somebody has asked.
static SETTINGS: ForkLock<Option<Settings>> = ForkLock::new(None);

/// Why a request was refused, in the words for the program.
pub struct Refusal {
    /// Which exception it is in PyTorch.
    pub kind: throw::Exception,
    /// The words.
    pub text: String,
    /// What observers of failures are told: bytes asked of the device,
    /// those allowed, those free there.
    pub observed: Option<[u64; 3]>,
}

impl Refusal {
    /// Of something else than memory.
    pub fn error(text: impl Into<String>) -> Refusal {
        Refusal { kind: throw::Exception::Error, text: text.into(), observed: None }
    }
}

/// The settings that a device begins with: those of the environment, until others were set.
fn settings() -> Settings {
    let mut settings = SETTINGS.lock();
    settings.get_or_insert_with(from_environment).clone()
}

fn from_environment() -> Settings {
    // Set to nothing is set.
    let conf = settings::names().iter().find_map(std::env::var_os).unwrap_or_default();
    let parsed = Settings::parse(&settings::meant(&conf.to_string_lossy()));
    // PyTorch reads the same words and refuses them itself.
    parsed.map(|p| p.settings).unwrap_or_default()
}

/// Changes settings, of devices that are there and of those to come.
///
/// # Errors
/// What PyTorch refuses, in its words.
pub fn configure(conf: &str) -> Result<(), String> {
    let mut wanted = settings();
    // What stands before a mistake counts.
    let meant = settings::meant(conf);
    let changed = wanted.change(&meant);
    if changed.is_ok() {
        settings::remember(conf, &meant); // PyTorch's parser is heard only by a library that is preloaded
    }
    if wanted.capture_reuse && conf.contains("graph_capture_record_stream_reuse") {
        message!(
            "graph_capture_record_stream_reuse changes nothing while memtrace is the allocator: what other streams use during \
             a capture waits for its end"
        );
    }
    for mut owner in owners() {
        owner.allocator.set_settings(wanted.clone());
    }
    ask::settings_changed(conf, &wanted);
    *SETTINGS.lock() = Some(wanted);
    changed.map(|_| ()).map_err(|e| e.pytorch)
}

/// The allocator of a device, with its lock.
pub struct Held(Guard<'static, Option<Box<Owner>>>);

impl Held {
    fn of(slot: &'static Slot) -> Option<Held> {
        Some(slot.lock()).filter(|owner| owner.is_some()).map(Held)
    }
}

impl Deref for Held {
    type Target = Owner;
    fn deref(&self) -> &Owner {
        self.0.as_deref().expect("checked when it was made")
    }
}

impl DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Owner {
        self.0.as_deref_mut().expect("checked when it was made")
    }
}

/// The allocator of a device; made if it is not there yet.
pub fn owner(device: c_int) -> Option<Held> {
    let number = usize::try_from(device).ok()?;
    let mut slot = OWNERS.get(number)?.lock();
    if slot.is_none() {
        let allocator = Allocator::new(Gpu::new(device), settings(), Recording::new(device as i8));
        *slot = Some(Box::new(Owner { ordinal: device, allocator, pointers: Pointers::default() }));
        if MADE.fetch_or(1 << number, Ordering::AcqRel) >> number & 1 != 0 {
            LOST.store(true, Ordering::Release);
        }
    }
    Some(Held(slot))
}

fn made() -> impl Iterator<Item = &'static Slot> {
    let made = MADE.load(Ordering::Acquire);
    (0..MOST_DEVICES).filter(move |number| made >> number & 1 != 0).map(|number| &OWNERS[number])
}

/// The allocators that are there, one after the other.
pub fn owners() -> impl Iterator<Item = Held> {
    made().filter_map(Held::of)
}

/// The allocator of a device, if it is there.
pub fn known_owner(device: c_int) -> Option<Held> {
    let number = usize::try_from(device).ok().filter(|n| *n < MOST_DEVICES)?;
    (MADE.load(Ordering::Acquire) >> number & 1 != 0).then(|| Held::of(&OWNERS[number]))?
}

/// Is this the child of a process in which another thread was changing an allocator as it forked?
/// Then nobody knows what that one had handed out.
pub fn is_one_lost() -> bool {
    LOST.load(Ordering::Acquire) || made().any(|slot| slot.lock().is_none())
}

/// Whoever handed out `addr`.
pub fn owner_of(addr: u64) -> Option<Held> {
    owners().find(|owner| owner.pointers.get(addr).is_some())
}

/// The stack of the calling thread, before any lock.
#[inline]
pub fn stack(site: Site) -> StackId {
    let wanted =
        crate::record::switch::recorder().is_some_and(|recorder| recorder.stacks.wanted(site));
    let take = || guard::observe(|recorder, local| recorder.stacks.capture(&local.stacks, site));
    wanted.then(take).flatten().unwrap_or(NO_STACK)
}

/// Runs `f`; a panic in it, which is a fault of ours, is an error that the program gets.
///
/// # Errors
/// Those of `f`.
pub fn bounded<R>(f: impl FnOnce() -> Result<R, Refusal>) -> Result<R, Refusal> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        Err(Refusal::error(
            "memtrace's allocator has failed by a fault of its own; please report it",
        ))
    })
}

impl Owner {
    /// Memory.
    ///
    /// # Errors
    /// There is none, or the device has failed.
    pub fn malloc(&mut self, size: u64, stream: u64, stack: StackId) -> Result<u64, Refusal> {
        self.allocator.device_mut().sees(stream);
        self.allocator.device_mut().take_failure();
        self.allocator.sink_mut().stack = stack;
        match self.pointers.malloc(&mut self.allocator, size, stream) {
            Ok(Some(block)) => {
                self.report(block.addr, block.size as i64);
                Ok(block.addr)
            }
            Ok(None) => Ok(0),
            Err(failure) => Err(self.refusal(&failure)),
        }
    }

    /// And back; says whether it was handed out here.
    pub fn free(&mut self, addr: u64, stack: StackId) -> bool {
        self.allocator.sink_mut().stack = stack;
        // What PyTorch's profiler is told, it is told of its own allocator's blocks, too.
        let size = self.pointers.free(&mut self.allocator, addr);
        size.map(|size| self.report(addr, -(size as i64))).is_ok()
    }

    fn report(&self, addr: u64, change: i64) {
        let allocated = self.allocator.stats().allocated_bytes.all.current as usize;
        let reserved = self.allocator.reserved() as usize;
        allocator::tell_profiler(addr, change, allocated, reserved, self.ordinal as i8);
    }

    fn refusal(&mut self, failure: &OutOfMemory) -> Refusal {
        if let Some(failure) = self.allocator.device_mut().take_failure() {
            return match failure {
                Failure::Runtime(code) => Refusal {
                    kind: throw::Exception::Cuda(code),
                    ..Refusal::error(format!("CUDA error: {}", cuda::words(code)))
                },
                Failure::Driver(code) => {
                    Refusal::error(format!("CUDA driver error: {}", cuda::driver_words(code)))
                }
            };
        }
        let cached = self.allocator.cached_in_private_pools();
        let expandable = self.allocator.settings().expandable_segments;
        let allowed = failure.limit.unwrap_or(failure.device_total);
        Refusal {
            kind: throw::Exception::OutOfMemory,
            text: failure::text(self.ordinal, failure, cached, expandable),
            observed: (failure.why == FailureCause::Exhausted).then_some([
                failure.segment,
                allowed,
                failure.device_free,
            ]),
        }
    }

    /// `torch.cuda.memory_stats()`, flat.
    pub fn stats(&self) -> BTreeMap<String, i64> {
        self.allocator.flat_stats()
    }
}

/// Says a refusal to whoever can't catch it.
pub fn say(refusal: &Refusal) {
    message!("{}", refusal.text);
}
