//! From recorded stacks to the frames of a snapshot: names, files, lines.
//!
//! It needs nothing but the three regions and the files of the libraries. So it works the same in
//! the process that recorded, and in another one after it died. It is never called in a hook,
//! because it allocates and reads files.
//!
//! Frames look as PyTorch writes them. A Python frame has `co_name`, `co_filename`, and the line of
//! the instruction. A native frame has the exported symbol's name or "??", and the path of the
//! library. Its line is the offset in the library of the byte before the return address. The frames
//! of a Python evaluation come before (inside) the interpreter's main loop that runs them. PyTorch
//! gives each main loop just one Python frame and puts those left over at the very end. Since
//! CPython 3.11 one main loop runs many frames, so its stacks have the outer Python functions
//! outside of the program's entry point. [`Splice`] chooses.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::rc::Rc;

use memtrace_format::event::{LabelId, NO_LABEL};
use memtrace_format::labels;
use memtrace_format::snapshot::{Frame, FrameIx, StackIx, Tables};
use memtrace_format::stacks::{
    CodeRecord, HEAD_REFUSED, ModuleRecord, NO_CODE, NO_STACK, RawFrame, Reason, StackId, Words,
    all_frames, code, frames, modules,
};
use memtrace_origin::{NO_FILE, Places};

use crate::elf::names_at;
use crate::file;
use crate::lines::line;
use crate::release;

/// How Python frames are merged into native ones.
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

/// Collects named stacks, each frame and each stack once.
pub struct Namer<W> {
    depot: W,
    codes: W,
    libraries: Vec<ModuleRecord>,
    /// The region of labels, if there is one, and the paths that have been asked for.
    labels: Option<W>,
    paths: HashMap<LabelId, Option<Rc<str>>>,
    splice: Splice,
    /// Return addresses in the depot, less one, ascending.
    calls: Vec<u64>,
    /// Names by library and address in it, of all those when the library was read.
    symbols: HashMap<usize, HashMap<u64, Option<String>>>,
    records: HashMap<u32, Option<CodeRecord>>,
    words: HashMap<u64, FrameIx>,
    distinct: HashMap<Frame, FrameIx>,
    frames: Vec<Frame>,
    ids: HashMap<StackId, Option<StackIx>>,
    stacks: Vec<Vec<FrameIx>>,
    by_content: HashMap<Vec<FrameIx>, StackIx>,
}

impl<W: Words> Namer<W> {
    /// One that names labels, too.
    #[must_use]
    pub fn with_labels(self, labels: W) -> Namer<W> {
        Namer { labels: Some(labels), ..self }
    }

    /// The names of a label, outermost first, as one text.
    pub fn label(&mut self, id: LabelId) -> Option<Rc<str>> {
        if id == NO_LABEL {
            return None;
        }
        let labels = self.labels.as_ref()?;
        self.paths.entry(id).or_insert_with(|| labels::path(labels, id).map(Rc::from)).clone()
    }

    /// How many names found no room.
    pub fn labels_refused(&self) -> u64 {
        self.labels.as_ref().map_or(0, |words| words.word(HEAD_REFUSED))
    }

