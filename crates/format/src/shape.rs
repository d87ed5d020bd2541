//! The order in which a snapshot is written, once for all encodings.
//!
//! PyTorch 2.15's keys in PyTorch's order. A trace comes where its key does, unless the encoding
//! has been given its entries before and keeps them aside ([`Encoder::trace_again`]). Two of
//! PyTorch's habits look odd and are kept: `frames` of a segment comes before `blocks` when
//! empty and after them when not. And a trace entry without a stack has no `frames` key while
//! a block without one has an empty list.
//!
//! This runs inside the traced process, on the background thread. It reads the model and streams.
//! It must not panic on a model that contradicts itself: an index that names nothing is an error.
//! It refuses an integer of 2^63 or more, because the viewer's reader can't take one.

mod value;

use std::collections::HashMap;
use std::io;

use serde::Serialize;

use crate::literals::Literal;
use crate::snapshot::{
    Action, Block, BlockState, Frame, FrameIx, NO_LINE, Other, Place, PoolId, Segment, Snapshot,
    StackIx, Tables, Trace, TraceEntry, Value,
};

/// What an encoding can say. Calls nest as the data does: `item` before each element of a list,
/// `key` or `other_key` before each value of a dictionary.
pub(crate) trait Encoder {
    fn begin_dict(&mut self) -> io::Result<()>;
    fn end_dict(&mut self) -> io::Result<()>;
    fn begin_list(&mut self) -> io::Result<()>;
    fn end_list(&mut self) -> io::Result<()>;
    fn item(&mut self) -> io::Result<()>;
    fn key(&mut self, key: Literal) -> io::Result<()>;
    fn other_key(&mut self, key: &str) -> io::Result<()>;
    fn literal(&mut self, literal: Literal) -> io::Result<()>;
    fn text(&mut self, text: &str) -> io::Result<()>;
    fn int(&mut self, n: i64) -> io::Result<()>;
    fn float(&mut self, x: f64) -> io::Result<()>;
    fn bool(&mut self, b: bool) -> io::Result<()>;
    fn null(&mut self) -> io::Result<()>;
    fn pool(&mut self, id: PoolId) -> io::Result<()>;
    /// Stacks and frames are in tables at the end of the snapshot, and are referred to by number.
    fn has_tables(&self) -> bool {
        false
    }
    /// `true` if this stack was written before, or will be, and has now been referred to.
    fn stack_again(&mut self, stack: StackIx) -> bool;
    /// The stack that the next `begin_list` opens, so that it can be referred to.
    fn stack_begins(&mut self, stack: StackIx);
    /// `true` if this frame was written before and has now been referred to.
    fn frame_again(&mut self, frame: FrameIx) -> bool;
    /// The frame that the next `begin_dict` opens.
    fn frame_begins(&mut self, frame: FrameIx);
    /// Writes the trace whose entries came before everything else; `false` if there is none.
    fn trace_again(&mut self, of: Trace) -> io::Result<bool>;
    /// Devices that such traces are about are below this.
    fn devices(&self) -> usize;
}

/// Writes the whole snapshot into the dictionary that is open, and closes
/// it. `tables` is where its stacks are.
pub(crate) fn write<E: Encoder>(
    snapshot: &Snapshot,
    tables: Tables<'_>,
    out: &mut E,
) -> io::Result<()> {
    Writer { tables, others: others_by_place(&snapshot.other), out }.snapshot(snapshot)
}

/// Writes one entry, as an element of the list that is open.
pub(crate) fn write_entry<E: Encoder>(
    entry: &TraceEntry,
    tables: Tables<'_>,
    out: &mut E,
) -> io::Result<()> {
    out.item()?;
    Writer { tables, others: Others::new(), out }.entry(entry, Place::Top)
}

type Others<'a> = HashMap<Place, Vec<&'a Other>>;

fn others_by_place(other: &[Other]) -> Others<'_> {
    let mut map = Others::new();
    for o in other {
        map.entry(o.place).or_default().push(o);
    }
    map
}

struct Writer<'a, 'e, E> {
    tables: Tables<'a>,
    others: Others<'a>,
    out: &'e mut E,
}

