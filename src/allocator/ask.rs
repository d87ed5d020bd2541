//! What the Python package asks the allocator: statistics, state, settings, pools.
//!
//! Answers that are more than a number are JSON in a C string, to be given back by
//! [`memtrace_string_free`]. Errors are C strings too, null where all is well. Not for
//! hooks: this may take as long as it takes.

use std::ffi::{CStr, CString, c_char, c_int};

use memtrace_caching::conf::from_conf;
use memtrace_caching::{Misuse, Settings};
use memtrace_format::snapshot::Segment;
use serde_json::{Value, json};

use super::device::{Free, Malloc, Source};
use super::{DeviceAllocator, allocators, configure, device_allocator};
use crate::os::clock;
use crate::os::locks::ForkLock;

fn string(text: String) -> *mut c_char {
    CString::new(text).map_or(std::ptr::null_mut(), CString::into_raw)
}

// --- What the Python package asks the allocator --- These go with the package of the same version
// and may change with the next. Answers that are strings are JSON, or what is wrong, and go back to
// memtrace_string_free; NULL is none.

/// Gives a string back that one of these functions returned.
///
/// # Safety
/// `text` is null or such a string, which is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// `torch.cuda.memory_stats(device)`, flat, as JSON.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_stats(device: c_int) -> *mut c_char {
    device_allocator(device)
        .map_or(std::ptr::null_mut(), |allocator| string(json!(allocator.stats()).to_string()))
}

/// All segments with their blocks, as `torch.cuda.memory._snapshot()` lists them, as JSON; of one
/// pool, unless its id is (0, 0). Unless `quiet`, the trace says that somebody looked.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_segments(
    first: u64,
    second: u64,
    quiet: c_int,
) -> *mut c_char {
    let id = (first, second);
    let mut list = Vec::new();
    for mut allocator in allocators() {
        let segments = allocator.algorithm.segments(i64::from(allocator.ordinal));
        let wanted = segments.iter().filter(|s| id == (0, 0) || s.pool_id == id);
        list.extend(wanted.map(segment));
        if quiet == 0 {
            let active = allocator.algorithm.stats().active_bytes.all.current as u64;
            allocator.algorithm.sink_mut().snapshot(active, id);
        }
    }
    string(Value::Array(list).to_string())
}

fn segment(s: &Segment) -> Value {
    let blocks = s.blocks.iter().map(|b| {
        json!({
            "address": b.address,
            "size": b.size,
            "requested_size": b.requested_size,
            "state": b.state.name(),
            "frames": [],
        })
    });
    json!({
        "device": s.device,
        "address": s.address,
        "total_size": s.total_size,
        "allocated_size": s.allocated_size,
        "active_size": s.active_size,
        "requested_size": s.requested_size,
        "stream": s.stream,
        "segment_type": if s.small { "small" } else { "large" },
        "segment_pool_id": [s.pool_id.0, s.pool_id.1],
        "is_expandable": s.is_expandable,
        "frames": [],
        "blocks": blocks.collect::<Vec<_>>(),
    })
}

/// A moment between events, in microseconds since 1970: everything recorded before has at most this
/// time, everything recorded afterwards a later one.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_now_us() -> u64 {
    let now = clock::now_ns() / 1000;
    while clock::now_ns() / 1000 <= now {
        std::thread::sleep(std::time::Duration::from_micros(2));
    }
    now
}

/// `torch.cuda.reset_peak_memory_stats(device)`.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_reset_peak(device: c_int) {
    if let Some(mut allocator) = device_allocator(device) {
        allocator.algorithm.stats_mut().reset_peak();
    }
}

/// `torch.cuda.reset_accumulated_memory_stats(device)`.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_reset_accumulated(device: c_int) {
    if let Some(mut allocator) = device_allocator(device) {
        allocator.algorithm.stats_mut().reset_accumulated();
    }
}

/// The fraction of a device's memory that may be used.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_fraction(device: c_int) -> f64 {
    device_allocator(device).map_or(1.0, |allocator| allocator.algorithm.memory_fraction())
}

/// Changes settings, as `PYTORCH_CUDA_ALLOC_CONF` has them. Returns null,
/// or PyTorch's words of refusal.
///
/// # Safety
/// `conf` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_allocator_configure(conf: *const c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    let conf = unsafe { CStr::from_ptr(conf) }.to_string_lossy();
    configure(&conf).map_or_else(string, |()| std::ptr::null_mut())
}

/// The `allocator_settings` of a snapshot; null before the first change.
static SHOWN: ForkLock<Value> = ForkLock::new(Value::Null);

/// Settings about host memory, which are PyTorch's: kept as it keeps them.
const OF_THE_HOST: [(&str, &str); 5] = [
    ("pinned_num_register_threads", "pinned_num_register_threads"),
    ("release_lock_on_", "release_lock_on_cudamalloc"),
    ("pinned_use_", "pinned_use_cuda_host_register"),
    ("pinned_max_round_threshold_mb", "max_round_threshold"),
    ("pinned_max_cached_size_mb", "max_cached_size"),
];

