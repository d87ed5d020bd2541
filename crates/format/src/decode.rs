//! From the tree of a file to the snapshot it stands for.
//!
//! Accepts what every PyTorch since 2.1 writes. Keys that an older release lacks may be missing.
//! Keys that a newer one adds are kept ([`Other`]). What every release has must be there and of its
//! type, and the error names the place. A bare list of segments (`torch.cuda.memory_snapshot()`) is
//! a snapshot without a history, as PyTorch's own tool takes it. `frames` is a list, or the number
//! of a stack in the tables that the snapshot then has ([`crate::json`]).
//!
//! A file may hold several snapshots: one behind the other, in a list, or in a dictionary by
//! rank. [`Snapshot::read_all`] finds them.
//!
//! Sharing makes small files large: a list of a million references to one list of a
//! million entries is a few megabytes. So what is made is bounded by the length of the
//! file, and by what the caller allows.

use std::collections::HashMap;

use crate::error::ReadError;
use crate::literals::Literal;
use crate::snapshot::{
    Absent, Action, Block, BlockState, Frame, FrameIx, Other, Place, PoolId, Segment, Snapshot,
    StackIx, Text, TraceEntry, Value,
};
use crate::tree::{DictId, Item, ListId, Tree};
use crate::{json, pickle};

mod place;
mod stacks;
mod values;

use place::{At, Fields, shape};

/// No valid file spends fewer bytes on an entry, a block or a segment.
const LEAST_BYTES: usize = 16;
/// What one takes in memory.
const PIECE: usize = size_of::<TraceEntry>();
/// What a part of another value takes, with what its dictionary or list adds.
const VALUE: usize = 2 * size_of::<Value>();
/// Texts of a snapshot have at most so many bytes for each byte of the file: a text is in the
/// file once, and in memory for each use.
const TEXT: usize = 16;

/// So much of the key of a snapshot is shown.
const LONGEST_KEY: usize = 100;

/// How deep a value under a key that is not ours may nest.
const MAX_DEPTH: u32 = 32;

/// One of the snapshots of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The key that it is under, where a dictionary holds the snapshots.
    pub key: Option<String>,
    /// How its pickle was written, if it is the first in one.
    pub facts: Option<pickle::Facts>,
    /// Its stacks are in tables ([`crate::json`]).
    pub has_tables: bool,
    /// What it says, or why it says nothing: among several, one may be
    /// damaged, and another no snapshot at all.
    pub snapshot: Result<Snapshot>,
}

impl Part {
    fn unread(error: ReadError) -> Part {
        Part { key: None, facts: None, has_tables: false, snapshot: Err(error) }
    }
}

impl Snapshot {
    /// Reads the one snapshot of a file: a pickle of protocol 2 to 5, or JSON.
    ///
    /// # Errors
    /// [`ReadError`] with the place and the reason.
    pub fn read(bytes: &[u8]) -> Result<Snapshot, ReadError> {
        let mut all = Snapshot::read_all(bytes, usize::MAX)?;
        let several = ReadError::NotASnapshot(format!("the file holds {} of them", all.len()));
        match (all.pop(), all.len()) {
            (Some(part), 0) => part.snapshot,
            (last, _) => {
                let bad = all.into_iter().chain(last).find_map(|part| part.snapshot.err());
                Err(bad.unwrap_or(several))
            }
        }
    }

    /// Reads all snapshots of a file, at least one, in so many bytes of memory (and
    /// those of the file). What is among them and can't be read has its place in the
    /// list, so that nothing goes missing.
    ///
    /// # Errors
    /// [`ReadError`] with the place and the reason, if not one of several things can be read.
    pub fn read_all(bytes: &[u8], memory: usize) -> Result<Vec<Part>, ReadError> {
        // The tree goes when the snapshots are made of it; while they are, both are there.
        let (for_tree, mut memory) = (memory / 2, memory / 2);
        let json = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
        if looks_like_json(json) {
            let (tree, cut) = json::read_within(json, for_tree)?;
            let mut all = Decoder::new(&tree, json.len(), &mut memory).all();
            all.extend(cut.map(Part::unread));
            return or_first_error(all);
        }
        let (mut all, mut at) = (Vec::new(), 0);
        // What follows a pickle and isn't one is of no meaning, also to Python.
        while at == 0 || bytes.get(at) == Some(&pickle::BEGIN) {
            let pickle = match pickle::read_within(&bytes[at..], for_tree) {
                Ok(pickle) => pickle,
                Err(error) => {
                    all.push(Part::unread(error.behind(at)));
                    break;
                }
            };
            let length = pickle.facts.length;
            let mut parts = Decoder::new(&pickle.tree, length, &mut memory).all();
            if let Some(first) = parts.first_mut() {
                first.facts = Some(pickle.facts);
            }
            all.append(&mut parts);
            at += length;
        }
        or_first_error(all)
    }