impl<E: Encoder> Writer<'_, '_, E> {
    fn snapshot(&mut self, s: &Snapshot) -> io::Result<()> {
        self.out.key(Literal::Segments)?;
        self.segments(&s.segments, Place::Segment, Place::Block)?;
        self.out.key(Literal::DeviceTraces)?;
        self.out.begin_list()?;
        for d in 0..s.device_traces.len().max(self.out.devices()) {
            self.out.item()?;
            if !self.out.trace_again(Trace::Device(d))? {
                let trace = s.device_traces.get(d).map_or(&[][..], Vec::as_slice);
                self.trace(trace, |i| Place::Entry(d as u32, i))?;
            }
        }
        self.out.end_list()?;
        if s.allocator_settings != Value::Null {
            self.out.key(Literal::AllocatorSettings)?;
            self.value(&s.allocator_settings)?;
        }
        if !s.absent.external_annotations {
            self.out.key(Literal::ExternalAnnotations)?;
            self.value(&s.external_annotations)?;
        }
        if !s.absent.host_segments {
            self.out.key(Literal::HostSegments)?;
            self.segments(&s.host_segments, Place::HostSegment, Place::HostBlock)?;
        }
        if !s.absent.host_traces {
            self.out.key(Literal::HostTraces)?;
            if !self.out.trace_again(Trace::Host)? {
                self.trace(&s.host_traces, Place::HostEntry)?;
            }
        }
        self.other(Place::Top)?;
        if let Some(memtrace) = &s.memtrace {
            self.out.key(Literal::Memtrace)?;
            self.value(&**memtrace)?;
        }
        if self.out.has_tables() {
            self.tables()?;
        }
        self.out.end_dict()
    }

    fn tables(&mut self) -> io::Result<()> {
        self.out.key(Literal::Stacks)?;
        self.out.begin_list()?;
        for stack in self.tables.stacks {
            self.out.item()?;
            self.out.begin_list()?;
            for frame in stack {
                self.out.item()?;
                self.out.int((*frame).into())?;
            }
            self.out.end_list()?;
        }
        self.out.end_list()?;
        self.out.key(Literal::Frames)?;
        self.out.begin_list()?;
        for ix in 0..self.tables.frames.len() {
            self.out.item()?;
            self.frame(ix as FrameIx)?;
        }
        self.out.end_list()
    }

    fn segments(
        &mut self,
        segments: &[Segment],
        segment_place: fn(u32) -> Place,
        block_place: fn(u32, u32) -> Place,
    ) -> io::Result<()> {
        self.out.begin_list()?;
        for (i, segment) in segments.iter().enumerate() {
            self.out.item()?;
            self.out.begin_dict()?;
            self.signed(Literal::Device, segment.device)?;
            self.int(Literal::Address, segment.address)?;
            self.int(Literal::TotalSize, segment.total_size)?;
            self.int(Literal::AllocatedSize, segment.allocated_size)?;
            self.int(Literal::ActiveSize, segment.active_size)?;
            self.int(Literal::RequestedSize, segment.requested_size)?;
            self.int(Literal::Stream, segment.stream)?;
            self.out.key(Literal::SegmentType)?;
            self.out.literal(if segment.small { Literal::Small } else { Literal::Large })?;
            self.out.key(Literal::SegmentPoolId)?;
            self.pool(segment.pool_id)?;
            self.out.key(Literal::IsExpandable)?;
            self.out.bool(segment.is_expandable)?;
            if segment.frames.is_none() {
                self.frames(None)?;
            }
            self.out.key(Literal::Blocks)?;
            self.out.begin_list()?;
            for (j, block) in segment.blocks.iter().enumerate() {
                self.out.item()?;
                self.block(block, block_place(i as u32, j as u32))?;
            }
            self.out.end_list()?;
            if segment.frames.is_some() {
                self.frames(segment.frames)?;
            }
            self.other(segment_place(i as u32))?;
            self.out.end_dict()?;
        }
        self.out.end_list()
    }

    fn block(&mut self, block: &Block, place: Place) -> io::Result<()> {
        self.out.begin_dict()?;
        self.int(Literal::Address, block.address)?;
        self.int(Literal::Size, block.size)?;
        self.int(Literal::RequestedSize, block.requested_size)?;
        self.out.key(Literal::State)?;
        self.out.literal(match block.state {
            BlockState::ActiveAllocated => Literal::ActiveAllocated,
            BlockState::ActivePendingFree => Literal::ActivePendingFree,
            BlockState::Inactive => Literal::Inactive,
        })?;
        self.frames(block.frames)?;
        self.other(place)?;
        self.out.end_dict()
    }

    fn trace(&mut self, trace: &[TraceEntry], place: impl Fn(u32) -> Place) -> io::Result<()> {
        self.out.begin_list()?;
        for (i, entry) in trace.iter().enumerate() {
            self.out.item()?;
            self.entry(entry, place(i as u32))?;
        }
        self.out.end_list()
    }

