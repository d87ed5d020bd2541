//! What the program says it is doing: names of ranges, as a tree.
//!
//! A label is a name inside another label, or inside nothing. Its id is the position of its record
//! in the black box's region of labels, as for code objects and libraries ([`crate::stacks`]). An
//! event carries the id of the label that its thread was in. So a range costs nothing per event,
//! and a killed process leaves the names behind.

use crate::event::{LABEL_BITS, LabelId, NO_LABEL};
use crate::numbered::numbered;
use crate::stacks::{Words, bytes, record};

/// First word of a region of labels; the last digit is the version of its layout.
pub const LABEL_MAGIC: u64 = u64::from_le_bytes(*b"mtlabel1");
/// Words of the region: some 25,000 labels.
pub const LABEL_WORDS: usize = 1 << 17;
/// Words of a record before its name: length, parent and kind, and the name's bytes. The high
/// half of the last is the writer's own.
pub const LABEL_FIXED: usize = 3;
/// No label is deeper: a damaged region can't lead a reader in a circle.
pub const DEEPEST: usize = 64;
/// What is between the names of a path.
pub const SEPARATOR: &str = "/";

const _: () = assert!(LABEL_WORDS <= 1 << LABEL_BITS);

numbered! {
    /// What a label is the name of.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum LabelKind {
        /// A range that the program named.
        #[default]
        Range = 0,
        /// A phase of training: forward, backward, optimizer step.
        Phase = 1,
        /// A module, by its full name.
        Module = 2,
        /// An operator.
        Operator = 3,
    }
}

/// The second word of a record.
pub fn pack_parent(parent: LabelId, kind: LabelKind) -> u64 {
    u64::from(parent) | (kind as u64) << 32
}

/// A label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelRecord {
    /// What it is inside of.
    pub parent: LabelId,
    /// What it is the name of.
    pub kind: LabelKind,
    /// Its own name.
    pub name: String,
}

/// The label with this id.
pub fn label<W: Words + ?Sized>(region: &W, id: LabelId) -> Option<LabelRecord> {
    let at = id as usize;
    let head = record(region, LABEL_MAGIC, at, LABEL_FIXED)?;
    let (link, length) = (region.word(at + 1), region.word(at + 2) as u32 as usize);
    let [name] = bytes(region, at, LABEL_FIXED, head, [length])?;
    Some(LabelRecord {
        parent: link as u32,
        kind: LabelKind::from_u8((link >> 32) as u8).unwrap_or_default(),
        name: String::from_utf8_lossy(&name).into_owned(),
    })
}

/// The names from the outermost to the label itself; `None` if the id names nothing.
pub fn path<W: Words + ?Sized>(region: &W, id: LabelId) -> Option<String> {
    let mut names = Vec::new();
    let mut next = id;
    while next != NO_LABEL && names.len() < DEEPEST {
        let record = label(region, next)?;
        names.push(record.name);
        next = record.parent;
    }
    if names.is_empty() {
        return None;
    }
    names.reverse();
    Some(names.join(SEPARATOR))
}
