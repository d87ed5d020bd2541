//! From the tree of a file to the snapshot it stands for.
//!
//! Accepts what every PyTorch since 2.1 writes: keys that an older release lacks are allowed to be missing,
//! keys that a newer one adds are kept ([`Other`]). What every release has must be there and of its type, and
//! the error names the place. A bare list of segments (`torch.cuda.memory_snapshot()`) is a snapshot without a
//! history, as PyTorch's own tool takes it.
//!
//! Sharing makes small files large: a list of a million references to one list of a million entries is a few
//! megabytes. So the number of things made is bounded by the length of the file, too.

use std::collections::HashMap;

use crate::error::ReadError;
use crate::snapshot::{
    Absent, Action, Block, BlockState, Frame, FrameIx, Other, Place, PoolId, Segment, Snapshot,
    StackIx, Text, TraceEntry, Value,
};
use crate::tree::{DictId, Item, ListId, Tree};
use crate::words::Word;
use crate::{json, pickle};

/// No honest file spends fewer bytes on an entry, a block or a segment.
const LEAST_BYTES: usize = 16;

/// How deep a value under a key that is not ours may nest.
const MAX_DEPTH: u32 = 32;

impl Snapshot {
    /// Reads a snapshot: a pickle of protocol 2 to 5, or JSON.
    ///
    /// # Errors
    /// [`ReadError`] with the place and the reason.
    pub fn read(bytes: &[u8]) -> Result<Snapshot, ReadError> {
        if looks_like_json(bytes) {
            Snapshot::from_tree(&json::read(bytes)?, bytes.len())
        } else {
            Snapshot::from_tree(&pickle::read(bytes)?.tree, bytes.len())
        }
    }

    /// Takes a tree that was read from so many bytes for a snapshot.
    ///
    /// # Errors
    /// [`ReadError`] with the place and the reason.
    pub fn from_tree(tree: &Tree<'_>, input_bytes: usize) -> Result<Snapshot, ReadError> {
        let words = tree.texts().iter().map(|t| Word::ALL.iter().copied().find(|w| w.text() == t));
        let decoder = Decoder {
            tree,
            words: words.collect(),
            snapshot: Snapshot::default(),
            frames: vec![None; tree.dicts.len()],
            stacks: vec![None; tree.lists.len()],
            equal_frames: HashMap::new(),
            equal_stacks: HashMap::new(),
            budget: 4096 + input_bytes / LEAST_BYTES,
            values: 4096 + input_bytes,
        };
        decoder.snapshot()
    }
}

/// JSON begins with a bracket; no pickle does.
pub fn looks_like_json(bytes: &[u8]) -> bool {
    bytes.iter().find(|b| !b.is_ascii_whitespace()).is_some_and(|b| b"{[".contains(b))
}

struct Decoder<'t> {
    tree: &'t Tree<'t>,
    /// The word that each string of the tree is, if it is one.
    words: Vec<Option<Word>>,
    snapshot: Snapshot,
    /// Frames and stacks that were met before, by their number in the tree …
    frames: Vec<Option<FrameIx>>,
    stacks: Vec<Option<StackIx>>,
    /// … and by what they say, for files that share nothing.
    equal_frames: HashMap<Frame, FrameIx>,
    equal_stacks: HashMap<Vec<FrameIx>, StackIx>,
    /// Segments, blocks and entries that may still come.
    budget: usize,
    /// Parts of other values that may still come.
    values: usize,
}

type Result<T, E = ReadError> = std::result::Result<T, E>;

/// Where we are, for a message. Written out only when something is wrong.
#[derive(Clone, Copy)]
struct At(Place);

impl At {
    fn text(self) -> String {
        match self.0 {
            Place::Top => String::new(),
            Place::Frame(_) => "a frame".to_owned(),
            Place::Segment(s) => format!("segments[{s}]"),
            Place::Block(s, b) => format!("segments[{s}].blocks[{b}]"),
            Place::Entry(d, i) => format!("device_traces[{d}][{i}]"),
            Place::HostSegment(s) => format!("host_segments[{s}]"),
            Place::HostBlock(s, b) => format!("host_segments[{s}].blocks[{b}]"),
            Place::HostEntry(i) => format!("host_traces[{i}]"),
        }
    }

    fn key(self, key: Word) -> String {
        let place = self.text();
        if place.is_empty() { key.text().to_owned() } else { format!("{place}.{}", key.text()) }
    }
}

