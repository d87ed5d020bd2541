//! From recorded stacks to the frames of a snapshot: names, files, lines.
//!
//! Needs nothing but the three regions and the files of the libraries, so it works the same in the process that
//! recorded, and in another one after it died. Never in a hook: it allocates and reads files.
//!
//! Frames look as PyTorch writes them. Python: `co_name`, `co_filename`, and the line of the instruction. Native:
//! the exported symbol's name or "??", the path of the library, and as the line the offset in the library of the
//! byte before the return address. The frames of a Python evaluation stand before (inside) the interpreter's main
//! loop that runs them. PyTorch gives each main loop just one Python frame and puts those left over at the very
//! end; since CPython 3.11 one main loop runs many frames, so its stacks have the outer Python functions
//! outside of the program's entry point. [`Splice`] chooses.

use std::collections::HashMap;
use std::path::Path;

use memtrace_format::snapshot::{Frame, FrameIx, StackIx};
use memtrace_format::stacks::{
    CodeRecord, ModuleRecord, NO_CODE, NO_STACK, RawFrame, Reason, StackId, Words, code, frames,
    modules,
};

use super::python::lines::line;
use super::symbols::{Symbols, demangle};

/// How Python frames stand among native ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Splice {
    /// Each inside the evaluation that runs it.
    #[default]
    Evaluation,
    /// As PyTorch 2.x writes them: one for each main loop, the rest at the end.
    PyTorch,
}

/// What PyTorch knows the interpreter's main loop by.
const EVAL: &str = "_PyEval_EvalFrameDefault";
/// PyTorch's word for a name that is not known.
const UNKNOWN: &str = "??";
/// The file of frames that are no code: gaps and reasons.
pub const NO_FILE: &str = "memtrace";

/// Collects named stacks, each frame and each stack once.
pub struct Namer<W> {
    depot: W,
    codes: W,
    libraries: Vec<ModuleRecord>,
    splice: Splice,
    symbols: HashMap<usize, Option<Symbols>>,
    records: HashMap<u32, Option<CodeRecord>>,
    words: HashMap<u64, FrameIx>,
    distinct: HashMap<Frame, FrameIx>,
    frames: Vec<Frame>,
    ids: HashMap<StackId, Option<StackIx>>,
    stacks: Vec<Vec<FrameIx>>,
    by_content: HashMap<Vec<FrameIx>, StackIx>,
}

impl<W: Words> Namer<W> {
    /// A namer for the stacks of three regions.
    pub fn new(depot: W, codes: W, libraries: W, splice: Splice) -> Namer<W> {
        Namer {
            depot,
            codes,
            libraries: modules(&libraries),
            splice,
            symbols: HashMap::new(),
            records: HashMap::new(),
            words: HashMap::new(),
            distinct: HashMap::new(),
            frames: Vec::new(),
            ids: HashMap::new(),
            stacks: Vec::new(),
            by_content: HashMap::new(),
        }
    }

    /// The stack with this id; `None` if there is none.
    pub fn stack(&mut self, id: StackId) -> Option<StackIx> {
        if id == NO_STACK {
            return None;
        }
        if let Some(known) = self.ids.get(&id) {
            return *known;
        }
        let named = self.name(id).map(|frames| {
            *self.by_content.entry(frames).or_insert_with_key(|frames| {
                self.stacks.push(frames.clone());
                (self.stacks.len() - 1) as StackIx
            })
        });
        self.ids.insert(id, named);
        named
    }

    /// The frames of a stack, innermost first.
    pub fn frames(&mut self, id: StackId) -> Vec<Frame> {
        let Some(stack) = self.stack(id) else { return Vec::new() };
        self.stacks[stack as usize].iter().map(|f| self.frames[*f as usize].clone()).collect()
    }

    /// All frames and all stacks that were named, as a snapshot holds them.
    pub fn into_tables(self) -> (Vec<Frame>, Vec<Vec<FrameIx>>) {
        (self.frames, self.stacks)
    }

