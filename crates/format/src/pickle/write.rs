//! A snapshot as a pickle that every reader takes: Python's, and the small
//! one inside PyTorch's viewer.
//!
//! Rules from the viewer: protocol 4, and only opcodes that it knows. An APPENDS has at most 1,000
//! items, because the viewer spreads them as arguments of a call. MEMOIZE is used and never BINPUT,
//! because the viewer counts the two apart.
//!
//! What makes the file small is the memo. A frame, a stack, a pool and a string are written once
//! and referred to by number. A number below 256 takes two bytes where a larger one takes five. A
//! trace entry names nine keys, and by the time the first entry comes, the frames of the segments
//! have taken the small numbers. So the strings of the format come before everything else: the key
//! `segments` is first set to a tuple of them, and then set again to the segments. A dictionary
//! keeps the last value and the first position, in Python as in JavaScript. An entry then takes 58
//! bytes, however many stacks there are.
//!
//! The same key is what a [`Stream`] hangs its lists on. A history is longer than memory allows to
//! keep, and its entries are known before the segments that precede them. So each list is made and
//! numbered in the memo first. It is filled a batch at a time, in turn with the others, as the
//! passing value of `segments`. When the dictionary is written at last, it refers to the lists.

use std::collections::HashMap;
use std::io::{self, Write};

use super::op;
use crate::literals::Literal;
use crate::out::Out;
use crate::shape::{self, Encoder};
use crate::snapshot::{FrameIx, PoolId, Snapshot, StackIx, Tables, Trace, TraceEntry};

/// Most items in one APPENDS or SETITEMS.
pub(super) const BATCH: u32 = 1000;

/// The pool of nearly every entry; it gets a small number too.
const DEFAULT_POOL: PoolId = (0, 0);

/// Not in the memo yet.
const NEW: u32 = u32::MAX;

/// Writes a snapshot as a pickle of protocol 4.
///
/// # Errors
/// Those of `out`, and [`io::ErrorKind::InvalidData`] for what no viewer could read. That is an
/// integer of 2^63 or more, or an index that names no frame or stack.
pub fn write(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut pickler = Pickler::begin(out)?;
    shape::write(snapshot, snapshot.tables(), &mut pickler)?;
    pickler.finish()
}

/// A pickle that is written as its history comes.
pub struct Stream<W> {
    pickler: Pickler<W>,
    /// Entries that make no full batch yet, for each list (see [`list`]).
    waiting: Vec<Vec<TraceEntry>>,
}

impl<W: Write> Stream<W> {
    /// An empty one.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(out: W) -> io::Result<Stream<W>> {
        Ok(Stream { pickler: Pickler::begin(out)?, waiting: Vec::new() })
    }

    /// The next entry of a trace; its stack is one of `tables`.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn entry(&mut self, of: Trace, entry: TraceEntry, tables: Tables<'_>) -> io::Result<()> {
        let list = list(of);
        if self.waiting.len() <= list {
            self.waiting.resize_with(list + 1, Vec::new);
        }
        let waiting = &mut self.waiting[list];
        waiting.push(entry);
        if waiting.len() >= BATCH as usize {
            self.pickler.batch(list, waiting, tables)?;
            waiting.clear();
        }
        Ok(())
    }

    /// Everything else: `rest` without its frames, stacks and traces. Of devices
    /// without an entry it holds empty traces.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn finish(mut self, rest: &Snapshot, tables: Tables<'_>) -> io::Result<()> {
        for (list, waiting) in self.waiting.iter().enumerate() {
            if !waiting.is_empty() {
                self.pickler.batch(list, waiting, tables)?;
            }
        }
        shape::write(rest, tables, &mut self.pickler)?;
        self.pickler.finish()
    }
}

/// The number of a trace among the lists of a stream.
fn list(of: Trace) -> usize {
    match of {
        Trace::Host => 0,
        Trace::Device(d) => d + 1,
    }
}

struct Pickler<W> {
    out: Out<W>,
    /// Elements so far of each list and dictionary that is open.
    counts: Vec<u32>,
    /// How many things are in the memo.
    memo: u32,
    texts: HashMap<Box<str>, u32>,
    pools: HashMap<PoolId, u32>,
    frames: Vec<u32>,
    stacks: Vec<u32>,
    /// A stream's lists.
    lists: Vec<u32>,
    next_list: Option<StackIx>,
    next_dict: Option<FrameIx>,
}

