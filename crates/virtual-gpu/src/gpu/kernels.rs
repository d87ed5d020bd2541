//! Kernels, the modules they come in, and module variables.
//!
//! There are three ways to a kernel. The code that the compiler generates registers host functions
//! that stand for kernels. The driver API loads modules and asks for functions by name. Libraries
//! (`cudaLibrary…`) do the same without a context. A kernel computes nothing, so all that is known
//! of it is its name and what was set on it. Registers, static shared memory and the like can't be
//! known without reading machine code; the answers are constants that fit any kernel.

use super::error::{Error, Result};
use super::handle::{NumberMap, Table};
use super::work::Action;
use super::{address, device, elf, kinds, memory};
use memtrace_devices::{Limits, Profile};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What every kernel is taken to need.
pub const REGISTERS: u32 = 32;

/// Something kernels come in.
#[derive(Default)]
struct Module {
    /// Known only if the image is a device binary; else every name is taken to be there.
    symbols: Option<elf::Symbols>,
    /// Kernels that were asked for.
    kernels: Vec<(String, u64)>,
    /// Host functions that stand for kernels of it.
    hosts: Vec<u64>,
    /// Variables that were asked for: name, address, size.
    variables: Vec<(String, u64, u64)>,
}

/// A host function that stands for a kernel. Registration is a part of every program's start, so it
/// keeps the pointer to the name and nothing else.
struct Registered {
    name: usize,
    module: u64,
    kernel: u64,
}

/// A kernel with a handle.
struct Kernel {
    name: std::ffi::CString,
    module: u64,
}

struct Variable {
    size: u64,
    module: u64,
    /// For each device on which it was asked for.
    places: Vec<(usize, u64)>,
}

/// What a program sets on a kernel (`cudaFuncSetAttribute`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The most dynamic shared memory that a launch may ask for, bytes.
    pub max_dynamic_shared: u32,
    /// Preferred share of shared memory in percent, -1 for none.
    pub carveout: i32,
    /// Clusters of more than 8 blocks are allowed.
    pub large_clusters: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_dynamic_shared: Limits::SHARED_PER_BLOCK, carveout: -1, large_clusters: false }
    }
}

#[derive(Default)]
struct Lazy {
    hosts: NumberMap<Registered>,
    variables: NumberMap<Variable>,
    settings: NumberMap<Settings>,
}

struct Kernels {
    modules: Table<Module>,
    live: Table<Kernel>,
    by_address: Option<Lazy>,
}

static KERNELS: Mutex<Kernels> = Mutex::new(Kernels {
    modules: Table::new(kinds::MODULE),
    live: Table::new(kinds::KERNEL),
    by_address: None,
});

fn kernels() -> MutexGuard<'static, Kernels> {
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernels {
    fn lazy(&mut self) -> &mut Lazy {
        self.by_address.get_or_insert_default()
    }

    fn module(&mut self, module: u64) -> Result<&mut Module> {
        self.modules.get_mut(module).ok_or(Error::INVALID_HANDLE)
    }

    /// The one name of a kernel that may be called by its host function or by its
    /// handle: the handle, once there is one.
    fn identity(&mut self, function: u64) -> Result<u64> {
        if self.live.get(function).is_some() {
            return Ok(function);
        }
        let host = self.lazy().hosts.get(&function).ok_or(Error::INVALID_DEVICE_FUNCTION)?;
        Ok(if host.kernel == 0 { function } else { host.kernel })
    }
}

/// A module, library or fat binary comes.
///
/// # Safety
/// `image` is null or a module image as the driver API takes it.
pub unsafe fn load(image: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    let symbols = unsafe { elf::symbols_at(image) };
    let module = Module { symbols, ..Module::default() };
    kernels().modules.insert(module)
}

/// It goes, with everything that came in it.
pub fn unload(module: u64) -> Result {
    let mut kernels = kernels();
    let gone = kernels.modules.remove(module).ok_or(Error::INVALID_HANDLE)?;
    let mut places: Vec<u64> = gone.variables.iter().map(|variable| variable.1).collect();
    kernels.live.retain(|_, kernel| kernel.module != module);
    let lazy = kernels.lazy();
    for host in gone.hosts {
        lazy.hosts.remove(&host);
    }
    lazy.variables.retain(|_, variable| {
        let stays = variable.module != module;
        if !stays {
            places.extend(variable.places.iter().map(|place| place.1));
        }
        stays
    });
    drop(kernels);
    for place in places {
        // A device reset may have taken it already.
        let _ = memory::ledger().free_variable(place);
    }
    Ok(())
}

