//! The models of cards.
//!
//! Sources: NVIDIA's data sheets and architecture white papers (multiprocessors, memory clock, bus
//! width, L2) and the public PCI id list (device ids). The rest is what the cards themselves report
//! (usable memory, clock limits, copy engines). Users publish the output of `deviceQuery`,
//! `torch.cuda.get_device_properties` or PyTorch's out-of-memory message. Usable memory moves by
//! some MiB from one driver to the next; `memory_source` says which report was taken.
//!
//! The memory that a context takes can't be looked up: it grows with the driver, the
//! number of multiprocessors and the loaded code. All `context_mib` here are estimates
//! with lazy module loading (the default since CUDA 11.7), from what users see in
//! `nvidia-smi` for a process that did nothing else.

use crate::Limits;
use std::borrow::Cow;

/// One GPU model: everything about it that CUDA can be asked and that differs between cards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// How a user names it, for example `h100`. A custom one spells itself: `sm_90,80GiB,132SM`.
    pub key: Cow<'static, str>,
    /// The name that CUDA reports.
    pub name: Cow<'static, str>,
    /// Compute capability times ten.
    pub sm: u32,
    /// What `cudaMemGetInfo` reports as the total, MiB.
    pub memory_mib: u32,
    /// Where `memory_mib` comes from.
    pub memory_source: &'static str,
    /// Multiprocessors.
    pub sms: u32,
    /// What a context takes before the first allocation, MiB.
    pub context_mib: u32,
    /// Where `context_mib` comes from; starts with "estimate" where it is one.
    pub context_source: &'static str,
    /// Highest multiprocessor clock, kHz.
    pub clock_khz: u32,
    /// Memory clock, kHz.
    pub memory_clock_khz: u32,
    /// Width of the memory bus, bits.
    pub bus_width_bits: u32,
    /// L2 cache, KiB.
    pub l2_kib: u32,
    /// Copy engines.
    pub async_engines: u32,
    /// PCI device id; the vendor is 0x10de.
    pub pci_device_id: u16,
    /// Error correction is on, as it is by default on data-centre cards.
    pub ecc: bool,
    /// Cards of this model in one machine are linked by NVLink.
    pub nvlink: bool,
}

impl Profile {
    /// What follows from the compute capability.
    ///
    /// # Panics
    /// Never for a profile made by this crate: tests hold every one to a known capability.
    pub fn limits(&self) -> &'static Limits {
        Limits::of(self.sm).expect("profiles have a known compute capability")
    }

    /// Compute capability, major part.
    pub fn major(&self) -> u32 {
        self.sm / 10
    }

    /// Compute capability, minor part.
    pub fn minor(&self) -> u32 {
        self.sm % 10
    }

    /// Total memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }

    /// A context's own memory in bytes.
    pub fn context_bytes(&self) -> u64 {
        u64::from(self.context_mib) << 20
    }

    /// L2 cache in bytes.
    pub fn l2_bytes(&self) -> u32 {
        self.l2_kib << 10
    }

    /// The part of the L2 cache that can be set aside for persisting accesses, bytes.
    pub fn persisting_l2_bytes(&self) -> u32 {
        self.l2_bytes() / 16 * self.limits().persisting_l2_sixteenths
    }
}

/// Every card with a name, in the order in which they are listed to users.
pub fn profiles() -> &'static [Profile] {
    &PROFILES
}

/// The card of that name. Case, `-`, `_` and spaces don't matter; `a100` is the 80 GB one.
pub fn find(name: &str) -> Option<&'static Profile> {
    let plain = |s: &str| -> String {
        s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
    };
    let wanted = match plain(name) {
        n if n == "a100" => "a10080".to_owned(),
        n => n,
    };
    PROFILES.iter().find(|p| plain(&p.key) == wanted)
}

pub(crate) const CONTEXT_ESTIMATE: &str =
    "estimate: nvidia-smi reports by users for a process that only made a context";

macro_rules! card {
    ($key:literal, $name:literal, sm $sm:literal, $mib:literal MiB ($source:literal), $sms:literal SM,
     context $context:literal, MHz $mhz:literal/$memory_mhz:literal, $bus:literal bit,
     L2 $l2:literal KiB, engines $engines:literal, pci $pci:literal, ecc $ecc:literal,
     nvlink $nvlink:literal) => {
        Profile {
            key: Cow::Borrowed($key),
            name: Cow::Borrowed($name),
            sm: $sm,
            memory_mib: $mib,
            memory_source: $source,
            sms: $sms,
            context_mib: $context,
            context_source: CONTEXT_ESTIMATE,
            clock_khz: $mhz * 1000,
            memory_clock_khz: $memory_mhz * 1000,
            bus_width_bits: $bus,
            l2_kib: $l2,
            async_engines: $engines,
            pci_device_id: $pci,
            ecc: $ecc,
            nvlink: $nvlink,
        }
    };
}