/// These settings are in force, after `conf` was set.
pub fn settings_changed(conf: &str, now: &Settings) {
    let mut shown = from_conf(conf);
    let mut last = SHOWN.lock();
    for (said_as, key) in OF_THE_HOST {
        if !last.is_null() && !conf.contains(said_as) {
            shown[key] = last[key].clone();
        }
    }
    shown["max_split_size"] = json!(now.max_split_size as i64); // none is −1
    shown["garbage_collection_threshold"] = json!(now.garbage_collection_threshold);
    shown["expandable_segments"] = json!(now.expandable_segments);
    shown["graph_capture_record_stream_reuse"] = json!(now.capture_reuse);
    for (i, divisions) in now.roundup_power2_divisions.into_iter().enumerate() {
        shown["roundup_power2_divisions"][(1_u32 << i).to_string()] = json!(divisions);
    }
    *last = shown;
}

/// The `allocator_settings` of a snapshot, as JSON; `null` before [`memtrace_allocator_configure`].
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_settings() -> *mut c_char {
    string(SHOWN.lock().to_string())
}

/// What can be done to a pool.
#[derive(Clone, Copy)]
enum PoolAction {
    Hold,
    Release,
    Empty,
    UseOnOom,
    NoSplit,
}

impl PoolAction {
    fn named(name: &CStr) -> Option<PoolAction> {
        Some(match name.to_bytes() {
            b"hold" => PoolAction::Hold,
            b"release" => PoolAction::Release,
            b"empty" => PoolAction::Empty,
            b"use_on_oom" => PoolAction::UseOnOom,
            b"no_split" => PoolAction::NoSplit,
            _ => return None,
        })
    }

    fn apply(self, allocator: &mut DeviceAllocator, id: (u64, u64)) -> Result<(), Misuse> {
        let algorithm = &mut allocator.algorithm;
        match self {
            PoolAction::Hold => algorithm.hold_pool(id),
            PoolAction::Release => algorithm.release_pool(id),
            PoolAction::Empty => {
                algorithm.empty_pool(id);
                Ok(())
            }
            PoolAction::UseOnOom => algorithm.set_use_on_oom(id, true),
            PoolAction::NoSplit => algorithm.set_no_split(id),
        }
    }
}

/// Does something to a pool: `hold` (make it), `release`, `empty`, `use_on_oom`,
/// `no_split`. Returns null, or what is wrong.
///
/// # Safety
/// `wish` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_allocator_pool(
    device: c_int,
    first: u64,
    second: u64,
    wish: *const c_char,
) -> *mut c_char {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(wish) };
    let Some(action) = PoolAction::named(name) else {
        return string(format!("a pool can't be told to {}", name.to_string_lossy()));
    };
    let Some(mut allocator) = device_allocator(device) else {
        return string(format!("there is no device {device}"));
    };
    action
        .apply(&mut allocator, (first, second))
        .map_or_else(|e| string(e.to_string()), |()| std::ptr::null_mut())
}

/// Segments of a pool come from these functions, with PyTorch's
/// signatures. Returns null, or what is wrong.
///
/// # Safety
/// They are such functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_allocator_pool_source(
    device: c_int,
    first: u64,
    second: u64,
    malloc: Option<Malloc>,
    free: Option<Free>,
) -> *mut c_char {
    let Some(mut allocator) = device_allocator(device) else {
        return string(format!("there is no device {device}"));
    };
    let (Some(malloc), Some(free)) = (malloc, free) else {
        return string("a pool's allocator needs both its functions".to_owned());
    };
    let id = (first, second);
    if let Err(e) = allocator.algorithm.set_own_allocator(id) {
        return string(e.to_string());
    }
    allocator.algorithm.device_mut().sources.insert(id, Source { malloc, free });
    std::ptr::null_mut()
}

/// How many hold a pool; −1 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_pool_uses(device: c_int, first: u64, second: u64) -> i64 {
    let uses = device_allocator(device)
        .and_then(|allocator| allocator.algorithm.pool_uses((first, second)));
    uses.map_or(-1, |n| n as i64)
}

type Observer = unsafe extern "C-unwind" fn(i64, u64, u64, u64);

static OBSERVERS: ForkLock<Vec<Observer>> = ForkLock::new(Vec::new());

/// From now on `observer(device, bytes asked of the device, bytes allowed, bytes free
/// there)` is called when memory has run out. It is called in the thread that wanted memory,
/// before that thread gets its answer.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_allocator_observe_oom(observer: Observer) {
    OBSERVERS.lock().push(observer);
}

/// Calls the observers, without any lock.
pub fn observe(device: c_int, segment: u64, allowed: u64, free: u64) {
    let observers = OBSERVERS.lock().clone();
    for observer in observers {
        // SAFETY: a function of the program's with this signature.
        unsafe { observer(i64::from(device), segment, allowed, free) };
    }
}
