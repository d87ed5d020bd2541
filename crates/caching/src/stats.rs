//! What `torch.cuda.memory_stats()` says, by its names.

use std::collections::BTreeMap;

/// One number and its history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The largest since the last reset.
    pub peak: i64,
    /// The sum of all increases.
    pub allocated: i64,
    /// The sum of all decreases.
    pub freed: i64,
}

impl Stat {
    pub(crate) fn up(&mut self, by: u64) {
        let by = by as i64;
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    pub(crate) fn down(&mut self, by: u64) {
        let by = by as i64;
        self.current -= by;
        self.freed += by;
    }

    /// Up or down, whichever the sign says.
    fn change(&mut self, by: i64) {
        match by {
            1.. => self.up(by as u64),
            ..=-1 => self.down(by.unsigned_abs()),
            0 => {}
        }
    }

    fn list(self, name: &str, out: &mut Vec<(String, i64)>) {
        for (key, value) in [
            ("allocated", self.allocated),
            ("current", self.current),
            ("freed", self.freed),
            ("peak", self.peak),
        ] {
            out.push((format!("{name}.{key}"), value));
        }
    }
}

/// The same number for everything, for the small pools and for the large ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByPool {
    /// Both.
    pub all: Stat,
    /// Blocks up to 1 MiB.
    pub small_pool: Stat,
    /// The others.
    pub large_pool: Stat,
}

impl ByPool {
    fn of(&mut self, small: bool) -> &mut Stat {
        if small { &mut self.small_pool } else { &mut self.large_pool }
    }

    pub(crate) fn up(&mut self, small: bool, by: u64) {
        self.all.up(by);
        self.of(small).up(by);
    }

    pub(crate) fn down(&mut self, small: bool, by: u64) {
        self.all.down(by);
        self.of(small).down(by);
    }

    /// The keys of this number in `memory_stats()`, with their values.
    pub(crate) fn flat(&self, name: &str) -> Vec<(String, i64)> {
        let mut list = Vec::new();
        self.all.list(&format!("{name}.all"), &mut list);
        self.small_pool.list(&format!("{name}.small_pool"), &mut list);
        self.large_pool.list(&format!("{name}.large_pool"), &mut list);
        list
    }

    pub(crate) fn change(&mut self, small: bool, by: i64) {
        self.all.change(by);
        self.of(small).change(by);
    }
}

/// All statistics of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks handed out.
    pub allocation: ByPool,
    /// Segments from the driver; expandable ones do not count.
    pub segment: ByPool,
    /// Blocks handed out, or waiting for their free to complete.
    pub active: ByPool,
    /// Free blocks that can't go back to the driver because a neighbour is in use.
    pub inactive_split: ByPool,
    /// Bytes of `allocation`.
    pub allocated_bytes: ByPool,
    /// Bytes from the driver.
    pub reserved_bytes: ByPool,
    /// Bytes of `active`.
    pub active_bytes: ByPool,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: ByPool,
    /// Bytes that were asked for, over active blocks.
    pub requested_bytes: ByPool,
    /// Attempts after everything cached was given back.
    pub num_alloc_retries: u64,
    /// Requests that failed.
    pub num_ooms: u64,
    /// Requests refused by `throw_on_cudamalloc_oom`.
    pub num_oom_rejections: u64,
    /// How often all events were waited for.
    pub num_sync_all_streams: u64,
    /// Calls that got memory from the driver.
    pub num_device_alloc: u64,
    /// Calls that gave memory back.
    pub num_device_free: u64,
    /// Blocks of `max_split_size` and more.
    pub oversize_allocations: Stat,
    /// Segments of `max_split_size` and more.
    pub oversize_segments: Stat,
    /// The setting, −1 for none.
    pub max_split_size: i64,
}

impl Stats {
    fn by_pool(&self) -> [(&'static str, &ByPool); 9] {
        [
            ("active", &self.active),
            ("active_bytes", &self.active_bytes),
            ("allocated_bytes", &self.allocated_bytes),
            ("allocation", &self.allocation),
            ("inactive_split", &self.inactive_split),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("segment", &self.segment),
        ]
    }

    fn stats_mut(&mut self) -> impl Iterator<Item = &mut Stat> {
        [
            &mut self.active,
            &mut self.active_bytes,
            &mut self.allocated_bytes,
            &mut self.allocation,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
            &mut self.reserved_bytes,
            &mut self.segment,
        ]
        .into_iter()
        .flat_map(|s| [&mut s.all, &mut s.small_pool, &mut s.large_pool])
        .chain([&mut self.oversize_allocations, &mut self.oversize_segments])
    }

    /// `torch.cuda.reset_peak_memory_stats()`.
    pub fn reset_peak(&mut self) {
        self.stats_mut().for_each(|s| s.peak = s.current);
    }

    /// `torch.cuda.reset_accumulated_memory_stats()`.
    pub fn reset_accumulated(&mut self) {
        self.stats_mut().for_each(|s| (s.allocated, s.freed) = (0, 0));
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_oom_rejections = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
    }

    /// The flat dictionary of `torch.cuda.memory_stats()`: the same keys with the same values.
    pub fn flat(&self) -> BTreeMap<String, i64> {
        let mut list = Vec::new();
        for (name, stat) in self.by_pool() {
            list.extend(stat.flat(name));
        }
        self.oversize_allocations.list("oversize_allocations", &mut list);
        self.oversize_segments.list("oversize_segments", &mut list);
        for (name, value) in [
            ("max_split_size", self.max_split_size),
            ("num_alloc_retries", self.num_alloc_retries as i64),
            ("num_device_alloc", self.num_device_alloc as i64),
            ("num_device_free", self.num_device_free as i64),
            ("num_oom_rejections", self.num_oom_rejections as i64),
            ("num_ooms", self.num_ooms as i64),
            ("num_sync_all_streams", self.num_sync_all_streams as i64),
        ] {
            list.push((name.to_owned(), value));
        }
        list.into_iter().collect()
    }
}
