//! The settings of the allocator, from `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`.
//!
//! The grammar is the one that PyTorch 2.15 was seen to have, its leniencies included. White space
//! does not count. A separator is any one of `,` `:` `[` `]`, so `max_split_size_mb,64]` is fine.
//! Numbers are read as C reads them, with whatever follows ignored. `large_segment_size_mb` counts
//! first, wherever it is. What PyTorch refuses is refused in its words. Settings that change
//! nothing here are read and named in [`Parsed::notes`].

use std::fmt;

use crate::tokens::Tokens;

const MIB: u64 = 1 << 20;
/// Size classes that can have rounding divisions: up to 1 MiB, 2 MiB, … 32 GiB and more.
const INTERVALS: usize = 16;

/// Memory from `cudaMalloc` and our own cache, or from the driver's pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// This algorithm.
    Native,
    /// The driver's; nothing of this algorithm runs.
    CudaMallocAsync,
}

/// How much address space an expandable segment reserves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// This part of the device's memory.
    Fraction(f64),
    /// So many bytes.
    Bytes(u64),
}

/// Everything that decides how the allocator behaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// `backend`.
    pub backend: Backend,
    /// `max_split_size_mb` in bytes, [`u64::MAX`] for none: blocks of this
    /// size and more are never split.
    pub max_split_size: u64,
    /// `max_non_split_rounding_mb` in bytes: how much larger than wanted such a block may be.
    pub max_non_split_rounding: u64,
    /// `large_segment_size_mb` in bytes.
    pub large_segment: u64,
    /// `roundup_power2_divisions` by size class, 0 for none.
    pub roundup_power2_divisions: [u64; INTERVALS],
    /// `garbage_collection_threshold`, 0 for none.
    pub garbage_collection_threshold: f64,
    /// `per_process_memory_fraction`; 1 is no limit.
    pub memory_fraction: f64,
    /// `throw_on_cudamalloc_oom`.
    pub throw_on_oom: bool,
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `expandable_segments_reserve`.
    pub reserve: Option<Reserve>,
    /// `graph_capture_record_stream_reuse`.
    pub capture_reuse: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            backend: Backend::Native,
            max_split_size: u64::MAX,
            max_non_split_rounding: 20 * MIB,
            large_segment: 20 * MIB,
            roundup_power2_divisions: [0; INTERVALS],
            garbage_collection_threshold: 0.0,
            memory_fraction: 1.0,
            throw_on_oom: false,
            expandable_segments: false,
            reserve: None,
            capture_reuse: false,
        }
    }
}

impl Settings {
    /// The rounding divisions for a request of `size` bytes.
    pub(crate) fn divisions(&self, size: u64) -> u64 {
        let class = size.max(1).ilog2().saturating_sub(20) as usize;
        self.roundup_power2_divisions[class.min(INTERVALS - 1)]
    }

    /// Reads a configuration as PyTorch reads it.
    ///
    /// # Errors
    /// What PyTorch refuses.
    pub fn parse(conf: &str) -> Result<Parsed, ConfError> {
        let mut settings = Settings::default();
        settings.change(conf).map(|notes| Parsed { settings, notes })
    }

    /// A configuration that is set under way. PyTorch forgets what was said about sizes and
    /// garbage and keeps the rest. Then it goes as far as it understands. Gives what is to
    /// be said about it, as in [`Parsed`].
    ///
    /// # Errors
    /// What PyTorch refuses; what came before it counts.
    pub fn change(&mut self, conf: &str) -> Result<Vec<String>, ConfError> {
        let new = Settings::default();
        let mut parsed = Parsed {
            settings: Settings {
                max_split_size: new.max_split_size,
                max_non_split_rounding: new.max_non_split_rounding,
                roundup_power2_divisions: new.roundup_power2_divisions,
                garbage_collection_threshold: new.garbage_collection_threshold,
                ..self.clone()
            },
            notes: Vec::new(),
        };
        let read = parsed.read(&Tokens::new(conf));
        *self = parsed.settings;
        read.map(|()| parsed.notes)
    }
}

/// Settings, and what is to be said about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The settings.
    pub settings: Settings,
    /// One line for each key that changes nothing here, and for each value
    /// that PyTorch ignores with a warning.
    pub notes: Vec<String>,
}