/// The values of a dictionary's known keys, in the order they were asked for.
struct Fields<const N: usize> {
    at: At,
    keys: [Word; N],
    values: [Option<Item>; N],
}

impl<const N: usize> Fields<N> {
    fn get(&self, key: Word) -> Option<Item> {
        self.keys.iter().position(|k| *k == key).and_then(|i| self.values[i])
    }

    fn need(&self, key: Word) -> Result<Item> {
        self.get(key).ok_or_else(|| shape(self.at.key(key), "missing"))
    }
}

fn shape(place: impl Into<String>, what: impl Into<String>) -> ReadError {
    ReadError::Shape { place: place.into(), what: what.into() }
}

impl Decoder<'_> {
    fn snapshot(mut self) -> Result<Snapshot> {
        use Word::{
            AllocatorSettings, DeviceTraces, ExternalAnnotations, HostSegments, HostTraces,
            Memtrace, Segments,
        };
        let top = match self.tree.root() {
            Item::Dict(id) => id,
            Item::List(segments) => {
                self.snapshot.segments = self.segments(Item::List(segments), Segments, false)?;
                self.snapshot.absent =
                    Absent { external_annotations: true, host_segments: true, host_traces: true };
                return Ok(self.snapshot);
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
        ];
        let fields = self.fields(top, At(Place::Top), keys)?;
        let (Some(segments), Some(traces)) = (fields.get(Segments), fields.get(DeviceTraces))
        else {
            let what = "a dictionary without `segments` and `device_traces`".to_owned();
            return Err(ReadError::NotASnapshot(what));
        };
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
        if let Some(item) = fields.get(Memtrace) {
            self.snapshot.memtrace = self.value(item, Memtrace.text(), 0)?;
        }
        Ok(self.snapshot)
    }

    fn segments(&mut self, item: Item, key: Word, host: bool) -> Result<Vec<Segment>> {
        let items = self.list(item, || key.text().to_owned())?;
        let mut segments = Vec::new();
        for (i, &item) in items.iter().enumerate() {
            self.spend(key.text())?;
            segments.push(self.segment(item, i as u32, host)?);
        }
        Ok(segments)
    }

    fn segment(&mut self, item: Item, i: u32, host: bool) -> Result<Segment> {
        use Word::{
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
        let mut end = self.unsigned(&fields, Address)?;
        let items = self.list(fields.need(Blocks)?, || at.key(Blocks))?;
        for (j, &item) in items.iter().enumerate() {
            self.spend(Blocks.text())?;
            let place =
                if host { Place::HostBlock(i, j as u32) } else { Place::Block(i, j as u32) };
            let block = self.block(item, At(place), end)?;
            end = block.address.saturating_add(block.size);
            blocks.push(block);
        }
        if blocks.is_empty() && fields.get(RequestedSize).is_none() {
            return Err(ReadError::PyTorch20);
        }
        Ok(Segment {
            device: self.signed(&fields, Device)?,
            address: self.unsigned(&fields, Address)?,
            total_size: self.unsigned(&fields, TotalSize)?,
            allocated_size: self.unsigned(&fields, AllocatedSize)?,
            active_size: self.unsigned(&fields, ActiveSize)?,
            requested_size: self.unsigned(&fields, RequestedSize)?,
            stream: self.unsigned(&fields, Stream)?,
            small: match self.word(fields.need(SegmentType)?) {
                Some(Word::Small) => true,
                Some(Word::Large) => false,
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
        use Word::{Address, Frames, History, RequestedSize, Size, State};
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
        Ok(Block {
            address: match fields.get(Address) {
                Some(_) => self.unsigned(&fields, Address)?,
                None => after,
            },
            size: self.unsigned(&fields, Size)?,
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
        use Word::{
            Addr, CompileContext, DeviceFree, Frames, PoolId, Size, Stream, TimeUs, UserMetadata,
        };
        let keys = [
            Word::Action,
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
        let action = match fields.need(Word::Action)? {
            Item::Text(id) => Action::from_name(self.tree.text(id)),
            _ => return Err(self.wrong(&fields, Word::Action, "a string")),
        };
        let addr = if action == Action::Oom { DeviceFree } else { Addr };
        Ok(TraceEntry {
            addr: self.unsigned(&fields, addr)?,
            size: self.unsigned(&fields, Size)?,
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

    /// The stack under `frames`; an empty list is an empty stack.
    fn stack<const N: usize>(&mut self, fields: &Fields<N>) -> Result<Option<StackIx>> {
        let Some(item) = fields.get(Word::Frames) else { return Ok(None) };
        let place = || fields.at.key(Word::Frames);
        let Item::List(id) = item else { return Err(self.wrong(fields, Word::Frames, "a list")) };
        if let Some(ix) = self.stacks[id.0 as usize] {
            return Ok(Some(ix));
        }
        let mut frames = Vec::with_capacity(self.tree.list(id).len());
        for &item in self.tree.list(id) {
            frames.push(self.frame(item, place)?);
        }
        let all = &mut self.snapshot.stacks;
        let ix = *self.equal_stacks.entry(frames).or_insert_with_key(|frames| {
            all.push(frames.clone());
            all.len() as StackIx - 1
        });
        self.stacks[id.0 as usize] = Some(ix);
        Ok(Some(ix))
    }

    /// The stack of a block or segment, where an empty list says that there is none.
    fn live_stack<const N: usize>(&mut self, fields: &Fields<N>) -> Result<Option<StackIx>> {
        match fields.get(Word::Frames) {
            Some(Item::List(id)) if self.tree.list(id).is_empty() => Ok(None),
            _ => self.stack(fields),
        }
    }

    fn frame(&mut self, item: Item, place: impl Fn() -> String) -> Result<FrameIx> {
        use Word::{Filename, Line, Name};
        let Item::Dict(id) = item else {
            let what = format!("a frame is {}", self.tree.describe(item));
            return Err(shape(place(), what));
        };
        if let Some(ix) = self.frames[id.0 as usize] {
            return Ok(ix);
        }
        let ix = self.snapshot.frames.len() as FrameIx;
        let others = self.snapshot.other.len();
        let fields = self
            .fields(id, At(Place::Frame(ix)), [Name, Filename, Line])
            .map_err(|e| inside(e, &place))?;
        let frame = self.frame_fields(&fields).map_err(|e| inside(e, &place))?;
        // A frame with further keys is one of its own.
        let known = if self.snapshot.other.len() > others {
            ix
        } else {
            *self.equal_frames.entry(frame.clone()).or_insert(ix)
        };
        if known == ix {
            self.snapshot.frames.push(frame);
        }
        self.frames[id.0 as usize] = Some(known);
        Ok(known)
    }

    fn frame_fields(&self, fields: &Fields<3>) -> Result<Frame> {
        let text = |key| match fields.need(key)? {
            Item::Text(id) => Ok(self.tree.text(id).to_owned()),
            _ => Err(self.wrong(fields, key, "a string")),
        };
        let line = match fields.need(Word::Line)? {
            // What PyTorch writes for a line that Python doesn't know.
            Item::Int(-1) => u64::MAX,
            _ => self.unsigned(fields, Word::Line)?,
        };
        Ok(Frame { name: text(Word::Name)?, filename: text(Word::Filename)?, line })
    }

    /// Sorts a dictionary into the keys we know and the others, which are kept.
    fn fields<const N: usize>(&mut self, id: DictId, at: At, keys: [Word; N]) -> Result<Fields<N>> {
        let tree = self.tree;
        let mut fields = Fields { at, keys, values: [None; N] };
        for &(key, value) in tree.dict(id) {
            let Item::Text(text) = key else {
                let what = format!("a key is {}", tree.describe(key));
                return Err(shape(at.text(), what));
            };
            let known = self.words[text.0 as usize];
            match known.and_then(|word| keys.iter().position(|k| *k == word)) {
                Some(i) => fields.values[i] = Some(value),
                None => self.other(at, tree.text(text), value)?,
            }
        }
        Ok(fields)
    }

    fn other(&mut self, at: At, key: &str, value: Item) -> Result<()> {
        let value = self.value(value, key, 0)?;
        let others = &mut self.snapshot.other;
        let same = others.iter_mut().rev().take_while(|o| o.place == at.0).find(|o| o.key == key);
        match same {
            Some(twice) => twice.value = value,
            None => others.push(Other { place: at.0, key: key.to_owned(), value }),
        }
        Ok(())
    }

    fn value(&mut self, item: Item, place: &str, depth: u32) -> Result<Value> {
        let large = || shape(place, "nests too deep or shares too much");
        if depth > MAX_DEPTH {
            return Err(large());
        }
        self.values = self.values.checked_sub(1).ok_or_else(large)?;
        Ok(match item {
            Item::None => Value::Null,
            Item::Bool(b) => b.into(),
            Item::Int(n) => n.into(),
            Item::Large(n) => n.into(),
            Item::Float(x) => x.into(),
            Item::Text(id) => {
                let text = self.tree.text(id);
                self.values = self.values.checked_sub(text.len() / 16).ok_or_else(large)?;
                text.into()
            }
            Item::List(ListId(_)) | Item::Tuple(_) => {
                let mut items = Vec::new();
                for &item in self.list(item, || place.to_owned())? {
                    items.push(self.value(item, place, depth + 1)?);
                }
                Value::Array(items)
            }
            Item::Dict(id) => {
                let mut map = serde_json::Map::new();
                for &(key, value) in self.tree.dict(id) {
                    let Item::Text(text) = key else {
                        let what = format!("a key is {}", self.tree.describe(key));
                        return Err(shape(place, what));
                    };
                    let value = self.value(value, place, depth + 1)?;
                    map.insert(self.tree.text(text).to_owned(), value);
                }
                Value::Object(map)
            }
        })
    }

    fn spend(&mut self, place: &str) -> Result<()> {
        match self.budget.checked_sub(1) {
            Some(left) => self.budget = left,
            None => return Err(shape(place, "refers to the same things over and over")),
        }
        Ok(())
    }

    fn dict(&self, item: Item, at: At) -> Result<DictId> {
        match item {
            Item::Dict(id) => Ok(id),
            _ => Err(shape(at.text(), format!("{}, not a dictionary", self.tree.describe(item)))),
        }
    }

    fn word(&self, item: Item) -> Option<Word> {
        match item {
            Item::Text(id) => self.words[id.0 as usize],
            _ => None,
        }
    }

    fn text<const N: usize>(&self, fields: &Fields<N>, key: Word) -> Result<Option<Text>> {
        match fields.get(key) {
            None => Ok(None),
            Some(Item::Text(id)) => Ok(Some(self.tree.text(id).to_owned().into())),
            Some(_) => Err(self.wrong(fields, key, "a string")),
        }
    }

    fn unsigned<const N: usize>(&self, fields: &Fields<N>, key: Word) -> Result<u64> {
        match fields.need(key)? {
            Item::Int(n @ 0..) => Ok(n as u64),
            Item::Large(n) => Ok(n),
            _ => Err(self.wrong(fields, key, "a number of 0 or more")),
        }
    }

    fn signed<const N: usize>(&self, fields: &Fields<N>, key: Word) -> Result<i64> {
        match fields.need(key)? {
            Item::Int(n) => Ok(n),
            _ => Err(self.wrong(fields, key, "a 64-bit number")),
        }
    }

    /// Absent, `None`, or a pair.
    fn pool<const N: usize>(&self, fields: &Fields<N>, key: Word) -> Result<Option<PoolId>> {
        let pair = match fields.get(key) {
            None | Some(Item::None) => return Ok(None),
            Some(Item::Tuple(id) | Item::List(id)) => self.tree.list(id),
            Some(_) => &[],
        };
        match pair {
            [Item::Int(a @ 0..), Item::Int(b @ 0..)] => Ok(Some((*a as u64, *b as u64))),
            _ => Err(self.wrong(fields, key, "a pair of numbers")),
        }
    }

    fn wrong<const N: usize>(&self, fields: &Fields<N>, key: Word, wanted: &str) -> ReadError {
        let is = fields.get(key).map_or_else(|| "missing".to_owned(), |i| self.tree.describe(i));
        shape(fields.at.key(key), format!("{is}, not {wanted}"))
    }
}

/// An error in a frame, told from the list that holds it.
fn inside(error: ReadError, place: impl Fn() -> String) -> ReadError {
    match error {
        ReadError::Shape { place: frame, what } => {
            ReadError::Shape { place: format!("{}, {frame}", place()), what }
        }
        other => other,
    }
}

impl<'t> Decoder<'t> {
    fn list(&self, item: Item, place: impl Fn() -> String) -> Result<&'t [Item]> {
        match item {
            Item::List(id) | Item::Tuple(id) => Ok(self.tree.list(id)),
            _ => Err(shape(place(), format!("{}, not a list", self.tree.describe(item)))),
        }
    }
}