/// A host function stands for a kernel (`__cudaRegisterFunction`). The name stays where it is.
pub fn register(module: u64, host: u64, name: usize) {
    let registered = Registered { name, module, kernel: 0 };
    let mut kernels = kernels();
    if let Ok(found) = kernels.module(module) {
        found.hosts.push(host);
        kernels.lazy().hosts.insert(host, registered);
    }
}

/// A host variable stands for one on the device (`__cudaRegisterVar`).
pub fn register_variable(module: u64, host: u64, size: u64) {
    let variable = Variable { size, module, places: Vec::new() };
    kernels().lazy().variables.insert(host, variable);
}

/// A kernel of a module by name.
pub fn function(module: u64, name: &str) -> Result<u64> {
    let mut kernels = kernels();
    let found = kernels.module(module)?;
    if let Some((_, kernel)) = found.kernels.iter().find(|kernel| kernel.0 == name) {
        return Ok(*kernel);
    }
    let known = found.symbols.as_ref().map(|symbols| &symbols.functions);
    if known.is_some_and(|known| !known.iter().any(|known| known == name)) {
        return Err(Error::NOT_FOUND);
    }
    let c_name = std::ffi::CString::new(name).map_err(|_| Error::INVALID_VALUE)?;
    let kernel = kernels.live.insert(Kernel { name: c_name, module });
    kernels.module(module)?.kernels.push((name.to_owned(), kernel));
    Ok(kernel)
}

/// The names of all kernels of a module, as far as its image has them or they were asked for.
pub fn functions(module: u64) -> Result<Vec<String>> {
    let mut kernels = kernels();
    let found = kernels.module(module)?;
    Ok(match &found.symbols {
        Some(symbols) => symbols.functions.clone(),
        None => found.kernels.iter().map(|kernel| kernel.0.clone()).collect(),
    })
}

/// A variable of a module by name: address and size. The size is 8 if the image does not have it.
pub fn variable(module: u64, name: &str, device: usize) -> Result<(u64, u64)> {
    let mut kernels = kernels();
    let found = kernels.module(module)?;
    if let Some(known) = found.variables.iter().find(|variable| variable.0 == name) {
        return Ok((known.1, known.2));
    }
    let size = match &found.symbols {
        Some(symbols) => *symbols.variables.get(name).ok_or(Error::NOT_FOUND)?,
        None => 8,
    };
    let place = memory::ledger().variable(device, size)?;
    found.variables.push((name.to_owned(), place, size));
    Ok((place, size))
}

/// A registered variable: its address on a device, and its size.
pub fn registered_variable(host: u64, device: usize) -> Result<(u64, u64)> {
    let mut kernels = kernels();
    let found = kernels.lazy().variables.get_mut(&host).ok_or(Error::INVALID_SYMBOL)?;
    if let Some((_, place)) = found.places.iter().find(|place| place.0 == device)
        && memory::ledger().find(*place).is_some()
    {
        return Ok((*place, found.size));
    }
    let place = memory::ledger().variable(device, found.size)?;
    found.places.retain(|place| place.0 != device);
    found.places.push((device, place));
    Ok((place, found.size))
}

/// The kernel's handle for a host function, or for a handle itself.
pub fn handle(function: u64) -> Result<u64> {
    let mut kernels = kernels();
    if kernels.live.get(function).is_some() {
        return Ok(function);
    }
    let host = kernels.lazy().hosts.get(&function).ok_or(Error::INVALID_DEVICE_FUNCTION)?;
    if host.kernel != 0 {
        return Ok(host.kernel);
    }
    let module = host.module;
    let name = core::ptr::with_exposed_provenance::<core::ffi::c_char>(host.name);
    // SAFETY: the name that was registered, which stays as long as its module is registered.
    let name = unsafe { core::ffi::CStr::from_ptr(name) }.to_owned();
    let kernel = kernels.live.insert(Kernel { name, module });
    let lazy = kernels.lazy();
    if let Some(host) = lazy.hosts.get_mut(&function) {
        host.kernel = kernel;
    }
    if let Some(settings) = lazy.settings.remove(&function) {
        lazy.settings.insert(kernel, settings);
    }
    Ok(kernel)
}

/// A kernel's name, good as long as its module is loaded.
pub fn name(function: u64) -> Result<*const core::ffi::c_char> {
    let kernel = handle(function)?;
    let kernels = kernels();
    kernels.live.get(kernel).map(|kernel| kernel.name.as_ptr()).ok_or(Error::INVALID_HANDLE)
}

