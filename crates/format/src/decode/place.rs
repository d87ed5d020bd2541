//! Where in a snapshot the reader is: for messages that name the place.

use super::Result;
use crate::error::ReadError;
use crate::literals::Literal;
use crate::snapshot::Place;
use crate::tree::Item;

/// Where we are, for a message. Written out only when something is wrong.
#[derive(Clone, Copy)]
pub(super) struct At(pub(super) Place);

impl At {
    pub(super) fn text(self) -> String {
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

    pub(super) fn key(self, key: Literal) -> String {
        let place = self.text();
        if place.is_empty() { key.text().to_owned() } else { format!("{place}.{}", key.text()) }
    }
}

/// The values of a dictionary's known keys, in the order they were asked for.
pub(super) struct Fields<const N: usize> {
    pub(super) at: At,
    pub(super) keys: [Literal; N],
    pub(super) values: [Option<Item>; N],
}

impl<const N: usize> Fields<N> {
    pub(super) fn get(&self, key: Literal) -> Option<Item> {
        self.keys.iter().position(|k| *k == key).and_then(|i| self.values[i])
    }

    pub(super) fn need(&self, key: Literal) -> Result<Item> {
        self.get(key).ok_or_else(|| shape(self.at.key(key), "missing"))
    }
}

/// Something isn't as a snapshot has it.
pub(super) fn shape(place: impl Into<String>, what: impl Into<String>) -> ReadError {
    ReadError::Shape { place: place.into(), what: what.into() }
}