    fn entry(&mut self, entry: &TraceEntry, place: Place) -> io::Result<()> {
        self.out.begin_dict()?;
        self.out.key(Literal::Action)?;
        match &entry.action {
            Action::Alloc => self.out.literal(Literal::Alloc)?,
            Action::FreeRequested => self.out.literal(Literal::FreeRequested)?,
            Action::FreeCompleted => self.out.literal(Literal::FreeCompleted)?,
            Action::SegmentAlloc => self.out.literal(Literal::SegmentAlloc)?,
            Action::SegmentFree => self.out.literal(Literal::SegmentFree)?,
            Action::SegmentMap => self.out.literal(Literal::SegmentMap)?,
            Action::SegmentUnmap => self.out.literal(Literal::SegmentUnmap)?,
            Action::Snapshot => self.out.literal(Literal::SnapshotTaken)?,
            Action::Oom => self.out.literal(Literal::Oom)?,
            Action::Other(name) => self.out.text(name)?,
        }
        let addr = if entry.action == Action::Oom { Literal::DeviceFree } else { Literal::Addr };
        self.int(addr, entry.addr)?;
        self.int(Literal::Size, entry.size)?;
        self.int(Literal::Stream, entry.stream)?;
        if let Some(time) = entry.time_us {
            self.signed(Literal::TimeUs, time)?;
        }
        self.optional_text(Literal::CompileContext, entry.compile_context.as_deref())?;
        self.optional_text(Literal::UserMetadata, entry.user_metadata.as_deref())?;
        if let Some(id) = entry.pool_id {
            self.out.key(Literal::PoolId)?;
            self.pool(id)?;
        }
        if entry.frames.is_some() {
            self.frames(entry.frames)?;
        }
        self.other(place)?;
        self.out.end_dict()
    }

    fn frames(&mut self, stack: Option<StackIx>) -> io::Result<()> {
        self.out.key(Literal::Frames)?;
        let Some(ix) = stack else {
            self.out.begin_list()?;
            return self.out.end_list();
        };
        let stack = named(self.tables.stacks, ix, "stack")?;
        if self.out.stack_again(ix) {
            return Ok(());
        }
        self.out.stack_begins(ix);
        self.out.begin_list()?;
        for &frame in stack {
            self.out.item()?;
            if !self.out.frame_again(frame) {
                self.frame(frame)?;
            }
        }
        self.out.end_list()
    }

    fn frame(&mut self, ix: FrameIx) -> io::Result<()> {
        let Frame { name, filename, line } = named(self.tables.frames, ix, "frame")?;
        self.out.frame_begins(ix);
        self.out.begin_dict()?;
        self.out.key(Literal::Name)?;
        self.out.text(name)?;
        self.out.key(Literal::Filename)?;
        self.out.text(filename)?;
        if *line == NO_LINE {
            self.signed(Literal::Line, -1)?;
        } else {
            self.int(Literal::Line, *line)?;
        }
        self.other(Place::Frame(ix))?;
        self.out.end_dict()
    }

    fn int(&mut self, key: Literal, n: u64) -> io::Result<()> {
        self.out.key(key)?;
        self.out.int(signed(n).ok_or_else(|| too_large(key.text(), n))?)
    }

    fn signed(&mut self, key: Literal, n: i64) -> io::Result<()> {
        self.out.key(key)?;
        self.out.int(n)
    }

    fn pool(&mut self, id: PoolId) -> io::Result<()> {
        for n in [id.0, id.1] {
            signed(n).ok_or_else(|| too_large("pool id", n))?;
        }
        self.out.pool(id)
    }

    fn optional_text(&mut self, key: Literal, text: Option<&str>) -> io::Result<()> {
        let Some(text) = text else { return Ok(()) };
        self.out.key(key)?;
        match text {
            "" => self.out.literal(Literal::Empty),
            "N/A" => self.out.literal(Literal::NotCompiled),
            _ => self.out.text(text),
        }
    }

    fn other(&mut self, place: Place) -> io::Result<()> {
        if self.others.is_empty() {
            return Ok(());
        }
        for o in self.others.get(&place).cloned().unwrap_or_default() {
            self.out.other_key(&o.key)?;
            self.value(&o.value)?;
        }
        Ok(())
    }

    fn value(&mut self, value: &impl Serialize) -> io::Result<()> {
        value::write(value, &mut *self.out)
    }
}

fn named<'a, T>(all: &'a [T], ix: u32, what: &str) -> io::Result<&'a T> {
    all.get(ix as usize).ok_or_else(|| invalid(format!("{what} {ix} of {}", all.len())))
}

fn signed(n: u64) -> Option<i64> {
    i64::try_from(n).ok()
}

fn too_large(what: &str, n: u64) -> io::Error {
    invalid(format!("{what} is {n}; PyTorch's viewer can't read an integer of 2^63 or more"))
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
