//! The reader of pickles: protocols 2 to 5, Python's own output and that of PyTorch's C++ pickler.
//!
//! A pickle is a program for a small stack machine, and this one comes from anywhere. So only
//! opcodes that build plain data are known, and nothing is ever called or imported. Lengths
//! are checked against what is left before anything is reserved. The memo's numbers are
//! bounded by the file's length. What is built is counted against a budget ([`crate::tree`]).
//! Strings that Python could hold and Rust can't (lone surrogates, in names of files that are
//! not UTF-8) are read with a replacement character.

use super::op;
use crate::error::ReadError;
use crate::tree::{DictId, Item, ListId, OverBudget, TOO_LARGE, Tree};

/// A pickle that has been read.
#[derive(Clone, Debug)]
pub struct Pickle<'a> {
    /// What it holds.
    pub tree: Tree<'a>,
    /// How it was written.
    pub facts: Facts,
}

/// What matters to PyTorch's viewer, whose reader takes less than Python's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The protocol that the file names.
    pub protocol: u8,
    /// The largest number of items in one APPENDS, and the byte where it is.
    pub largest_batch: (usize, usize),
    /// The first opcode that the viewer doesn't know, and the byte where it is.
    pub unknown_to_viewer: Option<(u8, usize)>,
    /// Both MEMOIZE and BINPUT are used; the viewer numbers them apart.
    pub mixed_memo: bool,
    /// Where the pickle ends.
    pub length: usize,
}

/// Reads a pickle of plain data.
///
/// # Errors
/// [`ReadError::Pickle`] with the byte where the file stops making sense,
/// [`ReadError::NotASnapshot`] if it doesn't begin as a pickle of protocol 2 or later.
pub fn read(bytes: &[u8]) -> Result<Pickle<'_>, ReadError> {
    read_within(bytes, usize::MAX)
}

/// As [`read`], in so many bytes of memory.
pub(crate) fn read_within(bytes: &[u8], memory: usize) -> Result<Pickle<'_>, ReadError> {
    if bytes.first() != Some(&op::PROTO) {
        let what = "the file begins neither as a pickle (protocol 2 to 5) nor as JSON";
        return Err(ReadError::NotASnapshot(what.to_owned()));
    }
    let mut machine = Machine {
        bytes,
        at: 0,
        op_at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        memoized: 0,
        used: (false, false),
        tree: Tree::new(bytes.len(), memory),
        facts: Facts::default(),
    };
    match machine.run() {
        Ok(root) => {
            machine.tree.root = root;
            machine.facts.mixed_memo = machine.used == (true, true);
            machine.facts.length = machine.at;
            Ok(Pickle { tree: machine.tree, facts: machine.facts })
        }
        Err(Wrong(what)) if what == TOO_LARGE => Err(ReadError::TooLarge),
        Err(Wrong(what)) => Err(ReadError::Pickle { offset: machine.op_at, what }),
    }
}

/// What is wrong at the current opcode.
struct Wrong(String);

impl From<OverBudget> for Wrong {
    fn from(over_budget: OverBudget) -> Self {
        Wrong(over_budget.text().to_owned())
    }
}

