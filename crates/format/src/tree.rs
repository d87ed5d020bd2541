//! What a snapshot file says, before anybody has asked whether it is a
//! snapshot: plain data with sharing.
//!
//! A pickle is a graph. Its nodes are in three arenas and are named by number. So a list that
//! contains itself is no danger, and freeing a tower of a million lists needs no stack. Two entries
//! with the same stack are seen to have the same stack. JSON is read into the same shape.
//!
//! The file is not trusted. Whoever builds a tree counts what it costs ([`Tree::spend`])
//! against the length of the input and against what the caller allows. So memory stays
//! within a small multiple of the file.

use std::borrow::Cow;
use std::collections::HashMap;

/// Number of a string in its tree. Equal strings have equal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TextId(pub(crate) u32);

/// Number of a list or tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListId(pub(crate) u32);

/// Number of a dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DictId(pub(crate) u32);

/// One value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Item {
    /// Python's `None`, JSON's `null`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer that fits.
    Int(i64),
    /// An integer of 2^63 or more.
    Large(u64),
    /// A float.
    Float(f64),
    /// A string.
    Text(TextId),
    /// A list.
    List(ListId),
    /// A tuple.
    Tuple(ListId),
    /// A dictionary.
    Dict(DictId),
}

/// A value and everything it refers to.
#[derive(Clone, Debug)]
pub struct Tree<'a> {
    pub(crate) root: Item,
    texts: Vec<Cow<'a, str>>,
    numbers: HashMap<Cow<'a, str>, TextId>,
    pub(crate) lists: Vec<Vec<Item>>,
    pub(crate) dicts: Vec<Vec<(Item, Item)>>,
    /// Cells that may still be made, see [`Tree::spend`].
    budget: usize,
    /// What a higher limit of memory would change.
    over_budget: OverBudget,
}

/// The input asks for too much memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OverBudget {
    /// More than a file of its length has reason to.
    ForItsLength,
    /// More than is allowed.
    ForTheLimit,
}

impl OverBudget {
    /// In words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            OverBudget::ForItsLength => "it builds far more than a file of its length needs to",
            OverBudget::ForTheLimit => TOO_LARGE,
        }
    }
}

/// What a reader says where a higher limit would help.
pub(crate) const TOO_LARGE: &str = "it takes more memory than may be used for it";

/// Bytes of a cell.
pub(crate) const CELL: usize = 16;

impl<'a> Tree<'a> {
    /// An empty tree for an input of so many bytes, which may take `memory` bytes. A cell is 16
    /// bytes of memory. A real snapshot makes about one for three bytes of its file: a key and its
    /// value are two cells and four bytes or more. So one for each byte is generous.
    pub(crate) fn new(input_bytes: usize, memory: usize) -> Self {
        let (generous, allowed) = (4096 + input_bytes, memory / CELL);
        Tree {
            root: Item::None,
            texts: Vec::new(),
            numbers: HashMap::new(),
            lists: Vec::new(),
            dicts: Vec::new(),
            budget: generous.min(allowed),
            over_budget: if allowed < generous {
                OverBudget::ForTheLimit
            } else {
                OverBudget::ForItsLength
            },
        }
    }

    /// Accounts for `cells` of 16 bytes.
    pub(crate) fn spend(&mut self, cells: usize) -> Result<(), OverBudget> {
        self.budget = self.budget.checked_sub(cells).ok_or(self.over_budget)?;
        Ok(())
    }

    /// Checks what stands elsewhere until it is added here, and is paid for then.
    pub(crate) fn has_room_for(&self, cells: usize) -> Result<(), OverBudget> {
        if cells > self.budget { Err(self.over_budget) } else { Ok(()) }
    }

    /// The number of a string.
    pub(crate) fn intern(&mut self, text: Cow<'a, str>) -> Result<TextId, OverBudget> {
        if let Some(id) = self.numbers.get(&text) {
            return Ok(*id);
        }
        self.spend(if matches!(text, Cow::Owned(_)) { 3 + text.len() / 16 } else { 3 })?;
        let id = TextId(self.texts.len() as u32);
        self.texts.push(text.clone());
        self.numbers.insert(text, id);
        Ok(id)
    }

    pub(crate) fn add_list(&mut self, items: Vec<Item>) -> Result<ListId, OverBudget> {
        self.spend(items.len())?;
        self.add_paid_list(items)
    }

    /// A list whose elements were paid for one by one.
    pub(crate) fn add_paid_list(&mut self, items: Vec<Item>) -> Result<ListId, OverBudget> {
        self.spend(2)?;
        self.lists.push(items);
        Ok(ListId(self.lists.len() as u32 - 1))
    }

    pub(crate) fn add_dict(&mut self, pairs: Vec<(Item, Item)>) -> Result<DictId, OverBudget> {
        self.spend(2 * pairs.len())?;
        self.add_paid_dict(pairs)
    }

    /// A dictionary whose pairs were paid for one by one.
    pub(crate) fn add_paid_dict(&mut self, pairs: Vec<(Item, Item)>) -> Result<DictId, OverBudget> {
        self.spend(2)?;
        self.dicts.push(pairs);
        Ok(DictId(self.dicts.len() as u32 - 1))
    }

    /// The outermost value.
    pub fn root(&self) -> Item {
        self.root
    }

    /// A string.
    pub fn text(&self, id: TextId) -> &str {
        &self.texts[id.0 as usize]
    }

    /// The elements of a list or tuple.
    pub fn list(&self, id: ListId) -> &[Item] {
        &self.lists[id.0 as usize]
    }

    /// The keys and values of a dictionary, as written: of a key that
    /// comes twice, the last one counts.
    pub fn dict(&self, id: DictId) -> &[(Item, Item)] {
        &self.dicts[id.0 as usize]
    }

    /// All strings, by number.
    pub(crate) fn texts(&self) -> &[Cow<'a, str>] {
        &self.texts
    }

    /// A value in words, for a message: short, whatever it is.
    pub fn describe(&self, item: Item) -> String {
        match item {
            Item::None => "None".to_owned(),
            Item::Bool(b) => (if b { "True" } else { "False" }).to_owned(),
            Item::Int(n) => n.to_string(),
            Item::Large(n) => n.to_string(),
            Item::Float(x) => x.to_string(),
            Item::Text(id) => {
                let text = self.text(id);
                let short: String = text.chars().take(40).collect();
                if short.len() < text.len() {
                    format!("{short:?}…")
                } else {
                    format!("{short:?}")
                }
            }
            Item::List(id) => format!("a list of {}", self.list(id).len()),
            Item::Tuple(id) => format!("a tuple of {}", self.list(id).len()),
            Item::Dict(id) => format!("a dictionary of {}", self.dict(id).len()),
        }
    }
}
