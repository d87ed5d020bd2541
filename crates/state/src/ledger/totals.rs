//! The sums of the ledger's columns, and the table that snapshots show.

use std::collections::BTreeMap;

use memtrace_format::key::{self, Kept};

use super::Ledger;
use super::host::is_of_blocks;
use memtrace_format::blackbox::Class;
use memtrace_format::event::{Layer, What};

/// Bytes of one device's columns; see [`Ledger::totals`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceTotals {
    /// What a framework's allocator has reserved.
    pub framework: u64,
    /// `cudaMalloc` and the like, outside every framework.
    pub device: u64,
    /// In stream order, from pools.
    pub pool_used: u64,
    /// Elements of arrays.
    pub arrays: u64,
    /// Physical memory of `cuMemCreate`, mapped or not.
    pub physical: u64,
    /// Addresses under which physical memory is mapped.
    pub mapped: u64,
    /// Managed memory, which may be here or with the host.
    pub managed: u64,
    /// Memory of other processes and APIs that is in use here, as far as its size was said.
    pub imported: u64,
    /// Addresses promised to allocation nodes of graphs.
    pub graph_nodes: u64,
    /// Contexts that were made.
    pub contexts: u64,
    /// Modules and libraries that are loaded.
    pub modules: u64,
    /// Instantiated graphs.
    pub executables: u64,
}

impl DeviceTotals {
    /// What this process holds of the device's memory, each byte once.
    pub fn held(&self) -> u64 {
        [self.framework, self.device, self.pool_used, self.arrays, self.physical]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// Bytes of the host's columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTotals {
    /// Page-locked memory that CUDA allocated.
    pub pinned: u64,
    /// Page-locked memory of the program's own.
    pub registered: u64,
    /// Of both: what a framework's allocator keeps to hand out.
    pub framework: u64,
    /// What was asked for of that, as far as it is in use.
    pub requested: u64,
    /// Physical memory of `cuMemCreate` that is on the host.
    pub physical: u64,
}

/// The sums of all columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// By ordinal; −1 is a device that wasn't known at the call.
    pub devices: BTreeMap<i8, DeviceTotals>,
    /// The host.
    pub host: HostTotals,
    /// Addresses that are reserved, of whatever device.
    pub reserved_addresses: u64,
    /// Pools whose reserved memory the program has asked for: pool, device,
    /// bytes, when (nanoseconds since 1970).
    pub pools: Vec<(u64, i8, u64, u64)>,
}

impl Ledger {
    /// The sums of all columns.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for ((class, _), e) in &self.entries {
            let host = e.layer == Layer::Host;
            if host {
                if is_of_blocks(e) {
                    totals.host.framework = totals.host.framework.saturating_add(e.size);
                }
                let column = match (class, e.what) {
                    (Class::Handle, What::Device) => &mut totals.host.physical,
                    (Class::HostBlock, _) => &mut totals.host.requested,
                    (_, What::Pinned) => &mut totals.host.pinned,
                    (_, What::Registered) => &mut totals.host.registered,
                    _ => continue,
                };
                *column = column.saturating_add(e.size);
                continue;
            }
            match class {
                Class::Reservation => {
                    totals.reserved_addresses = totals.reserved_addresses.saturating_add(e.size);
                    continue;
                }
                Class::PoolReserved => {
                    totals.pools.push((e.addr, e.device, e.size, e.time_ns));
                    continue;
                }
                Class::Entered => continue,
                _ => {}
            }
            let device = totals.devices.entry(e.device).or_default();
            let column = match (class, e.what) {
                (Class::Mapping, _) => &mut device.mapped,
                (Class::Handle, What::Device) => &mut device.physical,
                (Class::Handle, What::Imported) | (_, What::Imported | What::External) => {
                    &mut device.imported
                }
                (_, What::Device) => &mut device.device,
                (_, What::Pool) => &mut device.pool_used,
                (_, What::Managed) => &mut device.managed,
                (_, What::Array) => &mut device.arrays,
                (_, What::GraphNode) => &mut device.graph_nodes,
                (_, What::Context) => &mut device.contexts,
                (_, What::Module) => &mut device.modules,
                (_, What::Executable) => &mut device.executables,
                _ => continue,
            };
            // A damaged file may hold more than there is.
            let more = if *class == Class::Object { 1 } else { e.size };
            *column = column.saturating_add(more);
        }
        totals
    }
}

impl Totals {
    /// The table under the snapshot's `memtrace` key.
    pub fn to_key(&self) -> key::Ledger {
        let device = |(ordinal, t): (&i8, &DeviceTotals)| key::LedgerDevice {
            device: i64::from(*ordinal),
            held: t.held(),
            framework: t.framework,
            device_bytes: t.device,
            pool_used: t.pool_used,
            arrays: t.arrays,
            physical: t.physical,
            mapped: t.mapped,
            managed: t.managed,
            imported: t.imported,
            graph_nodes: t.graph_nodes,
            contexts: t.contexts,
            modules: t.modules,
            graph_executables: t.executables,
            kept: Kept::NOTHING,
        };
        let pool = |(pool, device, bytes, time): &(u64, i8, u64, u64)| key::LedgerPool {
            pool: *pool,
            device: i64::from(*device),
            reserved: *bytes,
            asked_us: time / 1000,
            kept: Kept::NOTHING,
        };
        let HostTotals { pinned, registered, framework, requested, physical } = self.host;
        let kept = Kept::NOTHING;
        key::Ledger {
            devices: self.devices.iter().map(device).collect(),
            host: key::LedgerHost { pinned, registered, framework, requested, physical, kept },
            reserved_addresses: self.reserved_addresses,
            pools: self.pools.iter().map(pool).collect(),
            kept: Kept::NOTHING,
        }
    }
}
