//! What the devices themselves say of how full they are.
//!
//! Contexts, modules and graphs take memory that no call names. It shows in the difference between
//! what a device says is in use and what the ledger has. So the devices are asked now and then, and
//! the answer is recorded as an event among the others. There the ledger of that very moment is
//! known (`memtrace_snapshot` puts both side by side).
//!
//! NVIDIA's management library (NVML) is asked, which needs no context and disturbs no
//! stream. It is never asked in a hook. The background thread asks when something without a
//! size has come or gone, and whoever writes a snapshot does. A machine without it has just
//! the answers that pass by (`cudaMemGetInfo`).
//!
//! An allocation is in the ledger a moment after the device has made it. So a measurement counts
//! only if no call about memory is under way ([`under_way::at_rest`]). It must also get the
//! place in the order of events that it had then ([`under_way::write_measured`]). If there is no
//! such moment, it is tried again later.
//!
//! NVML is opened by a thread of its own: the loader's lock may be held by somebody who waits for
//! the background thread. Others wait for that one for a moment only.
//!
//! CUDA's number of a device is not NVML's; both know its PCI address. That is asked of the driver
//! once, by a call that needs no context either.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::time::Duration;

use memtrace_format::event::{Event, MeasuredEvent};

use crate::cuda::{devices, under_way};
use crate::libraries::scopes;
use crate::libraries::{list, loaded, next};
use crate::os::clock;
use crate::os::locks::ForkLock;
use crate::os::{futex, memory, threads};
use crate::process::Process;
use crate::process::last;
use crate::record::guard::event;
use crate::record::{Recorder, guard};

type Handle = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, as the second and third version of the question have it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    instances: [c_uint; 2],
}

/// NVML doesn't know.
const NOT_AVAILABLE: u64 = u64::MAX;

/// How many processes of one device are listed.
const PROCESSES: usize = 128;

type ByAddress = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
type MemoryOf = unsafe extern "C" fn(Handle, *mut Memory) -> c_int;
type ProcessesOf = unsafe extern "C" fn(Handle, *mut c_uint, *mut ProcessInfo) -> c_int;

/// NVML's functions.
struct Nvml {
    by_address: ByAddress,
    memory: MemoryOf,
    processes: ProcessesOf,
}

/// What is known of one device.
struct Device {
    handle: usize,
    /// What was written last: in use, by this process, by others.
    last: Option<(u64, Option<(u64, u64)>)>,
}

struct Devices {
    nvml: Option<&'static Nvml>,
    devices: Vec<Option<Device>>,
}

/// The devices of one recorder, found at the first question.
#[derive(Default)]
pub struct MeasuredDevices(ForkLock<Option<Devices>>);

/// Asks every device that this process has entered, and writes down what is new. Not for hooks.
pub fn sample(process: &Process) {
    let recorder = &process.recorder;
    if !devices::any_entered() {
        return;
    }
    guard::nested(|| {
        let mut devices = process.measured.0.lock();
        if devices.is_none() && !is_open() {
            recorder.mailbox.measure_later();
            return;
        }
        let Devices { nvml: Some(nvml), devices } = devices.get_or_insert_with(Devices::find)
        else {
            return;
        };
        for (ordinal, device) in devices.iter_mut().enumerate() {
            if let Some(device) = device
                && !device.sample(nvml, recorder, ordinal as i8)
            {
                recorder.mailbox.measure_later();
            }
        }
    });
}

/// Which processes have how much on the device with this PCI address; none
/// if NVML doesn't say. Not for hooks.
pub fn processes_at(address: &[c_char; 32]) -> Vec<(u32, u64)> {
    let Some(nvml) = nvml() else { return Vec::new() };
    let mut handle: Handle = std::ptr::null_mut();
    // SAFETY: CUDA wrote the address, a C string; the handle is ours.
    let known = unsafe { (nvml.by_address)(address.as_ptr(), &raw mut handle) } == 0;
    if known { nvml.list(handle) } else { Vec::new() }
}