/// The module that a kernel came in.
pub fn module_of(function: u64) -> Result<u64> {
    let kernel = handle(function)?;
    kernels().live.get(kernel).map(|kernel| kernel.module).ok_or(Error::INVALID_HANDLE)
}

/// The function is one: a registered host function or a kernel's handle.
pub fn check(function: u64) -> Result {
    kernels().identity(function).map(|_| ())
}

/// What was set on a kernel.
pub fn settings(function: u64) -> Result<Settings> {
    let mut kernels = kernels();
    let kernel = kernels.identity(function)?;
    Ok(kernels.lazy().settings.get(&kernel).copied().unwrap_or_default())
}

/// Sets something on a kernel.
pub fn set(function: u64, change: impl FnOnce(&mut Settings)) -> Result {
    let mut kernels = kernels();
    let kernel = kernels.identity(function)?;
    change(kernels.lazy().settings.entry(kernel).or_default());
    Ok(())
}

/// `cudaFuncSetAttribute` for dynamic shared memory: up to what a block may opt in to.
pub fn set_max_dynamic_shared(function: u64, bytes: i32, on: usize) -> Result {
    let most = device(on)?.profile.limits().shared_per_block_optin;
    let bytes = u32::try_from(bytes).map_err(|_| Error::INVALID_VALUE)?;
    if bytes > most {
        return Err(Error::INVALID_VALUE);
    }
    set(function, |settings| settings.max_dynamic_shared = bytes)
}

/// A launch, as all of the ways to make one describe it.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// A registered host function or a kernel's handle.
    pub function: u64,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u64,
    /// Blocks of a cluster; 1 in each direction for none.
    pub cluster: [u32; 3],
    /// All blocks must run at the same time.
    pub cooperative: bool,
}

/// The most blocks of a cluster that every GPU with clusters takes, and that it takes if the kernel
/// opts in.
const CLUSTER: [u64; 2] = [8, 16];

impl Launch {
    /// A plain launch.
    pub fn new(function: u64, grid: [u32; 3], block: [u32; 3], shared: u64) -> Self {
        Self { function, grid, block, shared, cluster: [1; 3], cooperative: false }
    }

    /// It is possible on the device.
    pub fn check(&self, on: usize) -> Result {
        let product = |n: &[u32; 3]| n.iter().map(|n| u64::from(*n)).product::<u64>();
        let threads = product(&self.block);
        let fits = self.grid.iter().chain(&self.block).all(|n| *n > 0)
            && threads <= Limits::MAX_THREADS_PER_BLOCK.into()
            && self.block[2] <= 64
            && i32::try_from(self.grid[0]).is_ok()
            && self.grid[1] <= 65_535
            && self.grid[2] <= 65_535;
        if !fits {
            return Err(Error::INVALID_CONFIGURATION);
        }
        check(self.function)?;
        let plain = self.shared <= Limits::SHARED_PER_BLOCK.into();
        if !plain && self.shared > settings(self.function)?.max_dynamic_shared.into() {
            return Err(Error::INVALID_VALUE);
        }
        if self.cluster != [1; 3] {
            self.check_cluster(on)?;
        }
        if self.cooperative {
            let profile = &device(on)?.profile;
            let each = blocks_per_multiprocessor(profile, threads as u32, self.shared);
            if product(&self.grid) > u64::from(each) * u64::from(profile.sms) {
                return Err(Error::COOPERATIVE_LAUNCH_TOO_LARGE);
            }
        }
        Ok(())
    }

    fn check_cluster(&self, on: usize) -> Result {
        let blocks: u64 = self.cluster.iter().map(|n| u64::from(*n)).product();
        let most = CLUSTER[usize::from(settings(self.function)?.large_clusters)];
        let whole =
            (0..3).all(|i| self.cluster[i] > 0 && self.grid[i].is_multiple_of(self.cluster[i]));
        let clusters = device(on)?.profile.limits().clusters;
        if clusters && whole && blocks <= most { Ok(()) } else { Err(Error::INVALID_CLUSTER_SIZE) }
    }

    /// The work that it is.
    pub fn action(&self) -> Action {
        let Self { function, grid, block, shared, .. } = *self;
        Action::Kernel { function, grid, block, shared: shared as u32 }
    }
}

