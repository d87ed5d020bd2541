//! A snapshot as a pickle that every reader takes: Python's, and the small one inside PyTorch's viewer.
//!
//! Rules from the viewer: protocol 4; only opcodes it knows; at most 1,000 items an APPENDS, because it
//! spreads them as arguments of a call; MEMOIZE and never BINPUT, because it counts the two apart.
//!
//! What makes the file small is the memo. A frame, a stack, a pool and a string are written once and referred
//! to by number, and a number below 256 takes two bytes where a larger one takes five. A trace entry names
//! nine keys, and by the time the first entry comes, the frames of the segments have taken the small
//! numbers. So the words of the format come before everything else: the key `segments` is first set to a
//! tuple of them, and then set again to the segments. A dictionary keeps the last value and the first
//! position, in Python as in JavaScript. An entry then takes 58 bytes, however many stacks there are.

use std::collections::HashMap;
use std::io::{self, Write};

use super::op;
use crate::out::Out;
use crate::shape::{self, Encoder};
use crate::snapshot::{FrameIx, PoolId, Snapshot, StackIx};
use crate::words::Word;

/// Most items in one APPENDS or SETITEMS.
pub(super) const BATCH: u32 = 1000;

/// The pool of nearly every entry; it gets a small number too.
const DEFAULT_POOL: PoolId = (0, 0);

/// Not in the memo yet.
const NEW: u32 = u32::MAX;

/// Writes a snapshot as a pickle of protocol 4.
///
/// # Errors
/// Those of `out`, and [`io::ErrorKind::InvalidData`] for what no viewer could read: an integer of 2^63 or
/// more, an index that names no frame or stack.
pub fn write(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut pickler = Pickler {
        out: Out::new(out),
        counts: Vec::new(),
        memo: 0,
        texts: HashMap::new(),
        pools: HashMap::new(),
        frames: vec![NEW; snapshot.frames.len()],
        stacks: vec![NEW; snapshot.stacks.len()],
        next_list: None,
        next_dict: None,
        words_written: false,
    };
    pickler.out.put(&[op::PROTO, 4]);
    shape::write(snapshot, &mut pickler)?;
    pickler.out.byte(op::STOP);
    pickler.out.finish()
}

struct Pickler<'a, W> {
    out: Out<W>,
    /// Elements so far of each list and dictionary that is open.
    counts: Vec<u32>,
    /// How many things are in the memo.
    memo: u32,
    texts: HashMap<&'a str, u32>,
    pools: HashMap<PoolId, u32>,
    frames: Vec<u32>,
    stacks: Vec<u32>,
    next_list: Option<StackIx>,
    next_dict: Option<FrameIx>,
    words_written: bool,
}

impl<W: Write> Pickler<'_, W> {
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

    /// Sets `segments` to a tuple of all words, see the top of this file.
    fn words(&mut self) -> io::Result<()> {
        self.new_text(Word::Segments.text())?;
        self.out.byte(op::MARK);
        for word in &Word::ALL[1..] {
            self.new_text(word.text())?;
        }
        self.pool(DEFAULT_POOL)?;
        self.out.put(&[op::TUPLE, op::SETITEM]);
        self.words_written = true;
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

impl<'a, W: Write> Encoder<'a> for Pickler<'a, W> {
    fn begin_dict(&mut self) -> io::Result<()> {
        self.out.byte(op::EMPTY_DICT);
        if let Some(frame) = self.next_dict.take() {
            self.frames[frame as usize] = self.memoize();
        }
        if !self.words_written {
            self.words()?;
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
            self.stacks[stack as usize] = self.memoize();
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

    fn key(&mut self, key: Word) -> io::Result<()> {
        self.element(op::SETITEMS);
        self.word(key)
    }

    fn other_key(&mut self, key: &'a str) -> io::Result<()> {
        self.element(op::SETITEMS);
        self.text(key)
    }

    fn word(&mut self, word: Word) -> io::Result<()> {
        self.out.put(&[op::BINGET, word as u8]);
        Ok(())
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
        if let Some(&number) = self.texts.get(text) {
            self.get(number);
            return Ok(());
        }
        let number = self.new_text(text)?;
        self.texts.insert(text, number);
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
        let known = self.stacks.get(stack as usize).copied().filter(|n| *n != NEW);
        known.inspect(|n| self.get(*n)).is_some()
    }

    fn stack_begins(&mut self, stack: StackIx) {
        self.next_list = Some(stack);
    }

    fn frame_again(&mut self, frame: FrameIx) -> bool {
        let known = self.frames.get(frame as usize).copied().filter(|n| *n != NEW);
        known.inspect(|n| self.get(*n)).is_some()
    }

    fn frame_begins(&mut self, frame: FrameIx) {
        self.next_dict = Some(frame);
    }
}