impl Devices {
    fn find() -> Devices {
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Address = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
        let mut found = Devices { nvml: nvml(), devices: Vec::new() };
        let Some(nvml) = found.nvml else { return found };
        let driver = |name: &CStr| scopes::loaded_symbol("libcuda.so", name);
        let (Some(count), Some(address)) =
            (driver(c"cuDeviceGetCount"), driver(c"cuDeviceGetPCIBusId"))
        else {
            return found;
        };
        // SAFETY: the driver's functions of these names have these signatures;
        // neither needs a context, and a driver that isn't initialised says so. The
        // buffers are ours and as long as is said.
        unsafe {
            let count: Count = std::mem::transmute(count.as_ptr());
            let address: Address = std::mem::transmute(address.as_ptr());
            let mut n = 0;
            if count(&raw mut n) != 0 {
                return found;
            }
            for ordinal in 0..n.min(64) {
                let mut text: [c_char; 32] = [0; 32];
                let mut handle: Handle = std::ptr::null_mut();
                let known = address(text.as_mut_ptr(), 31, ordinal) == 0
                    && (nvml.by_address)(text.as_ptr(), &raw mut handle) == 0;
                let device = Device { handle: handle as usize, last: None };
                found.devices.push(known.then_some(device));
            }
        }
        found
    }
}

/// Whether NVML has been opened: not yet, being opened, or done, which is said
/// when [`NVML`] is set. A futex word.
static STATE: AtomicU32 = AtomicU32::new(CLOSED);
const CLOSED: u32 = 0;
const OPENING: u32 = 1;
const OPEN: u32 = 2;
/// Null where there is none.
static NVML: AtomicPtr<Nvml> = AtomicPtr::new(std::ptr::null_mut());

/// How long anybody waits for it to be opened.
const TIMEOUT_NS: u64 = 1_000_000_000;

/// In a forked child no thread is opening it, and what the parent has opened is the parent's.
pub fn forget_others() {
    STATE.store(CLOSED, Ordering::Release);
}

/// NVML and its driver don't fit into less. Where so little is left, the thread that
/// tries to open it would fail. And it would take an arena of the C library's from the
/// program, which is 64 MiB of addresses.
const ROOM: u64 = 1 << 30;

/// NVML's library, by its documented name.
const LIBRARY: &CStr = c"libnvidia-ml.so.1";

/// May the loader be asked for it? In a forked child that isn't certain, but perhaps it is there.
fn may_load() -> bool {
    let is_there = || LIBRARY.to_str().is_ok_and(|name| loaded::loaded(name).is_some());
    list::may_load() && (list::may_search() || is_there())
}

/// Opens NVML, unless that was done. Says whether it is, after a moment at most.
fn is_open() -> bool {
    if STATE.load(Ordering::Acquire) != OPEN && (memory::left().0 < ROOM || !may_load()) {
        return false;
    }
    let first = STATE.compare_exchange(CLOSED, OPENING, Ordering::AcqRel, Ordering::Acquire);
    // The C library ends the process with its last thread. If no other thread is left, that
    // would be one that is made here, in the middle of the last snapshot. In that case
    // nobody holds the loader's lock either.
    let alone = || last::is_this_thread();
    // SAFETY: the thread takes no argument.
    if first.is_ok() && (alone() || !unsafe { threads::start(open, std::ptr::null_mut()) }) {
        open(std::ptr::null_mut());
    }
    let end = clock::now_ns() + TIMEOUT_NS;
    while STATE.load(Ordering::Acquire) == OPENING && clock::now_ns() < end {
        futex::sleep_on(&STATE, OPENING);
    }
    STATE.load(Ordering::Acquire) == OPEN
}

extern "C" fn open(_: *mut c_void) -> *mut c_void {
    // What this thread does is none of the program's doing.
    guard::nested(|| {
        let found = std::panic::catch_unwind(Nvml::open).ok().flatten();
        let found = found.map_or(std::ptr::null_mut(), |nvml| Box::into_raw(Box::new(nvml)));
        NVML.store(found, Ordering::Release);
        STATE.store(OPEN, Ordering::Release);
        futex::wake_all(&STATE);
    });
    std::ptr::null_mut()
}

fn nvml() -> Option<&'static Nvml> {
    // SAFETY: null, or never freed.
    if is_open() { unsafe { NVML.load(Ordering::Acquire).as_ref() } } else { None }
}