    fn name(&mut self, id: StackId) -> Option<Vec<FrameIx>> {
        let words = frames(&self.depot, id)?;
        let raw: Vec<(u64, RawFrame)> =
            words.iter().filter_map(|w| Some((*w, RawFrame::unpack(*w)?))).collect();
        let is_code = |f: &RawFrame| matches!(f, RawFrame::Native { .. } | RawFrame::Python { .. });
        let empty = !raw.iter().any(|(_, f)| is_code(f));
        let raw = raw.into_iter().filter(|(_, f)| match f {
            // Why Python frames are missing is told where nothing else is; in a stack of native frames it
            // would stand under every C++ thread.
            RawFrame::Missing(reason) => empty || *reason == Reason::Truncated,
            _ => true,
        });
        let raw: Vec<_> = raw.collect();
        if self.splice == Splice::Evaluation {
            return Some(raw.into_iter().map(|(word, frame)| self.frame(word, frame)).collect());
        }
        let (python, others): (Vec<_>, Vec<_>) =
            raw.into_iter().partition(|(_, f)| matches!(f, RawFrame::Python { .. }));
        let mut python = python.into_iter();
        let mut out = Vec::with_capacity(words.len());
        for (word, frame) in others {
            let ix = self.frame(word, frame);
            if self.frames[ix as usize].name == EVAL
                && let Some((word, frame)) = python.next()
            {
                out.push(self.frame(word, frame));
            }
            out.push(ix);
        }
        out.extend(python.map(|(word, frame)| self.frame(word, frame)));
        Some(out)
    }

    fn frame(&mut self, word: u64, raw: RawFrame) -> FrameIx {
        if let Some(known) = self.words.get(&word) {
            return *known;
        }
        let frame = match raw {
            RawFrame::Native { pc, epoch } => self.native(pc, epoch),
            RawFrame::Python { code, unit } => self.python(code, unit),
            RawFrame::Missing(reason) => no_code(&format!("[{}]", reason.text())),
            RawFrame::Elided => no_code("[frames left out]"),
        };
        let ix = *self.distinct.entry(frame).or_insert_with_key(|frame| {
            self.frames.push(frame.clone());
            (self.frames.len() - 1) as FrameIx
        });
        self.words.insert(word, ix);
        ix
    }

    fn python(&mut self, id: u32, unit: Option<u32>) -> Frame {
        if id == NO_CODE {
            return no_code("[no room for more Python functions]");
        }
        let codes = &self.codes;
        match self.records.entry(id).or_insert_with(|| code(codes, id)) {
            Some(record) => {
                let line = line(record.minor, record.first_line, &record.lines, unit);
                Frame {
                    name: record.name.clone(),
                    filename: record.filename.clone(),
                    line: line.unwrap_or(0).into(),
                }
            }
            None => no_code("[a Python function whose record is damaged]"),
        }
    }

    fn native(&mut self, pc: u64, epoch: u16) -> Frame {
        let call = pc.saturating_sub(1);
        let Some(i) = self.library(call, epoch) else {
            return Frame { name: UNKNOWN.into(), filename: UNKNOWN.into(), line: call };
        };
        let library = &self.libraries[i];
        let symbols = self
            .symbols
            .entry(i)
            .or_insert_with(|| Symbols::open(Path::new(&library.path), &library.build_id));
        let name = symbols.as_ref().and_then(|s| s.name(call.wrapping_sub(library.base)));
        Frame {
            name: name.map_or_else(|| UNKNOWN.into(), demangle),
            filename: library.path.clone(),
            line: call - library.start,
        }
    }

    /// The library that had an address in an epoch. If none is known to have had it just then, the only one
    /// that ever had it: libraries are listed a little later than they are loaded.
    fn library(&self, address: u64, epoch: u16) -> Option<usize> {
        let has = |m: &ModuleRecord| (m.start..m.end).contains(&address);
        let then = |m: &ModuleRecord| m.from <= epoch && m.until.is_none_or(|until| epoch <= until);
        let mut all = self.libraries.iter().enumerate().filter(|(_, m)| has(m));
        let exact = all.clone().rev().find(|(_, m)| then(m));
        let (i, _) = exact.or_else(|| all.next().filter(|_| all.next().is_none()))?;
        Some(i)
    }
}

fn no_code(text: &str) -> Frame {
    Frame { name: text.to_owned(), filename: NO_FILE.to_owned(), line: 0 }
}
