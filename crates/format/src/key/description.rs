//! What a black box says of its process. It is the key as far as it is known when recording begins,
//! and two things that only the box's reader needs.

use serde_json::Value;

use super::{Memtrace, Part};

/// In the box.
const ENTRY_POINTS: &str = "entry_points";
const OUT: &str = "out";

/// See the module's documentation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// What the snapshots say, too.
    pub memtrace: Memtrace,
    /// The functions that events name by number.
    pub entry_points: Vec<String>,
    /// The folder for snapshots, if its name is text.
    pub out: Option<String>,
}

impl Description {
    /// From the text in a box; `None` if it is damaged.
    pub fn read(text: &[u8]) -> Option<Description> {
        let Value::Object(mut map) = serde_json::from_slice(text).ok()? else { return None };
        // A name that is damaged takes no other's number.
        let name = |name: Value| match name {
            Value::String(name) => name,
            _ => "unknown".to_owned(),
        };
        let entry_points = map.shift_remove(ENTRY_POINTS).and_then(|names| match names {
            Value::Array(names) => Some(names.into_iter().map(name).collect()),
            _ => None,
        });
        let out = map.shift_remove(OUT).filter(String::fits).map(String::take);
        let memtrace = Memtrace::take(Value::Object(map));
        Some(Description { memtrace, entry_points: entry_points.unwrap_or_default(), out })
    }

    /// The text.
    pub fn to_text(&self) -> String {
        let mut all = serde_json::to_value(&self.memtrace).unwrap_or_default();
        all[ENTRY_POINTS] = self.entry_points.as_slice().into();
        all[OUT] = self.out.as_deref().into();
        all.to_string()
    }
}