#[rustfmt::skip]
static PROFILES: [Profile; 14] = [
    card!("v100-16", "Tesla V100-SXM2-16GB", sm 70, 16160 MiB ("deviceQuery, driver 450"), 80 SM,
        context 310, MHz 1530/877, 4096 bit, L2 6144 KiB, engines 5, pci 0x1DB1, ecc true, nvlink true),
    card!("v100-32", "Tesla V100-SXM2-32GB", sm 70, 32510 MiB ("deviceQuery, driver 450"), 80 SM,
        context 310, MHz 1530/877, 4096 bit, L2 6144 KiB, engines 5, pci 0x1DB5, ecc true, nvlink true),
    card!("t4", "Tesla T4", sm 75, 15102 MiB ("torch device properties"), 40 SM,
        context 110, MHz 1590/5001, 256 bit, L2 4096 KiB, engines 3, pci 0x1EB8, ecc true, nvlink false),
    card!("a10", "NVIDIA A10", sm 86, 22515 MiB ("PyTorch OOM message: 21.99 GiB"), 72 SM,
        context 260, MHz 1695/6251, 384 bit, L2 6144 KiB, engines 2, pci 0x2236, ecc true, nvlink false),
    card!("a100-40", "NVIDIA A100-SXM4-40GB", sm 80, 40339 MiB ("deviceQuery, CUDA 12.2 driver"), 108 SM,
        context 420, MHz 1410/1215, 5120 bit, L2 40960 KiB, engines 3, pci 0x20B0, ecc true, nvlink true),
    card!("a100-80", "NVIDIA A100-SXM4-80GB", sm 80, 81153 MiB ("PyTorch OOM message: 79.25 GiB"), 108 SM,
        context 420, MHz 1410/1593, 5120 bit, L2 40960 KiB, engines 3, pci 0x20B2, ecc true, nvlink true),
    card!("l4", "NVIDIA L4", sm 89, 22563 MiB ("PyTorch OOM message: 22.03 GiB"), 58 SM,
        context 200, MHz 2040/6251, 192 bit, L2 49152 KiB, engines 2, pci 0x27B8, ecc true, nvlink false),
    card!("l40s", "NVIDIA L40S", sm 89, 45589 MiB ("torch device properties"), 142 SM,
        context 430, MHz 2520/9001, 384 bit, L2 98304 KiB, engines 2, pci 0x26B9, ecc true, nvlink false),
    card!("rtx3090", "NVIDIA GeForce RTX 3090", sm 86, 24259 MiB ("torch device properties, Linux"), 82 SM,
        context 270, MHz 1695/9751, 384 bit, L2 6144 KiB, engines 2, pci 0x2204, ecc false, nvlink false),
    card!("rtx4090", "NVIDIA GeForce RTX 4090", sm 89, 24209 MiB ("PyTorch OOM message, Linux: 23.64 GiB"), 128 SM,
        context 400, MHz 2520/10501, 384 bit, L2 73728 KiB, engines 2, pci 0x2684, ecc false, nvlink false),
    card!("rtx5090", "NVIDIA GeForce RTX 5090", sm 120, 32117 MiB ("deviceQuery, CUDA 12.8 driver"), 170 SM,
        context 500, MHz 2407/14001, 512 bit, L2 98304 KiB, engines 2, pci 0x2B85, ecc false, nvlink false),
    card!("h100", "NVIDIA H100 80GB HBM3", sm 90, 81089 MiB ("torch device properties, CUDA 12.8"), 132 SM,
        context 520, MHz 1980/2619, 5120 bit, L2 51200 KiB, engines 3, pci 0x2330, ecc true, nvlink true),
    card!("h200", "NVIDIA H200", sm 90, 143_156 MiB ("torch device properties"), 132 SM,
        context 520, MHz 1980/3201, 6144 bit, L2 61440 KiB, engines 3, pci 0x2335, ecc true, nvlink true),
    card!("b200", "NVIDIA B200", sm 100, 182_631 MiB ("torch device properties"), 148 SM,
        context 600, MHz 1965/3996, 7680 bit, L2 129_536 KiB, engines 3, pci 0x2901, ecc true, nvlink true),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_found() {
        let mut seen = HashSet::new();
        for p in profiles() {
            assert!(seen.insert(p.key.clone()), "{} twice", p.key);
            assert_eq!(find(&p.key), Some(p));
            assert_eq!(find(&p.key.to_uppercase().replace('-', "_")), Some(p));
        }
        assert_eq!(find("a100").unwrap().key, "a100-80");
        assert_eq!(find("h1000"), None);
    }

    #[test]
    fn every_card_is_plausible() {
        for p in profiles() {
            assert_eq!(p.limits().sm, p.sm);
            assert!(p.sms >= 40 && p.sms <= 192, "{}", p.key);
            assert!(p.context_mib > 0 && p.context_mib < p.memory_mib / 20, "{}", p.key);
            assert!(p.context_source.starts_with("estimate") && !p.memory_source.is_empty());
            assert!(p.l2_kib >= 4096 && p.bus_width_bits % 64 == 0, "{}", p.key);
        }
    }

    /// A card's name carries its data-sheet size; what it can use is below, by at most a tenth.
    #[test]
    fn usable_memory_lies_just_below_the_data_sheet() {
        let gb = [16, 32, 16, 24, 40, 80, 24, 48, 24, 24, 32, 80, 141, 180];
        assert_eq!(gb.len(), profiles().len());
        for (p, gb) in profiles().iter().zip(gb) {
            // HBM3 cards of 80 GB report more than 80 * 10^9 bytes: the sheet rounds down.
            let sheet = gb * 1024;
            assert!(
                p.memory_mib < sheet + sheet / 50 && p.memory_mib > sheet * 9 / 10,
                "{}",
                p.key
            );
        }
    }

    #[test]
    fn cards_that_nvlink_links() {
        let linked: Vec<_> = profiles().iter().filter(|p| p.nvlink).map(|p| &*p.key).collect();
        assert_eq!(linked, ["v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200"]);
    }

    /// 12/16 of 40 MiB and 10/16 of 50 MiB are what an A100 and an H100 report.
    #[test]
    fn persisting_l2_as_reported() {
        assert_eq!(find("a100").unwrap().persisting_l2_bytes(), 31_457_280);
        assert_eq!(find("h100").unwrap().persisting_l2_bytes(), 32_768_000);
        assert_eq!(find("v100-16").unwrap().persisting_l2_bytes(), 0);
    }
}