impl Nvml {
    fn open() -> Option<Nvml> {
        type Init = unsafe extern "C" fn() -> c_int;
        // SAFETY: NVML's library, opened by its documented name and never closed; its functions
        // of these names have these signatures.
        unsafe {
            let library = libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY);
            if library.is_null() {
                return None;
            }
            let find =
                |name: &CStr| Some(next::really(library, name, None)).filter(|f| !f.is_null());
            let init: Init = std::mem::transmute(find(c"nvmlInit_v2")?);
            let processes = find(c"nvmlDeviceGetComputeRunningProcesses_v3")
                .or_else(|| find(c"nvmlDeviceGetComputeRunningProcesses_v2"))?;
            let nvml = Nvml {
                by_address: std::mem::transmute::<*mut c_void, ByAddress>(find(
                    c"nvmlDeviceGetHandleByPciBusId_v2",
                )?),
                memory: std::mem::transmute::<*mut c_void, MemoryOf>(find(
                    c"nvmlDeviceGetMemoryInfo",
                )?),
                processes: std::mem::transmute::<*mut c_void, ProcessesOf>(processes),
            };
            (init() == 0).then_some(nvml)
        }
    }

    /// Total and used bytes of a device.
    fn memory(&self, device: Handle) -> Option<Memory> {
        let mut memory = Memory::default();
        // SAFETY: a handle of NVML's, and a record of ours.
        (unsafe { (self.memory)(device, &raw mut memory) } == 0).then_some(memory)
    }

    /// What each process has on a device, as far as NVML knows.
    fn list(&self, device: Handle) -> Vec<(u32, u64)> {
        let mut list = [ProcessInfo::default(); PROCESSES];
        let mut n = PROCESSES as c_uint;
        // SAFETY: as in `processes`.
        if unsafe { (self.processes)(device, &raw mut n, list.as_mut_ptr()) } != 0 {
            return Vec::new();
        }
        list[..(n as usize).min(PROCESSES)].iter().map(|p| (p.pid, p.used)).collect()
    }

    /// Bytes of this process and of others; `None` if NVML doesn't know (in
    /// another process namespace, for example).
    fn processes(&self, device: Handle) -> Option<(u64, u64)> {
        let mut list = [ProcessInfo::default(); PROCESSES];
        let mut n = PROCESSES as c_uint;
        // SAFETY: a handle of NVML's, and a list of ours with room for so many.
        if unsafe { (self.processes)(device, &raw mut n, list.as_mut_ptr()) } != 0 {
            return None;
        }
        let list = &list[..(n as usize).min(PROCESSES)];
        if list.iter().any(|p| p.used == NOT_AVAILABLE) {
            return None;
        }
        let mine = |p: &&ProcessInfo| p.pid == std::process::id();
        let own = list.iter().find(mine)?.used;
        Some((own, list.iter().filter(|p| !mine(p)).map(|p| p.used).sum()))
    }
}

impl Device {
    /// Asks at a moment when no call about memory is under way, and says whether there was one.
    fn sample(&mut self, nvml: &Nvml, recorder: &Recorder, ordinal: i8) -> bool {
        const TRIES: usize = 20;
        let handle = self.handle as Handle;
        for _ in 0..TRIES {
            let before = under_way::at_rest();
            let Some(memory) = nvml.memory(handle) else { return true };
            let processes = nvml.processes(handle);
            let mine = processes.is_some();
            // Elsewhere this process has nothing.
            if memory.used == 0 || !mine && !devices::has_entered(ordinal) {
                return true;
            }
            if before.is_none() || under_way::at_rest() != before {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let now = Some((memory.used, processes));
            if self.last == now {
                return true;
            }
            let is_written = guard::local(|local| {
                let (used, total) = (memory.used, memory.total);
                let measured = MeasuredEvent { used, total, by: processes };
                let measured = Event { device: ordinal, ..event(local, measured.event()) };
                under_way::write_measured(recorder, before, &measured)
            });
            if is_written {
                self.last = now;
                return true;
            }
        }
        false
    }
}