    /// Takes a tree that was read from so many bytes for a snapshot.
    ///
    /// # Errors
    /// [`ReadError`] with the place and the reason.
    pub fn from_tree(tree: &Tree<'_>, input_bytes: usize) -> Result<Snapshot, ReadError> {
        Decoder::new(tree, input_bytes, &mut usize::MAX.clone()).snapshot(tree.root())
    }
}

/// Where nothing can be read, the first error stands for all.
fn or_first_error(all: Vec<Part>) -> Result<Vec<Part>> {
    if all.iter().any(|part| part.snapshot.is_ok()) {
        return Ok(all);
    }
    match all.into_iter().next() {
        Some(Part { snapshot: Err(error), .. }) => Err(error),
        _ => Err(ReadError::NotASnapshot("there is nothing in it".to_owned())),
    }
}

/// What some programs put in front of a text, JSON too.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// JSON begins with a bracket; no pickle does.
pub fn looks_like_json(bytes: &[u8]) -> bool {
    bytes.iter().find(|b| !b.is_ascii_whitespace()).is_some_and(|b| b"{[".contains(b))
}

struct Decoder<'t, 'm> {
    tree: &'t Tree<'t>,
    /// The literal that each string of the tree is, if it is one.
    literals: Vec<Option<Literal>>,
    snapshot: Snapshot,
    /// Which of the tree's snapshots this is.
    part: u32,
    /// Frames and stacks that were met before, in which of the snapshots,
    /// by their number in the tree …
    frames: Vec<Option<(u32, FrameIx)>>,
    stacks: Vec<Option<(u32, StackIx)>>,
    /// … and by what they say, for files that share nothing.
    equal_frames: HashMap<Frame, FrameIx>,
    equal_stacks: HashMap<Vec<FrameIx>, StackIx>,
    /// The file's tables, where `frames` is a number.
    tables: Option<(ListId, ListId)>,
    /// Segments, blocks and entries that may still come.
    budget: usize,
    /// Parts of other values that may still come.
    values: usize,
    /// Bytes of text that may still come.
    texts: usize,
    /// Bytes that may still be used.
    memory: &'m mut usize,
}

type Result<T, E = ReadError> = std::result::Result<T, E>;

impl<'t, 'm> Decoder<'t, 'm> {
    fn new(tree: &'t Tree<'t>, input_bytes: usize, memory: &'m mut usize) -> Decoder<'t, 'm> {
        let literals =
            tree.texts().iter().map(|t| Literal::ALL.iter().copied().find(|w| w.text() == t));
        Decoder {
            tree,
            literals: literals.collect(),
            snapshot: Snapshot::default(),
            part: 0,
            frames: vec![None; tree.dicts.len()],
            stacks: vec![None; tree.lists.len()],
            equal_frames: HashMap::new(),
            equal_stacks: HashMap::new(),
            tables: None,
            budget: 4096 + input_bytes / LEAST_BYTES,
            values: 4096 + input_bytes,
            texts: (1 << 20) + TEXT.saturating_mul(input_bytes),
            memory,
        }
    }

    /// The snapshots that the tree holds, and what is among them.
    fn all(mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        let members = self.members();
        let alone = matches!(members[..], [(None, root)] if root == self.tree.root());
        for (key, item) in members {
            // What it says of itself where it is none takes about as much again.
            if self.use_memory(2 * size_of::<Part>()).is_err() {
                parts.push(Part::unread(ReadError::TooLarge));
                break;
            }
            self.part += 1;
            self.equal_frames.clear();
            self.equal_stacks.clear();
            let snapshot = if alone { self.snapshot(item) } else { self.member(item) };
            parts.push(Part { key, facts: None, has_tables: self.tables.is_some(), snapshot });
        }
        parts
    }