    /// A namer for the stacks of three regions.
    pub fn new(depot: W, codes: W, libraries: W, splice: Splice) -> Namer<W> {
        Namer {
            depot,
            codes,
            libraries: modules(&libraries),
            labels: None,
            paths: HashMap::new(),
            splice,
            calls: Vec::new(),
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

    /// The frames of a stack as they were recorded, innermost first;
    /// `None` if there is no such stack.
    pub fn recorded(&self, id: StackId) -> Option<Vec<RawFrame>> {
        let words = frames(&self.depot, id)?;
        Some(words.into_iter().filter_map(RawFrame::unpack).collect())
    }

    /// The name of the function that a native call is in.
    pub fn function(&mut self, pc: u64, epoch: u16) -> &str {
        let raw = RawFrame::Native { pc, epoch };
        let frame = self.frame(raw.pack(), raw);
        &self.frames[frame as usize].name
    }

    /// The path of the library that a native call is in, if it is known.
    pub fn library_of(&self, pc: u64, epoch: u16) -> Option<&str> {
        self.library(pc.saturating_sub(1), epoch).map(|i| &*self.libraries[i].path)
    }

    /// The source file of a Python function.
    pub fn source_file(&self, id: u32) -> Option<String> {
        (id != NO_CODE).then(|| code(&self.codes, id))?.map(|record| record.filename)
    }

    /// The libraries that frames are in, each with its build id (or none), for
    /// whoever looks for more in their files.
    pub fn build_ids(&self) -> BTreeMap<String, String> {
        let used = self.symbols.keys().map(|i| &self.libraries[*i]);
        used.map(|m| (m.path.clone(), file::hex(&m.build_id))).collect()
    }

    /// Where the process has its Python, by the libraries that it has loaded.
    pub fn places(&self) -> Places {
        Places::of_libraries(self.libraries.iter().map(|m| &*m.path))
    }

    /// The release of PyTorch that the process runs, if it runs one and says so.
    pub fn pytorch(&self) -> Option<String> {
        release::of_libraries(self.libraries.iter().map(|m| &*m.path))
    }

    /// The same, and the other paths by which Python knows these folders, taken from the
    /// named frames. Where PyTorch is reached through a link, its libraries still have their
    /// real path. This asks the file system.
    pub fn places_and_links(&self) -> Places {
        let mut places = self.places();
        let real = |path: &str| Some(fs::canonicalize(path).ok()?.to_str()?.to_owned());
        places.add_links(&self.frames, real);
        places
    }

    /// The path of the library that had this address, the last if there were several.
    pub fn library_at(&self, address: u64) -> Option<&str> {
        let has = |m: &&ModuleRecord| (m.start..m.end).contains(&address);
        self.libraries.iter().rev().find(has).map(|m| &*m.path)
    }

    /// All frames and all stacks that were named so far, as a snapshot holds them.
    pub fn tables(&self) -> Tables<'_> {
        Tables { frames: &self.frames, stacks: &self.stacks }
    }

    /// Reads the names of everything that is in the depot now, so that
    /// naming a stack takes no time later.
    pub fn read_libraries(&mut self) {
        self.collect_calls();
        for i in 0..self.libraries.len() {
            let (start, end) = (self.libraries[i].start, self.libraries[i].end);
            let first = self.calls.partition_point(|call| *call < start);
            if self.calls.get(first).is_some_and(|call| *call < end) {
                let names = self.names_in(i);
                self.symbols.insert(i, names);
            }
        }
    }

    /// Is it the stack of a call that Python made because it ends?
    pub fn is_of_python_s_end(&mut self, id: StackId) -> bool {
        /// What ends Python; from 3.13 on the first calls the second as its last act.
        const ENDS: [&str; 2] = ["Py_FinalizeEx", "_Py_Finalize"];
        /// What an exception that nobody caught comes to, `SystemExit` too: where no
        /// Python frame is left, its frames go.
        const LAST_WORDS: [&str; 3] = ["PyErr_PrintEx", "_PyErr_PrintEx", "_Py_HandleSystemExit"];
        let recorded = self.recorded(id).unwrap_or_default();
        let (mut python, mut last_words) = (false, false);
        // They are among the outermost frames.
        for frame in recorded.into_iter().rev() {
            match frame {
                RawFrame::Python { .. } => python = true,
                RawFrame::Native { pc, epoch } => {
                    let name = self.native(pc, epoch).name;
                    if ENDS.contains(&&*name) {
                        return true;
                    }
                    last_words |= LAST_WORDS.contains(&&*name);
                }
                RawFrame::Missing(_) | RawFrame::Elided => {}
            }
        }
        last_words && !python
    }

    fn name(&mut self, id: StackId) -> Option<Vec<FrameIx>> {
        let words = frames(&self.depot, id)?;
        let raw: Vec<(u64, RawFrame)> =
            words.iter().filter_map(|w| Some((*w, RawFrame::unpack(*w)?))).collect();
        let is_code = |f: &RawFrame| matches!(f, RawFrame::Native { .. } | RawFrame::Python { .. });
        let empty = !raw.iter().any(|(_, f)| is_code(f));
        let raw = raw.into_iter().filter(|(_, f)| match f {
            // Why Python frames are missing is said where nothing else is. In a stack of native
            // frames it would be under every C++ thread.
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
        let (base, start) = (self.libraries[i].base, self.libraries[i].start);
        let address = call.wrapping_sub(base);
        if !self.symbols.get(&i).is_some_and(|known| known.contains_key(&address)) {
            let mut names = self.read_symbols(i, address);
            names.entry(address).or_insert(None);
            self.symbols.insert(i, names);
        }
        let name = self.symbols[&i].get(&address).cloned().flatten();
        Frame {
            name: name.unwrap_or_else(|| UNKNOWN.into()),
            filename: self.libraries[i].path.clone(),
            line: call - start,
        }
    }

    /// The names of this address, and of all others in the same library that are in the depot.
    /// The file is read once for all of them.
    fn read_symbols(&mut self, i: usize, address: u64) -> HashMap<u64, Option<String>> {
        if self.calls.binary_search(&address.wrapping_add(self.libraries[i].base)).is_err() {
            self.collect_calls();
        }
        self.names_in(i)
    }

    fn collect_calls(&mut self) {
        let calls = all_frames(&self.depot).filter_map(|word| match RawFrame::unpack(word)? {
            RawFrame::Native { pc, .. } => Some(pc.wrapping_sub(1)),
            _ => None,
        });
        self.calls = calls.collect();
        self.calls.sort_unstable();
        self.calls.dedup();
    }

    fn names_in(&self, i: usize) -> HashMap<u64, Option<String>> {
        let library = &self.libraries[i];
        let first = self.calls.partition_point(|call| *call < library.start);
        let after = self.calls.partition_point(|call| *call < library.end);
        let addresses: Vec<u64> =
            self.calls[first..after].iter().map(|call| call.wrapping_sub(library.base)).collect();
        let names = names_at(Path::new(&library.path), &library.build_id, &addresses);
        let names = names.unwrap_or_else(|| vec![None; addresses.len()]);
        addresses.into_iter().zip(names).collect()
    }

    /// The library that had an address in an epoch. If none is known to have had it just then, it
    /// is the only one that ever had it. Libraries are listed a little later than they are loaded.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::this_program;
    use memtrace_format::made::Made;

    fn namer(made: &Made, splice: Splice) -> Namer<&[u64]> {
        Namer::new(&made.depot, &made.codes, &made.modules, splice)
    }

    fn native(pc: u64, epoch: u16) -> RawFrame {
        RawFrame::Native { pc, epoch }
    }

    fn short(frames: &[Frame]) -> Vec<String> {
        frames.iter().map(|f| format!("{} {} {}", f.name, f.filename, f.line)).collect()
    }

    #[test]
    fn python_frames_have_the_line_of_their_position() {
        let mut made = Made::of_words(5000);
        let code = made.function("f", "a.py", 7);
        let id = made.stack(&[
            RawFrame::Python { code, unit: Some(1) },
            RawFrame::Python { code, unit: Some(0) },
            RawFrame::Python { code, unit: None },
            RawFrame::Python { code, unit: Some(9) },
            RawFrame::Python { code: NO_CODE, unit: Some(0) },
        ]);
        let named = namer(&made, Splice::Evaluation).frames(id);
        let expect = [
            "f a.py 8",
            "f a.py 7",
            "f a.py 7",
            "f a.py 0",
            "[no room for more Python functions] memtrace 0",
        ];
        assert_eq!(short(&named), expect);
    }

    #[test]
    fn the_same_frame_and_the_same_stack_are_kept_once() {
        let mut made = Made::of_words(5000);
        let outer = made.function("g", "a.py", 5);
        let [code, twin] = [0; 2].map(|_| made.function("f", "a.py", 1));
        let frame = |code| RawFrame::Python { code, unit: Some(0) };
        let ids = [code, twin, outer].map(|inner| made.stack(&[frame(inner), frame(outer)]));
        let mut namer = namer(&made, Splice::Evaluation);
        let [first, second, third] = ids.map(|id| namer.stack(id));
        assert_eq!(first, second, "two code objects that look the same");
        assert_ne!(first, third);
        assert_eq!(namer.stack(NO_STACK), None);
        assert_eq!(namer.stack(4000), None);
        let tables = namer.tables();
        assert_eq!((tables.frames.len(), tables.stacks.len()), (2, 2));
    }

    #[test]
    fn reasons_stand_where_nothing_else_does_and_gaps_always() {
        let mut made = Made::of_words(5000);
        made.library("/lib/a.so", 0x10000..0x11000, 0, None);
        let missing = RawFrame::Missing;
        let mut named = |raw: &[RawFrame]| {
            let id = made.stack(raw);
            short(&namer(&made, Splice::Evaluation).frames(id))
        };
        assert_eq!(
            named(&[missing(Reason::NoThreadState)]),
            ["[the thread runs no Python] memtrace 0"]
        );
        assert_eq!(
            named(&[native(0x10011, 0), missing(Reason::NoThreadState)]),
            ["?? /lib/a.so 16"]
        );
        assert_eq!(
            named(&[
                native(0x10011, 0),
                RawFrame::Elided,
                native(0x10021, 0),
                missing(Reason::Truncated)
            ]),
            [
                "?? /lib/a.so 16",
                "[frames left out] memtrace 0",
                "?? /lib/a.so 32",
                "[the outer frames could not be read] memtrace 0"
            ]
        );
        assert_eq!(named(&[native(0x99, 0)]), ["?? ?? 152"]);
    }

    #[test]
    fn an_address_belongs_to_the_library_of_its_epoch() {
        let mut made = Made::of_words(5000);
        made.library("/lib/first.so", 0x10000..0x11000, 0, Some(2));
        made.library("/lib/second.so", 0x10000..0x11000, 3, Some(3));
        made.library("/lib/third.so", 0x10000..0x11000, 4, None);
        made.library("/lib/alone.so", 0x20000..0x21000, 3, None);
        let mut of = |pc, epoch| {
            let id = made.stack(&[native(pc, epoch)]);
            namer(&made, Splice::Evaluation).frames(id)[0].filename.clone()
        };
        for (epoch, path) in [(0, "first"), (2, "first"), (3, "second"), (4, "third"), (9, "third")]
        {
            assert_eq!(of(0x10010, epoch), format!("/lib/{path}.so"));
        }
        assert_eq!(of(0x20010, 0), "/lib/alone.so", "listed later than it was met");
        assert_eq!(of(0x11001, 0), "??", "a return address behind the end is a call before it");
        assert_eq!(of(0x11000, 0), "/lib/first.so");
    }

    #[allow(unsafe_code, reason = "the file must have a function of just this name")]
    #[unsafe(no_mangle)]
    #[inline(never)]
    extern "C" fn _PyEval_EvalFrameDefault() -> i32 {
        std::hint::black_box(7)
    }

    #[test]
    fn pytorch_puts_one_python_frame_before_each_main_loop() {
        let mut made = Made::of_words(5000);
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| {
            let code = made.function(name, "a.py", 1);
            RawFrame::Python { code, unit: Some(0) }
        });
        // Names come from a file: this test's own, with a function of the
        // name that PyTorch looks for.
        let here = this_program();
        let path = std::env::current_exe().expect("a path");
        made.library(path.to_str().expect("UTF-8"), here.clone(), 0, None);
        let main_loop = native(_PyEval_EvalFrameDefault as *const () as u64 + 1, 0);
        let start = native(here.start + 1, 0);
        let id = made.stack(&[a, b, main_loop, c, d, main_loop, start]);
        let order = |splice| -> Vec<String> {
            namer(&made, splice).frames(id).into_iter().map(|f| f.name).collect()
        };
        assert_eq!(order(Splice::Evaluation), ["a", "b", EVAL, "c", "d", EVAL, UNKNOWN]);
        assert_eq!(order(Splice::PyTorch), ["a", EVAL, "b", EVAL, UNKNOWN, "c", "d"]);
    }
}
