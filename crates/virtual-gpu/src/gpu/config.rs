//! Which machine this is: read once from the environment, never again.
//!
//! `MEMTRACE_VIRTUAL` names the GPUs (see `memtrace_devices::Spec`), an H100 if it is not
//! set; `CUDA_VISIBLE_DEVICES` chooses among them as the CUDA manual says. A
//! specification that names no GPU must not quietly become another one. It is reported,
//! and the process gets a machine without GPUs.

use memtrace_devices::{Placement, Profile, Spec};
use memtrace_options::VIRTUAL;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const DEFAULT: &str = "h100";
const SPEC: &str = VIRTUAL.variable;

/// Variables of memtrace's own, as they were when this library was loaded.
static AT_START: OnceLock<[Option<OsString>; 2]> = OnceLock::new();
const OURS: [&str; 2] = [SPEC, super::card::VARIABLE];

/// A program may clear its environment before it asks for a GPU, and put something else into it.
extern "C" fn loading() {
    let _ = AT_START.set(OURS.map(std::env::var_os));
}

#[used]
// SAFETY: the loader calls what lies in this section once, as a C
// function, after the C library has begun.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = loading;

/// A variable of memtrace's own: as it is now, or, if the program has taken it away, as it was.
pub fn variable(name: &str) -> Option<OsString> {
    let at_start = || {
        let index = OURS.iter().position(|&own| own == name)?;
        AT_START.get()?[index].clone()
    };
    std::env::var_os(name).or_else(at_start)
}

/// The machine.
pub struct Machine {
    /// What was asked for, in its canonical spelling; empty if it could not be read.
    pub spec: String,
    /// Stream work finishes only when the host waits for it.
    pub lazy: bool,
    /// At which addresses memory is given out.
    pub placement: Placement,
    /// All GPUs, as NVML numbers them.
    pub gpus: Vec<Gpu>,
    /// The GPUs that CUDA may see, as CUDA numbers them.
    visible: Vec<usize>,
}

/// One GPU.
pub struct Gpu {
    /// Its number in the machine, which is NVML's, and not CUDA's if some are hidden.
    pub index: usize,
    /// What kind of card it is.
    pub profile: Profile,
    /// Bytes that this process has taken, contexts included.
    pub used: AtomicU64,
}

impl Gpu {
    /// Bus number: the only part of the PCI address that differs between the GPUs.
    pub fn pci_bus(&self) -> u32 {
        0x10 + self.index as u32
    }

    /// `domain:bus:device.function`, as CUDA writes it.
    pub fn pci_bus_id(&self) -> String {
        format!("0000:{:02X}:00.0", self.pci_bus())
    }

    /// Sixteen bytes that say what they are, and the GPU's number.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"memtrace-virtual";
        uuid[15] = self.index as u8;
        uuid
    }

    /// The form in which NVML and `CUDA_VISIBLE_DEVICES` write it.
    pub fn uuid_text(&self) -> String {
        let mut text = String::from("GPU-");
        for (i, byte) in self.uuid().iter().enumerate() {
            if [4, 6, 8, 10].contains(&i) {
                text.push('-');
            }
            // Writing to a string can't fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// The processes that hold some of its memory, and how much.
    pub fn holders(&self) -> Vec<(u32, u64)> {
        super::card::holders(self.index, self.used.load(Relaxed))
    }

    /// Bytes that are taken, by whomever.
    pub fn in_use(&self) -> u64 {
        self.holders().iter().map(|(_, held)| held).sum::<u64>().min(self.total())
    }

    /// All of its memory, bytes.
    pub fn total(&self) -> u64 {
        self.profile.memory_bytes()
    }
}

impl Machine {
    fn read(spec: Option<&str>, visible: Option<&str>) -> Result<Self, String> {
        let text = spec.unwrap_or(DEFAULT);
        let spec =
            Spec::parse(text).map_err(|error| format!("MEMTRACE_VIRTUAL={text}: {error}"))?;
        let gpus: Vec<Gpu> = (0..spec.count as usize)
            .map(|index| Gpu { index, profile: spec.profile.clone(), used: AtomicU64::new(0) })
            .collect();
        let visible = visible.map_or((0..gpus.len()).collect(), |list| choose(list, &gpus));
        Ok(Self {
            spec: spec.to_string(),
            lazy: spec.lazy,
            placement: spec.placement,
            gpus,
            visible,
        })
    }

    fn none() -> Self {
        Self {
            spec: String::new(),
            lazy: false,
            placement: Placement::default(),
            gpus: Vec::new(),
            visible: Vec::new(),
        }
    }

    /// How many GPUs CUDA sees.
    pub fn count(&self) -> usize {
        self.visible.len()
    }

    /// The GPU with this CUDA number.
    pub fn device(&self, ordinal: usize) -> Option<&Gpu> {
        self.gpus.get(*self.visible.get(ordinal)?)
    }

    /// The GPUs that CUDA sees, in CUDA's order.
    pub fn devices(&self) -> impl Iterator<Item = &Gpu> {
        self.visible.iter().map(|&index| &self.gpus[index])
    }
}

/// `CUDA_VISIBLE_DEVICES`: numbers or the beginnings of UUIDs; the first that names no GPU ends the
/// list, and one that names a GPU twice leaves none.
fn choose(list: &str, gpus: &[Gpu]) -> Vec<usize> {
    let mut chosen = Vec::new();
    for word in list.split(',').map(str::trim) {
        let found = match word.parse::<usize>() {
            Ok(number) => Some(number).filter(|&number| number < gpus.len()),
            Err(_) if word.starts_with("GPU-") => {
                let mut fits = gpus.iter().filter(|gpu| gpu.uuid_text().starts_with(word));
                fits.next().filter(|_| fits.next().is_none()).map(|gpu| gpu.index)
            }
            Err(_) => None,
        };
        let Some(index) = found else { break };
        if chosen.contains(&index) {
            return Vec::new();
        }
        chosen.push(index);
    }
    chosen
}

/// The machine of this process.
pub fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let spec = variable(SPEC).map(|spec| spec.to_string_lossy().into_owned());
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        Machine::read(spec.as_deref(), visible.as_deref()).unwrap_or_else(|error| {
            super::log::warn(&format!("{error}; there is no GPU"));
            Machine::none()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visible(list: &str) -> Vec<usize> {
        Machine::read(Some("h100*4"), Some(list)).unwrap().visible
    }

    #[test]
    fn visible_devices_as_the_manual_says() {
        assert_eq!(Machine::read(Some("h100*4"), None).unwrap().visible, [0, 1, 2, 3]);
        assert_eq!(visible("2,0"), [2, 0]);
        assert_eq!(visible("1,9,0"), [1]);
        assert_eq!(visible(""), []);
        assert_eq!(visible("-1"), []);
        assert_eq!(visible("1,1"), []);
        let machine = Machine::read(Some("h100*4"), None).unwrap();
        assert_eq!(visible(&machine.gpus[3].uuid_text()), [3]);
        assert_eq!(visible("GPU-"), [], "not the beginning of one UUID only");
    }

    #[test]
    fn a_wrong_name_is_no_gpu_and_says_so() {
        let error = Machine::read(Some("h1000"), None).err().unwrap();
        assert!(error.contains("MEMTRACE_VIRTUAL=h1000"), "{error}");
    }
}