    /// Where they are. If there is none, the root is taken for one, and the error says what is
    /// wrong with it. If there is one, whatever is beside it was meant to be another.
    fn members(&self) -> Vec<(Option<String>, Item)> {
        let alone = || vec![(None, self.tree.root())];
        match self.tree.root() {
            root if self.is_snapshot(root) => alone(),
            Item::List(id) | Item::Tuple(id) => {
                let items = self.tree.list(id);
                if !self.is_any_snapshot(items.iter()) {
                    return alone();
                }
                items.iter().map(|item| (None, *item)).collect()
            }
            Item::Dict(id) => {
                let items = self.tree.dict(id);
                // One key is missing, then, and this is no list of ranks.
                let is_half =
                    items.iter().any(|(key, _)| self.literal(*key) == Some(Literal::Segments));
                if is_half || !self.is_any_snapshot(items.iter().map(|(_, item)| item)) {
                    return alone();
                }
                let name = |key: Item| match key {
                    Item::Text(text) => self.tree.text(text).chars().take(LONGEST_KEY).collect(),
                    other => self.tree.describe(other),
                };
                items.iter().map(|(key, item)| (Some(name(*key)), *item)).collect()
            }
            _ => alone(),
        }
    }

    fn is_any_snapshot<'i>(&self, mut items: impl Iterator<Item = &'i Item>) -> bool {
        items.any(|item| self.is_snapshot(*item) || self.is_segments(*item))
    }

    /// What `torch.cuda.memory_snapshot()` gives, if it gives anything.
    fn is_segments(&self, item: Item) -> bool {
        let Item::List(id) = item else { return false };
        let Some(Item::Dict(first)) = self.tree.list(id).first() else { return false };
        self.tree.dict(*first).iter().any(|(key, _)| self.literal(*key) == Some(Literal::Blocks))
    }

    fn member(&mut self, item: Item) -> Result<Snapshot> {
        match item {
            item if self.is_snapshot(item) || self.is_segments(item) => self.snapshot(item),
            Item::Dict(id) => Err(ReadError::NotASnapshot(self.keys(id))),
            other => Err(ReadError::NotASnapshot(self.tree.describe(other))),
        }
    }

    fn is_snapshot(&self, item: Item) -> bool {
        let Item::Dict(id) = item else { return false };
        let has =
            |literal| self.tree.dict(id).iter().any(|(key, _)| self.literal(*key) == Some(literal));
        has(Literal::Segments) && has(Literal::DeviceTraces)
    }

    fn snapshot(&mut self, root: Item) -> Result<Snapshot> {
        self.snapshot = Snapshot::default();
        self.tables = None;
        self.read(root)?;
        Ok(std::mem::take(&mut self.snapshot))
    }

    fn read(&mut self, root: Item) -> Result<()> {
        use Literal::{
            AllocatorSettings, DeviceTraces, ExternalAnnotations, Frames, HostSegments, HostTraces,
            Memtrace, Segments, Stacks,
        };
        let top = match root {
            Item::Dict(id) => id,
            Item::List(segments) => {
                self.snapshot.segments = self.segments(Item::List(segments), Segments, false)?;
                self.snapshot.absent =
                    Absent { external_annotations: true, host_segments: true, host_traces: true };
                return Ok(());
            }
            other => {
                let what = format!("the file holds {}", self.tree.describe(other));
                return Err(ReadError::NotASnapshot(what));
            }
        };
        let keys = [
            Segments,
            DeviceTraces,
            AllocatorSettings,
            ExternalAnnotations,
            HostSegments,
            HostTraces,
            Memtrace,
            Stacks,
            Frames,
        ];
        if !self.is_snapshot(root) {
            return Err(ReadError::NotASnapshot(self.keys(top)));
        }
        let fields = self.fields(top, At(Place::Top), keys)?;
        let (segments, traces) = (fields.need(Segments)?, fields.need(DeviceTraces)?);
        self.tables = self.tables_of(fields.get(Stacks), fields.get(Frames))?;
        self.snapshot.segments = self.segments(segments, Segments, false)?;
        for (d, trace) in self.list(traces, || DeviceTraces.text().to_owned())?.iter().enumerate() {
            self.spend("device_traces")?;
            let place = || format!("device_traces[{d}]");
            let trace = self.trace(*trace, place, |i| Place::Entry(d as u32, i))?;
            self.snapshot.device_traces.push(trace);
        }
        if let Some(item) = fields.get(AllocatorSettings) {
            self.snapshot.allocator_settings = self.value(item, AllocatorSettings.text(), 0)?;
        }
        match fields.get(ExternalAnnotations) {
            Some(item) => {
                let place = ExternalAnnotations.text();
                for &annotation in self.list(item, || place.to_owned())? {
                    let value = self.value(annotation, place, 0)?;
                    self.snapshot.external_annotations.push(value);
                }
            }
            None => self.snapshot.absent.external_annotations = true,
        }
        match fields.get(HostSegments) {
            Some(item) => {
                self.snapshot.host_segments = self.segments(item, HostSegments, true)?;
            }
            None => self.snapshot.absent.host_segments = true,
        }
        match fields.get(HostTraces) {
            Some(item) => {
                let place = || HostTraces.text().to_owned();
                self.snapshot.host_traces = self.trace(item, place, Place::HostEntry)?;
            }
            None => self.snapshot.absent.host_traces = true,
        }
        match fields.get(Memtrace) {
            Some(item @ Item::Dict(_)) => {
                let value = self.value(item, Memtrace.text(), 0)?;
                self.snapshot.memtrace = self.key(value)?;
            }
            None | Some(Item::None) => {}
            Some(other) => {
                self.other(At(Place::Top), Memtrace.text(), other, &mut HashMap::new())?;
            }
        }
        Ok(())
    }

    /// Stacks and frames by number, if they are two lists; if not, they are somebody else's keys.
    fn tables_of(
        &mut self,
        stacks: Option<Item>,
        frames: Option<Item>,
    ) -> Result<Option<(ListId, ListId)>> {
        if let (Some(Item::List(stacks)), Some(Item::List(frames))) = (stacks, frames) {
            return Ok(Some((stacks, frames)));
        }
        for (key, item) in [(Literal::Stacks, stacks), (Literal::Frames, frames)] {
            if let Some(item) = item {
                self.other(At(Place::Top), key.text(), item, &mut HashMap::new())?;
            }
        }
        Ok(None)
    }

    /// A dictionary that is no snapshot, by what it has instead.
    fn keys(&self, id: DictId) -> String {
        let names = self.tree.dict(id).iter().filter_map(|(key, _)| match key {
            Item::Text(text) => Some(self.tree.text(*text).chars().take(40).collect::<String>()),
            _ => None,
        });
        let names: Vec<String> = names.take(5).collect();
        let has =
            if names.is_empty() { String::new() } else { format!("; it has {}", names.join(", ")) };
        format!("a dictionary without `segments` and `device_traces`{has}")
    }

    fn segments(&mut self, item: Item, key: Literal, host: bool) -> Result<Vec<Segment>> {
        let items = self.list(item, || key.text().to_owned())?;
        let mut segments = Vec::new();
        for (i, &item) in items.iter().enumerate() {
            self.spend(key.text())?;
            segments.push(self.segment(item, i as u32, host)?);
        }
        Ok(segments)
    }

    fn segment(&mut self, item: Item, i: u32, host: bool) -> Result<Segment> {
        use Literal::{
            ActiveSize, Address, AllocatedSize, Blocks, Device, Frames, IsExpandable,
            RequestedSize, SegmentPoolId, SegmentType, Stream, TotalSize,
        };
        let at = At(if host { Place::HostSegment(i) } else { Place::Segment(i) });
        let keys = [
            Device,
            Address,
            TotalSize,
            AllocatedSize,
            ActiveSize,
            RequestedSize,
            Stream,
            SegmentType,
            SegmentPoolId,
            IsExpandable,
            Frames,
            Blocks,
        ];
        let dict = self.dict(item, at)?;
        let fields = self.fields(dict, at, keys)?;
        let mut blocks = Vec::new();
        let address = self.unsigned(&fields, Address)?;
        let mut end = address;
        let items = self.list(fields.need(Blocks)?, || at.key(Blocks))?;
        for (j, &item) in items.iter().enumerate() {
            self.spend(Blocks.text())?;
            let place =
                if host { Place::HostBlock(i, j as u32) } else { Place::Block(i, j as u32) };
            let block = self.block(item, At(place), end)?;
            end = block.address + block.size;
            blocks.push(block);
        }
        if blocks.is_empty() && fields.get(RequestedSize).is_none() {
            return Err(ReadError::PyTorch20);
        }
        Ok(Segment {
            device: self.signed(&fields, Device)?,
            address,
            total_size: self.extent(&fields, address, TotalSize)?,
            allocated_size: self.unsigned(&fields, AllocatedSize)?,
            active_size: self.unsigned(&fields, ActiveSize)?,
            requested_size: self.unsigned(&fields, RequestedSize)?,
            stream: self.unsigned(&fields, Stream)?,
            small: match self.literal(fields.need(SegmentType)?) {
                Some(Literal::Small) => true,
                Some(Literal::Large) => false,
                _ => return Err(self.wrong(&fields, SegmentType, "\"small\" or \"large\"")),
            },
            pool_id: self.pool(&fields, SegmentPoolId)?.unwrap_or_default(),
            is_expandable: match fields.get(IsExpandable) {
                Some(Item::Bool(b)) => b,
                None => false,
                Some(_) => return Err(self.wrong(&fields, IsExpandable, "True or False")),
            },
            frames: self.live_stack(&fields)?,
            blocks,
        })
    }

    /// `after`: where the block before it ends, its address if it names none.
    fn block(&mut self, item: Item, at: At, after: u64) -> Result<Block> {
        use Literal::{Address, Frames, History, RequestedSize, Size, State};
        let dict = self.dict(item, at)?;
        let fields =
            self.fields(dict, at, [Address, Size, RequestedSize, State, Frames, History])?;
        if fields.get(History).is_some() || fields.get(RequestedSize).is_none() {
            return Err(ReadError::PyTorch20);
        }
        let state = fields.need(State)?;
        let known = if let Item::Text(id) = state {
            BlockState::from_name(self.tree.text(id))
        } else {
            None
        };
        let address = match fields.get(Address) {
            Some(_) => self.unsigned(&fields, Address)?,
            None => after,
        };
        Ok(Block {
            address,
            size: self.extent(&fields, address, Size)?,
            requested_size: self.unsigned(&fields, RequestedSize)?,
            state: known.ok_or_else(|| self.wrong(&fields, State, "a block's state"))?,
            frames: self.live_stack(&fields)?,
        })
    }

    fn trace(
        &mut self,
        item: Item,
        place: impl Fn() -> String,
        entry_place: impl Fn(u32) -> Place,
    ) -> Result<Vec<TraceEntry>> {
        let mut trace = Vec::new();
        for (i, &item) in self.list(item, place)?.iter().enumerate() {
            self.spend("a trace")?;
            trace.push(self.entry(item, At(entry_place(i as u32)))?);
        }
        Ok(trace)
    }

    fn entry(&mut self, item: Item, at: At) -> Result<TraceEntry> {
        use Literal::{
            Addr, CompileContext, DeviceFree, Frames, PoolId, Size, Stream, TimeUs, UserMetadata,
        };
        let keys = [
            Literal::Action,
            Addr,
            DeviceFree,
            Size,
            Stream,
            TimeUs,
            CompileContext,
            UserMetadata,
            PoolId,
            Frames,
        ];
        let dict = self.dict(item, at)?;
        let fields = self.fields(dict, at, keys)?;
        let action = match fields.need(Literal::Action)? {
            Item::Text(id) => match Action::from_name(self.tree.text(id)) {
                Action::Other(name) => {
                    self.use_text(name.len())?;
                    Action::Other(name)
                }
                known => known,
            },
            _ => return Err(self.wrong(&fields, Literal::Action, "a string")),
        };
        // Out of memory names what was free instead of an address.
        let is_oom = action == Action::Oom;
        let addr = self.unsigned(&fields, if is_oom { DeviceFree } else { Addr })?;
        Ok(TraceEntry {
            addr,
            size: self.extent(&fields, if is_oom { 0 } else { addr }, Size)?,
            stream: self.unsigned(&fields, Stream)?,
            time_us: match fields.get(TimeUs) {
                Some(_) => Some(self.signed(&fields, TimeUs)?),
                None => None,
            },
            compile_context: self.text(&fields, CompileContext)?,
            user_metadata: self.text(&fields, UserMetadata)?,
            pool_id: self.pool(&fields, PoolId)?,
            frames: self.stack(&fields)?,
            action,
        })
    }
}

/// An error in a frame, with its place in the list that holds it.
fn inside(error: ReadError, place: impl Fn() -> String) -> ReadError {
    match error {
        ReadError::Shape { place: frame, what } => {
            ReadError::Shape { place: format!("{}, {frame}", place()), what }
        }
        other => other,
    }
}

impl<'t> Decoder<'t, '_> {
    fn list(&self, item: Item, place: impl Fn() -> String) -> Result<&'t [Item]> {
        match item {
            Item::List(id) | Item::Tuple(id) => Ok(self.tree.list(id)),
            _ => Err(shape(place(), format!("{}, not a list", self.tree.describe(item)))),
        }
    }
}
