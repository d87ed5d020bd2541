//! Which GPUs this machine has, as CUDA's driver and NVML say.
//!
//! The driver says which cards a program would see, and under which numbers, so
//! `CUDA_VISIBLE_DEVICES` counts. `cudarc` opens it when it is first asked. No context is
//! made. One takes some hundred MiB of the card and seconds of time, and may be what a
//! neighbour's job then lacks. So NVML is asked how much memory is free, because it needs
//! none. Where there is no NVML, that isn't known.
//!
//! The caller asks in a process of its own and sets how long it waits, because a
//! broken driver may hang or end the process. No recorder should be preloaded there,
//! because it would record the question.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt::Write;

use cudarc::driver::result::{self, DriverError, device};
use cudarc::driver::sys::{self, CUdevice_attribute, CUuuid};
use libloading::Library;
use serde::{Deserialize, Serialize};

/// What this machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cards {
    /// The newest CUDA that the driver can do, such as 12.8.
    pub cuda: String,
    /// The driver's own version, such as 570.86.15, if NVML says it.
    pub driver: Option<String>,
    /// They are memtrace's virtual ones.
    pub is_virtual: bool,
    /// By number.
    pub cards: Vec<Card>,
}

/// A card, or a part of one that has been split up (MIG).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Major and minor.
    pub compute_capability: (i32, i32),
    /// As `nvidia-smi -L` writes it.
    pub uuid: Option<String>,
    /// What CUDA says is there, bytes.
    pub memory_bytes: u64,
    /// What nobody has, bytes, if NVML says it.
    pub free_bytes: Option<u64>,
}

/// Asks the driver. `None`: there is none on this machine, and nothing was done.
///
/// # Errors
/// The driver is there and can't be used; by the name that CUDA has for that.
///
/// # Panics
/// What goes by the driver's name lacks functions of the driver's.
pub fn ask() -> Result<Option<Cards>, String> {
    // SAFETY: opens libraries by the driver's names, as any program that uses CUDA does.
    if !unsafe { sys::is_culib_present() } {
        return Ok(None);
    }
    match cards() {
        Ok(cards) => Ok(Some(cards)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(Some(Cards::default())),
        Err(error) => Err(name(error)),
    }
}

fn name(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|_| format!("error {}", error.0 as u32))
}

fn cards() -> Result<Cards, DriverError> {
    result::init()?;
    let mut version = 0;
    // SAFETY: a place of ours.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let nvml = Nvml::open();
    let mut cards = Vec::new();
    for number in 0..device::get_count()? {
        let card = device::get(number)?;
        // SAFETY: a device that the driver has just given.
        let (major, minor, memory) = unsafe {
            let attribute = |which| device::get_attribute(card, which);
            (
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                device::total_mem(card)?,
            )
        };
        let mut uuid = CUuuid { bytes: [0; 16] };
        // The first version of this question answers with the whole card's for a part of one.
        // SAFETY: a place of ours, and a device that the driver has just given.
        let found = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, card) }.result();
        let known = found.ok().and_then(|()| nvml.as_ref()?.memory(&uuid));
        cards.push(Card {
            name: device::get_name(card)?,
            compute_capability: (major, minor),
            uuid: known.as_ref().map(|(text, _)| text.clone()),
            memory_bytes: memory as u64,
            free_bytes: known.map(|(_, free)| free),
        });
    }
    Ok(Cards {
        cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
        driver: nvml.as_ref().and_then(Nvml::driver),
        is_virtual: is_virtual(),
        cards,
    })
}

/// memtrace's own driver has a function that no other has.
fn is_virtual() -> bool {
    // SAFETY: a look-up by name; nothing is called.
    unsafe { sys::culib().get::<*const c_void>(b"memtrace_virtual_stats").is_ok() }
}

/// NVIDIA's management library, opened and initialised. `cudarc` doesn't have it.
struct Nvml(Library);

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

const NVML_SUCCESS: c_int = 0;

impl Nvml {
    fn open() -> Option<Nvml> {
        // SAFETY: opens NVIDIA's library by its name, and calls a function with the
        // signature that is documented for it.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2").ok()?;
            (init() == NVML_SUCCESS).then_some(())?;
            Some(Nvml(library))
        }
    }

    /// What the driver's version is.
    fn driver(&self) -> Option<String> {
        type Get = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        let mut text = [0_u8; 96];
        // SAFETY: documented with this signature; it writes a C string of at most so many bytes.
        unsafe {
            let get = self.0.get::<Get>(b"nvmlSystemGetDriverVersion").ok()?;
            (get(text.as_mut_ptr().cast(), text.len() as c_uint) == NVML_SUCCESS).then_some(())?;
        }
        Some(CStr::from_bytes_until_nul(&text).ok()?.to_string_lossy().into_owned())
    }

    /// The name that NVML knows a device by, and how much of its memory is free. The driver's
    /// identifier of a part of a card is the part's, so that the memory is the part's, too.
    fn memory(&self, uuid: &CUuuid) -> Option<(String, u64)> {
        type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
        type Ask = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
        // SAFETY: documented with these signatures.
        let (find, ask) = unsafe {
            let find = self.0.get::<Find>(b"nvmlDeviceGetHandleByUUID").ok()?;
            (find, self.0.get::<Ask>(b"nvmlDeviceGetMemoryInfo").ok()?)
        };
        ["GPU", "MIG"].into_iter().find_map(|kind| {
            let text = uuid_text(kind, uuid);
            let given = CString::new(text.clone()).ok()?;
            let (mut handle, mut memory) = (std::ptr::null_mut(), Memory::default());
            // SAFETY: a C string and places of ours; the handle is one that NVML has just given.
            unsafe {
                (find(given.as_ptr(), &raw mut handle) == NVML_SUCCESS).then_some(())?;
                (ask(handle, &raw mut memory) == NVML_SUCCESS).then_some((text, memory.free))
            }
        })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: documented with this signature; it was initialised.
        unsafe {
            if let Ok(end) = self.0.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown") {
                end();
            }
        }
    }
}

fn uuid_text(kind: &str, uuid: &CUuuid) -> String {
    let mut text = kind.to_owned();
    for (i, byte) in uuid.bytes.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&i) {
            text.push('-');
        }
        let _ = write!(text, "{:02x}", *byte as u8);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_written_as_nvidia_smi_does() {
        let mut uuid = CUuuid { bytes: [0; 16] };
        for (i, byte) in uuid.bytes.iter_mut().enumerate() {
            *byte = (i * 17) as c_char;
        }
        assert_eq!(uuid_text("GPU", &uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