/// Notes a memo number under an index.
fn note(numbers: &mut Vec<u32>, ix: u32, number: u32) {
    let ix = ix as usize;
    if numbers.len() <= ix {
        numbers.resize(ix + 1, NEW);
    }
    numbers[ix] = number;
}

/// The memo number noted under an index.
fn noted(numbers: &[u32], ix: u32) -> Option<u32> {
    numbers.get(ix as usize).copied().filter(|n| *n != NEW)
}

impl<W: Write> Pickler<W> {
    /// Opens the dictionary.
    fn begin(out: W) -> io::Result<Pickler<W>> {
        let mut pickler = Pickler {
            out: Out::new(out),
            counts: Vec::new(),
            memo: 0,
            texts: HashMap::new(),
            pools: HashMap::new(),
            frames: Vec::new(),
            stacks: Vec::new(),
            lists: Vec::new(),
            next_list: None,
            next_dict: None,
        };
        pickler.out.put(&[op::PROTO, 4, op::EMPTY_DICT]);
        pickler.literals()?;
        pickler.counts.push(0);
        Ok(pickler)
    }

    fn finish(mut self) -> io::Result<()> {
        self.out.byte(op::STOP);
        self.out.finish()
    }

    /// Appends entries to a stream's list, see the top of this file.
    fn batch(&mut self, list: usize, entries: &[TraceEntry], tables: Tables<'_>) -> io::Result<()> {
        self.literal(Literal::Segments)?;
        if let Some(number) = noted(&self.lists, list as u32) {
            self.get(number);
        } else {
            self.out.byte(op::EMPTY_LIST);
            let number = self.memoize();
            note(&mut self.lists, list as u32, number);
        }
        self.counts.push(0);
        for entry in entries {
            shape::write_entry(entry, tables, self)?;
        }
        self.end_list()?;
        self.out.byte(op::SETITEM);
        Ok(())
    }

    fn memoize(&mut self) -> u32 {
        self.out.byte(op::MEMOIZE);
        self.memo += 1;
        self.memo - 1
    }

    fn get(&mut self, number: u32) {
        if let Ok(n) = u8::try_from(number) {
            self.out.put(&[op::BINGET, n]);
        } else {
            self.out.byte(op::LONG_BINGET);
            self.out.put(&number.to_le_bytes());
        }
    }

    /// Sets `segments` to a tuple of all literals, see the top of this file.
    fn literals(&mut self) -> io::Result<()> {
        self.new_text(Literal::Segments.text())?;
        self.out.byte(op::MARK);
        for literal in &Literal::ALL[1..] {
            self.new_text(literal.text())?;
        }
        self.pool(DEFAULT_POOL)?;
        self.out.put(&[op::TUPLE, op::SETITEM]);
        Ok(())
    }

    fn new_text(&mut self, text: &str) -> io::Result<u32> {
        if let Ok(n) = u8::try_from(text.len()) {
            self.out.put(&[op::SHORT_BINUNICODE, n]);
        } else {
            let n = u32::try_from(text.len()).map_err(|_| {
                io::Error::new(io::ErrorKind::InvalidData, "a string of 4 GiB or more")
            })?;
            self.out.byte(op::BINUNICODE);
            self.out.put(&n.to_le_bytes());
        }
        self.out.put_long(text.as_bytes())?;
        Ok(self.memoize())
    }

    /// One more element of what is open: a new batch where the last one is full.
    fn element(&mut self, end_of_batch: u8) {
        let Some(count) = self.counts.last_mut() else { return };
        if *count == BATCH {
            self.out.byte(end_of_batch);
            *count = 0;
        }
        if *count == 0 {
            self.out.byte(op::MARK);
        }
        *count += 1;
    }

    fn end(&mut self, end_of_batch: u8) {
        if self.counts.pop().is_some_and(|count| count > 0) {
            self.out.byte(end_of_batch);
        }
    }
}

