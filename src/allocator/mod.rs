//! memtrace as PyTorch's CUDA allocator.
//!
//! `torch.cuda.memory.CUDAPluggableAllocator` replaces PyTorch's allocator by two C functions, and
//! PyTorch gives up on statistics, snapshots, streams and the rest. Here the same algorithm as its
//! own ([`memtrace_caching`], exact to the address) runs over the real device ([`device`]). It
//! records what it does as it does it ([`recording`]). So nothing changes for a program but that
//! everything is recorded. [`hooks`] has the functions that PyTorch calls, [`ask`] those by which
//! the Python package gives back what PyTorch refuses (`python/memtrace/allocator.py`).
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
pub const MAX_DEVICES: usize = 64;

/// The allocator of one device.
pub struct DeviceAllocator {
    ordinal: c_int,
    /// The algorithm.
    pub algorithm: Allocator<Gpu, Recording>,
    /// What it has handed out.
    pub pointers: Pointers,
}

type Slot = ForkLock<Option<Box<DeviceAllocator>>>;
static ALLOCATORS: [Slot; MAX_DEVICES] = [const { Slot::new(None) }; MAX_DEVICES];
/// Devices whose allocator has been made, a bit each. The allocators themselves are behind locks.
static MADE: AtomicU64 = AtomicU64::new(0);
/// One of them had to be made anew ([`is_one_lost`]).
static LOST: AtomicBool = AtomicBool::new(false);
/// What devices begin with; none before somebody has asked.
static SETTINGS: ForkLock<Option<Settings>> = ForkLock::new(None);

/// Why a request was refused, with the text for the program.
pub struct Refusal {
    /// Which exception it is in PyTorch.
    pub kind: throw::Exception,
    /// The words.
    pub text: String,
    /// What observers of failures get: bytes asked of the device, those allowed, those free there.
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
        settings::remember(conf, &meant); // its parser is seen only by a preloaded library
    }
    if wanted.capture_reuse && conf.contains("graph_capture_record_stream_reuse") {
        message!(
            "graph_capture_record_stream_reuse changes nothing while memtrace is the allocator: what other streams use during \
             a capture waits for its end"
        );
    }
    for mut allocator in allocators() {
        allocator.algorithm.set_settings(wanted.clone());
    }
    ask::settings_changed(conf, &wanted);
    *SETTINGS.lock() = Some(wanted);
    changed.map(|_| ()).map_err(|e| e.pytorch)
}