/// How many blocks of this size a multiprocessor holds at once, by the documented limits.
pub fn blocks_per_multiprocessor(profile: &Profile, threads: u32, shared: u64) -> u32 {
    let limits = profile.limits();
    if threads == 0 || threads > Limits::MAX_THREADS_PER_BLOCK {
        return 0;
    }
    let warps = threads.div_ceil(Limits::WARP);
    let by_threads = limits.max_threads_per_sm / Limits::WARP / warps;
    let by_registers = Limits::REGISTERS / (REGISTERS * Limits::WARP * warps);
    let by_shared = if shared > limits.shared_per_block_optin.into() {
        0
    } else {
        let each = (shared + u64::from(limits.reserved_shared_per_block)).next_multiple_of(128);
        u64::from(limits.shared_per_sm).checked_div(each).map_or(u32::MAX, |blocks| blocks as u32)
    };
    by_threads.min(by_registers).min(by_shared).min(limits.max_blocks_per_sm)
}

/// The largest cluster that a kernel may be launched with; 0 on a GPU without clusters.
pub fn largest_cluster(function: u64, profile: &Profile) -> Result<u64> {
    let large = settings(function)?.large_clusters;
    Ok(if profile.limits().clusters { CLUSTER[usize::from(large)] } else { 0 })
}

/// How many clusters of this many blocks run on the device at once.
pub fn clusters(profile: &Profile, threads: u32, shared: u64, blocks: u64) -> u32 {
    if blocks == 0 || !profile.limits().clusters {
        return 0;
    }
    let all =
        u64::from(blocks_per_multiprocessor(profile, threads, shared)) * u64::from(profile.sms);
    (all / blocks) as u32
}

/// The dynamic shared memory that each of `blocks` blocks on a multiprocessor may have.
pub fn shared_for_blocks(profile: &Profile, blocks: u32) -> u64 {
    let limits = profile.limits();
    let each = limits.shared_per_sm.checked_div(blocks).unwrap_or(0);
    let usable = (each / 128 * 128).saturating_sub(limits.reserved_shared_per_block);
    usable.min(limits.shared_per_block_optin).into()
}

/// Where a symbol's bytes lie on a device: `len` bytes from `offset` on.
pub fn symbol_place(host: u64, offset: u64, len: u64, device: usize) -> Result<u64> {
    let (place, size) = registered_variable(host, device)?;
    debug_assert!(address::is_device(place));
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(place + offset),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_by_each_limit() {
        let h100 = &memtrace_devices::find("h100").unwrap();
        assert_eq!(blocks_per_multiprocessor(h100, 1024, 0), 2, "threads");
        assert_eq!(blocks_per_multiprocessor(h100, 32, 0), 32, "blocks");
        assert_eq!(blocks_per_multiprocessor(h100, 128, 100 << 10), 2, "shared memory");
        assert_eq!(
            blocks_per_multiprocessor(h100, 128, 228 << 10),
            0,
            "more than a block may have"
        );
        assert_eq!(blocks_per_multiprocessor(h100, 2048, 0), 0);
        let t4 = &memtrace_devices::find("t4").unwrap();
        assert_eq!(blocks_per_multiprocessor(t4, 1024, 0), 1);
        assert_eq!(shared_for_blocks(h100, 1), 227 << 10);
        assert_eq!(shared_for_blocks(h100, 2), 113 << 10);
    }

    #[test]
    fn names_lead_to_kernels_and_go_with_their_module() {
        // SAFETY: no image.
        let module = unsafe { load(core::ptr::null()) };
        let kernel = function(module, "a_kernel").unwrap();
        assert_eq!(function(module, "a_kernel"), Ok(kernel));
        assert_ne!(function(module, "another"), Ok(kernel));
        assert_eq!(check(kernel), Ok(()));
        // SAFETY: the name lives until the module is unloaded.
        let found = unsafe { core::ffi::CStr::from_ptr(name(kernel).unwrap()) };
        assert_eq!(found, c"a_kernel");
        register(module, 0x1234, c"host".as_ptr().expose_provenance());
        set(0x1234, |settings| settings.carveout = 50).unwrap();
        let by_host = handle(0x1234).unwrap();
        assert_eq!(settings(by_host).unwrap().carveout, 50, "set under the other name");
        set(by_host, |settings| settings.carveout = 60).unwrap();
        assert_eq!(settings(0x1234).unwrap().carveout, 60);
        assert_eq!(handle(0x1234), Ok(by_host));
        unload(module).unwrap();
        assert_eq!(check(kernel), Err(Error::INVALID_DEVICE_FUNCTION));
        assert_eq!(check(0x1234), Err(Error::INVALID_DEVICE_FUNCTION));
        assert_eq!(unload(module), Err(Error::INVALID_HANDLE));
    }
}