impl Parsed {
    fn read(&mut self, tokens: &Tokens) -> Result<(), ConfError> {
        for i in (0..tokens.len()).filter(|i| tokens.is(*i, "large_segment_size_mb")) {
            let mb = tokens.integer(i + 2)?;
            if mb <= 10 {
                return Err(ConfError::new(
                    "CachingAllocator option large_segment_size_mb must be > 10 MB",
                ));
            }
            self.settings.large_segment = mb.min(u64::MAX / MIB) * MIB;
        }
        let mut i = 0;
        while i < tokens.len() {
            // The value, then one token that separates, whatever it is.
            i = self.key(tokens, i)? + 2;
        }
        Ok(())
    }

    /// Reads the value of the key at `i`; gives the index of its last token. One arm for each key,
    /// however many there are.
    fn key(&mut self, tokens: &Tokens, i: usize) -> Result<usize, ConfError> {
        let at = i + 2;
        let key = tokens.get(i)?;
        let settings = &mut self.settings;
        match key {
            "max_split_size_mb" => {
                settings.max_split_size = at_least_a_segment(settings, key, tokens.integer(at)?)?;
            }
            "max_non_split_rounding_mb" => {
                settings.max_non_split_rounding =
                    at_least_a_segment(settings, key, tokens.integer(at)?)?;
            }
            // Read before all others.
            "large_segment_size_mb" => {}
            "garbage_collection_threshold" => {
                let value = tokens.float(at)?;
                if !(value > 0.0 && value < 1.0) {
                    return Err(ConfError::new(
                        "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
                    ));
                }
                settings.garbage_collection_threshold = value;
            }
            "per_process_memory_fraction" => {
                let value = tokens.float(at)?;
                if !(0.0..=1.0).contains(&value) {
                    return Err(ConfError::new(
                        "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
                    ));
                }
                settings.memory_fraction = value;
            }
            "roundup_power2_divisions" => return self.divisions(tokens, at),
            "backend" => settings.backend = backend(tokens.get(at)?)?,
            "throw_on_cudamalloc_oom" => settings.throw_on_oom = tokens.boolean(at)?,
            "expandable_segments" => settings.expandable_segments = tokens.boolean(at)?,
            "graph_capture_record_stream_reuse" => {
                settings.capture_reuse = tokens.boolean(at)?;
                if settings.capture_reuse {
                    self.note(key, "the order of work within a graph is not known here");
                }
            }
            "expandable_segments_reserve" => {
                let value = tokens.get(at)?;
                match reserve(value) {
                    Some(value) => settings.reserve = Some(value),
                    None => self.ignored(value),
                }
            }
            "expandable_segments_reserve_by_class" => return self.reserve_by_class(tokens, at),
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
                tokens.boolean(at)?;
                self.note(key, "it moves a lock, not memory");
            }
            "pinned_use_cuda_host_register"
            | "pinned_use_hip_host_register"
            | "pinned_use_background_threads"
            | "pinned_free_catch_all" => {
                tokens.boolean(at)?;
                self.note(key, "it is about host memory");
            }
            "pinned_num_register_threads" => {
                register_threads(tokens.integer(at)?)?;
                self.note(key, "it is about host memory");
            }
            "pinned_reserve_segment_size_mb" => {
                if tokens.integer(at)? == 0 {
                    return Err(ConfError::new(
                        "Pinned reserve segment size has to be greater than 0",
                    ));
                }
                self.note(key, "it is about host memory");
            }
            "pinned_max_round_threshold_mb" | "pinned_max_cached_size_mb" => {
                tokens.integer(at)?;
                self.note(key, "it is about host memory");
            }
            other => {
                return Err(ConfError::new(format!(
                    "Unrecognized key '{other}' in Accelerator allocator config."
                )));
            }
        }
        Ok(at)
    }

    fn note(&mut self, key: &str, why: &str) {
        self.notes.push(format!("{key} changes nothing here: {why}"));
    }

    fn ignored(&mut self, value: &str) {
        self.notes.push(format!(
            "Ignoring invalid expandable-segment reserve value '{value}' in PYTORCH_CUDA_ALLOC_CONF (expected a \
             positive, finite fraction like 0.5 or an absolute size like 40G); using default."
        ));
    }

    /// One number for all size classes, or `[MiB:n,…,>:n]`.
    fn divisions(&mut self, tokens: &Tokens, at: usize) -> Result<usize, ConfError> {
        let out = &mut self.settings.roundup_power2_divisions;
        if !tokens.is(at, "[") {
            let n = tokens.integer(at)?;
            if !n.is_power_of_two() {
                return Err(ConfError::new("For roundups, the divisions has to be power of 2"));
            }
            *out = [n; INTERVALS];
            return Ok(at);
        }
        let mut i = at + 1;
        let (mut first, mut next) = (true, 1);
        while !tokens.is_end(i)? {
            let class = tokens.get(i)?;
            let bound = if class == ">" { None } else { Some(tokens.integer(i)?) };
            if bound.is_some_and(|b| !b.is_power_of_two()) {
                return Err(ConfError::new("For roundups, the intervals have to be power of 2"));
            }
            let n = tokens.integer(i + 2)?;
            if n != 0 && !n.is_power_of_two() {
                return Err(ConfError::new(
                    "For roundups, the divisions has to be power of 2 or 0 to disable roundup",
                ));
            }
            match bound {
                None => out[next..].fill(n),
                Some(bound) => {
                    let class = (bound.ilog2() as usize).min(INTERVALS - 1);
                    if first {
                        out[..class].fill(n);
                    }
                    out[class] = n;
                    (first, next) = (false, class + 1);
                }
            }
            i += 3;
            if !tokens.is_end(i)? {
                i += 1;
            }
        }
        Ok(i)
    }

    /// `[class:value,…]`. Classes are tags that only C++ code can put on a
    /// stream; nothing here can carry one.
    fn reserve_by_class(&mut self, tokens: &Tokens, at: usize) -> Result<usize, ConfError> {
        if !tokens.is(at, "[") {
            return Ok(at);
        }
        let mut i = at + 1;
        while !tokens.is_end(i)? {
            let value = tokens.get(i + 2)?;
            if reserve(value).is_none() {
                self.ignored(value);
            }
            i += 3;
            if tokens.is(i, ",") {
                i += 1;
            }
        }
        self.note("expandable_segments_reserve_by_class", "streams carry no class in a snapshot");
        Ok(i)
    }
}