fn wrong<T>(what: &str) -> Result<T, Wrong> {
    Err(Wrong(what.to_owned()))
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the current opcode is.
    op_at: usize,
    stack: Vec<Item>,
    /// Heights of the stack at each MARK.
    marks: Vec<u32>,
    memo: Vec<Option<Item>>,
    /// How many numbers of the memo are taken.
    memoized: usize,
    /// MEMOIZE has been seen, BINPUT has been seen.
    used: (bool, bool),
    tree: Tree<'a>,
    facts: Facts,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Item, Wrong> {
        loop {
            self.op_at = self.at;
            let opcode = self.byte()?;
            match opcode {
                op::STOP => return self.pop(),
                op::PROTO => self.protocol()?,
                op::FRAME => {
                    let length = self.length::<8>()?;
                    if length > self.bytes.len() - self.at {
                        return wrong("a frame is longer than the rest of the file (cut off?)");
                    }
                }
                op::MARK => self.marks.push(self.stack.len() as u32),
                op::POP | op::POP_MARK | op::DUP => self.juggle(opcode)?,
                op::NONE => self.push(Item::None)?,
                op::NEWTRUE => self.push(Item::Bool(true))?,
                op::NEWFALSE => self.push(Item::Bool(false))?,
                op::BININT1 | op::BININT2 | op::BININT | op::LONG1 | op::LONG4 => {
                    let n = self.integer(opcode)?;
                    self.push(n)?;
                }
                op::BINFLOAT => {
                    let x = f64::from_be_bytes(self.take()?);
                    self.push(Item::Float(x))?;
                }
                op::SHORT_BINUNICODE => self.text::<1>()?,
                op::BINUNICODE => self.text::<4>()?,
                op::BINUNICODE8 => {
                    self.no_viewer(opcode);
                    self.text::<8>()?;
                }
                op::EMPTY_LIST | op::LIST | op::EMPTY_DICT | op::DICT => self.container(opcode)?,
                op::EMPTY_TUPLE | op::TUPLE1 | op::TUPLE2 | op::TUPLE3 | op::TUPLE => {
                    self.tuple(opcode)?;
                }
                op::APPEND | op::APPENDS => self.append(opcode)?,
                op::SETITEM | op::SETITEMS => self.set_items(opcode)?,
                op::MEMOIZE | op::BINPUT | op::LONG_BINPUT => self.put(opcode)?,
                op::BINGET | op::LONG_BINGET => {
                    let number = self.memo_number(opcode == op::BINGET)?;
                    match self.memo.get(number).copied().flatten() {
                        Some(item) => self.push(item)?,
                        None => return Err(Wrong(format!("memo number {number} was never set"))),
                    }
                }
                op::GLOBAL | op::STACK_GLOBAL => return Err(self.no_classes(opcode)),
                _ => return Err(Wrong(format!("opcode 0x{opcode:02x} builds no plain data"))),
            }
        }
    }

    fn protocol(&mut self) -> Result<(), Wrong> {
        match self.byte()? {
            protocol @ 2..=5 => self.facts.protocol = protocol,
            other => return Err(Wrong(format!("pickle protocol {other}; 2 to 5 are known"))),
        }
        Ok(())
    }

    /// Opcodes that Python's own pickler doesn't write for plain data.
    fn juggle(&mut self, opcode: u8) -> Result<(), Wrong> {
        self.no_viewer(opcode);
        match opcode {
            op::POP_MARK => drop(self.above_mark()?),
            op::DUP => {
                let top = self.top()?;
                self.push(top)?;
            }
            _ => drop(self.pop()?),
        }
        Ok(())
    }

    fn integer(&mut self, opcode: u8) -> Result<Item, Wrong> {
        Ok(Item::Int(match opcode {
            op::BININT1 => self.byte()?.into(),
            op::BININT2 => u16::from_le_bytes(self.take()?).into(),
            op::BININT => i32::from_le_bytes(self.take()?).into(),
            _ => {
                let length = if opcode == op::LONG1 {
                    self.byte()? as usize
                } else {
                    self.no_viewer(opcode);
                    self.length::<4>()?
                };
                return self.long(length);
            }
        }))
    }

    /// A little-endian two's complement number of any length.
    fn long(&mut self, length: usize) -> Result<Item, Wrong> {
        let bytes = self.slice(length)?;
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut low = [if negative { 0xff } else { 0 }; 16];
        let Some(low_bytes) = low.get_mut(..length) else {
            return Err(Wrong(format!("an integer of {length} bytes")));
        };
        low_bytes.copy_from_slice(bytes);
        let n = i128::from_le_bytes(low);
        match (i64::try_from(n), u64::try_from(n)) {
            (Ok(n), _) => Ok(Item::Int(n)),
            (_, Ok(n)) => Ok(Item::Large(n)),
            _ => Err(Wrong(format!("the integer {n} does not fit 64 bits"))),
        }
    }

    fn text<const WIDTH: usize>(&mut self) -> Result<(), Wrong> {
        let length = self.length::<WIDTH>()?;
        let text = String::from_utf8_lossy(self.slice(length)?);
        let id = self.tree.intern(text)?;
        self.push(Item::Text(id))
    }

    fn container(&mut self, opcode: u8) -> Result<(), Wrong> {
        let item = match opcode {
            op::EMPTY_LIST => Item::List(self.tree.add_list(Vec::new())?),
            op::EMPTY_DICT => Item::Dict(self.tree.add_dict(Vec::new())?),
            op::LIST => {
                let items = self.above_mark()?;
                Item::List(self.tree.add_list(items)?)
            }
            _ => {
                let pairs = pairs(&self.above_mark()?)?;
                Item::Dict(self.tree.add_dict(pairs)?)
            }
        };
        self.push(item)
    }

    fn tuple(&mut self, opcode: u8) -> Result<(), Wrong> {
        let items = match opcode {
            op::EMPTY_TUPLE => Vec::new(),
            op::TUPLE => self.above_mark()?,
            _ => {
                let length = (opcode - op::TUPLE1) as usize + 1;
                let from = self.floor(length)?;
                self.stack.split_off(from)
            }
        };
        let id = self.tree.add_list(items)?;
        self.push(Item::Tuple(id))
    }

    fn append(&mut self, opcode: u8) -> Result<(), Wrong> {
        let items = if opcode == op::APPEND { vec![self.pop()?] } else { self.above_mark()? };
        if items.len() > self.facts.largest_batch.0 {
            self.facts.largest_batch = (items.len(), self.op_at);
        }
        let Item::List(ListId(id)) = self.top()? else {
            return wrong("items are appended to what is no list");
        };
        self.tree.spend(items.len())?;
        self.tree.lists[id as usize].extend(items);
        Ok(())
    }

    fn set_items(&mut self, opcode: u8) -> Result<(), Wrong> {
        let items = if opcode == op::SETITEM {
            let from = self.floor(2)?;
            self.stack.split_off(from)
        } else {
            self.above_mark()?
        };
        let Item::Dict(DictId(id)) = self.top()? else {
            return wrong("keys are set in what is no dictionary");
        };
        self.tree.spend(items.len())?;
        self.tree.dicts[id as usize].extend(pairs(&items)?);
        Ok(())
    }

    fn put(&mut self, opcode: u8) -> Result<(), Wrong> {
        let number = if opcode == op::MEMOIZE {
            self.used.0 = true;
            self.memoized
        } else {
            self.used.1 = true;
            self.memo_number(opcode == op::BINPUT)?
        };
        let item = self.top()?;
        if number >= self.room() {
            return Err(Wrong(format!("memo number {number} in a file this short")));
        }
        self.tree.has_room_for(self.stack.len() + number)?;
        if number >= self.memo.len() {
            self.memo.resize(number + 1, None);
        }
        if self.memo[number].replace(item).is_none() {
            self.memoized += 1;
        }
        Ok(())
    }

    fn memo_number(&mut self, short: bool) -> Result<usize, Wrong> {
        if short { Ok(self.byte()? as usize) } else { self.length::<4>() }
    }

    fn no_viewer(&mut self, opcode: u8) {
        self.facts.unknown_to_viewer.get_or_insert((opcode, self.op_at));
    }

    /// Names the class that the pickle wants to make.
    fn no_classes(&mut self, opcode: u8) -> Wrong {
        let name = if opcode == op::GLOBAL {
            let rest = &self.bytes[self.at..];
            let mut lines = rest.split(|b| *b == b'\n').map(|l| &l[..l.len().min(80)]);
            let mut line = || String::from_utf8_lossy(lines.next().unwrap_or_default());
            format!("{}.{}", line(), line())
        } else {
            let mut part = || match self.pop() {
                Ok(Item::Text(id)) => self.tree.text(id).chars().take(80).collect(),
                _ => String::new(),
            };
            let name: String = part();
            format!("{}.{name}", part())
        };
        Wrong(format!(
            "it asks for {name}; a snapshot is plain data (pickle what torch.cuda.memory._snapshot() returns)"
        ))
    }

    fn byte(&mut self) -> Result<u8, Wrong> {
        let [byte] = self.take()?;
        Ok(byte)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(N)?);
        Ok(array)
    }

    fn length<const WIDTH: usize>(&mut self) -> Result<usize, Wrong> {
        let mut wide = [0; 8];
        wide[..WIDTH].copy_from_slice(self.slice(WIDTH)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| Wrong("an absurd length".to_owned()))
    }

    fn slice(&mut self, length: usize) -> Result<&'a [u8], Wrong> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else { return wrong("the file ends here, too early (cut off?)") };
        let slice = &self.bytes[self.at..end];
        self.at = end;
        Ok(slice)
    }

    fn push(&mut self, item: Item) -> Result<(), Wrong> {
        if self.stack.len() >= self.room() {
            return Err(OverBudget::ForItsLength.into());
        }
        // Whatever is on the stack is paid for when it is put into something.
        self.tree.has_room_for(self.stack.len() + self.memo.len())?;
        self.stack.push(item);
        Ok(())
    }

    /// How high the stack may be and how many numbers the memo may have. In a valid file, what is
    /// pushed or numbered takes at least two bytes.
    fn room(&self) -> usize {
        4096 + self.bytes.len() / 2
    }

    /// Where the topmost `length` items begin, none of them below the last mark.
    fn floor(&self, length: usize) -> Result<usize, Wrong> {
        let mark = self.marks.last().map_or(0, |m| *m as usize);
        match self.stack.len().checked_sub(length) {
            Some(from) if from >= mark => Ok(from),
            _ => wrong("the stack is empty"),
        }
    }

    fn pop(&mut self) -> Result<Item, Wrong> {
        self.floor(1)?;
        self.stack.pop().ok_or_else(|| Wrong("the stack is empty".to_owned()))
    }

    fn top(&self) -> Result<Item, Wrong> {
        let from = self.floor(1)?;
        Ok(self.stack[from])
    }

    fn above_mark(&mut self) -> Result<Vec<Item>, Wrong> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark as usize)),
            None => wrong("a batch ends that never began"),
        }
    }
}

fn pairs(items: &[Item]) -> Result<Vec<(Item, Item)>, Wrong> {
    let (pairs, []) = items.as_chunks::<2>() else { return wrong("a key without a value") };
    Ok(pairs.iter().map(|[k, v]| (*k, *v)).collect())
}