impl<W: Write> Encoder for Pickler<W> {
    fn begin_dict(&mut self) -> io::Result<()> {
        self.out.byte(op::EMPTY_DICT);
        if let Some(frame) = self.next_dict.take() {
            let number = self.memoize();
            note(&mut self.frames, frame, number);
        }
        self.counts.push(0);
        Ok(())
    }

    fn end_dict(&mut self) -> io::Result<()> {
        self.end(op::SETITEMS);
        Ok(())
    }

    fn begin_list(&mut self) -> io::Result<()> {
        self.out.byte(op::EMPTY_LIST);
        if let Some(stack) = self.next_list.take() {
            let number = self.memoize();
            note(&mut self.stacks, stack, number);
        }
        self.counts.push(0);
        Ok(())
    }

    fn end_list(&mut self) -> io::Result<()> {
        self.end(op::APPENDS);
        Ok(())
    }

    fn item(&mut self) -> io::Result<()> {
        self.element(op::APPENDS);
        self.out.breathe()
    }

    fn key(&mut self, key: Literal) -> io::Result<()> {
        self.element(op::SETITEMS);
        self.literal(key)
    }

    fn other_key(&mut self, key: &str) -> io::Result<()> {
        self.element(op::SETITEMS);
        self.text(key)
    }

    fn literal(&mut self, literal: Literal) -> io::Result<()> {
        self.out.put(&[op::BINGET, literal as u8]);
        Ok(())
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(&number) = self.texts.get(text) {
            self.get(number);
            return Ok(());
        }
        let number = self.new_text(text)?;
        self.texts.insert(text.into(), number);
        Ok(())
    }

    fn int(&mut self, n: i64) -> io::Result<()> {
        if let Ok(n) = u8::try_from(n) {
            self.out.put(&[op::BININT1, n]);
        } else if let Ok(n) = u16::try_from(n) {
            self.out.byte(op::BININT2);
            self.out.put(&n.to_le_bytes());
        } else if let Ok(n) = i32::try_from(n) {
            self.out.byte(op::BININT);
            self.out.put(&n.to_le_bytes());
        } else {
            // As few bytes as hold the number and its sign.
            let bits = 65 - if n < 0 { n.leading_ones() } else { n.leading_zeros() };
            let length = bits.div_ceil(8) as usize;
            self.out.put(&[op::LONG1, length as u8]);
            self.out.put(&n.to_le_bytes()[..length]);
        }
        Ok(())
    }

    fn float(&mut self, x: f64) -> io::Result<()> {
        self.out.byte(op::BINFLOAT);
        self.out.put(&x.to_be_bytes());
        Ok(())
    }

    fn bool(&mut self, b: bool) -> io::Result<()> {
        self.out.byte(if b { op::NEWTRUE } else { op::NEWFALSE });
        Ok(())
    }

    fn null(&mut self) -> io::Result<()> {
        self.out.byte(op::NONE);
        Ok(())
    }

    fn pool(&mut self, id: PoolId) -> io::Result<()> {
        if let Some(&number) = self.pools.get(&id) {
            self.get(number);
            return Ok(());
        }
        for n in [id.0, id.1] {
            self.int(n as i64)?;
        }
        self.out.byte(op::TUPLE2);
        let number = self.memoize();
        self.pools.insert(id, number);
        Ok(())
    }

    fn stack_again(&mut self, stack: StackIx) -> bool {
        let known = noted(&self.stacks, stack);
        known.inspect(|n| self.get(*n)).is_some()
    }

    fn stack_begins(&mut self, stack: StackIx) {
        self.next_list = Some(stack);
    }

    fn frame_again(&mut self, frame: FrameIx) -> bool {
        let known = noted(&self.frames, frame);
        known.inspect(|n| self.get(*n)).is_some()
    }

    fn frame_begins(&mut self, frame: FrameIx) {
        self.next_dict = Some(frame);
    }
    fn trace_again(&mut self, of: Trace) -> io::Result<bool> {
        let known = noted(&self.lists, list(of) as u32);
        Ok(known.inspect(|n| self.get(*n)).is_some())
    }

    fn devices(&self) -> usize {
        self.lists.len().saturating_sub(1)
    }
}