fn at_least_a_segment(settings: &Settings, key: &str, mb: u64) -> Result<u64, ConfError> {
    let least = settings.large_segment / MIB;
    if mb < least {
        return Err(ConfError::new(format!(
            "CachingAllocator option {key} too small, must be >= {least}"
        )));
    }
    Ok(mb.min(u64::MAX / MIB) * MIB)
}

fn register_threads(n: u64) -> Result<(), ConfError> {
    if !n.is_power_of_two() {
        return Err(ConfError::new(format!(
            "Number of register threads has to be power of 2, got {n}"
        )));
    }
    if n > 128 {
        return Err(ConfError::new(format!(
            "Number of register threads should be less than or equal to 128, got {n}"
        )));
    }
    Ok(())
}

fn backend(name: &str) -> Result<Backend, ConfError> {
    match name {
        "native" => Ok(Backend::Native),
        "cudaMallocAsync" => Ok(Backend::CudaMallocAsync),
        _ => {
            Err(ConfError::new("Unknown allocator backend, options are native and cudaMallocAsync"))
        }
    }
}

/// `0.5`, or `40G`; nothing else.
fn reserve(value: &str) -> Option<Reserve> {
    let (number, gib) = match value.strip_suffix(['G', 'g']) {
        Some(number) => (number, true),
        None => (value, false),
    };
    let n: f64 = number.parse().ok().filter(|n: &f64| n.is_finite() && *n > 0.0)?;
    Some(if gib { Reserve::Bytes((n * (1_u64 << 30) as f64) as u64) } else { Reserve::Fraction(n) })
}

/// A configuration that PyTorch refuses, in its words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfError {
    /// What PyTorch says.
    pub pytorch: String,
    /// Where PyTorch's words alone do not help (it says just "stoull"): what it is about.
    pub about: Option<String>,
}

impl ConfError {
    pub(crate) fn new(pytorch: impl Into<String>) -> ConfError {
        ConfError { pytorch: pytorch.into(), about: None }
    }

    pub(crate) fn about(mut self, about: String) -> ConfError {
        self.about = Some(about);
        self
    }
}

impl fmt::Display for ConfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.about {
            Some(about) => write!(f, "{} ({about})", self.pytorch),
            None => f.write_str(&self.pytorch),
        }
    }
}

impl std::error::Error for ConfError {}
