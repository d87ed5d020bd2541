//! What follows from the compute capability alone.
//!
//! Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and
//! the tuning guide of each architecture. They have shared memory and its opt-in maximum,
//! reserved shared memory, and single to double precision. The share of the L2 cache that may
//! be set aside is not in that table. It is what cards of the architecture report, in
//! sixteenths, and an estimate where noted.

const KIB: u32 = 1024;

/// Limits that every GPU of one compute capability shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Compute capability times ten: 90 is 9.0.
    pub sm: u32,
    /// Architecture, as NVIDIA calls it.
    pub architecture: &'static str,
    /// Resident threads of a multiprocessor.
    pub max_threads_per_sm: u32,
    /// Resident blocks of a multiprocessor.
    pub max_blocks_per_sm: u32,
    /// Shared memory of a multiprocessor, bytes.
    pub shared_per_sm: u32,
    /// Shared memory that one block may ask for after opting in, bytes.
    pub shared_per_block_optin: u32,
    /// Shared memory that the system keeps in each block, bytes.
    pub reserved_shared_per_block: u32,
    /// Single precision throughput over double precision throughput.
    pub single_to_double_ratio: u32,
    /// Share of the L2 cache that can be set aside for persisting accesses, in sixteenths. 0: none.
    pub persisting_l2_sixteenths: u32,
    /// Thread block clusters and the tensor memory accelerator.
    pub clusters: bool,
    /// Memory pools, access policy windows and asynchronous copies of 8.0 and later.
    pub ampere_or_later: bool,
}

impl Limits {
    /// 32-bit registers of a multiprocessor, and of a block: 64 Ki since 5.0.
    pub const REGISTERS: u32 = 64 * KIB;
    /// Shared memory of a block that doesn't opt in, bytes: 48 KiB everywhere.
    pub const SHARED_PER_BLOCK: u32 = 48 * KIB;
    /// Threads of a block.
    pub const MAX_THREADS_PER_BLOCK: u32 = 1024;
    /// Threads of a warp.
    pub const WARP: u32 = 32;

    /// The limits of a compute capability (times ten), if this crate knows it.
    pub fn of(sm: u32) -> Option<&'static Limits> {
        TABLE.iter().find(|l| l.sm == sm)
    }

    /// Every compute capability that this crate knows, ascending.
    pub fn known() -> impl Iterator<Item = u32> {
        TABLE.iter().map(|l| l.sm)
    }
}

macro_rules! limits {
    ($sm:literal $arch:literal $threads:literal $blocks:literal $shared:literal $optin:literal
     $reserved:literal $ratio:literal $l2:literal $clusters:literal) => {
        Limits {
            sm: $sm,
            architecture: $arch,
            max_threads_per_sm: $threads,
            max_blocks_per_sm: $blocks,
            shared_per_sm: $shared * KIB,
            shared_per_block_optin: $optin * KIB,
            reserved_shared_per_block: $reserved * KIB,
            single_to_double_ratio: $ratio,
            persisting_l2_sixteenths: $l2,
            clusters: $clusters,
            ampere_or_later: $sm >= 80,
        }
    };
}

// sm, architecture, threads/SM, blocks/SM, shared KiB/SM, opt-in KiB/block, reserved KiB/block,
// fp32:fp64, persisting L2 in sixteenths (10.0 and 10.3: taken from 9.0, an estimate), clusters.
#[rustfmt::skip]
const TABLE: [Limits; 9] = [
    limits!(70  "Volta"     2048 32  96  96 0  2  0 false),
    limits!(75  "Turing"    1024 16  64  64 0 32  0 false),
    limits!(80  "Ampere"    2048 32 164 163 1  2 12 false),
    limits!(86  "Ampere"    1536 16 100  99 1 64 11 false),
    limits!(89  "Ada"       1536 24 100  99 1 64 11 false),
    limits!(90  "Hopper"    2048 32 228 227 1  2 10 true),
    limits!(100 "Blackwell" 2048 32 228 227 1  2 10 true),
    limits!(103 "Blackwell" 2048 32 228 227 1 64 10 true),
    limits!(120 "Blackwell" 1536 24 100  99 1 64 10 true),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_never_gets_more_than_its_multiprocessor_has() {
        for l in &TABLE {
            assert!(
                l.shared_per_block_optin + l.reserved_shared_per_block <= l.shared_per_sm,
                "{}",
                l.sm
            );
            assert!(Limits::SHARED_PER_BLOCK <= l.shared_per_block_optin);
            assert_eq!(l.max_threads_per_sm % Limits::WARP, 0);
        }
    }

    #[test]
    fn ascending_and_unique() {
        let known: Vec<u32> = Limits::known().collect();
        assert!(known.is_sorted_by(|a, b| a < b));
        assert_eq!(Limits::of(90).unwrap().architecture, "Hopper");
        assert_eq!(Limits::of(91), None);
    }
}