/// The allocator of a device, with its lock.
pub struct Locked(Guard<'static, Option<Box<DeviceAllocator>>>);

impl Locked {
    fn of(slot: &'static Slot) -> Option<Locked> {
        Some(slot.lock()).filter(|allocator| allocator.is_some()).map(Locked)
    }
}

impl Deref for Locked {
    type Target = DeviceAllocator;
    fn deref(&self) -> &DeviceAllocator {
        self.0.as_deref().expect("checked when it was made")
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut DeviceAllocator {
        self.0.as_deref_mut().expect("checked when it was made")
    }
}

/// The allocator of a device; made if it is not there yet.
pub fn device_allocator(device: c_int) -> Option<Locked> {
    let number = usize::try_from(device).ok()?;
    let mut slot = ALLOCATORS.get(number)?.lock();
    if slot.is_none() {
        let algorithm = Allocator::new(Gpu::new(device), settings(), Recording::new(device as i8));
        *slot = Some(Box::new(DeviceAllocator {
            ordinal: device,
            algorithm,
            pointers: Pointers::default(),
        }));
        if MADE.fetch_or(1 << number, Ordering::AcqRel) >> number & 1 != 0 {
            LOST.store(true, Ordering::Release);
        }
    }
    Some(Locked(slot))
}

fn made() -> impl Iterator<Item = &'static Slot> {
    let made = MADE.load(Ordering::Acquire);
    (0..MAX_DEVICES).filter(move |number| made >> number & 1 != 0).map(|number| &ALLOCATORS[number])
}

/// The allocators that are there, one after the other.
pub fn allocators() -> impl Iterator<Item = Locked> {
    made().filter_map(Locked::of)
}

/// The allocator of a device, if it is there.
pub fn existing_allocator(device: c_int) -> Option<Locked> {
    let number = usize::try_from(device).ok().filter(|n| *n < MAX_DEVICES)?;
    (MADE.load(Ordering::Acquire) >> number & 1 != 0).then(|| Locked::of(&ALLOCATORS[number]))?
}

/// Is this the child of a process in which another thread was changing an allocator as it forked?
/// Then nobody knows what that one had handed out.
pub fn is_one_lost() -> bool {
    LOST.load(Ordering::Acquire) || made().any(|slot| slot.lock().is_none())
}

/// The allocator that handed out `addr`.
pub fn allocator_of(addr: u64) -> Option<Locked> {
    allocators().find(|allocator| allocator.pointers.get(addr).is_some())
}

/// The stack of the calling thread, before any lock.
#[inline]
pub fn stack(site: Site) -> StackId {
    let wanted =
        crate::record::switch::recorder().is_some_and(|recorder| recorder.stacks.wanted(site));
    let take = || guard::observe(|recorder, local| recorder.stacks.capture(&local.stacks, site));
    wanted.then(take).flatten().unwrap_or(NO_STACK)
}

/// Runs `f`. A panic in it is a fault of ours, and becomes an error that the program gets.
///
/// # Errors
/// Those of `f`.
pub fn without_panic<R>(f: impl FnOnce() -> Result<R, Refusal>) -> Result<R, Refusal> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        Err(Refusal::error(
            "memtrace's allocator has failed by a fault of its own; please report it",
        ))
    })
}

impl DeviceAllocator {
    /// Allocates.
    ///
    /// # Errors
    /// There is none, or the device has failed.
    pub fn malloc(&mut self, size: u64, stream: u64, stack: StackId) -> Result<u64, Refusal> {
        self.algorithm.device_mut().note_stream(stream);
        self.algorithm.device_mut().take_failure();
        self.algorithm.sink_mut().stack = stack;
        match self.pointers.malloc(&mut self.algorithm, size, stream) {
            Ok(Some(block)) => {
                self.report(block.addr, block.size as i64);
                Ok(block.addr)
            }
            Ok(None) => Ok(0),
            Err(failure) => Err(self.refusal(&failure)),
        }
    }

    /// Frees; returns whether the block was handed out here.
    pub fn free(&mut self, addr: u64, stack: StackId) -> bool {
        self.algorithm.sink_mut().stack = stack;
        // PyTorch reports its own allocator's blocks to its profiler in the same way.
        let size = self.pointers.free(&mut self.algorithm, addr);
        size.map(|size| self.report(addr, -(size as i64))).is_ok()
    }

    fn report(&self, addr: u64, change: i64) {
        let allocated = self.algorithm.stats().allocated_bytes.all.current as usize;
        let reserved = self.algorithm.reserved() as usize;
        allocator::report_to_profiler(addr, change, allocated, reserved, self.ordinal as i8);
    }

    fn refusal(&mut self, failure: &OutOfMemory) -> Refusal {
        if let Some(failure) = self.algorithm.device_mut().take_failure() {
            return match failure {
                Failure::Runtime(code) => Refusal {
                    kind: throw::Exception::Cuda(code),
                    ..Refusal::error(format!("CUDA error: {}", cuda::error_text(code)))
                },
                Failure::Driver(code) => {
                    Refusal::error(format!("CUDA driver error: {}", cuda::driver_error_text(code)))
                }
            };
        }
        let cached = self.algorithm.cached_in_private_pools();
        let expandable = self.algorithm.settings().expandable_segments;
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
        self.algorithm.flat_stats()
    }
}

/// Prints a refusal for a caller that can't catch an exception.
pub fn warn(refusal: &Refusal) {
    message!("{}", refusal.text);
}
