//! The stacks of a recorder: taken into the black box, named when a snapshot is written.

use std::sync::atomic::AtomicU64;

use memtrace_format::blackbox::Region;
use memtrace_format::event::StackId;
use memtrace_format::key::{Kept, StackTables};
use memtrace_format::stacks::Reason;
use memtrace_symbols::{Namer, Splice};

use crate::record::blackbox::Mapped;
use crate::stack::python::offsets;
use crate::stack::{Mine, Mode, Regions, Site, Stacks as Taker};

/// See the module's documentation. What every stack needs, first.
#[repr(C)]
pub struct Stacks {
    mode: Mode,
    /// Also where memory is given back.
    of_frees: bool,
    /// `None` if the regions could not be used; every stack is then missing.
    taker: Option<Taker>,
}

impl Stacks {
    /// Stacks of this kind in the regions of a black box.
    pub fn new(mode: Mode, of_frees: bool, blackbox: &Mapped) -> Stacks {
        let regions = Regions {
            depot: blackbox.region(Region::Depot),
            codes: blackbox.region(Region::Code),
            modules: blackbox.region(Region::Modules),
            space: blackbox.space(),
        };
        Stacks { mode, of_frees, taker: Taker::new(regions) }
    }

    /// Does the user want stacks for this?
    #[inline]
    pub fn wanted(&self, site: Site) -> bool {
        self.mode != Mode::None && (site == Site::Alloc || self.of_frees)
    }

    /// The stack of the calling thread.
    pub fn capture(&self, mine: &Mine, site: Site) -> StackId {
        self.taker.as_ref().map_or(0, |t| t.capture(self.mode, site, mine))
    }

    /// The stack of a call that returns to `caller`, which is in it even
    /// if the user wants no native frames.
    pub fn capture_call(&self, mine: &Mine, site: Site, caller: usize) -> StackId {
        let taker = self.taker.as_ref();
        taker.map_or(0, |t| t.capture_call(self.mode, site, mine, caller as u64))
    }

    /// Runs `close`, which may unload libraries, so that nothing learnt
    /// from them is believed afterwards.
    pub fn closing<T>(&self, close: impl FnOnce() -> T) -> T {
        crate::stack::closing(self.taker.as_ref(), close)
    }

    /// Learns of libraries that were loaded since. For the background thread.
    pub fn refresh(&self) {
        if let Some(taker) = &self.taker {
            taker.refresh();
        }
    }

    /// Why stacks have no Python frames in a process that runs Python, once a stack was taken.
    pub fn python_refused(&self) -> Option<Reason> {
        if self.mode == Mode::None { None } else { offsets::refused() }
    }

    /// For turning ids into frames.
    pub fn namer(&self) -> Namer<&'static [AtomicU64]> {
        let nothing = || Namer::new(&[][..], &[][..], &[][..], Splice::PyTorch);
        self.taker.as_ref().map(Taker::words).map_or_else(nothing, |[depot, codes, modules]| {
            Namer::new(depot, codes, modules, Splice::PyTorch)
        })
    }

    /// How full the regions are, for a snapshot's `memtrace` key.
    pub fn about(&self) -> StackTables {
        let mode = match self.mode {
            Mode::None => "none",
            Mode::Python => "python",
            Mode::All => "all",
        };
        let mode = Some(mode.to_owned());
        let Some(status) = self.taker.as_ref().map(Taker::status) else {
            let problem = Some("no room".to_owned());
            return StackTables { mode, problem, ..StackTables::default() };
        };
        let python = match status.python {
            Ok(hex) => format!("{}.{}.{}", hex >> 24, hex >> 16 & 0xff, hex >> 8 & 0xff),
            Err(reason) => reason.text().to_owned(),
        };
        StackTables {
            mode,
            problem: None,
            python: Some(python),
            nodes: Some(status.nodes.0),
            nodes_max: Some(status.nodes.1),
            code_words: Some(status.code_words.0),
            code_words_max: Some(status.code_words.1),
            module_words: Some(status.module_words.0),
            module_words_max: Some(status.module_words.1),
            refused: Some(status.refused),
            kept: Kept::NOTHING,
        }
    }
}
